//! Products of activation rows with stored weights, `out[r, o] = x[r]·w[o]`, for one row as for thousands.
//!
//! Every variant sums in one order: lane `l` of a single accumulator per (row, output) takes elements l, l+LANES, l+2·LANES … in
//! turn, then the lanes are added in the fixed order of [`Simd::sum`]. So N rows equal N single rows bit for bit, and neither the
//! tile shape, nor the blocking, nor the threads (which split outputs and rows, never the sum) can be seen in a result.
//!
//! Few rows read stored bytes straight into registers; more rows decode a panel of 4 weight rows once into L1 and run all rows over
//! it. Neighbours: `decode.rs` (stored types), `linear.rs` (whole matrices over the pool), `nn.rs` (activations by activations).

use std::ops::Range;

use tandem_quant::MatrixSource;

use super::{
    decode::{Decoder, F32Row, with_decoder},
    disjoint::Disjoint,
    isa::Kernel,
    simd::Simd,
};

/// Weight rows per panel.
const N: usize = 4;
/// Elements of a panel row: 4 × 1,024 f32 = 16 KiB of L1. A multiple of every LANES.
const KC: usize = 1024;
/// Activation rows that share a decoded panel: x blocks of 64 × 4,096 f32 = 1 MiB of L2.
pub(super) const ROW_BLOCK: usize = 64;
/// Most rows of a register tile.
const M_MAX: usize = 6;

/// Rows of activations: row i is `data[at·stride + col0 ..]` with `at = index[i]`, or i.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    pub(super) data: &'a [f32],
    pub(super) stride: usize,
    pub(super) col0: usize,
    pub(super) index: Option<&'a [u32]>,
}

impl<'a> Rows<'a> {
    /// Rows that follow each other without a gap.
    pub(super) fn dense(data: &'a [f32], stride: usize) -> Self {
        Self { data, stride, col0: 0, index: None }
    }

    /// The first `k` elements of row `i`.
    #[inline(always)]
    pub(super) fn row(&self, i: usize, k: usize) -> &'a [f32] {
        let at = match self.index {
            Some(index) => index[i] as usize,
            None => i,
        };
        let start = at * self.stride + self.col0;
        &self.data[start..start + k]
    }
}

/// Where a product goes: row r, output o to `out[r·stride + col + o]`.
#[derive(Clone, Copy)]
pub(super) struct Dest<'a> {
    pub(super) out: Disjoint<'a, f32>,
    pub(super) stride: usize,
    pub(super) col: usize,
}

/// Rows `rows` of `x` times rows `w_row0 .. w_row0 + n` of `w`. The destination's elements belong to this product alone.
pub(super) struct Product<'a> {
    pub(super) x: Rows<'a>,
    pub(super) rows: Range<usize>,
    pub(super) w: &'a MatrixSource,
    pub(super) w_row0: usize,
    pub(super) n: usize,
    pub(super) dest: Dest<'a>,
    pub(super) scratch: &'a mut Vec<f32>,
}

impl Kernel for Product<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        with_decoder!(self.w.dtype(), d => product(s, d, self));
    }
}

/// Register tile rows of an instruction set.
const fn tile_rows<S: Simd>() -> usize {
    if S::WIDE { 6 } else { 3 }
}

#[inline(always)]
fn product<S: Simd, D: Decoder>(s: S, d: D, p: Product<'_>) {
    let k = p.w.cols();
    let stride = p.w.row_stride();
    assert!(p.w_row0 + p.n <= p.w.rows(), "rows of {}", p.w.name());
    let bytes: &[u8] = p.w.data();
    if p.n == 0 || p.rows.is_empty() {
        return;
    }
    assert!(bytes.len() >= (p.w_row0 + p.n - 1) * stride + d.byte_of(k), "bytes of {}", p.w.name());
    let direct = D::DIRECT && p.rows.len() <= tile_rows::<S>();
    let mut n0 = 0;
    while n0 < p.n {
        let n = (p.n - n0).min(N);
        let mut w = [std::ptr::null::<u8>(); N];
        for (j, w) in w.iter_mut().enumerate() {
            // Missing rows repeat the last one; what they give is dropped.
            *w = bytes[(p.w_row0 + n0 + j.min(n - 1)) * stride..].as_ptr();
        }
        let strip = Strip { x: p.x, k, n, dest: Dest { col: p.dest.col + n0, ..p.dest } };
        if direct {
            // SAFETY: each w row holds k elements (asserted above).
            unsafe { strip.direct(s, d, p.rows.clone(), w) };
        } else {
            let mut r = p.rows.start;
            while r < p.rows.end {
                let end = (r + ROW_BLOCK).min(p.rows.end);
                // SAFETY: as above.
                unsafe { strip.panel(s, d, r..end, w, p.scratch) };
                r = end;
            }
        }
        n0 += N;
    }
}

/// `dest[r, j] = x[r]·w[j]` for `m` rows of x and `n` rows of f32 activations `w`, both `k` long: scores, not weights.
#[inline(always)]
pub(super) fn dots<S: Simd>(s: S, x: Rows<'_>, m: usize, w: &[f32], n: usize, k: usize, dest: Dest<'_>) {
    if m == 0 || n == 0 {
        return;
    }
    assert!(w.len() >= n * k, "w is too short");
    let step = tile_rows::<S>();
    for n0 in (0..n).step_by(N) {
        let strip = Strip { x, k, n: (n - n0).min(N), dest: Dest { col: dest.col + n0, ..dest } };
        let mut rows = [std::ptr::null::<u8>(); N];
        for (j, row) in rows.iter_mut().enumerate() {
            *row = w[(n0 + j.min(strip.n - 1)) * k..].as_ptr().cast();
        }
        for r in (0..m).step_by(step) {
            // SAFETY: each row of w holds k elements (asserted above).
            unsafe { strip.direct(s, F32Row, r..(r + step).min(m), rows) };
        }
    }
}

/// Up to four outputs of a product.
#[derive(Clone, Copy)]
struct Strip<'a> {
    x: Rows<'a>,
    k: usize,
    n: usize,
    dest: Dest<'a>,
}

type Acc<V> = [[V; N]; M_MAX];

impl Strip<'_> {
    /// A tile of rows over the stored bytes.
    ///
    /// # Safety
    /// Each `w` points to a row of `k` elements.
    #[inline(always)]
    unsafe fn direct<S: Simd, D: Decoder>(self, s: S, d: D, rows: Range<usize>, w: [*const u8; N]) {
        let x = self.x_rows(&rows, 0);
        let mut acc = [[s.zero(); N]; M_MAX];
        // SAFETY: x rows are `k` long (x_rows checks), w by the caller's promise.
        unsafe { tiles(s, d, rows.len(), &x, &w, self.k, &mut acc) };
        self.write(s, rows, &acc);
    }

    /// A block of rows over panels of decoded weights.
    ///
    /// # Safety
    /// Each `w` points to a row of `k` elements.
    #[inline(always)]
    unsafe fn panel<S: Simd, D: Decoder>(self, s: S, d: D, rows: Range<usize>, w: [*const u8; N], scratch: &mut Vec<f32>) {
        let need = N * KC + ROW_BLOCK * N * S::LANES;
        let (panel, kept) = super::buf::sized(scratch, need).split_at_mut(N * KC);
        let step = tile_rows::<S>();
        let mut k0 = 0;
        loop {
            let kc = (self.k - k0).min(KC);
            let last = k0 + kc == self.k;
            let mut pw = [std::ptr::null::<u8>(); N];
            for j in 0..N {
                let row = &mut panel[j * KC..j * KC + kc];
                // SAFETY: the stored row holds k0 + kc elements.
                unsafe { d.run(s, w[j], k0, row) };
                pw[j] = row.as_ptr().cast();
            }
            let mut r = rows.start;
            while r < rows.end {
                let part = r..(r + step).min(rows.end);
                let x = self.x_rows(&part, k0);
                let at = (r - rows.start) * N * S::LANES;
                let mut acc = [[s.zero(); N]; M_MAX];
                if k0 > 0 {
                    load_acc(s, &kept[at..], part.len(), &mut acc);
                }
                // SAFETY: panel rows and x rows hold kc elements from here on.
                unsafe { tiles(s, F32Row, part.len(), &x, &pw, kc, &mut acc) };
                if last {
                    self.write(s, part.clone(), &acc);
                } else {
                    store_acc(s, &mut kept[at..], part.len(), &acc);
                }
                r = part.end;
            }
            k0 += kc;
            if last {
                return;
            }
        }
    }

    /// Pointers to the rows' elements from `k0` on; unused places repeat the first.
    #[inline(always)]
    fn x_rows(&self, rows: &Range<usize>, k0: usize) -> [*const f32; M_MAX] {
        let mut x = [std::ptr::null(); M_MAX];
        for (i, x) in x.iter_mut().enumerate() {
            let row = if i < rows.len() { rows.start + i } else { rows.start };
            *x = self.x.row(row, self.k)[k0..].as_ptr();
        }
        x
    }

    #[inline(always)]
    fn write<S: Simd>(&self, s: S, rows: Range<usize>, acc: &Acc<S::V>) {
        for (i, r) in rows.enumerate() {
            let start = r * self.dest.stride + self.dest.col;
            // SAFETY: the destination belongs to this product alone.
            let out = unsafe { self.dest.out.range(start..start + self.n) };
            for (o, a) in out.iter_mut().zip(acc[i]) {
                *o = s.sum(a);
            }
        }
    }
}

#[inline(always)]
fn load_acc<S: Simd>(s: S, kept: &[f32], m: usize, acc: &mut Acc<S::V>) {
    for (i, a) in acc.iter_mut().take(m).enumerate() {
        for (j, a) in a.iter_mut().enumerate() {
            *a = s.ld(&kept[(i * N + j) * S::LANES..]);
        }
    }
}

#[inline(always)]
fn store_acc<S: Simd>(s: S, kept: &mut [f32], m: usize, acc: &Acc<S::V>) {
    for (i, a) in acc.iter().take(m).enumerate() {
        for (j, a) in a.iter().enumerate() {
            s.st(&mut kept[(i * N + j) * S::LANES..], *a);
        }
    }
}

/// Picks the tile for `m` rows.
///
/// # Safety
/// As [`tile`].
#[inline(always)]
unsafe fn tiles<S: Simd, D: Decoder>(s: S, d: D, m: usize, x: &[*const f32; M_MAX], w: &[*const u8; N], k: usize, acc: &mut Acc<S::V>) {
    // SAFETY: the caller's promise.
    unsafe {
        match m {
            1 => tile::<S, D, 1>(s, d, x, w, k, acc),
            2 => tile::<S, D, 2>(s, d, x, w, k, acc),
            3 => tile::<S, D, 3>(s, d, x, w, k, acc),
            4 if S::WIDE => tile::<S, D, 4>(s, d, x, w, k, acc),
            5 if S::WIDE => tile::<S, D, 5>(s, d, x, w, k, acc),
            6 if S::WIDE => tile::<S, D, 6>(s, d, x, w, k, acc),
            _ => unreachable!("a tile of {m} rows"),
        }
    }
}

/// `acc[i][j] += x[i]·w[j]` over `k` elements, for M rows and N weight rows.
///
/// # Safety
/// `x[..M]` and `w` point to rows of at least `k` elements.
#[inline(always)]
unsafe fn tile<S: Simd, D: Decoder, const M: usize>(
    s: S,
    d: D,
    x: &[*const f32; M_MAX],
    w: &[*const u8; N],
    k: usize,
    acc: &mut Acc<S::V>,
) {
    let mut a = [[s.zero(); N]; M];
    for i in 0..M {
        a[i] = acc[i];
    }
    let mut at = 0;
    // SAFETY: loads stay below k (the caller's promise).
    unsafe {
        while at + S::LANES <= k {
            let mut xv = [s.zero(); M];
            for i in 0..M {
                xv[i] = s.load(x[i].add(at));
            }
            for j in 0..N {
                let wv = d.lanes(s, w[j], at);
                for i in 0..M {
                    a[i][j] = s.mul_add(xv[i], wv, a[i][j]);
                }
            }
            at += S::LANES;
        }
        if at < k {
            let mut wv = [s.zero(); N];
            for j in 0..N {
                wv[j] = d.tail(s, w[j], at, k - at);
            }
            for i in 0..M {
                let xv = s.ld(std::slice::from_raw_parts(x[i].add(at), k - at));
                for j in 0..N {
                    a[i][j] = s.mul_add(xv, wv[j], a[i][j]);
                }
            }
        }
    }
    for i in 0..M {
        acc[i] = a[i];
    }
}
