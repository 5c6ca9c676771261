//! Ops with sequence state: KDA and the indexer. Neighbours: `mla.rs` (latent attention).

use super::{
    CudaBackend, CudaBatch, CudaBuf, CudaState,
    backend::columns,
    compile::{INDEXER, KDA, KDA_CHUNK},
    driver::{Grid, launch},
    memory::{Scratch, Use},
};
use crate::{IndexKeyWeights, IndexerParams, KdaParams, KdaWeights, Segment};

/// `Kda` of kda.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct KdaSizes {
    heads: i32,
    dim: i32,
    taps: i32,
    bound: f32,
    eps: f32,
}

/// `Indexer` of indexer.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct IndexerSizes {
    heads: i32,
    dim: i32,
    kpool: i32,
    topk: i32,
    tail: i32,
}

impl From<&IndexerParams> for IndexerSizes {
    fn from(p: &IndexerParams) -> Self {
        let [heads, dim, kpool, topk] = [p.heads, p.dim, p.kpool, p.topk].map(|v| v as i32);
        Self { heads, dim, kpool, topk, tail: i32::from(p.always_tail) }
    }
}

/// `Columns` of indexer.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct KeyColumns {
    proj: u64,
    stride: i32,
    key: i32,
    gate: i32,
    unused: i32,
}

/// Limits of the kernels: `WIDEST`, `MAX_TAPS` of kda.cu; `MAX_POOL`, `MAX_DIM` of indexer.cu.
const KDA_WIDEST: usize = 128;
const KDA_TAPS: usize = 8;
/// Taps of the kernels that are made for the release's shape (and [`KDA_WIDEST`] channels a head).
const KDA_RELEASE_TAPS: usize = 4;
/// Rows that kda_chunk.cu takes at once, and how far their log decays may sum up for it.
const KDA_CHUNK_ROWS: usize = 16;
const KDA_RANGE: f32 = 80.0;

/// Where a segment may be cut ([`crate::Backend::cut`]): between chunks, which are counted from its first row, and so that both parts have rows
/// enough for the kernel that takes the whole.
pub(super) fn kda_cut(rows: usize, at: usize) -> usize {
    let at = at.min(rows.saturating_sub(KDA_CHUNK_ROWS));
    at - at % KDA_CHUNK_ROWS
}
/// `PARTS` of kda_chunk.cu: floats of a chunk of a head. What all columns need, and twice that of 64 columns.
const KDA_PARTS: usize = KDA_COMMON + 2 * KDA_VALUES;
const KDA_COMMON: usize = 3 * 16 * 128 + 16 * 16 + 128;
const KDA_VALUES: usize = 16 * 64 + 64;
/// Shared memory of `kda_follow`: three chunks.
const KDA_SHARED: usize = 3 * 4 * (KDA_COMMON + KDA_VALUES);
/// Chunks of all segments that are prepared at a time: bounds the scratch to 2.1 MiB each.
const KDA_CHUNKS: usize = 128;
const POOL: usize = 16;
const INDEX_DIM: usize = 256;
/// Rows whose scores are held at a time.
const SCORE_ROWS: usize = 256;
/// Scores of a launch up to which blocks take 16 pools each.
const SCORE_FEW: usize = 8192;
/// Rows of one sequence from which blocks score pools for several rows.
const SCORE_SHARED: usize = 64;
/// Pools from which, and rows up to which, eight blocks choose for a row; what they choose is the same.
const SELECT_LONG: usize = 12_288;
const SELECT_FEW: usize = 16;
/// `ROWS_EACH` of indexer.cu.
const SCORE_EACH: usize = 8;
/// `KEY_LINE` of indexer.cu: floats of a key in shared memory.
const KEY_LINE: usize = 132;

impl CudaBackend {
    /// See [`crate::Backend::kda`].
    pub(super) fn run_kda(
        &self,
        scratch: &mut Scratch,
        batch: &CudaBatch,
        layer: usize,
        proj: &CudaBuf,
        stride: usize,
        beta0: usize,
        f: &CudaBuf,
        g: &CudaBuf,
        w: &KdaWeights<Self>,
        p: &KdaParams,
        state: &CudaState,
        out: &CudaBuf,
    ) -> Result<(), String> {
        let (heads, d, rows, spec) = (p.dims.heads, p.dims.head_dim, batch.rows(), &state.spec);
        let hd = heads * d;
        batch.fits(spec, false)?;
        if spec.kda != p.dims || layer >= spec.kda_layers {
            return Err(format!("layer {layer} of sizes {:?} where the state has {} of {:?}", p.dims, spec.kda_layers, spec.kda));
        }
        if d > KDA_WIDEST || p.dims.conv == 0 || p.dims.conv > KDA_TAPS {
            return Err(format!("heads {d} wide with {} taps; up to {KDA_WIDEST} and {KDA_TAPS} work", p.dims.conv));
        }
        columns(stride, 0, 3 * hd)?;
        columns(stride, beta0, heads)?;
        let sizes =
            KdaSizes { heads: heads as i32, dim: d as i32, taps: p.dims.conv as i32, bound: p.lower_bound.unwrap_or(f32::NAN), eps: p.eps };
        let (proj, f, g, out) = (proj.f32s(rows * stride)?, f.f32s(rows * hd)?, g.f32s(rows * hd)?, out.f32s(rows * hd)?);
        let (conv, a_log) = (w.conv.f32s(3 * hd * p.dims.conv)?, w.a_log.f32s(heads)?);
        let (dt_bias, o_norm) = (w.dt_bias.f32s(hd)?, w.o_norm.f32s(d)?);
        let (states, carries, layers) = (state.kda.at(), state.conv.at(), spec.kda_layers as i32);
        let grid = Grid::new([heads, batch.desc.segments.len(), 1], 512);
        // Which kernel takes a segment follows from its rows alone: it gives the same bits whoever shares its step.
        let release = d == KDA_WIDEST && p.dims.conv == KDA_RELEASE_TAPS;
        let chunked = release && p.lower_bound.is_some_and(|b| (-KDA_RANGE..=0.0).contains(&(b * KDA_CHUNK_ROWS as f32)));
        let (least, most) = (if release { 2 } else { 1 }, if chunked { KDA_CHUNK_ROWS - 1 } else { i32::MAX as usize });
        let has = |from: usize, to: usize| batch.desc.segments.iter().any(|s| (from..=to).contains(&(s.rows as usize)));
        if release && has(1, 1) {
            // A head is two blocks' while there are fewer than multiprocessors; the bits are the same.
            let halves = self.device.clusters() && heads * batch.desc.segments.len() <= self.device.sms;
            let segments = batch.desc.segments.len();
            let (name, grid) = if halves { ("kda_halves", Grid::new([2 * heads, segments, 1], 256)) } else { ("kda_one", grid) };
            launch!(self, KDA, name, grid; batch.step(), sizes, proj, stride as i32, beta0 as i32, f, g, conv, a_log, dt_bias, o_norm, states,
                carries, layers, layer as i32, out)?;
        }
        if has(least, most) {
            launch!(self, KDA, "kda", grid; batch.step(), sizes, least as i32, most as i32, proj, stride as i32, beta0 as i32, f, g, conv, a_log,
                dt_bias, o_norm, states, carries, layers, layer as i32, out)?;
        }
        if !has(most.saturating_add(1), usize::MAX) {
            return Ok(());
        }
        let (least, segments) = (KDA_CHUNK_ROWS as i32, batch.desc.segments.len());
        let all = batch.desc.segments.iter().map(|s| (s.rows as usize).div_ceil(KDA_CHUNK_ROWS)).max().unwrap_or(0);
        let at_a_time = all.min((KDA_CHUNKS / segments).max(1));
        let parts = scratch.get(&self.device, Use::Chunks, 4 * segments * heads * at_a_time * KDA_PARTS)?;
        for first in (0..all).step_by(at_a_time) {
            let at = first as i32;
            let grid = Grid::new([at_a_time, heads, segments], 512);
            launch!(self, KDA_CHUNK, "kda_prepare", grid; batch.step(), sizes, least, at, proj, stride as i32, beta0 as i32, f, conv, a_log, dt_bias,
                carries, layers, layer as i32, parts)?;
            let grid = Grid { blocks: [2, heads, segments], threads: 128, shared: KDA_SHARED };
            launch!(self, KDA_CHUNK, "kda_follow", grid; batch.step(), sizes, least, at, at_a_time as i32, proj, stride as i32, parts, states,
                carries, layers, layer as i32, out)?;
        }
        let grid = Grid::new([heads.div_ceil(8), rows, 1], 256);
        launch!(self, KDA_CHUNK, "kda_finish", grid; batch.step(), sizes, least, g, o_norm, out)
    }

    /// See [`crate::Backend::index_append`].
    pub(super) fn run_index_append(
        &self,
        batch: &CudaBatch,
        layer: usize,
        proj: &CudaBuf,
        stride: usize,
        key0: usize,
        gate0: usize,
        w: &IndexKeyWeights<Self>,
        p: &IndexerParams,
        state: &CudaState,
    ) -> Result<(), String> {
        let (spec, rows) = (&state.spec, batch.rows());
        paged(batch, state, layer)?;
        index_sizes(p, state)?;
        columns(stride, key0, p.dim)?;
        columns(stride, gate0, p.dim)?;
        let proj = proj.f32s(rows * stride)?;
        let columns = KeyColumns { proj, stride: stride as i32, key: key0 as i32, gate: gate0 as i32, unused: 0 };
        let (weight, bias, ape) = (w.norm_weight.f32s(p.dim)?, w.norm_bias.f32s(p.dim)?, w.ape.f32s(p.kpool * p.dim)?);
        let (tails, pooled, sizes) = (state.tail.at(), state.pooled.at(), IndexerSizes::from(p));
        let (page_tokens, layers, layer) = (spec.page_tokens as i32, spec.mla_layers as i32, layer as i32);
        let grid = Grid::new([rows, 1, 1], 128);
        launch!(self, INDEXER, "index_pool", grid; batch.step(), columns, sizes, weight, bias, ape, tails, pooled, page_tokens, layers, layer)?;
        if batch.desc.segments.iter().all(|s| s.rows == 1) {
            return Ok(());
        }
        let grid = Grid::new([batch.desc.segments.len(), 1, 1], 128);
        launch!(self, INDEXER, "index_tail", grid; batch.step(), columns, sizes, weight, bias, tails, layers, layer)
    }

    /// See [`crate::Backend::index_select`].
    pub(super) fn run_index_select(
        &self,
        scratch: &mut Scratch,
        batch: &CudaBatch,
        layer: usize,
        iq: &CudaBuf,
        proj: &CudaBuf,
        stride: usize,
        w0: usize,
        p: &IndexerParams,
        state: &CudaState,
        selected: &CudaBuf,
    ) -> Result<(), String> {
        let (spec, rows, width) = (&state.spec, batch.rows(), p.width());
        paged(batch, state, layer)?;
        index_sizes(p, state)?;
        columns(stride, w0, p.heads)?;
        let (iq, weights) = (iq.f32s(rows * p.heads * p.dim)?, proj.f32s(rows * stride)? + 4 * w0 as u64);
        let (selected, pooled, sizes) = (selected.ids(rows * width)?, state.pooled.at(), IndexerSizes::from(p));
        let (page_tokens, layers, layer) = (spec.page_tokens as i32, spec.mla_layers as i32, layer as i32);
        let wide = p.dim.next_multiple_of(4);
        let release = (p.heads, p.dim) == (32, 128);
        let shared = 4 * (p.heads * wide + 64 * (wide + 4));
        if shared > 97 << 10 {
            return Err(format!("{} index heads of {} need {shared} bytes of shared memory; {} are there", p.heads, p.dim, 97 << 10));
        }
        for row0 in (0..rows).step_by(SCORE_ROWS) {
            let n = SCORE_ROWS.min(rows - row0);
            let most = batch.most_visible(row0, n);
            let pools = if most <= width { 0 } else { most / p.kpool };
            let scores = scratch.get(&self.device, Use::Scores, 4 * n * pools)?;
            // Many rows of one sequence share the keys that a block reads. Else blocks of few pools until the chip is full. The sums are the same.
            let one = |s: &Segment| (s.row0 as usize) <= row0 && row0 + n <= (s.row0 + s.rows) as usize;
            let shared_keys = n >= SCORE_SHARED && batch.desc.segments.iter().any(one);
            let (name, blocks, threads, shared) = match (release, shared_keys, n * pools <= SCORE_FEW) {
                (true, true, _) => ("index_score_rows", [pools.div_ceil(64), n.div_ceil(SCORE_EACH), 1], 128, 4 * (64 + 64) * KEY_LINE),
                (true, _, true) => ("index_score_2", [pools.div_ceil(16), n, 1], 256, 4 * (32 + 16) * KEY_LINE),
                (true, _, false) => ("index_score_8", [pools.div_ceil(64), n, 1], 256, 4 * (32 + 64) * KEY_LINE),
                _ => ("index_score", [pools.div_ceil(64), n, 1], 256, shared),
            };
            let (row0, n_i, s_stride, w_stride) = (row0 as i32, n as i32, pools as i32, stride as i32);
            launch!(self, INDEXER, name, Grid { blocks, threads, shared }; batch.step(), sizes, iq, weights, w_stride, pooled, page_tokens, layers,
                layer, row0, n_i, scores, s_stride)?;
            let spread = self.device.clusters() && pools > SELECT_LONG && n <= SELECT_FEW;
            let (name, blocks) = if spread { ("index_select_8", [8, n, 1]) } else { ("index_select", [n, 1, 1]) };
            launch!(self, INDEXER, name, Grid::new(blocks, 1024); batch.step(), sizes, scores, s_stride, row0, selected)?;
        }
        Ok(())
    }
}

impl CudaBatch {
    /// Most tokens that any of some rows sees.
    fn most_visible(&self, row0: usize, rows: usize) -> usize {
        let (from, end) = (row0 as u32, (row0 + rows) as u32);
        let touched = self.desc.segments.iter().filter(|s| s.row0 < end && s.row0 + s.rows > from);
        touched.map(|s| (s.pos0 + (s.row0 + s.rows).min(end) - s.row0) as usize).max().unwrap_or(0)
    }
}

/// Whether a step and a layer fit the pages of the state.
pub(super) fn paged(batch: &CudaBatch, state: &CudaState, layer: usize) -> Result<(), String> {
    batch.fits(&state.spec, true)?;
    if layer >= state.spec.mla_layers {
        return Err(format!("layer {layer} of {}", state.spec.mla_layers));
    }
    Ok(())
}

fn index_sizes(p: &IndexerParams, state: &CudaState) -> Result<(), String> {
    let spec = &state.spec;
    if (p.dim, p.kpool) != (spec.index_dim, spec.kpool) {
        return Err(format!("keys of {} in pools of {} where the state has {} and {}", p.dim, p.kpool, spec.index_dim, spec.kpool));
    }
    if p.dim > INDEX_DIM || p.kpool > POOL || !p.topk.is_multiple_of(p.kpool) {
        return Err(format!(
            "keys of {} in pools of {}, {} tokens chosen; up to {INDEX_DIM} and {POOL} work, and whole pools are chosen",
            p.dim, p.kpool, p.topk
        ));
    }
    Ok(())
}
