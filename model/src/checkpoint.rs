//! [`Checkpoint`]: a folder whose config and weights fit together.
//!
//! Opening reads headers (and 4 KiB samples for the fingerprint), and checks every tensor that the geometry needs: name, shape, type.
//! What is left over is named in [`Checkpoint::warnings`].
//!
//! Neighbours: `storage.rs` maps the files, `inventory.rs` says what is needed, `tensors.rs` hands out typed tensors.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use safetensors::tensor::Dtype;
use tandem_quant::{DType, MatrixSource, SharedBytes};

use crate::{
    GenerationConfig, Geometry, ModelError, Shard, fingerprint,
    inventory::{self, Need},
    json::read_object,
    names::{Name, classify},
    storage::{Entry, Storage},
};

/// A validated checkpoint folder. Holds maps of its files; the tensors it hands out keep them alive by themselves.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    geometry: Geometry,
    generation: GenerationConfig,
    storage: Storage,
    /// Canonical name → place in `storage.entries`.
    trunk: BTreeMap<String, usize>,
    needs: Vec<Need>,
    fingerprint: String,
    warnings: Vec<String>,
}

impl Checkpoint {
    /// Opens a folder and checks that everything that the model needs is there.
    ///
    /// # Errors
    /// Names the file, key or tensor that does not fit.
    pub fn open(dir: &Path) -> Result<Self, ModelError> {
        let config_path = dir.join("config.json");
        if !config_path.exists() {
            let reason = if dir.is_dir() {
                "no config.json here: needed a checkpoint folder as published (config.json beside *.safetensors)"
            } else {
                "no such folder"
            };
            return Err(ModelError::Folder { path: dir.to_owned(), reason: reason.to_owned() });
        }
        let config = read_object(&config_path)?;
        let geometry = Geometry::from_json(&config_path, &config)?;
        let generation = GenerationConfig::read(dir, &config)?;
        if let Some(id) = generation.eos_token_ids.iter().find(|id| **id as usize >= geometry.vocab) {
            return Err(ModelError::Key {
                path: dir.join("generation_config.json"),
                key: "eos_token_id".to_owned(),
                needed: format!("ids below vocab_size ({})", geometry.vocab),
                got: id.to_string(),
            });
        }
        let storage = Storage::open(dir)?;
        let (trunk, mut warnings) = sort_out(&storage, geometry.layers)?;
        let needs = inventory::needs(&geometry, |name| trunk.contains_key(name));
        let mut checkpoint =
            Self { dir: dir.to_owned(), geometry, generation, storage, trunk, needs, fingerprint: String::new(), warnings: Vec::new() };
        checkpoint.check_needs()?;
        warnings.extend(checkpoint.narrowed());
        warnings.extend(checkpoint.unknown());
        checkpoint.warnings = warnings;
        checkpoint.fingerprint = fingerprint::of(&checkpoint)?;
        Ok(checkpoint)
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Sizes and constants.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Sampling defaults and EOS ids.
    pub fn generation(&self) -> &GenerationConfig {
        &self.generation
    }

    /// Identity of config and weights, hexadecimal; equal wherever the same tensors lie, however they are cut into files.
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// What was skipped (draft block, vision tower, unknown tensors) or looks wrong (narrowed tensors), one sentence each.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Bytes of all tensors that the model uses.
    pub fn total_bytes(&self) -> u64 {
        self.bytes_where(|_| true)
    }

    /// Bytes of everything but the routed experts: what an attention worker holds at least.
    pub fn trunk_bytes(&self) -> u64 {
        self.bytes_where(|n| !n.routed)
    }

    /// Bytes of the routed experts' weights in a shard (every expert of a layer counts alike).
    pub fn shard_bytes(&self, shard: &Shard) -> u64 {
        let g = &self.geometry;
        let cells = u128::from(shard.experts.end - shard.experts.start) * u128::from(shard.ffn.end - shard.ffn.start);
        let all = (g.experts as u128 * g.moe_intermediate as u128).max(1);
        let layers = shard.layers.iter().cloned().flatten();
        layers.map(|layer| (u128::from(self.routed_bytes(layer as usize)) * cells / all) as u64).sum()
    }

    /// Bytes of all routed experts of one layer.
    pub fn routed_bytes(&self, layer: usize) -> u64 {
        let prefix = format!("layers.{layer}.mlp.experts.");
        self.bytes_where(|n| n.routed && n.name.starts_with(&prefix))
    }

    /// Cuts along the intermediate dimension fall on multiples of this many elements (the block of down_proj along `in`).
    pub fn ffn_block(&self) -> usize {
        let first = self.geometry.moe_layers().first().copied();
        first.and_then(|layer| self.expert(layer, 0).ok()).map_or(1, |e| e.down.dtype().block_elems())
    }

    fn bytes_where(&self, keep: impl Fn(&Need) -> bool) -> u64 {
        self.needs.iter().filter(|n| keep(n)).filter_map(|n| self.entry(&n.name)).map(|e| e.bytes() as u64).sum()
    }

    /// Whether a tensor is stored, by canonical name.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.trunk.contains_key(name)
    }

    pub(crate) fn entry(&self, name: &str) -> Option<&Entry> {
        self.trunk.get(name).map(|i| &self.storage.entries[*i])
    }

    /// Needed tensors in inventory order.
    pub(crate) fn needs(&self) -> &[Need] {
        &self.needs
    }

    pub(crate) fn bytes(&self, name: &str) -> Result<(&Entry, SharedBytes), ModelError> {
        let entry = self.entry(name).ok_or_else(|| self.missing(name, "a tensor of this name"))?;
        let bytes = self.storage.bytes(entry).ok_or_else(|| self.bad(entry, "bytes inside of the file", "an offset behind its end"))?;
        Ok((entry, bytes))
    }

    /// A two-dimensional tensor by canonical name.
    pub(crate) fn matrix(&self, name: &str) -> Result<MatrixSource, ModelError> {
        let (entry, bytes) = self.bytes(name)?;
        match *entry.shape.as_slice() {
            [rows, cols] => Ok(MatrixSource::new(entry.stored_name.as_str(), self.dtype(entry)?, rows, cols, bytes)?),
            _ => Err(self.bad(entry, "a matrix", &format!("shape {:?}", entry.shape))),
        }
    }

    /// A three-dimensional tensor `[A, B, C]` as a matrix `[A·B, C]`.
    pub(crate) fn stacked(&self, name: &str) -> Result<MatrixSource, ModelError> {
        let (entry, bytes) = self.bytes(name)?;
        match *entry.shape.as_slice() {
            [a, b, cols] => Ok(MatrixSource::new(entry.stored_name.as_str(), self.dtype(entry)?, a * b, cols, bytes)?),
            _ => Err(self.bad(entry, "a stack of matrices", &format!("shape {:?}", entry.shape))),
        }
    }

    /// A tensor of any shape as f32, row-major.
    pub(crate) fn vector(&self, name: &str) -> Result<Vec<f32>, ModelError> {
        let (entry, bytes) = self.bytes(name)?;
        let len = entry.shape.iter().product();
        Ok(MatrixSource::new(entry.stored_name.as_str(), self.dtype(entry)?, 1, len, bytes)?.to_f32())
    }

    fn dtype(&self, entry: &Entry) -> Result<DType, ModelError> {
        readable(entry.dtype).ok_or_else(|| {
            let needed = "BF16, F16 or F32 (quantised checkpoints are not read yet: use the BF16 release)";
            self.bad(entry, needed, &format!("{:?}", entry.dtype))
        })
    }

    fn check_needs(&self) -> Result<(), ModelError> {
        for need in &self.needs {
            let entry = self.entry(&need.name).ok_or_else(|| self.missing(&need.name, &format!("shape {:?}", need.shape)))?;
            self.dtype(entry)?;
            if entry.shape != need.shape {
                let needed = format!("shape {:?} (from config.json)", need.shape);
                return Err(self.bad(entry, &needed, &format!("{:?}", entry.shape)));
            }
        }
        Ok(())
    }

    fn missing(&self, name: &str, needed: &str) -> ModelError {
        ModelError::Tensor {
            path: self.dir.clone(),
            tensor: if name.starts_with("lm_head") { name.to_owned() } else { format!("model.language_model.{name}") },
            needed: needed.to_owned(),
            got: "nothing: no file has it, under this or any other known spelling".to_owned(),
        }
    }

    fn bad(&self, entry: &Entry, needed: &str, got: &str) -> ModelError {
        ModelError::Tensor {
            path: self.storage.path(entry).to_owned(),
            tensor: entry.stored_name.clone(),
            needed: needed.to_owned(),
            got: got.to_owned(),
        }
    }

    /// Tensors that the release keeps in F32 and this checkpoint does not.
    fn narrowed(&self) -> Option<String> {
        let narrow = self.needs.iter().filter(|n| n.keeps_f32).filter_map(|n| self.entry(&n.name)).filter(|e| e.dtype != Dtype::F32);
        let names: Vec<String> = narrow.map(|e| format!("{} ({:?})", e.stored_name, e.dtype)).collect();
        let tail = "the release keeps them in F32, so digits were lost when this checkpoint was made";
        listing(&names).map(|list| format!("{} tensors are stored narrower than F32: {list}; {tail}", names.len()))
    }

    /// Tensors that nothing asks for.
    fn unknown(&self) -> Option<String> {
        let known: std::collections::BTreeSet<&str> = self.needs.iter().map(|n| n.name.as_str()).collect();
        let left = self.trunk.iter().filter(|(name, _)| !known.contains(name.as_str()));
        let names: Vec<String> = left.map(|(_, i)| self.storage.entries[*i].stored_name.clone()).collect();
        listing(&names).map(|list| format!("{} tensors are unknown and were ignored: {list}", names.len()))
    }
}

/// The first few of some names; `None` where there are none.
fn listing(names: &[String]) -> Option<String> {
    const SHOWN: usize = 4;
    let more = if names.len() > SHOWN { ", …" } else { "" };
    (!names.is_empty()).then(|| format!("{}{more}", names[..names.len().min(SHOWN)].join(", ")))
}

/// The element types that can be read.
fn readable(dtype: Dtype) -> Option<DType> {
    match dtype {
        Dtype::F32 => Some(DType::F32),
        Dtype::F16 => Some(DType::F16),
        Dtype::BF16 => Some(DType::Bf16),
        _ => None,
    }
}

/// Gives every stored tensor its meaning; says what is skipped.
fn sort_out(storage: &Storage, layers: usize) -> Result<(BTreeMap<String, usize>, Vec<String>), ModelError> {
    let mut trunk = BTreeMap::new();
    let (mut mtp, mut vision) = ((0, 0), (0, 0));
    for (i, entry) in storage.entries.iter().enumerate() {
        let skipped = match classify(&entry.stored_name, layers) {
            Name::Trunk(name) => {
                if let Some(first) = trunk.insert(name, i) {
                    return Err(storage.duplicate(&storage.entries[first], entry));
                }
                continue;
            }
            Name::Mtp => &mut mtp,
            Name::Vision => &mut vision,
        };
        *skipped = (skipped.0 + 1, skipped.1 + entry.bytes());
    }
    let said = |what: &str, (count, bytes): (usize, usize)| {
        (count > 0).then(|| format!("skipped the {what}: {count} tensors, {:.1} MiB (not served)", bytes as f64 / 1048576.0))
    };
    let warnings = [said("draft (MTP) block", mtp), said("vision tower", vision)].into_iter().flatten().collect();
    Ok((trunk, warnings))
}
