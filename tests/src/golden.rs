//! Reference outputs of the HF implementation, `tests/fixtures/gold/*.safetensors` (see the README there).

use std::path::{Path, PathBuf};

use safetensors::{Dtype, SafeTensors};

/// Prompt lengths in every golden file.
pub const PROMPTS: [usize; 6] = [1, 3, 4, 17, 70, 200];

/// Largest difference of an f32 logit from the reference that is summation order and nothing else (golden README, "Tolerances").
pub const LOGIT_TOLERANCE: f64 = 1e-4;

/// `tests/fixtures`.
pub fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures")
}

/// One golden file.
pub struct Golden {
    bytes: Vec<u8>,
}

impl Golden {
    /// `tests/fixtures/gold/NAME.safetensors`.
    pub fn open(name: &str) -> Self {
        let path = fixtures().join("gold").join(format!("{name}.safetensors"));
        Self { bytes: std::fs::read(&path).unwrap_or_else(|why| panic!("{}: {why}", path.display())) }
    }

    fn tensor(&self, key: &str, dtype: Dtype) -> (Vec<usize>, Vec<[u8; 4]>) {
        let file = SafeTensors::deserialize(&self.bytes).expect("safetensors");
        let tensor = file.tensor(key).unwrap_or_else(|why| panic!("{key}: {why}"));
        assert_eq!(tensor.dtype(), dtype, "{key}");
        (tensor.shape().to_vec(), tensor.data().as_chunks::<4>().0.to_vec())
    }

    /// Whether the file has a tensor: "lite" files leave out what larger ones have.
    pub fn has(&self, key: &str) -> bool {
        SafeTensors::deserialize(&self.bytes).expect("safetensors").tensor(key).is_ok()
    }

    /// An I32 tensor, flat.
    pub fn ids(&self, key: &str) -> Vec<i32> {
        self.tensor(key, Dtype::I32).1.into_iter().map(i32::from_le_bytes).collect()
    }

    /// An F32 tensor, flat.
    pub fn floats(&self, key: &str) -> Vec<f32> {
        self.tensor(key, Dtype::F32).1.into_iter().map(f32::from_le_bytes).collect()
    }

    /// The rows of an F32 matrix.
    pub fn rows(&self, key: &str) -> Vec<Vec<f32>> {
        let (shape, data) = self.tensor(key, Dtype::F32);
        let width = *shape.last().expect("a matrix");
        data.chunks(width).map(|row| row.iter().map(|b| f32::from_le_bytes(*b)).collect()).collect()
    }
}

/// Log-softmax in f64.
pub fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|l| f64::from(l - max).exp()).sum();
    logits.iter().map(|l| f64::from(l - max) - sum.ln()).collect()
}
