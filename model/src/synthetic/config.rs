//! [`TextConfig`]: the sizes of a synthetic checkpoint, the presets, and random small ones.

use serde_json::{Value, json};

use super::hash::Stream;
use crate::{Ffn, Indexer, LayerSpec, Mixer};

const KDA: Mixer = Mixer::Kda;
const MLA: Mixer = Mixer::Mla { indexer: Indexer::Full };

/// The reference geometries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Preset {
    /// The development model: 7.8 M parameters, 9 layers.
    Tiny,
    /// Other shapes: pools of 3, three router groups, two shared experts, no top-k renormalisation.
    TinyB,
    /// Every row that a K-quant touches is a multiple of 256 wide.
    Tinyk,
    /// The benchmark model: 624 M parameters, 1.25 GB.
    Small,
}

impl Preset {
    /// Its seed.
    pub fn seed(self) -> u64 {
        match self {
            Self::Tiny => 53,
            Self::TinyB => 9002,
            Self::Tinyk => 58,
            Self::Small => 55,
        }
    }

    /// Its sizes.
    pub fn config(self) -> TextConfig {
        let base = TextConfig::default();
        match self {
            Self::Tiny => base,
            Self::TinyB => TextConfig {
                layers: layers(&[KDA, KDA, MLA, KDA], 1),
                vocab: 384,
                hidden: 128,
                intermediate: 192,
                gate_lower_bound: Some(-3.0),
                q_lora: 64,
                kv_lora: 32,
                qk_dim: 32,
                v_dim: 32,
                index_topk: 12,
                kpool: 3,
                shared_experts: 2,
                experts: 12,
                topk: 5,
                groups: 3,
                topk_group: 2,
                norm_topk_prob: false,
                routed_scale: 0.6,
                eos: vec![381, 382, 383],
                ..base
            },
            Self::Tinyk => TextConfig {
                layers: layers(&[KDA, MLA, KDA, MLA], 2),
                kda_head_dim: 64,
                moe_intermediate: 256,
                experts: 4,
                topk: 2,
                q_lora: 256,
                kv_lora: 256,
                ..base
            },
            Self::Small => TextConfig {
                layers: layers(&[KDA, KDA, KDA, MLA, KDA, KDA, KDA, MLA, KDA, KDA, KDA, MLA, KDA], 3),
                kda_heads: 8,
                kda_head_dim: 128,
                vocab: 8192,
                hidden: 1024,
                intermediate: 3072,
                moe_intermediate: 512,
                attn_heads: 8,
                q_lora: 512,
                kv_lora: 256,
                qk_dim: 128,
                v_dim: 128,
                index_heads: 8,
                index_dim: 64,
                index_topk: 512,
                experts: 32,
                topk: 8,
                swiglu_limit: Some(10.0),
                max_position: 32768,
                eos: vec![8189, 8190, 8191],
                ..base
            },
        }
    }
}

/// Layers of the given mixers, the first `dense` with a dense FFN, the rest MoE.
pub fn layers(mixers: &[Mixer], dense: usize) -> Vec<LayerSpec> {
    let ffn = |i| if i < dense { Ffn::Dense } else { Ffn::Moe };
    mixers.iter().enumerate().map(|(i, mixer)| LayerSpec { mixer: *mixer, ffn: ffn(i) }).collect()
}

/// The sizes of a synthetic checkpoint; fields as in [`crate::Geometry`]. The default is [`Preset::Tiny`].
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub struct TextConfig {
    pub layers: Vec<LayerSpec>,
    pub vocab: usize,
    pub hidden: usize,
    pub intermediate: usize,
    pub moe_intermediate: usize,
    pub attn_heads: usize,
    pub q_lora: usize,
    pub kv_lora: usize,
    pub qk_dim: usize,
    pub v_dim: usize,
    pub kda_heads: usize,
    pub kda_head_dim: usize,
    pub conv: usize,
    pub gate_lower_bound: Option<f64>,
    pub index_heads: usize,
    pub index_dim: usize,
    pub index_topk: usize,
    pub kpool: usize,
    pub always_tail: bool,
    pub experts: usize,
    pub topk: usize,
    pub shared_experts: usize,
    pub groups: usize,
    pub topk_group: usize,
    pub norm_topk_prob: bool,
    pub routed_scale: f64,
    pub swiglu_limit: Option<f64>,
    pub streams: usize,
    pub hc_eps: f64,
    pub sinkhorn_iters: usize,
    pub rms_eps: f64,
    pub max_position: usize,
    /// End ids; the first is also the padding id.
    pub eos: Vec<u32>,
    /// A draft block behind the trunk.
    pub mtp: bool,
}

impl Default for TextConfig {
    fn default() -> Self {
        Self {
            layers: layers(&[KDA, KDA, KDA, MLA, KDA, KDA, KDA, MLA, KDA], 3),
            vocab: 512,
            hidden: 256,
            intermediate: 256,
            moe_intermediate: 64,
            attn_heads: 4,
            q_lora: 96,
            kv_lora: 64,
            qk_dim: 64,
            v_dim: 64,
            kda_heads: 4,
            kda_head_dim: 32,
            conv: 4,
            gate_lower_bound: Some(-5.0),
            index_heads: 4,
            index_dim: 32,
            index_topk: 16,
            kpool: 4,
            always_tail: true,
            experts: 16,
            topk: 4,
            shared_experts: 1,
            groups: 1,
            topk_group: 1,
            norm_topk_prob: true,
            routed_scale: 2.5,
            swiglu_limit: Some(4.0),
            streams: 4,
            hc_eps: 1e-6,
            sinkhorn_iters: 20,
            rms_eps: 1e-5,
            max_position: 4096,
            eos: vec![509, 510, 511],
            mtp: false,
        }
    }
}

impl TextConfig {
    /// A random small geometry: every size, count and switch of the family varies, and none relates to another without need. The same
    /// `seed` gives the same geometry everywhere.
    pub fn random(seed: u64) -> Self {
        let stream = Stream::new(seed, "random geometry");
        let mut i = 0;
        let mut draw = |choices: &[usize]| {
            i += 1;
            choices[(stream.bits(i) % choices.len() as u64) as usize]
        };
        let count = draw(&[2, 3, 4, 5, 6]);
        let mut mixers: Vec<Mixer> = Vec::new();
        for _ in 0..count {
            let mixer = match (draw(&[0, 0, 1, 2]), mixers.last()) {
                (0, _) => KDA,
                (1, Some(Mixer::Mla { indexer: Indexer::Full })) => Mixer::Mla { indexer: Indexer::Shared },
                _ => MLA,
            };
            mixers.push(mixer);
        }
        let kpool = draw(&[1, 2, 3, 4]);
        let groups = draw(&[1, 1, 2, 3]);
        let experts = groups * draw(&[2, 3, 4, 5]);
        let topk_group = draw(&[1, 2, 3]).min(groups);
        let topk = draw(&[1, 2, 3, 4]).min(experts / groups * topk_group);
        let vocab = draw(&[67, 96, 130]);
        let dense = draw(&[0, 1, 2]).min(count - 1);
        let eps = [1e-6, 1e-5, 3e-4, 1e-3];
        Self {
            layers: layers(&mixers, dense),
            vocab,
            hidden: draw(&[16, 24, 36, 50, 64]),
            intermediate: draw(&[17, 32, 40]),
            moe_intermediate: draw(&[5, 12, 16, 33]),
            attn_heads: draw(&[1, 2, 3, 4]),
            q_lora: draw(&[8, 12, 20]),
            kv_lora: draw(&[8, 11, 16]),
            qk_dim: draw(&[4, 8, 10]),
            v_dim: draw(&[4, 6, 8]),
            kda_heads: draw(&[1, 2, 3, 5]),
            kda_head_dim: draw(&[4, 8, 12]),
            conv: draw(&[2, 3, 4]),
            gate_lower_bound: [None, Some(-5.0), Some(-3.0), Some(-0.5)][draw(&[0, 1, 2, 3])],
            index_heads: draw(&[2, 4]),
            index_dim: draw(&[4, 8, 9]),
            index_topk: kpool * draw(&[1, 2, 4]),
            kpool,
            always_tail: draw(&[1, 1, 0]) == 1,
            experts,
            topk,
            shared_experts: draw(&[1, 2, 3]),
            groups,
            topk_group,
            norm_topk_prob: draw(&[0, 1]) == 1,
            routed_scale: [1.0, 0.6, 2.5][draw(&[0, 1, 2])],
            swiglu_limit: [None, Some(10.0), Some(1.5)][draw(&[0, 1, 2])],
            streams: draw(&[1, 2, 3, 4]),
            hc_eps: eps[draw(&[0, 1, 2, 3])],
            sinkhorn_iters: draw(&[1, 2, 7, 20]),
            rms_eps: eps[draw(&[0, 1, 2, 3])],
            max_position: 512,
            eos: vec![vocab as u32 - 3, vocab as u32 - 2],
            mtp: draw(&[0, 0, 1]) == 1,
        }
    }

    /// The `config.json` of a checkpoint with these sizes; `flat` leaves out the `text_config` level.
    pub fn to_json(&self, flat: bool) -> Value {
        let text = self.text_json();
        if flat {
            return text;
        }
        let id = |below: u32| self.vocab as u32 - below;
        json!({
            "architectures": ["Glm5NextForConditionalGeneration"], "model_type": "glm5_next", "dtype": "bfloat16",
            "image_token_id": id(4), "video_token_id": id(5), "image_start_token_id": id(6), "image_end_token_id": id(7),
            "video_start_token_id": id(8), "video_end_token_id": id(9), "tie_word_embeddings": false, "text_config": text,
            "vision_config": {
                "model_type": "glm5_next_vision", "depth": 1, "hidden_size": 32, "num_heads": 2, "in_channels": 3, "image_size": 28,
                "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "intermediate_size": 48,
                "projection_intermediate_size": 48, "hidden_act": "silu", "attention_bias": true, "rms_norm_eps": 1e-5,
                "swiglu_limit": 10.0, "out_hidden_size": self.hidden
            },
            "transformers_version": "5.16.0"
        })
    }

    fn text_json(&self) -> Value {
        let each = |name: &dyn Fn(&LayerSpec) -> &'static str| self.layers.iter().map(name).collect::<Vec<_>>();
        let is_kda = |l: &LayerSpec| l.mixer == KDA;
        let numbers = |kda: bool| (0..self.layers.len()).filter(|i| is_kda(&self.layers[*i]) == kda).collect::<Vec<_>>();
        let mut linear = json!({ "num_heads": self.kda_heads, "head_dim": self.kda_head_dim, "short_conv_kernel_size": self.conv });
        if let Some(bound) = self.gate_lower_bound {
            linear["gate_lower_bound"] = json!(bound);
        }
        linear["kda_layers"] = json!(numbers(true));
        linear["full_attn_layers"] = json!(numbers(false));
        let mut text = json!({
            "model_type": "glm5_next_text", "vocab_size": self.vocab, "hidden_size": self.hidden, "intermediate_size": self.intermediate,
            "moe_intermediate_size": self.moe_intermediate, "num_hidden_layers": self.layers.len(),
            "num_attention_heads": self.attn_heads, "num_key_value_heads": self.attn_heads,
            "first_k_dense_replace": self.layers.iter().take_while(|l| l.ffn == Ffn::Dense).count(),
            "mlp_layer_types": each(&|l| if l.ffn == Ffn::Dense { "dense" } else { "sparse" }),
            "layer_types": each(&|l| if is_kda(l) { "linear_attention" } else { "deepseek_sparse_attention" }),
            "indexer_types": each(&|l| if l.mixer == (Mixer::Mla { indexer: Indexer::Shared }) { "shared" } else { "full" }),
            "linear_attn_config": linear, "q_lora_rank": self.q_lora, "kv_lora_rank": self.kv_lora, "qk_nope_head_dim": self.qk_dim,
            "qk_rope_head_dim": 0, "qk_head_dim": self.qk_dim, "v_head_dim": self.v_dim, "mla_use_nope": true, "head_dim": 0,
            "index_n_heads": self.index_heads, "index_head_dim": self.index_dim, "index_topk": self.index_topk,
            "index_kpool": self.kpool, "index_kpool_compress": true, "index_kpool_always_select_tail": self.always_tail,
            "index_share_for_mtp_iteration": true, "indexer_rope_interleave": true
        });
        let rest = json!({
            "n_routed_experts": self.experts, "num_experts_per_tok": self.topk, "n_shared_experts": self.shared_experts,
            "n_group": self.groups, "topk_group": self.topk_group, "norm_topk_prob": self.norm_topk_prob,
            "routed_scaling_factor": self.routed_scale, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
            "moe_router_dtype": "float32", "swiglu_limit": self.swiglu_limit, "hidden_act": "silu", "mhc": true,
            "hc_mult": self.streams, "hc_eps": self.hc_eps, "hc_sinkhorn_iters": self.sinkhorn_iters, "rms_norm_eps": self.rms_eps,
            "attention_bias": false, "attention_dropout": 0.0, "initializer_range": 0.02, "max_position_embeddings": self.max_position,
            "tie_word_embeddings": false, "num_nextn_predict_layers": usize::from(self.mtp), "pad_token_id": self.eos.first(),
            "eos_token_id": self.eos, "dtype": "bfloat16", "use_cache": true
        });
        if let (Some(text), Value::Object(rest)) = (text.as_object_mut(), rest) {
            text.extend(rest.into_iter().filter(|(_, v)| !v.is_null()));
        }
        text
    }
}
