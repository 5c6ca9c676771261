//! Which instruction set runs: detection once, then one entry point per set that a [`Kernel`] is compiled into.

use std::fmt;

use super::simd::{Portable, Simd};
#[cfg(target_arch = "x86_64")]
use super::{simd_avx2::Avx2, simd_avx512::Avx512};

/// An instruction set of the CPU backend. Each sums in its own fixed order, so results are bit-identical only within one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Isa {
    /// Plain Rust, any CPU.
    Portable,
    /// x86-64 with AVX2, FMA and F16C: 8 lanes.
    Avx2,
    /// x86-64 with AVX-512 F, BW, DQ and VL: 16 lanes.
    Avx512,
}

impl Isa {
    /// What this CPU can run, best last.
    pub fn available() -> &'static [Isa] {
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
            let avx512 = is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl");
            if avx2 && avx512 {
                return &[Isa::Portable, Isa::Avx2, Isa::Avx512];
            }
            if avx2 {
                return &[Isa::Portable, Isa::Avx2];
            }
        }
        &[Isa::Portable]
    }

    /// The best that this CPU can run.
    pub fn detect() -> Isa {
        Self::available().last().copied().unwrap_or(Isa::Portable)
    }

    /// f32 values per vector.
    pub fn lanes(self) -> usize {
        match self {
            Isa::Portable | Isa::Avx2 => 8,
            Isa::Avx512 => 16,
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Isa::Portable => "portable",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
        })
    }
}

/// An [`Isa`] that was checked against this CPU.
#[derive(Clone, Copy, Debug)]
pub(super) struct CheckedIsa(Isa);

impl CheckedIsa {
    /// `None` where this CPU lacks it.
    pub(super) fn new(isa: Isa) -> Option<Self> {
        Isa::available().contains(&isa).then_some(Self(isa))
    }

    /// The best that this CPU has.
    pub(super) fn best() -> Self {
        Self::new(Isa::detect()).unwrap_or(Self(Isa::Portable))
    }

    /// Which one.
    pub(super) fn isa(self) -> Isa {
        self.0
    }

    /// Runs a kernel with this instruction set.
    #[inline]
    pub(super) fn run<K: Kernel>(self, kernel: K) -> K::Out {
        match self.0 {
            // SAFETY: `new` saw the features.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { run_avx2(kernel) },
            // SAFETY: `new` saw the features.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => unsafe { run_avx512(kernel) },
            _ => Portable.call(kernel),
        }
    }
}

/// A piece of work that is written over [`Simd`]. `run` must be `#[inline(always)]`.
pub(super) trait Kernel {
    /// What it returns.
    type Out;
    /// Does the work.
    fn run<S: Simd>(self, s: S) -> Self::Out;
}

/// Runs a kernel with AVX2: the entry from outside, and [`Simd::call`].
#[cfg(target_arch = "x86_64")]
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn run_avx2<K: Kernel>(kernel: K) -> K::Out {
    // SAFETY: this function runs only where the features are.
    kernel.run(unsafe { Avx2::new() })
}

/// Runs a kernel with AVX-512: the entry from outside, and [`Simd::call`].
#[cfg(target_arch = "x86_64")]
#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn run_avx512<K: Kernel>(kernel: K) -> K::Out {
    // SAFETY: this function runs only where the features are.
    kernel.run(unsafe { Avx512::new() })
}
