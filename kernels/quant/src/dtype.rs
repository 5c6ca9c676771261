//! Element and block types of stored tensors.

use std::fmt;

/// How the elements of a stored tensor are laid out.
///
/// Float types have blocks of one element. Block-quantised types are added here, each with its block size, as loaders for
/// them arrive; everything that sizes, slices or dispatches on a matrix goes through these methods.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum DType {
    /// IEEE single precision, little-endian.
    F32,
    /// IEEE half precision, little-endian.
    F16,
    /// bfloat16, little-endian.
    Bf16,
}

impl DType {
    /// Elements in one block along a row.
    pub const fn block_elems(self) -> usize {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => 1,
        }
    }

    /// Bytes of one block.
    pub const fn block_bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// Bytes of `elems` consecutive elements of a row; `None` where they are no whole number of blocks.
    pub const fn row_bytes(self, elems: usize) -> Option<usize> {
        if elems % self.block_elems() == 0 { Some(elems / self.block_elems() * self.block_bytes()) } else { None }
    }

    /// The name used in messages and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
