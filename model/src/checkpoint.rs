//! [`Checkpoint`]: a folder whose config and weights fit together.
//!
//! Opening reads headers (and 4 KiB samples for the fingerprint), and checks every tensor that the geometry needs: name, shape, type.
//! What is left over is named in [`Checkpoint::warnings`]. [`Checkpoint::open_headers`] does the same without the data.
//!
//! Neighbours: `storage/` maps the files, `inventory.rs` says what is needed, `tensors.rs` hands out typed tensors, `weigh.rs` and `census.rs`
//! count them, `notes.rs` says what is odd.

use std::{
    collections::BTreeMap,
    fmt,
    path::{Path, PathBuf},
};

use serde_json::Value;
use tandem_quant::SharedBytes;

use crate::{
    GenerationConfig, Geometry, ModelError, fingerprint,
    gguf::{
        self,
        names::{GgufName, classify as classify_gguf},
    },
    inventory::{self, Need},
    json::read_object,
    locate::{Format, format_at},
    names::{Name, classify},
    narrow::Fp8Groups,
    notes::listing,
    storage::{Entry, Reach, Storage, Stored},
};

/// A validated checkpoint folder. Holds maps of its files; the tensors it hands out keep them alive by themselves.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    config_file: PathBuf,
    geometry: Geometry,
    generation: GenerationConfig,
    storage: Storage,
    /// Canonical name → place in `storage.entries`.
    trunk: BTreeMap<String, usize>,
    needs: Vec<Need>,
    fp8_block: [usize; 2],
    /// Groups that are handed out narrowed.
    pub(crate) narrowed_groups: Fp8Groups,
    fingerprint: String,
    skipped: Vec<Skipped>,
    warnings: Vec<String>,
}

/// Where a checkpoint's weights come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LoadFormat {
    /// From its files.
    #[default]
    Auto,
    /// Made up from its headers alone, to measure speed and memory of a geometry (`storage/dummy.rs` has the values).
    Dummy,
}

/// Tensors of a part of the model that is not served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Skipped {
    /// The part in words.
    pub what: &'static str,
    /// Number of tensors.
    pub tensors: usize,
    /// Their bytes.
    pub bytes: u64,
}

impl Checkpoint {
    /// Opens a checkpoint and checks that everything that the model needs is there: a folder as published (config.json beside
    /// safetensors), a GGUF file (any shard of a set), or a folder that holds one GGUF set.
    ///
    /// # Errors
    /// Names the file, key or tensor that does not fit.
    pub fn open(path: &Path) -> Result<Self, ModelError> {
        let mut checkpoint = Self::open_reaching(path, Reach::Data)?;
        // Samples are few and far apart: reading around each of them would read most of a file twice.
        checkpoint.storage.expect_order(false);
        checkpoint.fingerprint = fingerprint::of(&checkpoint)?;
        checkpoint.storage.expect_order(true);
        Ok(checkpoint)
    }

    /// As [`Checkpoint::open`], or with made-up weights.
    ///
    /// # Errors
    /// As [`Checkpoint::open`].
    pub fn open_as(path: &Path, format: LoadFormat) -> Result<Self, ModelError> {
        if format == LoadFormat::Auto {
            return Self::open(path);
        }
        let mut checkpoint = Self::open_headers(path)?;
        checkpoint.storage.make_up();
        checkpoint.fingerprint = fingerprint::of(&checkpoint)?;
        checkpoint.warnings.push("the weights are made up (--load-format dummy): answers mean nothing, times do".to_owned());
        Ok(checkpoint)
    }

    /// As [`Checkpoint::open`], but files may end right behind their headers, and no fingerprint is taken
    /// ([`Checkpoint::fingerprint`] is empty). Such a checkpoint knows all sizes; its tensors may have no bytes.
    ///
    /// # Errors
    /// As [`Checkpoint::open`].
    pub fn open_headers(path: &Path) -> Result<Self, ModelError> {
        Self::open_reaching(path, Reach::Headers)
    }

    fn open_reaching(path: &Path, reach: Reach) -> Result<Self, ModelError> {
        let dir = if path.is_dir() { path.to_owned() } else { path.parent().unwrap_or(path).to_owned() };
        let (storage, config_path, config, geometry, generation) = match format_at(path)? {
            Format::Safetensors => {
                let config_path = path.join("config.json");
                let config = read_object(&config_path)?;
                // The geometry is checked first: its errors say more than a missing tensor.
                let geometry = Geometry::from_json(&config_path, &config)?;
                let generation = GenerationConfig::read(&dir, &config, geometry.vocab)?;
                (Storage::open_safetensors(path, reach)?, config_path, config, geometry, generation)
            }
            Format::Gguf => {
                let (mut storage, file, header) = Storage::open_gguf(path, reach)?;
                let config = gguf::config::config(&file, &header, &storage.gguf_infos())?;
                let own_keys = |error| gguf::keys::in_own_keys(error, &header);
                let geometry = Geometry::from_json(&file, &config).map_err(own_keys)?;
                let generation = GenerationConfig::from_gguf(&file, &header, geometry.vocab)?;
                storage.gguf = Some(header);
                (storage, file, config, geometry, generation)
            }
        };
        let (trunk, skipped) = sort_out(&storage, geometry.layers)?;
        let is_gguf = storage.gguf.is_some();
        // GGUF has some tensors in one form alone: where one is missing, it is missing in that form.
        let gguf_form = |name: &str| [NEG_EXP, KEY_UP, STACK].iter().any(|form| name.ends_with(form));
        let needs = inventory::needs(&geometry, |name| trunk.contains_key(name) || is_gguf && gguf_form(name));
        let mut checkpoint = Self {
            dir,
            fp8_block: fp8_block(&config_path, &config)?,
            narrowed_groups: Fp8Groups::default(),
            config_file: config_path,
            geometry,
            generation,
            storage,
            trunk,
            needs,
            fingerprint: String::new(),
            skipped,
            warnings: Vec::new(),
        };
        checkpoint.check_needs()?;
        checkpoint.warnings = checkpoint.notes();
        Ok(checkpoint)
    }

    /// Whether some file ends right behind its header ([`Checkpoint::open_headers`]).
    pub fn is_stub(&self) -> bool {
        self.storage.stub
    }

    /// Number of weight files.
    pub fn file_count(&self) -> usize {
        self.storage.file_count()
    }

    /// Number of stored tensors, those that are not used included.
    pub fn tensor_count(&self) -> usize {
        self.storage.entries.len()
    }

    /// Parts of the model that are there and not served.
    pub fn skipped(&self) -> &[Skipped] {
        &self.skipped
    }

    /// The GGUF header with the model's and the tokenizer's keys, where this is a GGUF checkpoint.
    pub fn gguf(&self) -> Option<&gguf::Header> {
        self.storage.gguf.as_ref()
    }

    /// The file that the geometry came from: `config.json`, or the GGUF file with the model's keys.
    pub fn config_file(&self) -> &Path {
        &self.config_file
    }

    /// The folder (of a GGUF file: the one it is in).
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

    /// Identity of config and weights, hexadecimal; equal wherever the same tensors lie, however they are cut into files. Empty after
    /// [`Checkpoint::open_headers`].
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// What was skipped (draft block, vision tower, unknown tensors) or looks wrong (narrowed tensors), one sentence each.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Elements per scale of native FP8, `[rows, cols]`.
    pub(crate) fn fp8_block(&self) -> [usize; 2] {
        self.fp8_block
    }

    /// The files.
    pub(crate) fn storage(&self) -> &Storage {
        &self.storage
    }

    /// Codebooks of ROCmFP tensors.
    pub(crate) fn codebooks(&self) -> &gguf::sidecar::Codebooks {
        &self.storage.codebooks
    }

    /// Whether a tensor is stored, by canonical name.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.trunk.contains_key(name)
    }

    pub(crate) fn entry(&self, name: &str) -> Option<&Entry> {
        self.trunk.get(name).map(|i| &self.storage.entries[*i])
    }

    /// All stored tensors of the trunk, by canonical name, ascending.
    pub(crate) fn stored(&self) -> impl Iterator<Item = (&str, &Entry)> {
        self.trunk.iter().map(|(name, i)| (name.as_str(), &self.storage.entries[*i]))
    }

    /// Needed tensors in inventory order.
    pub(crate) fn needs(&self) -> &[Need] {
        &self.needs
    }

    /// The bytes of an entry.
    pub(crate) fn entry_bytes(&self, entry: &Entry) -> Result<SharedBytes, ModelError> {
        let got = "a file that ends before them (a header-only stub, or truncated)";
        self.storage.bytes(entry).ok_or_else(|| self.bad(entry, "its bytes in the file", got))
    }

    fn check_needs(&self) -> Result<(), ModelError> {
        for need in &self.needs {
            let layout = match self.layout(&need.name) {
                Err(ModelError::Tensor { got, .. }) if got.starts_with(NOWHERE) => {
                    return Err(self.missing(&need.name, &format!("shape {:?}", need.shape)));
                }
                other => other?,
            };
            if layout.shape != need.shape {
                let origin = if self.gguf().is_some() { "from the metadata" } else { "from the config" };
                let needed = format!("shape {:?} ({origin})", need.shape);
                return Err(self.bad(layout.weight, &needed, &format!("{:?}", layout.shape)));
            }
            if !need.matrix && layout.is_scaled() {
                let got = format!("{} with scales beside it", layout.dtype);
                return Err(self.bad(layout.weight, "plain values: this tensor is no matrix", &got));
            }
        }
        Ok(())
    }

    pub(crate) fn missing(&self, name: &str, needed: &str) -> ModelError {
        let stored = self.gguf().and_then(|_| gguf::names::stored(name));
        let name = [NEG_EXP, KEY_UP, VALUE_UP].iter().find_map(|form| name.strip_suffix(form)?.strip_suffix('.')).unwrap_or(name);
        let published = if name.starts_with("lm_head") { name.to_owned() } else { format!("model.language_model.{name}") };
        ModelError::Tensor {
            // No file has it: the folder, or the GGUF file with the model's keys.
            path: if stored.is_some() { self.config_file.clone() } else { self.dir.clone() },
            tensor: stored.map_or(published, |stored| format!("{stored} ({name})")),
            needed: needed.to_owned(),
            got: format!("{NOWHERE}{}", self.beside(name)),
        }
    }

    /// What is stored under the base name of a missing weight: of GPTQ, AWQ and the like, `X.qweight` in place of `X.weight`.
    fn beside(&self, name: &str) -> String {
        let Some(base) = name.strip_suffix("weight") else { return String::new() };
        let names = self.trunk.range(base.to_owned()..).take_while(|(other, _)| other.starts_with(base));
        let names: Vec<String> = names.map(|(_, i)| self.storage.entries[*i].stored_name.clone()).collect();
        listing(&names).map_or_else(String::new, |list| format!(" (beside it: {list})"))
    }

    pub(crate) fn bad(&self, entry: &Entry, needed: &str, got: &str) -> ModelError {
        ModelError::Tensor {
            path: self.storage.path(entry).to_owned(),
            tensor: entry.stored_name.clone(),
            needed: needed.to_owned(),
            got: got.to_owned(),
        }
    }
}

/// What [`Checkpoint::missing`] says is there.
const NOWHERE: &str = "nothing: no file has it, under this or any other known spelling";

/// `quantization_config.weight_block_size`; 128 × 128 where it is not said.
fn fp8_block(path: &Path, config: &Value) -> Result<[usize; 2], ModelError> {
    let quantization = ["/quantization_config/weight_block_size", "/text_config/quantization_config/weight_block_size"];
    let Some(value) = quantization.iter().find_map(|pointer| config.pointer(pointer)).filter(|v| !v.is_null()) else {
        return Ok([128, 128]);
    };
    let sizes: Option<Vec<usize>> = value.as_array().map(|list| list.iter().filter_map(|n| usize::try_from(n.as_u64()?).ok()).collect());
    match sizes.as_deref() {
        Some([rows, cols]) if *rows > 0 && *cols > 0 => Ok([*rows, *cols]),
        _ => Err(ModelError::Key {
            path: path.to_owned(),
            key: "quantization_config.weight_block_size".to_owned(),
            needed: "two whole numbers of at least 1".to_owned(),
            got: value.to_string(),
        }),
    }
}

impl fmt::Display for Skipped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "skipped the {}: {} tensors, {:.1} MiB (not served)", self.what, self.tensors, self.bytes as f64 / 1048576.0)
    }
}

/// Gives every stored tensor its meaning; says what is skipped.
fn sort_out(storage: &Storage, layers: usize) -> Result<(BTreeMap<String, usize>, Vec<Skipped>), ModelError> {
    let mut trunk = BTreeMap::new();
    let nothing = |what| Skipped { what, tensors: 0, bytes: 0 };
    let (mut mtp, mut vision) = (nothing("draft (MTP) block"), nothing("vision tower"));
    for (i, entry) in storage.entries.iter().enumerate() {
        let name = match entry.stored {
            Stored::Safetensors(_) => classify(&entry.stored_name, layers),
            Stored::Ggml(_) => from_gguf(&entry.stored_name, layers),
        };
        let skipped = match name {
            Name::Trunk(name) => {
                if let Some(first) = trunk.insert(name, i) {
                    return Err(storage.duplicate(&storage.entries[first], entry));
                }
                continue;
            }
            Name::Mtp => &mut mtp,
            Name::Vision => &mut vision,
        };
        skipped.tensors += 1;
        skipped.bytes += entry.bytes() as u64;
    }
    Ok((trunk, [mtp, vision].into_iter().filter(|s| s.tensors > 0).collect()))
}

/// A GGUF name in canonical terms; transformed tensors keep names of their own, which `inventory.rs` and `tensors.rs` know.
fn from_gguf(stored: &str, layers: usize) -> Name {
    let canonical = |name: GgufName| match name {
        GgufName::Same(name) | GgufName::Stack(name) => Some(name),
        GgufName::NegExp(name) => Some(format!("{name}.{NEG_EXP}")),
        GgufName::KeyUp(name) => Some(format!("{name}.{KEY_UP}")),
        GgufName::ValueUp(name) => Some(format!("{name}.{VALUE_UP}")),
        GgufName::Scale(_) | GgufName::Skipped | GgufName::Unknown => None,
    };
    match classify_gguf(stored, layers) {
        GgufName::Skipped => Name::Mtp,
        GgufName::Unknown => Name::Trunk(stored.to_owned()),
        GgufName::Scale(base) => {
            let scaled = canonical(classify_gguf(&format!("{base}.weight"), layers)).unwrap_or(base);
            Name::Trunk(format!("{}.scale", scaled.strip_suffix(".weight").unwrap_or(&scaled)))
        }
        name => Name::Trunk(canonical(name).unwrap_or_else(|| stored.to_owned())),
    }
}

/// Suffix of A_log stored as −exp(A_log).
pub(crate) const NEG_EXP: &str = "neg_exp";
/// Suffix of the transposed k rows of kv_b_proj.
pub(crate) const KEY_UP: &str = "k_b";
/// Suffix of a stack of gate projections: where it is, up and down are stacks, too.
const STACK: &str = ".mlp.experts.gate_proj";
/// Suffix of the v rows of kv_b_proj.
pub(crate) const VALUE_UP: &str = "v_b";
