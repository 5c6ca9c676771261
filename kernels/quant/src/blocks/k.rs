//! The K types: 256 elements in 8 or 16 groups whose scales are themselves quantised.
//!
//! Each function goes run by run through elements whose codes lie in one field of consecutive bytes, so that the compiler can take many
//! at a time.

use super::{
    half_at,
    sink::{RUN, Sink},
};

/// Runs of a block.
const RUNS: usize = 16;

/// The 16 bytes of 2-bit fields that hold run `k` of 16 elements, and the field: 32 bytes hold 128 elements, field j of each byte the j-th
/// 32 of them.
fn two_bits(bytes: &[u8], k: usize) -> (&[u8], usize) {
    let (half, rest) = (k / 8, k % 8);
    (&bytes[half * 32 + rest % 2 * RUN..][..RUN], 2 * (rest / 2))
}

/// Q2_K: 16 bytes of (scale low nibble, minimum high nibble), 64 bytes of 2-bit codes, f16 d, f16 dmin; y = d·s·q − dmin·m.
pub(crate) fn q2_k(block: &[u8], sink: &mut impl Sink) {
    let (d, dmin) = (half_at(block, 80), half_at(block, 82));
    for k in 0..RUNS {
        let (codes, shift) = two_bits(&block[16..80], k);
        sink.affine(k, (d, block[k] & 15), (dmin, block[k] >> 4), |l| codes[l] >> shift & 3);
    }
}

/// Q3_K: 32 bytes of high bits, 64 bytes of 2-bit codes, 12 bytes of 6-bit scales, f16 d; y = d·(s − 32)·(q − 4·!h).
pub(crate) fn q3_k(block: &[u8], sink: &mut impl Sink) {
    let d = half_at(block, 108);
    let packed = &block[96..108];
    for k in 0..RUNS {
        let low = if k < 8 { packed[k] & 15 } else { packed[k - 8] >> 4 };
        let high = packed[8 + k % 4] >> (2 * (k / 4)) & 3;
        let scale = (low | high << 4).cast_signed() - 32;
        let (codes, shift) = two_bits(&block[32..96], k);
        let (keep, bit) = (&block[k % 2 * RUN..][..RUN], k / 2);
        sink.centred(k, (d, scale), 4, |l| (codes[l] >> shift & 3) | (keep[l] >> bit & 1) << 2);
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

/// Gives Q4_K's and Q5_K's runs to a sink: 8 groups of two, each with a scale and a minimum; each 32 bytes of nibbles hold two groups, the low
/// nibbles, then the high ones. `fifths`: 32 bytes whose bit j is on top of group j's codes, or none.
#[inline(always)]
fn groups(block: &[u8], nibbles: &[u8], fifths: Option<&[u8]>, sink: &mut impl Sink) {
    let (d, dmin) = (half_at(block, 0), half_at(block, 2));
    for j in 0..8 {
        let (s, m) = scale_min(&block[4..16], j);
        let (bytes, shift) = (&nibbles[j / 2 * 32..][..32], 4 * (j % 2));
        for half in 0..2 {
            let (bytes, at) = (&bytes[half * RUN..][..RUN], half * RUN);
            let (k, s, m) = (2 * j + half, (d, s), (dmin, m));
            match fifths {
                Some(fifths) => {
                    let tops = &fifths[at..][..RUN];
                    sink.affine(k, s, m, |l| (bytes[l] >> shift & 15) | (tops[l] >> j & 1) << 4);
                }
                None => sink.affine(k, s, m, |l| bytes[l] >> shift & 15),
            }
        }
    }
}

/// Q4_K: f16 d, f16 dmin, 12 bytes of scales, 128 bytes of nibbles; y = d·s·q − dmin·m.
pub(crate) fn q4_k(block: &[u8], sink: &mut impl Sink) {
    groups(block, &block[16..144], None, sink);
}

/// Q5_K: as Q4_K with 32 bytes of fifth bits (bit j of byte l for element l of group j) before the nibbles.
pub(crate) fn q5_k(block: &[u8], sink: &mut impl Sink) {
    groups(block, &block[48..176], Some(&block[16..48]), sink);
}

/// Q6_K: 128 bytes of low nibbles, 64 bytes of high bits, 16 i8 scales, f16 d; y = d·s·(q − 32).
pub(crate) fn q6_k(block: &[u8], sink: &mut impl Sink) {
    let d = half_at(block, 208);
    for k in 0..RUNS {
        let (half, rest) = (k / 8, k % 8);
        let (low, nibble) = (&block[half * 64 + rest % 4 * RUN..][..RUN], 4 * (rest / 4));
        let (high, shift) = two_bits(&block[128..192], k);
        sink.centred(k, (d, block[192 + k].cast_signed()), 32, |l| (low[l] >> nibble & 15) | (high[l] >> shift & 3) << 4);
    }
}
