//! Block types as whole codes and scales of scales, apart: what devices keep in memory and compute with.
//!
//! An element is `d·scale·factor·level − dmin·min`, where `level` is a small whole number that its code stands for. Neighbours: `blocks/` reads
//! each type's layout, once for f32 values and for these; `kernels/src/cuda/coded.rs` lays codes out for a GPU.

use half::f16;

use crate::{
    DType,
    blocks::{
        iq, k, legacy, lut,
        sink::{RUN, Sink},
    },
};

/// What a type's codes stand for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CodeLevels {
    /// `code − zero`, of codes of `bits` bits.
    Linear {
        /// 2 to 6.
        bits: u8,
        /// The code of level 0.
        zero: u8,
    },
    /// The entry of a table; codes have 4 bits. Where all elements have a sign, it is the fourth bit.
    Table(&'static [i8; 16]),
}

/// How a type scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CodeScales {
    /// `d` per 256 elements, a whole scale of −128..=127 per 16 of them (or of equal ones for more).
    Run,
    /// The same, with scales and minima below 16.
    RunMin,
    /// Scales and minima below 128, per 32 elements.
    PairMin,
    /// `d` alone, per 32 elements.
    Half,
    /// `d` and `dmin` per 32 elements.
    HalfMin,
}

/// How elements of a type are made of codes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Coding {
    /// Codes → levels.
    pub levels: CodeLevels,
    /// Scales.
    pub scales: CodeScales,
    /// A power of two that goes with every scale.
    pub factor: f32,
}

/// The table of IQ4_NL and IQ4_XS.
const IQ4: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
/// Coordinates of the grids, by their upper bits, then the same negated.
const IQ2: [i8; 16] = [8, 25, 43, 0, 0, 0, 0, 0, -8, -25, -43, 0, 0, 0, 0, 0];
const IQ3_XXS: [i8; 16] = [4, 12, 20, 28, 36, 44, 52, 62, -4, -12, -20, -28, -36, -44, -52, -62];
const IQ3_S: [i8; 16] = [1, 3, 5, 7, 9, 11, 13, 15, -1, -3, -5, -7, -9, -11, -13, -15];
/// Eight times (coordinate ± ⅛): coordinates −1, 0, 1 shifted up, then down.
const IQ1: [i8; 16] = [-7, 1, 9, 0, -9, -1, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// A type's coding; `None` for types that are no codes of up to 6 bits.
pub fn coding(dtype: DType) -> Option<Coding> {
    use CodeScales::{Half, HalfMin, PairMin, Run, RunMin};
    let linear = |bits, zero, scales| Some(Coding { levels: CodeLevels::Linear { bits, zero }, scales, factor: 1.0 });
    let table = |table, scales, factor| Some(Coding { levels: CodeLevels::Table(table), scales, factor });
    match dtype {
        DType::Q4_0 => linear(4, 8, Half),
        DType::Q4_1 => linear(4, 0, HalfMin),
        DType::Q5_0 => linear(5, 16, Half),
        DType::Q5_1 => linear(5, 0, HalfMin),
        DType::Q2K => linear(2, 0, RunMin),
        DType::Q3K => linear(3, 4, Run),
        DType::Q4K => linear(4, 0, PairMin),
        DType::Q5K => linear(5, 0, PairMin),
        DType::Q6K => linear(6, 32, Run),
        DType::Iq4Nl => table(&IQ4, Half, 1.0),
        DType::Iq4Xs => table(&IQ4, Run, 1.0),
        DType::Iq2Xxs | DType::Iq2Xs | DType::Iq2S => table(&IQ2, Run, 0.125),
        DType::Iq3Xxs => table(&IQ3_XXS, Run, 0.25),
        DType::Iq3S => table(&IQ3_S, Run, 1.0),
        DType::Iq1S | DType::Iq1M => table(&IQ1, Run, 0.125),
        _ => None,
    }
}

/// A block's codes and scales. Of types with blocks of 32 elements, the first 32 codes and two scales are in use.
#[derive(Clone, Debug)]
pub struct Codes {
    /// In order.
    pub codes: [u8; 256],
    /// Whole scales, per 16 elements.
    pub scales: [i8; 16],
    /// Whole minima, per 16 elements.
    pub mins: [u8; 16],
    /// Scale of scales.
    pub d: f16,
    /// Scale of minima.
    pub dmin: f16,
    /// Coordinates of grids → codes: bits that go.
    shift: u32,
}

/// Reads a block's codes.
pub type ReadCodes = fn(&[u8], &mut Codes);

impl Codes {
    /// Room for blocks of a type, and what reads one; `None` where [`coding`] has none.
    pub fn of(dtype: DType) -> Option<(Self, ReadCodes)> {
        let (shift, read): (u32, ReadCodes) = match dtype {
            DType::Q4_0 => (0, legacy::q4_0),
            DType::Q4_1 => (0, legacy::q4_1),
            DType::Q5_0 => (0, legacy::q5_0),
            DType::Q5_1 => (0, legacy::q5_1),
            DType::Q2K => (0, k::q2_k),
            DType::Q3K => (0, k::q3_k),
            DType::Q4K => (0, k::q4_k),
            DType::Q5K => (0, k::q5_k),
            DType::Q6K => (0, k::q6_k),
            DType::Iq4Nl => (0, lut::iq4_nl),
            DType::Iq4Xs => (0, lut::iq4_xs),
            DType::Iq2Xxs => (4, iq::iq2_xxs),
            DType::Iq2Xs => (4, iq::iq2_xs),
            DType::Iq2S => (4, iq::iq2_s),
            DType::Iq3Xxs => (3, iq::iq3_xxs),
            DType::Iq3S => (1, iq::iq3_s),
            DType::Iq1S => (0, iq::iq1_s),
            DType::Iq1M => (0, iq::iq1_m),
            _ => return None,
        };
        Some((Self { codes: [0; 256], scales: [0; 16], mins: [0; 16], d: f16::ZERO, dmin: f16::ZERO, shift }, read))
    }

    #[inline(always)]
    fn run(&mut self, k: usize, d: f32, scale: i8, code: impl Fn(usize) -> u8) {
        if k == 0 {
            self.d = f16::from_f32(d);
        }
        self.scales[k] = scale;
        for (l, to) in self.codes.as_chunks_mut::<RUN>().0[k].iter_mut().enumerate() {
            *to = code(l);
        }
    }

    #[inline(always)]
    fn scaled(&mut self, at: usize, d: (f32, u8)) {
        if at == 0 {
            self.d = f16::from_f32(d.0);
        }
        self.scales[at / RUN] = d.1.cast_signed();
    }
}

/// A byte of 8 per set bit.
#[inline(always)]
fn eights(bits: u8) -> u64 {
    const LOW: u64 = 0x7F7F_7F7F_7F7F_7F7F;
    let each = u64::from(bits).wrapping_mul(0x0101_0101_0101_0101) & 0x8040_2010_0804_0201;
    ((each | ((each & LOW) + LOW)) & !LOW) >> 4
}

impl Sink for Codes {
    #[inline(always)]
    fn affine(&mut self, k: usize, d: (f32, u8), min: (f32, u8), code: impl Fn(usize) -> u8) {
        if k == 0 {
            self.dmin = f16::from_f32(min.0);
        }
        self.mins[k] = min.1;
        self.run(k, d.0, d.1.cast_signed(), code);
    }

    #[inline(always)]
    fn centred(&mut self, k: usize, d: (f32, i8), _: u8, code: impl Fn(usize) -> u8) {
        self.run(k, d.0, d.1, code);
    }

    #[inline(always)]
    fn looked_up(&mut self, k: usize, d: (f32, i8), code: impl Fn(usize) -> u8) {
        self.run(k, d.0, d.1, code);
    }

    #[inline(always)]
    fn signed(&mut self, at: usize, d: (f32, u8), _: f32, point: &[u8; 8], negative: u8) {
        self.scaled(at, d);
        let codes = u64::from_le_bytes(*point) >> self.shift & 0x0707_0707_0707_0707 | eights(negative);
        self.codes[at..at + 8].copy_from_slice(&codes.to_le_bytes());
    }

    #[inline(always)]
    fn shifted(&mut self, k: usize, d: (f32, u8), down: [bool; 2], points: [&[u8; 8]; 2]) {
        self.scaled(16 * k, d);
        for (i, (point, down)) in points.into_iter().zip(down).enumerate() {
            // A coordinate plus one, and 4 more where it is shifted down; no byte carries into the next.
            let codes = u64::from_le_bytes(point.map(|c| c.wrapping_add(1))) + if down { 0x0404_0404_0404_0404 } else { 0 };
            self.codes[16 * k + 8 * i..][..8].copy_from_slice(&codes.to_le_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Codes, levels and scales of a block → its elements, in the order of operations of `coded.cuh`.
    fn values(dtype: DType, block: &[u8]) -> Vec<f32> {
        let coding = coding(dtype).expect("a coding");
        let (mut c, read) = Codes::of(dtype).expect("a reader");
        read(block, &mut c);
        let level = |code: u8| match coding.levels {
            CodeLevels::Linear { zero, .. } => f32::from(i16::from(code) - i16::from(zero)),
            CodeLevels::Table(table) => f32::from(table[usize::from(code)]),
        };
        let value = |i: usize| {
            let scale = c.d.to_f32() * f32::from(c.scales[i / RUN]);
            let min = c.dmin.to_f32() * f32::from(c.mins[i / RUN]);
            scale.mul_add(level(c.codes[i]), -min) * coding.factor
        };
        (0..dtype.block_elems()).map(value).collect()
    }

    proptest! {
        #[test]
        fn codes_mean_the_values_of_the_block(seed in proptest::collection::vec(any::<u8>(), 210)) {
            for dtype in DType::ALL.iter().copied().filter(|dtype| coding(*dtype).is_some()) {
                let block = &seed[..dtype.block_bytes()];
                let mut want = vec![0.0; dtype.block_elems()];
                dtype.dequantize(block, &mut want);
                for (i, (got, want)) in values(dtype, block).iter().zip(&want).enumerate() {
                    let same = got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan());
                    prop_assert!(same, "{dtype}, element {i}: {got} instead of {want}");
                }
            }
        }
    }

    #[test]
    fn ranges_are_what_devices_count_on() {
        let all: Vec<_> = DType::ALL.iter().filter_map(|dtype| coding(*dtype).map(|c| (*dtype, c))).collect();
        assert_eq!(all.len(), 18);
        for (dtype, c) in all {
            let (mut codes, read) = Codes::of(dtype).expect("a reader");
            read(&vec![0xFF; dtype.block_bytes()], &mut codes);
            let bits = match c.levels {
                CodeLevels::Linear { bits, .. } => bits,
                CodeLevels::Table(_) => 4,
            };
            let used = codes.codes[..dtype.block_elems()].iter().all(|code| *code < 1 << bits);
            assert!(used, "{dtype}");
            let most = if c.scales == CodeScales::RunMin { 16 } else { 128 };
            assert!(codes.mins.iter().all(|m| *m < most) && c.factor.log2().fract() == 0.0, "{dtype}");
        }
    }
}
