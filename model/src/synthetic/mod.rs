//! Hash-generated checkpoints of any geometry, for tests and benchmarks.
//!
//! A value depends on the seed, the tensor's published name and the element's index alone, so that the same weights come out whatever the
//! names, files and types they are stored in. The reference presets are identical, byte for byte, to the files that the reference
//! goldens were computed from.
//!
//! | module | idea |
//! |---|---|
//! | [`hash`] | the counter-based generator |
//! | [`config`] | sizes: presets and random small ones |
//! | [`recipe`] | which tensors there are and how each is filled |
//! | `write` | safetensors files in a stream |
//! | [`twin`] | the same in FP8, NVFP4 or MXFP4 |

pub mod config;
pub mod hash;
pub mod recipe;
pub mod twin;
mod write;

use std::path::{Path, PathBuf};

use tandem_quant::DType;

pub use config::{Preset, TextConfig, layers};
pub use twin::{Quantised, write_twin};

use crate::ModelError;

/// Spelling of tensor names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Naming {
    /// `model.language_model.layers.0.self_attn.A_log`.
    Published,
    /// `model.layers.0.self_attn.A_log`.
    TextOnly,
    /// The module names of `transformers`, with fused convolutions and stacked experts.
    Transformers,
}

/// How tensors are cut into files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Files {
    /// One file.
    Single,
    /// Three files: what stays bf16 in quantised releases, other linears, routed experts.
    ByGroup,
    /// This many files, tensors dealt out in turn.
    Shards(usize),
}

/// How a synthetic checkpoint is stored.
#[derive(Clone, Debug)]
pub struct Options {
    /// Seed of all weights.
    pub seed: u64,
    /// Spelling of tensor names.
    pub naming: Naming,
    /// How tensors are cut into files.
    pub files: Files,
    /// Type of the tensors that the release stores in BF16. F32 and F16 hold the values before their rounding to BF16.
    pub floats: DType,
    /// Store in [`Options::floats`] also what the release keeps in F32 (a flaw that readers must name).
    pub narrow: bool,
    /// Leave out the `text_config` level of `config.json`.
    pub flat_config: bool,
    /// Add a vision tower, which readers skip.
    pub vision: bool,
    /// Files to copy beside (tokenizer, chat template).
    pub extra_files: Vec<PathBuf>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            seed: 1,
            naming: Naming::Published,
            files: Files::ByGroup,
            floats: DType::Bf16,
            narrow: false,
            flat_config: false,
            vision: false,
            extra_files: Vec::new(),
        }
    }
}

/// Writes a reference checkpoint; `extra_files` are copied beside it (no tokenizer is made here).
///
/// # Errors
/// A file cannot be written or copied.
pub fn write(preset: Preset, dir: &Path, extra_files: &[PathBuf]) -> Result<(), ModelError> {
    let vision = preset == Preset::Tiny;
    let options = Options { seed: preset.seed(), vision, extra_files: extra_files.to_vec(), ..Options::default() };
    write_with(&preset.config(), &options, dir)
}

/// Writes a checkpoint of any geometry.
///
/// # Errors
/// A file cannot be written or copied.
pub fn write_with(config: &TextConfig, options: &Options, dir: &Path) -> Result<(), ModelError> {
    write::write(config, options, dir)
}
