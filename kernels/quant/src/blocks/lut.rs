//! 4-bit codes through a table of sixteen values.

use super::{half_at, sink::Sink, u16_at};
use crate::float8::{e2m1, e8m0_half, ue4m3_half};

/// The value table of IQ4_NL and IQ4_XS.
pub const IQ4: [f32; 16] = [-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0];

/// E2M1 values, doubled so that they are whole (code 8, minus zero, is plain zero as in ggml); the scales of MXFP4 and NVFP4 blocks are halved in turn.
pub const E2M1_DOUBLED: [f32; 16] = [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0];

/// Packed pairs of safetensors: byte b holds element 2b in its low nibble and 2b + 1 in its high one. Scales lie beside them.
pub fn e2m1_pairs(bytes: &[u8], out: &mut [f32]) {
    for (byte, pair) in bytes.iter().zip(out.as_chunks_mut::<2>().0) {
        *pair = [e2m1(byte & 15), e2m1(byte >> 4)];
    }
}

/// A run of `2·bytes.len()` elements: low nibbles first, then high nibbles.
fn halves(bytes: &[u8], scale: f32, table: &[f32; 16], out: &mut [f32]) {
    let (low, high) = out.split_at_mut(bytes.len());
    for ((byte, l), h) in bytes.iter().zip(low).zip(high) {
        *l = scale * table[usize::from(byte & 15)];
        *h = scale * table[usize::from(byte >> 4)];
    }
}

/// IQ4_NL: f16 d, 16 bytes; 32 elements; y = d·table\[q\].
pub(crate) fn iq4_nl(block: &[u8], sink: &mut impl Sink) {
    iq4_pair(0, (half_at(block, 0), 1), &block[2..18], sink);
}

/// Runs `k` and `k + 1`: low nibbles, then high ones.
#[inline(always)]
fn iq4_pair(k: usize, d: (f32, i8), bytes: &[u8], sink: &mut impl Sink) {
    sink.looked_up(k, d, |l| bytes[l] & 15);
    sink.looked_up(k + 1, d, |l| bytes[l] >> 4);
}

/// IQ4_XS: f16 d, u16 high scale bits, 4 bytes of low scale nibbles, 128 bytes; 256 elements; y = d·(s − 32)·table\[q\].
pub(crate) fn iq4_xs(block: &[u8], sink: &mut impl Sink) {
    let (d, high) = (half_at(block, 0), u16_at(block, 2));
    for group in 0..8 {
        let low = block[4 + group / 2] >> (4 * (group % 2)) & 15;
        let scale = (low | ((high >> (2 * group) & 3) as u8) << 4).cast_signed() - 32;
        iq4_pair(2 * group, (d, scale), &block[8 + group * 16..24 + group * 16], sink);
    }
}

/// MXFP4: one E8M0 scale, 16 bytes; 32 elements.
pub fn mxfp4(block: &[u8], out: &mut [f32]) {
    halves(&block[1..17], e8m0_half(block[0]), &E2M1_DOUBLED, out);
}

/// NVFP4 as GGUF stores it: four UE4M3 scales, four runs of 8 bytes; 64 elements, each run 16 of them. The tensor's `.scale` comes on top.
pub fn nvfp4(block: &[u8], out: &mut [f32]) {
    for (group, run) in out.chunks_exact_mut(16).enumerate() {
        halves(&block[4 + group * 8..12 + group * 8], ue4m3_half(block[group]), &E2M1_DOUBLED, run);
    }
}
