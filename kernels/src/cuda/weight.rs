//! Matrices and expert banks in device memory.

use tandem_quant::MatrixSource;

use super::{
    CudaBackend, coded,
    driver::{Grid, Memory, launch},
    memory::bytes_of,
    pack::{Kind, Layout, pack},
};
use crate::{BackendError, ExpertSource, Precision};

/// `Matrix` of weights.cuh.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Matrix {
    pub(super) q: u64,
    pub(super) s: u64,
    pub(super) factors: u64,
    pub(super) q_each: i64,
    pub(super) s_each: i64,
    pub(super) global: f32,
    pub(super) rows: i32,
    pub(super) cols: i32,
    pub(super) q_row: i32,
    pub(super) s_row: i32,
    pub(super) brows: i32,
    pub(super) bshift: i32,
    pub(super) row_off: i32,
    pub(super) col_off: i32,
    pub(super) kind: i32,
    pub(super) factor_rows: i32,
    pub(super) factor_each: i32,
    pub(super) form: i32,
    pub(super) table: [u32; 8],
    pub(super) zero: i32,
}

impl Matrix {
    /// A matrix without rows.
    pub(super) fn none() -> Self {
        // SAFETY: numbers alone, for which zeros are values.
        unsafe { std::mem::zeroed() }
    }
}

/// A matrix of one type (one per expert in a bank) and its memory.
pub(super) struct Part {
    pub(super) matrix: Matrix,
    pub(super) kind: Kind,
    pub(super) rows: usize,
    pub(super) cols: usize,
    /// First output in the whole.
    pub(super) out0: usize,
    /// Whether products go to the matrix units.
    pub(super) mma: bool,
    _memory: Vec<Memory>,
}

/// A matrix `[out, cols]` in its stored types: neighbouring parts of one type are one part.
pub struct CudaWeight {
    pub(super) parts: Vec<Part>,
    pub(super) out: usize,
    pub(super) cols: usize,
}

/// Gate and up of all experts.
pub(super) enum GateUp {
    /// Gate over up in one matrix.
    Stacked(Part),
    /// Of different types, or with scales that cannot be stacked.
    Apart(Part, Part),
}

/// The experts of one layer of one shard.
pub struct CudaBank {
    pub(super) first: u32,
    pub(super) held: usize,
    pub(super) inter: usize,
    pub(super) hidden: usize,
    pub(super) experts: Option<(GateUp, Part)>,
}

macro_rules! opaque {
    ($($name:ident),*) => {
        $(impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.debug_struct(stringify!($name)).finish_non_exhaustive()
            }
        })*
    };
}
opaque!(CudaWeight, CudaBank);

impl CudaWeight {
    /// The only part, for ops that read single rows of a matrix.
    pub(super) fn only(&self, what: &str) -> Result<&Part, String> {
        match self.parts.as_slice() {
            [part] => Ok(part),
            parts => Err(format!("{what} consists of {} parts of different types; one type is needed", parts.len())),
        }
    }
}

impl CudaBackend {
    /// Stacks matrices along rows into as few parts as their types allow.
    pub(super) fn load_weight(&self, parts: &[MatrixSource]) -> Result<CudaWeight, BackendError> {
        let cols = parts.first().map_or(0, MatrixSource::cols);
        if let Some(odd) = parts.iter().find(|p| p.cols() != cols) {
            return Err(refused(
                odd,
                format!("it has {} columns, but {} has {cols}; stacked parts need equal columns", odd.cols(), parts[0].name()),
            ));
        }
        if parts.is_empty() || cols == 0 || parts.iter().any(|p| p.rows() == 0) {
            let tensor = parts.first().map_or_else(String::new, |m| m.name().to_owned());
            return Err(BackendError::Weight { tensor, reason: "a matrix without elements".to_owned() });
        }
        let mut groups: Vec<(Layout, Vec<&MatrixSource>)> = Vec::new();
        for m in parts {
            let layout = Layout::of(m).map_err(|e| refused(m, e))?;
            match groups.last_mut() {
                Some((whole, members)) if whole.continues(&layout) => {
                    whole.rows += layout.rows;
                    members.push(m);
                }
                _ => groups.push((layout, vec![m])),
            }
        }
        // Gate over up with factors of their own is still one matrix.
        if let [(a, m), (b, n)] = groups.as_slice()
            && a.rows == b.rows
            && (Layout { global: b.global, ..*a }).continues(b)
        {
            let matrices: Vec<&MatrixSource> = m.iter().chain(n).copied().collect();
            let part = self.load_part(&[matrices], Some(&[a.global, b.global]))?;
            return Ok(CudaWeight { out: 2 * a.rows, cols, parts: vec![part] });
        }
        let mut out = 0;
        let mut loaded = Vec::with_capacity(groups.len());
        for (layout, members) in groups {
            let part = self.load_part(&[members], None)?;
            loaded.push(Part { out0: out, ..part });
            out += layout.rows;
        }
        Ok(CudaWeight { parts: loaded, out, cols })
    }

    /// Loads the experts of a layer.
    pub(super) fn load_bank(&self, first: u32, experts: &[ExpertSource]) -> Result<CudaBank, BackendError> {
        let (hidden, inter) = experts.first().map_or((0, 0), |e| (e.gate.cols(), e.gate.rows()));
        for e in experts {
            for (m, rows, cols) in [(&e.gate, inter, hidden), (&e.up, inter, hidden), (&e.down, hidden, inter)] {
                if (m.rows(), m.cols()) != (rows, cols) {
                    return Err(refused(m, format!("shape [{}, {}] where [{rows}, {cols}] is needed", m.rows(), m.cols())));
                }
            }
        }
        let loaded = if experts.is_empty() || hidden == 0 || inter == 0 {
            None
        } else {
            let gates: Vec<_> = experts.iter().map(|e| vec![&e.gate]).collect();
            let ups: Vec<_> = experts.iter().map(|e| vec![&e.up]).collect();
            let both: Vec<_> = experts.iter().map(|e| vec![&e.gate, &e.up]).collect();
            let downs: Vec<_> = experts.iter().map(|e| vec![&e.down]).collect();
            let gate_up = if self.stacks(&experts[0])? {
                GateUp::Stacked(self.load_part(&both, None)?)
            } else {
                GateUp::Apart(self.load_part(&gates, None)?, self.load_part(&ups, None)?)
            };
            Some((gate_up, self.load_part(&downs, None)?))
        };
        Ok(CudaBank { first, held: experts.len(), inter, hidden, experts: loaded })
    }

    /// Whether gate and up lie in one matrix: equal but for their factors.
    fn stacks(&self, e: &ExpertSource) -> Result<bool, BackendError> {
        let gate = Layout::of(&e.gate).map_err(|r| refused(&e.gate, r))?;
        let up = Layout::of(&e.up).map_err(|r| refused(&e.up, r))?;
        Ok((gate.kind.is_float() && up.kind.is_float()) || Layout { global: up.global, ..gate }.continues(&up))
    }

    /// One matrix per expert, each stacked of as many matrices of one layout; `factors`: of each of them. Experts of different float types
    /// become f32.
    fn load_part(&self, experts: &[Vec<&MatrixSource>], factors: Option<&[f32]>) -> Result<Part, BackendError> {
        let layouts = experts.iter().flatten().map(|m| Layout::of(m).map_err(|e| refused(m, e))).collect::<Result<Vec<_>, _>>()?;
        let members = experts[0].len();
        let mut layout = layouts[0];
        let alike = |l: &Layout| Layout { global: layout.global, rows: layout.rows, ..*l } == layout;
        if let Some(odd) = layouts.iter().position(|l| !alike(l)) {
            if !layouts.iter().all(|l| l.kind.is_float()) {
                let m = experts[odd / members][odd % members];
                return Err(refused(
                    m,
                    format!("{} where the layer's other experts have {}; one type is needed", layouts[odd].kind, layout.kind),
                ));
            }
            layout = layout.widened();
        }
        let layout = Layout { rows: experts[0].iter().map(|m| m.rows()).sum(), ..layout };
        let globals: Vec<f32> = match factors {
            Some(f) => f.to_vec(),
            None => layouts.iter().map(|l| l.global).collect(),
        };
        let uniform = globals.iter().all(|g| *g == globals[0]) || layout.kind.is_float();
        self.kernels.load(layout.kind.unit()).map_err(|e| refused(experts[0][0], e))?;

        // Tiled types come in whole tiles of 16 rows.
        let tiled = layout.kind.lane_bytes();
        let padded_rows = if tiled.is_some() { layout.rows.next_multiple_of(16) } else { layout.rows };
        let tiled_scales = layout.kind.scale_bytes();
        let s_rows = if tiled_scales.is_some() { padded_rows } else { layout.s_rows() };
        let (q_each, s_each) = (padded_rows * layout.q_row(), s_rows * layout.s_row());
        let what = experts[0][0].name();
        let q = self.device.alloc(what, q_each * experts.len())?;
        let s = self.device.alloc(what, s_each * experts.len())?;
        let flat = tiled.map(|_| self.device.alloc(what, q_each)).transpose()?;
        let flat_scales = tiled_scales.map(|_| self.device.alloc(what, s_each)).transpose()?;
        let mut mma = layout.fits_mma() && self.precision == Precision::Bf16;
        let (mut q_host, mut s_host) = (vec![0u8; q_each], vec![0u8; s_each]);
        for (i, expert) in experts.iter().enumerate() {
            q_host.fill(0);
            s_host.fill(0);
            let (mut q_at, mut s_at) = (0, 0);
            for m in expert {
                let own = Layout { rows: m.rows(), ..layout };
                let (q_len, s_len) = (own.rows * own.q_row(), own.s_rows() * own.s_row());
                mma &= pack(m, &own, &mut q_host[q_at..q_at + q_len], &mut s_host[s_at..s_at + s_len]);
                (q_at, s_at) = (q_at + q_len, s_at + s_len);
            }
            let (place, s_place) = (q.at() + (i * q_each) as u64, s.at() + (i * s_each) as u64);
            let mut staging = self.staging.lock();
            // SAFETY: each expert's part lies inside of what was allocated for all, and fills the room for one.
            unsafe {
                staging.upload(&q_host, flat.as_ref().map_or(place, Memory::at)).map_err(|e| refused(expert[0], e))?;
                staging.upload(&s_host, flat_scales.as_ref().map_or(s_place, Memory::at)).map_err(|e| refused(expert[0], e))?;
            }
            if let (Some(flat), Some(bytes)) = (&flat, tiled) {
                let (words, q_row) = (q_each / 8, layout.q_row() as i32);
                let grid = Grid::new([words.div_ceil(256), 1, 1], 256);
                launch!(self, super::compile::ROWS, "tile_rows", grid; flat.at(), place, q_row, bytes as i32, words as i64)
                    .map_err(|e| refused(expert[0], e))?;
            }
            if let (Some(flat), Some(bytes)) = (&flat_scales, tiled_scales) {
                let (words, s_row) = (s_each / 2, layout.s_row() as i32);
                let grid = Grid::new([words.div_ceil(256), 1, 1], 256);
                launch!(self, super::compile::ROWS, "tile_scales", grid; flat.at(), s_place, s_row, bytes as i32, words as i64)
                    .map_err(|e| refused(expert[0], e))?;
            }
        }
        let order = match layout.kind {
            Kind::Nvfp4 | Kind::Mxfp4 => Some("order_nibbles"),
            Kind::E4m3 => Some("order_e4m3"),
            _ => None,
        };
        if let Some(order) = order {
            let words = q_each * experts.len() / 4;
            let grid = Grid::new([words.div_ceil(256), 1, 1], 256);
            launch!(self, super::compile::ROWS, order, grid; q.at(), words as i64).map_err(|e| refused(experts[0][0], e))?;
        }
        let mut memory = vec![q, s];
        let mut at_factors = 0;
        if !uniform {
            let f = self.device.alloc(what, globals.len() * 4)?;
            // SAFETY: as large as was allocated.
            unsafe { self.staging.lock().upload(bytes_of(&globals), f.at()) }.map_err(|e| refused(experts[0][0], e))?;
            at_factors = f.at();
            memory.push(f);
        }
        self.device.sync().map_err(|e| refused(experts[0][0], e))?;
        let (zero, table) = layout.coding.as_ref().map(coded::levels).unwrap_or_default();
        let matrix = Matrix {
            q: memory[0].at(),
            s: if s_each > 0 { memory[1].at() } else { 0 },
            factors: at_factors,
            q_each: q_each as i64,
            s_each: s_each as i64,
            global: if layout.kind.is_float() { 1.0 } else { globals[0] },
            rows: layout.rows as i32,
            cols: layout.cols as i32,
            q_row: layout.q_row() as i32,
            s_row: layout.s_row() as i32,
            brows: layout.brows as i32,
            bshift: layout.bshift as i32,
            row_off: layout.row_off as i32,
            col_off: layout.col_off as i32,
            kind: layout.kind as i32,
            factor_rows: (layout.rows / members) as i32,
            factor_each: members as i32,
            form: layout.coding.as_ref().map_or(0, coded::form),
            table,
            zero,
        };
        Ok(Part { matrix, kind: layout.kind, rows: layout.rows, cols: layout.cols, out0: 0, mma, _memory: memory })
    }
}

impl Part {
    /// The same matrix for the scalar kernel, without owning its memory.
    pub(super) fn scalar(&self) -> Self {
        Self { mma: false, _memory: Vec::new(), ..*self }
    }

    /// In which order activations are taken: [`Part::each`], or 0 of codes, which take them as they come (weights.cuh, `place_of_x`).
    pub(super) fn x_order(&self) -> usize {
        if self.kind.is_code() { 0 } else { self.each() }
    }

    /// Elements of K that a lane takes of a row at once on the matrix units (mma.cuh, `Format::EACH`).
    pub(super) fn each(&self) -> usize {
        self.kind.step().0 / 4
    }

    /// Warps that share K on the matrix units: of the shape and the type alone, so that sums have one order for any number of rows.
    pub(super) fn warps(&self) -> usize {
        let (step, ahead) = self.kind.step();
        (self.cols.div_ceil(step) / ahead).clamp(1, 8)
    }
}

fn refused(m: &MatrixSource, reason: String) -> BackendError {
    BackendError::Weight { tensor: m.name().to_owned(), reason }
}
