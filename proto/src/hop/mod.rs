//! The expert hop: rows of one MoE layer go out to the workers that hold its shards and come back as additive partials.
//!
//! * attention side: [`HostHop`] (`host.rs`), driven by the step thread;
//! * expert side: [`ExpertListener`] and [`ExpertServer`] (`server.rs`) around an [`ExpertEngine`];
//! * both: the handshake of a data link (`handshake.rs`).
//!
//! `docs/wire.md` describes what is on the wire, and what is retried when.

use std::time::Duration;

pub use engine::{Dispatch, ExpertEngine, Partial};
pub use handshake::HandshakeError;
pub use host::{Arrived, HopLink, HopTimings, HostHop, Ticket};
pub use server::{ExpertListener, ExpertServer, ServerOptions, ServerStats};
pub use shared::{Lease, Lender, Lent, SharedMemory, SharedRows};

use crate::link::LinkChoice;
use crate::payload::Precision;

#[cfg(test)]
mod conformance;
mod engine;
mod gather;
mod handshake;
mod host;
mod outbox;
mod server;
mod shared;

/// Submissions of up to this many rows are *latency* class (decode): they overtake bulk pieces on the link and on the worker, and
/// use no credits. Longer ones are *bulk* (prefill).
pub const LATENCY_ROWS: u32 = 64;

/// Bulk pieces that each side of a link takes ahead of time. With pieces of 1 MiB a small frame finds at most 4 MiB ahead of it.
pub(crate) const CREDITS: u32 = 4;

/// A runtime for links: one thread, and epoll after at most a few tasks. A main future that yields in a loop is a busy poll: each turn
/// runs the tasks that are ready, then looks at the sockets without waiting.
fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().event_interval(16).build()
}

/// One turn of a busy poll: tasks that are ready, a look at the sockets, and a chance for whoever else wants this core. On a machine with
/// fewer cores than spinning threads the peer that is waited for may be just that: without the last, each hop costs a time slice.
async fn turn() {
    tokio::task::yield_now().await;
    std::thread::yield_now();
}

/// Most rows of a step that expert workers take.
pub const MAX_ROWS: u32 = 8192;

/// How the attention side of the hop works.
#[derive(Clone, Debug)]
pub struct HopOptions {
    /// Name of this worker (control.v1).
    pub name: String,
    /// Epoch of this process.
    pub epoch: u64,
    /// Host identity.
    pub host: String,
    /// Fingerprint of the checkpoint.
    pub fingerprint: String,
    /// Precision of the payload.
    pub precision: Precision,
    /// Elements of an activation row.
    pub hidden: usize,
    /// Routed experts per row.
    pub topk: usize,
    /// Largest submission, in rows.
    pub max_rows: u32,
    /// Transport.
    pub link: LinkChoice,
    /// How long a wait spins before it parks.
    pub spin: Duration,
    /// Let a worker of another arithmetic continue what one arithmetic began (counted).
    pub allow_mixed_experts: bool,
    /// Payload of a bulk piece, in bytes; at most [`crate::frame::MAX_PAYLOAD`].
    pub piece_bytes: usize,
    /// Limit of one connect and handshake.
    pub connect_timeout: Duration,
    /// Silence after which a dispatch is tried elsewhere, though its link looks alive.
    pub attempt_timeout: Duration,
    /// Memory lent to workers of this machine, for the rows of a step.
    pub lender: Option<Lender>,
}

impl HopOptions {
    /// Defaults for everything that is not identity or shape.
    pub fn new(
        name: impl Into<String>,
        epoch: u64,
        fingerprint: impl Into<String>,
        precision: Precision,
        hidden: usize,
        topk: usize,
    ) -> Self {
        Self {
            name: name.into(),
            epoch,
            host: String::new(),
            fingerprint: fingerprint.into(),
            precision,
            hidden,
            topk,
            max_rows: MAX_ROWS,
            link: LinkChoice::Auto,
            spin: Duration::from_micros(100),
            allow_mixed_experts: false,
            piece_bytes: 1 << 20,
            connect_timeout: Duration::from_secs(2),
            attempt_timeout: Duration::from_secs(10),
            lender: None,
        }
    }
}

/// A hop that cannot deliver.
#[derive(Debug, thiserror::Error)]
pub enum HopError {
    /// The deadline passed and no worker had computed the shard.
    #[error("layer {layer}: no worker computed shard {shard} before the deadline (waited {waited:?}): {}", .reasons.join("; "))]
    DeadlineNoHolder {
        /// Layer.
        layer: u16,
        /// Shard.
        shard: u32,
        /// Time since the submission.
        waited: Duration,
        /// Why each holder could not serve.
        reasons: Vec<String>,
    },
    /// Every holder answered that it cannot compute this.
    #[error("layer {layer}: shard {shard} failed on {worker}: {message}")]
    Expert {
        /// Layer.
        layer: u16,
        /// Shard.
        shard: u32,
        /// Worker that answered last.
        worker: String,
        /// Its words.
        message: String,
    },
    /// The caller's buffers do not fit.
    #[error("{what} has {got} elements; needed {needed}")]
    Shape {
        /// Buffer.
        what: &'static str,
        /// Elements needed.
        needed: usize,
        /// Elements there.
        got: usize,
    },
    /// A submission with more rows than agreed.
    #[error("layer {layer}: {got} rows in one submission; needed 1..={limit}")]
    Rows {
        /// Layer.
        layer: u16,
        /// Limit.
        limit: u32,
        /// Rows.
        got: usize,
    },
    /// Rows in shared memory that no worker can see could not be read back.
    #[error("layer {layer}: rows in shared memory could not be read back: {reason}")]
    ReadBack {
        /// Layer.
        layer: u16,
        /// The device's words.
        reason: String,
    },
    /// The ticket is of an earlier step, or was collected already.
    #[error("the ticket for layer {layer}, shard {shard} is of another step or was collected already")]
    StaleTicket {
        /// Layer.
        layer: u16,
        /// Shard.
        shard: u32,
    },
    /// The runtime of the hop could not start.
    #[error("cannot start the hop's runtime: {0}")]
    Runtime(#[from] std::io::Error),
}
