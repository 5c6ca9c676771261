//! Products of two activation matrices, `c (+)= a·b`, row-major, lanes along the columns of `b` and `c`.
//!
//! Each output is one chain over k in ascending order, so the tile shape cannot be seen in a result.

#![allow(clippy::needless_range_loop, reason = "register tiles index several arrays by one constant range")]

use super::{isa::Kernel, simd::Simd};

/// What `c` holds before the products are added.
#[derive(Clone, Copy)]
pub(super) enum Start<'a> {
    /// Nothing: `c` is overwritten.
    Zero,
    /// Itself.
    Keep,
    /// Itself, row i times `scale[i]`.
    Scaled(&'a [f32]),
}

/// A row-major matrix with a row stride.
#[derive(Clone, Copy)]
pub(super) struct Mat<'a> {
    pub(super) data: &'a [f32],
    pub(super) stride: usize,
}

/// `c[m, n] = start(c) + a[m, k]·b[k, n]`, `c` with row stride `ldc`. Out of line: the ops call it many times.
#[inline(always)]
pub(super) fn nn<S: Simd>(s: S, m: usize, n: usize, k: usize, a: Mat<'_>, b: Mat<'_>, c: &mut [f32], ldc: usize, start: Start<'_>) {
    s.call(Nn { m, n, k, a, b, c, ldc, start });
}

struct Nn<'a> {
    m: usize,
    n: usize,
    k: usize,
    a: Mat<'a>,
    b: Mat<'a>,
    c: &'a mut [f32],
    ldc: usize,
    start: Start<'a>,
}

impl Kernel for Nn<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { m, n, k, a, b, c, ldc, start } = self;
        if m == 0 || n == 0 {
            return;
        }
        assert!(c.len() >= (m - 1) * ldc + n, "c is too short");
        if k > 0 {
            assert!(a.data.len() >= (m - 1) * a.stride + k && b.data.len() >= (k - 1) * b.stride + n, "a or b is too short");
        }
        let wide = 4 * S::LANES;
        for j in (0..n).step_by(wide) {
            let full = j + wide <= n;
            for i in (0..m).step_by(3) {
                // SAFETY: rows i..i+3 (or to m) of a and c and columns j.. of b and c are inside (asserted above); `full` tiles have
                // 4·LANES columns.
                unsafe {
                    match (m - i, full) {
                        (1, true) => block::<S, 1, 4>(s, i, j, k, a, b, c, ldc, start),
                        (2, true) => block::<S, 2, 4>(s, i, j, k, a, b, c, ldc, start),
                        (_, true) => block::<S, 3, 4>(s, i, j, k, a, b, c, ldc, start),
                        (1, false) => edge::<S, 1>(s, i, j, n, k, a, b, c, ldc, start),
                        (2, false) => edge::<S, 2>(s, i, j, n, k, a, b, c, ldc, start),
                        (_, false) => edge::<S, 3>(s, i, j, n, k, a, b, c, ldc, start),
                    }
                }
            }
        }
    }
}

/// An M × (J·LANES) tile.
///
/// # Safety
/// Rows `i..i+M` and columns `j..j+J·LANES` are inside.
#[inline(always)]
unsafe fn block<S: Simd, const M: usize, const J: usize>(
    s: S,
    i: usize,
    j: usize,
    k: usize,
    a: Mat<'_>,
    b: Mat<'_>,
    c: &mut [f32],
    ldc: usize,
    start: Start<'_>,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let cp = c.as_mut_ptr().add(i * ldc + j);
        let ap = a.data.as_ptr().wrapping_add(i * a.stride);
        let bp = b.data.as_ptr().wrapping_add(j);
        let mut acc = [[s.zero(); J]; M];
        for p in 0..M {
            for q in 0..J {
                acc[p][q] = match start {
                    Start::Zero => s.zero(),
                    Start::Keep => s.load(cp.add(p * ldc + q * S::LANES)),
                    Start::Scaled(f) => s.mul(s.load(cp.add(p * ldc + q * S::LANES)), s.splat(f[i + p])),
                };
            }
        }
        for t in 0..k {
            let mut bv = [s.zero(); J];
            for q in 0..J {
                bv[q] = s.load(bp.add(t * b.stride + q * S::LANES));
            }
            for p in 0..M {
                let av = s.splat(*ap.add(p * a.stride + t));
                for q in 0..J {
                    acc[p][q] = s.mul_add(av, bv[q], acc[p][q]);
                }
            }
        }
        for p in 0..M {
            for q in 0..J {
                s.store(cp.add(p * ldc + q * S::LANES), acc[p][q]);
            }
        }
    }
}

/// Columns `j..n`, vector by vector, the last one partial.
///
/// # Safety
/// Rows `i..i+M` and columns `j..n` are inside.
#[inline(always)]
unsafe fn edge<S: Simd, const M: usize>(
    s: S,
    i: usize,
    j: usize,
    n: usize,
    k: usize,
    a: Mat<'_>,
    b: Mat<'_>,
    c: &mut [f32],
    ldc: usize,
    start: Start<'_>,
) {
    let mut j = j;
    while j + S::LANES <= n {
        // SAFETY: the caller's promise.
        unsafe { block::<S, M, 1>(s, i, j, k, a, b, c, ldc, start) };
        j += S::LANES;
    }
    if j == n {
        return;
    }
    for p in i..i + M {
        let row = &mut c[p * ldc + j..p * ldc + n];
        let mut acc = match start {
            Start::Zero => s.zero(),
            Start::Keep => s.ld(row),
            Start::Scaled(f) => s.mul(s.ld(row), s.splat(f[p])),
        };
        for t in 0..k {
            let bv = s.ld(&b.data[t * b.stride + j..t * b.stride + n]);
            acc = s.mul_add(s.splat(a.data[p * a.stride + t]), bv, acc);
        }
        s.st(row, acc);
    }
}
