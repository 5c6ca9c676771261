//! Stored matrices → the layout of kernels/cuda/weights.cuh: rows padded with zeros to 128 elements, scales in rows of their own.
//!
//! Nothing is rounded here: bytes move, GGUF's blocks are taken apart. What no kernel reads yet becomes f32, which is exact and large.

use std::fmt;

use parking_lot::Mutex;
use tandem_quant::{
    DType, MatrixSource, Scales,
    coded::{CodeScales, Coding},
};

use super::{
    coded,
    compile::{self, Unit},
};

/// Rows are padded to a multiple of this many elements: what a warp takes at once.
pub(super) const PAD: usize = 128;
/// Largest E8M0 byte that the matrix units' path represents (2^17).
const LARGEST_E8M0: u8 = 144;

/// `Type` of weights.cuh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    F32 = 0,
    F16 = 1,
    Bf16 = 2,
    E4m3 = 3,
    Nvfp4 = 4,
    Mxfp4 = 5,
    Q8_0 = 6,
    Code4 = 7,
    Lut4 = 8,
    Code8 = 9,
    Code4Min = 10,
    Code8Min = 11,
}

impl Kind {
    /// The kernels of the type.
    pub(super) fn unit(self) -> Unit {
        match self {
            Self::F32 => compile::F32,
            Self::F16 => compile::F16,
            Self::Bf16 => compile::BF16,
            Self::E4m3 => compile::E4M3,
            Self::Nvfp4 => compile::NVFP4,
            Self::Mxfp4 => compile::MXFP4,
            Self::Q8_0 => compile::Q8_0,
            Self::Code4 => compile::CODE4,
            Self::Lut4 => compile::LUT4,
            Self::Code8 => compile::CODE8,
            Self::Code4Min => compile::CODE4_MIN,
            Self::Code8Min => compile::CODE8_MIN,
        }
    }

    pub(super) fn is_float(self) -> bool {
        matches!(self, Self::F32 | Self::F16 | Self::Bf16)
    }

    /// Elements of K that a warp takes at once on the matrix units (weights.cuh, `Span::STEP`), and of how many such steps a warp's share of K
    /// has at least.
    pub(super) fn step(self) -> (usize, usize) {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => (64, 2),
            Self::E4m3 | Self::Code8 | Self::Code8Min => (64, 4),
            Self::Code4 | Self::Lut4 | Self::Code4Min => (128, 4),
            Self::Nvfp4 | Self::Mxfp4 => (128, 8),
            Self::Q8_0 => (32, 8),
        }
    }

    /// Whether elements are codes (coded.cuh).
    pub(super) fn is_code(self) -> bool {
        matches!(self, Self::Code4 | Self::Lut4 | Self::Code8 | Self::Code4Min | Self::Code8Min)
    }

    /// Whether wide.cuh has products of the type.
    pub(super) fn is_wide(self) -> bool {
        matches!(self, Self::Bf16 | Self::E4m3 | Self::Nvfp4 | Self::Mxfp4 | Self::Q8_0)
    }

    /// Bytes that one of the four lanes of a row takes at once, of the types that lie in tiles (weights.cuh, `Span::BYTES`).
    pub(super) fn lane_bytes(self) -> Option<usize> {
        match self {
            Self::F32 | Self::F16 => None,
            Self::Bf16 => Some(32),
            Self::E4m3 | Self::Nvfp4 | Self::Mxfp4 | Self::Code4 | Self::Lut4 | Self::Code8 | Self::Code4Min | Self::Code8Min => Some(16),
            Self::Q8_0 => Some(8),
        }
    }

    /// Bytes of scales of a row's step, of the types whose scales lie in the same tiles (weights.cuh, `Span::SCALES`).
    pub(super) fn scale_bytes(self) -> Option<usize> {
        match self {
            Self::Nvfp4 => Some(8),
            Self::Mxfp4 => Some(4),
            Self::Q8_0 => Some(2),
            _ => None,
        }
    }

    fn bits(self) -> usize {
        match self {
            Self::F32 => 32,
            Self::F16 | Self::Bf16 => 16,
            Self::E4m3 | Self::Q8_0 | Self::Code8 | Self::Code8Min => 8,
            Self::Nvfp4 | Self::Mxfp4 | Self::Code4 | Self::Lut4 | Self::Code4Min => 4,
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.unit().name)
    }
}

/// How a matrix lies in device memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Layout {
    pub(super) kind: Kind,
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) global: f32,
    /// E4M3: rows and log2 of columns of a scale, and where in the first one the window starts.
    pub(super) brows: usize,
    pub(super) bshift: u32,
    pub(super) row_off: usize,
    pub(super) col_off: usize,
    /// Of codes: how elements are made of them.
    pub(super) coding: Option<Coding>,
}

impl Layout {
    /// The layout of a matrix; f32 where no kernel reads its type.
    ///
    /// # Errors
    /// Scales that are not there.
    pub(super) fn of(m: &MatrixSource) -> Result<Self, String> {
        let (rows, cols) = (m.rows(), m.cols());
        let plain = Self { kind: Kind::F32, rows, cols, global: 1.0, brows: 1, bshift: 31, row_off: 0, col_off: 0, coding: None };
        let scales = m.scales().map(|s| s.0);
        let kind = |kind| Ok(Self { kind, ..plain });
        if scales.is_none()
            && let Some((kind, coding)) = coded::of_dtype(m.dtype())
        {
            return Ok(Self { kind, global: coding.factor, coding: Some(coding), ..plain });
        }
        match (m.dtype(), scales) {
            (DType::F32, None) => kind(Kind::F32),
            (DType::F16, None) => kind(Kind::F16),
            (DType::Bf16, None) => kind(Kind::Bf16),
            (DType::F32 | DType::F16 | DType::Bf16, Some(_)) => kind(Kind::F32),
            (DType::F8E4m3, None | Some(Scales::Row(_))) => kind(Kind::E4m3),
            (DType::F8E4m3 | DType::Nvfp4 | DType::Mxfp4 | DType::Q8_0, Some(Scales::Tensor(global))) => {
                Ok(Self { kind: of_dtype(m.dtype()), global: *global, ..plain })
            }
            (DType::F8E4m3, Some(Scales::Grid { block_rows, block_cols, .. })) if block_cols.is_power_of_two() => {
                let (_, row0, col0) = m.scales().ok_or("no scales")?;
                let (row_off, col_off) = (row0 % block_rows, col0 % block_cols);
                Ok(Self { kind: Kind::E4m3, brows: *block_rows, bshift: block_cols.trailing_zeros(), row_off, col_off, ..plain })
            }
            (DType::Nvfp4Pairs, Some(Scales::E4m3Groups { global, .. })) => Ok(Self { kind: Kind::Nvfp4, global: *global, ..plain }),
            (DType::Mxfp4Pairs, Some(Scales::E8m0Groups { .. })) => kind(Kind::Mxfp4),
            (DType::Nvfp4, None) => kind(Kind::Nvfp4),
            (DType::Mxfp4, None) => kind(Kind::Mxfp4),
            (DType::Q8_0, None) => kind(Kind::Q8_0),
            (dtype, _) => {
                if m.rows() * m.cols() >= 1 << 20 {
                    widens(dtype);
                }
                kind(Kind::F32)
            }
        }
    }

    /// The layout of the matrix turned into f32.
    pub(super) fn widened(self) -> Self {
        Self { kind: Kind::F32, global: 1.0, brows: 1, bshift: 31, row_off: 0, col_off: 0, coding: None, ..self }
    }

    /// Bytes from one row of elements to the next.
    pub(super) fn q_row(&self) -> usize {
        self.cols.next_multiple_of(PAD) * self.kind.bits() / 8
    }

    /// Bytes from one row of scales to the next.
    pub(super) fn s_row(&self) -> usize {
        let padded = self.cols.next_multiple_of(PAD);
        match self.kind {
            Kind::F32 | Kind::F16 | Kind::Bf16 => 0,
            Kind::E4m3 => 4 * (((self.cols - 1 + self.col_off) >> self.bshift) + 1),
            Kind::Nvfp4 => padded / 16,
            Kind::Mxfp4 => padded / 32,
            Kind::Q8_0 => padded / 32 * 2,
            Kind::Code4 | Kind::Lut4 | Kind::Code8 | Kind::Code4Min | Kind::Code8Min => {
                self.coding.map_or(0, |c| coded::scale_row(c.scales, padded))
            }
        }
    }

    /// Rows of scales.
    pub(super) fn s_rows(&self) -> usize {
        if self.kind == Kind::E4m3 { (self.rows - 1 + self.row_off) / self.brows + 1 } else { self.rows }
    }

    /// Whether the matrix units can read it (together with what [`pack`] finds).
    pub(super) fn fits_mma(&self) -> bool {
        match self.kind {
            Kind::F32 | Kind::F16 => false,
            Kind::E4m3 => self.col_off.is_multiple_of(64) && self.bshift >= 6,
            _ => self.coding.is_none_or(|c| c.scales != CodeScales::HalfMin),
        }
    }

    /// Whether `below` can follow in the same matrix.
    pub(super) fn continues(&self, below: &Self) -> bool {
        let same = Self { rows: below.rows, ..*self } == *below;
        let whole = self.kind != Kind::E4m3 || (self.row_off == 0 && self.rows.is_multiple_of(self.brows));
        same && whole
    }
}

/// Says once per type that its matrices take more memory than they are stored in.
fn widens(dtype: DType) {
    static SAID: Mutex<Vec<DType>> = Mutex::new(Vec::new());
    let mut said = SAID.lock();
    if !said.contains(&dtype) {
        said.push(dtype);
        tracing::warn!(
            %dtype,
            "no CUDA kernel reads this type yet: its matrices become f32 in device memory, exactly, and take {:.1} times the room",
            4.0 * dtype.block_elems() as f64 / dtype.block_bytes() as f64
        );
    }
}

fn of_dtype(dtype: DType) -> Kind {
    match dtype {
        DType::F8E4m3 => Kind::E4m3,
        DType::Nvfp4 => Kind::Nvfp4,
        DType::Mxfp4 => Kind::Mxfp4,
        _ => Kind::Q8_0,
    }
}

/// Writes a matrix in its layout: elements to `q` (`rows × q_row` bytes, zeroed), scales to `s` (`s_rows × s_row`, zeroed). False where
/// the matrix units' path must not be used for a value's sake.
pub(super) fn pack(m: &MatrixSource, layout: &Layout, q: &mut [u8], s: &mut [u8]) -> bool {
    let (q_row, s_row) = (layout.q_row(), layout.s_row());
    if layout.kind == Kind::F32 && (m.dtype() != DType::F32 || m.scales().is_some()) {
        let mut values = vec![0.0; m.cols()];
        for (r, to) in q.chunks_exact_mut(q_row).enumerate() {
            m.dequantize_row(r, &mut values);
            to.as_chunks_mut::<4>().0.iter_mut().zip(&values).for_each(|(t, v)| *t = v.to_le_bytes());
        }
        return true;
    }
    if let Some(coding) = &layout.coding {
        coded::pack(m, layout.kind, coding, (q, q_row), (s, s_row));
        return true;
    }
    for (r, to) in q.chunks_exact_mut(q_row).enumerate() {
        let from = m.row_bytes(r);
        let to_s = s.chunks_exact_mut(s_row.max(1)).nth(if s_row > 0 { r } else { usize::MAX });
        match (m.dtype(), to_s) {
            (DType::Q8_0, Some(to_s)) => {
                for ((block, to), d) in from.chunks_exact(34).zip(to.chunks_exact_mut(32)).zip(to_s.chunks_exact_mut(2)) {
                    d.copy_from_slice(&block[..2]);
                    to.copy_from_slice(&block[2..]);
                }
            }
            (DType::Mxfp4, Some(to_s)) => {
                for ((block, to), e) in from.chunks_exact(17).zip(to.chunks_exact_mut(16)).zip(to_s) {
                    *e = block[0];
                    interleave(&block[1..], to);
                }
            }
            (DType::Nvfp4, Some(to_s)) => {
                for ((block, to), e) in from.chunks_exact(36).zip(to.chunks_exact_mut(32)).zip(to_s.chunks_exact_mut(4)) {
                    for (e, b) in e.iter_mut().zip(block) {
                        *e = if *b > 0x7E { 0 } else { *b }; // GGUF: larger bytes mean zero
                    }
                    block[4..].chunks_exact(8).zip(to.chunks_exact_mut(8)).for_each(|(from, to)| interleave(from, to));
                }
            }
            _ => to[..from.len()].copy_from_slice(from),
        }
    }
    pack_side_scales(m, layout, s);
    layout.kind != Kind::Mxfp4 || s.iter().all(|e| *e <= LARGEST_E8M0)
}

/// Scales that lie beside the elements.
fn pack_side_scales(m: &MatrixSource, layout: &Layout, s: &mut [u8]) {
    let s_row = layout.s_row();
    let Some((scales, row0, col0)) = m.scales() else {
        if layout.kind == Kind::E4m3 {
            s.as_chunks_mut::<4>().0.iter_mut().for_each(|v| *v = 1.0f32.to_le_bytes());
        }
        return;
    };
    match scales {
        Scales::Tensor(_) if layout.kind == Kind::E4m3 => s.as_chunks_mut::<4>().0.iter_mut().for_each(|v| *v = 1.0f32.to_le_bytes()),
        Scales::Tensor(_) => {}
        Scales::Row(values) => {
            s.as_chunks_mut::<4>().0.iter_mut().zip(&values[row0..]).for_each(|(to, v)| *to = v.to_le_bytes());
        }
        Scales::Grid { values, grid_cols, block_rows, block_cols } => {
            for (i, to) in s.chunks_exact_mut(s_row).enumerate() {
                let from = &values[(row0 / block_rows + i) * grid_cols + col0 / block_cols..];
                to.as_chunks_mut::<4>().0.iter_mut().zip(from).for_each(|(to, v)| *to = v.to_le_bytes());
            }
        }
        Scales::E4m3Groups { bytes, stride, .. } => side_groups(bytes, *stride, row0, col0 / 16, m.cols() / 16, s, s_row),
        Scales::E8m0Groups { bytes, stride } => side_groups(bytes, *stride, row0, col0 / 32, m.cols() / 32, s, s_row),
    }
}

fn side_groups(bytes: &[u8], stride: usize, row0: usize, first: usize, count: usize, s: &mut [u8], s_row: usize) {
    for (r, to) in s.chunks_exact_mut(s_row).enumerate() {
        to[..count].copy_from_slice(&bytes[(row0 + r) * stride + first..][..count]);
    }
}

/// A run of low nibbles followed by a run of high ones → pairs in order.
fn interleave(from: &[u8], to: &mut [u8]) {
    let (low, high) = to.split_at_mut(from.len() / 2);
    for (i, pair) in from.as_chunks::<2>().0.iter().enumerate() {
        low[i] = pair[0] & 15 | pair[1] << 4;
        high[i] = pair[0] >> 4 | pair[1] & 0xF0;
    }
}

#[cfg(test)]
mod tests {
    use tandem_quant::SharedBytes;

    use super::*;

    #[test]
    fn gguf_nibbles_become_pairs() {
        let mut to = [0; 4];
        interleave(&[0x51, 0x62, 0x73, 0x84], &mut to);
        assert_eq!(to, [0x21, 0x43, 0x65, 0x87]);
    }

    #[test]
    fn windows_take_their_own_scales() {
        let grid = Scales::Grid { values: (0..6).map(|i| i as f32).collect(), grid_cols: 3, block_rows: 2, block_cols: 4 };
        let m = MatrixSource::new("w", DType::F8E4m3, 4, 12, SharedBytes::from_vec((0..48).collect())).expect("sizes");
        let m = m.with_scales(grid).row_window(1..4).and_then(|m| m.col_window(5..12)).expect("inside");
        let layout = Layout::of(&m).expect("a kernel");
        assert_eq!((layout.row_off, layout.col_off, layout.s_rows(), layout.s_row()), (1, 1, 2, 8));
        let (mut q, mut s) = (vec![0; 3 * layout.q_row()], vec![0; 2 * 8]);
        assert!(pack(&m, &layout, &mut q, &mut s) && !layout.fits_mma());
        assert_eq!(q[..8], [17, 18, 19, 20, 21, 22, 23, 0]);
        let s: Vec<f32> = s.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        assert_eq!(s, [1.0, 2.0, 4.0, 5.0]);
    }

    /// Plans count with the same answer.
    #[test]
    fn what_is_widened_is_what_plans_expect() {
        use tandem_quant::ScaleForm;

        use crate::support::{DeviceKind, keeps_packed};
        let bytes = |len| SharedBytes::from_vec(vec![0x38; len]);
        let grid = |block_cols| Scales::Grid { values: vec![1.0; 8].into(), grid_cols: 8, block_rows: 8, block_cols };
        for dtype in DType::ALL {
            let Some(row) = dtype.row_bytes(256) else { continue };
            let forms = [
                None,
                Some(Scales::Tensor(2.0)),
                Some(Scales::Row(vec![1.0; 2].into())),
                Some(grid(128)),
                Some(grid(96)),
                Some(Scales::E4m3Groups { bytes: bytes(2 * 16), stride: 16, global: 1.0 }),
                Some(Scales::E8m0Groups { bytes: bytes(2 * 8), stride: 8 }),
            ];
            for scales in forms {
                let form = scales.as_ref().map_or(ScaleForm::None, Scales::form);
                let m = MatrixSource::new("w", *dtype, 2, 256, bytes(2 * row)).expect("sizes");
                let m = scales.map_or_else(|| m.clone(), |scales| m.clone().with_scales(scales));
                let packed = Layout::of(&m).expect("a layout").kind != Kind::F32 || (*dtype == DType::F32 && form == ScaleForm::None);
                assert_eq!(packed, keeps_packed(DeviceKind::Cuda, *dtype, form), "{dtype} with {form:?}");
            }
        }
    }

    #[test]
    fn blocks_are_taken_apart() {
        let mut block = vec![0x00, 0x3c];
        block.extend(0..32);
        let m = MatrixSource::new("w", DType::Q8_0, 1, 32, SharedBytes::from_vec(block)).expect("sizes");
        let layout = Layout::of(&m).expect("a kernel");
        let (mut q, mut s) = (vec![0; layout.q_row()], vec![0; layout.s_row()]);
        pack(&m, &layout, &mut q, &mut s);
        assert_eq!((q[31], q[32], q.len(), s[..2].to_vec(), s.len()), (31, 0, 128, vec![0, 0x3c], 8));
    }
}
