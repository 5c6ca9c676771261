//! The K types: 256 elements in 8 or 16 groups whose scales are themselves quantised.

use super::half_at;

/// Element `i` of a run of 2-bit fields: 32 bytes hold 128 elements, field j of each byte the j-th 32 of them.
fn two_bits(bytes: &[u8], i: usize) -> u8 {
    let (half, rest) = (i / 128, i % 128);
    bytes[half * 32 + rest % 32] >> (2 * (rest / 32)) & 3
}

/// Q2_K: 16 bytes of (scale low nibble, minimum high nibble), 64 bytes of 2-bit codes, f16 d, f16 dmin; y = d·s·q − dmin·m.
pub fn q2_k(block: &[u8], out: &mut [f32]) {
    let (d, dmin) = (half_at(block, 80), half_at(block, 82));
    for (i, o) in out.iter_mut().enumerate() {
        let scale = block[i / 16];
        let (s, m) = (d * f32::from(scale & 15), dmin * f32::from(scale >> 4));
        *o = s * f32::from(two_bits(&block[16..80], i)) - m;
    }
}

/// Q3_K: 32 bytes of high bits, 64 bytes of 2-bit codes, 12 bytes of 6-bit scales, f16 d; y = d·(s − 32)·(q − 4·!h).
pub fn q3_k(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 108);
    let packed = &block[96..108];
    for (i, o) in out.iter_mut().enumerate() {
        let k = i / 16;
        let low = if k < 8 { packed[k] & 15 } else { packed[k - 8] >> 4 };
        let high = packed[8 + k % 4] >> (2 * (k / 4)) & 3;
        let scale = d * f32::from(i16::from(low | high << 4) - 32);
        let keep = block[i % 32] >> (i / 32) & 1 == 1;
        let q = i16::from(two_bits(&block[32..96], i)) - if keep { 0 } else { 4 };
        *o = scale * f32::from(q);
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

/// Nibble of element `i` where each 32 bytes hold two groups of 32: the low nibbles, then the high ones.
fn nibble(bytes: &[u8], i: usize) -> u8 {
    let byte = bytes[i / 64 * 32 + i % 32];
    if i % 64 < 32 { byte & 15 } else { byte >> 4 }
}

/// Q4_K: f16 d, f16 dmin, 12 bytes of scales, 128 bytes of nibbles; y = d·s·q − dmin·m.
pub fn q4_k(block: &[u8], out: &mut [f32]) {
    let (d, dmin) = (half_at(block, 0), half_at(block, 2));
    for (i, o) in out.iter_mut().enumerate() {
        let (s, m) = scale_min(&block[4..16], i / 32);
        *o = d * f32::from(s) * f32::from(nibble(&block[16..144], i)) - dmin * f32::from(m);
    }
}

/// Q5_K: as Q4_K with 32 bytes of fifth bits (bit j of byte l for element l of group j) before the nibbles.
pub fn q5_k(block: &[u8], out: &mut [f32]) {
    let (d, dmin) = (half_at(block, 0), half_at(block, 2));
    for (i, o) in out.iter_mut().enumerate() {
        let (s, m) = scale_min(&block[4..16], i / 32);
        let fifth = block[16 + i % 32] >> (i / 32) & 1;
        let q = nibble(&block[48..176], i) | fifth << 4;
        *o = d * f32::from(s) * f32::from(q) - dmin * f32::from(m);
    }
}

/// Q6_K: 128 bytes of low nibbles, 64 bytes of high bits, 16 i8 scales, f16 d; y = d·s·(q − 32).
pub fn q6_k(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 208);
    for (i, o) in out.iter_mut().enumerate() {
        let (half, rest) = (i / 128, i % 128);
        let low = block[half * 64 + rest % 64];
        let low = if rest < 64 { low & 15 } else { low >> 4 };
        let high = two_bits(&block[128..192], i);
        let scale = d * f32::from(block[192 + i / 16].cast_signed());
        *o = scale * f32::from(i16::from(low | high << 4) - 32);
    }
}
