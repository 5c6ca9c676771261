//! What can go wrong with an attention worker, in words.

use tandem_kernels::BackendError;
use tandem_model::{ModelError, PlanError};
use tandem_proto::membership::JoinError;

use crate::{model::StepError, weights::LoadError};

/// A failure that ends an attention worker.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The checkpoint cannot be read.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A local shard does not fit the model.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// Weights, caches and buffers do not fit this machine.
    #[error(transparent)]
    Memory(#[from] tandem_model::budget::Short),
    /// Weights cannot be loaded.
    #[error(transparent)]
    Load(Box<LoadError>),
    /// The device failed.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// A device that this build does not have.
    #[error("--device {got}: needed cpu, cuda:N or reference")]
    Device {
        /// What was asked for.
        got: String,
    },
    /// A cache type that the device does not have.
    #[error("--kv-cache-dtype: needed auto on --device {device}; other types work on cpu")]
    CacheType {
        /// The device.
        device: String,
    },
    /// A limit that cannot be met.
    #[error("{flag} {got}: needed {needed}")]
    Limit {
        /// The flag.
        flag: &'static str,
        /// What would work.
        needed: String,
        /// What was given.
        got: usize,
    },
    /// The coordinator does not take this worker.
    #[error(transparent)]
    Join(Box<JoinError>),
    /// The hop cannot be set up.
    #[error(transparent)]
    Hop(#[from] tandem_proto::hop::HopError),
    /// The coordinator changed what the worker must host.
    #[error("the coordinator now wants other local shards ({now}) than those loaded ({loaded}): start the worker anew")]
    LocalShards {
        /// Loaded.
        loaded: String,
        /// Wanted.
        now: String,
    },
    /// The step loop gave up.
    #[error("the step loop ended: {0}")]
    Step(Box<StepError>),
    /// A thread of the worker panicked or could not start.
    #[error("{0}")]
    Thread(String),
    /// A port cannot be served.
    #[error("{what}: {source}")]
    Bind {
        /// What was to be served.
        what: &'static str,
        /// The system's own words.
        source: std::io::Error,
    },
    /// The metrics recorder cannot be installed.
    #[error(transparent)]
    Metrics(#[from] tandem_runtime::metrics::MetricsError),
}

impl From<JoinError> for Error {
    fn from(error: JoinError) -> Self {
        Self::Join(Box::new(error))
    }
}

impl From<LoadError> for Error {
    fn from(error: LoadError) -> Self {
        Self::Load(Box::new(error))
    }
}

impl From<StepError> for Error {
    fn from(error: StepError) -> Self {
        Self::Step(Box::new(error))
    }
}
