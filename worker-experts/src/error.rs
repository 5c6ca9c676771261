//! What can go wrong with an expert worker, in words.

use tandem_kernels::BackendError;
use tandem_model::{ModelError, PlanError, Shard};

/// A failure of an expert worker or of a shard engine.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The link that lent the memory of a dispatch's rows has ended.
    #[error("the memory of the rows is not lent any more: their link has ended")]
    NotLent,
    /// The checkpoint cannot be read.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A shard does not fit the model.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The shards do not fit this machine.
    #[error(transparent)]
    Memory(#[from] tandem_model::budget::Short),
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
    /// Not a device.
    #[error("device {got:?}: needed cpu, cuda:N or reference")]
    Device {
        /// What was given.
        got: String,
    },
    /// A socket cannot be bound or served.
    #[error("{what}: {source}")]
    Bind {
        /// What was to listen.
        what: &'static str,
        /// The system's own words.
        source: std::io::Error,
    },
    /// The metrics recorder cannot be made.
    #[error(transparent)]
    Metrics(#[from] tandem_runtime::metrics::MetricsError),
    /// The coordinator does not take this worker.
    #[error(transparent)]
    Join(#[from] tandem_proto::membership::JoinError),
    /// A background task ended before its time.
    #[error("background task failed: {0}")]
    Task(String),
}
