//! Latent attention: which kernels take it, by its sizes, its precision and its number of rows. Neighbours: `mixers.rs` (KDA, the indexer).
//!
//! | kernels | for |
//! |---|---|
//! | kernels/cuda/mla.cu | any sizes and types; exact in f32 |
//! | mla_mma.cu | bf16 precision, latents of 512: few rows, and many on chips without wgmma |
//! | mla_wide.cu | the same for many rows on Hopper |
//!
//! A row's bits are the same through the last two.

use super::{
    CudaBackend, CudaBatch, CudaBuf, CudaState, CudaWeight,
    compile::{MLA, MLA_MMA, MLA_WIDE},
    driver::{Grid, launch},
    loaded::{ATTEND_SHARED, FOLD_SHARED, MANY, WIDE_SHARED},
    memory::{Scratch, Use},
    mixers::paged,
    pack::Kind,
    weight::Matrix,
    wide::{IMAGE_ROWS, WIDE_ROWS, WIDE_THREADS},
};
use crate::{MlaParams, Precision};

/// Latent columns of the kernels.
const LATENT: usize = 512;
/// `PART` of mla.cu and mla.cuh: chosen rows whose sums are kept apart.
const PART: usize = 64;
/// Heads of a block of `mla_attend`.
const HEADS: usize = 16;
/// Rows from which one block takes all parts of a row.
const WHOLE_ROWS: usize = 17;
/// Rows whose folded queries are held at a time.
const FOLD_ROWS: usize = 1024;
/// The same where each row's parts are kept, too.
const MMA_ROWS: usize = 64;
/// `LINE` and `WEIGHT_LINE` of mla_mma.cu: bf16 of a latent row and of a head's weights in shared memory.
const MMA_LINE: usize = 520;
const WEIGHT_LINE: usize = 72;
/// `HEADS` of mla_mma.cu.
const MMA_HEADS: usize = 16;
/// `MANY_HEADS` of mla_mma.cu, and rows from which blocks of so many heads fill the chip.
const MANY_HEADS: usize = 32;
const MANY_ROWS: usize = 64;
/// `MOST_PARTS` of mla_mma.cu.
const MOST_PARTS: usize = 160;
/// Rows up to which the values' product joins the parts itself.
const JOINED_ROWS: usize = 2;
/// Rows from which attention goes to mla_wide.cu (on an H200 both ways take 0.13 ms there).
const WIDE: usize = 16;
/// Heads of a block of `mla_attend_wide`, and how wide those of `mla_fold_wide` are.
const WIDE_HEADS: usize = 64;
const FOLD_DIM: usize = 256;

/// What every kernel of attention wants to know.
struct Attention<'a> {
    batch: &'a CudaBatch,
    layer: i32,
    chosen: u64,
    width: usize,
    p: &'a MlaParams,
    state: &'a CudaState,
}

impl Attention<'_> {
    fn parts(&self) -> usize {
        self.width.div_ceil(PART)
    }

    fn heads(&self) -> i32 {
        self.p.heads as i32
    }

    fn scale(&self) -> f32 {
        1.0 / (self.p.qk_dim as f32).sqrt()
    }

    /// Tokens of a page, layers of the pool, the pool.
    fn cache(&self) -> (i32, i32, u64) {
        (self.state.spec.page_tokens as i32, self.state.spec.mla_layers as i32, self.state.latent.at())
    }
}

impl CudaBackend {
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
        let a = Attention { batch, layer: layer as i32, chosen, width, p, state };
        // Latents in bf16 as wide as the release's go to the matrix units, for any number of rows; weights in bf16, too.
        let mma = self.is_bf16() != 0 && latent == LATENT && a.parts() <= MOST_PARTS;
        if mma && part.kind == Kind::Bf16 && p.qk_dim.is_multiple_of(32) && p.v_dim.is_multiple_of(64) {
            return if self.device.wide && rows >= WIDE {
                self.attend_wide(scratch, &a, q, part.matrix, out)
            } else {
                self.attend_mma(scratch, &a, q, part.matrix, out)
            };
        }
        self.attend_any(scratch, &a, mma, q, part.matrix, out)
    }

    /// Attention with weights of any type; between both products on the matrix units where `mma`.
    fn attend_any(&self, scratch: &mut Scratch, a: &Attention<'_>, mma: bool, q: u64, m: Matrix, out: u64) -> Result<(), String> {
        let (rows, parts, p, latent) = (a.batch.rows(), a.parts(), a.p, a.p.latent);
        let (heads, qk, v, bf16) = (a.heads(), p.qk_dim as i32, p.v_dim as i32, self.is_bf16());
        let ((page_tokens, layers, cache), latent_i) = (a.cache(), latent as i32);
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
                self.attend_parts(a, rounded, (row0, n), sums)?;
            } else {
                let stride = latent.next_multiple_of(4) + 4;
                let shared = 4 * ((HEADS + 16) * stride + HEADS * 16 + 3 * HEADS);
                let blocks = [if sums == 0 { 1 } else { parts }, p.heads.div_ceil(HEADS), n];
                let (grid, folded) = (Grid { blocks, threads: 256, shared }, folded.wrapping_sub(before));
                launch!(self, MLA, "mla_attend", grid; a.batch.step(), folded, cache, bf16, page_tokens, layers, a.layer, a.chosen, a.width as i32,
                    row, heads, latent_i, a.scale(), sums, mixed_all)?;
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

    /// Attention of rows `row0..row0 + n` over each part of what they have chosen, on the matrix units.
    fn attend_parts(&self, a: &Attention<'_>, folded: u64, (row0, n): (usize, usize), sums: u64) -> Result<(), String> {
        let (page_tokens, layers, cache) = a.cache();
        let shared = 2 * ((PART + MMA_HEADS) * MMA_LINE + MMA_HEADS * WEIGHT_LINE) + 2 * 4 * 8 * MMA_HEADS;
        let grid = Grid { blocks: [a.parts(), a.p.heads.div_ceil(MMA_HEADS), n], threads: 256, shared };
        launch!(self, MLA_MMA, "mla_attend_mma", grid; a.batch.step(), folded, cache, page_tokens, layers, a.layer, a.chosen, a.width as i32,
            row0 as i32, a.heads(), a.scale(), sums)
    }

    /// Folds the queries at `q` of `n` rows onto the latent: in order, or, with `padded` heads, as an image (mla_wide.cu).
    fn fold_mma(&self, a: &Attention<'_>, q: u64, kv_b: Matrix, n: usize, folded: u64, padded: usize) -> Result<(), String> {
        let (qk, v, grid) = (a.p.qk_dim as i32, a.p.v_dim as i32, Grid::new([LATENT / 128, a.p.heads, 1], 256));
        launch!(self, MLA_MMA, "mla_fold_mma", grid; q, kv_b, a.heads(), qk, v, n as i32, folded, padded as i32)
    }

    /// All of attention on the matrix units.
    fn attend_mma(&self, scratch: &mut Scratch, a: &Attention<'_>, q: u64, kv_b: Matrix, out: u64) -> Result<(), String> {
        let (rows, parts, p) = (a.batch.rows(), a.parts(), a.p);
        let (heads, qk, v) = (a.heads(), p.qk_dim as i32, p.v_dim as i32);
        let shared = 2 * ((2 * PART + MANY_HEADS) * MMA_LINE + MANY_HEADS * WEIGHT_LINE) + 4 * (16 + 2) * MANY_HEADS;
        let many = rows >= MANY_ROWS && shared <= MANY.1 && MANY.1 + (4 << 10) <= self.device.shared;
        let step = if many { FOLD_ROWS } else { MMA_ROWS };
        for row0 in (0..rows).step_by(step) {
            let n = step.min(rows - row0);
            let each = n * p.heads * LATENT;
            let folded = scratch.get(&self.device, Use::Folded, 2 * each)?;
            let sums = if many { 0 } else { scratch.get(&self.device, Use::Parts, 4 * n * p.heads * parts * (LATENT + 2))? };
            let (q, to) = (q + (4 * row0 * p.heads * p.qk_dim) as u64, out + (4 * row0 * p.heads * p.v_dim) as u64);
            self.fold_mma(a, q, kv_b, n, folded, 0)?;
            let mut mixed = 0;
            if many {
                mixed = scratch.get(&self.device, Use::Mixed, 2 * each)?;
                let (page_tokens, layers, cache) = a.cache();
                let grid = Grid { blocks: [p.heads.div_ceil(MANY_HEADS), n, 1], threads: 256, shared };
                launch!(self, MLA_MMA, "mla_attend_many", grid; a.batch.step(), folded, cache, page_tokens, layers, a.layer, a.chosen,
                    a.width as i32, row0 as i32, heads, a.scale(), mixed)?;
            } else {
                self.attend_parts(a, folded, (row0, n), sums)?;
            }
            // Of few rows, joining the parts once per block costs less than a kernel of its own.
            if !many && n > JOINED_ROWS {
                mixed = scratch.get(&self.device, Use::Mixed, 2 * each)?;
                launch!(self, MLA_MMA, "mla_merge_mma", Grid::new([p.heads, n, 1], 256); sums, parts as i32, heads, mixed)?;
            }
            let grid = Grid::new([p.v_dim / 64, p.heads, 1], 256);
            launch!(self, MLA_MMA, "mla_out_mma", grid; sums, parts as i32, mixed, kv_b, heads, qk, v, n as i32, to)?;
        }
        Ok(())
    }

    /// All of attention on Hopper's matrix units, for many rows.
    fn attend_wide(&self, scratch: &mut Scratch, a: &Attention<'_>, q: u64, kv_b: Matrix, out: u64) -> Result<(), String> {
        let (rows, p, sms) = (a.batch.rows(), a.p, self.device.sms);
        let (heads, qk, v, padded) = (a.heads(), p.qk_dim as i32, p.v_dim as i32, p.heads.next_multiple_of(8));
        let (page_tokens, layers, cache) = a.cache();
        for row0 in (0..rows).step_by(FOLD_ROWS) {
            let n = FOLD_ROWS.min(rows - row0);
            let (n_i, image) = (n as i32, n.next_multiple_of(IMAGE_ROWS));
            let folded = scratch.get(&self.device, Use::Folded, 2 * n * padded * LATENT)?;
            let mixed = scratch.get(&self.device, Use::Mixed, 2 * p.heads * image * LATENT)?;
            let (q, to) = (q + (4 * row0 * p.heads * p.qk_dim) as u64, out + (4 * row0 * p.heads * p.v_dim) as u64);
            if p.qk_dim == FOLD_DIM {
                let grid = Grid { shared: FOLD_SHARED, ..Grid::new([2, p.heads, 1], 256) };
                launch!(self, MLA_WIDE, "mla_fold_wide", grid; q, kv_b, heads, v, n_i, folded, padded as i32)?;
            } else {
                self.fold_mma(a, q, kv_b, n, folded, padded)?;
            }
            let blocks = sms.min(n * p.heads.div_ceil(WIDE_HEADS));
            let grid = Grid { shared: ATTEND_SHARED, ..Grid::new([blocks, 1, 1], 512) };
            launch!(self, MLA_WIDE, "mla_attend_wide", grid; a.batch.step(), folded, padded as i32, cache, page_tokens, layers, a.layer, a.chosen,
                a.width as i32, row0 as i32, n_i, heads, a.scale(), mixed, image as i32)?;
            let blocks = (sms / p.heads).clamp(1, p.v_dim.div_ceil(128) * n.div_ceil(WIDE_ROWS));
            let grid = Grid { shared: WIDE_SHARED, ..Grid::new([blocks, p.heads, 1], WIDE_THREADS) };
            launch!(self, MLA_WIDE, "mla_out_wide", grid; kv_b, heads, qk, v, n_i, mixed, image as i32, to)?;
        }
        Ok(())
    }
}
