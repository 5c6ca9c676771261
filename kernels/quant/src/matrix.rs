//! Row-major matrices over shared bytes.

use std::{ops::Range, sync::Arc};

use crate::{
    DType, Scales, SharedBytes,
    rocmfp::{self, Levels},
};

/// A stored weight matrix `[rows = out, cols = in]`, row-major, possibly a window of a larger one.
///
/// Windows along rows and columns share the bytes of the whole: a shard that owns a slice of the intermediate dimension
/// takes rows of gate/up and columns of down without copying anything.
#[derive(Clone, Debug)]
pub struct MatrixSource {
    name: Arc<str>,
    dtype: DType,
    rows: usize,
    cols: usize,
    row_stride: usize,
    data: SharedBytes,
    /// Scales of the whole matrix that this is a window of, and where in it the window starts.
    scales: Option<Scales>,
    levels: Option<Arc<Levels>>,
    row0: usize,
    col0: usize,
}

/// Why a matrix or a window of it cannot be made.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum MatrixError {
    /// The bytes do not fit the shape.
    #[error("tensor {name}: shape [{rows}, {cols}] of {dtype} needs {needed} bytes, but {got} are there")]
    Size {
        /// Tensor name.
        name: String,
        /// Rows asked for.
        rows: usize,
        /// Columns asked for.
        cols: usize,
        /// Element type.
        dtype: DType,
        /// Bytes the shape needs.
        needed: usize,
        /// Bytes given.
        got: usize,
    },
    /// A cut does not fall on a block boundary, or lies outside the matrix.
    #[error("tensor {name}: cannot cut {axis} {start}..{end} out of {len}: it must lie inside and fall on multiples of {block} ({dtype})")]
    Cut {
        /// Tensor name.
        name: String,
        /// `rows` or `columns`.
        axis: &'static str,
        /// First index.
        start: usize,
        /// One past the last index.
        end: usize,
        /// Length of the axis.
        len: usize,
        /// Block size along the axis.
        block: usize,
        /// Element type.
        dtype: DType,
    },
}

impl MatrixSource {
    /// A whole matrix over exactly its bytes.
    ///
    /// # Errors
    /// [`MatrixError::Size`] where `data` is not exactly `rows × cols` elements of `dtype`.
    pub fn new(name: impl Into<Arc<str>>, dtype: DType, rows: usize, cols: usize, data: SharedBytes) -> Result<Self, MatrixError> {
        let name = name.into();
        let stride = dtype.row_bytes(cols);
        match stride {
            Some(row_stride) if row_stride * rows == data.len() => {
                Ok(Self { name, dtype, rows, cols, row_stride, data, scales: None, levels: None, row0: 0, col0: 0 })
            }
            _ => Err(MatrixError::Size {
                name: name.to_string(),
                rows,
                cols,
                dtype,
                needed: stride.unwrap_or(cols.div_ceil(dtype.block_elems()) * dtype.block_bytes()) * rows,
                got: data.len(),
            }),
        }
    }

    /// A matrix of f32 values made in memory (tests, generated weights, dequantised parts).
    pub fn from_f32(name: impl Into<Arc<str>>, rows: usize, cols: usize, values: &[f32]) -> Result<Self, MatrixError> {
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Self::new(name, DType::F32, rows, cols, SharedBytes::from_vec(bytes))
    }

    /// The same matrix with scales beside its elements. Set on the whole matrix, before any window is taken.
    #[must_use]
    pub fn with_scales(self, scales: Scales) -> Self {
        Self { scales: Some(scales), ..self }
    }

    /// The same matrix with the levels of its ROCmFP codes.
    #[must_use]
    pub fn with_levels(self, levels: Levels) -> Self {
        Self { levels: Some(Arc::new(levels)), ..self }
    }

    /// The levels of ROCmFP codes, where they were given.
    pub fn levels(&self) -> Option<&Levels> {
        self.levels.as_deref()
    }

    /// The scales beside the elements, and the (row, column) of the whole matrix at which this window starts.
    pub fn scales(&self) -> Option<(&Scales, usize, usize)> {
        self.scales.as_ref().map(|scales| (scales, self.row0, self.col0))
    }

    /// Tensor name, for messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Output features.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Input features.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Bytes from one row to the next (larger than a row's own bytes in a column window).
    pub fn row_stride(&self) -> usize {
        self.row_stride
    }

    /// The bytes, from the first row's first element to the last row's last.
    pub fn data(&self) -> &SharedBytes {
        &self.data
    }

    /// Bytes that the elements themselves occupy (what a pass over the matrix reads).
    pub fn payload_bytes(&self) -> usize {
        self.rows * self.cols / self.dtype.block_elems() * self.dtype.block_bytes()
    }

    /// The bytes of one row.
    ///
    /// # Panics
    /// Where `row` is out of range.
    pub fn row_bytes(&self, row: usize) -> &[u8] {
        assert!(row < self.rows, "row {row} of {} in {}", self.rows, self.name);
        let len = self.cols / self.dtype.block_elems() * self.dtype.block_bytes();
        &self.data[row * self.row_stride..row * self.row_stride + len]
    }

    /// A window of whole rows.
    ///
    /// # Errors
    /// [`MatrixError::Cut`] where the range is not inside.
    pub fn row_window(&self, range: Range<usize>) -> Result<Self, MatrixError> {
        if range.start > range.end || range.end > self.rows {
            return Err(self.cut_error("rows", range, self.rows, 1));
        }
        self.window(range, 0..self.cols)
    }

    /// A window of columns; both ends fall on block boundaries.
    ///
    /// # Errors
    /// [`MatrixError::Cut`] where the range is not inside or cuts a block.
    pub fn col_window(&self, range: Range<usize>) -> Result<Self, MatrixError> {
        let block = self.dtype.block_elems();
        if range.start > range.end || range.end > self.cols || !range.start.is_multiple_of(block) || !range.end.is_multiple_of(block) {
            return Err(self.cut_error("columns", range, self.cols, block));
        }
        self.window(0..self.rows, range)
    }

    fn window(&self, rows: Range<usize>, cols: Range<usize>) -> Result<Self, MatrixError> {
        let (be, bb) = (self.dtype.block_elems(), self.dtype.block_bytes());
        let start = rows.start * self.row_stride + cols.start / be * bb;
        let width = cols.len() / be * bb;
        let end = if rows.is_empty() { start } else { (rows.end - 1) * self.row_stride + cols.start / be * bb + width };
        let data = self.data.slice(start..end).ok_or_else(|| self.cut_error("rows", rows.clone(), self.rows, 1))?;
        Ok(Self {
            name: Arc::clone(&self.name),
            rows: rows.len(),
            cols: cols.len(),
            data,
            scales: self.scales.clone(),
            levels: self.levels.clone(),
            row0: self.row0 + rows.start,
            col0: self.col0 + cols.start,
            ..*self
        })
    }

    fn cut_error(&self, axis: &'static str, range: Range<usize>, len: usize, block: usize) -> MatrixError {
        MatrixError::Cut { name: self.name.to_string(), axis, start: range.start, end: range.end, len, block, dtype: self.dtype }
    }

    /// Whether the elements are floats that need nothing beside them: what kernels may read as they are.
    pub fn is_plain(&self) -> bool {
        self.dtype.is_float() && self.scales.is_none() && self.levels.is_none()
    }

    /// Bytes that the matrix occupies: its elements and its share of the scales beside them.
    pub fn stored_bytes(&self) -> usize {
        self.payload_bytes() + self.scales.as_ref().map_or(0, |scales| scales.bytes(self.rows, self.cols))
    }

    /// The stored bytes that a pass over the matrix reads: its elements (row by row where a column window leaves wide gaps between them) and
    /// the scales beside them.
    pub fn stored_parts(&self) -> Vec<&[u8]> {
        /// Gaps of a few pages are not worth another request.
        const WIDE: usize = 16 << 10;
        let row = self.cols / self.dtype.block_elems() * self.dtype.block_bytes();
        let mut parts: Vec<&[u8]> = if self.rows > 1 && self.row_stride - row > WIDE {
            (0..self.rows).map(|r| self.row_bytes(r)).collect()
        } else {
            vec![&self.data]
        };
        if let Some(Scales::E4m3Groups { bytes, stride, .. } | Scales::E8m0Groups { bytes, stride }) = &self.scales {
            let end = (self.row0 + self.rows) * stride;
            parts.extend(bytes.get(self.row0 * stride..end));
        }
        parts
    }

    /// Writes one row as f32, exactly.
    ///
    /// # Panics
    /// Where `row` is out of range or `out` is not `cols` long.
    pub fn dequantize_row(&self, row: usize, out: &mut [f32]) {
        assert_eq!(out.len(), self.cols, "row of {}", self.name);
        self.dequantize_run(row, 0, out);
    }

    /// Writes the elements from column `col` of one row on as f32, exactly. Both ends of the run fall on block boundaries.
    ///
    /// # Panics
    /// Where the run is not inside of the matrix or cuts a block.
    pub fn dequantize_run(&self, row: usize, col: usize, out: &mut [f32]) {
        let (be, bb) = (self.dtype.block_elems(), self.dtype.block_bytes());
        assert!(col.is_multiple_of(be), "column {col} of {} cuts a block of {be}", self.name);
        let bytes = &self.row_bytes(row)[col / be * bb..][..out.len() / be * bb];
        match &self.levels {
            Some(levels) => rocmfp::dequantize(self.dtype, levels, bytes, out),
            None => self.dtype.dequantize(bytes, out),
        }
        if let Some(scales) = &self.scales {
            scales.apply(self.row0 + row, self.col0 + col, out);
        }
    }

    /// The whole matrix as f32, row-major.
    pub fn to_f32(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.rows * self.cols];
        for (r, chunk) in out.chunks_exact_mut(self.cols.max(1)).enumerate() {
            self.dequantize_row(r, chunk);
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matrix() -> MatrixSource {
        MatrixSource::from_f32("m", 3, 4, &(0..12).map(|i| i as f32).collect::<Vec<_>>()).unwrap()
    }

    #[test]
    fn windows_of_windows_read_the_right_elements() {
        let m = matrix().row_window(1..3).unwrap().col_window(1..3).unwrap();
        assert_eq!((m.rows(), m.cols()), (2, 2));
        assert_eq!(m.to_f32(), [5.0, 6.0, 9.0, 10.0]);
        assert_eq!(m.col_window(1..2).unwrap().to_f32(), [6.0, 10.0]);
        assert_eq!(m.payload_bytes(), 16);
    }

    #[test]
    fn windows_keep_the_scales_of_their_place() {
        let grid = Scales::Grid { values: [1.0, 10.0, 100.0, 1000.0].into(), grid_cols: 2, block_rows: 2, block_cols: 2 };
        let m = matrix().with_scales(grid);
        assert_eq!(m.to_f32(), [0.0, 1.0, 20.0, 30.0, 4.0, 5.0, 60.0, 70.0, 800.0, 900.0, 10_000.0, 11_000.0]);
        let window = m.row_window(1..3).unwrap().col_window(1..4).unwrap();
        assert_eq!(window.to_f32(), [5.0, 60.0, 70.0, 900.0, 10_000.0, 11_000.0]);
        let mut run = [0.0; 2];
        window.dequantize_run(1, 1, &mut run);
        assert_eq!(run, [10_000.0, 11_000.0]);
        assert!(!window.is_plain() && matrix().is_plain());
        assert_eq!((window.payload_bytes(), window.stored_bytes()), (24, 32));
    }

    #[test]
    fn stored_parts_are_what_a_window_reads() {
        let wide = MatrixSource::new("w", DType::Bf16, 3, 20_000, SharedBytes::from_vec(vec![0; 120_000])).unwrap();
        let lens = |m: &MatrixSource| m.stored_parts().iter().map(|p| p.len()).collect::<Vec<_>>();
        assert_eq!(lens(&wide), [120_000]);
        assert_eq!(lens(&wide.col_window(8..108).unwrap()), [200, 200, 200], "wide gaps");
        assert_eq!(lens(&wide.col_window(0..19_000).unwrap()), [118_000], "narrow gaps");
        let scales = Scales::E8m0Groups { bytes: SharedBytes::from_vec(vec![127; 3 * 625]), stride: 625 };
        assert_eq!(lens(&wide.with_scales(scales).row_window(1..3).unwrap()), [80_000, 1250]);
    }

    #[test]
    fn a_wrong_size_names_both_numbers() {
        let e = MatrixSource::new("w", DType::Bf16, 2, 3, SharedBytes::from_vec(vec![0; 11])).unwrap_err();
        assert_eq!(e.to_string(), "tensor w: shape [2, 3] of BF16 needs 12 bytes, but 11 are there");
        assert!(matrix().col_window(2..5).is_err());
        assert!(matrix().row_window(0..4).is_err());
    }

    #[test]
    fn floats_convert_exactly() {
        let h = MatrixSource::new("h", DType::F16, 1, 2, SharedBytes::from_vec(vec![0, 0x3c, 0, 0xc0])).unwrap();
        assert_eq!(h.to_f32(), [1.0, -2.0]);
        let b = MatrixSource::new("b", DType::Bf16, 1, 2, SharedBytes::from_vec(vec![0x80, 0x3f, 0x20, 0xc0])).unwrap();
        assert_eq!(b.to_f32(), [1.0, -2.5]);
    }
}
