//! The AVX2 vectors: 8 lanes, 16 registers.
//!
//! The token is made only by `isa.rs`, after run-time detection; that is what makes each block below sound.

use std::arch::x86_64::*;

use super::{
    isa::{Kernel, run_avx2},
    simd::Simd,
};

/// Proof that AVX2, FMA and F16C are there.
#[derive(Clone, Copy)]
pub(super) struct Avx2(());

impl Avx2 {
    /// Makes the token.
    ///
    /// # Safety
    /// The CPU has AVX2, FMA and F16C.
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

impl Simd for Avx2 {
    type V = __m256;
    const LANES: usize = 8;
    const WIDE: bool = false;

    #[inline(always)]
    fn call<K: Kernel>(self, kernel: K) -> K::Out {
        // SAFETY: the token proves that the features are there.
        unsafe { run_avx2(kernel) }
    }

    #[inline(always)]
    fn splat(self, x: f32) -> __m256 {
        op!(_mm256_set1_ps(x))
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> __m256 {
        op!(_mm256_loadu_ps(p))
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: __m256) {
        op!(_mm256_storeu_ps(p, v));
    }
    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u8) -> __m256 {
        op!(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast())))))
    }
    #[inline(always)]
    unsafe fn load_f16(self, p: *const u8) -> __m256 {
        op!(_mm256_cvtph_ps(_mm_loadu_si128(p.cast())))
    }
    #[inline(always)]
    fn add(self, a: __m256, b: __m256) -> __m256 {
        op!(_mm256_add_ps(a, b))
    }
    #[inline(always)]
    fn sub(self, a: __m256, b: __m256) -> __m256 {
        op!(_mm256_sub_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, a: __m256, b: __m256) -> __m256 {
        op!(_mm256_mul_ps(a, b))
    }
    #[inline(always)]
    fn div(self, a: __m256, b: __m256) -> __m256 {
        op!(_mm256_div_ps(a, b))
    }
    #[inline(always)]
    fn max(self, a: __m256, b: __m256) -> __m256 {
        op!(_mm256_max_ps(a, b))
    }
    #[inline(always)]
    fn min(self, a: __m256, b: __m256) -> __m256 {
        op!(_mm256_min_ps(a, b))
    }
    #[inline(always)]
    fn mul_add(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        op!(_mm256_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn pow2(self, v: __m256) -> __m256 {
        op!(_mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(_mm256_castps_si256(v), _mm256_set1_epi32(127)))))
    }
    #[inline(always)]
    fn round_bf16(self, v: __m256) -> __m256 {
        op!({
            let b = _mm256_castps_si256(v);
            let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(b), _mm256_set1_epi32(1));
            let up = _mm256_add_epi32(b, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
            let cut = _mm256_castsi256_ps(_mm256_and_si256(up, _mm256_set1_epi32(0xffff_0000_u32 as i32)));
            _mm256_blendv_ps(cut, v, _mm256_cmp_ps::<_CMP_UNORD_Q>(v, v))
        })
    }
    #[inline(always)]
    fn sum(self, v: __m256) -> f32 {
        op!({
            let q = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let d = _mm_add_ps(q, _mm_movehl_ps(q, q));
            _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)))
        })
    }
    #[inline(always)]
    fn prefetch(self, p: *const u8) {
        op!(_mm_prefetch::<_MM_HINT_T0>(p.cast()));
    }
}
