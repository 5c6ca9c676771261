//! The coordinator: HTTP, text, admission, order, membership and the journal of running requests. It holds no weights and links no
//! kernel; it never sits inside a token's loop.
//!
//! | module | idea |
//! |---|---|
//! | [`api`] | OpenAI-style HTTP over [`engine::Engine`] |
//! | [`text`] | chat template, tokenizer, incremental detokenizer, stop strings |
//! | [`config`] | [`Config`]: everything that `tandem serve` can be told |
//! | [`engine`] | the seam between the two halves: requests in token ids in, events out |
//! | [`scheduler`] | waiting → running → ended: a pure state machine |
//! | [`journal`] | what a client has been sent: how a request outlives its worker |
#![forbid(unsafe_code)]

pub mod api;
pub mod config;
pub mod engine;
pub mod journal;
pub mod scheduler;
pub mod text;

pub use config::{Config, PlanInputs};

#[cfg(test)]
mod datadriven;
