//! Made-up weights for a checkpoint whose files end behind their headers: speed and memory of a geometry can be measured without its weights.
//!
//! A tensor is a window into one pool of its type, at a place that its name chooses, so that hundreds of gigabytes cost the memory of the
//! largest tensor of each type. Values are small and finite: what they are makes no difference to a kernel's time, but a router must not
//! send all rows to the same experts, and no sum may overflow.
//!
//! | stored type | values |
//! |---|---|
//! | F32, F16, BF16 with two axes or more | uniform in ±0.02 |
//! | the same with one axis (norms, biases) | 1 |
//! | the same with none (factors of a tensor) | 0.01 |
//! | F8_E4M3 | ±0.125 … ±0.9375; as scales (`*_scale`) without the sign |
//! | U8 | random (packed FP4); as scales 2⁻⁷ (E8M0) |
//! | F8_E8M0 | 2⁻⁷ |
//! | ggml block types | zeros |
//!
//! Neighbours: `mod.rs` asks here instead of a file; [`crate::LoadFormat`] is the choice.

use std::collections::BTreeMap;

use ::safetensors::tensor::Dtype;
use half::{bf16, f16};
use tandem_quant::{DType, SharedBytes};

use super::{Entry, Stored};

/// Bytes of a pool beyond its largest tensor: places that a window can start at.
const SLACK: usize = 1 << 20;
/// Windows start at multiples of this.
const ALIGN: usize = 4096;
/// 2⁻⁷ as E8M0.
const E8M0_SMALL: u8 = 120;

/// What a pool is filled with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Fill {
    /// Floats of a type, small and random.
    Random(Float),
    /// Floats of a type, all the same.
    Constant(Float, Value),
    /// E4M3 of both signs, or positive.
    E4m3 { positive: bool },
    /// Any bytes.
    Bytes,
    /// One byte.
    Byte(u8),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Float {
    F32,
    F16,
    Bf16,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Value {
    One,
    Hundredth,
}

impl Float {
    fn write(self, value: f32, to: &mut Vec<u8>) {
        match self {
            Self::F32 => to.extend(value.to_le_bytes()),
            Self::F16 => to.extend(f16::from_f32(value).to_le_bytes()),
            Self::Bf16 => to.extend(bf16::from_f32(value).to_le_bytes()),
        }
    }
}

impl Fill {
    fn of(entry: &Entry) -> Self {
        let scale = entry.stored_name.ends_with("_scale");
        let float = match entry.stored.plain() {
            Some(DType::F32) => Float::F32,
            Some(DType::F16) => Float::F16,
            Some(DType::Bf16) => Float::Bf16,
            _ => {
                return match entry.stored {
                    Stored::Safetensors(Dtype::F8_E4M3) => Self::E4m3 { positive: scale },
                    Stored::Safetensors(Dtype::F8_E8M0) => Self::Byte(E8M0_SMALL),
                    Stored::Safetensors(Dtype::U8) if scale => Self::Byte(E8M0_SMALL),
                    Stored::Safetensors(Dtype::U8) => Self::Bytes,
                    _ => Self::Byte(0),
                };
            }
        };
        match entry.shape.iter().filter(|n| **n != 1).count() {
            0 => Self::Constant(float, Value::Hundredth),
            1 => Self::Constant(float, Value::One),
            _ => Self::Random(float),
        }
    }

    fn pool(self, bytes: usize) -> Vec<u8> {
        let mut pool = Vec::with_capacity(bytes + 8);
        let mut state = 1u64;
        while pool.len() < bytes {
            match self {
                Self::Byte(byte) => pool.resize(bytes, byte),
                Self::Constant(float, value) => float.write(if value == Value::One { 1.0 } else { 0.01 }, &mut pool),
                Self::Random(float) => {
                    let [a, b] = halves(next(&mut state));
                    float.write((a as f32 / (1u64 << 31) as f32 - 1.0) * 0.02, &mut pool);
                    float.write((b as f32 / (1u64 << 31) as f32 - 1.0) * 0.02, &mut pool);
                }
                Self::Bytes => pool.extend(next(&mut state).to_le_bytes()),
                Self::E4m3 { positive } => {
                    // Exponents −3 to −1, any mantissa.
                    let codes = next(&mut state).to_le_bytes().map(|b| 0x20 + (b & 0x7F) % 0x18);
                    let signs = if positive { [0; 8] } else { next(&mut state).to_le_bytes() };
                    pool.extend(codes.iter().zip(signs).map(|(code, sign)| code | sign & 0x80));
                }
            }
        }
        pool.truncate(bytes);
        pool
    }
}

/// splitmix64.
fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (*state ^ (*state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

fn halves(x: u64) -> [u32; 2] {
    [x as u32, (x >> 32) as u32]
}

/// The pools of a checkpoint.
#[derive(Debug)]
pub(super) struct Dummy(BTreeMap<Fill, SharedBytes>);

impl Dummy {
    /// Pools that are large enough for each of these tensors.
    pub(super) fn of(entries: &[Entry]) -> Self {
        let mut sizes = BTreeMap::new();
        for entry in entries {
            let largest = sizes.entry(Fill::of(entry)).or_insert(0);
            *largest = entry.bytes().max(*largest);
        }
        Self(sizes.into_iter().map(|(fill, bytes)| (fill, SharedBytes::from_vec(fill.pool(bytes + SLACK)))).collect())
    }

    /// The bytes of one of the tensors that the pools were made for.
    pub(super) fn bytes(&self, entry: &Entry) -> Option<SharedBytes> {
        let pool = self.0.get(&Fill::of(entry))?;
        // FNV-1a.
        let hash = entry.stored_name.bytes().fold(0xCBF2_9CE4_8422_2325u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01B3));
        let start = (hash >> 20) as usize % (SLACK / ALIGN) * ALIGN;
        pool.slice(start..start + entry.bytes())
    }
}

#[cfg(test)]
mod tests {
    use tandem_quant::float8;

    use super::*;

    #[test]
    fn values_are_small_finite_and_not_all_alike() {
        let floats = Fill::Random(Float::F32).pool(40_000);
        let floats: Vec<f32> = floats.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        assert!(floats.iter().all(|v| v.abs() <= 0.02));
        assert!(floats.iter().map(|v| f64::from(*v)).sum::<f64>().abs() / 10_000.0 < 1e-3);
        let fp8 = Fill::E4m3 { positive: false }.pool(10_000);
        assert!(fp8.iter().all(|b| (0.125..1.0).contains(&float8::e4m3(*b).abs())));
        assert!(fp8.iter().any(|b| *b >= 0x80) && Fill::E4m3 { positive: true }.pool(10_000).iter().all(|b| *b < 0x80));
        let f16 = Fill::Constant(Float::F16, Value::One).pool(3);
        assert_eq!(f16, [0x00, 0x3C, 0x00]);
    }
}
