//! Row decoders: how the kernels read a stored type.
//!
//! Floats ([`Lanes`]) are read as vectors straight from the stored bytes. Every other type, and every matrix with scales or levels beside
//! its elements, is [`Coded`]: runs of whole blocks are dequantised to f32 and then take the same path as f32 weights, so the kernels are
//! compiled once for all of them. The summation order of a product does not depend on the way taken: all give the same lanes the same
//! elements.

use tandem_quant::{DType, MatrixSource};

use super::{isa::Kernel, simd::Simd};

/// Writes runs of a stored row as f32. Offsets are in elements from the row's start.
pub(super) trait Decoder: Copy + Send + Sync {
    /// Bytes from the row's start to element `k` (for prefetching).
    fn byte_of(self, k: usize) -> usize;

    /// Writes elements `k..k+out.len()` of a row as f32. `index` is the number of the row in its matrix, `row` its first byte.
    ///
    /// # Safety
    /// The row holds at least `k + out.len()` elements.
    unsafe fn run<S: Simd>(self, s: S, row: *const u8, index: usize, k: usize, out: &mut [f32]);
}

/// Reads vectors of a stored row as they are needed: products of few rows use the stored bytes directly.
pub(super) trait Lanes: Decoder {
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

    /// [`Decoder::run`] by vectors.
    ///
    /// # Safety
    /// The row holds at least `k + out.len()` elements.
    #[inline(always)]
    unsafe fn run_lanes<S: Simd>(self, s: S, row: *const u8, k: usize, out: &mut [f32]) {
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
    #[inline(always)]
    fn byte_of(self, k: usize) -> usize {
        4 * k
    }
    #[inline(always)]
    unsafe fn run<S: Simd>(self, s: S, row: *const u8, _index: usize, k: usize, out: &mut [f32]) {
        // SAFETY: the caller's promise.
        unsafe { self.run_lanes(s, row, k, out) };
    }
}

impl Lanes for F32Row {
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
}

/// Little-endian bf16.
#[derive(Clone, Copy)]
pub(super) struct Bf16Row;

impl Decoder for Bf16Row {
    #[inline(always)]
    fn byte_of(self, k: usize) -> usize {
        2 * k
    }
    #[inline(always)]
    unsafe fn run<S: Simd>(self, s: S, row: *const u8, _index: usize, k: usize, out: &mut [f32]) {
        // SAFETY: the caller's promise.
        unsafe { self.run_lanes(s, row, k, out) };
    }
}

impl Lanes for Bf16Row {
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
}

/// Little-endian f16.
#[derive(Clone, Copy)]
pub(super) struct F16Row;

impl Decoder for F16Row {
    #[inline(always)]
    fn byte_of(self, k: usize) -> usize {
        2 * k
    }
    #[inline(always)]
    unsafe fn run<S: Simd>(self, s: S, row: *const u8, _index: usize, k: usize, out: &mut [f32]) {
        // SAFETY: the caller's promise.
        unsafe { self.run_lanes(s, row, k, out) };
    }
}

impl Lanes for F16Row {
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
}

/// Any stored type with whatever lies beside it, by [`MatrixSource::dequantize_run`].
#[derive(Clone, Copy)]
pub(super) struct Coded<'a>(pub(super) &'a MatrixSource);

impl Decoder for Coded<'_> {
    #[inline(always)]
    fn byte_of(self, k: usize) -> usize {
        k / self.0.dtype().block_elems() * self.0.dtype().block_bytes()
    }
    #[inline(always)]
    unsafe fn run<S: Simd>(self, _s: S, _row: *const u8, index: usize, k: usize, out: &mut [f32]) {
        self.0.dequantize_run(index, k, out);
    }
}

/// Runs `$body` with `$d` bound to the [`Lanes`] of a matrix whose elements are plain floats, `$coded` for any other.
macro_rules! with_lanes {
    ($m:expr, $d:ident => $body:expr, else $coded:expr) => {
        match $m.dtype() {
            _ if !$m.is_plain() => $coded,
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
            _ => $coded,
        }
    };
}
pub(super) use with_lanes;

/// Why a matrix cannot be decoded although its bytes are there.
pub(super) fn lacking(m: &MatrixSource) -> Option<&'static str> {
    match m.dtype() {
        dtype if dtype.has_side_scales() && m.scales().is_none() => Some("scales beside its elements"),
        DType::RocmFp3Mix | DType::RocmFp2Mix if m.levels().is_none() => Some("the levels of its codes"),
        _ => None,
    }
}

/// Decodes elements `k..k+out.len()` of row `row`; block types from a block's start to a block's end.
#[inline(always)]
pub(super) fn decode_run<S: Simd>(s: S, m: &MatrixSource, row: usize, k: usize, out: &mut [f32]) {
    let bytes = m.row_bytes(row);
    assert!(k + out.len() <= m.cols(), "columns of {}", m.name());
    // SAFETY: the row holds all columns.
    with_lanes!(m, d => unsafe { d.run_lanes(s, bytes.as_ptr(), k, out) }, else m.dequantize_run(row, k, out));
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
        assert_eq!(self.out.len(), self.m.cols(), "row of {}", self.m.name());
        decode_run(s, self.m, self.row, 0, self.out);
    }
}
