//! Floats narrowed to FP8 as the native release stores it: E4M3 elements under a grid of f32 factors, one per block of 128×128.
//!
//! Neighbours: `scales.rs` reads such a grid back; `float8.rs` rounds one element. The loader narrows float matrices with this where flags ask
//! for it, and makes small FP8 checkpoints.

use std::{num::NonZero, thread};

use crate::{DType, MatrixError, MatrixSource, Scales, SharedBytes, float8};

/// Elements of a block along rows and along columns.
pub const BLOCK: usize = 128;
/// Largest E4M3 value.
pub const E4M3_MAX: f32 = 448.0;
/// The factor of a block of zeros; no block has a smaller one.
const LEAST: f32 = 1e-12;

/// E4M3 codes `[rows, cols]` of row-major `values`, and the grid of factors `[⌈rows/128⌉, ⌈cols/128⌉]` that multiply them: the largest value of
/// each block becomes 448.
///
/// # Panics
/// Where `values` is no multiple of `cols` long.
pub fn encode(values: &[f32], cols: usize) -> (Vec<u8>, Vec<f32>) {
    assert!(values.len().is_multiple_of(cols), "{} values in rows of {cols}", values.len());
    let mut codes = vec![0; values.len()];
    let mut grid = vec![0.0; values.len().div_ceil(cols * BLOCK) * cols.div_ceil(BLOCK)];
    let bands = values.chunks(cols * BLOCK).zip(codes.chunks_mut(cols * BLOCK)).zip(grid.chunks_mut(cols.div_ceil(BLOCK)));
    for ((values, codes), factors) in bands {
        encode_band(values, cols, codes, factors);
    }
    (codes, grid)
}

/// Up to 128 rows.
fn encode_band(values: &[f32], cols: usize, codes: &mut [u8], factors: &mut [f32]) {
    for (block, factor) in factors.iter_mut().enumerate() {
        let columns = block * BLOCK..cols.min((block + 1) * BLOCK);
        let rows = || values.chunks(cols).map(|row| &row[columns.clone()]);
        let largest = rows().flatten().fold(0.0f32, |m, v| m.max(v.abs()));
        *factor = (largest / E4M3_MAX).max(LEAST);
        for (row, codes) in rows().zip(codes.chunks_mut(cols)) {
            for (value, code) in row.iter().zip(&mut codes[columns.clone()]) {
                *code = float8::to_e4m3(value / *factor);
            }
        }
    }
}

/// Bytes of a matrix in this form.
pub fn bytes(rows: usize, cols: usize) -> usize {
    rows * cols + 4 * rows.div_ceil(BLOCK) * cols.div_ceil(BLOCK)
}

/// A matrix of the same name and values, narrowed to FP8. Bands of 128 rows go over all cores.
///
/// # Errors
/// None for a matrix that holds its bytes.
pub fn narrow(m: &MatrixSource) -> Result<MatrixSource, MatrixError> {
    let (rows, cols) = (m.rows(), m.cols());
    let grid_cols = cols.div_ceil(BLOCK);
    let mut codes = vec![0; rows * cols];
    let mut grid = vec![0.0; rows.div_ceil(BLOCK) * grid_cols];
    if rows * cols > 0 {
        let threads = thread::available_parallelism().map_or(1, NonZero::get);
        let share = rows.div_ceil(BLOCK).div_ceil(threads);
        let shares = codes.chunks_mut(share * BLOCK * cols).zip(grid.chunks_mut(share * grid_cols));
        thread::scope(|scope| {
            for (i, (codes, grid)) in shares.enumerate() {
                scope.spawn(move || {
                    let mut values = vec![0.0; BLOCK * cols];
                    let bands = codes.chunks_mut(BLOCK * cols).zip(grid.chunks_mut(grid_cols));
                    for (band, (codes, factors)) in bands.enumerate() {
                        let row0 = (i * share + band) * BLOCK;
                        let values = &mut values[..codes.len()];
                        for (r, row) in values.chunks_mut(cols).enumerate() {
                            m.dequantize_row(row0 + r, row);
                        }
                        encode_band(values, cols, codes, factors);
                    }
                });
            }
        });
    }
    let whole = MatrixSource::new(m.name(), DType::F8E4m3, rows, cols, SharedBytes::from_vec(codes))?;
    Ok(whole.with_scales(Scales::Grid { values: grid.into(), grid_cols, block_rows: BLOCK, block_cols: BLOCK }))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Every value is within half a step of E4M3 under its block's factor; the largest of a block is exact but for f32's own rounding.
        #[test]
        fn values_come_back_within_half_a_step(rows in 1usize..300, cols in 1usize..300, seed in 0u32..1000) {
            let values: Vec<f32> = (0..rows * cols)
                .map(|i| {
                    let bits = (i as u32).wrapping_mul(2_654_435_761).wrapping_add(seed.wrapping_mul(40_503));
                    ((bits >> 8) as f32 / (1 << 23) as f32 - 1.0) * 1.5f32.powi((bits & 7) as i32 - 4)
                })
                .collect();
            let m = MatrixSource::from_f32("m", rows, cols, &values).unwrap();
            let narrowed = narrow(&m).unwrap();
            let (codes, grid) = encode(&values, cols);
            let Some((Scales::Grid { values: factors, .. }, 0, 0)) = narrowed.scales() else { panic!("a grid") };
            prop_assert_eq!((&narrowed.data()[..], &factors[..]), (&codes[..], &grid[..]));
            prop_assert_eq!(narrowed.stored_bytes(), bytes(rows, cols));
            for (i, (value, back)) in values.iter().zip(narrowed.to_f32()).enumerate() {
                let factor = grid[i / cols / BLOCK * cols.div_ceil(BLOCK) + i % cols / BLOCK];
                // Steps are 2⁻³ of a value's power of two, and 2⁻⁹ below 2⁻⁶.
                let step = (value / factor).abs().max(2.0f32.powi(-6)).log2().floor().exp2() / 8.0;
                prop_assert!((value - back).abs() <= 0.501 * step * factor, "{} {} at {}", value, back, i);
            }
        }
    }

    #[test]
    fn zeros_stay_zeros() {
        let m = MatrixSource::from_f32("m", 2, 3, &[0.0; 6]).unwrap();
        assert_eq!(narrow(&m).unwrap().to_f32(), [0.0; 6]);
    }
}
