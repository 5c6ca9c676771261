//! 8-bit floats: E4M3 weights and scales, UE4M3 and E8M0 scales.
//!
//! | byte | E4M3 (safetensors) | UE4M3 (GGUF's NVFP4) | E8M0 beside elements | E8M0 in GGUF's MXFP4 blocks |
//! |---|---|---|---|---|
//! | 0x00 | 0 | 0 | 2⁻¹²⁷ (denormal) | 2⁻¹²⁷ (denormal) |
//! | 0x01 | 2⁻⁹ (denormal) | 2⁻⁹ | 2⁻¹²⁶ | 2⁻¹²⁶ |
//! | 0x7F | NaN | 0 | 1 | 1 |
//! | 0x80 | −0 | 0 | 2 | 2 |
//! | 0xFF | NaN | 0 | NaN | 2¹²⁸ over codes halved, as ggml has it |

/// A small float of `mantissa` mantissa bits and exponent offset `offset`, from its bits without the sign. Exponent and mantissa go where
/// f32 has them, and the exponent is moved; a denormal takes the next exponent's leading one, which is then taken off again. No value on the
/// way is an f32 denormal: those cost a hundred cycles.
#[inline(always)]
fn widen(magnitude: u32, mantissa: u32, offset: u32) -> f32 {
    let bits = magnitude << (23 - mantissa);
    let normal = f32::from_bits(bits + ((127 - offset) << 23));
    let denormal = f32::from_bits(bits + ((128 - offset) << 23)) - f32::from_bits((128 - offset) << 23);
    if magnitude >> mantissa == 0 { denormal } else { normal }
}

/// E4M3 in the "fn" form: no infinities, 0x7F and 0xFF are NaN, denormals below 2⁻⁶, largest value 448.
#[inline]
pub fn e4m3(byte: u8) -> f32 {
    let magnitude = u32::from(byte & 0x7F);
    let value = if magnitude == 0x7F { f32::NAN } else { widen(magnitude, 3, 7) };
    f32::from_bits(value.to_bits() | u32::from(byte & 0x80) << 24)
}

/// The E4M3 byte next to a value (ties to the even one); beyond 448 the largest. NaN stays NaN.
pub fn to_e4m3(x: f32) -> u8 {
    let sign = if x.is_sign_negative() { 0x80 } else { 0 };
    let abs = x.abs();
    if abs.is_nan() {
        return sign | 0x7F;
    }
    if abs < 2.0f32.powi(-6) {
        // Denormals, in units of 2⁻⁹; eight of them are the smallest normal number, whose byte follows.
        return sign | (abs * 512.0).round_ties_even() as u8;
    }
    let bits = abs.min(448.0).to_bits();
    // Half of the last kept bit, less one unless that bit is odd: ties go to the even byte, and a carry runs into the exponent.
    let rounded = (bits + 0x7_FFFF + (bits >> 20 & 1)) >> 20;
    sign | (rounded - (120 << 3)).min(0x7E) as u8
}

/// E2M1, in the low four bits of a byte: sign, two exponent bits, one mantissa bit.
#[inline]
pub fn e2m1(code: u8) -> f32 {
    f32::from_bits(widen(u32::from(code & 7), 1, 1).to_bits() | u32::from(code & 8) << 28)
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

/// E8M0 as the OCP microscaling formats define it: 2^(byte − 127), 0xFF is NaN.
pub fn e8m0(byte: u8) -> f32 {
    if byte == 0xFF { f32::NAN } else { 2.0 * e8m0_half(byte) }
}

/// 2^n for the exponents that 8-bit floats need, all of them far from f32's own limits.
const fn pow2(n: i32) -> f32 {
    f32::from_bits(((127 + n) as u32) << 23)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e4m3_bytes_are_the_nearest() {
        for byte in (0..=255u8).filter(|b| b & 0x7F != 0x7F) {
            assert_eq!(to_e4m3(e4m3(byte)), byte, "{byte:#x}");
        }
        assert!(e4m3(to_e4m3(f32::NAN)).is_nan());
        assert_eq!((to_e4m3(1e9), to_e4m3(-1e9), to_e4m3(1e-9)), (0x7E, 0xFE, 0));
        for low in 0..0x7Eu8 {
            let (a, b) = (e4m3(low), e4m3(low + 1));
            let middle = (a + b) / 2.0;
            let even = low + (low & 1);
            assert_eq!((to_e4m3(middle), to_e4m3(middle - (b - a) / 64.0), to_e4m3(middle + (b - a) / 64.0)), (even, low, low + 1));
        }
    }

    #[test]
    fn e4m3_edges() {
        assert_eq!(e4m3(0x00).to_bits(), 0.0f32.to_bits());
        assert_eq!(e4m3(0x80).to_bits(), (-0.0f32).to_bits());
        assert_eq!((e4m3(0x01), e4m3(0x07), e4m3(0x08)), (2.0f32.powi(-9), 7.0 * 2.0f32.powi(-9), 2.0f32.powi(-6)));
        assert_eq!((e4m3(0x38), e4m3(0x7E), e4m3(0xFE)), (1.0, 448.0, -448.0));
        assert!(e4m3(0x7F).is_nan() && e4m3(0xFF).is_nan());
    }

    #[test]
    fn e2m1_codes() {
        let values = [0.0f32, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        for (code, value) in values.iter().enumerate() {
            assert_eq!(e2m1(code as u8).to_bits(), value.to_bits());
            assert_eq!(e2m1(code as u8 | 8).to_bits(), (-value).to_bits());
        }
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
        assert_eq!((e8m0(0), e8m0(1), e8m0(127), e8m0(254)), (2.0f32.powi(-126) / 2.0, 2.0f32.powi(-126), 1.0, 2.0f32.powi(127)));
        assert!(e8m0(255).is_nan());
    }
}
