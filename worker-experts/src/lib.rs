//! The routed experts: a bank of weights, batching of rows, grouped FFN.
//!
//! | module | idea |
//! |---|---|
//! | [`bank`] | the slices of the experts that a shard owns → one backend bank per layer, with progress |
//! | [`exec`] | [`ShardEngine`]: a loaded shard that computes additive partials; the attention worker uses it in-process, too |
//! | [`error`] | what can go wrong, in words |
//!
//! Everything here is stateless maths over resident weights: a dispatch may be repeated anywhere at any time and gives the same partial.

pub mod bank;
pub mod error;
pub mod exec;

pub use bank::{LoadProgress, load_layer};
pub use error::Error;
pub use exec::ShardEngine;
