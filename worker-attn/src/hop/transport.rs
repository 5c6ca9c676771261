//! What the hop needs of whoever carries rows to expert workers.
//!
//! Neighbours: `host.rs` uses it; `tandem_proto::hop::HostHop` is the one that crosses processes, tests have their own.

use std::{
    ops::Range,
    time::{Duration, Instant},
};

use tandem_proto::{
    control::v1::LinkInUse,
    hop::{Arrived, HopError as LinkError, HopLink, HostHop, Ticket},
};

/// How long the time between steps may be used for dialling.
const TEND: Duration = Duration::from_millis(20);

/// What this hop needs of a transport; [`HostHop`] is the one that crosses processes.
pub trait Transport: Send {
    /// A submission that will be collected once.
    type Ticket: Send;
    /// A step begins; what was not collected is forgotten.
    fn begin_step(&mut self, step_id: u64, rows: u32);
    /// Sends rows (`x` rows × hidden, `ids` and `weights` rows × topk) to the holder of a shard. Never waits for the answer.
    ///
    /// # Errors
    /// Shapes that do not fit.
    fn submit(
        &mut self,
        layer: u16,
        shard: u32,
        x: &[f32],
        ids: &[i32],
        weights: &[f32],
        deadline: Instant,
    ) -> Result<Self::Ticket, LinkError>;
    /// Whether the holder of a shard sees rows that lie in lent memory.
    fn sees_lent(&self, _shard: u32) -> bool {
        false
    }
    /// As [`Transport::submit`], of rows `rows` of lent memory, which stay as they are until the ticket is collected.
    ///
    /// # Errors
    /// Shapes that do not fit; no memory is lent.
    fn submit_lent(
        &mut self,
        _layer: u16,
        _shard: u32,
        rows: Range<usize>,
        _ids: &[i32],
        _weights: &[f32],
        _deadline: Instant,
    ) -> Result<Self::Ticket, LinkError> {
        Err(LinkError::Shape { what: "lent memory", needed: rows.end, got: 0 })
    }
    /// Waits for the partial, rows × hidden; of lent rows it may stay where it was computed.
    ///
    /// # Errors
    /// Nobody computed it before the deadline, or its holder cannot.
    fn collect(&mut self, ticket: Self::Ticket, out: &mut [f32]) -> Result<Arrived, LinkError>;
    /// The time between steps.
    fn tend(&mut self);
    /// No sequence holds state now.
    fn idle(&mut self);
    /// Shards with a holder that would answer now, ascending.
    fn reachable(&self) -> Vec<u32>;
    /// Links in use.
    fn links(&self) -> Vec<LinkInUse> {
        Vec::new()
    }
}

impl Transport for HostHop {
    type Ticket = Ticket;

    fn begin_step(&mut self, step_id: u64, rows: u32) {
        Self::begin_step(self, step_id, rows);
    }

    fn submit(&mut self, layer: u16, shard: u32, x: &[f32], ids: &[i32], weights: &[f32], deadline: Instant) -> Result<Ticket, LinkError> {
        Self::submit(self, layer, shard, x, ids, weights, deadline)
    }

    fn sees_lent(&self, shard: u32) -> bool {
        Self::sees_lent(self, shard)
    }

    fn submit_lent(
        &mut self,
        layer: u16,
        shard: u32,
        rows: Range<usize>,
        ids: &[i32],
        weights: &[f32],
        deadline: Instant,
    ) -> Result<Ticket, LinkError> {
        Self::submit_lent(self, layer, shard, rows, ids, weights, deadline)
    }

    fn collect(&mut self, ticket: Ticket, out: &mut [f32]) -> Result<Arrived, LinkError> {
        Self::collect(self, ticket, out)
    }

    fn tend(&mut self) {
        Self::tend(self, TEND);
    }

    fn idle(&mut self) {
        self.release_arithmetic();
    }

    fn reachable(&self) -> Vec<u32> {
        self.shards_reachable()
    }

    fn links(&self) -> Vec<LinkInUse> {
        let name = |link: &HopLink| format!("{}{}", link.kind.name(), if link.shared { "+memory" } else { "" });
        Self::links(self).into_iter().map(|link| LinkInUse { link: name(&link), worker: link.worker, addr: link.addr }).collect()
    }
}
