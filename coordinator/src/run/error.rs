//! Why a coordinator could not start or go on.

use std::io;

use tandem_model::{ModelError, PlanError};
use tandem_runtime::metrics::MetricsError;

use crate::api::TextError;

/// Why a coordinator could not start or go on.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Settings that cannot work together.
    #[error("{0}")]
    Config(String),
    /// An address cannot be bound; the text names it and, where it can be seen, the process that holds it.
    #[error("{flag}: {source}")]
    Bind {
        /// The flag that said the address.
        flag: &'static str,
        /// What happened.
        source: io::Error,
    },
    /// The checkpoint cannot be read.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// Its experts cannot be cut as asked.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// Its tokenizer or template cannot be read.
    #[error(transparent)]
    Text(#[from] TextError),
    /// The metrics recorder.
    #[error(transparent)]
    Metrics(#[from] MetricsError),
    /// No token can be made of this checkpoint.
    #[error(
        "no token can be made of this checkpoint: {0}; `tandem check --semantic` looks at its scales and at some of its weights, else fetch it again"
    )]
    WarmUp(String),
    /// A server ended by itself.
    #[error("the {server} server ended: {why}")]
    Server {
        /// `control` or `HTTP`.
        server: &'static str,
        /// One line.
        why: String,
    },
}
