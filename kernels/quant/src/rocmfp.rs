//! ROCmFP's mixed types 105 (3 bits) and 106 (2 bits): 32 elements, one meta byte per 16 of them, levels fixed or from a codebook that
//! lies in a sidecar (docs/checkpoints.md §5.1).
//!
//! | | 105 | 106 |
//! |---|---|---|
//! | bytes of a block | 12 of codes, 2 of meta | 8 of codes, 2 of meta |
//! | codes | 3 bits, LSB first | 2 bits, LSB first |
//! | fixed levels | {0, 1, 2, 4}, bit 2 of the code is the sign | code − 1 |

use crate::{DType, float8::ue4m3_half};

/// Levels of one expert's matrix.
#[derive(Clone, Debug, PartialEq)]
pub enum Levels {
    /// Mode 0: the levels of the type; the whole meta byte is the scale.
    Fixed,
    /// Mode 1: two books of levels (8 or 4 each); bit 7 of the meta byte chooses, the rest is the scale.
    Books([Vec<f32>; 2]),
}

/// Elements under one meta byte.
const HALF: usize = 16;

/// Bits of a code.
const fn bits(dtype: DType) -> usize {
    if matches!(dtype, DType::RocmFp3Mix) { 3 } else { 2 }
}

/// Levels in a book of the type.
pub const fn book_len(dtype: DType) -> usize {
    1 << bits(dtype)
}

/// Writes whole blocks of type 105 or 106 as f32.
///
/// # Panics
/// Where `bytes` and `out` are not the same number of blocks, or a book has not [`book_len`] levels.
pub fn dequantize(dtype: DType, levels: &Levels, bytes: &[u8], out: &mut [f32]) {
    assert_eq!(Some(bytes.len()), dtype.row_bytes(out.len()), "{dtype}: {} elements", out.len());
    let width = bits(dtype);
    let code_bytes = 32 * width / 8;
    for (block, out) in bytes.chunks_exact(dtype.block_bytes()).zip(out.chunks_exact_mut(32)) {
        let mut stream = [0; 16];
        stream[..code_bytes].copy_from_slice(&block[..code_bytes]);
        let stream = u128::from_le_bytes(stream);
        for (i, o) in out.iter_mut().enumerate() {
            let code = usize::try_from(stream >> (i * width) & ((1 << width) - 1)).unwrap_or(0);
            let meta = block[code_bytes + i / HALF];
            *o = match levels {
                Levels::Fixed => ue4m3_half(meta) * fixed(dtype, code),
                Levels::Books(books) => ue4m3_half(meta & 0x7F) * books[usize::from(meta >> 7)][code],
            };
        }
    }
}

fn fixed(dtype: DType, code: usize) -> f32 {
    match dtype {
        DType::RocmFp3Mix => {
            let magnitude = [0.0, 1.0, 2.0, 4.0][code & 3];
            if code & 4 == 0 { magnitude } else { -magnitude }
        }
        _ => [-1.0, 0.0, 1.0, 2.0][code],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_bit_codes_run_on_across_bytes() {
        // Codes 0..8 four times: each group of 8 codes is the 24-bit number 0o76543210.
        let mut block: Vec<u8> = [0x88, 0xC6, 0xFA].repeat(4);
        block.extend([0x38, 0x40]); // scales ½·1 and ½·2
        let mut out = [0.0; 32];
        dequantize(DType::RocmFp3Mix, &Levels::Fixed, &block, &mut out);
        let levels = [0.0, 1.0, 2.0, 4.0, -0.0, -1.0, -2.0, -4.0];
        for (i, o) in out.iter().enumerate() {
            assert_eq!(*o, levels[i % 8] * if i < 16 { 0.5 } else { 1.0 }, "{i}");
        }
        let books = Levels::Books([(0..8).map(|i| i as f32).collect(), (0..8).map(|i| -(i as f32)).collect()]);
        block[13] = 0x80 | 0x38;
        dequantize(DType::RocmFp3Mix, &books, &block, &mut out);
        assert_eq!((out[3], out[19]), (1.5, -1.5));
    }

    #[test]
    fn two_bit_codes_take_the_low_pair_first() {
        let mut block = vec![0b11_10_01_00; 8];
        block.extend([0x38, 0x7F]); // ½·1, and above 0x7E: zero
        let mut out = [9.0; 32];
        dequantize(DType::RocmFp2Mix, &Levels::Fixed, &block, &mut out);
        assert_eq!(out[..4], [-0.5, 0.0, 0.5, 1.0]);
        assert!(out[16..].iter().all(|o| *o == 0.0));
        let books = Levels::Books([vec![1.0, 2.0, 3.0, 4.0], vec![5.0, 6.0, 7.0, 8.0]]);
        block[9] = 0x80 | 0x40;
        dequantize(DType::RocmFp2Mix, &books, &block, &mut out);
        assert_eq!((out[1], out[17]), (1.0, 6.0));
    }
}
