//! Attention side of the hop (being written: signatures are settled, calls answer [`HopError::StaleTicket`] until then).

use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::{HopError, HopOptions};
use crate::route_table::RouteTable;

/// A submission that was sent and is to be collected, once.
#[derive(Debug)]
#[must_use = "a ticket that is not collected loses its partial"]
pub struct Ticket {
    id: u64,
    layer: u16,
    shard: u32,
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

/// Attention side of the hop over links driven by the host.
#[derive(Debug)]
pub struct HostHop {
    options: HopOptions,
    routes: watch::Receiver<RouteTable>,
}

impl HostHop {
    /// A hop that follows `routes`. Nothing is dialled before [`HostHop::tend`] or [`HostHop::begin_step`].
    ///
    /// # Errors
    /// [`HopError::Runtime`].
    pub fn new(options: HopOptions, routes: watch::Receiver<RouteTable>) -> Result<Self, HopError> {
        Ok(Self { options, routes })
    }

    /// Begins a step of `rows` rows: forgets what was not collected, follows the route table, tells every connected worker.
    pub fn begin_step(&mut self, step_id: u64, rows: u32) {
        let _ = (step_id, rows, &self.options, &self.routes);
    }

    /// Sends the rows of one layer to the holder of `shard`: `x` is rows × hidden, `ids` and `weights` are rows × topk. Returns
    /// once the rows are handed to the transport or cannot be for now; the rest goes out while [`HostHop::collect`] waits.
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
        let _ = (x, ids, weights, deadline);
        Ok(Ticket { id: 0, layer, shard })
    }

    /// Waits for the shard's partial and writes it to `out`, rows × hidden.
    ///
    /// # Errors
    /// [`HopError::DeadlineNoHolder`], [`HopError::Expert`], [`HopError::StaleTicket`], [`HopError::Shape`].
    pub fn collect(&mut self, ticket: Ticket, out: &mut [f32]) -> Result<(), HopError> {
        let _ = (out, ticket.id);
        Err(HopError::StaleTicket { layer: ticket.layer, shard: ticket.shard })
    }

    /// Dials what the route table offers and notices what died, for at most `budget`. For the time between steps.
    pub fn tend(&mut self, budget: Duration) {
        let _ = budget;
    }

    /// Shards with a connected, ready holder (or held here), ascending.
    pub fn shards_reachable(&self) -> Vec<u32> {
        Vec::new()
    }

    /// Forgets which arithmetic serves each shard: call it while no sequence holds state.
    pub fn release_arithmetic(&mut self) {}

    /// Timings of the submission collected last.
    pub fn timings(&self) -> HopTimings {
        HopTimings::default()
    }
}
