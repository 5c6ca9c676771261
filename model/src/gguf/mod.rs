//! The GGUF container (versions 2 and 3): typed key-value pairs, then tensor infos, then aligned data.
//!
//! | module | idea |
//! |---|---|
//! | [`config`] | the model's keys → `config.json` |
//! | [`keys`] | what the header calls the keys of `config.json`, for messages |
//! | [`names`] | tensor names → canonical names, and how their values were changed |
//! | [`sidecar`] | ROCmFP codebooks |
//! | [`tokenizer`] | the tokenizer's keys → `tokenizer.json` |
//! | [`value`] | one typed value, with lenient accessors |
//! | [`reader`] | a bounds-checked little-endian cursor |
//! | [`header`] | [`Header`]: everything before the data, and where each tensor's bytes lie |
//! | [`mod@write`] | writing a header |
//!
//! Parsing touches only the header's bytes, allocates no more than they justify, and ends in a named error for any other input.

pub mod config;
pub mod header;
pub mod keys;
pub mod names;
pub mod reader;
pub mod sidecar;
pub mod tokenizer;
pub mod value;
pub mod write;

pub use header::{Header, TensorInfo};
pub use reader::GgufError;
pub use value::Value;
