//! Safetensors: one file, or an index and its shards.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use ::safetensors::{SafeTensors, tensor::SafeTensorError};

use super::{Entry, Storage, Stored, files_in, map};
use crate::{
    ModelError,
    json::{Section, describe, read_object},
};

/// Name of the index file of a sharded checkpoint.
pub const INDEX: &str = "model.safetensors.index.json";
/// Name of an unsharded checkpoint's only file.
pub const SINGLE: &str = "model.safetensors";

impl Storage {
    /// Maps the files of a folder and reads their headers.
    ///
    /// # Errors
    /// No weights there; an index without its files, or files without their index; a truncated or malformed file; a tensor that is in
    /// two files, or not where the index says.
    pub fn open_safetensors(dir: &Path) -> Result<Self, ModelError> {
        let index = dir.join(INDEX);
        if index.exists() { Self::open_index(dir, &index) } else { Self::open_single(dir) }
    }

    fn open_single(dir: &Path) -> Result<Self, ModelError> {
        let found = files_in(dir, "safetensors")?;
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
        let mut storage = Self::empty();
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
        let mut storage = Self::empty();
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
                stored: Stored::Safetensors(info.dtype),
                shape: info.shape.clone(),
                range: start + from..start + to,
            });
        }
        self.files.push((path.to_owned(), bytes));
        Ok(())
    }
}

/// `model-00001-of-00003.safetensors`.
fn looks_like_a_shard(name: &str) -> bool {
    name.contains("-of-")
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
