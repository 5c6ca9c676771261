//! Safetensors: one file, or an index and its shards.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use ::safetensors::tensor::Metadata;
use serde_json::Value;

use super::{Entry, Reach, Storage, Stored, files_in, map};
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
    pub fn open_safetensors(dir: &Path, reach: Reach) -> Result<Self, ModelError> {
        let index = dir.join(INDEX);
        if index.exists() { Self::open_index(dir, &index, reach) } else { Self::open_single(dir, reach) }
    }

    fn open_single(dir: &Path, reach: Reach) -> Result<Self, ModelError> {
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
        storage.add(&dir.join(name), reach)?;
        storage.sort()
    }

    fn open_index(dir: &Path, index: &Path, reach: Reach) -> Result<Self, ModelError> {
        let json = read_object(index)?;
        let wanted = files_of(index, &json)?;
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
            storage.add(&path, reach)?;
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

    fn add(&mut self, path: &Path, reach: Reach) -> Result<(), ModelError> {
        let bytes = map(path)?;
        let Header { start, end, metadata } = header(path, &bytes)?;
        if reach == Reach::Headers && bytes.len() == start && start < end {
            self.stub = true;
        } else if bytes.len() != end {
            return Err(wrong_length(path, end, bytes.len()));
        }
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
        self.push(path, bytes);
        Ok(())
    }
}

/// `model-00001-of-00003.safetensors`.
fn looks_like_a_shard(name: &str) -> bool {
    name.contains("-of-")
}

/// What a file's header says.
#[derive(Debug)]
pub struct Header {
    /// Where the data starts.
    pub start: usize,
    /// Where it ends.
    pub end: usize,
    /// The tensors; their offsets count from [`Header::start`], follow each other without a gap, and fit type and shape.
    pub metadata: Metadata,
}

/// Reads the header at the start of `bytes`; what follows it is not looked at. `path` is for messages.
///
/// # Errors
/// Not a safetensors header, or one that is cut off.
pub fn header(path: &Path, bytes: &[u8]) -> Result<Header, ModelError> {
    let no_header = |error: &str| ModelError::File {
        path: path.to_owned(),
        needed: "a safetensors file".to_owned(),
        got: format!("{} bytes{} ({error})", bytes.len(), text_instead(bytes)),
    };
    let length = bytes.first_chunk::<8>().and_then(|b| usize::try_from(u64::from_le_bytes(*b)).ok()).filter(|n| *n < 1 << 32);
    let start = 8 + length.ok_or_else(|| no_header("no length of a header at its start"))?;
    let text = bytes.get(8..start).ok_or_else(|| wrong_length(path, start, bytes.len()))?;
    let metadata: Metadata = serde_json::from_slice(text).map_err(|e| no_header(&e.to_string()))?;
    let data = metadata.tensors().values().map(|t| t.data_offsets.1).max().unwrap_or(0);
    let end = start.checked_add(data).ok_or_else(|| no_header("data of 2^64 bytes"))?;
    Ok(Header { start, end, metadata })
}

/// File name → tensors in it, from the content of an index. `path` is for messages.
///
/// # Errors
/// Names the key that is not what it should be; a file name that leads out of the folder.
pub fn files_of<'a>(path: &Path, index: &'a Value) -> Result<BTreeMap<&'a str, BTreeSet<&'a str>>, ModelError> {
    let top = Section::new(path, index);
    let map = index.get("weight_map").and_then(Value::as_object).ok_or_else(|| {
        top.error("weight_map", "an object: tensor name → file name", index.get("weight_map").map_or("nothing".into(), describe))
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
    Ok(wanted)
}

fn wrong_length(path: &Path, needed: usize, got: usize) -> ModelError {
    let hint = if got < needed { ": the file is truncated (download it again)" } else { "" };
    ModelError::File { path: path.to_owned(), needed: format!("{needed} bytes, as its header says"), got: format!("{got} bytes{hint}") }
}

/// Small text files in the place of weights: pointers that were never followed.
fn text_instead(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) if text.starts_with("version https://git-lfs") => ": a Git LFS pointer (git lfs pull fetches the file)".to_owned(),
        Ok(text) if bytes.len() < 4096 => format!(": the text {:?}", text.chars().take(60).collect::<String>()),
        _ => String::new(),
    }
}
