//! What the instance is doing now, for people and tools: `/v1/stats`, the status page and `tandem ctl`. Filled by `instance.rs` from the
//! scheduler, the clients and the membership; a picture of one moment, nothing in it is kept.

use serde::Serialize;

use crate::engine::{Limits, Readiness};

/// The whole instance.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Stats {
    /// Of the coordinator's build.
    pub version: &'static str,
    /// Whether a token can be made now, and if not, why.
    #[serde(flatten)]
    pub readiness: Readiness,
    /// Seconds since the coordinator's start.
    pub uptime_seconds: f64,
    /// Where workers and `tandem ctl drain` dial in.
    pub control_addr: Option<String>,
    /// What one request may ask for; zeros before an attention worker has joined.
    pub limits: Limits,
    /// Requests.
    pub requests: Requests,
    /// Tokens since the coordinator's start.
    pub tokens: Tokens,
    /// Live workers, by name.
    pub workers: Vec<Worker>,
    /// Who computes what.
    pub shards: Vec<Shard>,
}

/// Requests that are not over.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Requests {
    /// In the queue, or sent to a worker that has not begun with them.
    pub waiting: usize,
    /// In a worker's batch.
    pub running: usize,
    /// Each of them, the oldest first.
    pub list: Vec<Request>,
}

/// One request (a choice of an API request).
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Request {
    /// As in `X-Request-Id`.
    pub id: String,
    /// How far it is.
    pub phase: Phase,
    /// Tokens of its prompt.
    pub prompt_tokens: usize,
    /// Tokens sent to its client.
    pub generated_tokens: usize,
    /// Most tokens that it may generate.
    pub max_tokens: u32,
    /// Seconds since it was admitted.
    pub age_seconds: f64,
    /// Submissions to workers so far: more than one after the loss of a worker.
    pub attempts: u32,
}

/// How far a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// No worker has begun with it.
    Waiting,
    /// Its prompt is being computed.
    Prefill,
    /// It gets tokens.
    Decode,
}

/// Tokens since the coordinator's start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Tokens {
    /// Of prompts whose first token has come.
    pub prompt: u64,
    /// Sent to clients.
    pub generated: u64,
}

/// A live worker.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Worker {
    /// Unique in the instance.
    pub name: String,
    /// `attn` or `experts`.
    pub role: &'static str,
    /// `loading`, `ready` or `draining`.
    pub state: &'static str,
    /// What a loading worker is doing.
    pub phase: String,
    /// Bytes of weights loaded, of all.
    pub loaded_bytes: u64,
    /// Bytes of weights to load.
    pub total_bytes: u64,
    /// The device.
    pub device: String,
    /// Name of its arithmetic.
    pub arithmetic: String,
    /// Process id on its host.
    pub pid: u32,
    /// Of its build.
    pub version: String,
    /// Where expert workers serve, as `link://addr`.
    pub addresses: Vec<String>,
    /// Seconds since its last heartbeat.
    pub heartbeat_age_seconds: f64,
    /// Share of the last second or so that its device was busy; `None` before two heartbeats.
    pub busy: Option<f64>,
    /// Attention worker: sequences that hold state.
    pub running: u32,
    /// Attention worker: sequences that wait.
    pub waiting: u32,
    /// Attention worker: token places in use.
    pub kv_tokens_used: u64,
    /// Attention worker: token places in all.
    pub kv_tokens_total: u64,
    /// Expert rows computed, or tokens stepped, since its start.
    pub rows: u64,
    /// Ids of the shards that it holds or has to hold.
    pub shards: Vec<u32>,
    /// Attention worker: its links to expert workers.
    pub links: Vec<Link>,
    /// Attention worker: how long each layer lately waited for remote partials after its own work was done.
    pub layer_waits: Vec<LayerWait>,
}

/// A link from an attention worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Link {
    /// To whom.
    pub worker: String,
    /// Over what.
    pub link: String,
    /// Where.
    pub addr: String,
}

/// The wait of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct LayerWait {
    /// Which layer.
    pub layer: u32,
    /// Moving average over steps.
    pub milliseconds: f32,
}

/// A shard and its holders.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Shard {
    /// Its id.
    pub id: u32,
    /// What it is, as `--shard` writes it.
    pub what: String,
    /// Who holds it, in order of preference.
    pub holders: Vec<Holder>,
}

/// A holder of a shard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Holder {
    /// Its name.
    pub worker: String,
    /// Whether its weights are loaded.
    pub ready: bool,
    /// Whether it is the attention worker itself.
    pub local: bool,
}
