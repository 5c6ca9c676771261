//! [`Batcher`]: joins the rows that several connections sent for one layer, and computes them shard by shard.
//!
//! The hop's server gives everything that waits for a layer in one call; rows of the same shard go through the weights together, in
//! batches of at most `max_rows`. A row's partial does not depend on its companions (the backend's rule), so joining never changes a
//! token. What fails, fails for its own dispatches only.
//!
//! Neighbours: `service.rs` puts it behind `tandem_proto::hop::ExpertServer`; `exec.rs` computes.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::Instant,
};

use tandem_kernels::{Backend, Elem};
use tandem_proto::hop::{Dispatch, ExpertEngine, Partial};

use crate::{
    Error, Lending, ShardEngine,
    fault::{Fault, Kind},
    telemetry::Telemetry,
};

/// Shards of one worker behind the hop.
pub struct Batcher<B: Backend> {
    backend: Arc<B>,
    engines: BTreeMap<u32, ShardEngine<B>>,
    hidden: usize,
    topk: usize,
    max_rows: usize,
    x: B::Buf,
    ids: B::Buf,
    weights: B::Buf,
    out: B::Buf,
    lending: Arc<Lending<B>>,
    telemetry: Telemetry,
    steps: u64,
    fault: Option<Fault>,
}

/// Some rows of one dispatch, inside of a batch.
struct Piece {
    dispatch: usize,
    rows: Range<usize>,
}

impl<B: Backend> Batcher<B> {
    /// Buffers for batches of up to `max_rows` rows over `engines` (all of one model). `lending`: where dispatches may have their rows.
    ///
    /// # Errors
    /// Out of memory.
    pub fn new(
        backend: &Arc<B>,
        engines: Vec<ShardEngine<B>>,
        hidden: usize,
        topk: usize,
        max_rows: usize,
        lending: Arc<Lending<B>>,
        fault: Option<Fault>,
    ) -> Result<Self, Error> {
        let max_rows = max_rows.max(1);
        backend.reserve(max_rows, 1)?;
        Ok(Self {
            x: backend.alloc("expert rows", Elem::F32, max_rows * hidden)?,
            ids: backend.alloc("expert ids", Elem::I32, max_rows * topk)?,
            weights: backend.alloc("expert weights", Elem::F32, max_rows * topk)?,
            out: backend.alloc("expert partials", Elem::F32, max_rows * hidden)?,
            backend: Arc::clone(backend),
            engines: engines.into_iter().map(|e| (e.shard().id, e)).collect(),
            hidden,
            topk,
            max_rows,
            lending,
            telemetry: Telemetry::new(),
            steps: 0,
            fault,
        })
    }

    /// Why a dispatch cannot be computed at all.
    fn refuse(&self, layer: u16, d: &Dispatch<'_>) -> Option<String> {
        let Some(engine) = self.engines.get(&d.shard) else {
            let held: Vec<String> = self.engines.keys().map(u32::to_string).collect();
            return Some(format!("shard {} is not held here (held: {})", d.shard, held.join(", ")));
        };
        if !engine.has_layer(u32::from(layer)) {
            return Some(Error::LayerNotHeld { layer: u32::from(layer), shard: engine.shard().clone() }.to_string());
        }
        let sizes = [
            ("x", d.x.len(), if d.shared.is_some() { 0 } else { d.rows * self.hidden }),
            ("ids", d.ids.len(), d.rows * self.topk),
            ("weights", d.weights.len(), d.rows * self.topk),
        ];
        let wrong = sizes.iter().find(|(_, got, needed)| got != needed)?;
        Some(format!("{}: needed {} elements for {} rows, got {}", wrong.0, wrong.2, d.rows, wrong.1))
    }

    /// Computes pieces of one shard that fit the buffers together, into the dispatches' partials.
    fn compute(
        &mut self,
        layer: u16,
        shard: u32,
        pieces: &[Piece],
        dispatches: &[Dispatch<'_>],
        partials: &mut [Result<Partial, String>],
    ) -> Result<(), Error> {
        let (d, k) = (self.hidden, self.topk);
        let mut at = 0;
        for piece in pieces {
            let (from, rows) = (&dispatches[piece.dispatch], &piece.rows);
            match from.shared {
                Some(shared) => {
                    let window = self.lending.window(shared.lease.window).ok_or(Error::NotLent)?;
                    self.backend.take(rows.len() * d, &window, (shared.row + rows.start) * d, &mut self.x, at * d);
                }
                None => self.backend.upload(&from.x[rows.start * d..rows.end * d], &mut self.x, at * d),
            }
            self.backend.upload_i32(&from.ids[rows.start * k..rows.end * k], &mut self.ids, at * k);
            self.backend.upload(&from.weights[rows.start * k..rows.end * k], &mut self.weights, at * k);
            at += rows.len();
        }
        if let Some(engine) = self.engines.get(&shard) {
            engine.run(u32::from(layer), at, &self.x, &self.ids, &self.weights, &mut self.out)?;
        }
        // Where partials stay on the device, it is asked which of their rows are not finite; that also waits until they are there.
        let all = at;
        at = 0;
        for piece in pieces {
            if let Some(shared) = dispatches[piece.dispatch].shared {
                let region = self.lending.region(shared.lease.region).ok_or(Error::NotLent)?;
                self.backend.put(piece.rows.len() * d, &self.out, at * d, &region, (shared.row + piece.rows.start) * d);
            }
            at += piece.rows.len();
        }
        let any_shared = pieces.iter().any(|piece| dispatches[piece.dispatch].shared.is_some());
        let bad = if any_shared { self.backend.non_finite(all, d, &self.out)? } else { Vec::new() };
        at = 0;
        for piece in pieces {
            let (rows, end) = (&piece.rows, at + piece.rows.len());
            match &mut partials[piece.dispatch] {
                Ok(Partial::Host(partial)) => self.backend.download(&self.out, at * d, &mut partial[rows.start * d..rows.end * d])?,
                Ok(Partial::Shared { non_finite }) => {
                    let here = bad.iter().map(|row| *row as usize).filter(|row| (at..end).contains(row));
                    non_finite.extend(here.map(|row| (row - at + rows.start) as u32));
                }
                Err(_) => {}
            }
            at = end;
        }
        Ok(())
    }

    /// Computes all dispatches of one shard, in batches of at most `max_rows` rows.
    fn run_shard(
        &mut self,
        layer: u16,
        shard: u32,
        members: &[usize],
        dispatches: &[Dispatch<'_>],
        partials: &mut [Result<Partial, String>],
    ) {
        for batch in batches(members.iter().map(|i| (*i, dispatches[*i].rows)), self.max_rows) {
            let start = Instant::now();
            // A kernel that panics must not take the worker's thread with it: the dispatch fails by name, and others are served.
            let done = catch_unwind(AssertUnwindSafe(|| self.compute(layer, shard, &batch, dispatches, partials)));
            let failure = match done {
                Ok(Ok(())) => None,
                Ok(Err(error)) => Some(error.to_string()),
                Err(_) => Some("the expert kernel panicked (see the worker's log)".to_owned()),
            };
            if let Some(message) = failure {
                tracing::error!(layer, shard, message, "experts failed");
                for piece in &batch {
                    partials[piece.dispatch] = Err(message.clone());
                }
            }
            let rows: usize = batch.iter().map(|p| p.rows.len()).sum();
            let ids = batch.iter().flat_map(|p| &dispatches[p.dispatch].ids[p.rows.start * self.topk..p.rows.end * self.topk]);
            let held = self.engines.get(&shard).map(|e| e.shard().experts.clone()).unwrap_or_default();
            let distinct: BTreeSet<i32> = ids.copied().filter(|id| u32::try_from(*id).is_ok_and(|e| held.contains(&e))).collect();
            self.telemetry.batch(rows, batch.len(), distinct.len(), start.elapsed());
        }
    }

    /// Injected faults that act before the maths; the others come back with their dispatch.
    fn inject(&mut self, layer: u16, dispatches: &[Dispatch<'_>]) -> Vec<(usize, Kind)> {
        let Some(fault) = &mut self.fault else { return Vec::new() };
        let mut later = Vec::new();
        for (i, dispatch) in dispatches.iter().enumerate() {
            match fault.fires(self.steps, layer, dispatch.rows) {
                Some(Kind::Stall(time)) => std::thread::sleep(time),
                Some(Kind::Exit) => std::process::exit(137),
                Some(kind) => later.push((i, kind)),
                None => {}
            }
        }
        later
    }
}

/// Packs the rows of some dispatches, in order, into batches of at most `max_rows`; only what does not fit is cut.
fn batches(members: impl Iterator<Item = (usize, usize)>, max_rows: usize) -> Vec<Vec<Piece>> {
    let mut all = vec![Vec::new()];
    let mut room = max_rows;
    for (dispatch, rows) in members {
        let mut at = 0;
        while at < rows {
            if room == 0 {
                all.push(Vec::new());
                room = max_rows;
            }
            let take = room.min(rows - at);
            if let Some(batch) = all.last_mut() {
                batch.push(Piece { dispatch, rows: at..at + take });
            }
            at += take;
            room -= take;
        }
    }
    all.retain(|batch| !batch.is_empty());
    all
}

impl<B: Backend> ExpertEngine for Batcher<B> {
    fn bind_thread(&mut self) {
        self.backend.bind_thread();
    }

    fn execute(&mut self, layer: u16, dispatches: &[Dispatch<'_>]) -> Vec<Result<Partial, String>> {
        let faults = self.inject(layer, dispatches);
        let mut partials: Vec<Result<Partial, String>> = Vec::with_capacity(dispatches.len());
        let mut by_shard: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
        for (i, dispatch) in dispatches.iter().enumerate() {
            match self.refuse(layer, dispatch) {
                Some(reason) => partials.push(Err(reason)),
                None => {
                    partials.push(Ok(match dispatch.shared {
                        Some(_) => Partial::Shared { non_finite: Vec::new() },
                        None => Partial::Host(vec![0.0; dispatch.rows * self.hidden]),
                    }));
                    by_shard.entry(dispatch.shard).or_default().push(i);
                }
            }
        }
        for (shard, members) in by_shard {
            self.run_shard(layer, shard, &members, dispatches, &mut partials);
        }
        for (i, kind) in faults {
            match (kind, &mut partials[i]) {
                (Kind::NonFinite { row }, Ok(Partial::Host(partial))) => partial[row * self.hidden..(row + 1) * self.hidden].fill(f32::NAN),
                (Kind::NonFinite { row }, Ok(Partial::Shared { non_finite })) => *non_finite = vec![row as u32],
                (Kind::Fail, partial) => *partial = Err("injected fault".to_owned()),
                _ => {}
            }
        }
        self.telemetry.answered(partials.iter().filter(|p| p.is_err()).count());
        partials
    }

    fn begin_step(&mut self, _step_id: u64, _rows: u32) {
        self.steps += 1;
    }
}
