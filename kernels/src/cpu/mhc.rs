//! mHC sites and the collapse of the streams (docs/model.md, mHC), all in f32 whatever the precision.

#![allow(clippy::needless_range_loop, reason = "register tiles index several arrays by one constant range")]

use super::{Engine, aligned::Aligned, buf::CpuWeight, disjoint::Disjoint, gemm::Rows, isa::Kernel, linear, rows, simd::Simd};
use crate::MhcParams;

/// The parameters of a site, as slices.
pub(super) struct Site<'a> {
    pub(super) fn_: &'a CpuWeight,
    pub(super) base: &'a [f32],
    pub(super) scale: &'a [f32],
    pub(super) norm: &'a [f32],
}

/// Gates of all rows.
pub(super) struct Gates<'a> {
    pub(super) post: &'a mut [f32],
    pub(super) comb: &'a mut [f32],
}

/// One row's gates, mix and norm. `w` is the row of raw stream dots.
struct PreRow<'a> {
    streams: &'a [f32],
    w: &'a mut [f32],
    site: &'a Site<'a>,
    p: &'a MhcParams,
    x: &'a mut [f32],
    post: &'a mut [f32],
    comb: &'a mut [f32],
}

impl Kernel for PreRow<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (n, d) = (self.p.streams, self.p.hidden);
        let r = rows::inv_rms(s, self.streams, self.p.rms_eps);
        let (scale, base) = (self.site.scale, self.site.base);
        for (j, w) in self.w.iter_mut().enumerate() {
            let part = if j < n {
                0
            } else if j < 2 * n {
                1
            } else {
                2
            };
            *w = *w * r * scale[part] + base[j];
        }
        for w in &mut self.w[..n] {
            *w = sigmoid(*w) + self.p.hc_eps;
        }
        for (o, w) in self.post.iter_mut().zip(&self.w[n..2 * n]) {
            *o = 2.0 * sigmoid(*w);
        }
        self.comb.copy_from_slice(&self.w[2 * n..]);
        sinkhorn(self.comb, n, self.p.hc_eps, self.p.iters);
        // y = Σ pre[n]·S[n]
        let mut i = 0;
        while i < d {
            let end = (i + S::LANES).min(d);
            let mut acc = s.zero();
            for (m, pre) in self.w[..n].iter().enumerate() {
                acc = s.mul_add(s.splat(*pre), s.ld(&self.streams[m * d + i..m * d + end]), acc);
            }
            s.st(&mut self.x[i..end], acc);
            i = end;
        }
        rows::rms_norm_in_place(s, self.x, self.site.norm, self.p.rms_eps);
    }
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// Softmax of rows, then Sinkhorn: one column pass, then `iters − 1` (row, column) pairs.
fn sinkhorn(comb: &mut [f32], n: usize, eps: f32, iters: usize) {
    for row in comb.chunks_exact_mut(n) {
        let top = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let mut total = 0.0;
        for v in row.iter_mut() {
            *v = (*v - top).exp();
            total += *v;
        }
        row.iter_mut().for_each(|v| *v = *v / total + eps);
    }
    let columns = |comb: &mut [f32]| {
        for c in 0..n {
            let total: f32 = (0..n).map(|r| comb[r * n + c]).sum::<f32>() + eps;
            (0..n).for_each(|r| comb[r * n + c] /= total);
        }
    };
    columns(comb);
    for _ in 1..iters {
        for row in comb.chunks_exact_mut(n) {
            let total = row.iter().sum::<f32>() + eps;
            row.iter_mut().for_each(|v| *v /= total);
        }
        columns(comb);
    }
}

/// `streams[m] = post[m]·y + Σ comb[n, m]·streams[n]` for one row, in place.
struct PostRow<'a> {
    y: &'a [f32],
    post: &'a [f32],
    comb: &'a [f32],
    n: usize,
    streams: &'a mut [f32],
}

impl Kernel for PostRow<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match self.n {
            2 => post_row::<S, 2>(s, self),
            4 => post_row::<S, 4>(s, self),
            _ => post_row_any(s, self),
        }
    }
}

/// All streams of a vector of columns in registers.
#[inline(always)]
fn post_row<S: Simd, const N: usize>(s: S, p: PostRow<'_>) {
    let d = p.y.len();
    let mut gate = [[s.zero(); N]; N];
    for (m, row) in gate.iter_mut().enumerate() {
        for (n, g) in row.iter_mut().enumerate() {
            *g = s.splat(p.comb[n * N + m]);
        }
    }
    let mut i = 0;
    while i < d {
        let end = (i + S::LANES).min(d);
        let y = s.ld(&p.y[i..end]);
        let mut old = [s.zero(); N];
        for (n, o) in old.iter_mut().enumerate() {
            *o = s.ld(&p.streams[n * d + i..n * d + end]);
        }
        for m in 0..N {
            let mut acc = s.mul(s.splat(p.post[m]), y);
            for n in 0..N {
                acc = s.mul_add(gate[m][n], old[n], acc);
            }
            s.st(&mut p.streams[m * d + i..m * d + end], acc);
        }
        i = end;
    }
}

/// Any number of streams up to 16 lanes' worth of stack.
#[inline(always)]
fn post_row_any<S: Simd>(s: S, p: PostRow<'_>) {
    let (n, d) = (p.n, p.y.len());
    let mut old = [s.zero(); MAX_STREAMS];
    let mut i = 0;
    while i < d {
        let end = (i + S::LANES).min(d);
        let y = s.ld(&p.y[i..end]);
        for (j, o) in old[..n].iter_mut().enumerate() {
            *o = s.ld(&p.streams[j * d + i..j * d + end]);
        }
        for m in 0..n {
            let mut acc = s.mul(s.splat(p.post[m]), y);
            for (j, o) in old[..n].iter().enumerate() {
                acc = s.mul_add(s.splat(p.comb[j * n + m]), *o, acc);
            }
            s.st(&mut p.streams[m * d + i..m * d + end], acc);
        }
        i = end;
    }
}

/// Most streams that a site may have.
pub(super) const MAX_STREAMS: usize = 32;

/// mHC post of `n` rows.
pub(super) fn post(e: &Engine, n: usize, y: &[f32], post: &[f32], comb: &[f32], p: &MhcParams, streams: &mut [f32]) {
    let (ns, d) = (p.streams, p.hidden);
    let all = Disjoint::new(streams);
    e.pool.run(n, n * ns * ns * d / 4, |_, r| {
        // SAFETY: each row is one item's.
        let streams = unsafe { all.range(r * ns * d..(r + 1) * ns * d) };
        e.isa.run(PostRow {
            y: &y[r * d..(r + 1) * d],
            post: &post[r * ns..(r + 1) * ns],
            comb: &comb[r * ns * ns..(r + 1) * ns * ns],
            n: ns,
            streams,
        });
    });
}

/// mHC pre of `n` rows with the norm that follows.
pub(super) fn pre(
    e: &Engine,
    wide: &mut Aligned,
    n: usize,
    streams: &[f32],
    site: &Site<'_>,
    p: &MhcParams,
    x: &mut [f32],
    gates: Gates<'_>,
) {
    let (ns, d) = (p.streams, p.hidden);
    let outs = ns * (ns + 2);
    let w = wide.sized(n * outs);
    linear::product(e, n, Rows::dense(streams, ns * d), site.fn_, w, outs);
    let (w, x) = (Disjoint::new(w), Disjoint::new(x));
    let (post, comb) = (Disjoint::new(gates.post), Disjoint::new(gates.comb));
    e.pool.run(n, n * ns * d / 2, |_, r| {
        // SAFETY: each row is one item's.
        unsafe {
            e.isa.run(PreRow {
                streams: &streams[r * ns * d..(r + 1) * ns * d],
                w: w.range(r * outs..(r + 1) * outs),
                site,
                p,
                x: x.range(r * d..(r + 1) * d),
                post: post.range(r * ns..(r + 1) * ns),
                comb: comb.range(r * ns * ns..(r + 1) * ns * ns),
            });
        }
    });
}

/// Mean of the streams, then RMSNorm.
pub(super) struct Collapse<'a> {
    pub(super) streams: &'a [f32],
    pub(super) norm: &'a [f32],
    pub(super) p: &'a MhcParams,
    pub(super) out: &'a mut [f32],
}

impl Kernel for Collapse<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (n, d) = (self.p.streams, self.p.hidden);
        self.out.copy_from_slice(&self.streams[..d]);
        for m in 1..n {
            rows::add(s, &self.streams[m * d..(m + 1) * d], self.out);
        }
        rows::scale(s, 1.0 / n as f32, self.out);
        rows::rms_norm_in_place(s, self.out, self.norm, self.p.rms_eps);
    }
}
