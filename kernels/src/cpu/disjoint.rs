//! A slice that several threads write at once, each in its own places.

use std::{marker::PhantomData, ops::Range};

/// Shares `&mut [T]` between the items of one job; every item asks for ranges that no other item asks for.
#[derive(Clone, Copy)]
pub(super) struct Disjoint<'a, T> {
    ptr: *mut T,
    len: usize,
    _life: PhantomData<&'a mut [T]>,
}

// SAFETY: it stands for `&mut [T]` split between threads; `range` carries the promise that the parts do not overlap.
unsafe impl<T: Send> Send for Disjoint<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    /// Borrows the slice for `'a`.
    pub(super) fn new(slice: &'a mut [T]) -> Self {
        Self { ptr: slice.as_mut_ptr(), len: slice.len(), _life: PhantomData }
    }

    /// A part of the slice.
    ///
    /// # Safety
    /// No other reference to any element of the range is alive.
    ///
    /// # Panics
    /// Where the range runs past the end.
    #[inline(always)]
    #[allow(clippy::mut_from_ref, reason = "the caller promises that parts do not overlap")]
    pub(super) unsafe fn range(&self, range: Range<usize>) -> &'a mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "range {range:?} of {}", self.len);
        // SAFETY: inside the slice (checked), and unshared (the caller's promise).
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(range.start), range.len()) }
    }
}
