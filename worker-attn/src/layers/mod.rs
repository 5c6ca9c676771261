//! The layers of the trunk: each file loads one block's weights and enqueues its ops.
//!
//! | file | block |
//! |---|---|
//! | [`mhc`] | hyper-connections around every sublayer |
//! | [`kda`] | Kimi delta attention |
//! | [`mla`] | latent attention |
//! | [`dsa`] | the indexer that selects its rows |
//! | [`router`] | expert choice |
//! | [`shared_expert`] | shared expert and dense FFN (gated MLPs) |
//! | [`head`] | collapse, final norm, logits |
//!
//! Neighbours: `step.rs` calls them in order; `weights.rs` owns them.

pub mod dsa;
pub mod head;
pub mod kda;
pub mod mhc;
pub mod mla;
pub mod router;
pub mod shared_expert;

use tandem_kernels::Backend;

use crate::{buffers::Buffers, dims::Dims};

/// What every layer works on: a micro-batch of a step.
pub struct Cx<'a, B: Backend> {
    /// The device.
    pub b: &'a B,
    /// Sizes.
    pub d: &'a Dims,
    /// Its rows, described on the device.
    pub batch: &'a B::Batch,
    /// Sequence state.
    pub state: &'a mut B::State,
    /// Scratch.
    pub buf: &'a mut Buffers<B>,
    /// Which of the step's micro-batches this is.
    pub micro: usize,
    /// Its first row in the step.
    pub first: usize,
    /// Its rows.
    pub rows: usize,
    /// Largest number of tokens any of its rows sees.
    pub context: usize,
}
