//! Workers with a fake engine, a route table that tests rewrite, and hops that follow it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::watch;

use super::shared::Board;
use crate::hop::{Dispatch, ExpertEngine, ExpertListener, ExpertServer, HopOptions, HostHop, Partial, ServerOptions};
use crate::link::LinkKind;
use crate::payload::{Precision, bf16_bits};
use crate::route_table::{Address, Holder, Route, RouteTable, ShardDesc};

pub(super) const HIDDEN: usize = 48;
pub(super) const TOPK: usize = 3;
pub(super) const FINGERPRINT: &str = "f00d";

/// What a test's engines did: (layer, rows of each dispatch) per call.
pub(super) type Log = Arc<Mutex<Vec<(u16, Vec<usize>)>>>;

/// Lets a test hold an engine inside `execute`.
pub(super) struct Gate {
    pub entered: Receiver<()>,
    pub open: Sender<()>,
}

/// Sum over k of weight · (id + shard + layer) · x: every input matters, order of summation is fixed.
pub(super) fn partial(layer: u16, shard: u32, x: &[f32], ids: &[i32], weights: &[f32]) -> Vec<f32> {
    let rows = x.chunks(HIDDEN).zip(ids.chunks(TOPK).zip(weights.chunks(TOPK)));
    let row = |(x, (ids, weights)): (&[f32], (&[i32], &[f32]))| {
        let gate: f32 = ids.iter().zip(weights).map(|(id, w)| w * (*id as f32 + shard as f32 + f32::from(layer) / 7.0)).sum();
        x.iter().map(|x| gate * x).collect::<Vec<_>>()
    };
    rows.flat_map(row).collect()
}

pub(super) struct Fake {
    log: Log,
    gate: Option<(Sender<()>, Receiver<()>)>,
    fails: bool,
    board: Option<Arc<Board>>,
}

impl Fake {
    pub fn new(log: &Log) -> Self {
        Self { log: Arc::clone(log), gate: None, fails: false, board: None }
    }

    pub fn failing(log: &Log) -> Self {
        Self { fails: true, ..Self::new(log) }
    }

    /// An engine that finds rows in shared memory.
    pub fn sharing(self, board: &Arc<Board>) -> Self {
        Self { board: Some(Arc::clone(board)), ..self }
    }

    /// An engine that says when it is entered and waits to be let on. It runs free once the gate is dropped.
    pub fn gated(log: &Log) -> (Self, Gate) {
        let ((entered, says), (open, waits)) = (channel(), channel());
        (Self { gate: Some((entered, waits)), ..Self::new(log) }, Gate { entered: says, open })
    }
}

impl ExpertEngine for Fake {
    fn execute(&mut self, layer: u16, dispatches: &[Dispatch<'_>]) -> Vec<Result<Partial, String>> {
        self.log.lock().push((layer, dispatches.iter().map(|d| d.rows).collect()));
        if let Some((entered, open)) = &self.gate {
            let _ = entered.send(());
            let _ = open.recv();
        }
        if self.fails {
            return vec![Err("the bank is on fire".into()); dispatches.len()];
        }
        let compute = |d: &Dispatch<'_>| match (d.shared, &self.board) {
            (Some(shared), Some(board)) => {
                let x = board.look(shared.lease.window, shared.row, d.rows);
                let partial = partial(layer, d.shard, &x, d.ids, d.weights);
                board.write(shared.lease.region, shared.row, &partial);
                Partial::Shared { non_finite: board.bad.lock().clone() }
            }
            _ => partial(layer, d.shard, d.x, d.ids, d.weights).into(),
        };
        dispatches.iter().map(|d| Ok(compute(d))).collect()
    }
}

/// Rows of a test: any shape, reproducible.
pub(super) struct Rows {
    pub x: Vec<f32>,
    pub ids: Vec<i32>,
    pub weights: Vec<f32>,
}

impl Rows {
    pub fn new(rows: usize, seed: u32) -> Self {
        let value = |i: usize| ((i as u32).wrapping_add(seed).wrapping_mul(2_654_435_761) >> 8) as f32 / 1e5 - 80.0;
        Self {
            x: (0..rows * HIDDEN).map(value).collect(),
            ids: (0..rows * TOPK).map(|i| (i as i32 * 7 + seed as i32) % 40 - 1).collect(),
            weights: (0..rows * TOPK).map(|i| value(i + 99) / 50.0).collect(),
        }
    }

    pub fn rounded(&self) -> Self {
        let x = self.x.iter().map(|v| round(*v)).collect();
        Self { x, ids: self.ids.clone(), weights: self.weights.clone() }
    }

    pub fn partial(&self, layer: u16, shard: u32) -> Vec<f32> {
        partial(layer, shard, &self.x, &self.ids, &self.weights)
    }
}

pub(super) fn round(v: f32) -> f32 {
    f32::from_bits(u32::from(bf16_bits(v)) << 16)
}

pub(super) fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// One test's network.
pub(super) struct Stage {
    pub kind: LinkKind,
    routes: watch::Sender<RouteTable>,
    version: AtomicU32,
    names: AtomicU64,
    pub log: Log,
}

static STAGES: AtomicU64 = AtomicU64::new(0);

impl Stage {
    pub fn new(kind: LinkKind) -> Self {
        let names = AtomicU64::new(STAGES.fetch_add(1_000_000, Ordering::Relaxed));
        Self { kind, routes: watch::Sender::new(RouteTable::default()), version: AtomicU32::new(0), names, log: Log::default() }
    }

    /// Replaces the route table: (shard, holders).
    pub fn route(&self, routes: &[(u32, &[&Holder])]) {
        let version = self.version.fetch_add(1, Ordering::Relaxed) + 1;
        let routes = routes.iter().map(|(id, holders)| Route {
            shard: ShardDesc { id: *id, layers: std::iter::once(0..100).collect(), experts: 0..40, ffn: 0..8 },
            holders: holders.iter().map(|h| (*h).clone()).collect(),
        });
        self.routes.send_replace(RouteTable { coordinator_epoch: 1, version, routes: routes.collect() });
    }

    pub fn server_options(&self, name: &str, epoch: u64, shards: &[u32]) -> ServerOptions {
        ServerOptions {
            name: name.into(),
            epoch,
            host: "h".into(),
            fingerprint: FINGERPRINT.into(),
            arithmetic: "fake".into(),
            precision: Precision::F32,
            hidden: HIDDEN,
            topk: TOPK,
            shards: shards.to_vec(),
            max_rows: 4096,
            spin: Duration::from_micros(50),
            memory: None,
        }
    }

    pub fn listen(&self) -> ExpertListener {
        let local = Some("127.0.0.1:0".parse().unwrap());
        match self.kind {
            LinkKind::Inproc => {
                let name = format!("stage-{}", self.names.fetch_add(1, Ordering::Relaxed));
                ExpertListener::bind(None, None).unwrap().with_inproc(&name).unwrap()
            }
            LinkKind::Tcp => ExpertListener::bind(local, None).unwrap(),
            LinkKind::Grpc => ExpertListener::bind(None, local).unwrap(),
        }
    }

    /// A worker and its holder entry.
    pub fn worker(&self, options: ServerOptions, engine: Fake) -> (ExpertServer, Holder) {
        let listener = self.listen();
        let holder = holder(&options, listener.addresses());
        (listener.serve(options, Box::new(engine)).unwrap(), holder)
    }

    /// A worker of the usual kind.
    pub fn plain(&self, name: &str, epoch: u64, shards: &[u32]) -> (ExpertServer, Holder) {
        self.worker(self.server_options(name, epoch, shards), Fake::new(&self.log))
    }

    pub fn hop_options(&self) -> HopOptions {
        let epoch = self.names.fetch_add(1, Ordering::Relaxed) + 1;
        let mut options = HopOptions::new("attn-0", epoch, FINGERPRINT, Precision::F32, HIDDEN, TOPK);
        options.max_rows = 4096;
        options.piece_bytes = 4 << 10;
        options.spin = Duration::from_micros(50);
        options
    }

    pub fn hop(&self, options: HopOptions) -> HostHop {
        HostHop::new(options, self.routes.subscribe()).unwrap()
    }
}

pub(super) fn holder(options: &ServerOptions, addresses: &[Address]) -> Holder {
    Holder {
        worker: options.name.clone(),
        epoch: options.epoch,
        arithmetic: options.arithmetic.clone(),
        host: options.host.clone(),
        addresses: addresses.to_vec(),
        ready: true,
        local: false,
    }
}

/// Submits and collects.
pub(super) fn ask(hop: &mut HostHop, layer: u16, shard: u32, rows: &Rows) -> Result<Vec<f32>, crate::hop::HopError> {
    let ticket = hop.submit(layer, shard, &rows.x, &rows.ids, &rows.weights, soon())?;
    let mut out = vec![f32::NAN; rows.x.len()];
    hop.collect(ticket, &mut out).map(|_| out)
}
