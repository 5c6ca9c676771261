//! 8-bit floats: E4M3 weights and scales, UE4M3 (sign bit ignored) and E8M0 scales.

/// E4M3 in the "fn" form: no infinities, 0x7F and 0xFF are NaN, denormals below 2⁻⁶, largest value 448.
pub fn e4m3(byte: u8) -> f32 {
    let magnitude = byte & 0x7F;
    if magnitude == 0x7F {
        return f32::NAN;
    }
    let (exponent, mantissa) = (i32::from(magnitude >> 3), f32::from(magnitude & 7));
    let value = if exponent == 0 { mantissa * pow2(-9) } else { (8.0 + mantissa) * pow2(exponent - 10) };
    if byte & 0x80 == 0 { value } else { -value }
}

/// GGUF's NVFP4 scale byte, halved because its code values are doubled: 0 and anything above 0x7E mean zero (docs/checkpoints.md §5).
pub fn ue4m3_half(byte: u8) -> f32 {
    if byte == 0 || byte > 0x7E {
        return 0.0;
    }
    let (exponent, mantissa) = (i32::from(byte >> 3), f32::from(byte & 7));
    if exponent == 0 { mantissa * pow2(-10) } else { (8.0 + mantissa) * pow2(exponent - 11) }
}

/// MXFP4's E8M0 scale byte, halved because its code values are doubled: 2^(e−128), down to the denormals.
pub fn e8m0_half(byte: u8) -> f32 {
    match byte {
        0 | 1 => f32::from_bits(0x0020_0000 << byte),
        e => f32::from_bits((u32::from(e) - 1) << 23),
    }
}

/// 2^n for the exponents that 8-bit floats need.
fn pow2(n: i32) -> f32 {
    f32::from_bits(u32::try_from(127 + n).map_or(0, |e| e << 23))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e4m3_edges() {
        assert_eq!(e4m3(0x00).to_bits(), 0.0f32.to_bits());
        assert_eq!(e4m3(0x80).to_bits(), (-0.0f32).to_bits());
        assert_eq!((e4m3(0x01), e4m3(0x07), e4m3(0x08)), (2.0f32.powi(-9), 7.0 * 2.0f32.powi(-9), 2.0f32.powi(-6)));
        assert_eq!((e4m3(0x38), e4m3(0x7E), e4m3(0xFE)), (1.0, 448.0, -448.0));
        assert!(e4m3(0x7F).is_nan() && e4m3(0xFF).is_nan());
    }

    #[test]
    fn scale_edges() {
        assert_eq!((ue4m3_half(0), ue4m3_half(0x7F), ue4m3_half(0xFF)), (0.0, 0.0, 0.0));
        for byte in 1..=0x7E {
            assert_eq!(ue4m3_half(byte), e4m3(byte) / 2.0, "{byte:#x}");
        }
        assert_eq!(e8m0_half(0), 2.0f32.powi(-126) / 4.0);
        assert_eq!(
            (e8m0_half(1), e8m0_half(2), e8m0_half(128), e8m0_half(255)),
            (2.0f32.powi(-126) / 2.0, 2.0f32.powi(-126), 1.0, 2.0f32.powi(127))
        );
    }
}
