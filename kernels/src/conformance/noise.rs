//! Deterministic random numbers and weights for the cases.

use half::{bf16, f16};
use tandem_quant::{DType, MatrixSource, SharedBytes};

/// SplitMix64: a failing case is named by its seed alone.
#[derive(Clone, Debug)]
pub struct Noise(u64);

impl Noise {
    /// A stream of numbers.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A stream that depends on a place as well (a sequence, a position, a layer).
    pub fn at(seed: u64, place: &[usize]) -> Self {
        let mix = |s: u64, &p: &usize| Noise(s ^ (p as u64).wrapping_mul(0xA24B_AED4_963E_E407)).bits();
        Self(place.iter().fold(seed, mix))
    }

    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A seed for another stream.
    pub fn seed(&mut self) -> u64 {
        self.bits()
    }

    /// `n` random bytes.
    pub fn bytes(&mut self, n: usize) -> Vec<u8> {
        (0..n).map(|_| (self.bits() >> 32) as u8).collect()
    }

    /// Uniform in [0, 1).
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Uniform in `[low, high]`.
    pub fn between(&mut self, low: usize, high: usize) -> usize {
        low + (self.unit() * (high - low + 1) as f64) as usize
    }

    /// One of the options.
    pub fn pick<X: Copy>(&mut self, options: &[X]) -> X {
        options[self.between(0, options.len() - 1)]
    }

    /// True half of the time.
    pub fn coin(&mut self) -> bool {
        self.bits() & 1 == 1
    }

    /// Roughly normal, standard deviation 1.
    pub fn normal(&mut self) -> f32 {
        ((0..12).map(|_| self.unit()).sum::<f64>() - 6.0) as f32
    }

    /// `n` values around `center`.
    pub fn values(&mut self, n: usize, center: f32, spread: f32) -> Vec<f32> {
        (0..n).map(|_| center + spread * self.normal()).collect()
    }

    /// A permutation of `0..n`.
    pub fn shuffled(&mut self, n: usize) -> Vec<u32> {
        let mut order: Vec<u32> = (0..n as u32).collect();
        for i in (1..n).rev() {
            let j = self.between(0, i);
            order.swap(i, j);
        }
        order
    }

    /// A matrix of a random float type, entries around 0 with standard deviation in^−½, sometimes a window of a larger one.
    ///
    /// # Errors
    /// None for the sizes that cases use; the text of a [`tandem_quant::MatrixError`] otherwise.
    pub fn matrix(&mut self, rows: usize, cols: usize) -> Result<MatrixSource, String> {
        let (above, left) = if self.coin() { (self.between(0, 2), self.between(0, 3)) } else { (0, 0) };
        let (all_rows, all_cols) = (rows + 2 * above, cols + 2 * left);
        let spread = 1.0 / (cols as f32).sqrt();
        let values = self.values(all_rows * all_cols, 0.0, spread);
        let dtype = self.pick(&[DType::F32, DType::Bf16, DType::F16]);
        let bytes = match dtype {
            DType::Bf16 => values.iter().flat_map(|&v| bf16::from_f32(v).to_le_bytes()).collect(),
            DType::F16 => values.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()).collect(),
            _ => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        };
        MatrixSource::new(format!("{dtype} [{rows}, {cols}]"), dtype, all_rows, all_cols, SharedBytes::from_vec(bytes))
            .and_then(|m| m.row_window(above..above + rows))
            .and_then(|m| m.col_window(left..left + cols))
            .map_err(|e| e.to_string())
    }
}
