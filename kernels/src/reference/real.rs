//! The number type of the reference ops: f32 for everyday use, f64 for the oracle.

use std::{
    fmt::{Debug, Display},
    iter::Sum,
    ops::{Add, AddAssign, Div, Mul, MulAssign, Neg, Sub, SubAssign},
};

use half::bf16;

/// A real number that the reference formulas are written over. Implemented for `f32` and `f64`.
pub trait Real:
    Copy
    + Send
    + Sync
    + 'static
    + Debug
    + Display
    + Default
    + PartialOrd
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + AddAssign
    + SubAssign
    + MulAssign
    + Sum
{
    /// 0.
    const ZERO: Self;
    /// 1.
    const ONE: Self;
    /// −∞.
    const NEG_INFINITY: Self;
    /// Name of the type, for device names and snapshots.
    const NAME: &'static str;
    /// Bytes of one value in a snapshot.
    const BYTES: usize;

    /// The nearest value to a constant.
    fn of(value: f64) -> Self;
    /// An f32, exactly.
    fn of_f32(value: f32) -> Self;
    /// Rounds to f32.
    fn to_f32(self) -> f32;
    /// Widens to f64, exactly.
    fn to_f64(self) -> f64;
    /// e^x.
    fn exp(self) -> Self;
    /// ln(1 + x).
    fn ln_1p(self) -> Self;
    /// ln x.
    fn ln(self) -> Self;
    /// √x.
    fn sqrt(self) -> Self;
    /// Neither NaN nor infinite.
    fn is_finite(self) -> bool;
    /// Not a number.
    fn is_nan(self) -> bool;
    /// Appends the little-endian bytes.
    fn write_le(self, out: &mut Vec<u8>);
    /// Reads [`Real::BYTES`] little-endian bytes; `None` where there are fewer.
    fn read_le(bytes: &[u8]) -> Option<Self>;

    /// Rounds to the nearest bf16 (ties to even) and back.
    fn round_bf16(self) -> Self {
        Self::of_f32(bf16::from_f32(self.to_f32()).to_f32())
    }
    /// The smaller of two; a NaN in `self` stays.
    fn at_most(self, limit: Self) -> Self {
        if self > limit { limit } else { self }
    }
    /// The larger of two; a NaN in `self` stays.
    fn at_least(self, limit: Self) -> Self {
        if self < limit { limit } else { self }
    }
}

macro_rules! real {
    ($t:ident, $bytes:literal) => {
        impl Real for $t {
            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;
            const NEG_INFINITY: Self = $t::NEG_INFINITY;
            const NAME: &'static str = stringify!($t);
            const BYTES: usize = $bytes;

            fn of(value: f64) -> Self {
                value as $t
            }
            fn of_f32(value: f32) -> Self {
                $t::from(value)
            }
            fn to_f32(self) -> f32 {
                self as f32
            }
            fn to_f64(self) -> f64 {
                f64::from(self)
            }
            fn exp(self) -> Self {
                $t::exp(self)
            }
            fn ln_1p(self) -> Self {
                $t::ln_1p(self)
            }
            fn ln(self) -> Self {
                $t::ln(self)
            }
            fn sqrt(self) -> Self {
                $t::sqrt(self)
            }
            fn is_finite(self) -> bool {
                $t::is_finite(self)
            }
            fn is_nan(self) -> bool {
                $t::is_nan(self)
            }
            fn write_le(self, out: &mut Vec<u8>) {
                out.extend_from_slice(&self.to_le_bytes());
            }
            fn read_le(bytes: &[u8]) -> Option<Self> {
                bytes.first_chunk::<$bytes>().map(|b| $t::from_le_bytes(*b))
            }
        }
    };
}

real!(f32, 4);
real!(f64, 8);
