//! What can go wrong with an expert worker, in words.

use tandem_kernels::BackendError;
use tandem_model::{ModelError, PlanError, Shard};

/// A failure of an expert worker or of a shard engine.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The checkpoint cannot be read.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A shard does not fit the model.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The device failed.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// A dispatch asks for a layer that the shard does not have.
    #[error("layer {layer} is not in shard {shard}")]
    LayerNotHeld {
        /// The layer.
        layer: u32,
        /// The shard.
        shard: Shard,
    },
}
