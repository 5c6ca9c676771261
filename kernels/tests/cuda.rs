//! The CUDA backend on device 0 (or `TANDEM_TEST_CUDA`): the conformance suite, stored types, and sizes near the release's. Without a device
//! each test says that it is skipped; with `TANDEM_TEST_CUDA` set it fails instead.

#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "tests")]

use std::sync::OnceLock;

use tandem_kernels::{
    Backend, BatchDesc, Elem, ExpertSource, IndexKeyWeights, IndexerParams, KdaDims, MlaParams, Precision, RouterParams, Segment,
    StateSpec,
    conformance::{self, kda::Kda, mhc::Mhc, mla, noise::Noise, rig, router::Router, rows, sample, sequences},
    cuda::{CudaBackend, CudaBuf, CudaOptions, selftest},
    reference::{
        linear::linear,
        norm::sigmoid,
        router::{Routing, route},
    },
};
use tandem_quant::MatrixSource;

fn open(precision: Precision) -> Option<CudaBackend> {
    let wanted = std::env::var("TANDEM_TEST_CUDA").ok();
    let ordinal = wanted.as_deref().map_or(0, |w| w.parse().expect("TANDEM_TEST_CUDA is a device number"));
    match CudaBackend::new(CudaOptions::new(ordinal, precision)) {
        Ok(backend) => Some(backend),
        Err(e) if wanted.is_none() => {
            eprintln!("SKIPPED, no CUDA device: {e}");
            None
        }
        Err(e) => panic!("{e}"),
    }
}

/// The device, once per precision and process.
fn device(precision: Precision) -> Option<&'static CudaBackend> {
    static F32: OnceLock<Option<CudaBackend>> = OnceLock::new();
    static BF16: OnceLock<Option<CudaBackend>> = OnceLock::new();
    match precision {
        Precision::F32 => F32.get_or_init(|| open(precision)).as_ref(),
        Precision::Bf16 => BF16.get_or_init(|| open(precision)).as_ref(),
    }
}

macro_rules! checks {
    ($($name:ident)*) => {
        const NAMES: &[&str] = &[$(stringify!($name)),*];

        mod f32 {
            use super::*;
            $(#[test] fn $name() { check(Precision::F32, stringify!($name)); })*
        }
        mod bf16 {
            use super::*;
            $(#[test] fn $name() { check(Precision::Bf16, stringify!($name)); })*
        }
    };
}

/// Cases of each op; `TANDEM_TEST_SEEDS`: fewer, where a device is slow.
fn seeds() -> std::ops::Range<u64> {
    let wanted = std::env::var("TANDEM_TEST_SEEDS").ok();
    wanted.map_or(conformance::SEEDS, |n| 0..n.parse().expect("TANDEM_TEST_SEEDS is a number"))
}

fn check(precision: Precision, name: &'static str) {
    if let Some(b) = device(precision)
        && let Err(failure) = conformance::run(b, name, seeds())
    {
        panic!("{failure}");
    }
}

checks!(memory embed linear norm mhc mlp router experts kda mla_attend index_select kda_state mla_state index_state sample coded);

#[test]
fn no_check_is_forgotten() {
    assert_eq!(conformance::checks::<CudaBackend>().into_iter().map(|c| c.0).collect::<Vec<_>>(), NAMES);
}

#[test]
fn stored_types() {
    // The types of codes share kernels: the edges of these are enough of each.
    let few = |kind: &str| kind.starts_with(['Q', 'I']);
    let each = |b: &CudaBackend, kind: &str| {
        for (seed, rows) in [1, 2, 3, 8, 9, 16, 17, 64, 65, 100, 150].into_iter().enumerate() {
            if !few(kind) || [1, 9, 65, 150].contains(&rows) {
                selftest::stored_type(b, kind, seed as u64, rows).unwrap_or_else(|e| panic!("{} {kind}, {rows} rows: {e}", b.precision()));
            }
        }
    };
    for b in [Precision::F32, Precision::Bf16].into_iter().filter_map(device) {
        std::thread::scope(|s| {
            for kind in selftest::TYPES {
                s.spawn(move || each(b, kind));
            }
        });
    }
}

/// Wider than the suite draws: up to the release's widths, where a row fills many blocks. The reference in f64 takes the time, so that each case has a
/// thread.
#[test]
fn wide_rows() {
    let say = |b: &CudaBackend, what: &str, r: Result<(), String>| {
        r.unwrap_or_else(|e| panic!("{} {what}: {}", b.precision(), &e[..e.len().min(400)]));
    };
    let rows = |b: &CudaBackend, seed: u64, rows: usize| {
        say(b, "mhc", Mhc::new(seed, rows, 4, 4096).and_then(|c| rig::judge(b, &c)));
        say(b, "router", Router::new(seed, rows).and_then(|c| rig::judge(b, &c)));
        say(b, "norm", rig::judge(b, &rows::Norm::new(seed, rows, 4096)));
        say(b, "mlp", rows::Mlp::new(seed, rows, 512, 300).and_then(|c| rig::judge(b, &c)));
        say(b, "experts", rows::Experts::new(seed, rows, 256, 128, 20, 8).and_then(|c| rig::judge(b, &c)));
    };
    let plan = |seed| sequences::Plan::random(&mut Noise::new(seed), 3, 700);
    std::thread::scope(|s| {
        for b in [Precision::F32, Precision::Bf16].into_iter().filter_map(device) {
            for (seed, count) in [1usize, 2, 5, 20].into_iter().enumerate() {
                s.spawn(move || rows(b, seed as u64, count));
            }
            for seed in 0..6 {
                s.spawn(move || say(b, "kda", sequences::judge(b, &Kda::new(seed), &plan(seed), seed)));
                s.spawn(move || say(b, "attend", mla::Attend::new(seed).and_then(|c| sequences::judge(b, &c, &plan(seed), seed))));
                s.spawn(move || say(b, "select", sequences::judge(b, &mla::Select::new(seed), &plan(seed), seed)));
                s.spawn(move || say(b, "sample", sample::judge(b, seed + 100)));
            }
        }
    });
}

/// In bf16 a row has the same bits however many rows are computed with it: products, gated products and experts of the types that lie as floats or
/// with scales beside them, at sizes with edges. Many rows go through other kernels than few.
#[test]
fn rows_beside_many_have_the_bits_of_rows_alone() {
    let Some(b) = device(Precision::Bf16) else { return };
    const FEW: usize = 8;
    const LIMIT: Option<f32> = Some(7.0);
    let buf = |values: &[f32]| {
        let mut buf = b.alloc("x", Elem::F32, values.len()).unwrap();
        b.upload(values, &mut buf, 0);
        buf
    };
    let read = |buf: &CudaBuf, len: usize| {
        let mut values = vec![0.0; len];
        b.download(buf, 0, &mut values).unwrap();
        values.iter().map(|v| v.to_bits()).collect::<Vec<_>>()
    };
    for (kind, sizes) in selftest::TYPES[2..12].iter().map(|kind| (*kind, [(129, 200, 2048), (1000, 264, 4096), (300, 72, 448)])).chain([
        ("bf16", [(1000, 128, 12_288), (129, 300, 16_384), (257, 1000, 4032)]),
        ("nvfp4", [(1000, 128, 12_288), (129, 300, 16_384), (257, 1000, 4032)]),
        // Some rows: kernels between those for few and for many. What a slow device takes comes first.
        ("bf16", [(64, 200, 2048), (30, 1000, 4032), (12, 300, 16_384)]),
        ("e4m3-block", [(100, 200, 2048), (32, 1000, 4032), (9, 300, 16_384)]),
        ("e4m3-window", [(24, 72, 448), (16, 264, 4096), (40, 200, 1536)]),
        ("nvfp4", [(127, 200, 2048), (33, 1000, 4032), (10, 300, 16_384)]),
        ("mxfp4", [(16, 264, 2048), (24, 72, 448), (40, 200, 4096)]),
        ("q8_0", [(24, 72, 448), (16, 264, 4096), (40, 200, 2048)]),
        ("Q4_K", [(24, 400, 512), (16, 400, 4096), (40, 400, 2048)]),
        ("Q6_K", [(40, 400, 2048), (16, 400, 4096), (24, 400, 512)]),
    ]) {
        for (seed, (rows, out, cols)) in
            sizes.into_iter().enumerate().filter(|(i, size)| *i == 0 && size.2 < 4096 || seeds() == conformance::SEEDS)
        {
            let mut n = Noise::new(seed as u64);
            let what = format!("{kind}, {rows} rows, {out} x {cols}");
            let mut matrix = |rows, cols| selftest::matrix(&mut n, kind, rows, cols).unwrap();
            let (half, hidden) = (out / 2 / 64 * 64 + 64, 192);
            let expert = ExpertSource { gate: matrix(half, cols), up: matrix(half, cols), down: matrix(cols, half) };
            let w = b.weight(&[matrix(out, cols)]).unwrap();
            let gate_up = b.weight(&[matrix(half, cols), matrix(half, cols)]).unwrap();
            let down = b.weight(&[matrix(hidden, half)]).unwrap();
            let bank = b.bank(0, vec![expert.clone(), expert.clone(), expert]).unwrap();
            let x = n.values(rows * cols, 0.0, 1.0);
            let (ids, weights): (Vec<i32>, Vec<f32>) =
                (0..rows * 2).map(|i| (((i / 2 * 5 + i % 2) % 4) as i32, 0.25 + (i % 7) as f32)).unzip();
            // Rows from `first` on: the product's, the gated product's, the experts'.
            let run = |first: usize, count: usize| {
                let at = first..first + count;
                let x = buf(&x[at.start * cols..at.end * cols]);
                let [mut y, mut both, mut z, mut e] = [out, 2 * half, hidden, cols].map(|width| buf(&vec![0.0; count * width]));
                let mut chosen = b.alloc("ids", Elem::I32, count * 2).unwrap();
                b.upload_i32(&ids[at.start * 2..at.end * 2], &mut chosen, 0);
                b.linear(count, &x, &w, &mut y);
                b.mlp(count, &x, &gate_up, &down, LIMIT, &mut both, &mut z);
                b.experts(count, &x, 2, &chosen, &buf(&weights[at.start * 2..at.end * 2]), &bank, LIMIT, &mut e);
                [read(&y, count * out), read(&z, count * hidden), read(&e, count * cols)]
            };
            let all = run(0, rows);
            for first in [0, (rows / 2).min(rows - FEW), rows - FEW] {
                for (op, (all, few)) in ["product", "gated product", "experts"].iter().zip(all.iter().zip(run(first, FEW))) {
                    let width = few.len() / FEW;
                    assert!(
                        all[first * width..(first + FEW) * width] == few,
                        "{op} of {what}: rows from {first} on differ from the same rows alone"
                    );
                }
            }
        }
    }
}

/// A prompt's rows of hyper-connections: another kernel sums the gates, and any split of the rows gives the same bits.
#[test]
fn many_rows_of_hyper_connections() {
    for b in [Precision::F32, Precision::Bf16].into_iter().filter_map(device) {
        for (seed, rows, hidden, kind) in
            [(1, 65, 4096, "f32"), (2, 100, 512, "bf16"), (3, 300, 64, "f16"), (4, 66, 4096, "bf16"), (5, 3, 256, "bf16")]
        {
            let mut n = Noise::new(seed);
            let sites = [(); 2].map(|()| selftest::matrix(&mut n, kind, 24, 4 * hidden).unwrap());
            let judged = rig::judge(b, &Mhc::of(&mut n, rows, 4, hidden, sites));
            judged.unwrap_or_else(|e| panic!("{} {rows} rows, {kind}: {}", b.precision(), &e[..e.len().min(400)]));
        }
    }
}

/// Sequences whose first chunk is all but two tokens, which then follow one by one.
fn long(lengths: &[usize]) -> sequences::Plan {
    sequences::Plan {
        sequences: lengths.len(),
        steps: (0..lengths.len())
            .map(|q| vec![(q, lengths[q] - 2)])
            .chain([(0..lengths.len()).map(|q| (q, 1)).collect(), (0..lengths.len()).map(|q| (q, 1)).collect()])
            .collect(),
    }
}

/// KDA of the release's width: prompts (with decays as they come, all at the bound, and hardly any), and heads of one sequence and of three, which take
/// another kernel when they decode together.
#[test]
fn release_widths_of_kda() {
    let some = KdaDims { heads: 3, head_dim: 128, conv: 4 };
    let two = KdaDims { heads: 2, ..some };
    let all = KdaDims { heads: if seeds() == conformance::SEEDS { 64 } else { 3 }, ..some };
    let decaying = |bound, more| Kda::sized(2, two).decaying(bound, more);
    for b in [Precision::F32, Precision::Bf16].into_iter().filter_map(device) {
        for (seed, what, case, lengths) in [
            (1, "some heads", Kda::sized(1, some), &[40, 21][..]),
            (2, "decays to -5", decaying(-5.0, 0.0), &[53, 18]),
            (3, "decays of -5", decaying(-5.0, 10.0), &[53, 18]),
            (5, "small decays", decaying(-3.0, -10.0), &[53, 18]),
            (4, "all heads", Kda::sized(4, all), &[7, 5, 4]),
        ] {
            let judged = sequences::judge(b, &case, &long(lengths), seed);
            judged.unwrap_or_else(|e| panic!("{} {what}: {}", b.precision(), &e[..e.len().min(400)]));
        }
    }
}

/// The release's widths of heads, latent and index keys, and sequences longer than what is chosen.
#[test]
fn release_widths() {
    for b in [Precision::F32, Precision::Bf16].into_iter().filter_map(device) {
        let say = |what: &str, r: Result<(), String>| r.unwrap_or_else(|e| panic!("{} {what}: {}", b.precision(), &e[..e.len().min(400)]));
        let mla = MlaParams { heads: 20, qk_dim: 96, v_dim: 64, latent: 512 };
        say("attend", mla::Attend::sized(2, mla, 150).and_then(|c| sequences::judge(b, &c, &long(&[220, 30]), 2)));
        // More parts and heads than one block takes.
        let mla = MlaParams { heads: 40, qk_dim: 64, v_dim: 64, latent: 512 };
        say("attend in any cut", mla::Attend::sized(3, mla, 333).and_then(|c| sequences::judge_cuts(b, &c, &long(&[500, 70]), 3)));
        let indexer = IndexerParams { heads: 32, dim: 128, kpool: 4, topk: 64, always_tail: true };
        say("select", sequences::judge(b, &mla::Select::sized(3, indexer), &long(&[300, 67]), 3));
    }
}

/// Heads as wide as the release's, whose queries go onto the latent another way where there are many rows.
#[test]
fn wide_heads_in_any_cut() {
    let (heads, lengths) = if seeds() == conformance::SEEDS { (72, [70, 18]) } else { (5, [21, 18]) };
    for b in [Precision::F32, Precision::Bf16].into_iter().filter_map(device) {
        let kv_b = selftest::matrix(&mut Noise::new(4), "bf16", heads * (256 + 64), 512).unwrap();
        let judged = sequences::judge_cuts(b, &mla::Attend::of(4, kv_b, heads, 256), &long(&lengths), 4);
        judged.unwrap_or_else(|e| panic!("{}: {}", b.precision(), &e[..e.len().min(400)]));
    }
}

/// Far into a long sequence, eight blocks choose for a row where one does for many rows: the same positions, many scores being equal.
#[test]
fn the_index_chooses_alike_alone_and_among_many() {
    let p = IndexerParams { heads: 32, dim: 128, kpool: 1, topk: 2048, always_tail: true };
    let (tokens, rows, chunk, page_tokens) = (13_003usize, 20, 1000, 64);
    let Some(b) = device(Precision::Bf16) else { return };
    let (stride, pages, mut n) = (p.heads + 2 * p.dim, tokens.div_ceil(page_tokens), Noise::new(11));
    let kda = KdaDims { heads: 1, head_dim: 8, conv: 2 };
    let spec = StateSpec { slots: 1, pages, page_tokens, kda_layers: 1, mla_layers: 1, kda, latent: 8, index_dim: p.dim, kpool: p.kpool };
    let mut state = b.state(&spec).unwrap();
    let buf = |values: &[f32]| b.vector("x", values).unwrap();
    let w = IndexKeyWeights { norm_weight: buf(&[1.0; 128]), norm_bias: buf(&[0.1; 128]), ape: buf(&[0.0; 512]) };
    // Keys of few kinds.
    let kinds: Vec<Vec<f32>> = (0..4 * 23).map(|_| n.values(stride, 0.0, 1.0)).collect();
    let proj = |from: usize, count: usize| buf(&(from..from + count).flat_map(|t| kinds[t % kinds.len()].clone()).collect::<Vec<_>>());
    let step = |from: usize, count: usize| {
        let segment = Segment { slot: 0, row0: 0, rows: count as u32, pos0: from as u32, pages: 0..pages as u32 };
        rig::Rig(b).batch(&BatchDesc { tokens: vec![0; count], segments: vec![segment], pages: (0..pages as u32).collect() }).unwrap()
    };
    for from in (0..tokens).step_by(chunk) {
        let count = chunk.min(tokens - from);
        b.index_append(&step(from, count), 0, &proj(from, count), stride, 0, p.dim, &w, &p, &mut state);
    }
    let iq = n.values(rows * p.heads * p.dim, 0.0, 1.0);
    let select = |from: usize, count: usize| {
        let first = from - (tokens - rows);
        let iq = buf(&iq[first * p.heads * p.dim..(first + count) * p.heads * p.dim]);
        let mut selected = b.alloc("selected", Elem::I32, count * p.width()).unwrap();
        b.index_select(&step(from, count), 0, &iq, &proj(from, count), stride, 2 * p.dim, &p, &state, &mut selected);
        let mut ids = vec![0; count * p.width()];
        b.download_i32(&selected, 0, &mut ids).unwrap();
        ids
    };
    let all = select(tokens - rows, rows);
    for (row, want) in all.chunks(p.width()).enumerate() {
        assert!(want.windows(2).all(|pair| pair[0] < pair[1] || pair[1] == -1), "row {row} is not ascending");
        assert_eq!(select(tokens - rows + row, 1), want, "row {row} alone");
    }
}

/// Rows of a check of the router.
const ROUTED: usize = 10_240;

/// The ids that the device chooses for rows of `x`, 512 at a time.
fn routed(b: &CudaBackend, x: &[f32], w: &[f32], bias: &[f32], p: &RouterParams) -> Vec<i32> {
    let (hidden, rows) = (w.len() / p.experts, 512);
    let w = b.weight(&[MatrixSource::from_f32("router", p.experts, hidden, w).unwrap()]).unwrap();
    let bias = b.vector("bias", bias).unwrap();
    let (mut ids, mut weights) = (b.alloc("ids", Elem::I32, rows * p.topk).unwrap(), b.alloc("weights", Elem::F32, rows * p.topk).unwrap());
    let mut all = Vec::new();
    for some in x.chunks(rows * hidden) {
        let buf = b.vector("x", some).unwrap();
        b.router(some.len() / hidden, &buf, &w, &bias, p, &mut ids, &mut weights);
        let mut got = vec![0; some.len() / hidden * p.topk];
        b.download_i32(&ids, 0, &mut got).unwrap();
        all.extend(got);
    }
    all
}

/// A prompt's rows go through another kernel of the router than a few: the same choice and the same bits of its weights.
#[test]
fn the_router_of_many_rows_has_the_bits_of_few() {
    for b in [Precision::F32, Precision::Bf16].into_iter().filter_map(device) {
        for (seed, kind, rows, experts, hidden) in [(1, "bf16", 205, 288, 4096), (2, "f32", 64, 30, 2056), (3, "f16", 129, 7, 4000)] {
            let mut n = Noise::new(seed);
            let w = b.weight(&[selftest::matrix(&mut n, kind, experts, hidden).unwrap()]).unwrap();
            let (x, bias) = (n.values(rows * hidden, 0.0, 1.0), b.vector("bias", &n.values(experts, 0.0, 0.1)).unwrap());
            let p = RouterParams { experts, topk: 7, groups: 1, topk_group: 1, norm_topk: false, scale: 1.0 };
            let run = |first: usize, count: usize| {
                let x = b.vector("x", &x[first * hidden..(first + count) * hidden]).unwrap();
                let mut ids = b.alloc("ids", Elem::I32, count * 7).unwrap();
                let mut weights = b.alloc("weights", Elem::F32, count * 7).unwrap();
                b.router(count, &x, &w, &bias, &p, &mut ids, &mut weights);
                let (mut chosen, mut values) = (vec![0; count * 7], vec![0.0; count * 7]);
                b.download_i32(&ids, 0, &mut chosen).unwrap();
                b.download(&weights, 0, &mut values).unwrap();
                chosen.into_iter().zip(values.into_iter().map(f32::to_bits)).collect::<Vec<_>>()
            };
            let all = run(0, rows);
            let few: Vec<_> = (0..rows).step_by(5).flat_map(|first| run(first, 5.min(rows - first))).collect();
            assert!(all == few, "{kind}, {rows} rows, {experts} experts of {hidden}, {}", b.precision());
        }
    }
}

/// From equal scores the same ids, exactly; from random rows other ids only where the f64 scores at that place are within 1e-6.
#[test]
fn the_router_chooses_as_the_reference() {
    let p = RouterParams { experts: 288, topk: 8, groups: 1, topk_group: 1, norm_topk: true, scale: 2.5 };
    let routing = Routing { topk: p.topk, groups: 1, topk_group: 1, norm_topk: true, scale: 2.5 };
    let wide = |v: &[f32]| v.iter().map(|&v| f64::from(v)).collect::<Vec<_>>();
    let ids = |logits: &[f64], bias: &[f64]| route(logits, bias, &routing).into_iter().map(|c| c.0 as i32).collect::<Vec<_>>();
    let Some(b) = device(Precision::Bf16) else { return };
    let mut n = Noise::new(7);

    // Logits as they are: few values, so that many are equal, and a bias that excludes.
    let logits: Vec<f32> = (0..ROUTED * p.experts).map(|_| n.between(0, 64) as f32 / 8.0 - 4.0).collect();
    let identity: Vec<f32> = (0..p.experts * p.experts).map(|i| if i / p.experts == i % p.experts { 1.0 } else { 0.0 }).collect();
    let bias: Vec<f32> = (0..p.experts).map(|e| if e % 5 == 0 { -2.0 } else { 0.0 }).collect();
    let got = routed(b, &logits, &identity, &bias, &p);
    for (row, (got, logits)) in got.chunks(p.topk).zip(logits.chunks(p.experts)).enumerate() {
        assert_eq!(got, ids(&wide(logits), &wide(&bias)), "row {row} of equal scores");
    }

    let hidden = 256;
    let (x, w) = (n.values(ROUTED * hidden, 0.0, 1.0), n.values(p.experts * hidden, 0.0, 0.2));
    let bias = n.values(p.experts, 0.0, 0.1);
    let (wide_w, wide_bias) = (wide(&w), wide(&bias));
    let mut other = 0;
    for (row, (got, x)) in routed(b, &x, &w, &bias, &p).chunks(p.topk).zip(x.chunks(hidden)).enumerate() {
        let logits = linear(&wide(x), &wide_w);
        let want = ids(&logits, &wide_bias);
        let score = |e: i32| sigmoid(logits[e as usize]) + wide_bias[e as usize];
        for (&g, &w) in got.iter().zip(&want).filter(|(g, w)| g != w) {
            assert!((score(g) - score(w)).abs() < 1e-6, "row {row}: expert {g} of score {} where {w} has {}", score(g), score(w));
        }
        other += usize::from(got != want);
    }
    println!("router: {ROUTED} rows of equal scores alike; of {ROUTED} random rows {other} differ, all within 1e-6");
}

/// More than the pinned memory has room for, in several pieces.
#[test]
fn large_copies() {
    let Some(b) = device(Precision::F32) else { return };
    let values: Vec<f32> = (0..9_000_001u32).map(|i| i.wrapping_mul(0x9E37_79B9) as f32).collect();
    let mut buf = b.alloc("large", Elem::F32, values.len()).unwrap();
    b.upload(&values, &mut buf, 0);
    let mut back = vec![0.0; values.len() - 5];
    b.download(&buf, 5, &mut back).unwrap();
    assert!(back == values[5..]);
}

#[test]
fn a_buffer_that_does_not_fit_is_refused_with_numbers() {
    let Some(b) = device(Precision::F32) else { return };
    let e = b.alloc("a large buffer", Elem::F32, 1 << 44).unwrap_err().to_string();
    assert!(e.contains("a large buffer") && e.contains(&(4u64 << 44).to_string()) && e.contains("available on cuda:"), "{e}");
    b.alloc("a small one after it", Elem::F32, 100).unwrap();
    b.sync().unwrap();
}

#[test]
fn the_self_test_passes() {
    for b in [Precision::F32, Precision::Bf16].into_iter().filter_map(device) {
        let began = std::time::Instant::now();
        b.self_test().unwrap();
        println!("self-test in {}: {:.2?}", b.precision(), began.elapsed());
    }
}

#[test]
fn a_device_that_is_not_there_is_named() {
    let e = CudaBackend::new(CudaOptions::new(99, Precision::F32)).unwrap_err().to_string();
    assert!(e.contains("cuda:99"), "{e}");
    println!("{e}");
}
