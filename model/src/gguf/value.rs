//! One typed value of a GGUF key.

use super::reader::{GgufError, Reader};

/// A value. Integers of all widths are kept as i128, floats as f64: readers ask for what they need.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// Any integer type.
    Int(i128),
    /// f32 or f64.
    Float(f64),
    /// bool.
    Bool(bool),
    /// string.
    String(String),
    /// An array of one element type. Byte arrays are [`Value::Bytes`].
    Array(Vec<Value>),
    /// An array of u8 or i8 (codebooks and other blobs).
    Bytes(Vec<u8>),
}

/// Deepest nesting of arrays that is read.
const MAX_DEPTH: usize = 4;

/// Fewest bytes that a value of a type takes.
fn least_bytes(kind: u32) -> Option<u64> {
    Some(match kind {
        0 | 1 | 7 => 1,
        2 | 3 => 2,
        4..=6 => 4,
        8 | 10..=12 => 8,
        9 => 12,
        _ => return None,
    })
}

impl Value {
    /// Reads a value of type `kind`.
    ///
    /// # Errors
    /// Truncation, an unknown type id, a bool that is neither 0 nor 1, arrays nested too deeply.
    pub fn read(reader: &mut Reader<'_>, kind: u32, what: &str) -> Result<Self, GgufError> {
        Self::read_at(reader, kind, what, 0)
    }

    fn read_at(r: &mut Reader<'_>, kind: u32, what: &str, depth: usize) -> Result<Self, GgufError> {
        Ok(match kind {
            0 => Self::Int(r.array::<1>(what)?[0].into()),
            1 => Self::Int(i8::from_le_bytes(r.array(what)?).into()),
            2 => Self::Int(u16::from_le_bytes(r.array(what)?).into()),
            3 => Self::Int(i16::from_le_bytes(r.array(what)?).into()),
            4 => Self::Int(r.u32(what)?.into()),
            5 => Self::Int(i32::from_le_bytes(r.array(what)?).into()),
            6 => Self::Float(f32::from_le_bytes(r.array(what)?).into()),
            7 => match r.array::<1>(what)?[0] {
                0 => Self::Bool(false),
                1 => Self::Bool(true),
                other => return Err(GgufError::field(what, "a bool (0 or 1)", &other.to_string())),
            },
            8 => Self::String(r.string(what)?),
            9 => Self::read_array(r, what, depth)?,
            10 => Self::Int(r.u64(what)?.into()),
            11 => Self::Int(i64::from_le_bytes(r.array(what)?).into()),
            12 => Self::Float(f64::from_le_bytes(r.array(what)?)),
            other => return Err(GgufError::field(what, "a value type from 0 to 12", &other.to_string())),
        })
    }

    fn read_array(r: &mut Reader<'_>, what: &str, depth: usize) -> Result<Self, GgufError> {
        if depth >= MAX_DEPTH {
            return Err(GgufError::field(what, "arrays nested at most four deep", "more"));
        }
        let kind = r.u32(what)?;
        let item_bytes =
            least_bytes(kind).ok_or_else(|| GgufError::field(what, "an array of a value type from 0 to 12", &kind.to_string()))?;
        let len = r.count(item_bytes, what)?;
        if kind <= 1 {
            return Ok(Self::Bytes(r.take(len as u64, what)?.to_vec()));
        }
        let items = (0..len).map(|_| Self::read_at(r, kind, what, depth + 1)).collect::<Result<_, _>>()?;
        Ok(Self::Array(items))
    }

    /// As an unsigned integer; whole floats are not integers here.
    pub fn as_u64(&self) -> Option<u64> {
        match self {
            Self::Int(i) => u64::try_from(*i).ok(),
            _ => None,
        }
    }

    /// As a float; integers convert.
    pub fn as_f64(&self) -> Option<f64> {
        match self {
            Self::Float(f) => Some(*f),
            Self::Int(i) => Some(*i as f64),
            _ => None,
        }
    }

    /// As a bool; the integers 0 and 1 convert.
    pub fn as_bool(&self) -> Option<bool> {
        match self {
            Self::Bool(b) => Some(*b),
            Self::Int(i @ (0 | 1)) => Some(*i == 1),
            _ => None,
        }
    }

    /// As a string.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::String(s) => Some(s),
            _ => None,
        }
    }

    /// As an array; byte arrays do not convert.
    pub fn as_array(&self) -> Option<&[Self]> {
        match self {
            Self::Array(items) => Some(items),
            _ => None,
        }
    }

    /// As bytes.
    pub fn as_bytes(&self) -> Option<&[u8]> {
        match self {
            Self::Bytes(bytes) => Some(bytes),
            _ => None,
        }
    }

    /// What it is, for messages.
    pub fn describe(&self) -> String {
        match self {
            Self::Int(i) => i.to_string(),
            Self::Float(f) => f.to_string(),
            Self::Bool(b) => b.to_string(),
            Self::String(s) => format!("{:?}", s.chars().take(60).collect::<String>()),
            Self::Array(items) => format!("an array of {} values", items.len()),
            Self::Bytes(bytes) => format!("an array of {} bytes", bytes.len()),
        }
    }
}
