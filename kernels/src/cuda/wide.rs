//! Products of many rows on Hopper's matrix units (kernels/cuda/wide.cuh): activations as an image, and what goes where. Neighbours: `ops.rs` decides
//! which products are wide.

use super::{
    CudaBackend,
    compile::ROWS,
    driver::{Grid, launch},
    loaded::WIDE_SHARED,
    memory::{Scratch, Use, WIDE_EXPERT_ROWS},
    ops::{Acts, GATED, Input, Tiling, limit_of},
    pack::PAD,
    weight::{CudaBank, GateUp, Part},
};

/// `Outlet` of wide.cuh.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Outlet {
    out: u64,
    stride: i64,
    limit: f32,
    unused: u32,
    hidden: u64,
    hidden_rows: i32,
    each: i32,
    padded: i32,
    unused2: u32,
}

impl Outlet {
    /// Sums in f32 to rows at `out`, `stride` elements apart.
    pub(super) fn rows(out: u64, stride: usize) -> Self {
        Self { out, stride: stride as i64, ..Self::default() }
    }
}

/// Rows of a tile of wide products (wide.cuh, `WIDE_ROWS`), and of how many rows places of an image are a multiple.
pub(super) const WIDE_ROWS: usize = 128;
pub(super) const IMAGE_ROWS: usize = 8;
/// Threads of a block of wide products.
pub(super) const WIDE_THREADS: usize = 384;

/// Places of an image that holds `pairs` rows in order of `held` experts, each of which begins at a multiple of [`IMAGE_ROWS`].
pub(super) fn wide_places(pairs: usize, held: usize) -> usize {
    (pairs + (IMAGE_ROWS - 1) * held.min(pairs)).next_multiple_of(IMAGE_ROWS)
}

/// Scratch of the experts (`run_experts`), for up to `rows` rows: gathered rows and hidden ones in bf16, outputs in f32, and the order.
pub(crate) fn expert_scratch(rows: usize, topk: usize, held: usize, hidden: usize, inter: usize) -> u64 {
    let pairs = rows.min(WIDE_EXPERT_ROWS).saturating_mul(topk);
    let places = wide_places(pairs, held) as u64;
    let row = 2 * (hidden.next_multiple_of(PAD) + inter.next_multiple_of(PAD)) + 8;
    places * row as u64 + 4 * (pairs * hidden) as u64
}

impl CudaBackend {
    /// Rounds rows to an image for a part: row p of x, or, with an order of `(entries, divisor)`, the one of its entry p.
    pub(super) fn image(
        &self,
        scratch: &mut Scratch,
        part: &Part,
        rows: usize,
        x: Acts,
        order: Option<(u64, i32)>,
    ) -> Result<Input, String> {
        let (padded, room, each) = (part.cols.next_multiple_of(PAD), rows.next_multiple_of(IMAGE_ROWS), part.each());
        let at = scratch.get(&self.device, Use::Rounded, room * padded * 2)?;
        let ((order, divide), grid) = (order.unwrap_or((0, 1)), Grid::new([rows, 1, 1], 256));
        let (stride, cols) = (x.stride as i32, part.cols as i32);
        launch!(self, ROWS, "image_rows", grid; x.at, stride, cols, order, divide, each as i32, at, room as i32, padded as i32)?;
        Ok(Input::Image { at, rows: room, each })
    }

    /// Whether products with a matrix may be wide ones: on Hopper's matrix units, where there are rows enough.
    pub(super) fn is_wide(&self, part: &Part) -> bool {
        self.device.wide && part.mma && part.kind.is_wide()
    }

    /// Gate over up of a bank of which both products may be wide ones.
    pub(super) fn wide_experts<'a>(&self, bank: &'a CudaBank) -> Option<&'a Part> {
        match &bank.experts {
            Some((GateUp::Stacked(part), down)) if self.is_wide(part) && self.is_wide(down) && bank.inter.is_multiple_of(GATED) => {
                Some(part)
            }
            _ => None,
        }
    }

    /// A wide product: to `outlet` in f32, or gated.
    pub(super) fn wide(&self, part: &Part, t: Tiling, (x, x_rows): (u64, usize), outlet: Outlet) -> Result<(), String> {
        let (gated, shares) = (outlet.hidden != 0, part.warps() as i32);
        let groups = if gated { outlet.padded as usize / 64 } else { part.rows.div_ceil(128) };
        let tiles = if t.tokens.tiles == 0 { (t.tokens.rows as usize).div_ceil(WIDE_ROWS) } else { t.blocks };
        let grid = Grid { shared: WIDE_SHARED, ..Grid::new([self.device.sms.min(groups * tiles), 1, 1], WIDE_THREADS) };
        let name = if gated { "glu_wide" } else { "linear_wide" };
        launch!(self, part.kind.unit(), name, grid; part.matrix, t.tokens, x, x_rows as i32, shares, outlet)
    }

    /// Both products of a gated MLP as wide ones, over tilings of the input and of the hidden rows; these lie in an image between them.
    pub(super) fn wide_mlp(
        &self,
        scratch: &mut Scratch,
        (gate_up, down): (&Part, &Part),
        (t_in, t_hidden): (Tiling, Tiling),
        input: Input,
        limit: Option<f32>,
        out: u64,
        stride: usize,
    ) -> Result<(), String> {
        let Input::Image { at, rows, .. } = input else { return Err("rows where an image is needed".to_owned()) };
        let (padded, each) = (down.cols.next_multiple_of(PAD), down.each());
        let hidden = scratch.get(&self.device, Use::Hidden, rows * padded * 2)?;
        let gated = Outlet {
            limit: limit_of(limit),
            hidden,
            hidden_rows: rows as i32,
            each: each as i32,
            padded: padded as i32,
            ..Outlet::default()
        };
        self.wide(gate_up, t_in, (at, rows), gated)?;
        self.wide(down, t_hidden, (hidden, rows), Outlet::rows(out, stride))
    }
}
