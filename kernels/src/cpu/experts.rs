//! A shard's experts: rows are grouped by expert, and each expert's matrices are read once for all its rows.
//!
//! Phase 1, items (expert, block of the hidden width): gate, up, activation. Phase 2, items (block of outputs): every expert's down rows
//! in ascending expert id, added to each row in that order; so a row's sum is the same alone and in a batch.

use super::{
    Engine,
    buf::{CpuBank, Scratch, sized, tile_rows},
    disjoint::Disjoint,
    gemm::{Dest, Product, Rows},
    isa::Kernel,
    linear::{Glu, Piece, inputs},
    rows,
    simd::Simd,
};
use crate::Precision;

/// Adds weighted expert outputs `[m, n]` to their rows.
struct Combine<'a> {
    y: &'a [f32],
    n: usize,
    /// Row of each of the `m`.
    rows: &'a [u32],
    /// Place of each in the weights.
    slots: &'a [u32],
    weights: &'a [f32],
    dest: Dest<'a>,
}

impl Kernel for Combine<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        for ((y, &r), &slot) in self.y.chunks_exact(self.n).zip(self.rows).zip(self.slots) {
            let at = r as usize * self.dest.stride + self.dest.col;
            // SAFETY: these columns of all rows are this item's.
            let out = unsafe { self.dest.out.range(at..at + self.n) };
            rows::axpy(s, self.weights[slot as usize], y, out);
        }
    }
}

/// Sorts (row, slot) pairs by expert. `starts[i]..starts[i+1]` are expert i's; the answer is how many pairs the bank holds.
/// `order` gets the rows, then the slots, then the experts that have any, then their number.
fn group(ids: &[i32], k: usize, bank: &CpuBank, starts: &mut Vec<u32>, order: &mut Vec<u32>) -> (usize, usize) {
    let e = bank.experts.len();
    let local = |id: i32| {
        let at = i64::from(id) - i64::from(bank.first);
        (0..e as i64).contains(&at).then_some(at as usize)
    };
    let starts = sized(starts, e + 1);
    starts.fill(0);
    for at in ids.iter().filter_map(|&id| local(id)) {
        starts[at + 1] += 1;
    }
    for i in 0..e {
        starts[i + 1] += starts[i];
    }
    let total = starts[e] as usize;
    let order = sized(order, 2 * total + e);
    let (rows, rest) = order.split_at_mut(total);
    let (slots, active) = rest.split_at_mut(total);
    // Places pairs at the running start, which leaves each start at its end: shifted back below.
    for (slot, at) in ids.iter().enumerate().filter_map(|(slot, &id)| Some((slot, local(id)?))) {
        let place = starts[at] as usize;
        (rows[place], slots[place]) = ((slot / k) as u32, slot as u32);
        starts[at] += 1;
    }
    starts.copy_within(0..e, 1);
    starts[0] = 0;
    let mut count = 0;
    for i in 0..e {
        if starts[i] != starts[i + 1] {
            active[count] = i as u32;
            count += 1;
        }
    }
    (total, count)
}

/// Runs the bank's share of `n` rows; `out` `[n, hidden]` is overwritten.
pub(super) fn experts(
    e: &Engine,
    scratch: &mut Scratch,
    n: usize,
    x: &[f32],
    k: usize,
    ids: &[i32],
    weights: &[f32],
    bank: &CpuBank,
    limit: Option<f32>,
    out: &mut [f32],
) {
    let (d, inter) = (bank.hidden, bank.inter);
    let (total, active) = group(ids, k, bank, &mut scratch.starts, &mut scratch.order);
    if total == 0 {
        out.fill(0.0);
        return;
    }
    let (rows, rest) = scratch.order.split_at(total);
    let (slots, rest) = rest.split_at(total);
    let active = &rest[..active];
    let starts = &scratch.starts;
    let span = |i: u32| starts[i as usize] as usize..starts[i as usize + 1] as usize;
    let x = inputs(e, &mut scratch.rounded, n, d, Rows::dense(x, d));
    let hidden = scratch.hidden.sized(total * inter);

    let step = bank.experts.first().map_or(4, |b| tile_rows(&b.gate));
    let blocks = inter.div_ceil(step);
    {
        let all = Disjoint::new(hidden);
        e.pool.run(active.len() * blocks, total * d * 2 * inter, |worker, item| {
            let (i, col) = (active[item / blocks], item % blocks * step);
            let (expert, span) = (&bank.experts[i as usize], span(i));
            let local = &mut *e.locals.of(worker);
            e.isa.run(Glu {
                x: Rows { index: Some(&rows[span.clone()]), ..x },
                rows: 0..span.len(),
                gate: Piece::One(&expert.gate, col),
                up: Piece::One(&expert.up, col),
                n: step.min(inter - col),
                limit,
                round: e.precision == Precision::Bf16,
                dest: Dest { out: all, stride: inter, col: span.start * inter + col },
                panel: &mut local.a,
                pair: &mut local.b,
            });
        });
    }
    let hidden = &*hidden;

    let step = bank.experts.first().map_or(4, |b| tile_rows(&b.down)).min(d.div_ceil(4 * e.pool.threads()).next_multiple_of(4));
    let all = Disjoint::new(out);
    e.pool.run(d.div_ceil(step), total * inter * d, |worker, item| {
        let col = item * step;
        let m = step.min(d - col);
        for r in 0..n {
            // SAFETY: these columns of all rows are this item's.
            unsafe { all.range(r * d + col..r * d + col + m) }.fill(0.0);
        }
        let local = &mut *e.locals.of(worker);
        for &i in active {
            let span = span(i);
            let y = local.b.sized(span.len() * m);
            e.isa.run(Product {
                x: Rows { data: hidden, stride: inter, col0: span.start * inter, index: None },
                rows: 0..span.len(),
                w: &bank.experts[i as usize].down,
                w_row0: col,
                n: m,
                dest: Dest { out: Disjoint::new(y), stride: m, col: 0 },
                scratch: &mut local.a,
            });
            e.isa.run(Combine {
                y,
                n: m,
                rows: &rows[span.clone()],
                slots: &slots[span],
                weights,
                dest: Dest { out: all, stride: d, col },
            });
        }
    });
}
