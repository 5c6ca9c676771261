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

mod on_device;

use std::{
    collections::{HashSet, VecDeque},
    ops::Range,
    time::{Duration, Instant},
};

use tandem_kernels::Backend;
use tandem_proto::{
    hop::{Arrived, HopError as LinkError},
    route_table::RouteTable,
};
use tokio::sync::watch;

use super::{Failure, Hop, HopError, HopReport, HopStep, LocalPartials, RoutedRows, lent::LentRows, sum_on_device, transport::Transport};
use crate::{cancel::Cancelled, telemetry};

/// How long a dispatch waits before cancelled sequences are looked for. Longer than any layer takes to compute: a dispatch that is
/// only slow must not be sent twice.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Rows of a piece: enough for products of many rows, few enough that a step of thousands keeps both sides and the link busy.
pub const PIECE_ROWS: usize = 1024;

/// Steps over which the average of a layer's waits forgets.
const MEMORY: u32 = 32;

/// A shard that somebody else holds.
#[derive(Clone, Debug)]
struct Remote {
    id: u32,
    experts: Range<u32>,
}

/// Rows on their way.
struct Pending<K> {
    shard: Remote,
    /// First row of the piece that the rows are of.
    piece: usize,
    /// Rows of the step, ascending.
    rows: Vec<u32>,
    /// They were submitted from lent memory: all rows of the step, those that do not go there without an expert.
    lent: bool,
    ticket: K,
}

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
    layer: usize,
    /// The layer's rows lie in lent memory.
    in_lent: bool,
    piece_rows: usize,
    x: Vec<f32>,
    ids: Vec<i32>,
    weights: Vec<f32>,
    /// By piece, then by shard.
    pending: VecDeque<Pending<T::Ticket>>,
    partial: Vec<f32>,
    sum: Vec<f32>,
    sent: SentRows,
    /// Per layer: how long it lately waited.
    waits: Vec<Option<Duration>>,
}

/// Rows gathered for one dispatch.
#[derive(Default)]
struct SentRows {
    /// Empty where the rows lie behind each other as they are.
    x: Vec<f32>,
    ids: Vec<i32>,
    weights: Vec<f32>,
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
            layer: 0,
            in_lent: false,
            piece_rows: PIECE_ROWS,
            x: Vec::new(),
            ids: Vec::new(),
            weights: Vec::new(),
            pending: VecDeque::new(),
            partial: Vec::new(),
            sum: Vec::new(),
            sent: SentRows::default(),
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

    /// The rows of a piece that go to a shard: those with one of its experts, and all rows of warm-up sequences. Failed sequences stay at
    /// home.
    fn rows_for(&self, shard: &Remote, piece: Range<usize>) -> Vec<u32> {
        let chosen = |row: usize| self.ids[row * self.shape.topk..][..self.shape.topk].iter().any(|id| holds(shard, *id));
        piece
            .filter(|row| {
                let segment = self.owner[*row] as usize;
                self.failed[segment].is_none() && (self.step.segments[segment].warmup || chosen(*row))
            })
            .map(|row| row as u32)
            .collect()
    }

    /// Sends rows of the current layer to a shard; `None` where there was nothing to send, or it could not be.
    fn send(&mut self, shard: Remote, piece: usize, rows: Vec<u32>, lent: bool) -> Result<Option<Pending<T::Ticket>>, HopError> {
        let (Some(first), Some(last)) = (rows.first(), rows.last()) else { return Ok(None) };
        let run = *first as usize..*last as usize + 1;
        let (d, k) = (self.shape.hidden, self.shape.topk);
        let sent = &mut self.sent;
        sent.x.clear();
        sent.ids.clear();
        sent.weights.clear();
        let scattered = run.len() > rows.len() && !lent;
        for &row in &rows {
            let row = row as usize;
            if scattered {
                sent.x.extend(&self.x[row * d..(row + 1) * d]);
            }
            if lent {
                // Rows lie where they lie in the step: those between, which stay at home, choose nobody.
                sent.ids.resize(row * k, -1);
                sent.weights.resize(row * k, 0.0);
            }
            sent.weights.extend(&self.weights[row * k..(row + 1) * k]);
            let start = sent.ids.len();
            sent.ids.extend(self.ids[row * k..(row + 1) * k].iter().map(|id| if holds(&shard, *id) { *id } else { -1 }));
            if sent.ids[start..].iter().all(|id| *id < 0) {
                // A warm-up row that chose nobody here: run the shard's first expert all the same, with weight 0.
                sent.ids[start] = shard.experts.start as i32;
                sent.weights[start] = 0.0;
            }
        }
        let until = rows.iter().map(|row| self.step.segments[self.owner[*row as usize] as usize].deadline).min();
        let deadline = until.unwrap_or_else(Instant::now).min(Instant::now() + PATIENCE);
        let layer = self.layer as u16;
        let submitted = if lent {
            let all = self.step.rows;
            sent.ids.resize(all * k, -1);
            sent.weights.resize(all * k, 0.0);
            self.transport.submit_lent(layer, shard.id, all, &sent.ids, &sent.weights, deadline)
        } else {
            let x = if scattered { &sent.x } else { &self.x[run.start * d..run.end * d] };
            self.transport.submit(layer, shard.id, x, &sent.ids, &sent.weights, deadline)
        };
        match submitted {
            Ok(ticket) => Ok(Some(Pending { shard, piece, rows, lent, ticket })),
            Err(e) => self.fail_rows(&rows, &Failure::Internal { message: e.to_string() }).map(|()| None),
        }
    }

    /// Waits for one dispatch, as often as it takes; `None` where nothing came of it. What came is all rows of the step where they were lent.
    fn wait(&mut self, pending: Pending<T::Ticket>) -> Result<Option<(u32, Vec<u32>, Arrived)>, HopError> {
        let mut next = Some(pending);
        while let Some(Pending { shard, piece, rows, lent, ticket }) = next {
            let len = if lent { self.step.rows } else { rows.len() } * self.shape.hidden;
            self.partial.resize(self.partial.len().max(len), 0.0);
            next = match self.transport.collect(ticket, &mut self.partial[..len]) {
                Ok(arrived) => return Ok(Some((shard.id, rows, arrived))),
                Err(e @ LinkError::DeadlineNoHolder { .. }) => {
                    self.end_overdue(&rows, &e.to_string())?;
                    let left = rows.into_iter().filter(|row| self.failed[self.owner[*row as usize] as usize].is_none()).collect();
                    self.send(shard, piece, left, lent)?
                }
                Err(e) => {
                    self.fail_rows(&rows, &Failure::Internal { message: e.to_string() })?;
                    None
                }
            };
        }
        Ok(None)
    }

    /// Waits for one dispatch and adds its partials to the sum on the host.
    fn receive(&mut self, pending: Pending<T::Ticket>) -> Result<(), HopError> {
        match self.wait(pending)? {
            Some((shard, rows, _)) => self.add_rows(shard, &rows),
            None => Ok(()),
        }
    }

    /// Ends the sequences of rows whose partial is not finite.
    fn end_non_finite(&mut self, shard: u32, bad: &[u32]) -> Result<(), HopError> {
        let bad: Vec<u32> = bad.iter().copied().filter(|row| self.failed[self.owner[*row as usize] as usize].is_none()).collect();
        if bad.is_empty() {
            return Ok(());
        }
        telemetry::nan_rows(bad.len());
        let failure = Failure::NonFinite { layer: self.layer, shard, rows: bad.len() };
        self.fail_rows(&bad, &failure)
    }

    /// Adds the first `rows.len()` rows of `partial`; a row that is not finite is left out and ends its sequence.
    fn add_rows(&mut self, shard: u32, rows: &[u32]) -> Result<(), HopError> {
        let d = self.shape.hidden;
        let mut bad = Vec::new();
        for (&row, partial) in rows.iter().zip(self.partial.chunks_exact(d)) {
            if partial.iter().all(|v| v.is_finite()) {
                let sum = &mut self.sum[row as usize * d..][..d];
                sum.iter_mut().zip(partial).for_each(|(s, p)| *s += p);
            } else {
                bad.push(row);
            }
        }
        self.end_non_finite(shard, &bad)
    }

    /// Adds a piece of what a local shard computed.
    fn add_local(&mut self, b: &B, shard: u32, partial: &B::Buf, hidden: usize, piece: &Range<usize>) -> Result<(), HopError> {
        let len = piece.len() * hidden;
        self.partial.resize(self.partial.len().max(len), 0.0);
        b.download(partial, piece.start * hidden, &mut self.partial[..len])?;
        let rows: Vec<u32> = (piece.start as u32..piece.end as u32).collect();
        self.add_rows(shard, &rows)
    }

    /// Notes how long the layer waited.
    fn waited(&mut self, waited: Duration) {
        telemetry::layer_wait(waited);
        if let Some(average) = self.waits.get_mut(self.layer) {
            *average = Some(average.map_or(waited, |average| (average * (MEMORY - 1) + waited) / MEMORY));
        }
    }

    /// Ends the sequences among `rows` whose deadline has passed or that were cancelled.
    fn end_overdue(&mut self, rows: &[u32], why: &str) -> Result<(), HopError> {
        let now = Instant::now();
        for &row in rows {
            let segment = &self.step.segments[self.owner[row as usize] as usize];
            if self.cancelled.contains(segment.request_id) {
                self.fail_rows(&[row], &Failure::Cancelled)?;
            } else if segment.deadline <= now {
                self.fail_rows(&[row], &Failure::Unavailable { message: why.to_owned() })?;
            }
        }
        Ok(())
    }

    /// Marks the sequences of `rows` failed.
    fn fail_rows(&mut self, rows: &[u32], failure: &Failure) -> Result<(), HopError> {
        for &row in rows {
            let segment = self.owner[row as usize] as usize;
            if self.failed[segment].is_none() {
                self.failed[segment] = Some(failure.clone());
                self.step.notify.tell(self.step.segments[segment].request_id, failure);
            }
        }
        if self.failed.iter().all(Option::is_some) { Err(HopError::Abandoned) } else { Ok(()) }
    }
}

/// A step's rows in pieces.
fn pieces(rows: usize, size: usize) -> impl Iterator<Item = Range<usize>> {
    (0..rows).step_by(size).map(move |start| start..rows.min(start + size))
}

fn holds(shard: &Remote, id: i32) -> bool {
    u32::try_from(id).is_ok_and(|id| shard.experts.contains(&id))
}

impl<B: Backend, T: Transport> Hop<B> for HostRows<T, B> {
    fn begin_step(&mut self, step: HopStep) {
        self.follow_routes();
        self.transport.begin_step(step.step_id, step.rows as u32);
        self.pending.clear();
        self.failed = vec![None; step.segments.len()];
        self.owner.clear();
        for (i, segment) in step.segments.iter().enumerate() {
            self.owner.extend(std::iter::repeat_n(i as u32, segment.rows.len()));
        }
        self.step = step;
    }

    fn submit(&mut self, b: &B, rows: &RoutedRows<'_, B>) -> Result<(), HopError> {
        self.layer = rows.layer;
        let shards = self.remote.get(rows.layer).cloned().unwrap_or_default();
        if shards.is_empty() {
            return Ok(());
        }
        let (d, k) = (rows.hidden, rows.topk);
        self.x.resize(rows.rows * d, 0.0);
        self.ids.resize(rows.rows * k, 0);
        self.weights.resize(rows.rows * k, 0.0);
        let lent = self.lent.as_ref().filter(|lent| lent.holds(rows.rows) && shards.iter().all(|s| self.transport.sees_lent(s.id)));
        if let Some(lent) = lent {
            // There when the ids are: the download waits for all that was enqueued.
            lent.put(b, rows.rows * d, rows.x);
        }
        self.in_lent = lent.is_some();
        b.download_i32(rows.ids, 0, &mut self.ids)?;
        b.download(rows.weights, 0, &mut self.weights)?;
        if self.in_lent {
            for shard in shards {
                let rows = self.rows_for(&shard, 0..rows.rows);
                let sent = self.send(shard, 0, rows, true)?;
                self.pending.extend(sent);
            }
            return Ok(());
        }
        for piece in pieces(rows.rows, self.piece_rows) {
            b.download(rows.x, piece.start * d, &mut self.x[piece.start * d..piece.end * d])?;
            for shard in &shards {
                let rows = self.rows_for(shard, piece.clone());
                let sent = self.send(shard.clone(), piece.start, rows, false)?;
                self.pending.extend(sent);
            }
        }
        Ok(())
    }

    fn collect(&mut self, b: &B, rows: usize, hidden: usize, local: LocalPartials<'_, B>, out: &mut B::Buf) -> Result<(), HopError> {
        if self.remote.get(self.layer).is_none_or(Vec::is_empty) {
            if local.shards.is_empty() {
                return Err(HopError::Uncovered { layer: self.layer });
            }
            sum_on_device(b, rows, hidden, local, out);
            return Ok(());
        }
        let waited = Instant::now();
        if self.in_lent {
            self.sum_lent(b, rows, local, out)?;
            self.waited(waited.elapsed());
            return Ok(());
        }
        self.sum.clear();
        self.sum.resize(rows * hidden, 0.0);
        for piece in pieces(rows, self.piece_rows) {
            let mut here = local.shards.iter().zip(local.partials.iter()).peekable();
            while let Some(pending) = self.pending.pop_front_if(|pending| pending.piece == piece.start) {
                while let Some((id, partial)) = here.next_if(|(id, _)| **id < pending.shard.id) {
                    self.add_local(b, *id, partial, hidden, &piece)?;
                }
                self.receive(pending)?;
            }
            for (id, partial) in here {
                self.add_local(b, *id, partial, hidden, &piece)?;
            }
            b.upload(&self.sum[piece.start * hidden..piece.end * hidden], out, piece.start * hidden);
        }
        self.waited(waited.elapsed());
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
