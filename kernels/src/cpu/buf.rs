//! What the CPU backend's opaque handles hold: buffers, weights, expert banks, a step's description, and scratch.

use parking_lot::Mutex;
use tandem_quant::MatrixSource;

use super::aligned::Aligned;

use crate::{BatchDesc, ExpertSource, Segment};

/// Memory of a plain buffer: f32 values or ids.
#[derive(Debug)]
pub struct CpuBuf(Values);

#[derive(Debug)]
enum Values {
    F32(Aligned),
    I32(Vec<i32>),
}

impl CpuBuf {
    /// f32 values.
    pub(super) fn of_f32(values: Aligned) -> Self {
        Self(Values::F32(values))
    }

    /// Ids.
    pub(super) fn of_i32(values: Vec<i32>) -> Self {
        Self(Values::I32(values))
    }

    /// Zeros everywhere.
    pub(super) fn clear(&mut self) {
        match &mut self.0 {
            Values::F32(v) => v.fill(0.0),
            Values::I32(v) => v.fill(0),
        }
    }

    /// The first `len` values.
    pub(super) fn f32s(&self, len: usize) -> Result<&[f32], String> {
        match &self.0 {
            Values::F32(v) => v.get(..len).ok_or_else(|| short(v.len(), len)),
            Values::I32(_) => Err("a buffer of ids where f32 values are needed".into()),
        }
    }

    /// The first `len` values.
    pub(super) fn f32s_mut(&mut self, len: usize) -> Result<&mut [f32], String> {
        match &mut self.0 {
            Values::F32(v) => {
                let have = v.len();
                v.get_mut(..len).ok_or_else(|| short(have, len))
            }
            Values::I32(_) => Err("a buffer of ids where f32 values are needed".into()),
        }
    }

    /// The first `len` ids.
    pub(super) fn i32s(&self, len: usize) -> Result<&[i32], String> {
        match &self.0 {
            Values::I32(v) => v.get(..len).ok_or_else(|| short(v.len(), len)),
            Values::F32(_) => Err("a buffer of f32 values where ids are needed".into()),
        }
    }

    /// The first `len` ids.
    pub(super) fn i32s_mut(&mut self, len: usize) -> Result<&mut [i32], String> {
        match &mut self.0 {
            Values::I32(v) => {
                let have = v.len();
                v.get_mut(..len).ok_or_else(|| short(have, len))
            }
            Values::F32(_) => Err("a buffer of f32 values where ids are needed".into()),
        }
    }
}

fn short(have: usize, need: usize) -> String {
    format!("a buffer of {have} elements where {need} are needed")
}

/// A matrix `[out, cols]` in its stored type: parts stacked along `out`, none of them copied.
#[derive(Debug)]
pub struct CpuWeight {
    /// Each part with its first output.
    pub(super) parts: Vec<(usize, MatrixSource)>,
    pub(super) out: usize,
    pub(super) cols: usize,
    pub(super) tiles: Vec<Tile>,
}

/// Consecutive rows of one part: a unit of work, never across parts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tile {
    pub(super) part: usize,
    /// First row in the part.
    pub(super) row0: usize,
    pub(super) rows: usize,
    /// First output in the whole matrix.
    pub(super) out0: usize,
}

impl CpuWeight {
    /// Stacks parts that have equal `cols`.
    pub(super) fn new(parts: &[MatrixSource]) -> Result<Self, String> {
        let cols = parts.first().ok_or("no parts")?.cols();
        let mut out = 0;
        let mut tiles = Vec::new();
        let mut stacked = Vec::with_capacity(parts.len());
        for (i, m) in parts.iter().enumerate() {
            if m.cols() != cols {
                return Err(format!("{} columns, but {} has {cols}: stacked parts need equal columns", m.cols(), parts[0].name()));
            }
            let step = tile_rows(m);
            for row0 in (0..m.rows()).step_by(step) {
                tiles.push(Tile { part: i, row0, rows: step.min(m.rows() - row0), out0: out + row0 });
            }
            stacked.push((out, m.clone()));
            out += m.rows();
        }
        Ok(Self { parts: stacked, out, cols, tiles })
    }

    /// Rows `[row, row + len)` as pieces of single parts: calls `piece(part, first row in the part, rows, offset from row)`.
    #[inline(always)]
    pub(super) fn pieces(&self, row: usize, len: usize, mut piece: impl FnMut(&MatrixSource, usize, usize, usize)) {
        for (out0, m) in &self.parts {
            let (a, b) = (row.max(*out0), (row + len).min(out0 + m.rows()));
            if a < b {
                piece(m, a - out0, b - a, a - row);
            }
        }
    }
}

/// Rows per unit of work: about 128 KiB of stored weights, a multiple of 4.
pub(super) fn tile_rows(m: &MatrixSource) -> usize {
    let row_bytes = (m.payload_bytes() / m.rows().max(1)).max(1);
    ((128 << 10) / row_bytes / 4 * 4).clamp(4, 64)
}

/// The experts of one layer of one shard.
#[derive(Debug)]
pub struct CpuBank {
    pub(super) first: u32,
    pub(super) experts: Vec<ExpertSource>,
    /// Width of the shard's slice of the intermediate dimension.
    pub(super) inter: usize,
    pub(super) hidden: usize,
}

/// A step's description.
#[derive(Debug, Default)]
pub struct CpuBatch {
    pub(super) desc: BatchDesc,
    /// Slots in order, to see that no two segments share one.
    pub(super) slots: Vec<u32>,
}

impl CpuBatch {
    /// Takes over a step's description.
    pub(super) fn set(&mut self, desc: &BatchDesc) -> Result<(), String> {
        self.desc.tokens.clone_from(&desc.tokens);
        self.desc.segments.clone_from(&desc.segments);
        self.desc.pages.clone_from(&desc.pages);
        self.desc.validate(&mut self.slots)
    }

    /// The page that holds position `pos` of a segment's sequence, and the token inside it.
    pub(super) fn place(&self, seg: &Segment, pos: usize, page_tokens: usize) -> Result<(usize, usize), String> {
        let pages = self.desc.pages.get(seg.pages.start as usize..seg.pages.end as usize).unwrap_or_default();
        match pages.get(pos / page_tokens) {
            Some(&page) => Ok((page as usize, pos % page_tokens)),
            None => Err(format!("position {pos} of slot {} lies past its {} pages of {page_tokens} tokens", seg.slot, pages.len())),
        }
    }

    /// The segment that row `r` belongs to.
    pub(super) fn segment_of(&self, r: usize) -> Option<&Segment> {
        let at = self.desc.segments.partition_point(|s| s.row0 as usize <= r);
        at.checked_sub(1).map(|i| &self.desc.segments[i])
    }
}

/// Memory that ops use between their phases. One op holds it at a time.
#[derive(Default)]
pub(super) struct Scratch {
    /// Rows rounded to bf16 on their way into a product.
    pub(super) rounded: Aligned,
    /// Wide intermediates: mHC projections, router logits, folded queries, index scores.
    pub(super) wide: Aligned,
    /// Hidden rows of the experts.
    pub(super) hidden: Aligned,
    /// Row numbers and offsets of the expert grouping.
    pub(super) order: Vec<u32>,
    pub(super) starts: Vec<u32>,
}

/// One thread's own scratch.
#[derive(Default)]
pub(super) struct Local {
    pub(super) a: Aligned,
    pub(super) b: Aligned,
    pub(super) keys: Vec<u32>,
}

/// Scratch of every thread of the pool.
pub(super) struct Locals(Vec<Mutex<Local>>);

impl Locals {
    pub(super) fn new(threads: usize) -> Self {
        Self((0..threads).map(|_| Mutex::default()).collect())
    }

    /// The scratch of `worker`; never contended, because a worker number belongs to one thread at a time.
    #[inline]
    pub(super) fn of(&self, worker: usize) -> parking_lot::MutexGuard<'_, Local> {
        self.0[worker].lock()
    }

    /// Everybody's, to size it ahead.
    pub(super) fn each(&self, mut f: impl FnMut(&mut Local)) {
        self.0.iter().for_each(|l| f(&mut l.lock()));
    }
}

/// `v[..len]`, grown where it is too short (only ops that were not reserved for do that).
#[inline]
pub(super) fn sized<T: Copy + Default>(v: &mut Vec<T>, len: usize) -> &mut [T] {
    if v.len() < len {
        v.resize(len, T::default());
    }
    &mut v[..len]
}
