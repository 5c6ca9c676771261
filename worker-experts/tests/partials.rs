//! Partials: whatever the cut and whoever shares the batch, the same numbers.

#![allow(clippy::unwrap_used)] // Helpers of tests are tests.

use std::{path::Path, sync::Arc};

use proptest::prelude::*;
use tandem_kernels::{
    Backend, Elem, Precision,
    cpu::{CpuBackend, CpuOptions},
    reference::ReferenceBackend,
};
use tandem_model::{
    Checkpoint, Resident, Shard, ShardPlan, Split,
    synthetic::{self, Naming, Options, TextConfig, hash::Stream},
};
use tandem_proto::hop::{Dispatch, ExpertEngine, Lease, Partial, SharedMemory, SharedRows};
use tandem_worker_experts::{Batcher, Lending, LoadProgress, ShardEngine};

type Reference = ReferenceBackend<f32>;

fn checkpoint(dir: &Path, config: &TextConfig, naming: Naming) -> Checkpoint {
    synthetic::write_with(config, &Options { naming, ..Options::default() }, dir).unwrap();
    Checkpoint::open(dir).unwrap()
}

fn batcher(checkpoint: &Checkpoint, shards: &[Shard], max_rows: usize, fault: Option<&str>) -> Batcher<Reference> {
    batcher_on(Reference::new(Precision::F32), checkpoint, shards, max_rows, fault)
}

fn cpu() -> CpuBackend {
    CpuBackend::new(CpuOptions { threads: Some(2), ..CpuOptions::new(Precision::F32) }).unwrap()
}

fn batcher_on<B: Backend>(backend: B, checkpoint: &Checkpoint, shards: &[Shard], max_rows: usize, fault: Option<&str>) -> Batcher<B> {
    let backend = Arc::new(backend);
    let engines = shards.iter().map(|s| ShardEngine::load(&backend, checkpoint, s, |_| {}).unwrap()).collect();
    let g = checkpoint.geometry();
    let lending = Arc::new(Lending::new(Arc::clone(&backend), g.hidden, max_rows));
    Batcher::new(&backend, engines, g.hidden, g.topk, max_rows, lending, fault.map(|f| f.parse().unwrap())).unwrap()
}

/// What a batcher gives for dispatches whose rows are on the host.
fn execute<B: Backend>(b: &mut Batcher<B>, layer: u16, dispatches: &[Dispatch<'_>]) -> Vec<Result<Vec<f32>, String>> {
    b.execute(layer, dispatches).into_iter().map(|partial| partial.map(Partial::into_host)).collect()
}

/// Rows of a request: activations, distinct expert ids, weights.
struct Rows {
    rows: usize,
    x: Vec<f32>,
    ids: Vec<i32>,
    weights: Vec<f32>,
}

impl Rows {
    fn random(checkpoint: &Checkpoint, rows: usize, seed: u64) -> Self {
        let g = checkpoint.geometry();
        let stream = Stream::new(seed, "rows");
        let first = |r: usize| stream.bits(r as u64) as usize;
        let ids = (0..rows).flat_map(|r| (0..g.topk).map(move |k| ((first(r) % g.experts + k) % g.experts) as i32));
        Self {
            rows,
            x: (0..rows * g.hidden).map(|i| stream.normal(1000 + i as u64) as f32).collect(),
            ids: ids.collect(),
            weights: (0..rows * g.topk).map(|i| stream.uniform(9_000_000 + i as u64) as f32).collect(),
        }
    }

    fn dispatch(&self, shard: u32) -> Dispatch<'_> {
        Dispatch { shard, rows: self.rows, x: &self.x, shared: None, ids: &self.ids, weights: &self.weights }
    }
}

fn max_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs() / (1.0 + a.abs())).fold(0.0, f32::max)
}

fn config(seed: u64) -> TextConfig {
    TextConfig::random(seed)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// The CPU backend's partials of all shards add up to what one shard over everything gives on the reference, for every split.
    #[test]
    fn partials_add_up(seed in 0u64..500, split in prop_oneof![Just(Split::Layers), Just(Split::Experts), Just(Split::Ffn)], workers in 1usize..4, fused in any::<bool>()) {
        let dir = tempfile::tempdir().unwrap();
        let c = checkpoint(dir.path(), &config(seed), if fused { Naming::Transformers } else { Naming::Published });
        let g = c.geometry();
        let whole = ShardPlan::new(g, Split::Layers, 0, &Resident::All).unwrap();
        let Ok(plan) = ShardPlan::new(g, split, workers, &Resident::None) else { return Ok(()) };
        let rows = Rows::random(&c, 3, seed);
        let mut one = batcher(&c, &whole.shards, 8, None);
        let mut cut = batcher_on(cpu(), &c, &plan.shards, 8, None);
        for layer in g.moe_layers() {
            let expected = execute(&mut one, layer as u16, &[rows.dispatch(0)]).remove(0).unwrap();
            let of_layer: Vec<_> = plan.shards.iter().filter(|s| s.has_layer(layer as u32)).map(|s| rows.dispatch(s.id)).collect();
            let mut sum = vec![0.0; expected.len()];
            for partial in execute(&mut cut, layer as u16, &of_layer) {
                sum.iter_mut().zip(partial.unwrap()).for_each(|(s, p)| *s += p);
            }
            prop_assert!(expected.iter().any(|v| *v != 0.0));
            prop_assert!(max_difference(&expected, &sum) < 1e-5, "layer {}: {}", layer, max_difference(&expected, &sum));
        }
    }

    /// Joined with others, cut into batches, or alone: the same bits.
    #[test]
    fn joining_changes_no_bit(seed in 0u64..500, max_rows in 1usize..6, sizes in prop::collection::vec(1usize..5, 1..5)) {
        let dir = tempfile::tempdir().unwrap();
        let c = checkpoint(dir.path(), &config(seed), Naming::Published);
        let shards = ShardPlan::new(c.geometry(), Split::Experts, 2, &Resident::None).unwrap().shards;
        let requests: Vec<Rows> = sizes.iter().enumerate().map(|(i, n)| Rows::random(&c, *n, seed + i as u64)).collect();
        let dispatches: Vec<_> = requests.iter().enumerate().map(|(i, r)| r.dispatch(i as u32 % 2)).collect();
        let mut joined = batcher_on(cpu(), &c, &shards, max_rows, None);
        let mut alone = batcher_on(cpu(), &c, &shards, 64, None);
        let layer = c.geometry().moe_layers()[0] as u16;
        for (partial, dispatch) in execute(&mut joined, layer, &dispatches).into_iter().zip(&dispatches) {
            let single = execute(&mut alone, layer, std::slice::from_ref(dispatch)).remove(0).unwrap();
            prop_assert_eq!(partial.unwrap().iter().map(|v| v.to_bits()).collect::<Vec<_>>(), single.iter().map(|v| v.to_bits()).collect::<Vec<_>>());
        }
    }
}

#[test]
fn what_cannot_be_computed_is_named_and_hurts_nobody_else() {
    let dir = tempfile::tempdir().unwrap();
    let c = checkpoint(dir.path(), &TextConfig::default(), Naming::Published);
    let shard: Shard = "layers=3-4,experts=0-7,ffn=0-63".parse().unwrap();
    let mut b = batcher(&c, &[shard], 4, None);
    let rows = Rows::random(&c, 2, 1);
    let strange = Rows { ids: vec![-1, 99, i32::MIN, i32::MAX, 8, 9, 10, 11], ..Rows::random(&c, 2, 2) };
    let short = Dispatch { x: &rows.x[1..], ..rows.dispatch(0) };
    let answers = execute(&mut b, 3, &[rows.dispatch(0), rows.dispatch(7), short, strange.dispatch(0)]);
    assert!(answers[0].as_ref().unwrap().iter().any(|v| *v != 0.0));
    assert_eq!(answers[1].as_ref().unwrap_err(), "shard 7 is not held here (held: 0)");
    assert_eq!(answers[2].as_ref().unwrap_err(), "x: needed 512 elements for 2 rows, got 511");
    assert!(answers[3].as_ref().unwrap().iter().all(|v| *v == 0.0), "ids outside of the shard add nothing");
    assert_eq!(execute(&mut b, 5, &[rows.dispatch(0)])[0].as_ref().unwrap_err(), "layer 5 is not in shard layers=3-4,experts=0-7,ffn=0-63");
}

#[test]
fn rows_in_shared_memory_give_the_bits_of_rows_in_frames() {
    let dir = tempfile::tempdir().unwrap();
    let c = checkpoint(dir.path(), &TextConfig::default(), Naming::Published);
    let all = ShardPlan::new(c.geometry(), Split::Layers, 0, &Resident::All).unwrap().shards;
    let (backend, hidden) = (Arc::new(cpu()), c.geometry().hidden);
    let (attention, experts) = (Lending::new(Arc::clone(&backend), hidden, 9), Arc::new(Lending::new(Arc::clone(&backend), hidden, 9)));
    let engines = all.iter().map(|s| ShardEngine::load(&backend, &c, s, |_| {}).unwrap()).collect();
    let mut b = Batcher::new(&backend, engines, hidden, c.geometry().topk, 4, Arc::clone(&experts), None).unwrap();
    let (lent, own) = (attention.lend().unwrap(), experts.lend().unwrap());
    let lease = Lease { window: experts.open(&lent.handle).unwrap(), region: own.region, rows: 9 };
    // Batches of four rows: this one is cut, and its rows lie behind two others.
    let mut rows = Rows::random(&c, 6, 5);
    rows.x[3 * hidden + 1] = f32::INFINITY;
    let mut x = backend.alloc("x", Elem::F32, rows.x.len()).unwrap();
    backend.upload(&rows.x, &mut x, 0);
    backend.put(rows.x.len(), &x, 0, &attention.region(lent.region).unwrap(), 2 * hidden);
    let shared = Dispatch { x: &[], shared: Some(SharedRows { lease, row: 2 }), ..rows.dispatch(0) };
    let answers = b.execute(3, &[shared, rows.dispatch(0)]);
    assert_eq!(answers[0], Ok(Partial::Shared { non_finite: vec![3] }));
    let window = attention.open(&own.handle).unwrap();
    backend.take(rows.x.len(), &attention.window(window).unwrap(), 2 * hidden, &mut x, 0);
    let mut got = vec![0.0; rows.x.len()];
    backend.download(&x, 0, &mut got).unwrap();
    let bits = |v: &[f32]| v.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    let Ok(Partial::Host(needed)) = &answers[1] else { panic!("{:?}", answers[1]) };
    assert!(bits(&got) == bits(needed) && needed[..hidden].iter().any(|v| *v != 0.0));
    // The link ends: what still asks for its memory is told so.
    experts.close(lease.window);
    assert!(b.execute(3, &[shared])[0].as_ref().unwrap_err().contains("not lent any more"));
}

#[test]
fn a_non_finite_row_passes_and_stays_alone() {
    let dir = tempfile::tempdir().unwrap();
    let c = checkpoint(dir.path(), &TextConfig::default(), Naming::Published);
    let all = ShardPlan::new(c.geometry(), Split::Layers, 0, &Resident::All).unwrap().shards;
    let mut b = batcher(&c, &all, 8, None);
    let clean = Rows::random(&c, 3, 5);
    let mut dirty = Rows::random(&c, 3, 5);
    dirty.x[256] = f32::NAN;
    let (clean, dirty) =
        (execute(&mut b, 3, &[clean.dispatch(0)]).remove(0).unwrap(), execute(&mut b, 3, &[dirty.dispatch(0)]).remove(0).unwrap());
    assert_eq!((&clean[..256], &clean[512..]), (&dirty[..256], &dirty[512..]), "neighbours are untouched");
    assert!(dirty[256..512].iter().any(|v| v.is_nan()), "the row itself says so");
}

#[test]
fn injected_faults_fire_once() {
    let dir = tempfile::tempdir().unwrap();
    let c = checkpoint(dir.path(), &TextConfig::default(), Naming::Published);
    let all = ShardPlan::new(c.geometry(), Split::Layers, 0, &Resident::All).unwrap().shards;
    let mut b = batcher(&c, &all, 8, Some("nan:row=1,rows=2,step=2"));
    let rows = Rows::random(&c, 2, 5);
    let nan = |b: &mut Batcher<Reference>| {
        b.begin_step(0, 2);
        let partial = execute(b, 3, &[rows.dispatch(0)]).remove(0).unwrap();
        (partial[..256].iter().any(|v| v.is_nan()), partial[256..].iter().all(|v| v.is_nan()))
    };
    assert_eq!([nan(&mut b), nan(&mut b), nan(&mut b)], [(false, false), (false, true), (false, false)]);
    let mut failing = batcher(&c, &all, 8, Some("fail"));
    assert_eq!(execute(&mut failing, 3, &[rows.dispatch(0)])[0].as_ref().unwrap_err(), "injected fault");
    assert!(execute(&mut failing, 3, &[rows.dispatch(0)])[0].is_ok());
}

#[test]
fn loading_reports_every_byte_and_refuses_what_is_outside() {
    let dir = tempfile::tempdir().unwrap();
    let c = checkpoint(dir.path(), &TextConfig::default(), Naming::Published);
    let backend = Arc::new(Reference::new(Precision::F32));
    let shard: Shard = "layers=3,5,experts=4-6,ffn=10-29".parse().unwrap();
    let mut seen: Vec<LoadProgress> = Vec::new();
    let engine = ShardEngine::load(&backend, &c, &shard, |p| seen.push(p)).unwrap();
    // 2 layers × 3 experts × 3 matrices of 20 × 256 elements of 2 bytes.
    let total = 2 * 3 * 3 * 20 * 256 * 2;
    assert!(seen.len() > 2);
    assert_eq!(seen[0], LoadProgress { loaded_bytes: 0, total_bytes: total });
    assert_eq!(seen.last(), Some(&LoadProgress { loaded_bytes: total, total_bytes: total }));
    assert!(seen.is_sorted_by_key(|p| p.loaded_bytes));
    assert_eq!((engine.bytes(), engine.has_layer(5), engine.has_layer(4)), (total, true, false));
    for (text, words) in [
        ("layers=2,experts=0,ffn=0", "layer 2 has no routed experts; layers 3-8 have"),
        ("layers=3,experts=16,ffn=0", "expert 16 does not exist: a layer has 16 experts"),
        ("layers=3,experts=0,ffn=60-64", "ffn index 64 does not exist: moe_intermediate_size is 64"),
    ] {
        let error = ShardEngine::load(&backend, &c, &text.parse().unwrap(), |_| {}).err().unwrap().to_string();
        assert!(error.contains(words), "{error}");
    }
}

/// The in-process use of the attention worker: the same engine, on buffers that it already has.
#[test]
fn the_engine_runs_on_device_buffers() {
    let dir = tempfile::tempdir().unwrap();
    let c = checkpoint(dir.path(), &TextConfig::default(), Naming::TextOnly);
    let g = c.geometry();
    let backend = Arc::new(Reference::new(Precision::F32));
    let all = ShardPlan::new(g, Split::Layers, 0, &Resident::All).unwrap().shards;
    let engine = ShardEngine::load(&backend, &c, &all[0], |_| {}).unwrap();
    let rows = Rows::random(&c, 2, 3);
    let alloc = |elem, len| backend.alloc("test", elem, len).unwrap();
    let (mut x, mut ids, mut weights) = (alloc(Elem::F32, 2 * g.hidden), alloc(Elem::I32, 2 * g.topk), alloc(Elem::F32, 2 * g.topk));
    let mut out = alloc(Elem::F32, 2 * g.hidden);
    backend.upload(&rows.x, &mut x, 0);
    backend.upload_i32(&rows.ids, &mut ids, 0);
    backend.upload(&rows.weights, &mut weights, 0);
    engine.run(3, 2, &x, &ids, &weights, &mut out).unwrap();
    let mut partial = vec![0.0; 2 * g.hidden];
    backend.download(&out, 0, &mut partial).unwrap();
    assert_eq!(execute(&mut batcher(&c, &all, 8, None), 3, &[rows.dispatch(0)])[0].as_ref().unwrap(), &partial);
    assert!(engine.run(2, 2, &x, &ids, &weights, &mut out).is_err());
}
