//! Which stored types each kind of device computes with, and what its pools and scratch take, known without the device: what
//! `tandem check` and `tandem plan` ask.
//!
//! Neighbours: `cpu/decode.rs` reads any type; a device that lacks kernels for a type refuses its matrices when they are loaded.

use tandem_quant::{DType, ScaleForm, coded::coding};

use crate::{StateSpec, cpu, cuda};

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

/// Types that CUDA kernels read as they are stored, beside those of [`coding`], whose codes they read; others would become f32.
const CUDA: &[DType] =
    &[DType::F32, DType::F16, DType::Bf16, DType::F8E4m3, DType::Nvfp4Pairs, DType::Mxfp4Pairs, DType::Nvfp4, DType::Mxfp4, DType::Q8_0];

/// Whether matrices of a stored type can be multiplied on a kind of device.
pub fn has_kernels(kind: DeviceKind, dtype: DType) -> bool {
    match kind {
        // Types without a kernel of their own are decoded block by block.
        DeviceKind::Cpu => DType::ALL.contains(&dtype),
        DeviceKind::Cuda => CUDA.contains(&dtype) || coding(dtype).is_some(),
    }
}

/// Whether a kind of device keeps matrices of a stored type, with scales of a form beside them, as small codes; else they become f32 there.
pub fn keeps_packed(kind: DeviceKind, dtype: DType, scales: ScaleForm) -> bool {
    if kind == DeviceKind::Cpu {
        return true;
    }
    match (dtype, scales) {
        (DType::F32 | DType::F16 | DType::Bf16 | DType::F8E4m3 | DType::Nvfp4 | DType::Mxfp4 | DType::Q8_0, ScaleForm::None)
        | (DType::F8E4m3 | DType::Nvfp4 | DType::Mxfp4 | DType::Q8_0, ScaleForm::Tensor)
        | (DType::F8E4m3, ScaleForm::Row)
        | (DType::Nvfp4Pairs, ScaleForm::E4m3Groups)
        | (DType::Mxfp4Pairs, ScaleForm::E8m0Groups) => true,
        (DType::F8E4m3, ScaleForm::Grid { block_cols }) => block_cols.is_power_of_two(),
        (_, ScaleForm::None) => coding(dtype).is_some(),
        _ => false,
    }
}

/// Bytes that a stored matrix (or a stack of them), `[…, rows, cols]`, takes in the memory of a kind of device; `stored` is what it takes on
/// disk, scales included.
pub fn weight_bytes(kind: DeviceKind, dtype: DType, scales: ScaleForm, shape: &[usize], stored: u64) -> u64 {
    // What the device pads to: elements of a row, rows of a matrix.
    const COLS: usize = 128;
    const ROWS: usize = 16;
    if kind == DeviceKind::Cpu {
        return stored;
    }
    let cols = shape.last().copied().unwrap_or(1);
    let rows = shape.iter().rev().nth(1).copied().unwrap_or(1);
    let stack: usize = shape.iter().rev().skip(2).product();
    let padded = cols.next_multiple_of(COLS) as u64;
    let matrices = |row: u64, scale_row: u64| (stack * rows.next_multiple_of(ROWS)) as u64 * row + (stack * rows) as u64 * scale_row;
    if let (Some(coding), ScaleForm::None) = (coding(dtype), scales) {
        let (row, scale_row) = cuda::coded::row_bytes(dtype, coding, padded as usize);
        matrices(row as u64, scale_row as u64)
    } else if keeps_packed(kind, dtype, scales) {
        let of = |n: u64, elems: usize, all: u64| (u128::from(n) * u128::from(all) / elems.max(1) as u128) as u64;
        of(of(stored, cols, padded), rows, rows.next_multiple_of(ROWS) as u64)
    } else {
        4 * padded * (stack * rows) as u64
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

/// What the pools of a spec take on a CPU with latents stored as `latents`. Other devices need no more: the CPU keeps pooled keys in f32 and
/// pads them.
pub fn state_bytes(spec: &StateSpec, latents: cpu::LatentType) -> StateBytes {
    cpu::CpuState::pools(spec, latents)
}

/// What a CPU takes as scratch for steps of up to `rows` rows and contexts of up to `context` tokens on `threads` threads.
pub fn scratch_bytes(rows: usize, context: usize, threads: usize) -> u64 {
    cpu::scratch_bytes(rows, context, threads)
}

/// What the experts of a layer take as scratch on a kind of device for up to `rows` rows with `topk` experts each, of `held` in the largest shard:
/// hidden rows, and on a GPU the gathered rows before and the outputs behind them.
pub fn expert_scratch_bytes(kind: DeviceKind, rows: usize, topk: usize, held: usize, hidden: usize, inter: usize) -> u64 {
    match kind {
        DeviceKind::Cpu => 4 * (rows as u64).saturating_mul((topk * inter) as u64),
        DeviceKind::Cuda => cuda::expert_scratch(rows, topk, held, hidden, inter),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_counted_as_they_lie_on_a_gpu() {
        let bytes = |dtype: DType, scales, shape: &[usize], stored| weight_bytes(DeviceKind::Cuda, dtype, scales, shape, stored);
        // 2048 × 4096: 144 bytes per 256 on disk, 148 there; of Q6_K 210 and 274.
        assert_eq!(bytes(DType::Q4K, ScaleForm::None, &[2048, 4096], 2048 * 16 * 144), 2048 * 16 * 148);
        assert_eq!(bytes(DType::Q6K, ScaleForm::None, &[3, 2048, 4096], 3 * 2048 * 16 * 210), 3 * 2048 * 16 * 274);
        assert_eq!(bytes(DType::RocmFp3Mix, ScaleForm::None, &[2048, 4096], 2048 * 128 * 14), 2048 * 4096 * 4);
        assert_eq!(weight_bytes(DeviceKind::Cpu, DType::Q4K, ScaleForm::None, &[2048, 4096], 2048 * 16 * 144), 2048 * 16 * 144);
        assert_eq!(bytes(DType::Q8_0, ScaleForm::None, &[2048, 4096], 2048 * 128 * 34), 2048 * 128 * 34);
        // Rows of 100 become 128, and 20 of them 32; in a stack each matrix for itself.
        assert_eq!(bytes(DType::Bf16, ScaleForm::None, &[20, 100], 20 * 100 * 2), 32 * 128 * 2);
        assert_eq!(bytes(DType::Bf16, ScaleForm::None, &[3, 20, 100], 3 * 20 * 100 * 2), 3 * 32 * 128 * 2);
        assert_eq!(bytes(DType::Iq1S, ScaleForm::None, &[3, 20, 256], 3 * 20 * 50), 3 * (32 * 128 + 20 * 24));
        // A factor beside floats is multiplied in; MXFP8 has no kernel.
        assert!(!keeps_packed(DeviceKind::Cuda, DType::Bf16, ScaleForm::Tensor));
        assert!(!keeps_packed(DeviceKind::Cuda, DType::F8E4m3, ScaleForm::E8m0Groups));
        assert!(DType::ALL.iter().all(|dtype| keeps_packed(DeviceKind::Cpu, *dtype, ScaleForm::Tensor)));
    }
}
