//! Whole matrices over the pool: projections, the gated MLP, and what they share with the router, mHC and the experts.

use tandem_quant::MatrixSource;

use super::{
    Engine,
    aligned::Aligned,
    buf::CpuWeight,
    disjoint::Disjoint,
    gemm::{Dest, Product, ROW_BLOCK, Rows},
    isa::Kernel,
    rows,
    simd::Simd,
};
use crate::Precision;

/// Rounds rows to bf16.
struct Round<'a> {
    x: &'a [f32],
    out: &'a mut [f32],
}

impl Kernel for Round<'_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        rows::round_bf16(s, self.x, self.out);
    }
}

/// `x` as the inputs of a product: rounded into `buf` in bf16 mode, itself in f32 mode.
pub(super) fn inputs<'a>(e: &Engine, buf: &'a mut Aligned, n: usize, k: usize, x: Rows<'a>) -> Rows<'a> {
    if e.precision == Precision::F32 {
        return x;
    }
    let out = buf.sized(n * k);
    {
        let parts = Disjoint::new(out);
        e.pool.run(n, n * k / 4, |_, r| {
            // SAFETY: each row is one item's.
            let out = unsafe { parts.range(r * k..(r + 1) * k) };
            e.isa.run(Round { x: x.row(r, k), out });
        });
    }
    Rows::dense(out, k)
}

/// `out[r, o] = x[r]·w[o]` for rows `0..n`, as given (no rounding); `out` rows are `stride` wide.
pub(super) fn product(e: &Engine, n: usize, x: Rows<'_>, w: &CpuWeight, out: &mut [f32], stride: usize) {
    let dest = Dest { out: Disjoint::new(out), stride, col: 0 };
    let blocks = n.div_ceil(ROW_BLOCK);
    e.pool.run(blocks * w.tiles.len(), n * w.out * w.cols, |worker, item| {
        let (block, tile) = (item / w.tiles.len(), &w.tiles[item % w.tiles.len()]);
        let part: &MatrixSource = &w.parts[tile.part].1;
        let scratch = &mut e.locals.of(worker).a;
        e.isa.run(Product {
            x,
            rows: block * ROW_BLOCK..n.min((block + 1) * ROW_BLOCK),
            w: part,
            w_row0: tile.row0,
            n: tile.rows,
            dest: Dest { col: tile.out0, ..dest },
            scratch,
        });
    });
}

/// Gate and up rows of one block of the hidden width for one block of rows, activated: `hidden[r, col..col + n]`.
pub(super) struct Glu<'a> {
    pub(super) x: Rows<'a>,
    pub(super) rows: std::ops::Range<usize>,
    /// Gate rows and up rows, each `n` long, as pieces.
    pub(super) gate: Piece<'a>,
    pub(super) up: Piece<'a>,
    pub(super) n: usize,
    pub(super) limit: Option<f32>,
    pub(super) round: bool,
    pub(super) dest: Dest<'a>,
    pub(super) panel: &'a mut Aligned,
    pub(super) pair: &'a mut Aligned,
}

/// Rows of a weight from `row0` on.
#[derive(Clone, Copy)]
pub(super) enum Piece<'a> {
    /// Of one matrix.
    One(&'a MatrixSource, usize),
    /// Of stacked parts.
    Stacked(&'a CpuWeight, usize),
}

impl Piece<'_> {
    #[inline(always)]
    fn product<S: Simd>(self, s: S, x: Rows<'_>, rows: std::ops::Range<usize>, n: usize, dest: Dest<'_>, scratch: &mut Aligned) {
        match self {
            Self::One(w, w_row0) => s.call(Product { x, rows, w, w_row0, n, dest, scratch }),
            Self::Stacked(w, row) => {
                for (out0, m) in &w.parts {
                    let (a, b) = (row.max(*out0), (row + n).min(out0 + m.rows()));
                    if a < b {
                        let dest = Dest { col: dest.col + a - row, ..dest };
                        s.call(Product { x, rows: rows.clone(), w: m, w_row0: a - out0, n: b - a, dest, scratch: &mut *scratch });
                    }
                }
            }
        }
    }
}

impl Kernel for Glu<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // Products write at absolute rows, so the pair's scratch is addressed from the first row on.
        let m = self.rows.len();
        let (gate, up) = self.pair.sized(2 * m * self.n).split_at_mut(m * self.n);
        for (piece, out) in [(self.gate, &mut *gate), (self.up, &mut *up)] {
            let first = self.rows.start;
            let x = shifted(self.x, first);
            piece.product(s, x, 0..m, self.n, Dest { out: Disjoint::new(out), stride: self.n, col: 0 }, self.panel);
        }
        for (i, r) in self.rows.enumerate() {
            let g = &mut gate[i * self.n..(i + 1) * self.n];
            rows::swiglu(s, g, &up[i * self.n..(i + 1) * self.n], self.limit, self.round);
            let at = r * self.dest.stride + self.dest.col;
            // SAFETY: the destination belongs to this item alone.
            unsafe { self.dest.out.range(at..at + self.n) }.copy_from_slice(g);
        }
    }
}

/// Rows from `first` on.
#[inline(always)]
fn shifted(x: Rows<'_>, first: usize) -> Rows<'_> {
    match x.index {
        Some(index) => Rows { index: Some(&index[first..]), ..x },
        None => Rows { col0: x.col0 + first * x.stride, ..x },
    }
}

/// The gated MLP. `hidden` is `[n, 2·inter]`, of which the first half of each row is used.
pub(super) fn mlp(
    e: &Engine,
    rounded: &mut Aligned,
    n: usize,
    x: Rows<'_>,
    gate_up: &CpuWeight,
    down: &CpuWeight,
    limit: Option<f32>,
    hidden: &mut [f32],
    out: &mut [f32],
) {
    let (k, inter) = (gate_up.cols, down.cols);
    let x = inputs(e, rounded, n, k, x);
    let step = gate_up.tiles.first().map_or(4, |t| t.rows).min(32);
    let (blocks, cols) = (n.div_ceil(ROW_BLOCK), inter.div_ceil(step));
    let dest = Dest { out: Disjoint::new(hidden), stride: 2 * inter, col: 0 };
    e.pool.run(blocks * cols, n * k * 2 * inter, |worker, item| {
        let (block, col) = (item / cols, item % cols * step);
        let local = &mut *e.locals.of(worker);
        e.isa.run(Glu {
            x,
            rows: block * ROW_BLOCK..n.min((block + 1) * ROW_BLOCK),
            gate: Piece::Stacked(gate_up, col),
            up: Piece::Stacked(gate_up, inter + col),
            n: step.min(inter - col),
            limit,
            round: e.precision == Precision::Bf16,
            dest: Dest { col, ..dest },
            panel: &mut local.a,
            pair: &mut local.b,
        });
    });
    product(e, n, Rows::dense(hidden, 2 * inter), down, out, down.out);
}
