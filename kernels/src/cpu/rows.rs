//! Element-wise and reducing loops over one row.

use super::{isa::Kernel, simd::Simd};

/// Σ x², in a fixed order.
#[inline(always)]
pub(super) fn sum_squares<S: Simd>(s: S, x: &[f32]) -> f32 {
    let mut acc = [s.zero(); 4];
    let mut chunks = x.chunks_exact(4 * S::LANES);
    for c in &mut chunks {
        for (j, a) in acc.iter_mut().enumerate() {
            let v = s.ld(&c[j * S::LANES..(j + 1) * S::LANES]);
            *a = s.mul_add(v, v, *a);
        }
    }
    for (j, c) in chunks.remainder().chunks(S::LANES).enumerate() {
        let v = s.ld(c);
        acc[j] = s.mul_add(v, v, acc[j]);
    }
    s.sum(s.add(s.add(acc[0], acc[1]), s.add(acc[2], acc[3])))
}

/// Σ x, in a fixed order.
#[inline(always)]
pub(super) fn sum<S: Simd>(s: S, x: &[f32]) -> f32 {
    let mut acc = s.zero();
    for c in x.chunks(S::LANES) {
        acc = s.add(acc, s.ld(c));
    }
    s.sum(acc)
}

/// 1 / sqrt(mean square + eps)
#[inline(always)]
pub(super) fn inv_rms<S: Simd>(s: S, x: &[f32], eps: f32) -> f32 {
    1.0 / (sum_squares(s, x) / x.len() as f32 + eps).sqrt()
}

/// `out = x · inv_rms · weight`
#[inline(always)]
pub(super) fn rms_norm<S: Simd>(s: S, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let r = s.splat(inv_rms(s, x, eps));
    for ((o, x), w) in out.chunks_mut(S::LANES).zip(x.chunks(S::LANES)).zip(weight.chunks(S::LANES)) {
        s.st(o, s.mul(s.mul(s.ld(x), r), s.ld(w)));
    }
}

/// As [`rms_norm`], in place.
#[inline(always)]
pub(super) fn rms_norm_in_place<S: Simd>(s: S, x: &mut [f32], weight: &[f32], eps: f32) {
    let r = s.splat(inv_rms(s, x, eps));
    for (x, w) in x.chunks_mut(S::LANES).zip(weight.chunks(S::LANES)) {
        let v = s.mul(s.mul(s.ld(x), r), s.ld(w));
        s.st(x, v);
    }
}

/// `y += a · x`
#[inline(always)]
pub(super) fn axpy<S: Simd>(s: S, a: f32, x: &[f32], y: &mut [f32]) {
    let a = s.splat(a);
    for (y, x) in y.chunks_mut(S::LANES).zip(x.chunks(S::LANES)) {
        let v = s.mul_add(a, s.ld(x), s.ld(y));
        s.st(y, v);
    }
}

/// `y += x`
#[inline(always)]
pub(super) fn add<S: Simd>(s: S, x: &[f32], y: &mut [f32]) {
    for (y, x) in y.chunks_mut(S::LANES).zip(x.chunks(S::LANES)) {
        let v = s.add(s.ld(y), s.ld(x));
        s.st(y, v);
    }
}

/// `x *= a`
#[inline(always)]
pub(super) fn scale<S: Simd>(s: S, a: f32, x: &mut [f32]) {
    let a = s.splat(a);
    for x in x.chunks_mut(S::LANES) {
        let v = s.mul(s.ld(x), a);
        s.st(x, v);
    }
}

/// `out = bf16(x)`
#[inline(always)]
pub(super) fn round_bf16<S: Simd>(s: S, x: &[f32], out: &mut [f32]) {
    for (o, x) in out.chunks_mut(S::LANES).zip(x.chunks(S::LANES)) {
        s.st(o, s.round_bf16(s.ld(x)));
    }
}

/// `gate = silu(min(gate, limit)) · clamp(up, ±limit)`; NaN stays NaN.
#[inline(always)]
pub(super) fn swiglu<S: Simd>(s: S, gate: &mut [f32], up: &[f32], limit: Option<f32>, round: bool) {
    for (g, u) in gate.chunks_mut(S::LANES).zip(up.chunks(S::LANES)) {
        let (mut gv, mut uv) = (s.ld(g), s.ld(u));
        if let Some(limit) = limit {
            let (hi, lo) = (s.splat(limit), s.splat(-limit));
            gv = s.min(hi, gv);
            uv = s.min(hi, s.max(lo, uv));
        }
        let mut v = s.mul(s.silu(gv), uv);
        if round {
            v = s.round_bf16(v);
        }
        s.st(g, v);
    }
}

/// In place softmax of `x · scale`.
#[inline(always)]
pub(super) fn softmax<S: Simd>(s: S, x: &mut [f32], scale: f32) {
    let mut top = f32::NEG_INFINITY;
    for &v in x.iter() {
        // Keeps a NaN out of the maximum; it still reaches the sum below.
        if v > top {
            top = v;
        }
    }
    let (scale, shift) = (s.splat(scale), s.splat(top * scale));
    let mut total = s.zero();
    let mut chunks = x.chunks_exact_mut(S::LANES);
    for c in &mut chunks {
        let e = s.exp(s.sub(s.mul(s.ld(c), scale), shift));
        s.st(c, e);
        total = s.add(total, e);
    }
    let rest = chunks.into_remainder();
    if !rest.is_empty() {
        let e = s.exp(s.sub(s.mul(s.ld(rest), scale), shift));
        s.st(rest, e);
        // Reads back, so that the lanes past the end count as zero.
        total = s.add(total, s.ld(rest));
    }
    let inv = 1.0 / s.sum(total);
    self::scale(s, inv, x);
}

/// [`rms_norm`] of one row.
pub(super) struct NormRow<'a> {
    pub(super) x: &'a [f32],
    pub(super) weight: &'a [f32],
    pub(super) eps: f32,
    pub(super) out: &'a mut [f32],
}

impl Kernel for NormRow<'_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        rms_norm(s, self.x, self.weight, self.eps, self.out);
    }
}

/// [`add`] over a whole buffer.
pub(super) struct Add<'a> {
    pub(super) x: &'a [f32],
    pub(super) y: &'a mut [f32],
}

impl Kernel for Add<'_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        add(s, self.x, self.y);
    }
}
