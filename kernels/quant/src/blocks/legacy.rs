//! The 32-element types with one scale (and perhaps one minimum) a block.

use super::{half_at, u32_at};

/// Elements of a block.
const N: usize = 32;

/// Q4_0: f16 d, 16 bytes; low nibbles are elements 0–15, high nibbles 16–31; y = d·(q − 8).
pub fn q4_0(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 0);
    for (i, byte) in block[2..18].iter().enumerate() {
        out[i] = d * f32::from(i16::from(byte & 15) - 8);
        out[i + N / 2] = d * f32::from(i16::from(byte >> 4) - 8);
    }
}

/// Q4_1: f16 d, f16 m, 16 bytes; y = d·q + m.
pub fn q4_1(block: &[u8], out: &mut [f32]) {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    for (i, byte) in block[4..20].iter().enumerate() {
        out[i] = d * f32::from(byte & 15) + m;
        out[i + N / 2] = d * f32::from(byte >> 4) + m;
    }
}

/// The 5-bit codes of Q5_0 and Q5_1: nibbles with bit i of `high` on top of element i.
fn five_bits(high: u32, nibbles: &[u8]) -> [u8; N] {
    let mut codes = [0; N];
    for (i, byte) in nibbles.iter().enumerate().take(N / 2) {
        codes[i] = byte & 15 | ((high >> i & 1) as u8) << 4;
        codes[i + N / 2] = byte >> 4 | ((high >> (i + N / 2) & 1) as u8) << 4;
    }
    codes
}

/// Q5_0: f16 d, u32 high bits, 16 bytes; y = d·(q − 16).
pub fn q5_0(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 0);
    for (o, q) in out.iter_mut().zip(five_bits(u32_at(block, 2), &block[6..22])) {
        *o = d * f32::from(i16::from(q) - 16);
    }
}

/// Q5_1: f16 d, f16 m, u32 high bits, 16 bytes; y = d·q + m.
pub fn q5_1(block: &[u8], out: &mut [f32]) {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    for (o, q) in out.iter_mut().zip(five_bits(u32_at(block, 4), &block[8..24])) {
        *o = d * f32::from(q) + m;
    }
}

/// Q8_0: f16 d, 32 i8; y = d·q.
pub fn q8_0(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 0);
    for (o, byte) in out.iter_mut().zip(&block[2..34]) {
        *o = d * f32::from(byte.cast_signed());
    }
}
