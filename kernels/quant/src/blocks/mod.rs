//! Scalar dequantisation of block-quantised types, bit-exact against ggml's reference (docs/checkpoints.md §5).
//!
//! | module | types |
//! |---|---|
//! | [`legacy`] | Q4_0 Q4_1 Q5_0 Q5_1 Q8_0: 32 elements, one scale |
//! | [`k`] | Q2_K … Q6_K: 256 elements, scales of scales |
//! | [`iq`] | IQ1 … IQ3: 256 elements, entries of a codebook of lattice points |
//! | [`lut`] | IQ4_NL IQ4_XS MXFP4 NVFP4: 4-bit codes through a table of 16 values |
//!
//! Every function takes one block and gives its elements in order, as f32 or to a sink (`sink.rs`). Products are never fused, as the reference does not fuse them.

pub mod iq;
pub mod k;
pub mod legacy;
pub mod lut;
pub(crate) mod sink;

use half::f16;

/// The little-endian f16 at `at`.
fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// The little-endian u16 at `at`.
fn u16_at(block: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([block[at], block[at + 1]])
}

/// The little-endian u32 at `at`.
fn u32_at(block: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([block[at], block[at + 1], block[at + 2], block[at + 3]])
}
