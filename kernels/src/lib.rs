//! The maths of GLM-5.3-Flash: every op as a slow, obvious reference, then fast variants with a named tolerance, behind one trait.
//!
//! | module | idea |
//! |---|---|
//! | [`backend`] | the [`Backend`] trait: what the step loop may ask of a device |
//! | [`cuda`] | the backend for NVIDIA GPUs: kernels of `kernels/cuda`, opened at run time |
//! | [`cpu`] | the backend for this machine's cores: vectors by run-time detection, a thread pool |
//! | [`mod@conformance`] | one suite for every backend, against the reference in f64 |
//! | [`support`] | which stored types each kind of device computes with |
//! | [`mod@reference`] | every formula, slow and obvious, in f32 and f64; the reference backend |
//!
//! This crate knows nothing of processes, networks or files: no tokio, no tonic (checked by CI).

pub mod backend;
pub mod conformance;
pub mod cpu;
pub mod cuda;
pub mod reference;
pub mod support;

pub use backend::*;
pub use support::{DeviceKind, StateBytes, expert_scratch_bytes, has_kernels, scratch_bytes, state_bytes, weight_bytes};
