//! The K types: 256 elements in 8 or 16 groups whose scales are themselves quantised.
//!
//! Each function goes run by run through elements whose codes lie in one field of consecutive bytes, so that the compiler can take many
//! at a time.

use super::half_at;

/// Elements of a run that shares its scale in Q2_K, Q3_K and Q6_K.
const RUN: usize = 16;

/// `out = scale · code − minimum`.
fn affine(codes: impl Fn(usize) -> u8, scale: f32, minimum: f32, out: &mut [f32]) {
    for (l, o) in out.iter_mut().enumerate() {
        *o = scale * f32::from(codes(l)) - minimum;
    }
}

/// `out = scale · (code − offset)`.
fn centred(codes: impl Fn(usize) -> i16, scale: f32, out: &mut [f32]) {
    for (l, o) in out.iter_mut().enumerate() {
        *o = scale * f32::from(codes(l));
    }
}

/// The 16 bytes of 2-bit fields that hold run `k` of 16 elements, and the field: 32 bytes hold 128 elements, field j of each byte the j-th
/// 32 of them.
fn two_bits(bytes: &[u8], k: usize) -> (&[u8], usize) {
    let (half, rest) = (k / 8, k % 8);
    (&bytes[half * 32 + rest % 2 * RUN..][..RUN], 2 * (rest / 2))
}

/// Q2_K: 16 bytes of (scale low nibble, minimum high nibble), 64 bytes of 2-bit codes, f16 d, f16 dmin; y = d·s·q − dmin·m.
pub fn q2_k(block: &[u8], out: &mut [f32]) {
    let (d, dmin) = (half_at(block, 80), half_at(block, 82));
    for (k, run) in out.as_chunks_mut::<RUN>().0.iter_mut().enumerate() {
        let (codes, shift) = two_bits(&block[16..80], k);
        let (s, m) = (d * f32::from(block[k] & 15), dmin * f32::from(block[k] >> 4));
        affine(|l| codes[l] >> shift & 3, s, m, run);
    }
}

/// Q3_K: 32 bytes of high bits, 64 bytes of 2-bit codes, 12 bytes of 6-bit scales, f16 d; y = d·(s − 32)·(q − 4·!h).
pub fn q3_k(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 108);
    let packed = &block[96..108];
    for (k, run) in out.as_chunks_mut::<RUN>().0.iter_mut().enumerate() {
        let low = if k < 8 { packed[k] & 15 } else { packed[k - 8] >> 4 };
        let high = packed[8 + k % 4] >> (2 * (k / 4)) & 3;
        let scale = d * f32::from(i16::from(low | high << 4) - 32);
        let (codes, shift) = two_bits(&block[32..96], k);
        let (keep, bit) = (&block[k % 2 * RUN..][..RUN], k / 2);
        centred(|l| i16::from((codes[l] >> shift & 3) | (keep[l] >> bit & 1) << 2) - 4, scale, run);
    }
}

/// The 6-bit (scale, minimum) pair of group `j` in Q4_K's and Q5_K's 12 packed bytes.
pub fn scale_min(packed: &[u8], j: usize) -> (u8, u8) {
    if j < 4 {
        (packed[j] & 63, packed[j + 4] & 63)
    } else {
        (packed[j + 4] & 15 | packed[j - 4] >> 6 << 4, packed[j + 4] >> 4 | packed[j] >> 6 << 4)
    }
}

/// Scale and minimum of group `j` of 32 elements, and its nibbles: each 32 bytes hold two groups, the low nibbles, then the high ones.
fn group<'a>(block: &'a [u8], nibbles: &'a [u8], j: usize) -> (f32, f32, &'a [u8], usize) {
    let (d, dmin) = (half_at(block, 0), half_at(block, 2));
    let (s, m) = scale_min(&block[4..16], j);
    (d * f32::from(s), dmin * f32::from(m), &nibbles[j / 2 * 32..][..32], 4 * (j % 2))
}

/// Q4_K: f16 d, f16 dmin, 12 bytes of scales, 128 bytes of nibbles; y = d·s·q − dmin·m.
pub fn q4_k(block: &[u8], out: &mut [f32]) {
    for (j, run) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (s, m, nibbles, shift) = group(block, &block[16..144], j);
        affine(|l| nibbles[l] >> shift & 15, s, m, run);
    }
}

/// Q5_K: as Q4_K with 32 bytes of fifth bits (bit j of byte l for element l of group j) before the nibbles.
pub fn q5_k(block: &[u8], out: &mut [f32]) {
    let fifths = &block[16..48];
    for (j, run) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (s, m, nibbles, shift) = group(block, &block[48..176], j);
        affine(|l| (nibbles[l] >> shift & 15) | (fifths[l] >> j & 1) << 4, s, m, run);
    }
}

/// Q6_K: 128 bytes of low nibbles, 64 bytes of high bits, 16 i8 scales, f16 d; y = d·s·(q − 32).
pub fn q6_k(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 208);
    for (k, run) in out.as_chunks_mut::<RUN>().0.iter_mut().enumerate() {
        let (half, rest) = (k / 8, k % 8);
        let (low, nibble) = (&block[half * 64 + rest % 4 * RUN..][..RUN], 4 * (rest / 4));
        let (high, shift) = two_bits(&block[128..192], k);
        let scale = d * f32::from(block[192 + k].cast_signed());
        centred(|l| i16::from((low[l] >> nibble & 15) | (high[l] >> shift & 3) << 4) - 32, scale, run);
    }
}
