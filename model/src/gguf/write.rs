//! Writing a GGUF header (version 3): the counterpart of [`super::Header::parse`], for stubs, tests and fuzzing seeds.

use super::TensorInfo;

/// A value with the type that it is written as.
#[derive(Debug, Clone, PartialEq)]
pub enum Typed {
    /// u16.
    U16(u16),
    /// u32.
    U32(u32),
    /// i32.
    I32(i32),
    /// f32.
    F32(f32),
    /// bool.
    Bool(bool),
    /// string.
    Str(String),
    /// Array of u8.
    U8s(Vec<u8>),
    /// Array of i32.
    I32s(Vec<i32>),
    /// Array of f32.
    F32s(Vec<f32>),
    /// Array of bool.
    Bools(Vec<bool>),
    /// Array of string.
    Strs(Vec<String>),
}

impl Typed {
    fn write(&self, out: &mut Vec<u8>) {
        let kind = |out: &mut Vec<u8>, id: u32| out.extend(id.to_le_bytes());
        let array = |out: &mut Vec<u8>, id: u32, len: usize| {
            kind(out, 9);
            kind(out, id);
            out.extend((len as u64).to_le_bytes());
        };
        match self {
            Self::U16(v) => {
                kind(out, 2);
                out.extend(v.to_le_bytes());
            }
            Self::U32(v) => {
                kind(out, 4);
                out.extend(v.to_le_bytes());
            }
            Self::I32(v) => {
                kind(out, 5);
                out.extend(v.to_le_bytes());
            }
            Self::F32(v) => {
                kind(out, 6);
                out.extend(v.to_le_bytes());
            }
            Self::Bool(v) => {
                kind(out, 7);
                out.push(u8::from(*v));
            }
            Self::Str(v) => {
                kind(out, 8);
                string(out, v);
            }
            Self::U8s(v) => {
                array(out, 0, v.len());
                out.extend(v);
            }
            Self::I32s(v) => {
                array(out, 5, v.len());
                v.iter().for_each(|v| out.extend(v.to_le_bytes()));
            }
            Self::F32s(v) => {
                array(out, 6, v.len());
                v.iter().for_each(|v| out.extend(v.to_le_bytes()));
            }
            Self::Bools(v) => {
                array(out, 7, v.len());
                out.extend(v.iter().map(|v| u8::from(*v)));
            }
            Self::Strs(v) => {
                array(out, 8, v.len());
                v.iter().for_each(|v| string(out, v));
            }
        }
    }
}

fn string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// Alignment of data (`general.alignment` is not written).
const ALIGNMENT: u64 = 32;

/// Lays tensors out one behind the other: sets their offsets. Those of types without a known size take one unit of alignment.
pub fn place(tensors: &mut [TensorInfo]) {
    let mut at = 0u64;
    for tensor in tensors {
        tensor.offset = at;
        at += tensor.bytes().unwrap_or(1).next_multiple_of(ALIGNMENT);
    }
}

/// The bytes of a header, padded to where the data starts.
pub fn header(keys: &[(String, Typed)], tensors: &[TensorInfo]) -> Vec<u8> {
    let mut out = b"GGUF".to_vec();
    out.extend(3u32.to_le_bytes());
    out.extend((tensors.len() as u64).to_le_bytes());
    out.extend((keys.len() as u64).to_le_bytes());
    for (key, value) in keys {
        string(&mut out, key);
        value.write(&mut out);
    }
    for tensor in tensors {
        string(&mut out, &tensor.name);
        out.extend((tensor.shape.len() as u32).to_le_bytes());
        tensor.shape.iter().rev().for_each(|n| out.extend((*n as u64).to_le_bytes()));
        out.extend(tensor.ggml_type.to_le_bytes());
        out.extend(tensor.offset.to_le_bytes());
    }
    out.resize((out.len() as u64).next_multiple_of(ALIGNMENT) as usize, 0);
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::{Header, Value};

    #[test]
    fn what_is_written_reads_back() {
        let keys: Vec<(String, Typed)> = [
            ("a", Typed::U16(7)),
            ("b", Typed::U32(8)),
            ("c", Typed::I32(-9)),
            ("d", Typed::F32(0.5)),
            ("e", Typed::Bool(true)),
            ("f", Typed::Str("text".into())),
            ("g", Typed::U8s(vec![1, 2])),
            ("h", Typed::I32s(vec![0, -1])),
            ("i", Typed::F32s(vec![1.5])),
            ("j", Typed::Bools(vec![true, false])),
            ("k", Typed::Strs(vec!["x".into(), String::new()])),
        ]
        .map(|(key, value)| (key.to_owned(), value))
        .into();
        let mut tensors: Vec<TensorInfo> = [(vec![3, 256], 12), (vec![2], 0)]
            .map(|(shape, ggml_type)| TensorInfo { name: format!("t{ggml_type}"), shape, ggml_type, offset: 0 })
            .into();
        place(&mut tensors);
        let bytes = header(&keys, &tensors);
        let read = Header::parse(&bytes).unwrap();
        assert_eq!(read.tensors, tensors);
        assert_eq!((read.data_start, read.values.len()), (bytes.len() as u64, keys.len()));
        assert_eq!(read.tensors[1].offset, (3u64 * 144).next_multiple_of(32));
        assert_eq!(read.get("c"), Some(&Value::Int(-9)));
        assert_eq!(read.get("g"), Some(&Value::Bytes(vec![1, 2])));
        assert_eq!(read.get("k").and_then(Value::as_array).map(<[Value]>::len), Some(2));
    }
}
