//! `scripts/gpu-bench`: the ops of the CUDA backend at the release's sizes over rotating weights, as a table: µs, GB/s, and the share of the
//! read bandwidth that the same run measured. Arguments: `--device N`, `--f32`, `--kind TYPE` (again for more), and words
//! that a group's name must contain.
//!
//! Times are the device's own, over many calls that are recorded once and replayed (a CUDA graph), so that the host's rate of launching does not
//! show. Sampling, which the host takes part in, is timed as it is called.

use std::{error::Error, sync::Arc};

use tandem_kernels::{
    Backend, BackendError, BatchDesc, DeviceKind, Elem, ExpertSource, IndexKeyWeights, IndexerParams, KdaDims, KdaParams, KdaWeights,
    MhcGates, MhcParams, MhcWeights, MlaParams, Precision, RouterParams, SampleRow, Segment, StateSpec,
    cuda::{CudaBackend, CudaBuf, CudaOptions, CudaWeight},
    weight_bytes,
};
use tandem_quant::{DType, MatrixSource, ScaleForm, Scales, SharedBytes};

type Outcome = Result<(), Box<dyn Error>>;
/// Measures one kind of op and prints its lines.
type Group = fn(&Bench) -> Outcome;

const ROWS: [usize; 6] = [1, 2, 4, 8, 16, 32];
/// Types of codes that stand for their kernels: 4 bits with minima, 8 bits, tables, few bits with minima.
const CODED: [&str; 5] = ["q4_k", "q6_k", "iq4_xs", "iq3_s", "q2_k"];
const ROUNDS: usize = 7;
const D: usize = 4096;

/// What entries are made with.
struct Bench {
    b: CudaBackend,
    /// Bytes a second.
    read: f64,
    memory: SharedBytes,
    /// Types to measure; all where there are none.
    kinds: Vec<String>,
}

fn main() -> Outcome {
    let mut args = std::env::args().skip(1);
    let (mut ordinal, mut precision, mut words, mut kinds) = (0, Precision::Bf16, Vec::new(), Vec::new());
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--bench" => {}
            "--device" => ordinal = args.next().unwrap_or_default().parse()?,
            "--kind" => kinds.extend(args.next()),
            "--f32" => precision = Precision::F32,
            word => words.push(word.to_owned()),
        }
    }
    let b = match CudaBackend::new(CudaOptions::new(ordinal, precision)) {
        Ok(b) => b,
        Err(e) => {
            println!("SKIPPED: {e}");
            return Ok(());
        }
    };
    let read = b.read_bandwidth(4 << 30)?;
    println!("{} ({precision}); read bandwidth {:.3} TB/s", b.device().description, read / 1e12);
    println!("\n| {:<52} | {:>9} | {:>9} | {:>6} |", "op", "µs", "GB/s", "read");
    println!("|{:-<54}|{:->11}|{:->11}|{:->8}|", "", "", "", "");
    let bench = Bench { b, read, memory: noise(1400 << 20), kinds };
    let groups: [(&str, Group); 9] = [
        ("gemv", gemv),
        ("experts", experts),
        ("kda", kda),
        ("mla", mla),
        ("indexer", indexer),
        ("index-rows", index_rows),
        ("mhc", mhc),
        ("router-sample", router_and_sampler),
        ("prefill", prefill),
    ];
    for (name, run) in groups {
        if words.is_empty() || words.iter().any(|w| name.contains(w.as_str())) {
            run(&bench)?;
        }
    }
    Ok(())
}

/// Bytes that are sound as any type: bf16 and f16 near 0.01, E4M3 around 1, nibbles of all kinds.
fn noise(bytes: usize) -> SharedBytes {
    let mut v = vec![0u8; bytes];
    let mut x = 0x9e37_79b9_7f4a_7c15u64;
    for c in v.as_chunks_mut::<8>().0 {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        *c = (x & 0xb07f_b07f_b07f_b07f | 0x3c00_3c00_3c00_3c00).to_le_bytes();
    }
    SharedBytes::new(Arc::new(v))
}

impl Bench {
    /// Whether a type is not asked for.
    fn skips(&self, kind: &str) -> bool {
        !self.kinds.is_empty() && self.kinds.iter().all(|k| k != kind)
    }

    /// Times calls of `op(i)`, i rotating; `bytes` is what one call must move.
    fn entry(&self, name: &str, calls: usize, bytes: usize, mut op: impl FnMut(usize)) -> Outcome {
        op(0);
        self.b.sync()?;
        let ms = self.b.replayed(ROUNDS, || (0..calls).for_each(&mut op))?;
        self.b.sync()?;
        let times = ms.iter().map(|ms| f64::from(*ms) * 1e3 / calls as f64).collect();
        self.line(name, bytes, times)
    }

    /// The same for calls that the host takes part in.
    fn with_host(&self, name: &str, calls: usize, bytes: usize, mut op: impl FnMut(usize)) -> Outcome {
        let mut round = || Ok::<_, BackendError>(f64::from(self.b.timed(|| (0..calls).for_each(&mut op))?) * 1e3 / calls as f64);
        let times = (0..=ROUNDS).map(|_| round()).collect::<Result<_, _>>()?;
        self.line(name, bytes, times)
    }

    /// Times calls that are bound by arithmetic, `operations` each: the median of [`ROUNDS`].
    fn arithmetic(&self, name: &str, operations: f64, mut op: impl FnMut(usize)) -> Outcome {
        op(0);
        self.b.sync()?;
        let mut times =
            (0..ROUNDS).map(|_| Ok::<_, BackendError>(self.b.timed(|| (0..3).for_each(&mut op))? / 3.0)).collect::<Result<Vec<_>, _>>()?;
        self.b.sync()?;
        times.sort_by(f32::total_cmp);
        let ms = f64::from(times[times.len() / 2]);
        println!("| {name:<52} | {:>9.0} | {:>7.1} TFLOP/s      |", ms * 1e3, operations / ms / 1e9);
        Ok(())
    }

    /// Prints the median.
    fn line(&self, name: &str, bytes: usize, mut times: Vec<f64>) -> Outcome {
        times.sort_by(f64::total_cmp);
        let us = times[times.len() / 2];
        let rate = bytes as f64 / us * 1e6;
        println!("| {name:<52} | {us:>9.2} | {:>9.0} | {:>4.0} % |", rate / 1e9, rate / self.read * 100.0);
        Ok(())
    }

    fn buf(&self, len: usize) -> Result<CudaBuf, BackendError> {
        let mut buf = self.b.alloc("bench", Elem::F32, len)?;
        let values: Vec<f32> = (0..len.min(1 << 20)).map(|i| ((i * 2_654_435_761) % 1000) as f32 / 1000.0 - 0.5).collect();
        for (i, chunk) in (0..len).collect::<Vec<_>>().chunks(1 << 20).enumerate() {
            self.b.upload(&values[..chunk.len()], &mut buf, i << 20);
        }
        Ok(buf)
    }

    /// The `i`-th matrix of a type; its bytes begin somewhere else each time.
    fn matrix(&self, kind: &str, rows: usize, cols: usize, i: usize) -> Result<MatrixSource, Box<dyn Error>> {
        let dtype = match kind {
            "bf16" => DType::Bf16,
            "f32" => DType::F32,
            "fp8" => DType::F8E4m3,
            "nvfp4" => DType::Nvfp4Pairs,
            "mxfp4" => DType::Mxfp4Pairs,
            "q8_0" => DType::Q8_0,
            _ => coded(kind)?,
        };
        let bytes = rows * dtype.row_bytes(cols).ok_or("columns")?;
        let from = (i * 97 * 4096) % (self.memory.len() - bytes);
        let m = MatrixSource::new(kind, dtype, rows, cols, self.memory.slice(from..from + bytes).ok_or("memory")?)?;
        Ok(match kind {
            "fp8" => {
                let (grid_cols, grid_rows) = (cols.div_ceil(128), rows.div_ceil(128));
                m.with_scales(Scales::Grid {
                    values: vec![0.01; grid_cols * grid_rows].into(),
                    grid_cols,
                    block_rows: 128,
                    block_cols: 128,
                })
            }
            "nvfp4" => {
                let scales = SharedBytes::from_vec(vec![0x30; rows * cols / 16]);
                m.with_scales(Scales::E4m3Groups { bytes: scales, stride: cols / 16, global: 0.01 })
            }
            "mxfp4" => {
                let scales = SharedBytes::from_vec(vec![120; rows * cols / 32]);
                m.with_scales(Scales::E8m0Groups { bytes: scales, stride: cols / 32 })
            }
            _ => m,
        })
    }

    /// Weights of a shape, enough of them that no cache holds them.
    fn weights(&self, kind: &str, rows: usize, cols: usize) -> Result<(Vec<CudaWeight>, usize), Box<dyn Error>> {
        let bytes = stored_bytes(kind, rows, cols);
        let count = (400_000_000 / bytes).clamp(2, 24);
        let all =
            (0..count).map(|i| Ok(self.b.weight(&[self.matrix(kind, rows, cols, i)?])?)).collect::<Result<Vec<_>, Box<dyn Error>>>()?;
        Ok((all, bytes))
    }
}

/// The block type of a name in lower case.
fn coded(kind: &str) -> Result<DType, String> {
    DType::ALL.iter().copied().find(|dtype| dtype.name().eq_ignore_ascii_case(kind)).ok_or_else(|| format!("no type {kind}"))
}

/// Bytes of a matrix with its scales, in the device's memory.
fn stored_bytes(kind: &str, rows: usize, cols: usize) -> usize {
    let n = rows * cols;
    match kind {
        "f32" => 4 * n,
        "bf16" => 2 * n,
        "fp8" => n + n / (128 * 128) * 4,
        "nvfp4" => n / 2 + n / 16,
        "mxfp4" => n / 2 + n / 32,
        "q8_0" => n + n / 16,
        _ => coded(kind).map_or(0, |dtype| weight_bytes(DeviceKind::Cuda, dtype, ScaleForm::None, &[rows, cols], 0) as usize),
    }
}

fn gemv(t: &Bench) -> Outcome {
    for (what, out, cols) in [("KDA in-projection", 24_896, D), ("KDA out-projection", D, 8192), ("head", 154_880, D)] {
        for kind in ["bf16", "fp8", "nvfp4", "mxfp4", "q8_0"].into_iter().chain(CODED) {
            if t.skips(kind) || (what == "head" && !matches!(kind, "bf16" | "fp8")) {
                continue;
            }
            let (w, bytes) = t.weights(kind, out, cols)?;
            for m in ROWS {
                let (x, mut y) = (t.buf(m * cols)?, t.buf(m * out)?);
                let name = format!("{what} {out} x {cols} {kind}, M = {m}");
                t.entry(&name, 24, bytes, |i| t.b.linear(m, &x, &w[i % w.len()], &mut y))?;
            }
        }
    }
    Ok(())
}

/// Rows of a prefill's chunk.
const CHUNKS: [usize; 3] = [1024, 4096, 8192];

fn experts(t: &Bench) -> Outcome {
    let (all, k, inter) = (288, 8, 2048);
    for kind in ["nvfp4", "mxfp4"].into_iter().chain(CODED) {
        if t.skips(kind) {
            continue;
        }
        let one = |i: usize| -> Result<ExpertSource, Box<dyn Error>> {
            Ok(ExpertSource {
                gate: t.matrix(kind, inter, D, 3 * i)?,
                up: t.matrix(kind, inter, D, 3 * i + 1)?,
                down: t.matrix(kind, D, inter, 3 * i + 2)?,
            })
        };
        let bank = t.b.bank(0, (0..all).map(one).collect::<Result<_, _>>()?)?;
        for m in ROWS.into_iter().chain(CHUNKS) {
            // Uniform choices, other ones in each call.
            let mut x = 88_172_645_463_325_252u64;
            let mut next = || {
                x ^= x << 13;
                x ^= x >> 7;
                x ^= x << 17;
                x
            };
            let mut distinct = 0;
            let mut sets = Vec::new();
            for _ in 0..16 {
                let mut ids = Vec::new();
                for _ in 0..m {
                    let mut row: Vec<i32> = Vec::new();
                    while row.len() < k {
                        let e = (next() % all as u64) as i32;
                        if !row.contains(&e) {
                            row.push(e);
                        }
                    }
                    ids.extend(row);
                }
                let mut buf = t.b.alloc("ids", Elem::I32, m * k)?;
                t.b.upload_i32(&ids, &mut buf, 0);
                sets.push(buf);
                ids.sort_unstable();
                ids.dedup();
                distinct += ids.len();
            }
            let (x, weights, mut y) = (t.buf(m * D)?, t.buf(m * k)?, t.buf(m * D)?);
            let bytes = stored_bytes(kind, 3 * inter, D) * distinct / sets.len();
            let name = format!("experts {kind}, M = {m} ({:.0} distinct)", distinct as f64 / sets.len() as f64);
            let op = |i: usize| t.b.experts(m, &x, k, &sets[i % 16], &weights, &bank, Some(10.0), &mut y);
            if m < CHUNKS[0] {
                t.entry(&name, 32, bytes, op)?;
            } else {
                t.arithmetic(&format!("experts {kind}, {m} rows"), (6 * m * k * inter * D) as f64, op)?;
            }
        }
    }
    Ok(())
}

/// `segments` sequences of `rows` rows from `pos` on.
fn batch(t: &Bench, segments: usize, rows: usize, pos: usize) -> Result<<CudaBackend as Backend>::Batch, BackendError> {
    let pages = (pos + rows).div_ceil(64);
    let segment = |s: usize| Segment {
        slot: s as u32,
        row0: (s * rows) as u32,
        rows: rows as u32,
        pos0: pos as u32,
        pages: (s * pages) as u32..((s + 1) * pages) as u32,
    };
    let desc = BatchDesc {
        tokens: vec![0; segments * rows],
        segments: (0..segments).map(segment).collect(),
        pages: (0..(segments * pages) as u32).collect(),
    };
    let mut batch = t.b.batch(segments * rows, segments, segments * pages)?;
    t.b.set_batch(&desc, &mut batch);
    Ok(batch)
}

fn spec(slots: usize, pages: usize, kda_layers: usize, mla_layers: usize) -> StateSpec {
    let kda = KdaDims { heads: 64, head_dim: 128, conv: 4 };
    StateSpec { slots, pages, page_tokens: 64, kda_layers, mla_layers, kda, latent: 512, index_dim: 128, kpool: 4 }
}

fn kda(t: &Bench) -> Outcome {
    let (hd, layers) = (64 * 128, 8);
    let p = KdaParams { dims: spec(0, 0, 0, 0).kda, lower_bound: Some(-5.0), eps: 1e-5 };
    let w = KdaWeights::<CudaBackend> { conv: t.buf(3 * hd * 4)?, a_log: t.buf(64)?, dt_bias: t.buf(hd)?, o_norm: t.buf(128)? };
    let mut state = t.b.state(&spec(32, 0, layers, 0))?;
    let stride = 3 * hd + 256 + 64;
    for (segments, rows) in [(1, 1), (2, 1), (4, 1), (8, 1), (16, 1), (32, 1), (1, 512), (1, 4096)] {
        let n = segments * rows;
        let step = batch(t, segments, rows, 0)?;
        let (proj, f, g, mut out) = (t.buf(n * stride)?, t.buf(n * hd)?, t.buf(n * hd)?, t.buf(n * hd)?);
        let bytes = segments * (2 * 64 * 128 * 128 * 4) + n * (stride + 3 * hd) * 4;
        let name = format!("KDA mixer, {segments} sequences x {rows} rows");
        t.entry(&name, if rows == 1 { 32 } else { 2 }, bytes, |i| {
            t.b.kda(&step, i % layers, &proj, stride, 3 * hd + 256, &f, &g, &w, &p, &mut state, &mut out);
        })?;
    }
    Ok(())
}

fn mla(t: &Bench) -> Outcome {
    let p = MlaParams { heads: 64, qk_dim: 256, v_dim: 256, latent: 512 };
    let (w, bytes_w) = t.weights("bf16", 64 * 512, 512)?;
    let width = 2051;
    let layers = 4;
    for (segments, rows, context) in [(1, 1, 8192), (4, 1, 8192), (16, 1, 8192), (1, 1, 512), (1, 512, 8192), (1, 4096, 8192)] {
        let n = segments * rows;
        let step = batch(t, segments, rows, context - rows)?;
        let state = t.b.state(&spec(segments, segments * context.div_ceil(64), 0, layers))?;
        let visible = context.min(width);
        let mut ids = vec![-1; n * width];
        for row in ids.chunks_exact_mut(width) {
            (0..visible).for_each(|i| row[i] = (i * context / visible) as i32);
        }
        let mut selected = t.b.alloc("selected", Elem::I32, ids.len())?;
        t.b.upload_i32(&ids, &mut selected, 0);
        let (q, mut out) = (t.buf(n * 64 * 256)?, t.buf(n * 64 * 256)?);
        let bytes = bytes_w + n * visible * 1024;
        let name = format!("MLA attention with both absorbs, {n} rows over {visible}");
        t.entry(&name, 24, bytes, |i| t.b.mla_attend(&step, i % layers, &q, &w[i % w.len()], &selected, width, &p, &state, &mut out))?;
    }
    Ok(())
}

fn index_rows(t: &Bench) -> Outcome {
    let p = IndexerParams { heads: 32, dim: 128, kpool: 4, topk: 2048, always_tail: true };
    let (stride, layers, context) = (2336, 4, 8192);
    let w = IndexKeyWeights::<CudaBackend> { norm_weight: t.buf(128)?, norm_bias: t.buf(128)?, ape: t.buf(4 * 128)? };
    let mut state = t.b.state(&spec(1, context / 64, 0, layers))?;
    for rows in [512, 4096] {
        let step = batch(t, 1, rows, context - rows)?;
        let (iq, proj) = (t.buf(rows * 32 * 128)?, t.buf(rows * stride)?);
        let mut selected = t.b.alloc("selected", Elem::I32, rows * p.width())?;
        let bytes = rows * (32 * 128 + 32 + p.width()) * 4 + context / 4 * 512;
        t.entry(&format!("index append + select, a chunk of {rows} rows"), 2, bytes, |i| {
            t.b.index_append(&step, i % layers, &proj, stride, 2048, 2176, &w, &p, &mut state);
            t.b.index_select(&step, i % layers, &iq, &proj, stride, 2304, &p, &state, &mut selected);
        })?;
    }
    Ok(())
}

fn indexer(t: &Bench) -> Outcome {
    let p = IndexerParams { heads: 32, dim: 128, kpool: 4, topk: 2048, always_tail: true };
    let stride = 2336;
    let w = IndexKeyWeights::<CudaBackend> { norm_weight: t.buf(128)?, norm_bias: t.buf(128)?, ape: t.buf(4 * 128)? };
    for (segments, context) in [(1, 2048), (1, 8192), (1, 32_768), (1, 131_072), (8, 32_768)] {
        let step = batch(t, segments, 1, context - 1)?;
        let layers = 4;
        let mut state = t.b.state(&spec(segments, segments * context.div_ceil(64), 0, layers))?;
        let (iq, proj) = (t.buf(segments * 32 * 128)?, t.buf(segments * stride)?);
        let mut selected = t.b.alloc("selected", Elem::I32, segments * p.width())?;
        let bytes = if context > p.width() { segments * context / 4 * 512 } else { 0 };
        t.entry(&format!("index append + select, {segments} rows of context {context}"), 24, bytes, |i| {
            t.b.index_append(&step, i % layers, &proj, stride, 2048, 2176, &w, &p, &mut state);
            t.b.index_select(&step, i % layers, &iq, &proj, stride, 2304, &p, &state, &mut selected);
        })?;
    }
    Ok(())
}

fn mhc(t: &Bench) -> Outcome {
    let p = MhcParams { streams: 4, hidden: D, rms_eps: 1e-5, hc_eps: 1e-6, iters: 20 };
    let site = |i| -> Result<MhcWeights<CudaBackend>, Box<dyn Error>> {
        Ok(MhcWeights { fn_: t.b.weight(&[t.matrix("bf16", 24, 4 * D, i)?])?, base: t.buf(24)?, scale: t.buf(3)?, norm: t.buf(D)? })
    };
    let sites = (0..48).map(site).collect::<Result<Vec<_>, _>>()?;
    for m in ROWS.into_iter().chain([512, 4096]) {
        let (mut streams, y, mut x) = (t.buf(m * 4 * D)?, t.buf(m * D)?, t.buf(m * D)?);
        let mut gates = MhcGates::<CudaBackend> { post: t.buf(m * 4)?, comb: t.buf(m * 16)? };
        let bytes = 24 * 4 * D * 2 + m * 10 * D * 4;
        t.entry(&format!("mHC boundary, {m} rows"), 48, bytes, |i| {
            t.b.mhc_boundary(m, &y, &mut gates, &sites[i % 48], &p, &mut streams, &mut x);
        })?;
    }
    Ok(())
}

fn router_and_sampler(t: &Bench) -> Outcome {
    let p = RouterParams { experts: 288, topk: 8, groups: 1, topk_group: 1, norm_topk: true, scale: 2.5 };
    let (w, bytes) = t.weights("bf16", 288, D)?;
    let bias = t.buf(288)?;
    for m in ROWS.into_iter().chain([64, 512, 4096]) {
        let (x, mut ids, mut weights) = (t.buf(m * D)?, t.b.alloc("ids", Elem::I32, m * 8)?, t.buf(m * 8)?);
        t.entry(&format!("router, {m} rows"), 48, bytes, |i| t.b.router(m, &x, &w[i % w.len()], &bias, &p, &mut ids, &mut weights))?;
    }
    for m in [1usize, 8, 32] {
        let logits = t.buf(m * 154_880)?;
        let greedy = |row| SampleRow { logprobs: Some(1), ..SampleRow::greedy(row) };
        let rows: Vec<SampleRow> = (0..m as u32).map(greedy).collect();
        let mut failed = None;
        t.with_host(&format!("greedy with logprob, {m} rows, host read included"), 8, m * 154_880 * 4, |_| {
            failed = t.b.sample(&logits, 154_880, &rows).err();
        })?;
        if let Some(e) = failed {
            return Err(e.into());
        }
    }
    Ok(())
}

fn prefill(t: &Bench) -> Outcome {
    for (kind, m) in
        [("bf16", 512), ("bf16", 1024), ("bf16", 4096), ("bf16", 8192), ("fp8", 4096), ("nvfp4", 4096), ("nvfp4", 8192), ("q8_0", 4096)]
    {
        let (w, _) = t.weights(kind, 24_896, D)?;
        let (x, mut y) = (t.buf(m * D)?, t.buf(m * 24_896)?);
        let name = format!("in-projection {kind}, {m} rows");
        t.arithmetic(&name, 2.0 * (m * D) as f64 * 24_896.0, |i| t.b.linear(m, &x, &w[i % w.len()], &mut y))?;
        // The first rows alone: another kernel, and the same bits.
        let (mut many, mut few, mut alone) = (vec![0.0; 8 * 24_896], vec![0.0; 8 * 24_896], t.buf(8 * 24_896)?);
        t.b.linear(m, &x, &w[0], &mut y);
        t.b.linear(8, &x, &w[0], &mut alone);
        t.b.download(&y, 0, &mut many)?;
        t.b.download(&alone, 0, &mut few)?;
        if many.iter().zip(&few).any(|(a, b)| a.to_bits() != b.to_bits()) {
            return Err(format!("{kind}: rows of {m} differ from the same rows alone").into());
        }
    }
    Ok(())
}
