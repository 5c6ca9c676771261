//! The entries: each at the release's sizes (hidden 4,096; 64 KDA heads × 128; MLA 64 heads, latent 512; experts 2,048 wide, top-8).

use std::sync::Arc;

use tandem_kernels::{
    Backend, BackendError, BatchDesc, Elem, ExpertSource, IndexKeyWeights, IndexerParams, KdaDims, KdaParams, KdaWeights, MhcGates,
    MhcParams, MhcWeights, MlaParams, RouterParams, SampleRow, Segment, StateSpec,
    cpu::{CpuBackend, CpuBuf},
};
use tandem_quant::{DType, MatrixSource, SharedBytes};

use crate::measure::entry;

type Outcome = Result<(), BackendError>;

/// Runs the entries of a group.
type Group = fn(&Bench<'_>) -> Outcome;

/// Groups by name.
pub const GROUPS: [(&str, Group); 8] = [
    ("gemv", gemv),
    ("prefill", prefill),
    ("experts", experts),
    ("kda", kda),
    ("mla", mla),
    ("indexer", indexer),
    ("mhc", mhc),
    ("router-sample", router_and_sampler),
];

const D: usize = 4096;

/// bf16 numbers around ±0.02, more than any cache holds.
pub struct Memory(SharedBytes);

impl Memory {
    pub fn new(bytes: usize) -> Self {
        let mut v = vec![0u8; bytes];
        let mut x = 0x9e37_79b9_7f4a_7c15u64;
        for c in v.as_chunks_mut::<8>().0 {
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            // Four bf16 values: random sign and mantissa, exponent of 2^-6.
            *c = (x & 0x807f_807f_807f_807f | 0x3c80_3c80_3c80_3c80).to_le_bytes();
        }
        Self(SharedBytes::new(Arc::new(v)))
    }

    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Matrices of this shape that follow each other through the memory.
    fn matrices(&self, dtype: DType, rows: usize, cols: usize) -> Vec<MatrixSource> {
        let bytes = rows * dtype.row_bytes(cols).unwrap_or(0);
        let one = |i: usize| MatrixSource::new("bench", dtype, rows, cols, self.0.slice(i * bytes..(i + 1) * bytes)?).ok();
        (0..self.bytes().len() / bytes).map_while(one).collect()
    }
}

/// What an entry is made with.
pub struct Bench<'a> {
    pub backend: &'a CpuBackend,
    pub memory: &'a Memory,
    pub clock: crate::measure::Clock,
}

impl Bench<'_> {
    fn buf(&self, len: usize) -> Result<CpuBuf, BackendError> {
        let mut buf = self.backend.alloc("bench", Elem::F32, len)?;
        let values: Vec<f32> = (0..len).map(|i| ((i * 37 % 101) as f32 - 50.0) / 50.0).collect();
        self.backend.upload(&values, &mut buf, 0);
        Ok(buf)
    }

    fn entry(&self, name: impl Into<String>, calls: usize, bytes: usize, flops: usize, op: impl FnMut(usize)) {
        let machine = (self.backend.threads(), self.backend.isa().lanes());
        entry(self.clock, name, self.memory.bytes(), machine, calls, bytes, flops, op);
    }
}

fn gemv(b: &Bench<'_>) -> Outcome {
    for (dtype, rows, cols) in [(DType::Bf16, D, D), (DType::Bf16, 24_640, D), (DType::F16, D, D), (DType::F32, D, D)] {
        let weights = b.memory.matrices(dtype, rows, cols).into_iter().map(|m| b.backend.weight(&[m])).collect::<Result<Vec<_>, _>>()?;
        let bytes = rows * dtype.row_bytes(cols).unwrap_or(0);
        let counts: &[usize] = if dtype == DType::Bf16 { &[1, 2, 4, 8, 16] } else { &[1, 4] };
        for &m in counts {
            let x = b.buf(m * cols)?;
            let mut out = b.buf(m * rows)?;
            let name = format!("linear {dtype} {rows}x{cols}, {m} rows");
            b.entry(name, weights.len(), bytes, 2 * m * rows * cols, |i| b.backend.linear(m, &x, &weights[i], &mut out));
        }
    }
    b.backend.sync()
}

fn prefill(b: &Bench<'_>) -> Outcome {
    let weights =
        b.memory.matrices(DType::Bf16, D, D).into_iter().take(2).map(|m| b.backend.weight(&[m])).collect::<Result<Vec<_>, _>>()?;
    for m in [64, 256, 512] {
        let x = b.buf(m * D)?;
        let mut out = b.buf(m * D)?;
        b.entry(format!("linear BF16 {D}x{D}, {m} rows"), 2, 0, 2 * m * D * D, |i| {
            b.backend.linear(m, &x, &weights[i], &mut out);
        });
    }
    b.backend.sync()
}

fn experts(b: &Bench<'_>) -> Outcome {
    let (inter, held, k) = (2048, 24, 8);
    let up = b.memory.matrices(DType::Bf16, inter, D);
    let down = b.memory.matrices(DType::Bf16, D, inter);
    let sources =
        (0..held).map(|e| ExpertSource { gate: up[3 * e].clone(), up: up[3 * e + 1].clone(), down: down[3 * e + 2].clone() }).collect();
    let bank = b.backend.bank(0, sources)?;
    for rows in [1usize, 4, 16, 64, 256] {
        let (x, weights) = (b.buf(rows * D)?, b.buf(rows * k)?);
        let mut out = b.buf(rows * D)?;
        let mut ids = b.backend.alloc("ids", Elem::I32, rows * k)?;
        // Calls rotate over the bank; rows of a call are spread over it.
        let choice = |call: usize| -> Vec<i32> {
            (0..rows).flat_map(|r| (0..k).map(move |j| ((call * 8 + r * 5 + j * (1 + r % 2)) % held) as i32)).collect()
        };
        let mut touched = choice(0);
        touched.sort_unstable();
        touched.dedup();
        let bytes = touched.len() * 3 * inter * D * 2;
        let name = format!("experts top-8 of {held}, {rows} rows ({} read)", touched.len());
        b.entry(name, if rows > 16 { 1 } else { 3 }, bytes, rows * k * 6 * inter * D, |i| {
            b.backend.upload_i32(&choice(i), &mut ids, 0);
            b.backend.experts(rows, &x, k, &ids, &weights, &bank, Some(10.0), &mut out);
        });
    }
    b.backend.sync()
}

fn spec(slots: usize, pages: usize, kda_layers: usize, mla_layers: usize) -> StateSpec {
    StateSpec {
        slots,
        pages,
        page_tokens: 64,
        kda_layers,
        mla_layers,
        kda: KdaDims { heads: 64, head_dim: 128, conv: 4 },
        latent: 512,
        index_dim: 128,
        kpool: 4,
    }
}

/// `segments` of `rows` rows at position `pos`, each with its own pages.
fn batch(b: &Bench<'_>, segments: usize, rows: usize, pos: usize) -> Result<<CpuBackend as Backend>::Batch, BackendError> {
    let pages = (pos + rows).div_ceil(64) as u32;
    let desc = BatchDesc {
        tokens: vec![0; segments * rows],
        segments: (0..segments as u32)
            .map(|s| Segment { slot: s, row0: s * rows as u32, rows: rows as u32, pos0: pos as u32, pages: s * pages..(s + 1) * pages })
            .collect(),
        pages: (0..segments as u32 * pages).collect(),
    };
    let mut batch = b.backend.batch(desc.tokens.len(), segments, desc.pages.len())?;
    b.backend.set_batch(&desc, &mut batch);
    Ok(batch)
}

fn kda(b: &Bench<'_>) -> Outcome {
    let dims = KdaDims { heads: 64, head_dim: 128, conv: 4 };
    let hd = dims.heads * dims.head_dim;
    let p = KdaParams { dims, lower_bound: Some(-5.0), eps: 1e-5 };
    let w = KdaWeights::<CpuBackend> { conv: b.buf(3 * hd * 4)?, a_log: b.buf(64)?, dt_bias: b.buf(hd)?, o_norm: b.buf(128)? };
    let layers = 34;
    for (segments, rows) in [(1, 1), (4, 1), (1, 16), (1, 64), (1, 256)] {
        // Enough layers that a step's state is not in the cache.
        let mut state = b.backend.state(&spec(segments, 4 * segments, layers, 0))?;
        let desc = batch(b, segments, rows, 0)?;
        let n = segments * rows;
        let stride = 3 * hd + 64;
        let (proj, f, g) = (b.buf(n * stride)?, b.buf(n * hd)?, b.buf(n * hd)?);
        let mut out = b.buf(n * hd)?;
        let bytes = if rows == 1 { 2 * segments * hd * 128 * 4 } else { 0 };
        let flops = if rows == 1 { 0 } else { n * hd * 128 * 6 };
        let calls = if rows > 16 { 4 } else { layers };
        b.entry(format!("kda, {segments} sequences x {rows} rows"), calls, bytes, flops, |i| {
            b.backend.kda(&desc, i % layers, &proj, stride, 3 * hd, &f, &g, &w, &p, &mut state, &mut out);
        });
    }
    b.backend.sync()
}

fn mla(b: &Bench<'_>) -> Outcome {
    let p = MlaParams { heads: 64, qk_dim: 256, v_dim: 256, latent: 512 };
    let kv_b = b.memory.matrices(DType::Bf16, 64 * 512, 512).into_iter().map(|m| b.backend.weight(&[m])).collect::<Result<Vec<_>, _>>()?;
    for (rows, context) in [(1, 128), (1, 2048), (4, 2048), (64, 2048), (128, 128)] {
        let width = 2051;
        let state = b.backend.state(&spec(1, 40, 0, 11))?;
        let desc = batch(b, 1, rows, context)?;
        let q = b.buf(rows * 64 * 256)?;
        let mut out = b.buf(rows * 64 * 256)?;
        let mut selected = b.backend.alloc("selected", Elem::I32, rows * width)?;
        let row: Vec<i32> = (0..width as i32).map(|i| if (i as usize) < context { i } else { -1 }).collect();
        (0..rows).for_each(|r| b.backend.upload_i32(&row, &mut selected, r * width));
        let flops = rows * (2 * 64 * 512 * 512 + 4 * 64 * 512 * context);
        b.entry(format!("mla_attend, {rows} rows over {context}"), if rows > 4 { 2 } else { 22 }, 0, flops, |i| {
            b.backend.mla_attend(&desc, i % 11, &q, &kv_b[i % kv_b.len()], &selected, width, &p, &state, &mut out);
        });
    }
    b.backend.sync()
}

fn indexer(b: &Bench<'_>) -> Outcome {
    let p = IndexerParams { heads: 32, dim: 128, kpool: 4, topk: 2048, always_tail: true };
    let w = IndexKeyWeights::<CpuBackend> { norm_weight: b.buf(128)?, norm_bias: b.buf(128)?, ape: b.buf(4 * 128)? };
    for (rows, context) in [(1usize, 16_384usize), (1, 131_072), (32, 16_384)] {
        let mut state = b.backend.state(&spec(1, (context + rows).div_ceil(64) + 1, 0, 1))?;
        let desc = batch(b, 1, rows, context)?;
        let (iq, proj) = (b.buf(rows * 32 * 128)?, b.buf(rows * 288)?);
        let mut selected = b.backend.alloc("selected", Elem::I32, rows * p.width())?;
        b.entry(format!("index_append, {rows} rows"), 20, 0, 0, |_| {
            b.backend.index_append(&desc, 0, &proj, 288, 0, 128, &w, &p, &mut state);
        });
        let flops = rows * context / 4 * 32 * 128 * 2;
        b.entry(format!("index_select, {rows} rows over {context}"), if rows > 1 { 3 } else { 20 }, 0, flops, |_| {
            b.backend.index_select(&desc, 0, &iq, &proj, 288, 256, &p, &state, &mut selected);
        });
    }
    b.backend.sync()
}

fn mhc(b: &Bench<'_>) -> Outcome {
    let p = MhcParams { streams: 4, hidden: D, rms_eps: 1e-5, hc_eps: 1e-6, iters: 20 };
    let sites = b
        .memory
        .matrices(DType::F32, 24, 4 * D)
        .into_iter()
        .map(|m| Ok(MhcWeights { fn_: b.backend.weight(&[m])?, base: b.buf(24)?, scale: b.buf(3)?, norm: b.buf(D)? }))
        .collect::<Result<Vec<MhcWeights<CpuBackend>>, BackendError>>()?;
    for rows in [1, 4, 16, 256] {
        let (mut streams, y, mut x) = (b.buf(rows * 4 * D)?, b.buf(rows * D)?, b.buf(rows * D)?);
        let mut gates = MhcGates::<CpuBackend> { post: b.buf(rows * 4)?, comb: b.buf(rows * 16)? };
        let calls = if rows > 16 { 20 } else { sites.len() };
        b.entry(format!("mhc_boundary, {rows} rows"), calls, 24 * 4 * D * 4, 0, |i| {
            b.backend.mhc_boundary(rows, &y, &mut gates, &sites[i], &p, &mut streams, &mut x);
        });
    }
    b.backend.sync()
}

fn router_and_sampler(b: &Bench<'_>) -> Outcome {
    let p = RouterParams { experts: 288, topk: 8, groups: 1, topk_group: 1, norm_topk: true, scale: 2.5 };
    let routers = b.memory.matrices(DType::Bf16, 288, D).into_iter().map(|m| b.backend.weight(&[m])).collect::<Result<Vec<_>, _>>()?;
    for rows in [1, 16, 256] {
        let (x, bias) = (b.buf(rows * D)?, b.buf(288)?);
        let mut ids = b.backend.alloc("ids", Elem::I32, rows * 8)?;
        let mut weights = b.buf(rows * 8)?;
        let calls = if rows > 16 { 8 } else { routers.len() };
        b.entry(format!("router 288, {rows} rows"), calls, 288 * D * 2, 0, |i| {
            b.backend.router(rows, &x, &routers[i], &bias, &p, &mut ids, &mut weights);
        });
    }
    let vocab = 154_880;
    let logits = b.buf(vocab)?;
    let greedy = SampleRow { uniform: 0.5, ..SampleRow::greedy(0) };
    let warm = SampleRow { temperature: 1.0, ..greedy.clone() };
    for (name, row) in [
        ("greedy", greedy.clone()),
        ("greedy, 5 logprobs", SampleRow { logprobs: Some(5), ..greedy }),
        ("temperature 1", warm.clone()),
        ("top-k 50, top-p 0.9", SampleRow { top_k: 50, top_p: 0.9, ..warm.clone() }),
        ("top-p 0.9", SampleRow { top_p: 0.9, ..warm }),
    ] {
        let rows = [row];
        b.entry(format!("sample {vocab}, {name}"), 20, 0, 0, |_| {
            let _ = b.backend.sample(&logits, vocab, &rows);
        });
    }
    b.backend.sync()
}
