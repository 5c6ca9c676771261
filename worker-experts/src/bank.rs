//! The slices of the experts that a shard owns → one backend bank per layer.
//!
//! A slice along the intermediate dimension takes rows of gate and up and columns of down, as windows over the mapped file: nothing is
//! copied here. Every page of a window is touched once before the backend gets it, so that progress counts bytes that are really in
//! memory and the first dispatch does not wait for the disk.
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

/// Loads a shard's slice of one layer's experts. `loaded` is told the bytes of each expert as it comes into memory.
///
/// # Errors
/// The layer or an expert does not exist, a cut does not fall on a block, or the backend cannot take the weights.
pub fn load_layer<B: Backend>(
    backend: &B,
    checkpoint: &Checkpoint,
    shard: &Shard,
    layer: u32,
    mut loaded: impl FnMut(u64),
) -> Result<B::Bank, Error> {
    let ffn = shard.ffn.start as usize..shard.ffn.end as usize;
    let mut experts = Vec::with_capacity(shard.experts.len());
    for e in shard.experts.clone() {
        let whole = checkpoint.expert(layer as usize, e as usize)?;
        let cut = ExpertSource {
            gate: whole.gate.row_window(ffn.clone()).map_err(tandem_model::ModelError::from)?,
            up: whole.up.row_window(ffn.clone()).map_err(tandem_model::ModelError::from)?,
            down: whole.down.col_window(ffn.clone()).map_err(tandem_model::ModelError::from)?,
        };
        let bytes = [&cut.gate, &cut.up, &cut.down].map(touch).iter().sum();
        experts.push(cut);
        loaded(bytes);
    }
    Ok(backend.bank(shard.experts.start, experts)?)
}

/// Reads one byte of every page of a matrix; returns its payload in bytes.
fn touch(matrix: &MatrixSource) -> u64 {
    const PAGE: usize = 4096;
    for row in 0..matrix.rows() {
        let bytes = matrix.row_bytes(row);
        // Rows shorter than a page often share one; touching each row's both ends costs nothing next to the read itself.
        let sum = bytes.iter().step_by(PAGE).chain(bytes.last()).fold(0u8, |a, b| a.wrapping_add(*b));
        std::hint::black_box(sum);
    }
    matrix.payload_bytes() as u64
}
