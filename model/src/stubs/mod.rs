//! The published releases and quantised mixes as headers without data: a few MB that say everything about names, shapes and types.
//!
//! | module | idea |
//! |---|---|
//! | [`release`] | safetensors: which tensors each release of GLM-5.3-Flash has |
//! | [`gguf`] | GGUF: keys and tensors of a mix, in one file or many |
//! | [`mixes`] | the mixes that publishers ship: a type for each tensor |
//! | `vision` | the vision tower's tensors |
//!
//! Nothing here is copied from a release: the lists follow from the sizes ([`config`]), and tests hold them against the published
//! numbers of tensors and bytes, and against checksums of full lists. Readers take stubs through
//! [`crate::Checkpoint::open_headers`]; `tandem generate stub` writes them.

pub mod gguf;
pub mod mixes;
pub mod release;
mod vision;

use crate::{
    Indexer, Mixer,
    synthetic::{TextConfig, layers},
};

pub use self::{gguf::GgufStub, mixes::Mix, release::Release};

/// The sizes of the published model (its `config.json`).
pub fn config() -> TextConfig {
    let mixers: Vec<Mixer> = (0..45).map(|i| if i % 4 == 3 { Mixer::Mla { indexer: Indexer::Full } } else { Mixer::Kda }).collect();
    TextConfig {
        layers: layers(&mixers, 3),
        vocab: 154_880,
        hidden: 4096,
        intermediate: 12_288,
        moe_intermediate: 2048,
        attn_heads: 64,
        q_lora: 1536,
        kv_lora: 512,
        qk_dim: 256,
        v_dim: 256,
        kda_heads: 64,
        kda_head_dim: 128,
        conv: 4,
        gate_lower_bound: Some(-5.0),
        index_heads: 32,
        index_dim: 128,
        index_topk: 2048,
        kpool: 4,
        always_tail: true,
        experts: 288,
        topk: 8,
        shared_experts: 1,
        groups: 1,
        topk_group: 1,
        norm_topk_prob: true,
        routed_scale: 2.5,
        swiglu_limit: Some(10.0),
        streams: 4,
        hc_eps: 1e-6,
        sinkhorn_iters: 20,
        rms_eps: 1e-5,
        max_position: 1 << 20,
        eos: vec![154_820, 154_827, 154_829],
        mtp: true,
    }
}

/// A chat template for stubs, short and with the markers of the model's own.
pub const TEMPLATE: &str = "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|><think>{% endif %}";
