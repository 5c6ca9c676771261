//! Scales that lie beside the elements of a matrix, in tensors of their own.

use std::sync::Arc;

use crate::{SharedBytes, float8};

/// Scales of a whole stored matrix `[rows, cols]`; windows of the matrix index them by absolute row and column.
#[derive(Clone, Debug)]
pub enum Scales {
    /// One factor for every element (GGUF's NVFP4 `.scale`).
    Tensor(f32),
    /// One factor per row.
    Row(Arc<[f32]>),
    /// Native FP8's `weight_scale_inv`: a grid of factors, one per `block_rows × block_cols` elements (partial blocks at the edges).
    Grid {
        /// Row-major factors.
        values: Arc<[f32]>,
        /// Factors in a row of the grid.
        grid_cols: usize,
        /// Elements per factor along rows (128 in the release).
        block_rows: usize,
        /// Elements per factor along columns.
        block_cols: usize,
    },
    /// NVFP4: an E4M3 factor per 16 elements of a row, times one factor for the tensor.
    E4m3Groups {
        /// `[rows, cols / 16]`, row-major.
        bytes: SharedBytes,
        /// Bytes from one row to the next.
        stride: usize,
        /// The tensor's factor (compressed-tensors stores its reciprocal: inverted by the loader).
        global: f32,
    },
    /// MXFP4 and MXFP8: an E8M0 factor (2^(byte − 127), 0xFF is NaN) per 32 elements of a row.
    E8m0Groups {
        /// `[rows, cols / 32]`, row-major.
        bytes: SharedBytes,
        /// Bytes from one row to the next.
        stride: usize,
    },
}

/// The form of the scales beside a matrix, known from headers alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScaleForm {
    /// None, or none but those inside the blocks.
    None,
    /// [`Scales::Tensor`].
    Tensor,
    /// [`Scales::Row`].
    Row,
    /// [`Scales::Grid`].
    Grid {
        /// Elements per factor along columns.
        block_cols: usize,
    },
    /// [`Scales::E4m3Groups`].
    E4m3Groups,
    /// [`Scales::E8m0Groups`].
    E8m0Groups,
}

impl Scales {
    /// Which of the forms it is.
    pub fn form(&self) -> ScaleForm {
        match self {
            Self::Tensor(_) => ScaleForm::Tensor,
            Self::Row(_) => ScaleForm::Row,
            Self::Grid { block_cols, .. } => ScaleForm::Grid { block_cols: *block_cols },
            Self::E4m3Groups { .. } => ScaleForm::E4m3Groups,
            Self::E8m0Groups { .. } => ScaleForm::E8m0Groups,
        }
    }

    /// Multiplies `values`, the elements from column `col0` on of row `row` of the whole matrix.
    ///
    /// # Panics
    /// Where the position lies outside the scales.
    pub fn apply(&self, row: usize, col0: usize, values: &mut [f32]) {
        let factor: &dyn Fn(usize) -> f32 = match self {
            Self::Tensor(factor) => &|_| *factor,
            Self::Row(factors) => &|_| factors[row],
            Self::Grid { values, grid_cols, block_rows, block_cols } => {
                let line = &values[row / block_rows * grid_cols..][..*grid_cols];
                &move |col| line[col / block_cols]
            }
            Self::E4m3Groups { bytes, stride, global } => {
                let line = &bytes[row * stride..][..*stride];
                &move |col| float8::e4m3(line[col / 16]) * global
            }
            Self::E8m0Groups { bytes, stride } => {
                let line = &bytes[row * stride..][..*stride];
                &move |col| float8::e8m0(line[col / 32])
            }
        };
        let run = self.run();
        let mut at = 0;
        while at < values.len() {
            let end = ((col0 + at) / run * run).saturating_add(run).saturating_sub(col0).min(values.len());
            let f = factor(col0 + at);
            values[at..end].iter_mut().for_each(|v| *v *= f);
            at = end;
        }
    }

    /// Bytes of the factors that `rows` rows of `cols` elements need (of a grid, the whole blocks that it takes).
    pub fn bytes(&self, rows: usize, cols: usize) -> usize {
        match self {
            Self::Tensor(_) => 4,
            Self::Row(_) => 4 * rows,
            Self::Grid { block_rows, block_cols, .. } => 4 * rows.div_ceil(*block_rows) * cols.div_ceil(*block_cols),
            Self::E4m3Groups { .. } => rows * cols.div_ceil(16) + 4,
            Self::E8m0Groups { .. } => rows * cols.div_ceil(32),
        }
    }

    /// Consecutive elements of a row that share a factor.
    fn run(&self) -> usize {
        match self {
            Self::Tensor(_) | Self::Row(_) => usize::MAX,
            Self::Grid { block_cols, .. } => *block_cols,
            Self::E4m3Groups { .. } => 16,
            Self::E8m0Groups { .. } => 32,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn factors(scales: &Scales, row: usize, col0: usize, n: usize) -> Vec<f32> {
        let mut ones = vec![1.0; n];
        scales.apply(row, col0, &mut ones);
        ones
    }

    #[test]
    fn windows_take_the_factors_of_their_own_columns() {
        let grid = Scales::Grid { values: (0..6).map(|i| i as f32).collect(), grid_cols: 3, block_rows: 2, block_cols: 4 };
        assert_eq!(factors(&grid, 3, 3, 6), [3.0, 4.0, 4.0, 4.0, 4.0, 5.0]);
        let nv = Scales::E4m3Groups { bytes: SharedBytes::from_vec(vec![0x38, 0x40, 0x30, 0x48]), stride: 2, global: 10.0 };
        assert_eq!(factors(&nv, 1, 16, 2), [40.0, 40.0]);
        assert_eq!(factors(&nv, 0, 15, 2), [10.0, 20.0]);
        let mx = Scales::E8m0Groups { bytes: SharedBytes::from_vec(vec![127, 128]), stride: 2 };
        assert_eq!(factors(&mx, 0, 31, 2), [1.0, 2.0]);
        assert_eq!(factors(&Scales::Row([2.0, 3.0].into()), 1, 7, 2), [3.0, 3.0]);
        assert_eq!(factors(&Scales::Tensor(0.5), 9, 7, 2), [0.5, 0.5]);
    }
}
