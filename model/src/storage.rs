//! Safetensors files through `mmap`: one file, or an index and its shards.
//!
//! Nothing is copied: a tensor is a range of a mapped file, kept alive by [`SharedBytes`]. The only unsafe block of this crate is the
//! map itself.
//!
//! Neighbours: `checkpoint.rs` gives the stored names their meaning.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
};

use safetensors::{
    SafeTensors,
    tensor::{Dtype, SafeTensorError},
};
use tandem_quant::SharedBytes;

use crate::{
    ModelError,
    json::{Section, describe, read_object},
};

/// Name of the index file of a sharded checkpoint.
pub const INDEX: &str = "model.safetensors.index.json";
/// Name of an unsharded checkpoint's only file.
pub const SINGLE: &str = "model.safetensors";

/// Where a stored tensor lies.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Its name in the file.
    pub stored_name: String,
    /// Number of the file.
    pub file: usize,
    /// Element type as the file has it.
    pub dtype: Dtype,
    /// Shape.
    pub shape: Vec<usize>,
    range: Range<usize>,
}

impl Entry {
    /// Bytes on disk.
    pub fn bytes(&self) -> usize {
        self.range.len()
    }
}

/// The mapped files of a checkpoint and the tensors in them.
#[derive(Debug)]
pub struct Storage {
    files: Vec<(PathBuf, SharedBytes)>,
    /// All tensors, in the order of their stored names.
    pub entries: Vec<Entry>,
}

impl Storage {
    /// Maps the files of a folder and reads their headers.
    ///
    /// # Errors
    /// No weights there; an index without its files, or files without their index; a truncated or malformed file; a tensor that is in
    /// two files, or not where the index says.
    pub fn open(dir: &Path) -> Result<Self, ModelError> {
        let index = dir.join(INDEX);
        if index.exists() { Self::open_index(dir, &index) } else { Self::open_single(dir) }
    }

    fn open_single(dir: &Path) -> Result<Self, ModelError> {
        let found = safetensors_in(dir)?;
        let name = match found.as_slice() {
            _ if found.iter().any(|f| f == SINGLE) => SINGLE,
            [] => {
                let reason = format!("no weights here: needed {SINGLE}, or {INDEX} and the files it names, beside config.json");
                return Err(ModelError::Folder { path: dir.to_owned(), reason });
            }
            [one] if !looks_like_a_shard(one) => one,
            _ => {
                let reason = format!("{} .safetensors files ({}, …) but no {INDEX} to say what belongs together", found.len(), found[0]);
                return Err(ModelError::Folder { path: dir.to_owned(), reason });
            }
        };
        let mut storage = Self { files: Vec::new(), entries: Vec::new() };
        storage.add(&dir.join(name))?;
        storage.sort()
    }

    fn open_index(dir: &Path, index: &Path) -> Result<Self, ModelError> {
        let json = read_object(index)?;
        let top = Section::new(index, &json);
        let map = json.get("weight_map").and_then(|m| m.as_object()).ok_or_else(|| {
            top.error("weight_map", "an object: tensor name → file name", json.get("weight_map").map_or("nothing".into(), describe))
        })?;
        let mut wanted: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        for (tensor, file) in map {
            let needed = "the name of a file in the same folder";
            let name = file.as_str().ok_or_else(|| top.error(&format!("weight_map.{tensor}"), needed, describe(file)))?;
            if name.is_empty() || name.contains(['/', '\\']) || name == ".." {
                return Err(top.error(&format!("weight_map.{tensor}"), needed, describe(file)));
            }
            wanted.entry(name).or_default().insert(tensor);
        }
        let mut storage = Self { files: Vec::new(), entries: Vec::new() };
        for (name, tensors) in &wanted {
            let path = dir.join(name);
            if !path.exists() {
                let first = tensors.first().copied().unwrap_or_default();
                return Err(ModelError::File {
                    path,
                    needed: format!("this file: {INDEX} says that it holds {} tensors (the first is {first})", tensors.len()),
                    got: "no such file (download it again, or check the name in the index)".to_owned(),
                });
            }
            storage.add(&path)?;
            let file = storage.files.len() - 1;
            let here: BTreeSet<&str> = storage.entries.iter().filter(|e| e.file == file).map(|e| e.stored_name.as_str()).collect();
            if let Some(missing) = tensors.iter().find(|t| !here.contains(*t)) {
                return Err(ModelError::Tensor {
                    path,
                    tensor: (*missing).to_owned(),
                    needed: format!("in this file, as {INDEX} says"),
                    got: "no such tensor in it".to_owned(),
                });
            }
        }
        storage.sort()
    }

    fn add(&mut self, path: &Path) -> Result<(), ModelError> {
        let bytes = map(path)?;
        let (header, metadata) = SafeTensors::read_metadata(&bytes).map_err(|e| malformed(path, &bytes, &e))?;
        let start = 8 + header;
        for (name, info) in metadata.tensors() {
            let (from, to) = info.data_offsets;
            self.entries.push(Entry {
                stored_name: name,
                file: self.files.len(),
                dtype: info.dtype,
                shape: info.shape.clone(),
                range: start + from..start + to,
            });
        }
        self.files.push((path.to_owned(), bytes));
        Ok(())
    }

    fn sort(mut self) -> Result<Self, ModelError> {
        self.entries.sort_by(|a, b| a.stored_name.cmp(&b.stored_name));
        match self.entries.windows(2).find(|w| w[0].stored_name == w[1].stored_name) {
            Some(twice) => Err(self.duplicate(&twice[0], &twice[1])),
            None => Ok(self),
        }
    }

    /// The error for two stored tensors that mean the same one.
    pub fn duplicate(&self, a: &Entry, b: &Entry) -> ModelError {
        ModelError::Tensor {
            path: self.path(b).to_owned(),
            tensor: b.stored_name.clone(),
            needed: "each tensor once".to_owned(),
            got: format!("a second one: {} in {}", a.stored_name, self.path(a).display()),
        }
    }

    /// The file that an entry is in.
    pub fn path(&self, entry: &Entry) -> &Path {
        &self.files[entry.file].0
    }

    /// The bytes of an entry; `None` is impossible for entries of this storage.
    pub fn bytes(&self, entry: &Entry) -> Option<SharedBytes> {
        self.files[entry.file].1.slice(entry.range.clone())
    }
}

fn safetensors_in(dir: &Path) -> Result<Vec<String>, ModelError> {
    let io = |source| ModelError::Io { path: dir.to_owned(), source };
    let mut names = Vec::new();
    for entry in fs::read_dir(dir).map_err(io)? {
        let name = entry.map_err(io)?.file_name().to_string_lossy().into_owned();
        if name.ends_with(".safetensors") {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}

/// `model-00001-of-00003.safetensors`.
fn looks_like_a_shard(name: &str) -> bool {
    name.contains("-of-")
}

fn map(path: &Path) -> Result<SharedBytes, ModelError> {
    let io = |source| ModelError::Io { path: path.to_owned(), source };
    let file = File::open(path).map_err(io)?;
    // SAFETY: the map is read-only and private to this process's view; we hand out `&[u8]` of it alone. As with every mapped file, the
    // bytes are undefined if another process writes to it meanwhile, and a shrunk file raises SIGBUS: checkpoints are never changed in
    // place (our own writers write to a temporary folder and rename it).
    let map = unsafe { memmap2::Mmap::map(&file) }.map_err(io)?;
    Ok(SharedBytes::new(Arc::new(map)))
}

fn malformed(path: &Path, bytes: &[u8], error: &SafeTensorError) -> ModelError {
    let end = match error {
        SafeTensorError::MetadataIncompleteBuffer => data_end(bytes),
        SafeTensorError::InvalidHeaderLength => declared_header(bytes).map(|n| n + 8),
        _ => None,
    };
    let got = format!("{} bytes", bytes.len());
    match end {
        Some(end) if end > bytes.len() => ModelError::File {
            path: path.to_owned(),
            needed: format!("{end} bytes, as its header says"),
            got: format!("{got}: the file is truncated (download it again)"),
        },
        Some(end) => ModelError::File { path: path.to_owned(), needed: format!("{end} bytes, as its header says"), got },
        None => ModelError::File {
            path: path.to_owned(),
            needed: "a safetensors file".to_owned(),
            got: format!("{got}{} ({error})", text_instead(bytes)),
        },
    }
}

/// Small text files in the place of weights: pointers that were never followed.
fn text_instead(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) if text.starts_with("version https://git-lfs") => ": a Git LFS pointer (git lfs pull fetches the file)".to_owned(),
        Ok(text) if bytes.len() < 4096 => format!(": the text {:?}", text.chars().take(60).collect::<String>()),
        _ => String::new(),
    }
}

fn declared_header(bytes: &[u8]) -> Option<usize> {
    let length = bytes.get(..8)?.try_into().ok().map(u64::from_le_bytes)?;
    usize::try_from(length).ok().filter(|n| *n < 1 << 32)
}

/// Where the data of a file ends by its own header.
fn data_end(bytes: &[u8]) -> Option<usize> {
    let header = declared_header(bytes)?;
    let json: serde_json::Value = serde_json::from_slice(bytes.get(8..8 + header)?).ok()?;
    let ends = json.as_object()?.values().filter_map(|t| t.get("data_offsets")?.get(1)?.as_u64());
    usize::try_from(ends.max()?).ok().map(|end| 8 + header + end)
}
