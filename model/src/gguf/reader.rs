//! A bounds-checked little-endian cursor over the bytes of a header.

/// What is wrong with a GGUF header.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GgufError {
    /// The file does not start with `GGUF`.
    #[error("not a GGUF file: it starts with {0:02x?}, not with \"GGUF\"")]
    Magic([u8; 4]),
    /// A version that is not read.
    #[error("GGUF version {0}: versions 2 and 3 are read{hint}", hint = if *.0 > 0xFFFF { " (a big-endian file?)" } else { "" })]
    Version(u32),
    /// The bytes end inside a field.
    #[error("the header ends inside {what}: {needed} bytes needed at offset {at}, {left} left (a truncated download?)")]
    Truncated {
        /// The field.
        what: String,
        /// Its offset.
        at: usize,
        /// Bytes it needs.
        needed: u64,
        /// Bytes that are left.
        left: usize,
    },
    /// A field has a value that cannot be right.
    #[error("{what}: needed {needed}, got {got}")]
    Field {
        /// The field.
        what: String,
        /// What is allowed.
        needed: String,
        /// What is there.
        got: String,
    },
}

impl GgufError {
    /// A [`GgufError::Field`].
    pub(crate) fn field(what: &str, needed: &str, got: &str) -> Self {
        Self::Field { what: what.to_owned(), needed: needed.to_owned(), got: got.to_owned() }
    }
}

/// The cursor.
#[derive(Debug)]
pub struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    /// Starts at the first byte.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// The offset of the next byte.
    pub fn position(&self) -> usize {
        self.at
    }

    /// Bytes that are left.
    pub fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// The next `len` bytes.
    ///
    /// # Errors
    /// [`GgufError::Truncated`].
    pub fn take(&mut self, len: u64, what: &str) -> Result<&'a [u8], GgufError> {
        let left = self.left();
        match usize::try_from(len) {
            Ok(len) if len <= left => {
                let taken = &self.bytes[self.at..self.at + len];
                self.at += len;
                Ok(taken)
            }
            _ => Err(GgufError::Truncated { what: what.to_owned(), at: self.at, needed: len, left }),
        }
    }

    /// A fixed-size field.
    ///
    /// # Errors
    /// [`GgufError::Truncated`].
    pub fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], GgufError> {
        let bytes = self.take(N as u64, what)?;
        let mut array = [0; N];
        array.copy_from_slice(bytes);
        Ok(array)
    }

    /// A u32.
    ///
    /// # Errors
    /// [`GgufError::Truncated`].
    pub fn u32(&mut self, what: &str) -> Result<u32, GgufError> {
        self.array(what).map(u32::from_le_bytes)
    }

    /// A u64.
    ///
    /// # Errors
    /// [`GgufError::Truncated`].
    pub fn u64(&mut self, what: &str) -> Result<u64, GgufError> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// A count of items that take at least `item_bytes` each, so that no count can ask for more memory than the file has.
    ///
    /// # Errors
    /// [`GgufError::Truncated`] where that many items cannot follow.
    pub fn count(&mut self, item_bytes: u64, what: &str) -> Result<usize, GgufError> {
        let at = self.at;
        let count = self.u64(what)?;
        let needed = count.saturating_mul(item_bytes);
        match usize::try_from(count) {
            Ok(count) if needed <= self.left() as u64 => Ok(count),
            _ => Err(GgufError::Truncated { what: what.to_owned(), at, needed, left: self.left() }),
        }
    }

    /// A string: u64 length, then bytes. Invalid UTF-8 (tokens cut in mid-character exist) is kept as far as it goes.
    ///
    /// # Errors
    /// [`GgufError::Truncated`].
    pub fn string(&mut self, what: &str) -> Result<String, GgufError> {
        let len = self.count(1, what)?;
        let bytes = self.take(len as u64, what)?;
        Ok(String::from_utf8_lossy(bytes).into_owned())
    }
}
