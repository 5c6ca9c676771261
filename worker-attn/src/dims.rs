//! The checkpoint's geometry in the shape that backend ops take it.
//!
//! Neighbours: `weights.rs` checks matrices against these, `buffers.rs` sizes scratch with them, `layers/` pass them on.

use tandem_kernels::{IndexerParams, KdaDims, KdaParams, MhcParams, MlaParams, RouterParams, StateSpec};
use tandem_model::Geometry;

/// Sizes and constants of one model.
#[derive(Clone, Debug)]
pub struct Dims {
    /// Hidden size D.
    pub hidden: usize,
    /// Vocabulary size.
    pub vocab: usize,
    /// Layers.
    pub layers: usize,
    /// rms_norm_eps.
    pub eps: f32,
    /// mHC.
    pub mhc: MhcParams,
    /// KDA.
    pub kda: KdaParams,
    /// MLA.
    pub mla: MlaParams,
    /// q_lora_rank.
    pub q_lora: usize,
    /// Indexer.
    pub indexer: IndexerParams,
    /// Router.
    pub router: RouterParams,
    /// swiglu_limit.
    pub swiglu_limit: Option<f32>,
    /// Widest gated MLP that this worker runs (dense layers, shared expert).
    pub intermediate: usize,
    /// KDA layers.
    pub kda_layers: usize,
    /// MLA layers.
    pub mla_layers: usize,
}

impl Dims {
    /// Reads a geometry.
    pub fn new(g: &Geometry) -> Self {
        Self {
            hidden: g.hidden,
            vocab: g.vocab,
            layers: g.layers,
            eps: g.rms_eps,
            mhc: MhcParams { streams: g.streams, hidden: g.hidden, rms_eps: g.rms_eps, hc_eps: g.hc_eps, iters: g.sinkhorn_iters },
            kda: KdaParams {
                dims: KdaDims { heads: g.kda_heads, head_dim: g.kda_head_dim, conv: g.conv },
                lower_bound: g.gate_lower_bound,
                eps: g.rms_eps,
            },
            mla: MlaParams { heads: g.attn_heads, qk_dim: g.qk_dim, v_dim: g.v_dim, latent: g.kv_lora },
            q_lora: g.q_lora,
            indexer: IndexerParams {
                heads: g.index_heads,
                dim: g.index_dim,
                kpool: g.kpool.max(1),
                topk: g.index_topk,
                always_tail: g.always_tail,
            },
            router: RouterParams {
                experts: g.experts,
                topk: g.topk,
                groups: g.groups,
                topk_group: g.topk_group,
                norm_topk: g.norm_topk_prob,
                scale: g.routed_scale,
            },
            swiglu_limit: g.swiglu_limit,
            intermediate: g.intermediate.max(g.shared_intermediate()),
            kda_layers: g.kda_layers().len(),
            mla_layers: g.mla_layers().len(),
        }
    }

    /// Width of q, k or v of a KDA layer.
    pub fn kda_width(&self) -> usize {
        self.kda.dims.heads * self.kda.dims.head_dim
    }

    /// The state pools for `slots` sequences that hold `kv_tokens` tokens together.
    pub fn state_spec(&self, slots: usize, kv_tokens: usize) -> StateSpec {
        let page_tokens = StateSpec::page_tokens_for(self.indexer.kpool);
        StateSpec {
            slots,
            pages: if self.mla_layers == 0 { 0 } else { kv_tokens.div_ceil(page_tokens) },
            page_tokens,
            kda_layers: self.kda_layers,
            mla_layers: self.mla_layers,
            kda: self.kda.dims,
            latent: self.mla.latent,
            index_dim: self.indexer.dim,
            kpool: self.indexer.kpool,
        }
    }
}
