//! f32 memory that starts on a cache line, so that no vector load straddles two.

use std::ops::{Deref, DerefMut};

/// Values per cache line.
const LINE: usize = 16;

/// A zeroed slice of f32 on a 64-byte boundary: a vector with room to begin where the boundary is.
#[derive(Debug, Default)]
pub(super) struct Aligned {
    values: Vec<f32>,
    start: usize,
    len: usize,
}

impl Aligned {
    /// `len` zeros. The pages are the kernel's zero pages until they are written.
    pub(super) fn zeroed(len: usize) -> Self {
        let values = vec![0.0; len + LINE];
        let start = values.as_ptr().align_offset(4 * LINE).min(LINE);
        Self { values, start, len }
    }

    /// A copy.
    pub(super) fn copied(values: &[f32]) -> Self {
        let mut out = Self::zeroed(values.len());
        out.copy_from_slice(values);
        out
    }

    /// The first `len` values; where there are fewer, new zeroed ones.
    #[inline]
    pub(super) fn sized(&mut self, len: usize) -> &mut [f32] {
        if self.len < len {
            *self = Self::zeroed(len);
        }
        &mut self[..len]
    }
}

impl Deref for Aligned {
    type Target = [f32];

    #[inline(always)]
    fn deref(&self) -> &[f32] {
        &self.values[self.start..self.start + self.len]
    }
}

impl DerefMut for Aligned {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut [f32] {
        &mut self.values[self.start..self.start + self.len]
    }
}
