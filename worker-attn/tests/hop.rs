//! Routed rows over a transport: cut any way, the answers are those of one process; and whatever goes wrong ends the sequences that it
//! concerns, and no other.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says so")]

mod common;
#[path = "common/requests.rs"]
mod requests;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, LazyLock},
    time::{Duration, Instant},
};

use common::{Gold, cpu};
use parking_lot::Mutex;
use requests::{End, Harness, request};
use tandem_kernels::{Backend, Elem, cpu::CpuBackend};
use tandem_model::{Checkpoint, Resident, Shard, ShardPlan, Split, synthetic::Preset};
use tandem_proto::{
    attn::v1::ErrorCode,
    hop::{Arrived, HopError as LinkError},
    route_table::{Route, RouteTable, ShardDesc},
};
use tandem_worker_attn::{
    Model, Runner, RunnerLimits,
    cancel::Cancelled,
    engine::{Pace, parking::ParkingOptions, sequence::Request},
    hop::{
        host::{HostRows, Shape},
        transport::Transport,
    },
};
use tandem_worker_experts::ShardEngine;
use tokio::sync::watch;

static CHECKPOINT: LazyLock<Checkpoint> = LazyLock::new(|| common::preset(Preset::TinyB));
static GOLD: LazyLock<Gold> = LazyLock::new(|| Gold::open("tiny-b.safetensors"));

/// What goes wrong with a submission.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    /// A row becomes NaN.
    Nan(usize),
    /// Its deadline passes.
    Late,
    /// The worker reports an error.
    Broken,
}

/// One submission, as the transport saw it.
#[derive(Clone, Debug)]
struct Sent {
    layer: u16,
    shard: u32,
    rows: usize,
    deadline: Instant,
}

/// Chooses faults by what was sent so far (the submission itself is the last).
type Script = Box<dyn FnMut(&[Sent]) -> Option<Fault> + Send>;

/// Expert workers without processes.
struct InProcess {
    backend: Arc<CpuBackend>,
    engines: BTreeMap<u32, ShardEngine<CpuBackend>>,
    hidden: usize,
    topk: usize,
    script: Script,
    log: Arc<Mutex<Vec<Sent>>>,
}

impl Transport for InProcess {
    type Ticket = (Sent, Option<Fault>, Vec<f32>);

    fn begin_step(&mut self, _step_id: u64, _rows: u32) {}

    fn submit(
        &mut self,
        layer: u16,
        shard: u32,
        x: &[f32],
        ids: &[i32],
        weights: &[f32],
        deadline: Instant,
    ) -> Result<Self::Ticket, LinkError> {
        let rows = x.len() / self.hidden;
        let engine = &self.engines[&shard];
        for ids in ids.chunks(self.topk) {
            assert!(ids.iter().all(|id| *id == -1 || engine.shard().experts.contains(&(*id as u32))), "{ids:?} for {}", engine.shard());
            assert!(ids.iter().any(|id| *id >= 0), "a row without an expert in the shard stays at home");
        }
        let sent = Sent { layer, shard, rows, deadline };
        let mut log = self.log.lock();
        log.push(sent.clone());
        let fault = (self.script)(&log);
        let b = &*self.backend;
        let mut dx = b.alloc("x", Elem::F32, x.len()).unwrap();
        let mut di = b.alloc("ids", Elem::I32, ids.len()).unwrap();
        let mut dw = b.alloc("weights", Elem::F32, weights.len()).unwrap();
        let mut out = b.alloc("out", Elem::F32, x.len()).unwrap();
        b.upload(x, &mut dx, 0);
        b.upload_i32(ids, &mut di, 0);
        b.upload(weights, &mut dw, 0);
        engine.run(u32::from(layer), rows, &dx, &di, &dw, &mut out).unwrap();
        let mut partial = vec![0.0; x.len()];
        b.download(&out, 0, &mut partial).unwrap();
        Ok((sent, fault, partial))
    }

    fn collect(&mut self, (sent, fault, mut partial): Self::Ticket, out: &mut [f32]) -> Result<Arrived, LinkError> {
        let Sent { layer, shard, .. } = sent;
        match fault {
            Some(Fault::Late) => {
                return Err(LinkError::DeadlineNoHolder { layer, shard, waited: Duration::ZERO, reasons: vec!["nobody".to_owned()] });
            }
            Some(Fault::Broken) => {
                return Err(LinkError::Expert { layer, shard, worker: "experts-0".to_owned(), message: "it broke".to_owned() });
            }
            Some(Fault::Nan(row)) => partial[row * self.hidden + 1] = f32::NAN,
            None => {}
        }
        out.copy_from_slice(&partial);
        Ok(Arrived::Host)
    }

    fn tend(&mut self) {}

    fn idle(&mut self) {}

    fn reachable(&self) -> Vec<u32> {
        self.engines.keys().copied().collect()
    }
}

/// An engine whose routed experts are cut over `workers`, with those of `resident` at home.
struct Cluster {
    harness: Harness<CpuBackend, HostRows<InProcess, CpuBackend>>,
    log: Arc<Mutex<Vec<Sent>>>,
    cancelled: Cancelled,
    remote: Vec<Shard>,
}

fn cluster(split: Split, workers: usize, resident: &str, script: impl FnMut(&[Sent]) -> Option<Fault> + Send + 'static) -> Cluster {
    overlapping(0, split, workers, resident, script)
}

/// The same where steps of `overlap_rows` rows and more run as two micro-batches.
fn overlapping(
    overlap_rows: usize,
    split: Split,
    workers: usize,
    resident: &str,
    script: impl FnMut(&[Sent]) -> Option<Fault> + Send + 'static,
) -> Cluster {
    let g = CHECKPOINT.geometry();
    let plan = ShardPlan::new(g, split, workers, &resident.parse::<Resident>().unwrap()).unwrap();
    let (local, remote): (Vec<Shard>, Vec<Shard>) = plan.shards.iter().cloned().partition(|s| plan.local.contains(&s.id));
    let backend = Arc::new(cpu());
    let model = Arc::new(Model::load(Arc::clone(&backend), &CHECKPOINT, &local, &mut |_, _, _| {}).unwrap());
    let engines = remote.iter().map(|s| (s.id, ShardEngine::load(&backend, &CHECKPOINT, s, |_| {}).unwrap())).collect();
    let desc = |s: &Shard| ShardDesc { id: s.id, layers: s.layers.clone(), experts: s.experts.clone(), ffn: s.ffn.clone() };
    let routes = plan.shards.iter().map(|s| Route { shard: desc(s), holders: Vec::new() }).collect();
    let (_, routes) = watch::channel(RouteTable { coordinator_epoch: 1, version: 1, routes });
    let (log, cancelled) = (Arc::default(), Cancelled::default());
    let transport = InProcess { backend, engines, hidden: g.hidden, topk: g.topk, script: Box::new(script), log: Arc::clone(&log) };
    let shape = Shape { layers: g.layers, hidden: g.hidden, topk: g.topk };
    // A chunk of 32 rows goes in two pieces.
    let hop = HostRows::new(transport, routes, shape, &plan.local, cancelled.clone()).with_piece_rows(20);
    let limits = RunnerLimits { max_rows: 64, max_batch: 4, max_seq_len: 300, kv_tokens: 1024, overlap_rows };
    let harness =
        Harness::new(Runner::new(model, hop, limits).unwrap(), Pace { prefill_chunk: 32, cache: None, parking: ParkingOptions::default() });
    Cluster { harness, log, cancelled, remote }
}

fn prompt(n: usize) -> Vec<u32> {
    GOLD.ids(&format!("p{n}.input_ids"))
}

fn greedy(n: usize) -> Vec<u32> {
    GOLD.ids(&format!("p{n}.greedy"))
}

#[test]
fn every_cut_gives_the_same_tokens() {
    let cuts = [
        (Split::Layers, 1, "none"),
        (Split::Layers, 3, "none"),
        (Split::Experts, 3, "none"),
        (Split::Ffn, 3, "none"),
        (Split::Experts, 2, "1-2"),
        (Split::Ffn, 2, "1-3:2-5"),
        (Split::Layers, 1, "all"),
    ];
    for (split, workers, resident) in cuts {
        let workers = if resident == "all" { 0 } else { workers };
        let mut c = cluster(split, workers, resident, |_| None);
        for n in [4, 17, 70] {
            c.harness.submit(request(n as u64, &prompt(n), 24));
        }
        let answers = c.harness.finish();
        for n in [4, 17, 70] {
            assert_eq!(answers[&(n as u64)].tokens, greedy(n)[..24], "{split} over {workers}, resident {resident}, prompt {n}");
        }
        c.harness.assert_empty();
        assert_eq!(c.log.lock().is_empty(), c.remote.is_empty());
    }
}

#[test]
fn two_micro_batches_give_the_bits_of_one() {
    // Prompts of several sequences side by side, chunks that are cut, rows that decode; experts at home in some layers.
    let answers = |overlap_rows, resident| {
        let mut c = overlapping(overlap_rows, Split::Layers, 1, resident, |_| None);
        for n in [4, 17, 70] {
            c.harness.submit(Request { logprobs: Some(5), prompt_logprobs: Some(1), ..request(n as u64, &prompt(n), 12) });
        }
        let answers = c.harness.finish();
        c.harness.assert_empty();
        (answers, c.log.lock().iter().map(|sent| (sent.layer, sent.rows)).collect::<Vec<_>>())
    };
    for resident in ["none", "1-2"] {
        let (whole, log) = answers(0, resident);
        for overlap_rows in [1, 16, 40] {
            let (halves, cut) = answers(overlap_rows, resident);
            assert_eq!(halves, whole, "steps of {overlap_rows} rows and more in halves");
            assert!(cut.len() > log.len(), "{} submissions in halves, {} whole", cut.len(), log.len());
            // The second half's rows of a layer follow those of the first before anything of the next layer.
            let rows = |log: &[(u16, usize)]| log.iter().take_while(|sent| sent.0 == log[0].0).map(|sent| sent.1).sum::<usize>();
            assert_eq!(rows(&cut), rows(&log));
        }
    }
}

#[test]
fn one_remote_shard_is_bit_for_bit_the_local_one() {
    let answer = |workers, resident| {
        let mut c = cluster(Split::Layers, workers, resident, |_| None);
        c.harness.submit(Request { logprobs: Some(5), ..request(1, &prompt(17), 12) });
        c.harness.finish()[&1].clone()
    };
    assert_eq!(answer(1, "none"), answer(0, "all"));
}

#[test]
fn warm_up_reaches_every_shard_of_every_layer() {
    let mut c = cluster(Split::Experts, 4, "none", |_| None);
    c.harness.submit(Request { warmup: true, ..request(1, &prompt(1), 1) });
    c.harness.finish();
    let reached: BTreeSet<(u32, u32)> = c.log.lock().iter().map(|s| (s.shard, u32::from(s.layer))).collect();
    let all: BTreeSet<(u32, u32)> = c.remote.iter().flat_map(|s| s.layer_ids().map(|l| (s.id, l)).collect::<Vec<_>>()).collect();
    assert_eq!(reached, all);
}

#[test]
fn a_row_that_is_not_finite_ends_its_own_request_alone() {
    // The second row of a dispatch of two decode rows: the request that joined later.
    let mut fired = false;
    let mut c = cluster(Split::Ffn, 2, "none", move |sent| {
        let last = sent.last().unwrap();
        (sent.len() > 60 && last.rows == 2 && !std::mem::replace(&mut fired, true)).then_some(Fault::Nan(1))
    });
    c.harness.submit(request(1, &prompt(4), 30));
    c.harness.submit(request(2, &prompt(3), 30));
    let a = c.harness.finish();
    assert!(matches!(&a[&2].end, Some(End::Error(ErrorCode::NonFinite, m)) if m.contains("NaN")), "{:?}", a[&2].end);
    assert!(a[&2].tokens.len() < 30 && a[&2].tokens == greedy(3)[..a[&2].tokens.len()]);
    assert_eq!((a[&1].tokens.as_slice(), &a[&1].end), (&greedy(4)[..30], &Some(End::Length)));
    c.harness.assert_empty();
    // The slot and the pages that the bad row was in serve the next request.
    c.harness.submit(request(3, &prompt(17), 10));
    assert_eq!(c.harness.finish()[&3].tokens, greedy(17)[..10]);
}

#[test]
fn each_request_ends_at_its_own_deadline_and_the_others_lose_no_bit() {
    // From the 20th submission on nobody answers, until the impatient request has been told so; then the worker is back.
    let soon = Instant::now() + Duration::from_secs(2);
    let mut c = cluster(Split::Layers, 1, "none", move |sent| {
        let last = sent.last().unwrap();
        let waiting = sent.len() > 20 && last.deadline <= soon;
        if waiting {
            // As the transport does: it says so when the deadline has passed.
            std::thread::sleep(last.deadline.saturating_duration_since(Instant::now()));
        }
        waiting.then_some(Fault::Late)
    });
    c.harness.submit(request(1, &prompt(17), 30));
    c.harness.submit(Request { deadline: soon, ..request(2, &prompt(3), 30) });
    let a = c.harness.finish();
    assert!(matches!(&a[&2].end, Some(End::Error(ErrorCode::ExpertsUnavailable, m)) if m.contains("shard 0")), "{:?}", a[&2].end);
    assert_eq!((a[&1].tokens.as_slice(), a[&1].started), (&greedy(17)[..30], 1), "never computed anew");
    c.harness.assert_empty();
}

#[test]
fn a_worker_that_refuses_ends_the_step_of_all_and_serves_the_next() {
    let mut fired = false;
    let mut c =
        cluster(Split::Layers, 1, "none", move |sent| (sent.len() == 20 && !std::mem::replace(&mut fired, true)).then_some(Fault::Broken));
    c.harness.submit(request(1, &prompt(4), 30));
    c.harness.submit(request(2, &prompt(3), 30));
    let a = c.harness.finish();
    for id in [1, 2] {
        assert!(matches!(&a[&id].end, Some(End::Error(ErrorCode::Internal, m)) if m.contains("it broke")), "{:?}", a[&id].end);
    }
    c.harness.assert_empty();
    c.harness.submit(request(3, &prompt(17), 10));
    assert_eq!(c.harness.finish()[&3].tokens, greedy(17)[..10]);
}

#[test]
fn a_cancelled_request_leaves_a_step_that_waits() {
    let cancelled: Arc<Mutex<Option<Cancelled>>> = Arc::default();
    let (handle, mut late) = (Arc::clone(&cancelled), 0);
    let mut c = cluster(Split::Layers, 1, "none", move |sent| {
        if sent.len() < 20 || late == 2 {
            return None;
        }
        late += 1;
        handle.lock().as_ref().unwrap().add(2);
        Some(Fault::Late)
    });
    *cancelled.lock() = Some(c.cancelled.clone());
    c.harness.submit(request(1, &prompt(17), 20));
    c.harness.submit(request(2, &prompt(3), 20));
    let a = c.harness.finish();
    assert_eq!(a[&2].end, Some(End::Cancelled));
    assert_eq!(a[&1].tokens, greedy(17)[..20]);
    c.harness.assert_empty();
}
