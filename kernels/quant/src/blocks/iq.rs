//! The codebook types: 256 elements made of lattice points with signs.

use super::{half_at, u16_at, u32_at};

/// 256 points of 8 coordinates (IQ2_XXS). Provenance of all grids: ggml's published tables, as int8, row-major.
static IQ2_XXS_GRID: &[u8; 256 * 8] = include_bytes!("../grids/iq2_xxs_grid_i8.bin");
/// 512 points of 8 coordinates.
static IQ2_XS_GRID: &[u8; 512 * 8] = include_bytes!("../grids/iq2_xs_grid_i8.bin");
/// 1024 points of 8 coordinates.
static IQ2_S_GRID: &[u8; 1024 * 8] = include_bytes!("../grids/iq2_s_grid_i8.bin");
/// 256 points of 4 coordinates.
static IQ3_XXS_GRID: &[u8; 256 * 4] = include_bytes!("../grids/iq3_xxs_grid_i8.bin");
/// 512 points of 4 coordinates.
static IQ3_S_GRID: &[u8; 512 * 4] = include_bytes!("../grids/iq3_s_grid_i8.bin");
/// 2048 points of 8 coordinates in {−1, 0, 1} (IQ1_S and IQ1_M).
static IQ1_GRID: &[u8; 2048 * 8] = include_bytes!("../grids/iq1_s_grid_i8.bin");

/// The sign byte of a 7-bit sign index: its eighth bit makes the number of negative elements even.
fn signs(index: u32) -> u8 {
    let low = (index & 127) as u8;
    low | (low.count_ones() as u8 & 1) << 7
}

/// `out = scale · point · ±1`, bit i of `negative` for element i.
#[inline(always)]
fn signed<const N: usize>(scale: f32, point: &[u8; N], negative: u8, out: &mut [f32; N]) {
    for (i, (o, coordinate)) in out.iter_mut().zip(point).enumerate() {
        let sign = if negative & 1 << i == 0 { 0 } else { 1 << 31 };
        *o = f32::from_bits((scale * f32::from(coordinate.cast_signed())).to_bits() ^ sign);
    }
}

/// Coordinates of point `index` in a grid of points of N coordinates.
#[inline(always)]
fn point<const N: usize>(grid: &'static [u8], index: usize) -> &'static [u8; N] {
    &grid.as_chunks().0[index]
}

/// IQ2_XXS: f16 d; per 32 elements four grid bytes and a u32 of four 7-bit sign indices under a 4-bit scale.
pub fn iq2_xxs(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 0);
    for (group, run) in out.chunks_exact_mut(32).enumerate() {
        let at = 2 + group * 8;
        let packed = u32_at(block, at + 4);
        let scale = d * (0.5 + (packed >> 28) as f32) * 0.25;
        for (k, eight) in run.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let p = point(IQ2_XXS_GRID, usize::from(block[at + k]));
            signed(scale, p, signs(packed >> (7 * k)), eight);
        }
    }
}

/// IQ2_XS: f16 d; 32 u16 of a 9-bit point and a 7-bit sign index; 8 bytes of scale nibbles, one per 16 elements.
pub fn iq2_xs(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 0);
    for (k, eight) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let code = u16_at(block, 2 + 2 * k);
        let nibble = block[66 + k / 4] >> (4 * (k / 2 % 2)) & 15;
        let scale = d * (0.5 + f32::from(nibble)) * 0.25;
        signed(scale, point(IQ2_XS_GRID, usize::from(code & 511)), signs(u32::from(code >> 9)), eight);
    }
}

/// IQ2_S: f16 d; 32 low index bytes, 32 sign bytes, 8 bytes of high index bits, 8 bytes of scale nibbles.
pub fn iq2_s(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 0);
    for (k, eight) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let high = usize::from(block[66 + k / 4] >> (2 * (k % 4)) & 3);
        let index = usize::from(block[2 + k]) | high << 8;
        let nibble = block[74 + k / 4] >> (4 * (k / 2 % 2)) & 15;
        let scale = d * (0.5 + f32::from(nibble)) * 0.25;
        signed(scale, point(IQ2_S_GRID, index), block[34 + k], eight);
    }
}

/// IQ3_XXS: f16 d; 64 grid bytes of 4 elements each; per 32 elements a u32 of sign indices and scale as in IQ2_XXS.
pub fn iq3_xxs(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 0);
    for (group, run) in out.chunks_exact_mut(32).enumerate() {
        let packed = u32_at(block, 66 + group * 4);
        let scale = d * (0.5 + (packed >> 28) as f32) * 0.5;
        for (k, eight) in run.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let negative = signs(packed >> (7 * k));
            let at = 2 + group * 8 + k * 2;
            for (half, four) in eight.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                signed(scale, point(IQ3_XXS_GRID, usize::from(block[at + half])), negative >> (4 * half), four);
            }
        }
    }
}

/// IQ3_S: f16 d; 64 low index bytes, 8 bytes of ninth bits, 32 sign bytes, 4 bytes of scale nibbles, one per 32 elements.
pub fn iq3_s(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 0);
    for (k, four) in out.as_chunks_mut::<4>().0.iter_mut().enumerate() {
        let high = usize::from(block[66 + k / 8] >> (k % 8) & 1);
        let index = usize::from(block[2 + k]) | high << 8;
        let nibble = block[106 + k / 16] >> (4 * (k / 8 % 2)) & 15;
        let scale = d * (1.0 + 2.0 * f32::from(nibble));
        signed(scale, point(IQ3_S_GRID, index), block[74 + k / 2] >> (4 * (k % 2)), four);
    }
}

/// `out = scale · (point + delta)`.
#[inline(always)]
fn shifted(scale: f32, delta: f32, point: &[u8; 8], out: &mut [f32; 8]) {
    for (o, coordinate) in out.iter_mut().zip(point) {
        *o = scale * (f32::from(coordinate.cast_signed()) + delta);
    }
}

/// The shift of IQ1 points.
const DELTA: f32 = 0.125;

/// IQ1_S: f16 d; 32 low index bytes; per 32 elements a u16: four 3-bit high indices, 3-bit scale, sign of the shift.
pub fn iq1_s(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 0);
    for (group, run) in out.chunks_exact_mut(32).enumerate() {
        let packed = u16_at(block, 34 + group * 2);
        let scale = d * (2.0 * f32::from(packed >> 12 & 7) + 1.0);
        let delta = if packed & 0x8000 == 0 { DELTA } else { -DELTA };
        for (l, eight) in run.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let index = usize::from(block[2 + group * 4 + l]) | usize::from(packed >> (3 * l) & 7) << 8;
            shifted(scale, delta, point(IQ1_GRID, index), eight);
        }
    }
}

/// IQ1_M: 32 low index bytes, 16 bytes of (3 high bits, shift sign) nibbles, 4 u16 of scales whose top nibbles make the f16 d.
pub fn iq1_m(block: &[u8], out: &mut [f32]) {
    let scales = [u16_at(block, 48), u16_at(block, 50), u16_at(block, 52), u16_at(block, 54)];
    let bits = scales.iter().enumerate().fold(0u16, |d, (i, s)| d | (s >> 12) << (4 * i));
    let d = half::f16::from_bits(bits).to_f32();
    for (k, eight) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        let code = block[32 + k / 2] >> (4 * (k % 2)) & 15;
        let index = usize::from(block[k]) | usize::from(code & 7) << 8;
        let sixteen = k / 2;
        let scale = d * (2.0 * f32::from(scales[sixteen / 4] >> (3 * (sixteen % 4)) & 7) + 1.0);
        let delta = if code & 8 == 0 { DELTA } else { -DELTA };
        shifted(scale, delta, point(IQ1_GRID, index), eight);
    }
}
