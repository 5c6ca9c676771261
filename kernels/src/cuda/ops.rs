//! Products, gated MLPs, experts, router and hyper-connections: which kernel for how many rows.
//!
//! In bf16 precision products with weights that the matrix units read go there, whatever the number of rows; everything else goes through
//! the scalar kernel, which reads any type. Either way an element's sum has one order for any number of rows.

use super::{
    CudaBackend, CudaBank, CudaWeight,
    compile::{EXPERTS, MHC, ROWS},
    driver::{Grid, launch},
    few::To,
    memory::{EXPERT_ROWS, Scratch, Use, WIDE_EXPERT_ROWS},
    pack::{Kind, PAD},
    weight::{GateUp, Matrix, Part},
    wide::{IMAGE_ROWS, Outlet, WIDE_ROWS, wide_places},
};
use crate::{MhcParams, Precision, RouterParams};

/// `Tokens` of format.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Tokens {
    pub(super) tiles: u64,
    order: u64,
    divide: i32,
    pub(super) rows: i32,
}

/// Rows of f32 activations.
#[derive(Clone, Copy, Debug)]
pub(super) struct Acts {
    /// Address of the first row's first column.
    pub(super) at: u64,
    /// Elements from one row to the next.
    pub(super) stride: usize,
}

impl Acts {
    /// Whether rows start on 16 bytes.
    fn wide(&self) -> bool {
        self.at.is_multiple_of(16) && self.stride.is_multiple_of(4)
    }
}

/// Activations as a product takes them.
#[derive(Clone, Copy, Debug)]
pub(super) enum Input {
    /// As they are: read by the scalar kernel from where they lie.
    F32,
    /// Padded with zeros to a multiple of [`PAD`], for weights that take them in an order ([`Part::x_order`]).
    Bf16 { at: u64, stride: usize, order: usize },
    /// An image (hopper.cuh) of `rows` rows for weights of which a lane takes `each` elements at once.
    Image { at: u64, rows: usize, each: usize },
}

/// The rows that go through a matrix: (how many blocks, how many rows each at most).
#[derive(Clone, Copy, Debug)]
pub(super) struct Tiling {
    pub(super) tokens: Tokens,
    pub(super) blocks: usize,
    pub(super) size: usize,
    /// Tiles are mostly full, and there are enough of them: blocks take all of K for more outputs.
    big: bool,
}

impl Tiling {
    /// Rows `0..rows` through one matrix.
    fn plain(rows: usize) -> Self {
        let size = match rows {
            0..=8 => 8,
            9..=16 => 16,
            _ => 64,
        };

        Self {
            tokens: Tokens { tiles: 0, order: 0, divide: 1, rows: rows as i32 },
            blocks: rows.div_ceil(size),
            size,
            big: rows >= BIG_ROWS,
        }
    }
}

/// Matrices of up to so many outputs and from so many columns on share an output's columns among eight warps.
const FEW_OUTPUTS: usize = 1024;
const FEW_OUTPUTS_COLS: usize = 1024;
/// Rows from which a block keeps some of them and lets the weights pass; the bits are the same.
const FEW_OUTPUTS_ROWS: usize = 64;
/// Columns of a row that its block can keep: 16 in each of 256 threads.
const FEW_OUTPUTS_HELD: usize = 4096;
/// Gated products take so many values at a time.
pub(super) const GATED: usize = 8;
/// Rows from which a product is made by blocks of many outputs.
const BIG_ROWS: usize = 128;
/// Rows per expert from which the experts' products are.
const BIG_EXPERT_ROWS: usize = 24;
pub(super) fn limit_of(limit: Option<f32>) -> f32 {
    limit.unwrap_or(f32::INFINITY)
}

impl CudaBackend {
    /// Rounds rows to bf16, padded.
    fn rounded(&self, scratch: &mut Scratch, part: &Part, rows: usize, x: Acts) -> Result<Input, String> {
        let (cols, order) = (part.cols, part.x_order());
        let stride = cols.next_multiple_of(PAD);
        let at = scratch.get(&self.device, Use::Rounded, rows * stride * 2)?;
        let (grid, wide) = (Grid::new([rows, stride.div_ceil(2048), 1], 256), i32::from(x.wide()));
        launch!(self, ROWS, "to_bf16_rows", grid; x.at, x.stride as i32, cols as i32, wide, at, stride as i32, order as i32)?;
        Ok(Input::Bf16 { at, stride, order })
    }

    /// Activations as a part wants them; `last` where that is so already.
    fn input(&self, scratch: &mut Scratch, part: &Part, rows: usize, x: Acts, last: Input) -> Result<Input, String> {
        let wide = rows >= BIG_ROWS && self.is_wide(part);
        match last {
            _ if !part.mma => Ok(last),
            Input::Image { each, .. } if wide && each == part.each() => Ok(last),
            Input::Bf16 { order, .. } if !wide && order == part.x_order() => Ok(last),
            _ if wide => self.image(scratch, part, rows, x, None),
            _ => self.rounded(scratch, part, rows, x),
        }
    }

    /// `out[row, o] = x[row]·w[o]` over a tiling. `round`: to bf16 first, where the precision says so.
    fn product(
        &self,
        scratch: &mut Scratch,
        part: &Part,
        t: Tiling,
        x: Acts,
        input: Input,
        (out, stride): (u64, usize),
        round: bool,
    ) -> Result<(), String> {
        let round = round && self.precision == Precision::Bf16;
        let (m, tokens, out_stride) = (part.matrix, t.tokens, stride as i32);
        if !(part.mma && round) {
            let blocks = if tokens.tiles == 0 { (tokens.rows as usize).div_ceil(8) } else { t.blocks };
            let (xs, wide, round) = (x.stride as i32, i32::from(x.wide()), i32::from(round));
            // Of the shape alone, like every order of summation: few outputs leave most of the chip idle, so eight warps share each.
            let few = tokens.tiles == 0 && part.rows <= FEW_OUTPUTS && part.cols >= FEW_OUTPUTS_COLS;
            let many =
                few && tokens.rows as usize >= FEW_OUTPUTS_ROWS && part.cols <= FEW_OUTPUTS_HELD && part.kind as i32 <= Kind::Bf16 as i32;
            if many {
                let tiles = (tokens.rows as usize).div_ceil(8);
                let grid = Grid::new([tiles, (2 * self.device.sms / tiles).clamp(1, part.rows.div_ceil(4)), 1], 256);
                return launch!(self, part.kind.unit(), "linear_few_many", grid; m, x.at, xs, tokens.rows, wide, out, out_stride, round);
            }
            let (outputs, name) = if few { (part.rows, "linear_few") } else { (part.rows.div_ceil(8), "linear_any") };
            let grid = Grid::new([outputs, blocks, 1], 256);
            return launch!(self, part.kind.unit(), name, grid; m, tokens, x.at, xs, wide, out, out_stride, round);
        }
        if let Input::Image { at, rows, .. } = input {
            return self.wide(part, t, (at, rows), Outlet::rows(out, stride));
        }
        if let (Input::Bf16 { at, stride, .. }, true) = (input, t.big) {
            let (grid, shares) = (Grid::new([part.rows.div_ceil(128), t.blocks, 1], 256), part.warps() as i32);
            return launch!(self, part.kind.unit(), "linear_big", grid; m, tokens, at, stride as i32, shares, out, out_stride);
        }
        self.few(scratch, part, t, input, To::Rows(out, stride))
    }

    /// `hidden[row, h] = swiglu(gate, up)` in bf16, rows padded, over a tiling on the matrix units.
    fn glu(
        &self,
        scratch: &mut Scratch,
        part: &Part,
        t: Tiling,
        input: Input,
        limit: Option<f32>,
        (hidden, padded, order): (u64, usize, usize),
    ) -> Result<(), String> {
        let (m, half) = (part.matrix, part.rows / 2);
        if let (Input::Bf16 { at, stride, .. }, true) = (input, t.big) {
            let (grid, shares, limit) = (Grid::new([half.div_ceil(64), t.blocks, 1], 256), part.warps() as i32, limit_of(limit));
            return launch!(self, part.kind.unit(), "glu_big", grid; m, t.tokens, at, stride as i32, shares, limit, hidden, padded as i32, order as i32);
        }
        self.few(scratch, part, t, input, To::Hidden { at: hidden, padded, order, limit })
    }

    /// `out[r] = x[r]·Wᵀ` for all parts of a weight.
    pub(super) fn run_linear(
        &self,
        scratch: &mut Scratch,
        rows: usize,
        x: Acts,
        w: &CudaWeight,
        out: u64,
        round: bool,
    ) -> Result<(), String> {
        if rows == 0 {
            return Ok(());
        }
        let mut input = Input::F32;
        for part in &w.parts {
            if round {
                input = self.input(scratch, part, rows, x, input)?;
            }
            self.product(scratch, part, Tiling::plain(rows), x, input, (out + 4 * part.out0 as u64, w.out), round)?;
        }
        Ok(())
    }

    /// The gated MLP; `hidden` `[rows, 2·I]` is scratch of the caller's.
    pub(super) fn run_mlp(
        &self,
        scratch: &mut Scratch,
        rows: usize,
        x: Acts,
        gate_up: &CudaWeight,
        down: &CudaWeight,
        limit: Option<f32>,
        hidden: u64,
        out: u64,
    ) -> Result<(), String> {
        let half = down.cols;
        if rows == 0 {
            return Ok(());
        }
        if let ([gu], [d]) = (gate_up.parts.as_slice(), down.parts.as_slice())
            && gu.mma
            && d.mma
            && half.is_multiple_of(GATED)
        {
            let (t, padded) = (Tiling::plain(rows), half.next_multiple_of(PAD));
            if rows >= BIG_ROWS && self.is_wide(gu) && self.is_wide(d) {
                let input = self.image(scratch, gu, rows, x, None)?;
                return self.wide_mlp(scratch, (gu, d), (t, t), input, limit, out, d.rows);
            }
            let input = self.rounded(scratch, gu, rows, x)?;
            let hidden = scratch.get(&self.device, Use::Hidden, rows * padded * 2)?;
            let order = d.x_order();
            self.glu(scratch, gu, t, input, limit, (hidden, padded, order))?;
            return self.product(scratch, d, t, x, Input::Bf16 { at: hidden, stride: padded, order }, (out, down.out), true);
        }
        self.run_linear(scratch, rows, x, gate_up, hidden, true)?;
        launch!(self, ROWS, "swiglu_rows", Grid::new([rows, 1, 1], 256); hidden, half as i32, limit_of(limit))?;
        self.run_linear(scratch, rows, Acts { at: hidden, stride: 2 * half }, down, out, true)
    }

    /// A shard's partial of `rows` rows.
    pub(super) fn run_experts(
        &self,
        scratch: &mut Scratch,
        rows: usize,
        x: u64,
        k: usize,
        (ids, weights): (u64, u64),
        bank: &CudaBank,
        limit: Option<f32>,
        out: u64,
    ) -> Result<(), String> {
        let (d, most) = (bank.hidden, if self.wide_experts(bank).is_some() { WIDE_EXPERT_ROWS } else { EXPERT_ROWS });
        for r0 in (0..rows).step_by(most) {
            let n = most.min(rows - r0);
            let (ids, weights) = (ids + (4 * r0 * k) as u64, weights + (4 * r0 * k) as u64);
            self.expert_rows(scratch, n, x + (4 * r0 * d) as u64, k, (ids, weights), bank, limit, out + (4 * r0 * d) as u64)?;
        }
        Ok(())
    }

    fn expert_rows(
        &self,
        scratch: &mut Scratch,
        rows: usize,
        x: u64,
        k: usize,
        (ids, weights): (u64, u64),
        bank: &CudaBank,
        limit: Option<f32>,
        out: u64,
    ) -> Result<(), String> {
        let Some((gate_up, down)) = &bank.experts else { return Err("a bank without experts".to_owned()) };
        let (d, inter, held, first) = (bank.hidden, bank.inter, bank.held as i32, bank.first as i32);
        let pairs = rows * k;
        let fused = match gate_up {
            GateUp::Stacked(part) if part.mma && down.mma && inter.is_multiple_of(GATED) => Some(part),
            _ => None,
        };
        let big = pairs >= BIG_EXPERT_ROWS * bank.held;
        let wide = self.wide_experts(bank).filter(|_| big);
        // Small tiles while experts have few rows each; large ones where reading weights once for many rows counts.
        let (size, align) = match wide {
            Some(_) => (WIDE_ROWS, IMAGE_ROWS),
            None => (if pairs <= 4 * bank.held { 8 } else { 64 }, 1),
        };
        let most = pairs.min(bank.held + pairs / size);
        let places = if wide.is_some() { wide_places(pairs, bank.held) } else { pairs };
        let order = scratch.get(&self.device, Use::Groups, 4 * (places + 4 + 3 * most))?;
        let (tiles, counts) = (order + 4 * places as u64, (size as i32, align as i32, places as i32));
        let grid = Grid::new([1, 1, 1], 1024);
        launch!(self, EXPERTS, "group_pairs", grid; ids, pairs as i32, first, held, counts.0, counts.1, counts.2, order, tiles)?;

        let x = Acts { at: x, stride: d };
        let by_row = Tiling { tokens: Tokens { tiles, order, divide: k as i32, rows: 0 }, blocks: most, size, big };
        let by_pair = Tiling { tokens: Tokens { divide: 1, ..by_row.tokens }, ..by_row };
        let y = scratch.get(&self.device, Use::Pairs, 4 * pairs * d)?;
        if let Some(part) = wide {
            let input = self.image(scratch, part, places, x, Some((order, k as i32)))?;
            self.wide_mlp(scratch, (part, down), (by_row, by_pair), input, limit, y, d)?;
        } else if let Some(part) = fused {
            let padded = inter.next_multiple_of(PAD);
            let (input, order) = (self.rounded(scratch, part, rows, x)?, down.x_order());
            let hidden = scratch.get(&self.device, Use::Hidden, pairs * padded * 2)?;
            self.glu(scratch, part, by_row, input, limit, (hidden, padded, order))?;
            self.product(scratch, down, by_pair, x, Input::Bf16 { at: hidden, stride: padded, order }, (y, d), true)?;
        } else {
            let hidden = scratch.get(&self.device, Use::Hidden, 4 * pairs * 2 * inter)?;
            let mut scalar = |part: &Part, t, x: Acts, out, stride| {
                // The scalar kernel takes any tile; matrix units would need their own layout of what lies between.
                self.product(scratch, &part.scalar(), t, x, Input::F32, (out, stride), true)
            };
            match gate_up {
                GateUp::Stacked(part) => scalar(part, by_row, x, hidden, 2 * inter)?,
                GateUp::Apart(gate, up) => {
                    scalar(gate, by_row, x, hidden, 2 * inter)?;
                    scalar(up, by_row, x, hidden + 4 * inter as u64, 2 * inter)?;
                }
            }
            launch!(self, ROWS, "swiglu_rows", Grid::new([pairs, 1, 1], 256); hidden, inter as i32, limit_of(limit))?;
            scalar(down, by_pair, Acts { at: hidden, stride: 2 * inter }, y, d)?;
        }
        let grid = Grid::new([rows, d.div_ceil(256), 1], 256);
        launch!(self, EXPERTS, "combine", grid; ids, weights, k as i32, first, held, y, d as i32, out)
    }

    /// Router logits in f32 whatever the precision, then the choice.
    pub(super) fn run_router(
        &self,
        scratch: &mut Scratch,
        rows: usize,
        x: Acts,
        w: &CudaWeight,
        bias: u64,
        p: &RouterParams,
        ids: u64,
        weights: u64,
    ) -> Result<(), String> {
        if p.experts > 1024 || p.topk > 32 || p.groups == 0 {
            return Err(format!("{} experts, {} of them a token; up to 1024 and 32 work", p.experts, p.topk));
        }
        let logits = scratch.get(&self.device, Use::Router, 4 * rows * p.experts)?;
        self.run_linear(scratch, rows, x, w, logits, false)?;
        let (experts, topk, groups, kept) = (p.experts as i32, p.topk as i32, p.groups as i32, p.topk_group as i32);
        let (norm, scale, grid) = (i32::from(p.norm_topk), p.scale, Grid::new([rows, 1, 1], 256));
        launch!(self, EXPERTS, "route", grid; logits, bias, experts, topk, groups, kept, norm, scale, ids, weights)
    }

    /// Ends a sublayer (`y`: its output with the gates `post` and `comb`) and, with `fn_`, sums what the next gates need into scratch.
    pub(super) fn run_mhc_mix(
        &self,
        scratch: &mut Scratch,
        rows: usize,
        y: Option<(u64, u64, u64)>,
        fn_: Option<&Part>,
        p: &MhcParams,
        streams: u64,
    ) -> Result<u64, String> {
        let (n, d) = (p.streams, p.hidden);
        if n == 0 || n > MAX_STREAMS {
            return Err(format!("{n} streams; 1 to {MAX_STREAMS} work"));
        }
        let slices = d.div_ceil(MHC_SLICE);
        let m = match fn_ {
            Some(part) => part.matrix,
            None => Matrix::none(),
        };
        let partial = scratch.get(&self.device, Use::Mhc, 4 * rows * slices * (n * (n + 2) + 1))?;
        let (y, post, comb) = y.unwrap_or_default();
        if four_streams(p) && (m.rows == 0 || m.kind <= Kind::Bf16 as i32) {
            // Enough blocks to fill the chip; each keeps its part of fn for all its rows.
            let (name, threads, step) = if rows > MHC_FEW {
                ("mhc_many4", 256, rows.div_ceil(MHC_AT_ONCE).min((2 * self.device.sms / slices).max(1)))
            } else {
                ("mhc_mix4", 128, rows.min(MHC_ROWS))
            };
            let (grid, d, rows, step) = (Grid::new([slices, step, 1], threads), d as i32, rows as i32, step as i32);
            launch!(self, MHC, name, grid; m, y, post, comb, d, streams, partial, rows, step)?;
            return Ok(partial);
        }
        let grid = Grid::new([slices, rows, 1], 256);
        launch!(self, MHC, "mhc_mix", grid; m, y, post, comb, n as i32, d as i32, streams, partial)?;
        Ok(partial)
    }
}

/// `MAX_STREAMS` and `SLICE` of mhc.cu.
pub(super) const MAX_STREAMS: usize = 8;
const MHC_SLICE: usize = 64;
/// Blocks of `mhc_mix4` along the rows.
const MHC_ROWS: usize = 16;
/// Rows up to which blocks are made for few of them; the bits are the same.
pub(super) const MHC_FEW: usize = 64;
/// `AT_ONCE` of mhc.cu.
const MHC_AT_ONCE: usize = 64;

/// Whether the hyper-connections have the release's shape, for which there are kernels of their own.
pub(super) fn four_streams(p: &MhcParams) -> bool {
    p.streams == 4 && p.hidden.is_multiple_of(MHC_SLICE) && p.hidden <= 4096
}
