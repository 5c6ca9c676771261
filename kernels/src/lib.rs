//! The maths of GLM-5.3-Flash: every op as a slow, obvious reference, then fast variants with a named tolerance, behind one trait.
//!
//! | module | idea |
//! |---|---|
//! | [`backend`] | the [`Backend`] trait: what the step loop may ask of a device |
//!
//! This crate knows nothing of processes, networks or files: no tokio, no tonic (checked by CI).

pub mod backend;

pub use backend::*;
