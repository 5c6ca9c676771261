//! The 32-element types with one scale (and perhaps one minimum) a block.

use super::{half_at, sink::Sink, u32_at};

/// Half of the elements of a block: a run.
const HALF: usize = 16;

/// Q4_0: f16 d, 16 bytes; low nibbles are elements 0–15, high nibbles 16–31; y = d·(q − 8).
pub(crate) fn q4_0(block: &[u8], sink: &mut impl Sink) {
    let (d, nibbles) = (half_at(block, 0), &block[2..18]);
    sink.centred(0, (d, 1), 8, |l| nibbles[l] & 15);
    sink.centred(1, (d, 1), 8, |l| nibbles[l] >> 4);
}

/// Q4_1: f16 d, f16 m, 16 bytes; y = d·q + m.
pub(crate) fn q4_1(block: &[u8], sink: &mut impl Sink) {
    let (d, m, nibbles) = (half_at(block, 0), half_at(block, 2), &block[4..20]);
    sink.affine(0, (d, 1), (-m, 1), |l| nibbles[l] & 15);
    sink.affine(1, (d, 1), (-m, 1), |l| nibbles[l] >> 4);
}

/// Code `i` of Q5_0 and Q5_1: a nibble with bit i of `high` on top.
fn five_bits(high: u32, nibbles: &[u8], i: usize) -> u8 {
    (nibbles[i % HALF] >> (i / HALF * 4) & 15) | ((high >> i & 1) as u8) << 4
}

/// Q5_0: f16 d, u32 high bits, 16 bytes; y = d·(q − 16).
pub(crate) fn q5_0(block: &[u8], sink: &mut impl Sink) {
    let (d, high, nibbles) = (half_at(block, 0), u32_at(block, 2), &block[6..22]);
    for k in 0..2 {
        sink.centred(k, (d, 1), 16, |l| five_bits(high, nibbles, k * HALF + l));
    }
}

/// Q5_1: f16 d, f16 m, u32 high bits, 16 bytes; y = d·q + m.
pub(crate) fn q5_1(block: &[u8], sink: &mut impl Sink) {
    let (d, m, high, nibbles) = (half_at(block, 0), half_at(block, 2), u32_at(block, 4), &block[8..24]);
    for k in 0..2 {
        sink.affine(k, (d, 1), (-m, 1), |l| five_bits(high, nibbles, k * HALF + l));
    }
}

/// Q8_0: f16 d, 32 i8; y = d·q.
pub fn q8_0(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 0);
    for (o, byte) in out.iter_mut().zip(&block[2..34]) {
        *o = d * f32::from(byte.cast_signed());
    }
}
