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

/// What every layer of a step works on.
pub struct Cx<'a, B: Backend> {
    /// The device.
    pub b: &'a B,
    /// Sizes.
    pub d: &'a Dims,
    /// The step on the device.
    pub batch: &'a B::Batch,
    /// Sequence state.
    pub state: &'a mut B::State,
    /// Scratch.
    pub buf: &'a mut Buffers<B>,
    /// Rows of the step.
    pub rows: usize,
    /// Largest number of tokens any row of the step sees.
    pub context: usize,
}
