//! The AVX-512 vectors: 16 lanes, 32 registers.
//!
//! The token is made only by `isa.rs`, after run-time detection; that is what makes each block below sound.

use std::arch::x86_64::*;

use super::{
    isa::{Kernel, run_avx512},
    simd::Simd,
};

/// Proof that AVX-512 F, BW, DQ and VL (and so AVX2 and FMA) are there.
#[derive(Clone, Copy)]
pub(super) struct Avx512(());

impl Avx512 {
    /// Makes the token.
    ///
    /// # Safety
    /// The CPU has AVX-512 F, BW, DQ and VL (and so AVX2 and FMA).
    pub(super) unsafe fn new() -> Self {
        Self(())
    }
}

macro_rules! op {
    ($e:expr) => {
        // SAFETY: the token proves that the instruction set is there; memory operands are the caller's promise.
        unsafe { $e }
    };
}

impl Simd for Avx512 {
    type V = __m512;
    const LANES: usize = 16;
    const WIDE: bool = true;

    #[inline(always)]
    fn call<K: Kernel>(self, kernel: K) -> K::Out {
        // SAFETY: the token proves that the features are there.
        unsafe { run_avx512(kernel) }
    }

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        op!(_mm512_set1_ps(x))
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> __m512 {
        op!(_mm512_loadu_ps(p))
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: __m512) {
        op!(_mm512_storeu_ps(p, v));
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u8) -> __m512 {
        op!(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast())))))
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u8) -> __m512 {
        op!(_mm512_cvtph_ps(_mm256_loadu_si256(p.cast())))
    }
    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_add_ps(a, b))
    }
    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_sub_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_mul_ps(a, b))
    }
    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_div_ps(a, b))
    }
    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_max_ps(a, b))
    }
    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_min_ps(a, b))
    }
    #[inline(always)]
    fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        op!(_mm512_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn pow2(self, v: __m512) -> __m512 {
        op!(_mm512_castsi512_ps(_mm512_slli_epi32::<23>(_mm512_add_epi32(_mm512_castps_si512(v), _mm512_set1_epi32(127)))))
    }
    #[inline(always)]
    fn round_bf16(self, v: __m512) -> __m512 {
        op!({
            let b = _mm512_castps_si512(v);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(b), _mm512_set1_epi32(1));
            let up = _mm512_add_epi32(b, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
            let cut = _mm512_castsi512_ps(_mm512_and_si512(up, _mm512_set1_epi32(0xffff_0000_u32 as i32)));
            _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_UNORD_Q>(v, v), cut, v)
        })
    }
    #[inline(always)]
    fn sum(self, v: __m512) -> f32 {
        op!({
            let h = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v));
            let q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps::<1>(h));
            let d = _mm_add_ps(q, _mm_movehl_ps(q, q));
            _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)))
        })
    }
    #[inline(always)]
    fn prefetch(self, p: *const u8) {
        op!(_mm_prefetch::<_MM_HINT_T0>(p.cast()));
    }
}
