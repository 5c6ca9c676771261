//! [`Header`]: everything before the data.

use std::collections::{BTreeMap, BTreeSet};

use tandem_quant::DType;

use super::{
    reader::{GgufError, Reader},
    value::Value,
};

/// Where a tensor lies and how it is stored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name as stored.
    pub name: String,
    /// Row-major shape: ggml's `ne` reversed.
    pub shape: Vec<usize>,
    /// ggml's type id; [`DType::from_ggml`] says whether it is read.
    pub ggml_type: u32,
    /// Offset of its bytes from the start of the data section.
    pub offset: u64,
}

impl TensorInfo {
    /// Elements.
    pub fn elems(&self) -> u64 {
        self.shape.iter().map(|n| *n as u64).product()
    }

    /// Bytes, where the type is known and rows are whole blocks.
    pub fn bytes(&self) -> Option<u64> {
        let dtype = DType::from_ggml(self.ggml_type)?;
        let row = dtype.row_bytes(*self.shape.last()?)?;
        Some(self.shape[..self.shape.len() - 1].iter().map(|n| *n as u64).product::<u64>() * row as u64)
    }
}

/// A parsed header.
#[derive(Debug, Clone)]
pub struct Header {
    /// 2 or 3.
    pub version: u32,
    /// Key-value pairs.
    pub values: BTreeMap<String, Value>,
    /// Tensor infos in file order.
    pub tensors: Vec<TensorInfo>,
    /// Offset of the data section from the start of the file.
    pub data_start: u64,
}

/// Most dimensions of a ggml tensor.
const MAX_DIMS: u32 = 4;
/// Default of `general.alignment`.
const DEFAULT_ALIGNMENT: u64 = 32;
/// Fewest bytes of a key-value pair (empty key, one-byte value) and of a tensor info (empty name, no dimension).
const LEAST_PAIR: u64 = 8 + 4 + 1;
const LEAST_INFO: u64 = 8 + 4 + 4 + 8;

impl Header {
    /// Parses the header at the start of `bytes`; what follows it is not looked at.
    ///
    /// # Errors
    /// Anything that is not a header of version 2 or 3, named.
    pub fn parse(bytes: &[u8]) -> Result<Self, GgufError> {
        let mut r = Reader::new(bytes);
        let magic = r.array("the magic")?;
        if &magic != b"GGUF" {
            return Err(GgufError::Magic(magic));
        }
        let version = r.u32("the version")?;
        if !(2..=3).contains(&version) {
            return Err(GgufError::Version(version));
        }
        let tensor_count = r.u64("the tensor count")?;
        let pairs = r.count(LEAST_PAIR, "the key-value count")?;
        let mut values = BTreeMap::new();
        for i in 0..pairs {
            let key = r.string(&format!("key {i}"))?;
            let kind = r.u32(&key)?;
            let value = Value::read(&mut r, kind, &key)?;
            if values.contains_key(&key) {
                return Err(GgufError::field(&key, "one value", "the key twice"));
            }
            values.insert(key, value);
        }
        let possible = r.left() as u64 / LEAST_INFO;
        if tensor_count > possible {
            let (at, left) = (r.position(), r.left());
            let needed = tensor_count.saturating_mul(LEAST_INFO);
            return Err(GgufError::Truncated { what: format!("the infos of {tensor_count} tensors"), at, needed, left });
        }
        let alignment = match values.get("general.alignment") {
            None => DEFAULT_ALIGNMENT,
            Some(value) => match value.as_u64() {
                Some(a) if a.is_power_of_two() && a <= 1 << 20 => a,
                _ => return Err(GgufError::field("general.alignment", "a power of two up to 2^20", &value.describe())),
            },
        };
        let mut tensors = Vec::with_capacity(usize::try_from(tensor_count).unwrap_or(0));
        let mut names = BTreeSet::new();
        for i in 0..tensor_count {
            let info = read_info(&mut r, i, alignment)?;
            if !names.insert(info.name.clone()) {
                return Err(GgufError::field(&format!("tensor {}", info.name), "one info", "the name twice"));
            }
            tensors.push(info);
        }
        let data_start = (r.position() as u64).next_multiple_of(alignment);
        Ok(Self { version, values, tensors, data_start })
    }

    /// The value of a key.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.values.get(key)
    }

    /// `general.architecture`, which is also the prefix of the model's keys.
    pub fn architecture(&self) -> Option<&str> {
        self.get("general.architecture")?.as_str()
    }

    /// Checks that every tensor of a known type lies inside a file of `file_bytes` bytes, in bytes of its own.
    ///
    /// # Errors
    /// Names the first tensor that runs past the end, or into another one.
    pub fn check_extents(&self, file_bytes: u64) -> Result<(), GgufError> {
        let mut ranges: Vec<(u64, u64, &str)> =
            self.tensors.iter().filter_map(|t| Some((t.offset, t.bytes()?, t.name.as_str()))).filter(|(_, bytes, _)| *bytes > 0).collect();
        ranges.sort_unstable();
        for pair in ranges.windows(2) {
            let ((start, bytes, name), (next, _, other)) = (pair[0], pair[1]);
            if start.checked_add(bytes).is_some_and(|end| end > next) {
                return Err(GgufError::field(
                    &format!("tensor {name}"),
                    &format!("at most {} bytes, up to where tensor {other} begins", next - start),
                    &format!("{bytes} bytes (a wrong offset or type)"),
                ));
            }
        }
        for tensor in &self.tensors {
            let Some(bytes) = tensor.bytes() else { continue };
            let end = self.data_start.checked_add(tensor.offset).and_then(|start| start.checked_add(bytes));
            if end.is_none_or(|end| end > file_bytes) {
                let end = end.map_or_else(|| "beyond 2^64".to_owned(), |end| end.to_string());
                let needed = format!("bytes up to offset {end}");
                return Err(GgufError::field(
                    &format!("tensor {}", tensor.name),
                    &needed,
                    &format!("a file of {file_bytes} bytes (truncated?)"),
                ));
            }
        }
        Ok(())
    }
}

fn read_info(r: &mut Reader<'_>, index: u64, alignment: u64) -> Result<TensorInfo, GgufError> {
    let name = r.string(&format!("the name of tensor {index}"))?;
    let what = format!("tensor {name}");
    let dims = r.u32(&what)?;
    if dims == 0 || dims > MAX_DIMS {
        return Err(GgufError::field(&what, "1 to 4 dimensions", &dims.to_string()));
    }
    let mut shape = Vec::with_capacity(dims as usize);
    let mut elems: u64 = 1;
    for _ in 0..dims {
        let n = r.u64(&what)?;
        elems = match elems.checked_mul(n) {
            Some(elems) if n > 0 && elems <= 1 << 48 => elems,
            _ => return Err(GgufError::field(&what, "a shape of 1 to 2^48 elements", &format!("a dimension of {n}"))),
        };
        shape.push(usize::try_from(n).map_err(|_| GgufError::field(&what, "dimensions that fit memory", &n.to_string()))?);
    }
    shape.reverse();
    let ggml_type = r.u32(&what)?;
    let offset = r.u64(&what)?;
    if !offset.is_multiple_of(alignment) {
        return Err(GgufError::field(&what, &format!("an offset that is a multiple of {alignment}"), &offset.to_string()));
    }
    Ok(TensorInfo { name, shape, ggml_type, offset })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_tensor_has_bytes_of_its_own() {
        let tensor = |name: &str, offset| TensorInfo { name: name.to_owned(), shape: vec![8], ggml_type: 0, offset };
        let header = |offsets: [u64; 3]| Header {
            version: 3,
            values: Default::default(),
            tensors: ["a", "b", "c"].iter().zip(offsets).map(|(name, offset)| tensor(name, offset)).collect(),
            data_start: 64,
        };
        assert!(header([64, 0, 32]).check_extents(64 + 96).is_ok());
        for (offsets, name, other) in [([0, 0, 32], "a", "b"), ([32, 0, 48], "a", "c")] {
            let error = header(offsets).check_extents(1 << 20).expect_err("they overlap").to_string();
            assert!(error.contains(&format!("tensor {name}")) && error.contains(&format!("tensor {other} begins")), "{error}");
        }
    }
}
