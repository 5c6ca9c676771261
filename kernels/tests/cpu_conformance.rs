//! The conformance suite over the CPU backend: every instruction set that this machine has, both precisions, several threads.

use tandem_kernels::{
    Precision,
    cpu::{CpuBackend, CpuOptions, Isa},
};

/// The backend for an instruction set; the best that this CPU has where it lacks the one asked for.
fn backend(isa: Isa, precision: Precision) -> CpuBackend {
    let isa = if Isa::available().contains(&isa) { isa } else { Isa::detect() };
    CpuBackend::new(CpuOptions { threads: Some(3), isa: Some(isa), ..CpuOptions::new(precision) }).expect("available")
}

macro_rules! instantiate {
    ($($module:ident = $isa:expr, $precision:expr;)*) => {
        $(mod $module {
            use super::*;
            tandem_kernels::conformance!(backend($isa, $precision));
        })*
    };
}

instantiate! {
    portable_f32 = Isa::Portable, Precision::F32;
    portable_bf16 = Isa::Portable, Precision::Bf16;
    avx2_f32 = Isa::Avx2, Precision::F32;
    avx2_bf16 = Isa::Avx2, Precision::Bf16;
    avx512_f32 = Isa::Avx512, Precision::F32;
    avx512_bf16 = Isa::Avx512, Precision::Bf16;
}
