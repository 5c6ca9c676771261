//! A step's rows as one micro-batch or as two: of two, one's experts are computed beside the other's attention.
//!
//! Neighbours: `step.rs` takes the micro-batches of a step in turn; `buffers.rs` is what each of them writes; `hop/` keeps what is away of each.
//!
//! A step of many rows is cut where its rows are halved, inside of a sequence too: the backend says where that changes no bit. Buffers of two
//! halves take little more memory than those of one whole.

use std::ops::Range;

use tandem_kernels::{Backend, BackendError, BatchDesc, CUT_ROWS, KdaParams, Segment};

use crate::{
    buffers::{BufferSizes, Buffers},
    dims::Dims,
    layers::Cx,
};

/// Micro-batches of a step at most.
pub const MICRO_BATCHES: usize = 2;

/// Rows of the buffers of each micro-batch, for steps of up to `max_rows` rows of which those of `from` and more are cut (0: none).
pub fn capacities(max_rows: usize, from: usize) -> Vec<usize> {
    if from == 0 || max_rows < from {
        return vec![max_rows];
    }
    let half = (max_rows.div_ceil(MICRO_BATCHES) + CUT_ROWS).min(max_rows);
    // The first also takes the steps that are not cut.
    vec![half.max(from), half]
}

/// Some rows of a step, and what they work on.
struct MicroBatch<B: Backend> {
    buf: Buffers<B>,
    batch: B::Batch,
    rows: Range<usize>,
    context: usize,
}

/// The micro-batches of a runner.
pub struct MicroBatches<B: Backend> {
    all: Vec<MicroBatch<B>>,
    /// Rows of a step that is cut; 0: none.
    from: usize,
    /// How many the step under way has.
    used: usize,
    halves: [BatchDesc; MICRO_BATCHES],
}

impl<B: Backend> MicroBatches<B> {
    /// Buffers of `sizes`, but for their rows; steps of up to `max_rows` rows, of which those of `from` and more are cut (0: none). `segments` and
    /// `pages`: of a step at most.
    ///
    /// # Errors
    /// Out of memory.
    pub fn new(b: &B, d: &Dims, sizes: BufferSizes, from: usize, segments: usize, pages: usize) -> Result<Self, BackendError> {
        let make = |rows: usize| {
            let buf = Buffers::new(b, d, BufferSizes { rows, ..sizes })?;
            Ok(MicroBatch { buf, batch: b.batch(rows, segments, pages)?, rows: 0..0, context: 0 })
        };
        let all = capacities(sizes.rows, from).into_iter().map(make).collect::<Result<_, BackendError>>()?;
        Ok(Self { all, from, used: 0, halves: <[BatchDesc; MICRO_BATCHES]>::default() })
    }

    /// A step begins: cuts it, and puts its description on the device.
    pub fn begin(&mut self, b: &B, d: &Dims, desc: &BatchDesc) {
        let rows = desc.tokens.len();
        let cut = if self.all.len() > 1 && rows >= self.from { cut_row(b, &d.kda, desc) } else { 0 };
        if cut == 0 {
            self.used = 1;
            self.all[0].set(b, desc, 0);
            return;
        }
        self.used = MICRO_BATCHES;
        halve(desc, cut, &mut self.halves);
        for ((part, half), first) in self.all.iter_mut().zip(&self.halves).zip([0, cut]) {
            part.set(b, half, first);
        }
    }

    /// What the layers of micro-batch `i` work on.
    pub fn cx<'a>(&'a mut self, b: &'a B, d: &'a Dims, state: &'a mut B::State, i: usize) -> Cx<'a, B> {
        let part = &mut self.all[i];
        Cx {
            b,
            d,
            batch: &part.batch,
            state,
            buf: &mut part.buf,
            micro: i,
            first: part.rows.start,
            rows: part.rows.len(),
            context: part.context,
        }
    }

    /// How many the step has.
    pub fn used(&self) -> usize {
        self.used
    }

    /// Rows of the step in micro-batch `i`.
    pub fn rows(&self, i: usize) -> Range<usize> {
        self.all[i].rows.clone()
    }
}

impl<B: Backend> MicroBatch<B> {
    fn set(&mut self, b: &B, desc: &BatchDesc, first: usize) {
        b.set_batch(desc, &mut self.batch);
        self.rows = first..first + desc.tokens.len();
        self.context = desc.segments.iter().map(|s| (s.pos0 + s.rows) as usize).max().unwrap_or(0);
    }
}

/// The row at which a step's second half begins; 0 where it cannot be cut.
fn cut_row<B: Backend>(b: &B, p: &KdaParams, desc: &BatchDesc) -> usize {
    let half = desc.tokens.len() / MICRO_BATCHES;
    let over = desc.segments.iter().find(|s| (s.row0 + s.rows) as usize > half);
    over.map_or(0, |s| s.row0 as usize + b.cut(p, s.rows as usize, half - s.row0 as usize))
}

/// Describes the rows before `cut` and those from it on. Pages stay in both as they are.
fn halve(desc: &BatchDesc, cut: usize, halves: &mut [BatchDesc; MICRO_BATCHES]) {
    for half in &mut *halves {
        half.segments.clear();
        half.tokens.clear();
        half.pages.clone_from(&desc.pages);
    }
    let [head, tail] = halves;
    head.tokens.extend_from_slice(&desc.tokens[..cut]);
    tail.tokens.extend_from_slice(&desc.tokens[cut..]);
    let cut = cut as u32;
    for s in &desc.segments {
        let before = cut.saturating_sub(s.row0).min(s.rows);
        if before > 0 {
            head.segments.push(Segment { rows: before, ..s.clone() });
        }
        if before < s.rows {
            let (row0, pos0) = ((s.row0 + before) - cut, s.pos0 + before);
            tail.segments.push(Segment { row0, pos0, rows: s.rows - before, ..s.clone() });
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn halves_are_the_whole(sizes in proptest::collection::vec((1u32..200, 0u32..500), 1..9), at in 0.0f64..1.0) {
            let mut desc = BatchDesc::default();
            for (slot, (rows, pos0)) in sizes.iter().enumerate() {
                let (row0, page0) = (desc.tokens.len() as u32, desc.pages.len() as u32);
                desc.tokens.extend(row0..row0 + rows);
                desc.pages.extend(page0..page0 + 3);
                desc.segments.push(Segment { slot: slot as u32, row0, rows: *rows, pos0: *pos0, pages: page0..page0 + 3 });
            }
            let cut = (at * desc.tokens.len() as f64) as usize;
            let mut halves = <[BatchDesc; MICRO_BATCHES]>::default();
            halve(&desc, cut, &mut halves);
            let tokens: Vec<u32> = halves.iter().flat_map(|h| h.tokens.clone()).collect();
            prop_assert_eq!(tokens, desc.tokens.clone());
            // Each row has the slot, the position and the pages that it had.
            let rows = |d: &BatchDesc| -> Vec<(u32, u32, Vec<u32>)> {
                let mut next = 0;
                d.segments.iter().flat_map(|s| {
                    assert_eq!((s.row0, s.rows > 0), (next, true));
                    next += s.rows;
                    let pages = d.pages[s.pages.start as usize..s.pages.end as usize].to_vec();
                    (0..s.rows).map(|i| (s.slot, s.pos0 + i, pages.clone())).collect::<Vec<_>>()
                }).collect()
            };
            prop_assert_eq!(halves.iter().flat_map(rows).collect::<Vec<_>>(), rows(&desc));
        }

        #[test]
        fn every_step_fits(max_rows in 1usize..5000, from in 0usize..5000, rows in 1usize..5000, slack in 0usize..CUT_ROWS) {
            let (rows, capacities) = (rows.min(max_rows), capacities(max_rows, from));
            let cut = if capacities.len() > 1 && rows >= from { (rows / MICRO_BATCHES).saturating_sub(slack) } else { 0 };
            let (first, second) = if cut == 0 { (rows, 0) } else { (cut, rows - cut) };
            prop_assert!(first <= capacities[0]);
            prop_assert!(second <= capacities[capacities.len() - 1]);
        }
    }
}
