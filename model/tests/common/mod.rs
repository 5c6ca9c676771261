//! GGUF files for tests: read whole, edited, written again, in one file or in shards.

#![allow(dead_code, clippy::unwrap_used, reason = "shared by test binaries that each use a part")]

use std::path::{Path, PathBuf};

use tandem_model::{Checkpoint, gguf::Header};

/// A tensor with its bytes; `ne` as in the file, fastest dimension first.
#[derive(Clone, Debug)]
pub struct Tensor {
    pub name: String,
    pub ne: Vec<u64>,
    pub kind: u32,
    pub data: Vec<u8>,
}

/// A file taken apart.
#[derive(Clone, Debug, Default)]
pub struct Gguf {
    /// Key, value type, value as stored.
    pub pairs: Vec<(String, u32, Vec<u8>)>,
    pub tensors: Vec<Tensor>,
}

/// Value types.
pub const U8: u32 = 0;
pub const U32: u32 = 4;
pub const I32: u32 = 5;
pub const F32: u32 = 6;
pub const BOOL: u32 = 7;
pub const STRING: u32 = 8;
pub const ARRAY: u32 = 9;

pub fn string(s: &str) -> Vec<u8> {
    [(s.len() as u64).to_le_bytes().as_slice(), s.as_bytes()].concat()
}

/// An array value of items that are already encoded.
pub fn array(kind: u32, items: &[Vec<u8>]) -> Vec<u8> {
    [kind.to_le_bytes().as_slice(), &(items.len() as u64).to_le_bytes(), &items.concat()].concat()
}

pub fn u32s(values: &[u32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

pub fn f32s(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

/// Length of the value of type `kind` at the front of `bytes`.
fn value_len(kind: u32, bytes: &[u8]) -> usize {
    let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
    match kind {
        0 | 1 | 7 => 1,
        2 | 3 => 2,
        4..=6 => 4,
        8 => 8 + u64_at(0),
        9 => {
            let item = u32::from_le_bytes(bytes[..4].try_into().unwrap());
            (0..u64_at(4)).fold(12, |at, _| at + value_len(item, &bytes[at..]))
        }
        10..=12 => 8,
        other => panic!("value type {other}"),
    }
}

impl Gguf {
    /// `tests/fixtures/gguf/tinyk-MIX.gguf` of the repository.
    pub fn tinyk() -> Self {
        Self::read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/gguf/tinyk-MIX.gguf"))
    }

    pub fn read(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap();
        let header = Header::parse(&bytes).unwrap();
        let mut at = 24;
        let mut pairs = Vec::new();
        for _ in 0..header.values.len() {
            let len = value_len(STRING, &bytes[at..]);
            let key = String::from_utf8(bytes[at + 8..at + len].to_vec()).unwrap();
            let kind = u32::from_le_bytes(bytes[at + len..at + len + 4].try_into().unwrap());
            at += len + 4;
            let len = value_len(kind, &bytes[at..]);
            pairs.push((key, kind, bytes[at..at + len].to_vec()));
            at += len;
        }
        let tensors = header.tensors.iter().map(|t| {
            let start = (header.data_start + t.offset) as usize;
            let ne = t.shape.iter().rev().map(|n| *n as u64).collect();
            Tensor { name: t.name.clone(), ne, kind: t.ggml_type, data: bytes[start..start + t.bytes().unwrap() as usize].to_vec() }
        });
        Self { pairs, tensors: tensors.collect() }
    }

    /// Sets or replaces a key.
    pub fn set(&mut self, key: &str, kind: u32, value: Vec<u8>) -> &mut Self {
        self.unset(key).pairs.push((key.to_owned(), kind, value));
        self
    }

    pub fn unset(&mut self, key: &str) -> &mut Self {
        self.pairs.retain(|(k, ..)| k != key);
        self
    }

    pub fn tensor(&mut self, name: &str) -> &mut Tensor {
        self.tensors.iter_mut().find(|t| t.name == name).unwrap_or_else(|| panic!("no {name}"))
    }

    pub fn drop_tensor(&mut self, name: &str) -> &mut Self {
        self.tensors.retain(|t| t.name != name);
        self
    }

    pub fn add(&mut self, name: &str, ne: &[u64], kind: u32, data: Vec<u8>) -> &mut Self {
        self.tensors.push(Tensor { name: name.to_owned(), ne: ne.to_vec(), kind, data });
        self
    }

    /// The file's bytes, with everything aligned to `alignment`.
    pub fn bytes(&self, alignment: u32) -> Vec<u8> {
        let mut out = b"GGUF\x03\0\0\0".to_vec();
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.pairs.len() as u64).to_le_bytes());
        for (key, kind, value) in &self.pairs {
            out.extend(string(key));
            out.extend(kind.to_le_bytes());
            out.extend(value);
        }
        let pad = |n: usize| n.next_multiple_of(alignment as usize);
        let mut offset = 0;
        for t in &self.tensors {
            out.extend(string(&t.name));
            out.extend((t.ne.len() as u32).to_le_bytes());
            t.ne.iter().for_each(|n| out.extend(n.to_le_bytes()));
            out.extend(t.kind.to_le_bytes());
            out.extend((offset as u64).to_le_bytes());
            offset = pad(offset + t.data.len());
        }
        out.resize(pad(out.len()), 0);
        for t in &self.tensors {
            out.extend(&t.data);
            out.resize(pad(out.len()), 0);
        }
        out
    }

    pub fn write(&self, path: &Path) -> PathBuf {
        std::fs::write(path, self.bytes(32)).unwrap();
        path.to_owned()
    }

    /// Opens the file as a checkpoint.
    pub fn open(&self) -> Result<Checkpoint, String> {
        let dir = tempfile::tempdir().unwrap();
        // The maps outlive the folder.
        Checkpoint::open(&self.write(&dir.path().join("model.gguf"))).map_err(|e| e.to_string())
    }

    /// What opening it says.
    pub fn refused(&self) -> String {
        self.open().expect_err("this file must be refused")
    }

    /// The set of files that it is cut into: the first has all keys and no tensors, the others share the tensors.
    pub fn shards(&self, count: usize) -> Vec<Gguf> {
        let mut all = vec![Gguf { pairs: self.pairs.clone(), tensors: Vec::new() }];
        all.resize(count, Gguf::default());
        for (i, tensor) in self.tensors.iter().enumerate() {
            all[1 + i % (count - 1)].tensors.push(tensor.clone());
        }
        for (no, shard) in all.iter_mut().enumerate() {
            shard.set("split.no", 2, (no as u16).to_le_bytes().to_vec());
            shard.set("split.count", 2, (count as u16).to_le_bytes().to_vec());
            shard.set("split.tensors.count", I32, (self.tensors.len() as i32).to_le_bytes().to_vec());
        }
        all
    }
}

/// Writes `shards` as a set into `dir`, and returns the paths.
pub fn write_set(dir: &Path, shards: &[Gguf]) -> Vec<PathBuf> {
    let path = |no: usize| dir.join(format!("Tinyk-{:05}-of-{:05}.gguf", no + 1, shards.len()));
    shards.iter().enumerate().map(|(no, shard)| shard.write(&path(no))).collect()
}
