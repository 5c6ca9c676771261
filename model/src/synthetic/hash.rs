//! The counter-based generator behind synthetic weights: a value depends on seed, tensor name and element index alone.
//!
//! ```text
//! key     = fnv1a64(name) ^ seed · γ                 γ = 0x9E3779B97F4A7C15
//! x_i     = splitmix64_mix(key + (i + 1) · γ)        i = row-major element index
//! normal  = (sum of the four u16 of x_i − 131070) / (65536 · √(4/12))      Irwin–Hall of four, unit variance
//! uniform = (x_i >> 11) · 2⁻⁵³
//! ```
//! Arithmetic is in f64 and rounded once to f32, so that every language that follows these lines gets the same bits.

const GAMMA: u64 = 0x9E37_79B9_7F4A_7C15;

/// FNV-1a, 64 bits.
fn fnv1a64(text: &str) -> u64 {
    text.bytes().fold(0xCBF2_9CE4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0000_0100_0000_01B3))
}

/// The random stream of one tensor.
#[derive(Clone, Copy, Debug)]
pub struct Stream {
    key: u64,
}

impl Stream {
    /// The stream of tensor `name` under `seed`.
    pub fn new(seed: u64, name: &str) -> Self {
        Self { key: fnv1a64(name) ^ seed.wrapping_mul(GAMMA) }
    }

    /// 64 random bits for element `i`.
    pub fn bits(&self, i: u64) -> u64 {
        let x = self.key.wrapping_add(i.wrapping_add(1).wrapping_mul(GAMMA));
        let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    }

    /// A value of zero mean and unit variance.
    pub fn normal(&self, i: u64) -> f64 {
        let x = self.bits(i);
        let sum = (x & 0xFFFF) + (x >> 16 & 0xFFFF) + (x >> 32 & 0xFFFF) + (x >> 48);
        let std = 65536.0 * (4.0f64 / 12.0).sqrt();
        (sum as i64 - 131_070) as f64 / std
    }

    /// A value in [0, 1).
    pub fn uniform(&self, i: u64) -> f64 {
        (self.bits(i) >> 11) as f64 * 2f64.powi(-53)
    }
}
