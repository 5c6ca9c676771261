//! Stored types that are no floats: the ops that take matrices, over every block type, every kind of scales and both kinds of levels.
//!
//! One seed is one type, so that the suite's seeds go through all of them. Sizes are odd numbers of blocks, matrices are windows of larger
//! ones. The tolerances are those of float weights: dequantisation is exact, so only the sums may differ.

use half::{bf16, f16};
use tandem_quant::{DType, MatrixSource, Scales, SharedBytes, rocmfp::Levels};

use super::{mhc::Mhc, mla, noise::Noise, rig, rows, sequences};
use crate::{Backend, ExpertSource};

/// What lies beside the elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Beside {
    Nothing,
    Tensor,
    Row,
    Grid,
    E4m3,
    E8m0,
    /// ROCmFP's own levels.
    Fixed,
    /// ROCmFP's codebooks.
    Books,
}

/// A type with what lies beside its elements.
type Coding = (DType, Beside);

/// Every way in which a checkpoint stores a matrix, but plain floats.
fn codings() -> Vec<Coding> {
    let mut all = Vec::new();
    for &dtype in DType::ALL {
        match dtype {
            DType::F32 | DType::F16 | DType::Bf16 => {}
            DType::F8E4m3 => all.extend([Beside::Tensor, Beside::Row, Beside::Grid, Beside::E8m0].map(|beside| (dtype, beside))),
            DType::Nvfp4Pairs => all.push((dtype, Beside::E4m3)),
            DType::Mxfp4Pairs => all.push((dtype, Beside::E8m0)),
            DType::RocmFp3Mix | DType::RocmFp2Mix => all.extend([(dtype, Beside::Fixed), (dtype, Beside::Books)]),
            DType::Nvfp4 => all.extend([(dtype, Beside::Nothing), (dtype, Beside::Tensor)]),
            block => all.push((block, Beside::Nothing)),
        }
    }
    all
}

/// Elements on whose multiples windows fall.
fn block((dtype, beside): Coding) -> usize {
    // MXFP8 has blocks of one element, but a scale for 32.
    if beside == Beside::E8m0 { 32 } else { dtype.block_elems() }
}

/// Random bytes of whole blocks whose values are finite and at most `most`.
pub fn elements(n: &mut Noise, dtype: DType, count: usize, most: f32) -> Vec<u8> {
    let (mut bytes, mut values) = (Vec::new(), vec![0.0; dtype.block_elems()]);
    for _ in 0..count / dtype.block_elems() {
        // A random scale is small enough often; one that never is would leave the block at zero.
        let tried = (0..1000).find_map(|_| {
            let mut block = n.bytes(dtype.block_bytes());
            // Of UE4M3 scales half mean zero, and several small ones in a row are rare: only such are drawn.
            let scales = match dtype {
                DType::Nvfp4 => 0..4,
                DType::RocmFp3Mix | DType::RocmFp2Mix => dtype.block_bytes() - 2..dtype.block_bytes(),
                _ => 0..0,
            };
            block[scales].iter_mut().for_each(|scale| *scale &= 0x1F);
            fit_halves(n, dtype, &mut block, &mut values, most);
            dtype.dequantize(&block, &mut values);
            let largest = values.iter().fold(0.0f32, |m, v| if v.is_finite() { m.max(v.abs()) } else { f32::INFINITY });
            (largest <= most).then_some(block)
        });
        bytes.extend(tried.unwrap_or_else(|| vec![0; dtype.block_bytes()]));
    }
    bytes
}

/// Where a type's f16 scales lie in a block, as whole bytes.
fn halves(dtype: DType) -> &'static [usize] {
    match dtype {
        DType::Q2K => &[80, 82],
        DType::Q3K => &[108],
        DType::Q6K => &[208],
        DType::Q4K | DType::Q5K | DType::Q4_1 | DType::Q5_1 => &[0, 2],
        DType::Q4_0 | DType::Q5_0 | DType::Q8_0 | DType::Iq4Nl | DType::Iq4Xs | DType::Iq1S => &[0],
        DType::Iq2Xxs | DType::Iq2Xs | DType::Iq2S | DType::Iq3Xxs | DType::Iq3S => &[0],
        _ => &[],
    }
}

/// Sets a block's f16 scales so that its largest value is near `most`; random ones rarely are.
fn fit_halves(n: &mut Noise, dtype: DType, block: &mut [u8], values: &mut [f32], most: f32) {
    let places = halves(dtype);
    let signs: Vec<f32> = places.iter().map(|_| if n.coin() { 1.0 } else { -1.0 }).collect();
    let set = |block: &mut [u8], size: f32| {
        for (at, sign) in places.iter().zip(&signs) {
            block[*at..at + 2].copy_from_slice(&f16::from_f32(sign * size).to_le_bytes());
        }
    };
    if !places.is_empty() {
        set(block, 1.0);
        dtype.dequantize(block, values);
        let largest = values.iter().fold(1.0f32, |m, v| m.max(v.abs()));
        set(block, most / largest * (0.25 + 0.7 * n.unit() as f32));
    }
}

/// A matrix of a coding: a window of a larger one, entries of about in^−½.
fn matrix(n: &mut Noise, coding: Coding, rows: usize, cols: usize) -> Result<MatrixSource, String> {
    let (dtype, beside) = coding;
    let step = block(coding);
    let (above, left) = if n.coin() { (n.between(0, 3), n.between(0, 1) * step) } else { (0, 0) };
    let (all_rows, all_cols) = (rows + 2 * above, cols + 2 * left);
    let spread = 4.0 / (cols as f32).sqrt();
    // Codes without their scales are what they are: 448, 6 or 1 at most.
    let largest = match dtype {
        DType::F8E4m3 => 448.0,
        DType::Nvfp4Pairs | DType::Mxfp4Pairs => 6.0,
        _ => spread,
    };
    let mut bytes = elements(n, dtype, all_rows * all_cols, largest);
    if beside == Beside::Books {
        // The top bit of a meta byte chooses the book.
        let metas = bytes.chunks_exact_mut(dtype.block_bytes()).flat_map(|block| block.iter_mut().rev().take(2));
        metas.for_each(|meta| *meta |= if n.coin() { 0x80 } else { 0 });
    }
    let mut factors = |count: usize| -> Vec<f32> { (0..count).map(|_| spread / largest * (0.25 + 0.75 * n.unit() as f32)).collect() };
    let scales = match beside {
        Beside::Nothing | Beside::Fixed | Beside::Books => None,
        Beside::Tensor => factors(1).first().copied().map(Scales::Tensor),
        Beside::Row => Some(Scales::Row(factors(all_rows).into())),
        Beside::Grid => {
            let (block_rows, block_cols) = (5, 7);
            let grid_cols = all_cols.div_ceil(block_cols);
            Some(Scales::Grid { values: factors(all_rows.div_ceil(block_rows) * grid_cols).into(), grid_cols, block_rows, block_cols })
        }
        Beside::E4m3 => {
            let stride = all_cols / 16;
            let bytes = n.bytes(all_rows * stride).into_iter().map(|b| b & 0x7F).map(|b| b - u8::from(b == 0x7F)).collect();
            Some(Scales::E4m3Groups { bytes: SharedBytes::from_vec(bytes), stride, global: spread / largest / 448.0 })
        }
        Beside::E8m0 => {
            let stride = all_cols / 32;
            let middle = 126.0 + (spread / largest).log2();
            let bytes = (0..all_rows * stride).map(|_| middle as u8 - n.between(0, 3) as u8).collect();
            Some(Scales::E8m0Groups { bytes: SharedBytes::from_vec(bytes), stride })
        }
    };
    let name = format!("{dtype} {beside:?} [{rows}, {cols}]");
    let mut m = MatrixSource::new(name, dtype, all_rows, all_cols, SharedBytes::from_vec(bytes)).map_err(|e| e.to_string())?;
    if let Some(scales) = scales {
        m = m.with_scales(scales);
    }
    let len = if dtype == DType::RocmFp3Mix { 8 } else { 4 };
    // Books hold bf16 numbers; the scales of the blocks were chosen for levels of about 4.
    let mut book = || n.values(len, 0.0, 2.0).into_iter().map(|v| bf16::from_f32(v).to_f32()).collect::<Vec<_>>();
    m = match beside {
        Beside::Fixed => m.with_levels(Levels::Fixed),
        Beside::Books => m.with_levels(Levels::Books([book(), book()])),
        _ => m,
    };
    m.row_window(above..above + rows).and_then(|m| m.col_window(left..left + cols)).map_err(|e| e.to_string())
}

/// Whole blocks, up to about `most` elements.
fn blocks(n: &mut Noise, coding: Coding, most: usize) -> usize {
    let step = block(coding);
    step * n.between(1, (most / step).max(1))
}

/// Every op that takes a matrix, over the coding that goes with the seed.
///
/// # Errors
/// The first disagreement.
pub fn judge<B: Backend>(backend: &B, seed: u64) -> Result<(), String> {
    let all = codings();
    let coding = all[(seed % all.len() as u64) as usize];
    let row_count = rows::ROWS[(seed % rows::ROWS.len() as u64) as usize];
    let n = &mut Noise::at(seed, &[1]);
    let named = |op: &'static str| move |e: String| format!("{op} over {} with {:?}: {e}", coding.0, coding.1);

    let cols = blocks(n, coding, 800);
    let (a, b) = (n.between(1, 21), n.between(1, 9));
    let parts = vec![matrix(n, coding, a, cols)?, n.matrix(3, cols)?, matrix(n, coding, b, cols)?];
    rig::judge(backend, &rows::Linear::of(n, row_count, parts)).map_err(named("linear"))?;

    let (vocab, cols) = (n.between(1, 40), blocks(n, coding, 300));
    let table = matrix(n, coding, vocab, cols)?;
    rig::judge(backend, &rows::Embed::of(n, row_count, table, 2)).map_err(named("embed"))?;

    // Gate and up of one type, down of another where its blocks allow it: releases mix them.
    let (hidden, width) = (blocks(n, coding, 200), blocks(n, coding, 100));
    let down = n.pick(&all);
    let down = if width.is_multiple_of(block(down)) { down } else { coding };
    let mut expert = || -> Result<ExpertSource, String> {
        Ok(ExpertSource {
            gate: matrix(n, coding, width, hidden)?,
            up: matrix(n, coding, width, hidden)?,
            down: matrix(n, down, hidden, width)?,
        })
    };
    let held = vec![expert()?, expert()?, expert()?];
    rig::judge(backend, &rows::Experts::of(n, row_count, held, 2)).map_err(named("experts"))?;

    let hidden = blocks(n, coding, 150);
    let sites = [matrix(n, coding, 8, 2 * hidden)?, matrix(n, coding, 8, 2 * hidden)?];
    rig::judge(backend, &Mhc::of(n, row_count, 2, hidden, sites)).map_err(named("mhc"))?;

    let (heads, qk, v, latent) = (n.between(1, 3), n.between(1, 20), n.between(1, 20), blocks(n, coding, 90));
    let kv_b = matrix(n, coding, heads * (qk + v), latent)?;
    let plan = sequences::Plan::random(n, 3, 40);
    let case = mla::Attend::of(n.seed(), kv_b, heads, qk);
    sequences::judge(backend, &case, &plan, n.seed() >> 1).map_err(named("mla_attend"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::SEEDS;

    #[test]
    fn the_suite_reaches_every_coding() {
        assert!(codings().len() as u64 <= SEEDS.end, "{} codings", codings().len());
    }

    #[test]
    fn matrices_are_finite_and_mostly_not_zero() {
        for (i, coding) in codings().into_iter().enumerate() {
            let n = &mut Noise::new(i as u64);
            let cols = 3 * block(coding).max(16);
            let values = matrix(n, coding, 7, cols).expect("fits").to_f32();
            let zeros = values.iter().filter(|v| **v == 0.0).count();
            assert!(values.iter().all(|v| v.is_finite() && v.abs() < 10.0), "{coding:?}");
            assert!(zeros < values.len() * 4 / 5, "{coding:?}: {zeros} zeros of {}", values.len());
        }
    }
}
