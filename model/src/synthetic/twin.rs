//! Quantised twins of a synthetic checkpoint: the same model as one of the published formats stores it (checkpoints.md §2.6, §3).
//!
//! Which linears are converted goes by the file that a tensor is in ([`super::Files::ByGroup`]): FP8 takes shards 2 and 3, the 4-bit formats
//! the routed experts in shard 3. The FP8 and ModelOpt twins of the reference presets are identical, byte for byte, to the files that their
//! goldens were computed from.

use std::{borrow::Cow, collections::BTreeMap, fs, path::Path};

use safetensors::{Dtype, SafeTensors, View};
use serde_json::{Value, json};
use tandem_quant::{
    DType, float8,
    fp8::{self, E4M3_MAX},
};

use crate::{ModelError, storage::safetensors::INDEX};

/// A format that a twin is stored in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quantised {
    /// E4M3 with an F32 factor per 128 × 128 block: the native release.
    Fp8,
    /// NVFP4 of the routed experts as ModelOpt writes it: multiply by the tensor's factor.
    Nvfp4,
    /// NVFP4 of the routed experts as compressed-tensors writes it: divide by the tensor's factor.
    Nvfp4Packed,
    /// MXFP4 of the routed experts.
    Mxfp4,
}

impl Quantised {
    fn converts(self, shard: usize) -> bool {
        shard >= if self == Self::Fp8 { 2 } else { 3 }
    }

    fn config(self) -> Value {
        match self {
            Self::Fp8 => json!({ "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128] }),
            Self::Nvfp4 => json!({ "quant_method": "modelopt", "quant_algo": "NVFP4" }),
            Self::Nvfp4Packed => json!({ "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized" }),
            Self::Mxfp4 => json!({ "quant_method": "quark", "quant_algo": "MXFP4" }),
        }
    }

    /// The tensors that take the place of `X.weight` `[rows, cols]`.
    fn quantise(self, base: &str, values: &[f32], rows: usize, cols: usize) -> Vec<(String, Stored)> {
        let named = |suffix: &str, tensor| (format!("{base}.{suffix}"), tensor);
        match self {
            Self::Fp8 => {
                let (codes, grid) = fp8::encode(values, cols);
                let shape = vec![rows.div_ceil(fp8::BLOCK), cols.div_ceil(fp8::BLOCK)];
                vec![
                    named("weight", Stored::new(Dtype::F8_E4M3, vec![rows, cols], codes)),
                    named("weight_scale_inv", Stored::f32(shape, &grid)),
                ]
            }
            Self::Nvfp4 | Self::Nvfp4Packed => {
                let (codes, groups, global) = nvfp4(values);
                let groups = named("weight_scale", Stored::new(Dtype::F8_E4M3, vec![rows, cols / 16], groups));
                let codes = Stored::new(Dtype::U8, vec![rows, cols / 2], codes);
                if self == Self::Nvfp4 {
                    vec![named("weight", codes), groups, named("weight_scale_2", Stored::f32(Vec::new(), &[global]))]
                } else {
                    vec![named("weight_packed", codes), groups, named("weight_global_scale", Stored::f32(vec![1], &[1.0 / global]))]
                }
            }
            Self::Mxfp4 => {
                let (codes, scales) = mxfp4(values);
                vec![
                    named("weight", Stored::new(Dtype::U8, vec![rows, cols / 2], codes)),
                    named("weight_scale", Stored::new(Dtype::U8, vec![rows, cols / 32], scales)),
                ]
            }
        }
    }
}

/// A tensor to be written.
struct Stored {
    dtype: Dtype,
    shape: Vec<usize>,
    data: Vec<u8>,
}

impl Stored {
    fn new(dtype: Dtype, shape: Vec<usize>, data: Vec<u8>) -> Self {
        Self { dtype, shape, data }
    }

    fn f32(shape: Vec<usize>, values: &[f32]) -> Self {
        Self::new(Dtype::F32, shape, values.iter().flat_map(|v| v.to_le_bytes()).collect())
    }
}

impl View for &Stored {
    fn dtype(&self) -> Dtype {
        self.dtype
    }
    fn shape(&self) -> &[usize] {
        &self.shape
    }
    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.data)
    }
    fn data_len(&self) -> usize {
        self.data.len()
    }
}

/// Writes the twin of `source`, a checkpoint of three shards in BF16 ([`super::write()`]), into `dir`.
///
/// # Errors
/// A file cannot be read or written, or is not what [`super::write()`] makes.
pub fn write_twin(source: &Path, format: Quantised, dir: &Path) -> Result<(), ModelError> {
    let at = |path: &Path| {
        let path = path.to_owned();
        move |source: std::io::Error| ModelError::Io { path, source }
    };
    fs::create_dir_all(dir).map_err(at(dir))?;
    let mut weight_map = BTreeMap::new();
    for shard in 1..=3 {
        let file = format!("model-{shard:05}-of-00003.safetensors");
        let (from, to) = (source.join(&file), dir.join(&file));
        let odd = |got: String| ModelError::File { path: from.clone(), needed: "a shard of a BF16 checkpoint".to_owned(), got };
        let bytes = fs::read(&from).map_err(at(&from))?;
        let tensors = SafeTensors::deserialize(&bytes).map_err(|e| odd(e.to_string()))?;
        if !format.converts(shard) {
            weight_map.extend(tensors.names().into_iter().map(|name| (name.to_owned(), file.clone())));
            fs::write(&to, &bytes).map_err(at(&to))?;
            continue;
        }
        let mut stored = Vec::new();
        for (name, tensor) in tensors.tensors() {
            let (Some(base), Dtype::BF16, &[rows, cols]) = (name.strip_suffix(".weight"), tensor.dtype(), tensor.shape()) else {
                return Err(odd(format!("{name}: {:?} {:?}", tensor.dtype(), tensor.shape())));
            };
            let mut values = vec![0.0; rows * cols];
            DType::Bf16.dequantize(tensor.data(), &mut values);
            stored.extend(format.quantise(base, &values, rows, cols));
        }
        weight_map.extend(stored.iter().map(|(name, _)| (name.clone(), file.clone())));
        let metadata = std::collections::HashMap::from([("format".to_owned(), "pt".to_owned())]);
        let views = stored.iter().map(|(name, tensor)| (name.as_str(), tensor));
        let bytes = safetensors::serialize(views, Some(metadata)).map_err(|e| odd(e.to_string()))?;
        fs::write(&to, bytes).map_err(at(&to))?;
    }
    let mut config = crate::json::read_object(&source.join("config.json"))?;
    config["quantization_config"] = format.config();
    for (name, value) in [("config.json", config), (INDEX, json!({ "metadata": {}, "weight_map": weight_map }))] {
        let path = dir.join(name);
        fs::write(&path, value.to_string()).map_err(at(&path))?;
    }
    for entry in fs::read_dir(source).map_err(at(source))? {
        let path = entry.map_err(at(source))?.path();
        let name = path.file_name().unwrap_or_default();
        if !dir.join(name).exists() {
            fs::copy(&path, dir.join(name)).map_err(at(&path))?;
        }
    }
    Ok(())
}

fn largest(values: impl Iterator<Item = f32>) -> f32 {
    values.fold(0.0, |m, v| m.max(v.abs()))
}

/// The code whose value is nearest, ties to the even one; `value(code)` ascends over `0..count`.
fn nearest(x: f32, count: u8, value: impl Fn(u8) -> f32) -> u8 {
    let (mut low, mut high) = (0, count - 1);
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if value(middle) <= x { low = middle } else { high = middle }
    }
    let (below, above) = (x - value(low), value(high) - x);
    if below < above || (below == above && low % 2 == 0) { low } else { high }
}

/// E2M1, rounded to nearest even.
fn to_e2m1(v: f32) -> u8 {
    nearest(v.abs(), 8, float8::e2m1) | if v.is_sign_negative() { 8 } else { 0 }
}

fn pairs(codes: &[u8]) -> Vec<u8> {
    codes.as_chunks::<2>().0.iter().map(|[low, high]| low | high << 4).collect()
}

/// Packed codes, the factors of 16 elements each, and the tensor's factor.
fn nvfp4(values: &[f32]) -> (Vec<u8>, Vec<u8>, f32) {
    let global = largest(values.iter().copied()) / (6.0 * E4M3_MAX);
    let (mut codes, mut groups) = (Vec::with_capacity(values.len()), Vec::new());
    for group in values.chunks_exact(16) {
        let scale = float8::to_e4m3((largest(group.iter().copied()) / (6.0 * global)).clamp(2.0f32.powi(-9), E4M3_MAX));
        let factor = float8::e4m3(scale) * global;
        codes.extend(group.iter().map(|v| to_e2m1(v / factor)));
        groups.push(scale);
    }
    (pairs(&codes), groups, global)
}

/// Packed codes and the E8M0 scales of 32 elements each.
fn mxfp4(values: &[f32]) -> (Vec<u8>, Vec<u8>) {
    let (mut codes, mut scales) = (Vec::with_capacity(values.len()), Vec::new());
    for group in values.chunks_exact(32) {
        // The largest value's exponent, less that of the largest code (4).
        let exponent = ((largest(group.iter().copied()).to_bits() >> 23) as i32 - 2).clamp(1, 254);
        let factor = f32::from_bits((exponent as u32) << 23);
        codes.extend(group.iter().map(|v| to_e2m1(v / factor)));
        scales.push(exponent as u8);
    }
    (pairs(&codes), scales)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_is_to_nearest_even() {
        assert_eq!([0.0, 0.25, 0.26, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.1, 9.0].map(to_e2m1), [0, 0, 1, 2, 2, 4, 4, 6, 6, 7, 7]);
        assert_eq!(to_e2m1(-0.0), 8);
        for code in (0..0x7F).chain(0x80..0xFF) {
            assert_eq!(float8::to_e4m3(float8::e4m3(code)), code);
        }
        assert_eq!((float8::to_e4m3(1.0 + 1.0 / 16.0), float8::to_e4m3(1.0 + 3.0 / 16.0), float8::to_e4m3(1000.0)), (0x38, 0x3A, 0x7E));
    }
}
