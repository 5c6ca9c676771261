//! The indexer: pooled keys on append, scores and the partial top-k on select (docs/model.md, Indexer), all in f32.
//!
//! Pooled keys lie `[dim][pool]` inside a page, so a vector holds one channel of LANES pools and a score needs no horizontal sum.

#![allow(clippy::needless_range_loop, reason = "register tiles index several arrays by one constant range")]

use super::{
    Engine,
    aligned::Aligned,
    buf::{CpuBatch, sized},
    disjoint::Disjoint,
    isa::Kernel,
    rows,
    simd::Simd,
    state::CpuState,
};
use crate::{IndexerParams, Segment};

/// eps of the key's LayerNorm (a constant of the model).
const KEY_EPS: f32 = 1e-6;

/// What append reads.
pub(super) struct AppendInputs<'a> {
    pub(super) proj: &'a [f32],
    pub(super) stride: usize,
    pub(super) key0: usize,
    pub(super) gate0: usize,
    pub(super) norm_weight: &'a [f32],
    pub(super) norm_bias: &'a [f32],
    pub(super) ape: &'a [f32],
}

/// Stores the step's index keys.
pub(super) fn append(
    e: &Engine,
    local: &mut Aligned,
    batch: &CpuBatch,
    layer: usize,
    inp: &AppendInputs<'_>,
    p: &IndexerParams,
    state: &mut CpuState,
) -> Result<(), String> {
    let sizes = state.sizes();
    let page_tokens = state.spec.page_tokens;
    for seg in &batch.desc.segments {
        let tail_at = state.slot_at(layer, seg.slot, sizes.tail);
        for i in 0..seg.rows as usize {
            let pos = seg.pos0 as usize + i;
            let (page, token) = batch.place(seg, pos, page_tokens)?;
            let page_at = (layer * state.spec.pages + page) * sizes.pooled_page;
            e.isa.run(Append {
                row: &inp.proj[(seg.row0 as usize + i) * inp.stride..(seg.row0 as usize + i + 1) * inp.stride],
                inp,
                slot: pos % p.kpool,
                kpool: p.kpool,
                dim: p.dim,
                tail: &mut state.tail[tail_at..tail_at + sizes.tail],
                page: &mut state.pooled[page_at..page_at + sizes.pooled_page],
                pool: token / p.kpool,
                padded: sizes.padded,
                buf: local.sized(3 * p.dim),
            });
        }
    }
    Ok(())
}

struct Append<'a> {
    row: &'a [f32],
    inp: &'a AppendInputs<'a>,
    /// Place of the token in its pool.
    slot: usize,
    kpool: usize,
    dim: usize,
    tail: &'a mut [f32],
    page: &'a mut [f32],
    /// Pool in the page.
    pool: usize,
    padded: usize,
    buf: &'a mut [f32],
}

impl Kernel for Append<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let dim = self.dim;
        let (key, rest) = self.buf.split_at_mut(dim);
        let (pooled, centred) = rest.split_at_mut(dim);
        let raw = &self.row[self.inp.key0..self.inp.key0 + dim];
        let gate = &self.row[self.inp.gate0..self.inp.gate0 + dim];
        let mean = rows::sum(s, raw) / dim as f32;
        for (o, x) in centred.iter_mut().zip(raw) {
            *o = x - mean;
        }
        let r = s.splat(1.0 / (rows::sum_squares(s, centred) / dim as f32 + KEY_EPS).sqrt());
        for i in (0..dim).step_by(S::LANES) {
            let end = (i + S::LANES).min(dim);
            let (w, b) = (s.ld(&self.inp.norm_weight[i..end]), s.ld(&self.inp.norm_bias[i..end]));
            s.st(&mut key[i..end], s.mul_add(s.mul(s.ld(&centred[i..end]), r), w, b));
        }
        if self.slot + 1 < self.kpool {
            let at = self.slot * 2 * dim;
            self.tail[at..at + dim].copy_from_slice(key);
            self.tail[at + dim..at + 2 * dim].copy_from_slice(gate);
            return;
        }
        // The pool is complete: softmax of gate + ape over its tokens, per channel.
        let last = self.kpool - 1;
        for i in (0..dim).step_by(S::LANES) {
            let end = (i + S::LANES).min(dim);
            let mut top = s.splat(f32::NEG_INFINITY);
            for t in 0..self.kpool {
                let g = if t == last { &gate[i..end] } else { &self.tail[(2 * t + 1) * dim + i..(2 * t + 1) * dim + end] };
                top = s.max(s.add(s.ld(g), s.ld(&self.inp.ape[t * dim + i..t * dim + end])), top);
            }
            let (mut total, mut sum) = (s.zero(), s.zero());
            for t in 0..self.kpool {
                let (k, g) = if t == last {
                    (&key[i..end], &gate[i..end])
                } else {
                    (&self.tail[2 * t * dim + i..2 * t * dim + end], &self.tail[(2 * t + 1) * dim + i..(2 * t + 1) * dim + end])
                };
                let w = s.exp(s.sub(s.add(s.ld(g), s.ld(&self.inp.ape[t * dim + i..t * dim + end])), top));
                total = s.add(total, w);
                sum = s.mul_add(w, s.ld(k), sum);
            }
            s.st(&mut pooled[i..end], s.div(sum, total));
        }
        for (d, v) in pooled.iter().enumerate() {
            self.page[d * self.padded + self.pool] = *v;
        }
    }
}

/// What select reads.
pub(super) struct SelectInputs<'a> {
    pub(super) iq: &'a [f32],
    pub(super) proj: &'a [f32],
    pub(super) stride: usize,
    pub(super) w0: usize,
}

/// One row's query.
#[derive(Clone, Copy)]
struct Query<'a> {
    iq: &'a [f32],
    weights: &'a [f32],
    pages: &'a [u32],
    /// Complete pools that the row sees.
    pools: usize,
}

/// Scores of the pools of some pages, into `out[page][pools]`.
struct Score<'a> {
    q: Query<'a>,
    state: &'a CpuState,
    layer: usize,
    heads: usize,
    dim: usize,
    pages: &'a [u32],
    out: &'a mut [f32],
}

impl Kernel for Score<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let sizes = self.state.sizes();
        for (&page, out) in self.pages.iter().zip(self.out.chunks_exact_mut(sizes.pools)) {
            let at = (self.layer * self.state.spec.pages + page as usize) * sizes.pooled_page;
            let keys = &self.state.pooled[at..at + sizes.pooled_page];
            let mut j = 0;
            while j < sizes.pools {
                if S::LANES == 16 {
                    score::<S, 8, 1>(s, self.q, self.heads, self.dim, keys, sizes.padded, j, out);
                } else {
                    score::<S, 4, 2>(s, self.q, self.heads, self.dim, keys, sizes.padded, j, out);
                }
                j += 16;
            }
        }
    }
}

/// 16 pools from `j` on, H heads at a time (J vectors of pools).
#[inline(always)]
fn score<S: Simd, const H: usize, const J: usize>(
    s: S,
    query: Query<'_>,
    heads: usize,
    dim: usize,
    keys: &[f32],
    padded: usize,
    j: usize,
    out: &mut [f32],
) {
    let per_dim = s.splat((dim as f32).sqrt().recip());
    let per_head = (heads as f32).sqrt().recip();
    let mut total = [s.zero(); J];
    assert!(keys.len() >= dim * padded && padded >= j + 16 && query.iq.len() >= heads * dim, "pooled keys");
    let (keys, iq) = (keys.as_ptr().wrapping_add(j), query.iq.as_ptr());
    let mut h0 = 0;
    while h0 < heads {
        let mut acc = [[s.zero(); J]; H];
        // Heads past the last repeat it; their sums are dropped.
        let mut q = [iq; H];
        for (i, q) in q.iter_mut().enumerate() {
            *q = iq.wrapping_add((h0 + i).min(heads - 1) * dim);
        }
        for d in 0..dim {
            // SAFETY: channel d of a head, and 16 pools from j on of channel d of the page (asserted above).
            unsafe {
                let mut k = [s.zero(); J];
                for (i, k) in k.iter_mut().enumerate() {
                    *k = s.load(keys.add(d * padded + i * S::LANES));
                }
                for i in 0..H {
                    let x = s.splat(*q[i].add(d));
                    for n in 0..J {
                        acc[i][n] = s.mul_add(x, k[n], acc[i][n]);
                    }
                }
            }
        }
        for i in 0..H.min(heads - h0) {
            let w = s.splat(query.weights[h0 + i] * per_head);
            for n in 0..J {
                let relu = s.max(s.zero(), s.mul(acc[i][n], per_dim));
                total[n] = s.mul_add(w, relu, total[n]);
            }
        }
        h0 += H;
    }
    for (n, t) in total.iter().enumerate() {
        let at = j + n * S::LANES;
        if at < out.len() {
            s.st(&mut out[at..], *t);
        }
    }
}

/// Chooses every row's positions.
pub(super) fn select(
    e: &Engine,
    wide: &mut Aligned,
    batch: &CpuBatch,
    layer: usize,
    inp: &SelectInputs<'_>,
    p: &IndexerParams,
    state: &CpuState,
    out: &mut [i32],
) -> Result<(), String> {
    let width = p.width();
    let sizes = state.sizes();
    for seg in &batch.desc.segments {
        batch.place(seg, (seg.pos0 + seg.rows).saturating_sub(1) as usize, state.spec.page_tokens)?;
    }
    let all = Disjoint::new(out);
    let rows = batch.desc.tokens.len();
    let longest = batch.desc.segments.iter().map(|s| (s.pos0 + s.rows) as usize).max().unwrap_or(0);
    let pages_of = |q: &Query<'_>| q.pools.div_ceil(sizes.pools.max(1));
    let query = |seg: &Segment, r: usize| Query {
        iq: &inp.iq[r * p.heads * p.dim..(r + 1) * p.heads * p.dim],
        weights: &inp.proj[r * inp.stride + inp.w0..r * inp.stride + inp.w0 + p.heads],
        pages: &batch.desc.pages[seg.pages.start as usize..seg.pages.end as usize],
        pools: (seg.pos0 as usize + r - seg.row0 as usize + 1) / p.kpool,
    };
    let cost = |pools: usize| pools * p.heads * p.dim;
    if rows >= e.pool.threads() || longest <= width {
        // Whole rows are the items. Few of them may be long; their scores lie in the thread's own scratch.
        let work = if longest <= width { rows * width / 8 } else { rows * cost(longest / p.kpool) / 2 };
        e.pool.run(rows, work, |worker, r| {
            // SAFETY: each row is one item's.
            let out = unsafe { all.range(r * width..(r + 1) * width) };
            let Some(seg) = batch.segment_of(r) else { return };
            let visible = seg.pos0 as usize + r - seg.row0 as usize + 1;
            if visible <= width {
                take_all(visible, out);
                return;
            }
            let q = query(seg, r);
            let local = &mut *e.locals.of(worker);
            let to = pages_of(&q);
            let scores = local.b.sized(to * sizes.pools);
            e.isa.run(Score { q, state, layer, heads: p.heads, dim: p.dim, pages: &q.pages[..to], out: &mut *scores });
            pick(&scores[..q.pools], visible, p, &mut local.keys, out);
        });
        return Ok(());
    }
    // A long row or two: pages are the items.
    const PAGES: usize = 16;
    for seg in &batch.desc.segments {
        for r in seg.row0 as usize..(seg.row0 + seg.rows) as usize {
            // SAFETY: nothing else writes while this row is chosen.
            let out = unsafe { all.range(r * width..(r + 1) * width) };
            let visible = seg.pos0 as usize + r - seg.row0 as usize + 1;
            if visible <= width {
                take_all(visible, out);
                continue;
            }
            let q = query(seg, r);
            let pages = pages_of(&q);
            let scores = wide.sized(pages * sizes.pools);
            {
                let parts = Disjoint::new(scores);
                e.pool.run(pages.div_ceil(PAGES), cost(q.pools), |_, item| {
                    let (from, to) = (item * PAGES, pages.min((item + 1) * PAGES));
                    // SAFETY: each range of pages is one item's.
                    let out = unsafe { parts.range(from * sizes.pools..to * sizes.pools) };
                    e.isa.run(Score { q, state, layer, heads: p.heads, dim: p.dim, pages: &q.pages[from..to], out });
                });
            }
            pick(&scores[..q.pools], visible, p, &mut e.locals.of(0).keys, out);
        }
    }
    Ok(())
}

fn take_all(visible: usize, out: &mut [i32]) {
    for (i, o) in out.iter_mut().enumerate() {
        *o = if i < visible { i as i32 } else { -1 };
    }
}

/// A score as an integer of the same order; NaN as the lowest, −0 as 0.
#[inline(always)]
fn ordered(x: f32) -> u32 {
    let x = if x.is_nan() { f32::NEG_INFINITY } else { x + 0.0 };
    let bits = x.to_bits();
    if bits >> 31 == 1 { !bits } else { bits | 0x8000_0000 }
}

/// The best pools' tokens, ascending, then the tail. Ties go to the lowest pool: only the k-th best score is searched for, then one
/// pass in order takes what lies above it and the first of its equals.
fn pick(scores: &[f32], visible: usize, p: &IndexerParams, keys: &mut Vec<u32>, out: &mut [i32]) {
    let pools = scores.len();
    let take = (p.topk / p.kpool).min(pools);
    let mut at = 0;
    if take > 0 {
        let all = sized(keys, 2 * pools);
        let (keys, order) = all.split_at_mut(pools);
        for ((k, o), x) in keys.iter_mut().zip(order.iter_mut()).zip(scores) {
            *k = ordered(*x);
            *o = *k;
        }
        let (_, &mut edge, above) = order.select_nth_unstable(pools - take);
        let mut equals = take - above.iter().filter(|&&k| k > edge).count();
        for (pool, &k) in keys.iter().enumerate() {
            let chosen = k > edge || (k == edge && equals > 0);
            if chosen {
                equals -= usize::from(k == edge);
                for t in 0..p.kpool {
                    out[at + t] = (pool * p.kpool + t) as i32;
                }
                at += p.kpool;
            }
        }
    }
    if p.always_tail {
        for t in pools * p.kpool..visible {
            out[at] = t as i32;
            at += 1;
        }
    }
    out[at..].fill(-1);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ties_go_to_the_lowest_pool_and_positions_ascend() {
        let p = IndexerParams { heads: 1, dim: 1, kpool: 2, topk: 4, always_tail: true };
        let mut out = [0; 5];
        pick(&[1.0, 3.0, 1.0, 0.0], 9, &p, &mut Vec::new(), &mut out);
        assert_eq!(out, [0, 1, 2, 3, 8]);
        pick(&[f32::NAN, -0.0, 0.0, 0.0], 8, &p, &mut Vec::new(), &mut out);
        assert_eq!(out, [2, 3, 4, 5, -1]);
    }
}
