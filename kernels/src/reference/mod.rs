//! Every formula of the model as a slow, obvious function over f32 or f64, and [`ReferenceBackend`], the trait written on them.
//!
//! | file | formula |
//! |---|---|
//! | [`real`] | the number type |
//! | [`norm`], [`linear`] | norms, softmax, scalar curves; matrix products |
//! | [`order`] | ranking with ties by lowest index |
//! | [`mhc`] | hyper-connections: gates, read, post, mean |
//! | [`kda`], [`kda_chunk`] | Kimi delta attention token by token, and a chunk at once |
//! | [`mla`] | latent attention over chosen rows, with k and v made, and absorbed |
//! | [`indexer`] | pooled keys, scores, selection |
//! | [`router`], [`ffn`] | choice of experts; gated MLP and a shard's partial |
//! | [`sample`] | penalties, cuts, draw, log-probabilities |
//! | `store`, `backend`, `stateful` | memory of the backend; the trait; its ops with sequence state |
//!
//! These functions are the meaning of the ops: a fast variant is right where it agrees with them in f64 within its named tolerance
//! (`conformance`). They assume shapes that fit; [`ReferenceBackend`] checks buffer sizes before it calls them.

pub mod ffn;
pub mod indexer;
pub mod kda;
pub mod kda_chunk;
pub mod linear;
pub mod mhc;
pub mod mla;
pub mod norm;
pub mod order;
pub mod real;
pub mod router;
pub mod sample;

mod backend;
mod stateful;
mod store;

pub use backend::ReferenceBackend;
pub use real::Real;
pub use store::{Bank, Buf, Matrix, State};
