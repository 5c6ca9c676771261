//! Row decoders: how the kernels read a stored type.
//!
//! A new [`DType`] needs one [`Decoder`]: how LANES consecutive elements become f32 lanes, or (for block types, `DIRECT = false`)
//! how a run of elements is written to a buffer. The summation order of a product does not depend on which of the two ways a kernel
//! takes: both give the same lanes the same elements.

use tandem_quant::{DType, MatrixSource};

use super::{isa::Kernel, simd::Simd};

/// Reads elements of a stored row. Offsets are in elements from the row's start.
pub(super) trait Decoder: Copy + Send + Sync {
    /// [`Decoder::lanes`] is cheap: products of few rows read the stored bytes directly.
    const DIRECT: bool;

    /// LANES elements from `k` on.
    ///
    /// # Safety
    /// The row holds at least `k + LANES` elements from `row` on.
    unsafe fn lanes<S: Simd>(self, s: S, row: *const u8, k: usize) -> S::V;

    /// One element.
    ///
    /// # Safety
    /// The row holds more than `k` elements.
    unsafe fn one(self, row: *const u8, k: usize) -> f32;

    /// Bytes from the row's start to element `k` (for prefetching).
    fn byte_of(self, k: usize) -> usize;

    /// Fewer than LANES elements from `k` on, zero padded.
    ///
    /// # Safety
    /// The row holds at least `k + n` elements.
    #[inline(always)]
    unsafe fn tail<S: Simd>(self, s: S, row: *const u8, k: usize, n: usize) -> S::V {
        let mut pad = [0.0f32; 16];
        for (i, p) in pad[..n].iter_mut().enumerate() {
            // SAFETY: the caller's promise.
            *p = unsafe { self.one(row, k + i) };
        }
        // SAFETY: LANES ≤ 16.
        unsafe { s.load(pad.as_ptr()) }
    }

    /// Writes elements `k..k+out.len()` as f32.
    ///
    /// # Safety
    /// The row holds at least `k + out.len()` elements.
    #[inline(always)]
    unsafe fn run<S: Simd>(self, s: S, row: *const u8, k: usize, out: &mut [f32]) {
        let n = out.len();
        let mut i = 0;
        while i + S::LANES <= n {
            // SAFETY: in range of the row (the caller's promise) and of `out`.
            unsafe { s.store(out.as_mut_ptr().add(i), self.lanes(s, row, k + i)) };
            i += S::LANES;
        }
        while i < n {
            // SAFETY: as above.
            out[i] = unsafe { self.one(row, k + i) };
            i += 1;
        }
    }
}

/// Little-endian f32.
#[derive(Clone, Copy)]
pub(super) struct F32Row;

impl Decoder for F32Row {
    const DIRECT: bool = true;
    #[inline(always)]
    unsafe fn lanes<S: Simd>(self, s: S, row: *const u8, k: usize) -> S::V {
        // SAFETY: the caller's promise. Loads need no alignment.
        unsafe { s.load(row.add(4 * k).cast()) }
    }
    #[inline(always)]
    unsafe fn one(self, row: *const u8, k: usize) -> f32 {
        // SAFETY: the caller's promise.
        f32::from_le_bytes(unsafe { row.add(4 * k).cast::<[u8; 4]>().read_unaligned() })
    }
    #[inline(always)]
    fn byte_of(self, k: usize) -> usize {
        4 * k
    }
}

/// Little-endian bf16.
#[derive(Clone, Copy)]
pub(super) struct Bf16Row;

impl Decoder for Bf16Row {
    const DIRECT: bool = true;
    #[inline(always)]
    unsafe fn lanes<S: Simd>(self, s: S, row: *const u8, k: usize) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { s.load_bf16(row.add(2 * k)) }
    }
    #[inline(always)]
    unsafe fn one(self, row: *const u8, k: usize) -> f32 {
        // SAFETY: the caller's promise.
        half::bf16::from_le_bytes(unsafe { row.add(2 * k).cast::<[u8; 2]>().read_unaligned() }).to_f32()
    }
    #[inline(always)]
    fn byte_of(self, k: usize) -> usize {
        2 * k
    }
}

/// Little-endian f16.
#[derive(Clone, Copy)]
pub(super) struct F16Row;

impl Decoder for F16Row {
    const DIRECT: bool = true;
    #[inline(always)]
    unsafe fn lanes<S: Simd>(self, s: S, row: *const u8, k: usize) -> S::V {
        // SAFETY: the caller's promise.
        unsafe { s.load_f16(row.add(2 * k)) }
    }
    #[inline(always)]
    unsafe fn one(self, row: *const u8, k: usize) -> f32 {
        // SAFETY: the caller's promise.
        half::f16::from_le_bytes(unsafe { row.add(2 * k).cast::<[u8; 2]>().read_unaligned() }).to_f32()
    }
    #[inline(always)]
    fn byte_of(self, k: usize) -> usize {
        2 * k
    }
}

/// Runs `$body` with `$d` bound to the decoder of `$dtype`. Types without one were refused when the weight was made.
macro_rules! with_decoder {
    ($dtype:expr, $d:ident => $body:expr) => {
        match $dtype {
            tandem_quant::DType::F32 => {
                let $d = $crate::cpu::decode::F32Row;
                $body
            }
            tandem_quant::DType::Bf16 => {
                let $d = $crate::cpu::decode::Bf16Row;
                $body
            }
            tandem_quant::DType::F16 => {
                let $d = $crate::cpu::decode::F16Row;
                $body
            }
            other => unreachable!("no row decoder for {other}: `supported` refuses it"),
        }
    };
}
pub(super) use with_decoder;

/// Whether there is a decoder for a type. Keep in step with [`with_decoder`].
pub(super) fn supported(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F16 | DType::Bf16)
}

/// Decodes a whole row.
pub(super) struct DecodeRow<'a> {
    pub(super) m: &'a MatrixSource,
    pub(super) row: usize,
    pub(super) out: &'a mut [f32],
}

impl Kernel for DecodeRow<'_> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let bytes = self.m.row_bytes(self.row);
        assert_eq!(self.out.len(), self.m.cols(), "row of {}", self.m.name());
        // SAFETY: the row holds all columns.
        with_decoder!(self.m.dtype(), d => unsafe { d.run(s, bytes.as_ptr(), 0, self.out) });
    }
}
