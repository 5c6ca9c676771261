//! The coordinator: HTTP, text, admission, order, membership and the journal of running requests. It holds no weights and links no
//! kernel; it never sits inside a token's loop.
//!
//! | module | idea |
//! |---|---|
//! | [`run()`] | one coordinator from start to exit |
//! | [`config`] | [`Config`]: everything that `tandem serve` can be told |
//! | [`api`] | OpenAI-style HTTP over [`engine::Engine`]; `loading` answers before the checkpoint is open, `parts` puts it together |
//! | [`text`] | chat template, tokenizer, incremental detokenizer, stop strings |
//! | [`engine`] | the seam between the two halves: requests in token ids in, events out |
//! | `instance` | the whole behind that seam: phase, warm-up, readiness |
//! | `core` | the scheduler at work: its actions to the workers' streams and the clients |
//! | [`scheduler`] | waiting → running → ended: a pure state machine |
//! | [`journal`] | what a client has been sent: how a request outlives its worker |
//! | `cluster` | membership at work: workers' streams, route table, metrics |
//! | [`membership`] | joins, leases, shard assignment, route table, readiness: a pure state machine |
//! | `services` | control.v1 and attn.v1: what workers dial |
//! | [`stats`] | what the instance is doing now, for `/v1/stats` |
//! | [`telemetry`] | metrics: `tandem_*` and vLLM's names |
#![forbid(unsafe_code)]

pub mod api;
mod cluster;
pub mod config;
mod core;
pub mod engine;
mod instance;
pub mod journal;
mod loading;
pub mod membership;
mod parts;
mod run;
pub mod scheduler;
mod services;
pub mod stats;
pub mod telemetry;
pub mod text;

pub use config::{Config, PlanInputs};
pub use run::{Coordinator, Error, run};

#[cfg(test)]
mod datadriven;
#[cfg(test)]
mod tests;
