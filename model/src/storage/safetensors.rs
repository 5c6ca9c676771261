//! Safetensors: one file, or an index and its shards.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use ::safetensors::tensor::{Metadata, TensorInfo};
use serde::Deserialize as _;
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
        let there = index.try_exists().map_err(|source| ModelError::Io { path: index.clone(), source })?;
        if there { Self::open_index(dir, &index, reach) } else { Self::open_single(dir, reach) }
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
        let is_stub = reach == Reach::Headers && bytes.len() == start && start < end;
        if !is_stub && bytes.len() != end {
            return Err(wrong_length(path, end, bytes.len()));
        }
        if start < end {
            self.reaches(path, is_stub);
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

/// Whether a path has the format's extension, in any case.
pub fn is_safetensors(path: &Path) -> bool {
    path.extension().is_some_and(|e| e.eq_ignore_ascii_case("safetensors"))
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
    let metadata: Metadata =
        serde_json::from_slice(text).map_err(|e| odd_tensor(path, text).unwrap_or_else(|| no_header(&e.to_string())))?;
    if let Some(twice) = name_given_twice(text) {
        let (needed, got) = ("one entry in the header".to_owned(), "two of this name".to_owned());
        return Err(ModelError::Tensor { path: path.to_owned(), tensor: twice, needed, got });
    }
    let data = metadata.tensors().values().map(|t| t.data_offsets.1).max().unwrap_or(0);
    let end = start.checked_add(data).ok_or_else(|| no_header("data of 2^64 bytes"))?;
    Ok(Header { start, end, metadata })
}

/// A key that a header has twice: readers of JSON keep the last one and say nothing.
fn name_given_twice(text: &[u8]) -> Option<String> {
    struct Twice(Option<String>);
    impl<'de> serde::Deserialize<'de> for Twice {
        fn deserialize<D: serde::Deserializer<'de>>(json: D) -> Result<Self, D::Error> {
            struct Names;
            impl<'de> serde::de::Visitor<'de> for Names {
                type Value = Twice;
                fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                    f.write_str("an object")
                }
                fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<Twice, A::Error> {
                    let (mut seen, mut twice) = (BTreeSet::new(), None);
                    while let Some((name, _)) = map.next_entry::<String, serde::de::IgnoredAny>()? {
                        if let Some(known) = seen.replace(name) {
                            twice = twice.or(Some(known));
                        }
                    }
                    Ok(Twice(twice))
                }
            }
            json.deserialize_map(Names)
        }
    }
    serde_json::from_slice::<Twice>(text).ok()?.0
}

/// The first tensor of a header that cannot be read which is to blame for it.
fn odd_tensor(path: &Path, text: &[u8]) -> Option<ModelError> {
    let tensors: serde_json::Map<String, Value> = serde_json::from_slice(text).ok()?;
    let odd = |tensor: &str, needed: String, got: String| {
        Some(ModelError::Tensor { path: path.to_owned(), tensor: tensor.to_owned(), needed, got })
    };
    let mut infos: Vec<(&str, TensorInfo)> = Vec::with_capacity(tensors.len());
    for (name, info) in tensors.iter().filter(|(name, _)| *name != "__metadata__") {
        match TensorInfo::deserialize(info) {
            Ok(info) => infos.push((name, info)),
            Err(error) => return odd(name, "a dtype, a shape and two data_offsets".to_owned(), format!("{} ({error})", describe(info))),
        }
    }
    infos.sort_by_key(|(_, info)| info.data_offsets);
    let mut start = 0;
    for (name, info) in infos {
        let (from, to) = info.data_offsets;
        let elems = info.shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d));
        let bits = elems.and_then(|n| n.checked_mul(info.dtype.bitsize()));
        let Some(bytes) = bits.filter(|bits| bits % 8 == 0).map(|bits| bits / 8) else {
            return odd(name, format!("a shape of whole bytes of {}, fewer than 2^61", info.dtype), format!("{:?}", info.shape));
        };
        if from != start {
            let needed = format!("data_offsets from {start}, where the tensor before it ends");
            return odd(name, needed, format!("[{from}, {to}]"));
        }
        if to.checked_sub(from) != Some(bytes) {
            let needed = format!("data_offsets {bytes} bytes apart: {} {:?}", info.dtype, info.shape);
            return odd(name, needed, format!("[{from}, {to}]"));
        }
        start = to;
    }
    None
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_that_are_wrong_name_the_tensor() {
        let error = |json: &str| {
            let bytes = [&(json.len() as u64).to_le_bytes(), json.as_bytes()].concat();
            header(Path::new("m.safetensors"), &bytes).expect_err(json).to_string()
        };
        let a = r#""a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}"#;
        for (b, words) in [
            (r#"{"dtype": "F4_NEW", "shape": [2], "data_offsets": [8, 16]}"#, "unknown variant `F4_NEW`"),
            (r#"{"dtype": "F32", "shape": [-2], "data_offsets": [8, 16]}"#, "needed a dtype, a shape and two data_offsets"),
            (r#"{"dtype": "F32", "shape": [2]}"#, "missing field `data_offsets`"),
            (r#"{"dtype": "F32", "shape": [3], "data_offsets": [8, 16]}"#, "needed data_offsets 12 bytes apart: F32 [3], got [8, 16]"),
            (r#"{"dtype": "F32", "shape": [2], "data_offsets": [12, 20]}"#, "needed data_offsets from 8, where the tensor before it ends"),
            (r#"{"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}"#, "needed data_offsets from 8"),
            (r#"{"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}"#, "needed data_offsets 8 bytes apart"),
            (r#"{"dtype": "F32", "shape": [4294967296, 4294967296, 4], "data_offsets": [8, 16]}"#, "fewer than 2^61"),
        ] {
            let said = error(&format!("{{{a}, \"b\": {b}}}"));
            assert!(said.starts_with("m.safetensors: tensor b: ") && said.contains(words), "{said}");
        }
        let said = error(&format!("{{{a}, {a}}}"));
        assert_eq!(said, "m.safetensors: tensor a: needed one entry in the header, got two of this name");
        assert!(error("[1]").starts_with("m.safetensors: needed a safetensors file"));
    }
}
