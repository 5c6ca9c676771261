//! GLM-5.3-Flash (`glm5_next`) as data: what a checkpoint folder says, and where its bytes lie.
//!
//! | module | idea |
//! |---|---|
//! | [`files`] | reading the small files |
//! | [`json`] | typed reading of config files, with errors that name file and key |
//! | [`geometry`] | `config.json` → [`Geometry`]: every size, none assumed |
//! | [`generation`] | `generation_config.json` → [`GenerationConfig`]: sampling defaults and the set of EOS ids |
//! | [`gguf`] | the GGUF container |
//! | [`storage`] | safetensors and GGUF files through `mmap`: one file, or sets of shards |
//! | [`names`] | the spellings of a tensor name in the wild → one canonical name |
//! | [`inventory`] | which tensors a geometry needs, with their shapes |
//! | `linear` | how a matrix is stored: floats, FP8, NVFP4, MXFP4, ggml types |
//! | [`locate`] | which kind of checkpoint lies at a path |
//! | [`checkpoint`] | [`Checkpoint`]: a validated folder |
//! | [`weigh`] | what its tensors weigh, on disk or on a device |
//! | `notes` | what is odd about it, in sentences |
//! | [`census`] | its tensors counted by part, type and layer |
//! | [`semantic`] | whether experts' values look like weights of this model |
//! | [`readin`] | bringing mapped weights into memory, at the disk's speed |
//! | [`tensors`] | typed access for workers: a layer's tensors, an expert's matrices |
//! | [`fingerprint`] | the identity that two processes compare before they exchange activations |
//! | [`shard`] | [`Shard`]: layers × experts × a slice of the intermediate dimension |
//! | [`resident`] | [`Resident`]: what the attention worker keeps for itself |
//! | [`plan`] | [`ShardPlan`]: cutting the routed experts over workers, each cell exactly once |
//! | [`budget`] | what processes need of a device's memory, and the refusal |
//! | [`title`] | what a checkpoint is called |
//! | [`synthetic`] | hash-generated checkpoints of any geometry, for tests and benchmarks |
//! | [`stubs`] | the published releases and quantised mixes as headers without data |
//! | [`demo`] | the embedded demo checkpoint (feature `demo`) |
//!
//! This crate knows of no device and of no process: `kernels/quant` gives it [`tandem_quant::MatrixSource`], which the workers hand on to
//! a backend.

pub mod budget;
pub mod census;
pub mod checkpoint;
#[cfg(feature = "demo")]
pub mod demo;
pub mod error;
pub mod files;
pub mod fingerprint;
pub mod generation;
pub mod geometry;
pub mod gguf;
pub mod inventory;
pub mod json;
mod linear;
pub mod locate;
pub mod names;
pub mod narrow;
mod notes;
pub mod plan;
pub mod readin;
pub mod resident;
pub mod semantic;
pub mod shard;
pub mod storage;
pub mod stubs;
pub mod synthetic;
pub mod tensors;
pub mod title;
pub mod weigh;

pub use checkpoint::{Checkpoint, LoadFormat};
pub use error::ModelError;
pub use generation::GenerationConfig;
pub use geometry::{Ffn, Geometry, Indexer, LayerSpec, Mixer};
pub use plan::{PlanError, ShardPlan, Split};
pub use resident::Resident;
pub use shard::Shard;
pub use tensors::{
    DenseTensors, ExpertMatrices, FfnTensors, HcTensors, IndexerTensors, KdaTensors, LayerTensors, MixerTensors, MlaTensors, MoeTensors,
};
pub use weigh::Weighed;
