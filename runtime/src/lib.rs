//! What every role does alike: configuration layers, logs, metrics, health, admin endpoints, signals, drain.
//!
//! | module | what |
//! |---|---|
//! | [`config`] | flags > `TANDEM_*` environment > TOML file > defaults, each value with its origin |
//! | [`logs`] | `tracing` to stderr, text or JSON, with `role` and `request_id` |
//! | [`metrics`] | the Prometheus recorder, with explicit buckets for every histogram |
//! | [`health`] | latches and pulses that make up `/readyz` and `/livez` |
//! | [`admin`] | the small HTTP server of a worker: `/livez /readyz /metrics /version` |
//! | [`shutdown`], [`signals`] | first signal drains, second stops |
//! | [`supervised`] | a child ends when the `tandem up` that started it is gone |
//! | [`process`] | process names, and who holds a port |
//! | [`memory`] | what this process may still use, control groups counted |
//! | [`exit`] | exit codes |

#![forbid(unsafe_code)]

pub mod admin;
pub mod config;
pub mod exit;
pub mod health;
pub mod logs;
pub mod memory;
pub mod metrics;
pub mod process;
pub mod shutdown;
pub mod signals;
pub mod supervised;

pub use health::{Health, Latch};
pub use shutdown::Shutdown;
