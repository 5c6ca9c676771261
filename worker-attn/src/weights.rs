//! All weights that the attention worker holds, but for local expert shards.
//!
//! Projections that share an input are stacked into one matrix, so that a decode step reads the input once and launches once: q, k, v,
//! f_a, g_a and b of a KDA layer; q_a, kv_a and the indexer's wk, gate and weights of an MLA layer; gate and up of an MLP.
//!
//! Neighbours: `tandem_model` hands out the tensors, `layers/` know their blocks, `model.rs` adds the local shards.

use std::time::Instant;

use tandem_kernels::{Backend, BackendError, MhcWeights};
use tandem_model::{Checkpoint, FfnTensors, MixerTensors, ModelError, MoeTensors};

use crate::{
    dims::Dims,
    layers::{head::Head, kda::Kda, mhc, mla::Mla, router::Router, shared_expert::Mlp},
};

/// Why weights cannot be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The checkpoint cannot be read.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The device cannot hold a tensor.
    #[error("{place}: {source}")]
    Backend {
        /// Part of the model that was being loaded.
        place: String,
        /// The device's own words.
        source: BackendError,
    },
    /// A shard of routed experts that this worker must host cannot be loaded.
    #[error("local shard {shard}: {source}")]
    Shard {
        /// The shard.
        shard: String,
        /// What is wrong.
        source: Box<tandem_worker_experts::Error>,
    },
}

/// Token mixer of a layer.
pub enum Mixer<B: Backend> {
    /// Kimi delta attention.
    Kda(Kda<B>),
    /// Latent attention.
    Mla(Mla<B>),
}

/// Router and shared expert of a MoE layer.
pub struct Moe<B: Backend> {
    /// The router.
    pub router: Router<B>,
    /// The shared expert.
    pub shared: Mlp<B>,
}

/// Feed-forward part of a layer.
pub enum Ffn<B: Backend> {
    /// One gated MLP.
    Dense(Mlp<B>),
    /// Mixture of experts.
    Moe(Moe<B>),
}

/// One layer.
pub struct Layer<B: Backend> {
    /// mHC site and norm before the mixer.
    pub attn_hc: MhcWeights<B>,
    /// The mixer.
    pub mixer: Mixer<B>,
    /// mHC site and norm before the FFN.
    pub ffn_hc: MhcWeights<B>,
    /// The FFN.
    pub ffn: Ffn<B>,
}

/// The trunk.
pub struct Weights<B: Backend> {
    /// Embedding table.
    pub embed: B::Weight,
    /// Layers in order.
    pub layers: Vec<Layer<B>>,
    /// Final norm and head.
    pub head: Head<B>,
}

impl<B: Backend> Weights<B> {
    /// Reads the trunk into memory, and puts it on the device; `progress` hears how many of how many bytes are read.
    ///
    /// # Errors
    /// The checkpoint, the disk or the device, naming the layer.
    pub fn load(b: &B, d: &Dims, checkpoint: &Checkpoint, progress: &mut dyn FnMut(u64, u64)) -> Result<Self, LoadError> {
        let at = |place: String| move |source| LoadError::Backend { place, source };
        let started = Instant::now();
        let read = checkpoint.read_in_trunk(progress)? as f64 / 1e9;
        let seconds = started.elapsed().as_secs_f64();
        tracing::info!(gb = read, seconds, gb_per_s = read / seconds.max(1e-9), "trunk read into memory");
        let embed = b.weight(&[checkpoint.embed()?]).map_err(at("embedding".to_owned()))?;
        let (mut kda, mut mla) = (0, 0);
        let mut layers = Vec::with_capacity(d.layers);
        for i in 0..d.layers {
            layers.push(load_layer(b, d, checkpoint, i, &mut kda, &mut mla)?);
        }
        let head = Head::load(b, &checkpoint.final_norm()?, &checkpoint.lm_head()?).map_err(at("head".to_owned()))?;
        Ok(Self { embed, layers, head })
    }
}

/// Loads layer `i`; `kda` and `mla` count the layers of each kind so far (their dense numbers).
fn load_layer<B: Backend>(
    b: &B,
    d: &Dims,
    checkpoint: &Checkpoint,
    i: usize,
    kda: &mut usize,
    mla: &mut usize,
) -> Result<Layer<B>, LoadError> {
    let t = checkpoint.layer(i)?;
    let place = |source| LoadError::Backend { place: format!("layer {i}"), source };
    let mixer = match &t.mixer {
        MixerTensors::Kda(t) => {
            *kda += 1;
            Mixer::Kda(Kda::load(b, d, *kda - 1, t).map_err(place)?)
        }
        MixerTensors::Mla(t) => {
            *mla += 1;
            Mixer::Mla(Mla::load(b, d, *mla - 1, t).map_err(place)?)
        }
    };
    let ffn = match &t.ffn {
        FfnTensors::Dense(t) => Ffn::Dense(Mlp::load(b, t).map_err(place)?),
        FfnTensors::Moe(MoeTensors { router, bias, shared }) => {
            Ffn::Moe(Moe { router: Router::load(b, router, bias).map_err(place)?, shared: Mlp::load(b, shared).map_err(place)? })
        }
    };
    Ok(Layer {
        attn_hc: mhc::load(b, &t.attn_hc, &t.input_norm).map_err(place)?,
        mixer,
        ffn_hc: mhc::load(b, &t.ffn_hc, &t.post_norm).map_err(place)?,
        ffn,
    })
}
