//! The slices of the experts that a shard owns → one backend bank per layer.
//!
//! A slice along the intermediate dimension takes rows of gate and up and columns of down, as windows over the mapped file: nothing is
//! copied here. [`tandem_model::readin`] brought their pages into memory before, so that the first dispatch does not wait for the disk.
//!
//! Neighbours: `exec.rs` keeps the banks.

use tandem_kernels::{Backend, ExpertSource};
use tandem_model::{Checkpoint, Shard};
use tandem_quant::MatrixSource;

use crate::Error;

/// How far loading is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LoadProgress {
    /// Bytes of weights in memory.
    pub loaded_bytes: u64,
    /// Bytes of weights in all.
    pub total_bytes: u64,
}

/// A shard's slice of one layer's experts on a device, and the bytes of its weights.
///
/// # Errors
/// The layer or an expert does not exist, a cut does not fall on a block, or the backend cannot take the weights.
pub fn load_layer<B: Backend>(backend: &B, checkpoint: &Checkpoint, shard: &Shard, layer: u32) -> Result<(B::Bank, u64), Error> {
    let mut experts = Vec::with_capacity(shard.experts.len());
    let mut bytes = 0;
    for e in shard.experts.clone() {
        let [gate, up, down] = checkpoint.expert_slice(layer as usize, e as usize, &shard.ffn)?.into_matrices();
        bytes += [&gate, &up, &down].map(MatrixSource::stored_bytes).iter().sum::<usize>() as u64;
        experts.push(ExpertSource { gate, up, down });
    }
    Ok((backend.bank(shard.experts.start, experts)?, bytes))
}
