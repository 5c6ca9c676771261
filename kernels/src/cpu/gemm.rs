//! Products of activation rows with stored weights, `out[r, o] = x[r]·w[o]`, for one row as for thousands.
//!
//! Every variant sums in one order: lane `l` of a single accumulator per (row, output) takes elements l, l+LANES, l+2·LANES … in
//! turn, then the lanes are added in the fixed order of [`Simd::sum`]. So N rows equal N single rows bit for bit, and neither the
//! tile shape, nor the blocking, nor the threads (which split outputs and rows, never the sum) can be seen in a result.
//!
//! Few rows read stored floats straight into registers; more rows, and every quantised type, decode a panel of 8 weight rows once into L1
//! and run all rows over it, while the next panel is fetched. Neighbours: `decode.rs` (stored types), `linear.rs` (whole matrices over the pool), `nn.rs` (activations by activations).

#![allow(clippy::needless_range_loop, reason = "register tiles index several arrays by one constant range")]

use std::{mem::MaybeUninit, ops::Range};

use tandem_quant::MatrixSource;

use super::{
    aligned::Aligned,
    decode::{Coded, Decoder, F32Row, Lanes, with_lanes},
    disjoint::Disjoint,
    isa::Kernel,
    simd::Simd,
};

/// Weight rows per register tile.
const N: usize = 4;
/// Weight rows per panel: a tile of activation rows is read from L2 once for all of them.
const GROUP: usize = 8;
/// Elements of a panel row: 8 × 512 f32 = 16 KiB of L1. A multiple of every LANES.
const KC: usize = 512;
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
    pub(super) scratch: &'a mut Aligned,
}

impl Kernel for Product<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        with_lanes!(self.w, d => product(s, d, self), else panels(s, Coded(self.w), self));
    }
}

/// Most rows of a tile over 4 weight rows: 12 of 16 registers, or 24 of 32, are sums.
const fn tile4<S: Simd>() -> usize {
    if S::WIDE { 6 } else { 3 }
}

/// Rows per tile where `m` rows are cut into tiles of at most `most`, as evenly as can be: one row alone would wait for its own sums.
#[inline(always)]
fn even(m: usize, most: usize) -> usize {
    m.div_ceil(m.div_ceil(most))
}

/// A product over stored floats: few rows read them directly.
#[inline(always)]
fn product<S: Simd, D: Lanes>(s: S, d: D, p: Product<'_>) {
    if p.rows.len() > tile4::<S>() {
        return panels(s, d, p);
    }
    if p.n == 0 || p.rows.is_empty() {
        return;
    }
    let row = p.stored_rows(d);
    for n0 in (0..p.n).step_by(N) {
        // SAFETY: each row holds k elements (`stored_rows`).
        unsafe { p.strip(n0, N).direct(s, d, p.rows.clone(), [row(n0), row(n0 + 1), row(n0 + 2), row(n0 + 3)]) };
    }
}

/// A product over panels of decoded weights.
#[inline(always)]
fn panels<S: Simd, D: Decoder>(s: S, d: D, p: Product<'_>) {
    if p.n == 0 || p.rows.is_empty() {
        return;
    }
    let row = p.stored_rows(d);
    for n0 in (0..p.n).step_by(GROUP) {
        let mut w = StoredRows { at: [std::ptr::null(); GROUP], index: [0; GROUP] };
        let mut next = [std::ptr::null(); GROUP];
        for j in 0..GROUP {
            w.at[j] = row(n0 + j);
            w.index[j] = p.w_row0 + (n0 + j).min(p.n - 1);
            next[j] = row(n0 + GROUP + j);
        }
        for r in p.rows.clone().step_by(ROW_BLOCK) {
            // SAFETY: each row holds k elements (`stored_rows`).
            unsafe { p.strip(n0, GROUP).panel(s, d, r..(r + ROW_BLOCK).min(p.rows.end), &w, &next, &mut *p.scratch) };
        }
    }
}

impl<'a> Product<'a> {
    /// Pointers to the weight rows, after a check that all of them hold `cols` elements. Missing rows repeat the last one; what they give
    /// is dropped.
    #[inline(always)]
    fn stored_rows<D: Decoder>(&self, d: D) -> impl Fn(usize) -> *const u8 + use<'a, D> {
        let (w, w_row0, n, stride) = (self.w, self.w_row0, self.n, self.w.row_stride());
        assert!(w_row0 + n <= w.rows(), "rows of {}", w.name());
        let bytes: &'a [u8] = w.data();
        assert!(bytes.len() >= (w_row0 + n - 1) * stride + d.byte_of(w.cols()), "bytes of {}", w.name());
        move |j: usize| bytes[(w_row0 + j.min(n - 1)) * stride..].as_ptr()
    }

    /// Outputs `n0..n0 + most` at most.
    #[inline(always)]
    fn strip(&self, n0: usize, most: usize) -> Strip<'a> {
        Strip { x: self.x, k: self.w.cols(), n: (self.n - n0).min(most), dest: Dest { col: self.dest.col + n0, ..self.dest } }
    }
}

/// The weight rows of a panel: where their bytes start, and their numbers in the matrix.
struct StoredRows {
    at: [*const u8; GROUP],
    index: [usize; GROUP],
}

/// `dest[r, j] = x[r]·w[j]` for `m` rows of x and `n` rows of f32 activations `w`, both `k` long: scores, not weights.
#[inline(always)]
pub(super) fn dots<S: Simd>(s: S, x: Rows<'_>, m: usize, w: &[f32], n: usize, k: usize, dest: Dest<'_>) {
    if m == 0 || n == 0 {
        return;
    }
    assert!(w.len() >= n * k, "w is too short");
    let step = even(m, tile4::<S>());
    let row = |j: usize| w[j.min(n - 1) * k..].as_ptr().cast::<u8>();
    for n0 in (0..n).step_by(N) {
        let strip = Strip { x, k, n: (n - n0).min(N), dest: Dest { col: dest.col + n0, ..dest } };
        for r in (0..m).step_by(step) {
            // SAFETY: each row of w holds k elements (asserted above).
            unsafe { strip.direct(s, F32Row, r..(r + step).min(m), [row(n0), row(n0 + 1), row(n0 + 2), row(n0 + 3)]) };
        }
    }
}

/// Up to [`GROUP`] outputs of a product.
#[derive(Clone, Copy)]
struct Strip<'a> {
    x: Rows<'a>,
    k: usize,
    n: usize,
    dest: Dest<'a>,
}

/// f32 values of the sums of the largest tile.
const SUMS: usize = M_MAX * N * 16;

impl Strip<'_> {
    /// One tile of rows over the stored bytes of four weight rows.
    ///
    /// # Safety
    /// Each `w` points to a row of `k` elements.
    #[inline(always)]
    unsafe fn direct<S: Simd, D: Lanes>(self, s: S, d: D, rows: Range<usize>, w: [*const u8; N]) {
        let x = self.x_rows(&rows, 0);
        let mut sums = MaybeUninit::<[f32; SUMS]>::uninit();
        let sums: *mut f32 = sums.as_mut_ptr().cast();
        // SAFETY: x rows are `k` long (x_rows checks), w by the caller's promise; the tile writes the sums that `write` reads.
        unsafe {
            tiles(s, d, &TileArgs { m: rows.len(), x: &x, w, k: self.k, sums, fresh: true });
            self.write(s, rows, sums);
        }
    }

    /// A block of rows over panels of decoded weights. `next` are the weight rows after these, for prefetching.
    ///
    /// # Safety
    /// Each of `w` and `next` points to a row of `k` elements.
    #[inline(always)]
    unsafe fn panel<S: Simd, D: Decoder>(
        self,
        s: S,
        d: D,
        rows: Range<usize>,
        w: &StoredRows,
        next: &[*const u8; GROUP],
        scratch: &mut Aligned,
    ) {
        let need = GROUP * KC + (ROW_BLOCK + M_MAX) * GROUP * S::LANES;
        let (panel, kept) = scratch.sized(need).split_at_mut(GROUP * KC);
        let used = self.n.next_multiple_of(N);
        let step = even(rows.len(), tile4::<S>());
        let count = rows.len().div_ceil(step);
        let mut k0 = 0;
        loop {
            let kc = (self.k - k0).min(KC);
            let end = k0 + kc;
            for j in 0..used {
                // SAFETY: the stored row holds `end` elements.
                unsafe { d.run(s, w.at[j], w.index[j], k0, &mut panel[j * KC..j * KC + kc]) };
            }
            // While the tiles run, the lines of the next panel come in, some with each tile.
            let ahead =
                if end == self.k { Ahead::new(d, next, 0..self.k.min(KC)) } else { Ahead::new(d, &w.at, end..(end + KC).min(self.k)) };
            for (t, r) in rows.clone().step_by(step).enumerate() {
                ahead.fetch(s, t, count);
                let part = r..(r + step).min(rows.end);
                let x = self.x_rows(&part, k0);
                for n0 in (0..used).step_by(N) {
                    let at = (t * step * GROUP + n0 * step) * S::LANES;
                    let mut pw = [std::ptr::null::<u8>(); N];
                    for (j, pw) in pw.iter_mut().enumerate() {
                        *pw = panel[(n0 + j) * KC..].as_ptr().cast();
                    }
                    let sums = kept[at..at + part.len() * N * S::LANES].as_mut_ptr();
                    // SAFETY: panel rows and x rows hold kc elements from here on; the sums of this tile lie at `at`.
                    unsafe {
                        tiles(s, F32Row, &TileArgs { m: part.len(), x: &x, w: pw, k: kc, sums, fresh: k0 == 0 });
                        if end == self.k {
                            let strip = Strip { n: (self.n - n0).min(N), dest: Dest { col: self.dest.col + n0, ..self.dest }, ..self };
                            strip.write(s, part.clone(), sums);
                        }
                    }
                }
            }
            k0 = end;
            if k0 == self.k {
                return;
            }
        }
    }

    /// Pointers to the rows' elements from `k0` on; unused places repeat the first.
    #[inline(always)]
    fn x_rows(&self, rows: &Range<usize>, k0: usize) -> [*const f32; M_MAX] {
        let mut x = [std::ptr::null(); M_MAX];
        for (i, x) in x.iter_mut().enumerate().take(rows.len()) {
            *x = self.x.row(rows.start + i, self.k)[k0..].as_ptr();
        }
        x
    }

    /// Adds up the lanes of a tile's sums, and writes them.
    ///
    /// # Safety
    /// `sums` holds `[rows][N]` vectors.
    #[inline(always)]
    unsafe fn write<S: Simd>(&self, s: S, rows: Range<usize>, sums: *const f32) {
        for (i, r) in rows.enumerate() {
            let start = r * self.dest.stride + self.dest.col;
            // SAFETY: the destination belongs to this product alone; the sums by the caller's promise.
            unsafe {
                let out = self.dest.out.range(start..start + self.n);
                for (j, o) in out.iter_mut().enumerate() {
                    *o = s.sum(s.load(sums.add((i * N + j) * S::LANES)));
                }
            }
        }
    }
}

/// Bytes of a cache line.
const LINE: usize = 64;

/// Stored bytes that are needed soon: a range of each of some rows.
struct Ahead<'a> {
    rows: &'a [*const u8; GROUP],
    bytes: Range<usize>,
}

impl<'a> Ahead<'a> {
    #[inline(always)]
    fn new<D: Decoder>(d: D, rows: &'a [*const u8; GROUP], elems: Range<usize>) -> Self {
        Self { rows, bytes: d.byte_of(elems.start)..d.byte_of(elems.end) }
    }

    /// Fetches part `t` of `parts`.
    #[inline(always)]
    fn fetch<S: Simd>(&self, s: S, t: usize, parts: usize) {
        let share = self.bytes.len().div_ceil(parts * LINE) * LINE;
        let from = self.bytes.start + t * share;
        for row in self.rows {
            for at in (from..self.bytes.end.min(from + share)).step_by(LINE) {
                s.prefetch(row.wrapping_add(at));
            }
        }
    }
}

/// A tile's rows, and where its sums are kept between panels: `[m][N]` vectors.
struct TileArgs<'a> {
    m: usize,
    x: &'a [*const f32; M_MAX],
    w: [*const u8; N],
    k: usize,
    sums: *mut f32,
    /// Begin at zero rather than at the sums.
    fresh: bool,
}

/// Picks the tile for `m` rows.
///
/// # Safety
/// `x[..m]` and `w` point to rows of at least `k` elements; `sums` has room for `[m][N]` vectors and holds them unless `fresh`.
#[inline(always)]
unsafe fn tiles<S: Simd, D: Lanes>(s: S, d: D, t: &TileArgs<'_>) {
    match t.m {
        1 => s.call(Tile::<D, 1>(d, t)),
        2 => s.call(Tile::<D, 2>(d, t)),
        3 => s.call(Tile::<D, 3>(d, t)),
        4 if S::WIDE => s.call(Tile::<D, 4>(d, t)),
        5 if S::WIDE => s.call(Tile::<D, 5>(d, t)),
        6 if S::WIDE => s.call(Tile::<D, 6>(d, t)),
        m => unreachable!("a tile of {m} rows"),
    }
}

/// `sums[i][j] += x[i]·w[j]` for M rows: a function of its own, compiled once for each row count, stored type and instruction set. Made
/// by [`tiles`] alone, whose caller promises what its pointers need.
struct Tile<'a, D, const M: usize>(D, &'a TileArgs<'a>);

impl<D: Lanes, const M: usize> Kernel for Tile<'_, D, M> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (d, t) = (self.0, self.1);
        let mut a = [[s.zero(); N]; M];
        // SAFETY: loads stay below k, and the sums inside [M][N] (the promise of `tiles`).
        unsafe {
            if !t.fresh {
                for i in 0..M {
                    for j in 0..N {
                        a[i][j] = s.load(t.sums.add((i * N + j) * S::LANES));
                    }
                }
            }
            let mut at = 0;
            while at + S::LANES <= t.k {
                let mut xv = [s.zero(); M];
                for i in 0..M {
                    xv[i] = s.load(t.x[i].add(at));
                }
                for j in 0..N {
                    let wv = d.lanes(s, t.w[j], at);
                    for i in 0..M {
                        a[i][j] = s.mul_add(xv[i], wv, a[i][j]);
                    }
                }
                at += S::LANES;
            }
            if at < t.k {
                let mut wv = [s.zero(); N];
                for j in 0..N {
                    wv[j] = d.tail(s, t.w[j], at, t.k - at);
                }
                for i in 0..M {
                    let xv = s.ld(std::slice::from_raw_parts(t.x[i].add(at), t.k - at));
                    for j in 0..N {
                        a[i][j] = s.mul_add(xv, wv[j], a[i][j]);
                    }
                }
            }
            for i in 0..M {
                for j in 0..N {
                    s.store(t.sums.add((i * N + j) * S::LANES), a[i][j]);
                }
            }
        }
    }
}
