//! The routed experts: a bank of weights, batching of rows, grouped FFN, and the worker process around them.
//!
//! | module | idea |
//! |---|---|
//! | [`service`] | the process: join, load what the coordinator gives, serve, drain |
//! | [`batcher`] | joins the rows of several connections per layer and shard |
//! | [`exec`] | [`ShardEngine`]: a loaded shard that computes additive partials; the attention worker uses it in-process, too |
//! | [`bank`] | the slices of the experts that a shard owns → one backend bank per layer, with progress |
//! | [`status`] | what the coordinator hears with each heartbeat |
//! | [`config`], [`error`], [`telemetry`], [`identity`] | settings, failures, metrics, who this process is |
//! | [`memory`] | what a worker needs of its device, before it allocates |
//! | [`fault`] | deliberate faults for tests |
//!
//! Everything here is stateless maths over resident weights: a dispatch may be repeated anywhere at any time and gives the same partial.

#![forbid(unsafe_code)]

pub mod bank;
pub mod batcher;
pub mod config;
pub mod error;
pub mod exec;
pub mod fault;
pub mod identity;
pub mod lending;
pub mod memory;
pub mod service;
pub mod status;
pub mod telemetry;

pub use bank::{LoadProgress, load_layer};
pub use batcher::Batcher;
pub use config::Config;
pub use error::Error;
pub use exec::ShardEngine;
pub use lending::Lending;
pub use service::run;
