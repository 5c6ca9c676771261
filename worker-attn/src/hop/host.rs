//! Rows to expert workers through host memory and a network link.
//!
//! Neighbours: `tandem_proto::hop::HostHop` (transport, retries, replicas), `tandem-worker-experts` (the other end).
//!
//! **Deadlines.** A dispatch waits until the *earliest* deadline among its own sequences, or [`PATIENCE`] if that comes first. Then the
//! sequences that are over (deadline passed, cancelled) are marked failed and told so at once; the rows of the others are sent again
//! (dispatches are idempotent) and go on waiting until their own turn. So every sequence ends at its own deadline, and none of the others
//! is computed anew: their state is exact, because no partial of theirs was ever skipped.
//!
//! **Pieces.** A step of many rows goes out and comes back in pieces of [`PIECE_ROWS`]: while one is copied and encoded here, the one before it
//! is on the wire, and the one before that is computed there.
//!
//! **Shared memory.** Where every holder of a layer's shards sees memory that this worker lends (`lent.rs`), rows lie there instead, partials are
//! read from the workers' memory by the device, and frames carry the choice of experts alone. The bits are the same.

mod dispatch;
mod failing;
mod on_device;
mod on_host;

use std::{
    collections::{HashSet, VecDeque},
    ops::Range,
    time::{Duration, Instant},
};

use tandem_kernels::Backend;
use tandem_proto::route_table::RouteTable;
use tokio::sync::watch;

use self::dispatch::{Pending, Remote, SentRows};
use super::{Failure, Hop, HopError, HopReport, HopStep, LocalPartials, RoutedRows, lent::LentRows, sum_on_device, transport::Transport};
use crate::{cancel::Cancelled, micro_batch::MICRO_BATCHES, telemetry};

/// How long a dispatch waits before cancelled sequences are looked for. Longer than any layer takes to compute: a dispatch that is
/// only slow must not be sent twice.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Rows of a piece: enough for products of many rows, few enough that a step of thousands keeps both sides and the link busy.
pub const PIECE_ROWS: usize = 1024;

/// Steps over which the average of a layer's waits forgets.
const MEMORY: u32 = 32;

/// Sizes of the model that the hop must know.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Layers.
    pub layers: usize,
    /// Hidden size.
    pub hidden: usize,
    /// Experts per token.
    pub topk: usize,
}

/// Remote shards over a transport, local ones on the device.
pub struct HostRows<T: Transport, B: Backend> {
    transport: T,
    /// Rows in memory that workers of this machine see.
    lent: Option<LentRows<B>>,
    routes: watch::Receiver<RouteTable>,
    shape: Shape,
    local: HashSet<u32>,
    cancelled: Cancelled,
    /// Per layer: remote shards, ascending by id.
    remote: Vec<Vec<Remote>>,
    step: HopStep,
    failed: Vec<Option<Failure>>,
    /// Segment of each row.
    owner: Vec<u32>,
    away: [Away<T::Ticket>; MICRO_BATCHES],
    piece_rows: usize,
    partial: Vec<f32>,
    sent: SentRows,
    /// How long the micro-batches of the layer that is collected have waited.
    waiting: Duration,
    /// Per layer: how long a step lately waited.
    waits: Vec<Option<Duration>>,
}

/// What is away of a micro-batch: the rows of one layer. Its buffers begin with row `first` of the step.
struct Away<K> {
    layer: usize,
    first: usize,
    rows: usize,
    /// They lie in lent memory.
    in_lent: bool,
    x: Vec<f32>,
    ids: Vec<i32>,
    weights: Vec<f32>,
    /// By piece, then by shard.
    pending: VecDeque<Pending<K>>,
    sum: Vec<f32>,
}

impl<K> Default for Away<K> {
    fn default() -> Self {
        let (x, ids, weights, sum) = Default::default();
        Self { layer: 0, first: 0, rows: 0, in_lent: false, x, ids, weights, pending: VecDeque::new(), sum }
    }
}

impl<T: Transport, B: Backend> HostRows<T, B> {
    /// A hop whose shards are those of `routes`, but for the ones in `local`.
    pub fn new(transport: T, routes: watch::Receiver<RouteTable>, shape: Shape, local: &[u32], cancelled: Cancelled) -> Self {
        Self {
            transport,
            lent: None,
            routes,
            shape,
            local: local.iter().copied().collect(),
            cancelled,
            remote: Vec::new(),
            step: HopStep::default(),
            failed: Vec::new(),
            owner: Vec::new(),
            away: <[Away<T::Ticket>; MICRO_BATCHES]>::default(),
            piece_rows: PIECE_ROWS,
            partial: Vec::new(),
            sent: SentRows::default(),
            waiting: Duration::ZERO,
            waits: vec![None; shape.layers],
        }
    }

    /// The same hop with pieces of another size.
    #[must_use]
    pub fn with_piece_rows(self, piece_rows: usize) -> Self {
        Self { piece_rows: piece_rows.max(1), ..self }
    }

    /// The same hop with memory that the transport's workers may see.
    #[must_use]
    pub fn with_lent(self, lent: Option<LentRows<B>>) -> Self {
        Self { lent, ..self }
    }

    /// The transport.
    pub fn transport(&mut self) -> &mut T {
        &mut self.transport
    }

    fn follow_routes(&mut self) {
        if !self.remote.is_empty() && !self.routes.has_changed().unwrap_or(false) {
            return;
        }
        let table = self.routes.borrow_and_update();
        self.remote = (0..self.shape.layers as u32)
            .map(|layer| {
                let shards = table.routes.iter().map(|r| &r.shard).filter(|s| s.has_layer(layer) && !self.local.contains(&s.id));
                let mut shards: Vec<Remote> = shards.map(|s| Remote { id: s.id, experts: s.experts.clone() }).collect();
                shards.sort_by_key(|s| s.id);
                shards
            })
            .collect();
    }

    /// Notes how long a micro-batch's layer waited; the average is of the step, whose last rows come last.
    fn waited(&mut self, micro: usize, waited: Duration) {
        telemetry::layer_wait(waited);
        self.waiting += waited;
        if self.away[micro].first + self.away[micro].rows < self.step.rows {
            return;
        }
        let waited = std::mem::take(&mut self.waiting);
        if let Some(average) = self.waits.get_mut(self.away[micro].layer) {
            *average = Some(average.map_or(waited, |average| (average * (MEMORY - 1) + waited) / MEMORY));
        }
    }
}

/// A step's rows in pieces.
fn pieces(rows: usize, size: usize) -> impl Iterator<Item = Range<usize>> {
    (0..rows).step_by(size).map(move |start| start..rows.min(start + size))
}

impl<B: Backend, T: Transport> Hop<B> for HostRows<T, B> {
    const OVERLAPS: bool = true;

    fn begin_step(&mut self, step: HopStep) {
        self.follow_routes();
        self.transport.begin_step(step.step_id, step.rows as u32);
        self.away.iter_mut().for_each(|away| away.pending.clear());
        self.waiting = Duration::ZERO;
        self.failed = vec![None; step.segments.len()];
        self.owner.clear();
        for (i, segment) in step.segments.iter().enumerate() {
            self.owner.extend(std::iter::repeat_n(i as u32, segment.rows.len()));
        }
        self.step = step;
    }

    fn submit(&mut self, b: &B, rows: &RoutedRows<'_, B>) -> Result<(), HopError> {
        let (micro, d, k) = (rows.micro, rows.hidden, rows.topk);
        let away = &mut self.away[micro];
        (away.layer, away.first, away.rows) = (rows.layer, rows.first, rows.rows);
        let shards = self.remote.get(rows.layer).cloned().unwrap_or_default();
        if shards.is_empty() {
            return Ok(());
        }
        away.x.resize(rows.rows * d, 0.0);
        away.ids.resize(rows.rows * k, 0);
        away.weights.resize(rows.rows * k, 0.0);
        let held = |lent: &&LentRows<B>| lent.holds(rows.first + rows.rows) && shards.iter().all(|s| self.transport.sees_lent(s.id));
        let lent = self.lent.as_ref().filter(held);
        if let Some(lent) = lent {
            // There when the ids are: the download waits for all that was enqueued.
            lent.put(b, rows.rows * d, rows.x, rows.first * d);
        }
        away.in_lent = lent.is_some();
        b.download_choice(rows.ids, rows.weights, &mut away.ids, &mut away.weights)?;
        if away.in_lent {
            for shard in shards {
                let rows = self.rows_for(micro, &shard, 0..rows.rows);
                let sent = self.send(micro, shard, 0, rows, true)?;
                self.away[micro].pending.extend(sent);
            }
            return Ok(());
        }
        for piece in pieces(rows.rows, self.piece_rows) {
            b.download(rows.x, piece.start * d, &mut self.away[micro].x[piece.start * d..piece.end * d])?;
            for shard in &shards {
                let rows = self.rows_for(micro, shard, piece.clone());
                let sent = self.send(micro, shard.clone(), piece.start, rows, false)?;
                self.away[micro].pending.extend(sent);
            }
        }
        Ok(())
    }

    fn collect(
        &mut self,
        b: &B,
        micro: usize,
        rows: usize,
        hidden: usize,
        local: LocalPartials<'_, B>,
        out: &mut B::Buf,
    ) -> Result<(), HopError> {
        let layer = self.away[micro].layer;
        if self.remote.get(layer).is_none_or(Vec::is_empty) {
            if local.shards.is_empty() {
                return Err(HopError::Uncovered { layer });
            }
            sum_on_device(b, rows, hidden, local, out);
            return Ok(());
        }
        let waited = Instant::now();
        if self.away[micro].in_lent {
            self.sum_lent(b, micro, local, out)?;
        } else {
            self.sum_pieces(b, micro, local, out)?;
        }
        self.waited(micro, waited.elapsed());
        Ok(())
    }

    fn failures(&mut self) -> Vec<(usize, Failure)> {
        self.failed.iter_mut().enumerate().filter_map(|(i, f)| f.take().map(|f| (i, f))).collect()
    }

    fn tend(&mut self) {
        self.transport.tend();
    }

    fn idle(&mut self) {
        self.transport.idle();
    }

    fn reachable(&self) -> Vec<u32> {
        self.transport.reachable()
    }

    fn report(&self) -> HopReport {
        let waits = self.waits.iter().enumerate().filter_map(|(layer, wait)| Some((layer as u32, (*wait)?)));
        HopReport { waits: waits.collect(), links: self.transport.links() }
    }
}
