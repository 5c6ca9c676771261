//! The attention worker: the hot path of Tandem and all sequence state, generic over the device (`Backend`) and over the way to the
//! routed experts (`Hop`).
//!
//! | module | idea |
//! |---|---|
//! | [`service`] | the process: joins, loads, attaches, drains ([`run`]) |
//! | [`engine`] | requests and their sequences, one step at a time, on a thread of its own |
//! | [`scheduler`] | who runs in the next step: a pure state machine |
//! | [`model`] | [`Model`] and [`Runner`]: the library-level entry |
//! | [`step`], [`micro_batch`] | the trunk, written once over `Backend` and `Hop`; a step's rows as one micro-batch or two |
//! | [`layers`], [`weights`], [`local`] | blocks, their weights, shards hosted here |
//! | [`hop`] | rows to expert workers and back, combined in ascending shard id |
//! | [`memory`] | what a worker needs of its device, before it allocates |
//! | [`state`] | slots and pages: snapshot, restore, fork |
//! | [`cache`] | the prefix cache: a prompt goes on from what was computed before |
//! | [`sampler`], [`rng`] | how tokens are chosen |
//! | [`guide`] | what an answer is held to: masks, computed beside the layers |
//! | [`observe`] | a look into the layers, for parity tests |
//! | [`telemetry`], [`config`], [`error`], [`cancel`], [`buffers`], [`dims`] | what their names say |

#![forbid(unsafe_code)]

pub mod buffers;
pub mod cache;
pub mod cancel;
pub mod config;
pub mod dims;
pub mod engine;
pub mod error;
pub mod guide;
pub mod hop;
pub mod layers;
pub mod local;
pub mod memory;
pub mod micro_batch;
pub mod model;
pub mod observe;
pub mod rng;
pub mod sampler;
pub mod scheduler;
pub mod service;
pub mod state;
pub mod step;
pub mod telemetry;
pub mod weights;

pub use config::Config;
pub use error::Error;
pub use model::{Model, Runner, RunnerLimits};
pub use service::run;
