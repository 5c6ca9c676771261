//! Harness of the whole-cluster tests: real `tandem` processes on loopback, real checkpoints, plain HTTP.
//!
//! | module | idea |
//! |---|---|
//! | [`cluster`] | starts `tandem up` (or its roles apart), finds its processes, stops it and sees that nothing is left |
//! | [`client`] | JSON and SSE requests |
//! | [`golden`] | reference outputs of the HF implementation (`tests/fixtures/gold`) |
//! | [`checkpoints`] | the small checkpoints, generated once per machine from their hash generator |
//! | [`parity`] | golden parity measured from outside |
//! | [`disturb`] | a stream whose workers are killed on the way |
//! | [`sse`] | the framing that every stream must keep |
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test harness fails by panicking")]

pub mod checkpoints;
pub mod client;
pub mod cluster;
pub mod disturb;
pub mod golden;
pub mod parity;
pub mod sse;

pub use client::Client;
pub use cluster::{Cluster, Launch};
