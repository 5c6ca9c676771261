//! What can be wrong with a checkpoint folder, in words that name the file, the key or tensor, what was needed and what was there.

use std::path::PathBuf;

/// A checkpoint that cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A file cannot be opened, mapped or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's own words.
        source: std::io::Error,
    },
    /// The folder holds no checkpoint.
    #[error("{}: {reason}", path.display())]
    Folder {
        /// The folder.
        path: PathBuf,
        /// What is missing and what would work.
        reason: String,
    },
    /// A JSON file is malformed.
    #[error("{}: not valid JSON: {source}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// The parser's own words.
        source: serde_json::Error,
    },
    /// A GGUF header is malformed.
    #[error("{}: {source}", path.display())]
    Gguf {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: crate::gguf::GgufError,
    },
    /// A config key is missing, has the wrong type, or describes a model that cannot be.
    #[error("{}: {key}: needed {needed}, got {got}", path.display())]
    Key {
        /// The file.
        path: PathBuf,
        /// The key, dotted (`text_config.hidden_size`).
        key: String,
        /// What was needed.
        needed: String,
        /// What is there.
        got: String,
    },
    /// A weight file is not what it should be (truncated, malformed header, missing).
    #[error("{}: needed {needed}, got {got}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What was needed.
        needed: String,
        /// What is there.
        got: String,
    },
    /// A tensor is missing, or has the wrong shape or type.
    #[error("{}: tensor {tensor}: needed {needed}, got {got}", path.display())]
    Tensor {
        /// The file (the folder, where no file has the tensor).
        path: PathBuf,
        /// The tensor, as the file spells it.
        tensor: String,
        /// What was needed.
        needed: String,
        /// What is there.
        got: String,
    },
    /// A layer or expert number lies outside of the model.
    #[error("{what} {index} does not exist: the model has {count} ({kind})")]
    Index {
        /// `layer`, `expert`.
        what: &'static str,
        /// The number asked for.
        index: usize,
        /// How many there are.
        count: usize,
        /// Further explanation (`layers 3-8 have experts`).
        kind: String,
    },
    /// A cut through a matrix falls inside a block, or outside of the matrix.
    #[error(transparent)]
    Matrix(#[from] tandem_quant::MatrixError),
}
