//! Safetensors releases: which tensors each has, and writing them as headers without data.
//!
//! Formats: docs/checkpoints.md §2 (published names, FP8), §3.1 (ModelOpt NVFP4), §3.2 (other exports).

use std::{collections::BTreeMap, fs, path::Path};

use safetensors::tensor::Dtype;
use serde_json::{Value, json};

use super::vision;
use crate::{
    ModelError,
    storage::safetensors::INDEX,
    synthetic::{
        TextConfig,
        recipe::{Group, Recipe, recipes},
    },
};

/// A published safetensors release, or an export by somebody else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Release {
    /// zai-org, BF16: 38,770 tensors, 642,646,653,816 bytes.
    Bf16,
    /// zai-org, FP8 in blocks of 128 × 128: 76,108 tensors, 328,326,771,576 bytes.
    Fp8,
    /// LibertAIDAI, ModelOpt NVFP4 of the routed experts: 113,074 tensors, 194,644,803,576 bytes.
    LibertAi,
    /// The same with activation scales beside (a later revision): 150,226 tensors.
    LibertAiScales,
    /// RedHatAI, compressed-tensors NVFP4; the draft block's experts FP8; what the release keeps in F32 narrowed to BF16.
    RedHat,
    /// nvidia, ModelOpt NVFP4 of routed experts and dense FFNs; small tensors F32; draft block BF16.
    Nvidia,
    /// MXFP4 of the routed experts (AMD Quark).
    Quark,
}

/// A tensor of a stub.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StubTensor {
    /// Name as stored.
    pub name: String,
    /// Type.
    pub dtype: Dtype,
    /// Shape.
    pub shape: Vec<usize>,
}

impl StubTensor {
    fn new(name: String, dtype: Dtype, shape: &[usize]) -> Self {
        Self { name, dtype, shape: shape.to_vec() }
    }

    /// Bytes of its data.
    pub fn bytes(&self) -> u64 {
        self.shape.iter().map(|n| *n as u64).product::<u64>() * self.dtype.bitsize() as u64 / 8
    }
}

impl Release {
    /// All of them.
    pub const ALL: [Self; 7] = [Self::Bf16, Self::Fp8, Self::LibertAi, Self::LibertAiScales, Self::RedHat, Self::Nvidia, Self::Quark];

    /// Its name on the command line and of its folder in tests.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::Fp8 => "fp8",
            Self::LibertAi => "libertai-nvfp4",
            Self::LibertAiScales => "libertai-nvfp4-scales",
            Self::RedHat => "redhat-nvfp4",
            Self::Nvidia => "nvidia-nvfp4",
            Self::Quark => "quark-mxfp4",
        }
    }

    /// Files that the weights are cut into.
    const fn shards(self) -> usize {
        match self {
            Self::Bf16 | Self::LibertAi | Self::LibertAiScales => 120,
            _ => 62,
        }
    }

    /// `quantization_config`, as far as readers might look at it.
    fn quantization(self) -> Option<Value> {
        Some(match self {
            Self::Bf16 => return None,
            Self::Fp8 => json!({ "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128] }),
            Self::LibertAi | Self::LibertAiScales => json!({ "quant_method": "modelopt", "quant_algo": "NVFP4" }),
            Self::RedHat => json!({ "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized" }),
            Self::Nvidia => json!({ "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION" }),
            Self::Quark => json!({ "quant_method": "quark" }),
        })
    }

    /// The release's `config.json`.
    pub fn config(self) -> Value {
        let mut config = super::config().to_json(false);
        if let Some(quantization) = self.quantization() {
            config["quantization_config"] = quantization;
        }
        config
    }

    /// Every tensor of the release.
    pub fn tensors(self) -> Vec<StubTensor> {
        self.tensors_of(&super::config())
    }

    /// Every tensor of a model of other sizes in this release's formats, with the release's vision tower.
    pub fn tensors_of(self, config: &TextConfig) -> Vec<StubTensor> {
        let draft = format!(".layers.{}.", config.layers.len());
        let mut list = Vec::new();
        for recipe in recipes(config, 0, false) {
            self.store(&recipe, recipe.name.contains(&draft), &mut list);
        }
        list.extend(vision::tensors().into_iter().map(|(name, shape)| StubTensor::new(name, Dtype::BF16, &shape)));
        list
    }

    /// One tensor of the model, and what the release stores beside it.
    fn store(self, recipe: &Recipe, draft: bool, list: &mut Vec<StubTensor>) {
        let (name, shape, group) = (recipe.name.as_str(), recipe.shape.as_slice(), recipe.group);
        let base = name.strip_suffix(".weight").unwrap_or(name);
        let dense = group == Group::Linear && name.contains(".mlp.") && !name.contains("shared_experts");
        let mut put = |suffix: &str, dtype, shape: &[usize]| list.push(StubTensor::new(format!("{base}{suffix}"), dtype, shape));
        let grid = |shape: &[usize]| [shape[0].div_ceil(128), shape[1].div_ceil(128)];
        let fp8 = (self == Self::Fp8 && group != Group::Rest) || (self == Self::RedHat && draft && group == Group::Expert);
        let nvfp4 = match self {
            Self::LibertAi | Self::LibertAiScales => group == Group::Expert,
            Self::RedHat => group == Group::Expert && !draft,
            Self::Nvidia => (group == Group::Expert || dense) && !draft,
            _ => false,
        };
        if fp8 {
            put(".weight", Dtype::F8_E4M3, shape);
            put(".weight_scale_inv", Dtype::F32, &grid(shape));
        } else if nvfp4 {
            let (half, groups) = ([shape[0], shape[1] / 2], [shape[0], shape[1] / 16]);
            if self == Self::RedHat {
                put(".weight_packed", Dtype::U8, &half);
                put(".weight_scale", Dtype::F8_E4M3, &groups);
                put(".weight_global_scale", Dtype::F32, &[1]);
                put(".input_global_scale", Dtype::F32, &[1]);
                return;
            }
            put(".weight", Dtype::U8, &half);
            put(".weight_scale", Dtype::F8_E4M3, &groups);
            put(".weight_scale_2", Dtype::F32, &[]);
            if self == Self::LibertAiScales {
                put(".input_scale", Dtype::F32, &[]);
            }
        } else if self == Self::Quark && group == Group::Expert {
            put(".weight", Dtype::U8, &[shape[0], shape[1] / 2]);
            put(".weight_scale", Dtype::U8, &[shape[0], shape[1] / 32]);
        } else {
            let small = shape.len() != 2 || name.ends_with("mlp.gate.weight");
            let f32 = match self {
                Self::RedHat => false,
                Self::Nvidia => recipe.keeps_f32 || (small && !draft),
                _ => recipe.keeps_f32,
            };
            list.push(StubTensor::new(name.to_owned(), if f32 { Dtype::F32 } else { Dtype::BF16 }, shape));
        }
    }

    /// Writes config, index and the headers of all files; `beside` are further files (tokenizer, chat template): name and content.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn write(self, dir: &Path, beside: &[(&str, &[u8])]) -> Result<(), ModelError> {
        write(&self.config(), &self.tensors(), self.shards(), dir, beside)
    }
}

/// Writes any tensors as headers without data, in `shards` files of equal tensor counts.
///
/// # Errors
/// A file cannot be written.
pub fn write(config: &Value, tensors: &[StubTensor], shards: usize, dir: &Path, beside: &[(&str, &[u8])]) -> Result<(), ModelError> {
    let put = |name: &str, content: &[u8]| {
        let path = dir.join(name);
        fs::write(&path, content).map_err(|source| ModelError::Io { path, source })
    };
    fs::create_dir_all(dir).map_err(|source| ModelError::Io { path: dir.to_owned(), source })?;
    put("config.json", config.to_string().as_bytes())?;
    let eos = config.pointer("/text_config/eos_token_id").or(config.get("eos_token_id"));
    put("generation_config.json", json!({ "temperature": 1.0, "top_p": 0.95, "eos_token_id": eos }).to_string().as_bytes())?;
    let mut weight_map = BTreeMap::new();
    let each = tensors.len().div_ceil(shards.max(1)).max(1);
    let count = tensors.len().div_ceil(each);
    for (i, part) in tensors.chunks(each).enumerate() {
        let file = format!("model-{:05}-of-{count:05}.safetensors", i + 1);
        put(&file, &header(part))?;
        weight_map.extend(part.iter().map(|t| (t.name.as_str(), file.clone())));
    }
    put(INDEX, json!({ "weight_map": weight_map }).to_string().as_bytes())?;
    beside.iter().try_for_each(|(name, content)| put(name, content))
}

/// The bytes of a safetensors header, its length first.
pub fn header(tensors: &[StubTensor]) -> Vec<u8> {
    let mut text = String::from("{");
    let mut at = 0;
    for t in tensors {
        let end = at + t.bytes();
        let comma = if at == 0 { "" } else { "," };
        let shape = t.shape.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
        text += &format!("{comma}\"{}\":{{\"dtype\":\"{:?}\",\"shape\":[{shape}],\"data_offsets\":[{at},{end}]}}", t.name, t.dtype);
        at = end;
    }
    text.push('}');
    text += &" ".repeat(text.len().next_multiple_of(8) - text.len());
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}
