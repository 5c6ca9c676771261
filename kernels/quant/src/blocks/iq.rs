//! The codebook types: 256 elements made of lattice points with signs.

use super::{half_at, sink::Sink, u16_at, u32_at};

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

/// The whole scale of a scale nibble: all these types scale by odd numbers.
fn odd(nibble: u8) -> u8 {
    2 * nibble + 1
}

/// Coordinates of point `index` in a grid of points of eight coordinates.
#[inline(always)]
fn point(grid: &'static [u8], index: usize) -> &'static [u8; 8] {
    &grid.as_chunks().0[index]
}

/// Two points of a grid of points of four coordinates.
#[inline(always)]
fn pair(grid: &'static [u8], a: usize, b: usize) -> [u8; 8] {
    let points: &[[u8; 4]] = grid.as_chunks().0;
    let ([a0, a1, a2, a3], [b0, b1, b2, b3]) = (points[a], points[b]);
    [a0, a1, a2, a3, b0, b1, b2, b3]
}

/// IQ2_XXS: f16 d; per 32 elements four grid bytes and a u32 of four 7-bit sign indices under a 4-bit scale.
pub(crate) fn iq2_xxs(block: &[u8], sink: &mut impl Sink) {
    let d = half_at(block, 0);
    for group in 0..8 {
        let at = 2 + group * 8;
        let packed = u32_at(block, at + 4);
        let scale = (d, odd((packed >> 28) as u8));
        for k in 0..4 {
            let p = point(IQ2_XXS_GRID, usize::from(block[at + k]));
            sink.signed(group * 32 + k * 8, scale, 0.125, p, signs(packed >> (7 * k)));
        }
    }
}

/// IQ2_XS: f16 d; 32 u16 of a 9-bit point and a 7-bit sign index; 8 bytes of scale nibbles, one per 16 elements.
pub(crate) fn iq2_xs(block: &[u8], sink: &mut impl Sink) {
    let d = half_at(block, 0);
    for k in 0..32 {
        let code = u16_at(block, 2 + 2 * k);
        let nibble = block[66 + k / 4] >> (4 * (k / 2 % 2)) & 15;
        sink.signed(k * 8, (d, odd(nibble)), 0.125, point(IQ2_XS_GRID, usize::from(code & 511)), signs(u32::from(code >> 9)));
    }
}

/// IQ2_S: f16 d; 32 low index bytes, 32 sign bytes, 8 bytes of high index bits, 8 bytes of scale nibbles.
pub(crate) fn iq2_s(block: &[u8], sink: &mut impl Sink) {
    let d = half_at(block, 0);
    for k in 0..32 {
        let high = usize::from(block[66 + k / 4] >> (2 * (k % 4)) & 3);
        let index = usize::from(block[2 + k]) | high << 8;
        let nibble = block[74 + k / 4] >> (4 * (k / 2 % 2)) & 15;
        sink.signed(k * 8, (d, odd(nibble)), 0.125, point(IQ2_S_GRID, index), block[34 + k]);
    }
}

/// IQ3_XXS: f16 d; 64 grid bytes of 4 elements each; per 32 elements a u32 of sign indices and scale as in IQ2_XXS.
pub(crate) fn iq3_xxs(block: &[u8], sink: &mut impl Sink) {
    let d = half_at(block, 0);
    for group in 0..8 {
        let packed = u32_at(block, 66 + group * 4);
        let scale = (d, odd((packed >> 28) as u8));
        for k in 0..4 {
            let negative = signs(packed >> (7 * k));
            let at = 2 + group * 8 + k * 2;
            let p = pair(IQ3_XXS_GRID, usize::from(block[at]), usize::from(block[at + 1]));
            sink.signed(group * 32 + k * 8, scale, 0.25, &p, negative);
        }
    }
}

/// IQ3_S: f16 d; 64 low index bytes, 8 bytes of ninth bits, 32 sign bytes, 4 bytes of scale nibbles, one per 32 elements.
pub(crate) fn iq3_s(block: &[u8], sink: &mut impl Sink) {
    let d = half_at(block, 0);
    for k in 0..32 {
        let ninth = usize::from(block[66 + k / 4] >> (2 * (k % 4)) & 3);
        let (a, b) = (usize::from(block[2 + 2 * k]) | ninth << 8 & 256, usize::from(block[3 + 2 * k]) | ninth << 7 & 256);
        let nibble = block[106 + k / 8] >> (4 * (k / 4 % 2)) & 15;
        sink.signed(k * 8, (d, odd(nibble)), 1.0, &pair(IQ3_S_GRID, a, b), block[74 + k]);
    }
}

/// IQ1_S: f16 d; 32 low index bytes; per 32 elements a u16: four 3-bit high indices, 3-bit scale, sign of the shift.
pub(crate) fn iq1_s(block: &[u8], sink: &mut impl Sink) {
    let d = half_at(block, 0);
    for group in 0..8 {
        let packed = u16_at(block, 34 + group * 2);
        let scale = (d, odd((packed >> 12 & 7) as u8));
        let place = |l: usize| point(IQ1_GRID, usize::from(block[2 + group * 4 + l]) | usize::from(packed >> (3 * l) & 7) << 8);
        for half in 0..2 {
            sink.shifted(2 * group + half, scale, [packed & 0x8000 != 0; 2], [place(2 * half), place(2 * half + 1)]);
        }
    }
}

/// IQ1_M: 32 low index bytes, 16 bytes of (3 high bits, shift sign) nibbles, 4 u16 of scales whose top nibbles make the f16 d.
pub(crate) fn iq1_m(block: &[u8], sink: &mut impl Sink) {
    let scales = [u16_at(block, 48), u16_at(block, 50), u16_at(block, 52), u16_at(block, 54)];
    let bits = scales.iter().enumerate().fold(0u16, |d, (i, s)| d | (s >> 12) << (4 * i));
    let d = half::f16::from_bits(bits).to_f32();
    for sixteen in 0..16 {
        let scale = (scales[sixteen / 4] >> (3 * (sixteen % 4)) & 7) as u8;
        let codes = [block[32 + sixteen] & 15, block[32 + sixteen] >> 4];
        let place = |i: usize| point(IQ1_GRID, usize::from(block[2 * sixteen + i]) | usize::from(codes[i] & 7) << 8);
        sink.shifted(sixteen, (d, odd(scale)), codes.map(|code| code & 8 != 0), [place(0), place(1)]);
    }
}
