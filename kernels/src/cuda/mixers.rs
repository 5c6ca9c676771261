//! Ops with sequence state: KDA, latent attention, the indexer.

use super::{
    CudaBackend, CudaBatch, CudaBuf, CudaState, CudaWeight,
    backend::columns,
    compile::{INDEXER, KDA, MLA},
    driver::{Grid, launch},
    memory::{Scratch, Use},
};
use crate::{IndexKeyWeights, IndexerParams, KdaParams, KdaWeights, MlaParams, Precision};

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

/// Limits of the kernels: `WIDEST`, `MAX_TAPS` of kda.cu; latent columns of mla.cu; `MAX_POOL`, `MAX_DIM` of indexer.cu.
const KDA_WIDEST: usize = 128;
const KDA_TAPS: usize = 8;
const LATENT: usize = 512;
const POOL: usize = 16;
const INDEX_DIM: usize = 256;
/// `PART` of mla.cu: chosen rows whose sums are kept apart.
const PART: usize = 64;
/// Heads of a block of `mla_attend`.
const HEADS: usize = 16;
/// Rows from which one block takes all parts of a row.
const WHOLE_ROWS: usize = 17;
/// Rows whose scores are held at a time.
const SCORE_ROWS: usize = 256;
/// Rows whose folded queries are held at a time.
const FOLD_ROWS: usize = 1024;
/// The same where each row's parts are kept, too.
const MMA_ROWS: usize = 64;
/// `LINE` of mla.cu: bf16 of a latent row in shared memory.
const MMA_LINE: usize = 520;

impl CudaBackend {
    /// See [`crate::Backend::kda`].
    pub(super) fn run_kda(
        &self,
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
        launch!(self, KDA, "kda", grid; batch.step(), sizes, proj, stride as i32, beta0 as i32, f, g, conv, a_log, dt_bias, o_norm, states,
            carries, layers, layer as i32, out)
    }

    fn is_bf16(&self) -> i32 {
        i32::from(self.precision == Precision::Bf16)
    }

    /// See [`crate::Backend::mla_append`].
    pub(super) fn run_mla_append(&self, batch: &CudaBatch, layer: usize, c: &CudaBuf, state: &CudaState) -> Result<(), String> {
        let (spec, rows) = (&state.spec, batch.rows());
        paged(batch, state, layer)?;
        let (c, cache, bf16) = (c.f32s(rows * spec.latent)?, state.latent.at(), self.is_bf16());
        let (latent, page_tokens, layers) = (spec.latent as i32, spec.page_tokens as i32, spec.mla_layers as i32);
        let grid = Grid::new([rows, 1, 1], 128);
        launch!(self, MLA, "mla_append", grid; batch.step(), c, latent, cache, bf16, page_tokens, layers, layer as i32)
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
        let shared = 4 * (p.heads * wide + 64 * (wide + 4));
        if shared > 97 << 10 {
            return Err(format!("{} index heads of {} need {shared} bytes of shared memory; {} are there", p.heads, p.dim, 97 << 10));
        }
        for row0 in (0..rows).step_by(SCORE_ROWS) {
            let n = SCORE_ROWS.min(rows - row0);
            let most = batch.most_visible(row0, n);
            let pools = if most <= width { 0 } else { most / p.kpool };
            let scores = scratch.get(&self.device, Use::Scores, 4 * n * pools)?;
            let (row0, s_stride, w_stride) = (row0 as i32, pools as i32, stride as i32);
            let grid = Grid { blocks: [pools.div_ceil(64), n, 1], threads: 256, shared };
            launch!(self, INDEXER, "index_score", grid; batch.step(), sizes, iq, weights, w_stride, pooled, page_tokens, layers, layer, row0, scores,
                s_stride)?;
            launch!(self, INDEXER, "index_select", Grid::new([n, 1, 1], 1024); batch.step(), sizes, scores, s_stride, row0, selected)?;
        }
        Ok(())
    }

    /// See [`crate::Backend::mla_attend`].
    pub(super) fn run_mla_attend(
        &self,
        scratch: &mut Scratch,
        batch: &CudaBatch,
        layer: usize,
        q: &CudaBuf,
        kv_b: &CudaWeight,
        selected: &CudaBuf,
        width: usize,
        p: &MlaParams,
        state: &CudaState,
        out: &CudaBuf,
    ) -> Result<(), String> {
        let (spec, rows, latent) = (&state.spec, batch.rows(), p.latent);
        paged(batch, state, layer)?;
        if latent != spec.latent || latent > LATENT || width == 0 {
            return Err(format!("latent rows of {latent}, {width} chosen: the cache has rows of {}, and up to {LATENT} work", spec.latent));
        }
        let part = kv_b.only("kv_b")?;
        if (part.rows, part.cols) != (p.heads * (p.qk_dim + p.v_dim), latent) {
            return Err(format!("kv_b is [{}, {}] where [{}, {latent}] is needed", part.rows, part.cols, p.heads * (p.qk_dim + p.v_dim)));
        }
        let (q, chosen) = (q.f32s(rows * p.heads * p.qk_dim)?, selected.ids(rows * width)?);
        let out = out.f32s(rows * p.heads * p.v_dim)?;
        let (heads, qk, v, m) = (p.heads as i32, p.qk_dim as i32, p.v_dim as i32, part.matrix);
        let (page_tokens, layers, bf16, cache) = (spec.page_tokens as i32, spec.mla_layers as i32, self.is_bf16(), state.latent.at());
        let (width_i, latent_i, scale) = (width as i32, latent as i32, 1.0 / (p.qk_dim as f32).sqrt());
        let parts = width.div_ceil(PART);
        // Latents in bf16 as wide as the release's go to the matrix units, for any number of rows.
        let mma = bf16 != 0 && latent == LATENT;
        let chunk = if mma { MMA_ROWS } else { FOLD_ROWS };
        for row0 in (0..rows).step_by(chunk) {
            let n = chunk.min(rows - row0);
            let each = n * p.heads * latent;
            // Kernels number rows from the step's first; the scratch begins with row0.
            let before = 4 * (row0 * p.heads * latent) as u64;
            let folded = scratch.get(&self.device, Use::Folded, if mma { 2 * each } else { 4 * each })?;
            let mixed = scratch.get(&self.device, Use::Mixed, 4 * each)?;
            let (at, n_i, row) = (q + (4 * row0 * p.heads * p.qk_dim) as u64, n as i32, row0 as i32);
            let (exact, rounded) = if mma { (0, folded) } else { (folded, 0) };
            let grid = Grid::new([p.heads, latent.div_ceil(512), n.div_ceil(8)], 256);
            launch!(self, MLA, "mla_fold", grid; at, m, heads, qk, v, n_i, exact, rounded)?;
            // Many rows fill the chip without being cut: then the parts' sums need no memory.
            let sums =
                if mma || rows < WHOLE_ROWS { scratch.get(&self.device, Use::Parts, 4 * n * p.heads * parts * (latent + 2))? } else { 0 };
            let mixed_all = mixed.wrapping_sub(before);
            if mma {
                let grid = Grid { blocks: [parts, p.heads.div_ceil(64), n], threads: 128, shared: PART * MMA_LINE * 2 };
                launch!(self, MLA, "mla_attend_mma", grid; batch.step(), rounded, cache, page_tokens, layers, layer as i32, chosen, width_i, row, heads,
                    scale, sums)?;
            } else {
                let stride = latent.next_multiple_of(4) + 4;
                let shared = 4 * ((HEADS + 16) * stride + HEADS * 16 + 3 * HEADS);
                let blocks = [if sums == 0 { 1 } else { parts }, p.heads.div_ceil(HEADS), n];
                let (grid, folded) = (Grid { blocks, threads: 256, shared }, folded.wrapping_sub(before));
                launch!(self, MLA, "mla_attend", grid; batch.step(), folded, cache, bf16, page_tokens, layers, layer as i32, chosen, width_i, row,
                    heads, latent_i, scale, sums, mixed_all)?;
            }
            if sums != 0 {
                launch!(self, MLA, "mla_merge", Grid::new([p.heads, n, 1], 256); sums, parts as i32, heads, latent_i, row, mixed_all)?;
            }
            let to = out + (4 * row0 * p.heads * p.v_dim) as u64;
            let grid = Grid::new([(p.heads * p.v_dim).div_ceil(8), n.div_ceil(8), 1], 256);
            launch!(self, MLA, "mla_out", grid; mixed, m, heads, qk, v, n_i, to)?;
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
fn paged(batch: &CudaBatch, state: &CudaState, layer: usize) -> Result<(), String> {
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
