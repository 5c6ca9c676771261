//! Which stored types each kind of device computes with, and what its pools and scratch take, known without the device: what
//! `tandem check` and `tandem plan` ask.
//!
//! Neighbours: `cpu/decode.rs` reads any type; a device that lacks kernels for a type refuses its matrices when they are loaded.

use tandem_quant::DType;

use crate::{Precision, StateSpec, cpu};

/// A kind of device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DeviceKind {
    /// The cores of a machine.
    Cpu,
    /// An NVIDIA GPU.
    Cuda,
}

impl DeviceKind {
    /// Every kind.
    pub const ALL: [Self; 2] = [Self::Cpu, Self::Cuda];

    /// Its name in flags and reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
        }
    }
}

/// Types that CUDA kernels read as they are stored; others would become f32.
const CUDA: &[DType] =
    &[DType::F32, DType::F16, DType::Bf16, DType::F8E4m3, DType::Nvfp4Pairs, DType::Mxfp4Pairs, DType::Nvfp4, DType::Mxfp4, DType::Q8_0];

/// Whether matrices of a stored type can be multiplied on a kind of device.
pub fn has_kernels(kind: DeviceKind, dtype: DType) -> bool {
    match kind {
        // Types without a kernel of their own are decoded block by block.
        DeviceKind::Cpu => DType::ALL.contains(&dtype),
        DeviceKind::Cuda => CUDA.contains(&dtype),
    }
}

/// Bytes of the pools of sequence state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StateBytes {
    /// Of all slots: KDA matrices, convolution taps, raw indexer tails.
    pub slots: u64,
    /// Of all pages: latents and pooled index keys.
    pub pages: u64,
}

/// What the pools of a spec take on a CPU. Other devices need no more: the CPU keeps pooled keys in f32 and pads them.
pub fn state_bytes(spec: &StateSpec, precision: Precision) -> StateBytes {
    cpu::CpuState::pools(spec, cpu::LatentType::of(precision))
}

/// What a CPU takes as scratch for steps of up to `rows` rows and contexts of up to `context` tokens on `threads` threads.
pub fn scratch_bytes(rows: usize, context: usize, threads: usize) -> u64 {
    cpu::scratch_bytes(rows, context, threads)
}
