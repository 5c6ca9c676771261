//! The vector operations that the kernels are written over, once for every instruction set.
//!
//! A [`Simd`] value is a token: it exists only where its instruction set was detected (`isa.rs`), so its methods are safe to call.
//! Implementations: [`Portable`] here, `simd_avx2.rs`, `simd_avx512.rs`. Everything is `#[inline(always)]`, because only code that is
//! inlined into the `#[target_feature]` entry points of `isa.rs` is compiled for the instruction set; for the same reason kernels
//! use loops rather than closures around these calls.

#![allow(clippy::needless_range_loop, reason = "register tiles index several arrays by one constant range")]

use super::isa::Kernel;

/// Adding this to a small float leaves its nearest integer in the low mantissa bits.
pub(super) const MAGIC: f32 = 12_582_912.0;

/// One instruction set. `V` holds [`Simd::LANES`] f32 values.
pub(super) trait Simd: Copy + Send + Sync + 'static {
    /// A vector register.
    type V: Copy;
    /// f32 values per vector.
    const LANES: usize;
    /// 32 vector registers rather than 16: larger tiles.
    const WIDE: bool;

    /// The same value in every lane.
    fn splat(self, x: f32) -> Self::V;
    /// Reads LANES values.
    ///
    /// # Safety
    /// `p..p+LANES` is readable.
    unsafe fn load(self, p: *const f32) -> Self::V;
    /// Writes LANES values.
    ///
    /// # Safety
    /// `p..p+LANES` is writable and nobody else's.
    unsafe fn store(self, p: *mut f32, v: Self::V);
    /// Reads LANES little-endian bf16 values, exactly.
    ///
    /// # Safety
    /// `p..p+2·LANES` bytes are readable.
    unsafe fn load_bf16(self, p: *const u8) -> Self::V;
    /// Reads LANES little-endian f16 values, exactly.
    ///
    /// # Safety
    /// `p..p+2·LANES` bytes are readable.
    unsafe fn load_f16(self, p: *const u8) -> Self::V;
    /// a + b
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    /// a − b
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    /// a · b
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// a / b
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// The larger; `b` where either is NaN.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// The smaller; `b` where either is NaN.
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    /// a·b + c, rounded once where the hardware has it.
    fn mul_add(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// 2^n for `v = n + MAGIC`, n in −126..=127.
    fn pow2(self, v: Self::V) -> Self::V;
    /// Rounds to the nearest bf16 value (ties to even), kept as f32; NaN stays NaN.
    fn round_bf16(self, v: Self::V) -> Self::V;
    /// Sum of the lanes in one fixed order.
    fn sum(self, v: Self::V) -> f32;
    /// Hints that the cache line at `p` is needed soon. Any address is fine.
    fn prefetch(self, p: *const u8);

    /// Runs a kernel as a function of its own, compiled once per instruction set: what several callers share, or is large, goes
    /// through here, or the compiler would repeat it wherever it is used.
    fn call<K: Kernel>(self, kernel: K) -> K::Out;

    /// Zeros.
    #[inline(always)]
    fn zero(self) -> Self::V {
        self.splat(0.0)
    }

    /// Reads up to LANES values from the front of `x`; missing ones are 0.
    #[inline(always)]
    fn ld(self, x: &[f32]) -> Self::V {
        if x.len() >= Self::LANES {
            // SAFETY: the slice is long enough.
            unsafe { self.load(x.as_ptr()) }
        } else {
            let mut pad = [0.0f32; 16];
            pad[..x.len()].copy_from_slice(x);
            // SAFETY: LANES ≤ 16.
            unsafe { self.load(pad.as_ptr()) }
        }
    }

    /// Writes up to LANES values to the front of `x`; lanes past its end are dropped.
    #[inline(always)]
    fn st(self, x: &mut [f32], v: Self::V) {
        if x.len() >= Self::LANES {
            // SAFETY: the slice is long enough.
            unsafe { self.store(x.as_mut_ptr(), v) }
        } else {
            let mut pad = [0.0f32; 16];
            // SAFETY: LANES ≤ 16.
            unsafe { self.store(pad.as_mut_ptr(), v) };
            let n = x.len();
            x.copy_from_slice(&pad[..n]);
        }
    }

    /// e^v to about 1 ulp, for v held to −87.3 ..= 88 (1.2e-38 ..= 1.7e38); NaN stays NaN.
    #[inline(always)]
    fn exp(self, v: Self::V) -> Self::V {
        let v = self.min(self.splat(88.0), self.max(self.splat(-87.336_54), v));
        let n = self.mul_add(v, self.splat(std::f32::consts::LOG2_E), self.splat(MAGIC));
        let nf = self.sub(n, self.splat(MAGIC));
        let r = self.mul_add(nf, self.splat(-0.693_359_4), v);
        let r = self.mul_add(nf, self.splat(2.121_944_4e-4), r);
        let mut p = self.splat(1.987_569_1e-4);
        p = self.mul_add(p, r, self.splat(1.398_199_9e-3));
        p = self.mul_add(p, r, self.splat(8.333_452e-3));
        p = self.mul_add(p, r, self.splat(4.166_579_6e-2));
        p = self.mul_add(p, r, self.splat(1.666_666_5e-1));
        p = self.mul_add(p, r, self.splat(0.5));
        let r2 = self.mul(r, r);
        p = self.add(self.mul_add(p, r2, r), self.splat(1.0));
        self.mul(p, self.pow2(n))
    }

    /// 1 / (1 + e^−v)
    #[inline(always)]
    fn sigmoid(self, v: Self::V) -> Self::V {
        let e = self.exp(self.sub(self.zero(), v));
        self.div(self.splat(1.0), self.add(self.splat(1.0), e))
    }

    /// v · sigmoid(v)
    #[inline(always)]
    fn silu(self, v: Self::V) -> Self::V {
        let e = self.exp(self.sub(self.zero(), v));
        self.div(v, self.add(self.splat(1.0), e))
    }
}

/// Plain Rust: the compiler vectorises it for the build's baseline.
#[derive(Clone, Copy)]
pub(super) struct Portable;

/// Eight lanes of plain Rust.
#[derive(Clone, Copy)]
pub(super) struct V8([f32; 8]);

macro_rules! lanewise {
    ($name:ident, $a:ident, $b:ident => $e:expr) => {
        #[inline(always)]
        fn $name(self, va: V8, vb: V8) -> V8 {
            let mut o = [0.0f32; 8];
            for i in 0..8 {
                let ($a, $b) = (va.0[i], vb.0[i]);
                o[i] = $e;
            }
            V8(o)
        }
    };
}

impl Simd for Portable {
    type V = V8;
    const LANES: usize = 8;
    const WIDE: bool = false;

    #[inline(never)]
    fn call<K: Kernel>(self, kernel: K) -> K::Out {
        kernel.run(self)
    }

    #[inline(always)]
    fn splat(self, x: f32) -> V8 {
        V8([x; 8])
    }

    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> V8 {
        // SAFETY: the caller's promise; read_unaligned needs no alignment.
        V8(unsafe { p.cast::<[f32; 8]>().read_unaligned() })
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: V8) {
        // SAFETY: the caller's promise.
        unsafe { p.cast::<[f32; 8]>().write_unaligned(v.0) }
    }

    #[inline(always)]
    unsafe fn load_bf16(self, p: *const u8) -> V8 {
        // SAFETY: the caller's promise.
        let b = unsafe { p.cast::<[[u8; 2]; 8]>().read_unaligned() };
        let mut o = [0.0f32; 8];
        for i in 0..8 {
            o[i] = f32::from_bits(u32::from(u16::from_le_bytes(b[i])) << 16);
        }
        V8(o)
    }

    #[inline(always)]
    unsafe fn load_f16(self, p: *const u8) -> V8 {
        // SAFETY: the caller's promise.
        let b = unsafe { p.cast::<[[u8; 2]; 8]>().read_unaligned() };
        let mut o = [0.0f32; 8];
        for i in 0..8 {
            o[i] = half::f16::from_le_bytes(b[i]).to_f32();
        }
        V8(o)
    }

    lanewise!(add, a, b => a + b);
    lanewise!(sub, a, b => a - b);
    lanewise!(mul, a, b => a * b);
    lanewise!(div, a, b => a / b);
    lanewise!(max, a, b => if a > b { a } else { b });
    lanewise!(min, a, b => if a < b { a } else { b });

    #[inline(always)]
    fn mul_add(self, a: V8, b: V8, c: V8) -> V8 {
        let mut o = [0.0f32; 8];
        for i in 0..8 {
            o[i] = a.0[i] * b.0[i] + c.0[i];
        }
        V8(o)
    }

    #[inline(always)]
    fn pow2(self, v: V8) -> V8 {
        let mut o = [0.0f32; 8];
        for i in 0..8 {
            o[i] = f32::from_bits(v.0[i].to_bits().wrapping_add(127) << 23);
        }
        V8(o)
    }

    #[inline(always)]
    fn round_bf16(self, v: V8) -> V8 {
        let mut o = [0.0f32; 8];
        for i in 0..8 {
            o[i] = round_bf16(v.0[i]);
        }
        V8(o)
    }

    #[inline(always)]
    fn sum(self, v: V8) -> f32 {
        let v = v.0;
        ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]))
    }

    #[inline(always)]
    fn prefetch(self, _p: *const u8) {}
}

/// Rounds one value to the nearest bf16 (ties to even), kept as f32.
#[inline(always)]
pub(super) fn round_bf16(x: f32) -> f32 {
    half::bf16::from_f32(x).to_f32()
}
