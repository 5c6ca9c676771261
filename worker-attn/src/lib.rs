//! The attention worker: the hot path of Tandem and all sequence state, generic over the device (`Backend`) and over the way to the
//! routed experts (`Hop`).

#![forbid(unsafe_code)]

pub mod buffers;
pub mod cancel;
pub mod dims;
pub mod engine;
pub mod hop;
pub mod layers;
pub mod local;
pub mod model;
pub mod observe;
pub mod rng;
pub mod sampler;
pub mod scheduler;
pub mod state;
pub mod step;
pub mod telemetry;
pub mod weights;

pub use model::{Model, Runner, RunnerLimits};
