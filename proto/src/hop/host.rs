//! Attention side of the hop. The step thread owns a [`HostHop`] and with it a `current_thread` runtime: links live on that thread and
//! move only while it is inside a call. `host/session.rs` is a link, `host/fleet.rs` the workers, `host/pending.rs` a submission,
//! `host/drive.rs` what happens between the two.

use std::ops::Range;
use std::time::{Duration, Instant};

use tokio::runtime::Runtime;
use tokio::sync::watch;

use self::drive::Drive;
use self::pending::{Pending, Rows, Submission};
use super::{HopError, HopOptions};
use crate::link::LinkKind;
use crate::route_table::RouteTable;

mod drive;
mod fleet;
mod pending;
mod session;

/// A submission that was sent and is to be collected, once.
#[derive(Debug)]
#[must_use = "a ticket that is not collected loses its partial"]
pub struct Ticket {
    id: u64,
    layer: u16,
    shard: u32,
}

/// How a partial came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Arrived {
    /// It was written to the caller's buffer.
    Host,
    /// It lies in the worker's memory until the next submission of the same rows: to be read before that.
    Shared {
        /// Window onto that memory ([`super::SharedMemory::open`]).
        window: u64,
        /// Its first row there.
        row: usize,
        /// Rows of the submission with a NaN or an infinity, ascending.
        non_finite: Vec<u32>,
    },
}

/// A link in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HopLink {
    /// Name of the expert worker.
    pub worker: String,
    /// Transport.
    pub kind: LinkKind,
    /// The worker's address on it.
    pub addr: String,
    /// Rows go through memory that both see.
    pub shared: bool,
}

/// Where the time of one collected submission went. The phases add up to `total`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HopTimings {
    /// From `submit` until the last piece was handed to the transport.
    pub send: Duration,
    /// Waiting on the expert worker.
    pub queue: Duration,
    /// Inside the expert engine.
    pub compute: Duration,
    /// The rest: both ways on the network, and the time until this side looked.
    pub ret: Duration,
    /// From `submit` to the last piece of the partial.
    pub total: Duration,
}

/// Attention side of the hop over links driven by the host. All calls block; none may be made from inside an async task.
#[derive(Debug)]
pub struct HostHop {
    /// `None` only while dropping.
    runtime: Option<Runtime>,
    drive: Drive,
    timings: HopTimings,
}

impl HostHop {
    /// A hop that follows `routes`. Nothing is dialled before [`HostHop::tend`] or [`HostHop::begin_step`].
    ///
    /// # Errors
    /// [`HopError::Runtime`].
    pub fn new(options: HopOptions, routes: watch::Receiver<RouteTable>) -> Result<Self, HopError> {
        Ok(Self { runtime: Some(super::runtime()?), drive: Drive::new(options, routes), timings: HopTimings::default() })
    }

    /// Begins a step of `rows` rows: forgets what was not collected, follows the route table, tells every connected worker.
    /// `step_id` must rise from step to step.
    pub fn begin_step(&mut self, step_id: u64, rows: u32) {
        self.run(async |drive| drive.begin_step(step_id, rows).await);
    }

    /// Sends the rows of one layer to the holder of `shard`: `x` is rows × hidden, `ids` and `weights` are rows × topk. Returns
    /// once the rows are handed to the transport or cannot be for now; the rest goes out while [`HostHop::collect`] waits. Several
    /// submissions of one layer and shard may be open at once (decode rows and a prefill chunk apart): the small one overtakes.
    ///
    /// # Errors
    /// [`HopError::Shape`], [`HopError::Rows`]. A missing or dead worker is no error here.
    pub fn submit(
        &mut self,
        layer: u16,
        shard: u32,
        x: &[f32],
        ids: &[i32],
        weights: &[f32],
        deadline: Instant,
    ) -> Result<Ticket, HopError> {
        let (hidden, rows) = (self.drive.shape.hidden, x.len() / self.drive.shape.hidden.max(1));
        if x.len() != rows * hidden {
            return Err(HopError::Shape { what: "x", needed: rows * hidden, got: x.len() });
        }
        self.submit_rows(layer, shard, Rows::Host(x), rows, ids, weights, deadline)
    }

    /// As [`HostHop::submit`], of rows that lie in the lent memory ([`HopOptions::lender`]) from row `row` on, complete. They must stay as they are
    /// until the ticket is collected.
    ///
    /// # Errors
    /// As [`HostHop::submit`]; [`HopError::Shape`] for rows outside of that memory.
    pub fn submit_lent(
        &mut self,
        layer: u16,
        shard: u32,
        rows: Range<usize>,
        ids: &[i32],
        weights: &[f32],
        deadline: Instant,
    ) -> Result<Ticket, HopError> {
        let lent = self.drive.options.lender.as_ref().map_or(0, |lender| lender.lent.rows as usize);
        if rows.end > lent {
            return Err(HopError::Shape { what: "lent memory", needed: rows.end, got: lent });
        }
        self.submit_rows(layer, shard, Rows::Lent { row: rows.start, rows: rows.len() }, rows.len(), ids, weights, deadline)
    }

    fn submit_rows(
        &mut self,
        layer: u16,
        shard: u32,
        x: Rows<'_>,
        rows: usize,
        ids: &[i32],
        weights: &[f32],
        deadline: Instant,
    ) -> Result<Ticket, HopError> {
        let (topk, limit) = (self.drive.shape.topk, self.drive.options.max_rows);
        if rows == 0 || rows > limit as usize {
            return Err(HopError::Rows { layer, limit, got: rows });
        }
        for (what, needed, got) in [("ids", rows * topk, ids.len()), ("weights", rows * topk, weights.len())] {
            if got != needed {
                return Err(HopError::Shape { what, needed, got });
            }
        }
        let (id, base) = self.drive.next_ticket(layer, shard, rows as u32);
        let submission = Submission { ticket: id, layer, shard, base, x, ids, weights, deadline };
        let piece_bytes = self.drive.options.piece_bytes;
        let pending = Pending::new(&submission, &self.drive.shape, piece_bytes, &mut self.drive.pool);
        self.run(async |drive| drive.submit(pending).await);
        Ok(Ticket { id, layer, shard })
    }

    /// Waits for the shard's partial and writes it to `out`, rows × hidden, or says where in shared memory it lies (only of rows that were
    /// submitted from lent memory).
    ///
    /// # Errors
    /// [`HopError::DeadlineNoHolder`], [`HopError::Expert`], [`HopError::StaleTicket`], [`HopError::Shape`].
    pub fn collect(&mut self, ticket: Ticket, out: &mut [f32]) -> Result<Arrived, HopError> {
        let Ticket { id, layer, shard } = ticket;
        self.run(async |drive| drive.wait(id).await).ok_or(HopError::StaleTicket { layer, shard })?;
        let pending = self.drive.remove(id).ok_or(HopError::StaleTicket { layer, shard })?;
        let needed = pending.rows * self.drive.shape.hidden;
        if out.len() != needed {
            return Err(HopError::Shape { what: "out", needed, got: out.len() });
        }
        if !pending.is_done() {
            return Err(self.drive.failure(&pending));
        }
        self.timings = pending.timings();
        self.drive.record(&pending, &self.timings);
        let window =
            pending.shared_with().and_then(|id| self.drive.fleet.session(id)).and_then(|(_, s)| s.window.as_ref()).map(|w| w.window);
        if pending.shared_with().is_some() && window.is_none() {
            // Answered, but the link ended before this side looked: the memory is given back, and the worker is gone with it.
            return Err(HopError::StaleTicket { layer, shard });
        }
        Ok(pending.finish(&self.drive.shape, out, window, &mut self.drive.pool))
    }

    /// Dials what the route table offers and notices what died; returns once nothing is being dialled, or after `budget`. For the
    /// time between steps: links move only inside a call.
    pub fn tend(&mut self, budget: Duration) {
        self.run(async |drive| drive.tend(budget).await);
    }

    /// Shards with a connected, ready holder (or held here), ascending; as of the last call.
    pub fn shards_reachable(&self) -> Vec<u32> {
        self.drive.fleet.reachable()
    }

    /// The links in use, by worker; as of the last call.
    pub fn links(&self) -> Vec<HopLink> {
        self.drive.fleet.links()
    }

    /// Whether the worker that would compute `shard` now sees rows in lent memory.
    pub fn sees_lent(&self, shard: u32) -> bool {
        self.drive.fleet.choose(shard, &[], None).is_some_and(|choice| choice.session.window.is_some())
    }

    /// Forgets which arithmetic serves each shard: call it while no sequence holds state.
    pub fn release_arithmetic(&mut self) {
        self.drive.fleet.unpin_all();
    }

    /// Timings of the submission collected last.
    pub fn timings(&self) -> HopTimings {
        self.timings
    }

    fn run<R>(&mut self, work: impl AsyncFnOnce(&mut Drive) -> R) -> R {
        // A runtime is only absent inside `drop`; building the message costs nothing.
        let runtime = self.runtime.as_ref().expect("the hop's runtime lives as long as the hop");
        runtime.block_on(work(&mut self.drive))
    }
}

impl Drop for HostHop {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // Allowed anywhere, also inside an async task; a name lookup may still be going on.
            runtime.shutdown_background();
        }
    }
}
