//! Products of up to some rows on the matrix units: blocks and shared memory of the kernels of few.cuh and some.cuh. Neighbours: `ops.rs` decides
//! which products they are, `wide.rs` makes those of many rows.

use super::{
    CudaBackend,
    driver::{Grid, launch},
    loaded::SOME_SHARED,
    memory::{Scratch, Use},
    ops::{Input, Tiling, limit_of},
    pack::Kind,
    weight::Part,
};

/// Where a product's sums go.
#[derive(Clone, Copy, Debug)]
pub(super) enum To {
    /// Rows of f32 at an address, so many elements apart.
    Rows(u64, usize),
    /// Gated, to rows of bf16.
    Hidden {
        /// Address.
        at: u64,
        /// Elements of a row.
        padded: usize,
        /// Their order, as the next weights take them (`Part::x_order`).
        order: usize,
        /// Of the gated activation.
        limit: Option<f32>,
    },
}

/// Warps of a product with few rows that a multiprocessor holds at a time.
const SM_WARPS: usize = 16;
/// Warps of a block of some rows.
const SOME_WARPS: usize = 8;
/// Bytes of the shares' sums that are left at a time, for the next kernel to add.
const SHARES_BYTES: usize = 28 << 20;
/// Chips with more shared memory for a block than this hold several blocks.
const LARGE_SHARED: usize = 128 << 10;
/// Bytes of shared memory that the driver takes of each block's.
const BLOCK_SHARED: usize = 1 << 10;
/// Bytes of the sums of a tile of 8 rows and 16 outputs.
const SUMS: usize = 8 * 16 * 4;

/// Bytes of a step of 16 outputs in a warp's ring (stream.cuh): elements, and their scales.
fn step_bytes(kind: Kind) -> usize {
    match kind {
        Kind::F32 | Kind::F16 | Kind::Bf16 => 2048,
        Kind::E4m3 | Kind::Mxfp4 => 1024 + 64,
        Kind::Nvfp4 => 1024 + 128,
        Kind::Q8_0 => 512 + 32,
        Kind::Code4 | Kind::Lut4 | Kind::Code8 | Kind::Code4Min | Kind::Code8Min => 1024 + 256,
    }
}

/// Steps of a warp's ring (stream.cuh, `StreamFor`): beside 8 rows, and beside more.
fn rings(kind: Kind) -> (usize, usize) {
    if kind == Kind::Bf16 { (4, 4) } else { (4 * 2, 2 * 3) }
}

/// How a product of some rows is cut.
struct Cut {
    /// Tiles of 8 rows that a block takes, and how many times as many there are.
    tiles: usize,
    times: usize,
    /// Shares of K, and blocks that take one.
    shares: usize,
    blocks: usize,
    /// Shared memory of a block.
    shared: usize,
}

impl CudaBackend {
    /// A product over tiles of up to 64 rows.
    pub(super) fn few(&self, scratch: &mut Scratch, part: &Part, t: Tiling, input: Input, to: To) -> Result<(), String> {
        let Input::Bf16 { at, stride, .. } = input else { return Err("f32 activations where bf16 ones are needed".to_owned()) };
        // Groups of outputs that warps take.
        let items = match to {
            To::Rows(..) => part.rows.div_ceil(16),
            To::Hidden { .. } => (part.rows / 2).div_ceil(8),
        };
        if t.tokens.tiles == 0
            && t.size > 8
            && let Some(cut) = self.cut(part, t.tokens.rows as usize)
        {
            return self.some(scratch, part, &cut, (t.tokens.rows, items), (at, stride as i32), to);
        }
        let warps = part.warps();
        // As many blocks as the chip holds at a time, which share the items evenly.
        let held = (SM_WARPS / warps).max(1);
        let each = (items * t.blocks).div_ceil((self.device.sms * held).max(1)).max(1);
        let (small, large) = rings(part.kind);
        let (which, tiles, sides, ring) = if t.size == 8 { (0, 1, 2, small) } else { (1, 8, 1, large) };
        let shared = self.alone(warps * (ring * step_bytes(part.kind) + sides * tiles * SUMS), held);
        let grid = Grid { shared, ..Grid::new([items.div_ceil(each), t.blocks, 1], 32 * warps) };
        let (unit, m, tokens, x_stride) = (part.kind.unit(), part.matrix, t.tokens, stride as i32);
        match to {
            To::Rows(out, stride) => {
                let name = ["linear_1", "linear_8"][which];
                launch!(self, unit, name, grid; m, tokens, at, x_stride, out, stride as i32)
            }
            To::Hidden { at: hidden, padded, order, limit } => {
                let name = ["glu_1", "glu_8"][which];
                launch!(self, unit, name, grid; m, tokens, at, x_stride, limit_of(limit), hidden, padded as i32, order as i32)
            }
        }
    }

    /// At least `needed` bytes of shared memory, and so much that a multiprocessor has no room for more than `blocks`: those of the next kernel begin
    /// early, and would crowd some and leave others idle.
    fn alone(&self, needed: usize, blocks: usize) -> usize {
        let room = (self.device.shared + BLOCK_SHARED) / (blocks + 1);
        // Smaller chips hold fewer anyway.
        if self.device.shared > LARGE_SHARED { needed.max(room.saturating_sub(BLOCK_SHARED).next_multiple_of(256)) } else { needed }
    }

    /// The cut of a product of some rows, where shared memory is enough.
    fn cut(&self, part: &Part, rows: usize) -> Option<Cut> {
        let (shares, (step, _)) = (part.warps(), part.kind.step());
        let held = part.cols.div_ceil(step).div_ceil(shares) * step * 16; // activations of a tile
        let most = self.device.shared.min(SOME_SHARED);
        let cut = |tiles: usize| {
            let needed = tiles * held + SOME_WARPS * rings(part.kind).1 * step_bytes(part.kind);
            let blocks = if tiles < 8 && 2 * (needed + BLOCK_SHARED) <= self.device.shared + BLOCK_SHARED { 2 } else { 1 };
            let times = rows.div_ceil(8 * tiles);
            let at_a_time = (self.device.sms * blocks / (shares * times)).max(1);
            (needed <= most).then(|| Cut { tiles, times, shares, blocks: at_a_time, shared: self.alone(needed, blocks).min(most) })
        };
        match rows {
            0..=16 => cut(2),
            17..=32 => cut(4),
            _ => cut(8).or_else(|| cut(4)),
        }
    }

    /// A product of some rows, `items` groups of outputs in as many pieces as keep the shares' sums in L2.
    fn some(
        &self,
        scratch: &mut Scratch,
        part: &Part,
        cut: &Cut,
        (rows, items): (i32, usize),
        (x, x_stride): (u64, i32),
        to: To,
    ) -> Result<(), String> {
        let (unit, m, which) = (part.kind.unit(), part.matrix, cut.tiles / 4);
        let bytes = cut.times * cut.shares * cut.tiles * SUMS; // of an item
        let each = items.div_ceil(items.div_ceil((SHARES_BYTES / bytes).max(1)));
        let sums = scratch.get(&self.device, Use::Shares, each * bytes)?;
        for from in (0..items).step_by(each) {
            let n = each.min(items - from);
            // As few blocks as make no more passes.
            let passes = n.div_ceil(cut.blocks * SOME_WARPS);
            let blocks = [n.div_ceil(passes * SOME_WARPS), cut.times, cut.shares];
            let grid = Grid { shared: cut.shared, ..Grid::new(blocks, 32 * SOME_WARPS) };
            let name = match to {
                To::Rows(..) => ["linear_some_2", "linear_some_4", "linear_some_8"][which],
                To::Hidden { .. } => ["glu_some_2", "glu_some_4", "glu_some_8"][which],
            };
            launch!(self, unit, name, grid; m, rows, x, x_stride, from as i32, (from + n) as i32, sums)?;
            let (grid, from, shares) = (Grid::new([n, cut.times, 1], 32 * cut.tiles), from as i32, cut.shares as i32);
            match to {
                To::Rows(out, stride) => launch!(self, unit, "linear_join", grid; m, rows, from, shares, sums, out, stride as i32)?,
                To::Hidden { at, padded, order, limit } => {
                    let (limit, padded, order) = (limit_of(limit), padded as i32, order as i32);
                    launch!(self, unit, "glu_join", grid; m, rows, from, shares, sums, limit, at, padded, order)?;
                }
            }
        }
        Ok(())
    }
}
