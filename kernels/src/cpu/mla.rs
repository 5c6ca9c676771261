//! Sparse MLA attention in absorbed form (docs/model.md, MLA): fold q through Wk, attend to the selected latents, go out through Wv.
//!
//! | phase | item | what it reads |
//! |---|---|---|
//! | fold | (head, 512 latent columns) | Wk once for up to 64 rows |
//! | attend | (row, group of heads) | the row's selected latents once per group |
//! | out | (head) | Wv once for up to 64 rows |
//!
//! Each head's scores, softmax and weighted sum run in one order, so neither the grouping nor the batch can be seen in a result.

use super::{
    Engine,
    aligned::Aligned,
    buf::{CpuBatch, CpuWeight},
    decode::{Bf16Row, Lanes, decode_run},
    disjoint::Disjoint,
    gemm::{Dest, Product, Rows, dots},
    isa::Kernel,
    latents::{self, Latents},
    nn::{Mat, Start, nn},
    rows,
    simd::Simd,
    state::CpuState,
};
use crate::{MlaParams, Segment};

/// Rows whose folded queries are held at once.
const ROWS: usize = 64;
/// Latent columns and q channels of a decoded Wk panel: 16 × 512 f32 = 32 KiB, whole rows where the latent is no wider.
const FOLD_COLS: usize = 512;
const FOLD_ROWS: usize = 16;
/// Latents gathered at a time.
const GATHER: usize = 64;

/// Folds q through Wk for one head and one strip of latent columns.
struct Fold<'a> {
    q: Mat<'a>,
    rows: usize,
    w: &'a CpuWeight,
    /// First k row of the head.
    row0: usize,
    qk: usize,
    col0: usize,
    cols: usize,
    /// `[rows, cols]` at the head's place, row stride `stride`.
    out: Disjoint<'a, f32>,
    at: usize,
    stride: usize,
    buf: &'a mut Aligned,
}

impl Kernel for Fold<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (panel, sums) = self.buf.sized(FOLD_ROWS * FOLD_COLS + ROWS * FOLD_COLS).split_at_mut(FOLD_ROWS * FOLD_COLS);
        for d0 in (0..self.qk).step_by(FOLD_ROWS) {
            let n = FOLD_ROWS.min(self.qk - d0);
            for (out0, m) in &self.w.parts {
                for i in 0..n {
                    let row = self.row0 + d0 + i;
                    if row < *out0 || row >= out0 + m.rows() {
                        continue;
                    }
                    decode_run(s, m, row - out0, self.col0, &mut panel[i * FOLD_COLS..i * FOLD_COLS + self.cols]);
                }
            }
            let start = if d0 == 0 { Start::Zero } else { Start::Keep };
            let q = Mat { data: &self.q.data[d0..], stride: self.q.stride };
            nn(s, self.rows, self.cols, n, q, Mat { data: panel, stride: FOLD_COLS }, sums, FOLD_COLS, start);
        }
        for r in 0..self.rows {
            let at = self.at + r * self.stride + self.col0;
            // SAFETY: this head's strip of columns is this item's.
            unsafe { self.out.range(at..at + self.cols) }.copy_from_slice(&sums[r * FOLD_COLS..r * FOLD_COLS + self.cols]);
        }
    }
}

/// One row's attention over its selected latents, for a group of heads.
struct Attend<'a> {
    /// Folded queries `[heads, latent]` of the group; replaced by the weighted latents.
    heads: &'a mut [f32],
    n: usize,
    latent: usize,
    scale: f32,
    selected: &'a [i32],
    cache: &'a Latents,
    /// Where a page starts in the cache.
    layer_page: usize,
    pages: &'a [u32],
    page_tokens: usize,
    scores: &'a mut Aligned,
    tile: &'a mut Aligned,
}

impl Attend<'_> {
    /// Decodes the latents of up to [`GATHER`] positions.
    #[inline(always)]
    fn gather<S: Simd>(&self, s: S, positions: &[i32], tile: &mut [f32]) {
        let k = self.latent;
        for (&pos, to) in positions.iter().zip(tile.chunks_exact_mut(k)) {
            let (page, token) = (pos as usize / self.page_tokens, pos as usize % self.page_tokens);
            let row = (self.layer_page + self.pages[page] as usize) * self.page_tokens + token;
            let at = row * k;
            match &self.cache.rows {
                latents::Rows::F32(v) => to.copy_from_slice(&v[at..at + k]),
                latents::Rows::Fp8(..) => self.cache.get_fp8(row, to),
                latents::Rows::Bf16(v) => {
                    let row = &v[at..at + k];
                    // SAFETY: the row holds k elements of native (little-endian) bf16.
                    unsafe { Bf16Row.run_lanes(s, row.as_ptr().cast(), 0, to) };
                }
            }
        }
    }
}

impl Kernel for Attend<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (n, k, count) = (self.n, self.latent, self.selected.len());
        let mut tile_buf = std::mem::take(self.tile);
        let mut score_buf = std::mem::take(self.scores);
        {
            let tile = tile_buf.sized(GATHER * k);
            let scores = score_buf.sized(n * count);
            {
                let dest = Dest { out: Disjoint::new(scores), stride: count, col: 0 };
                for (j, part) in self.selected.chunks(GATHER).enumerate() {
                    self.gather(s, part, tile);
                    dots(s, Rows::dense(self.heads, k), n, tile, part.len(), k, Dest { col: j * GATHER, ..dest });
                }
            }
            for row in scores.chunks_exact_mut(count) {
                rows::softmax(s, row, self.scale);
            }
            for (j, part) in self.selected.chunks(GATHER).enumerate() {
                if count > GATHER {
                    self.gather(s, part, tile);
                }
                let a = Mat { data: &scores[j * GATHER..], stride: count };
                let start = if j == 0 { Start::Zero } else { Start::Keep };
                nn(s, n, k, part.len(), a, Mat { data: tile, stride: k }, &mut *self.heads, k, start);
            }
        }
        *self.tile = tile_buf;
        *self.scores = score_buf;
    }
}

/// The op's inputs.
pub(super) struct Inputs<'a> {
    pub(super) q: &'a [f32],
    pub(super) kv_b: &'a CpuWeight,
    pub(super) selected: &'a [i32],
    pub(super) width: usize,
}

/// The selected positions of a row: those before the −1 padding.
fn chosen(selected: &[i32]) -> &[i32] {
    &selected[..selected.iter().position(|&p| p < 0).unwrap_or(selected.len())]
}

/// Refuses positions that lie past a sequence's pages.
fn check(batch: &CpuBatch, inp: &Inputs<'_>, page_tokens: usize) -> Result<(), String> {
    for seg in &batch.desc.segments {
        for r in seg.row0..seg.row0 + seg.rows {
            let row = chosen(&inp.selected[r as usize * inp.width..(r as usize + 1) * inp.width]);
            if let Some(&last) = row.iter().max()
                && last as usize / page_tokens >= seg.pages.len()
            {
                return Err(format!(
                    "position {last} of slot {} lies past its {} pages of {page_tokens} tokens",
                    seg.slot,
                    seg.pages.len()
                ));
            }
        }
    }
    Ok(())
}

/// Runs the attention of all rows; `out` `[R, heads·v]`.
pub(super) fn attend(
    e: &Engine,
    wide: &mut Aligned,
    batch: &CpuBatch,
    layer: usize,
    inp: &Inputs<'_>,
    p: &MlaParams,
    state: &CpuState,
    out: &mut [f32],
) -> Result<(), String> {
    check(batch, inp, state.spec.page_tokens)?;
    let out = Disjoint::new(out);
    for seg in &batch.desc.segments {
        if seg.rows as usize > ROWS {
            for row0 in (seg.row0..seg.row0 + seg.rows).step_by(ROWS) {
                let rows = (seg.row0 + seg.rows - row0).min(ROWS as u32);
                block(e, wide, batch, &[Segment { row0, rows, ..seg.clone() }], layer, inp, p, state, out);
            }
        }
    }
    // Decode rows and short chunks share a pass over kv_b, up to ROWS rows at a time; they need not follow each other.
    let segments = &batch.desc.segments;
    let mut from = 0;
    while from < segments.len() {
        let (mut to, mut rows) = (from, 0);
        while to < segments.len() && segments[to].rows as usize <= ROWS && rows + segments[to].rows as usize <= ROWS {
            rows += segments[to].rows as usize;
            to += 1;
        }
        if to > from {
            block(e, wide, batch, &segments[from..to], layer, inp, p, state, out);
        }
        from = to.max(from + usize::from(to == from));
    }
    Ok(())
}

/// Up to [`ROWS`] consecutive rows.
fn block(
    e: &Engine,
    wide: &mut Aligned,
    batch: &CpuBatch,
    segments: &[Segment],
    layer: usize,
    inp: &Inputs<'_>,
    p: &MlaParams,
    state: &CpuState,
    out: Disjoint<'_, f32>,
) {
    let (heads, latent) = (p.heads, p.latent);
    let row0 = segments[0].row0 as usize;
    let n: usize = segments.iter().map(|s| s.rows as usize).sum();
    let stride = heads * latent;
    let folded = wide.sized(n * stride);
    {
        let strips = latent.div_ceil(FOLD_COLS);
        let all = Disjoint::new(folded);
        e.pool.run(heads * strips, n * heads * p.qk_dim * latent, |worker, item| {
            let (head, col0) = (item / strips, item % strips * FOLD_COLS);
            let q = Mat { data: &inp.q[row0 * heads * p.qk_dim + head * p.qk_dim..], stride: heads * p.qk_dim };
            e.isa.run(Fold {
                q,
                rows: n,
                w: inp.kv_b,
                row0: head * (p.qk_dim + p.v_dim),
                qk: p.qk_dim,
                col0,
                cols: FOLD_COLS.min(latent - col0),
                out: all,
                at: head * latent,
                stride,
                buf: &mut e.locals.of(worker).a,
            });
        });
        let tokens: usize = inp.selected[row0 * inp.width..(row0 + n) * inp.width].iter().filter(|&&p| p >= 0).count();
        let group = if n * heads >= 32 * e.pool.threads() { 16 } else { 8 };
        let groups = heads.div_ceil(group);
        e.pool.run(n * groups, 2 * tokens * heads * latent, |worker, item| {
            let (r, head0) = (item / groups, item % groups * group);
            let count = group.min(heads - head0);
            let Some(seg) = segments.iter().find(|s| (s.row0..s.row0 + s.rows).contains(&((row0 + r) as u32))) else { return };
            let at = r * stride + head0 * latent;
            // SAFETY: this row's heads of this group are this item's.
            let mine = unsafe { all.range(at..at + count * latent) };
            let selected = chosen(&inp.selected[(row0 + r) * inp.width..(row0 + r + 1) * inp.width]);
            if selected.is_empty() {
                mine.fill(0.0);
                return;
            }
            let local = &mut *e.locals.of(worker);
            e.isa.run(Attend {
                heads: mine,
                n: count,
                latent,
                scale: (p.qk_dim as f32).sqrt().recip(),
                selected,
                cache: &state.latents,
                layer_page: layer * state.spec.pages,
                pages: &batch.desc.pages[seg.pages.start as usize..seg.pages.end as usize],
                page_tokens: state.spec.page_tokens,
                scores: &mut local.a,
                tile: &mut local.b,
            });
        });
    }
    let folded = &*folded;
    e.pool.run(heads, n * heads * p.v_dim * latent, |worker, head| {
        let scratch = &mut e.locals.of(worker).a;
        inp.kv_b.pieces(head * (p.qk_dim + p.v_dim) + p.qk_dim, p.v_dim, |w, w_row0, len, offset| {
            e.isa.run(Product {
                // Rows count from the step's first row, as the destination does.
                x: Rows { data: folded, stride, col0: head * latent, index: None },
                rows: 0..n,
                w,
                w_row0,
                n: len,
                dest: Dest { out, stride: heads * p.v_dim, col: row0 * heads * p.v_dim + head * p.v_dim + offset },
                scratch: &mut *scratch,
            });
        });
    });
}

/// Stores latent rows.
pub(super) fn append(batch: &CpuBatch, layer: usize, c: &[f32], state: &mut CpuState) -> Result<(), String> {
    let (latent, page_tokens, pages) = (state.spec.latent, state.spec.page_tokens, state.spec.pages);
    for seg in &batch.desc.segments {
        for i in 0..seg.rows {
            let (page, token) = batch.place(seg, (seg.pos0 + i) as usize, page_tokens)?;
            let row = &c[(seg.row0 + i) as usize * latent..][..latent];
            state.latents.put((layer * pages + page) * page_tokens + token, row);
        }
    }
    Ok(())
}
