//! `config.json` → [`Geometry`]: every size and constant of the model, none assumed.
//!
//! Both layouts are read: nested (`text_config`) and flat. Keys and meaning follow the published checkpoint; the defaults of other
//! implementations' config classes are never used, so a missing size is an error that names its key.
//!
//! Neighbours: `json.rs` reads, `inventory.rs` turns a geometry into the list of tensors that must exist.

use std::path::Path;

use serde_json::{Value, json};

use crate::{
    ModelError,
    json::{Section, describe, read_object},
};

/// What mixes tokens in a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mixer {
    /// Kimi delta attention.
    Kda,
    /// Multi-head latent attention over rows that an indexer selects.
    Mla {
        /// Whose selection this layer uses.
        indexer: Indexer,
    },
}

/// Whose row selection an MLA layer uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Indexer {
    /// Its own.
    Full,
    /// That of the layer directly before it; such a layer has no indexer tensors.
    Shared,
}

/// What follows the mixer in a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Ffn {
    /// One gated MLP of width [`Geometry::intermediate`].
    Dense,
    /// Router, routed experts and shared expert.
    Moe,
}

/// The kind of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LayerSpec {
    /// Token mixer.
    pub mixer: Mixer,
    /// Feed-forward part.
    pub ffn: Ffn,
}

/// All sizes and constants of a checkpoint. Sizes of parts that no layer has (no MLA layer, no MoE layer …) are 0, but for
/// [`Geometry::kpool`], which is 1.
#[derive(Clone, Debug, PartialEq)]
pub struct Geometry {
    /// hidden_size D.
    pub hidden: usize,
    /// num_hidden_layers L (the MTP block not counted).
    pub layers: usize,
    /// vocab_size.
    pub vocab: usize,
    /// hc_mult N.
    pub streams: usize,
    /// intermediate_size of dense layers.
    pub intermediate: usize,
    /// moe_intermediate_size of one routed expert.
    pub moe_intermediate: usize,
    /// n_routed_experts E.
    pub experts: usize,
    /// num_experts_per_tok k.
    pub topk: usize,
    /// n_shared_experts: the shared expert is one MLP of this many times [`Geometry::moe_intermediate`].
    pub shared_experts: usize,
    /// n_group.
    pub groups: usize,
    /// topk_group.
    pub topk_group: usize,
    /// norm_topk_prob.
    pub norm_topk_prob: bool,
    /// routed_scaling_factor.
    pub routed_scale: f32,
    /// swiglu_limit; `None`: no clamp.
    pub swiglu_limit: Option<f32>,
    /// num_attention_heads (MLA).
    pub attn_heads: usize,
    /// q_lora_rank.
    pub q_lora: usize,
    /// kv_lora_rank: the latent's width.
    pub kv_lora: usize,
    /// qk_nope_head_dim (= qk_head_dim: there is no rope).
    pub qk_dim: usize,
    /// v_head_dim.
    pub v_dim: usize,
    /// linear_attn_config.num_heads.
    pub kda_heads: usize,
    /// linear_attn_config.head_dim.
    pub kda_head_dim: usize,
    /// linear_attn_config.short_conv_kernel_size: taps of the causal convolution.
    pub conv: usize,
    /// linear_attn_config.gate_lower_bound; `None`: the softplus form.
    pub gate_lower_bound: Option<f32>,
    /// index_n_heads.
    pub index_heads: usize,
    /// index_head_dim.
    pub index_dim: usize,
    /// index_topk, in tokens.
    pub index_topk: usize,
    /// index_kpool: tokens per pool.
    pub kpool: usize,
    /// index_kpool_always_select_tail.
    pub always_tail: bool,
    /// rms_norm_eps.
    pub rms_eps: f32,
    /// hc_eps.
    pub hc_eps: f32,
    /// hc_sinkhorn_iters.
    pub sinkhorn_iters: usize,
    /// max_position_embeddings.
    pub max_position: usize,
    /// tie_word_embeddings: the head is the embedding.
    pub tied: bool,
    /// The kind of each layer, `[L]`.
    pub layer_specs: Vec<LayerSpec>,
    /// num_nextn_predict_layers: draft blocks behind the trunk (recognised, not served).
    pub mtp_layers: usize,
}

impl Geometry {
    /// Reads `config.json` in a checkpoint folder.
    ///
    /// # Errors
    /// Names the file and the first key that is missing, of another type, or impossible.
    pub fn read(path: &Path) -> Result<Self, ModelError> {
        Self::from_json(path, &read_object(path)?)
    }

    /// As [`Geometry::read`], from a parsed file; `path` is for messages.
    ///
    /// # Errors
    /// Names the first key that is missing, of another type, or impossible.
    pub fn from_json(path: &Path, config: &Value) -> Result<Self, ModelError> {
        let top = Section::new(path, config);
        let c = top.section("text_config")?.unwrap_or_else(|| top.clone());
        for section in [&top, &c] {
            if let Some(value) = section.get("model_type")
                && !matches!(value.as_str(), Some("glm5_next" | "glm5_next_text"))
            {
                return Err(section.error("model_type", "\"glm5_next\" (GLM-5.3-Flash)", describe(value)));
            }
        }
        fixed_choices(&c)?;

        let layers = c.int("num_hidden_layers", 1)?;
        let layer_specs = layer_specs(&c, layers)?;
        let has_kda = layer_specs.iter().any(|l| l.mixer == Mixer::Kda);
        let has_mla = layer_specs.iter().any(|l| l.mixer != Mixer::Kda);
        let has_moe = layer_specs.iter().any(|l| l.ffn == Ffn::Moe);
        let has_dense = layer_specs.iter().any(|l| l.ffn == Ffn::Dense);
        let sized = |present: bool, key: &str| if present { c.int(key, 1) } else { Ok(0) };

        let mut g = Self {
            hidden: c.int("hidden_size", 1)?,
            layers,
            vocab: c.int("vocab_size", 1)?,
            streams: c.int("hc_mult", 1)?,
            intermediate: sized(has_dense, "intermediate_size")?,
            moe_intermediate: sized(has_moe, "moe_intermediate_size")?,
            experts: sized(has_moe, "n_routed_experts")?,
            topk: sized(has_moe, "num_experts_per_tok")?,
            shared_experts: sized(has_moe, "n_shared_experts")?,
            groups: c.opt_int("n_group", 1)?.unwrap_or(1),
            topk_group: c.opt_int("topk_group", 1)?.unwrap_or(1),
            norm_topk_prob: false,
            routed_scale: 1.0,
            swiglu_limit: c.opt_float("swiglu_limit")?,
            attn_heads: sized(has_mla, "num_attention_heads")?,
            q_lora: sized(has_mla, "q_lora_rank")?,
            kv_lora: sized(has_mla, "kv_lora_rank")?,
            qk_dim: 0,
            v_dim: sized(has_mla, "v_head_dim")?,
            kda_heads: 0,
            kda_head_dim: 0,
            conv: 0,
            gate_lower_bound: None,
            index_heads: sized(has_mla, "index_n_heads")?,
            index_dim: sized(has_mla, "index_head_dim")?,
            index_topk: sized(has_mla, "index_topk")?,
            // 1, not 0, without MLA layers: page sizes are multiples of it.
            kpool: if has_mla { c.int("index_kpool", 1)? } else { 1 },
            always_tail: c.opt_bool("index_kpool_always_select_tail")?.unwrap_or(true),
            rms_eps: epsilon(&c, "rms_norm_eps")?,
            hc_eps: epsilon(&c, "hc_eps")?,
            sinkhorn_iters: sinkhorn_iters(&c)?,
            max_position: c.int("max_position_embeddings", 2)?,
            tied: c.opt_bool("tie_word_embeddings")?.or(top.opt_bool("tie_word_embeddings")?).unwrap_or(false),
            layer_specs,
            mtp_layers: c.opt_int("num_nextn_predict_layers", 0)?.unwrap_or(0),
        };
        if let Some(limit) = g.swiglu_limit
            && limit <= 0.0
        {
            return Err(c.error("swiglu_limit", "a number above 0, or none", limit.to_string()));
        }
        if has_kda {
            g.read_kda(&c)?;
        }
        if has_mla {
            g.read_mla(&c)?;
        }
        if has_moe {
            g.read_moe(&c)?;
        }
        Ok(g)
    }

    fn read_kda(&mut self, c: &Section<'_>) -> Result<(), ModelError> {
        let k = c
            .section("linear_attn_config")?
            .ok_or_else(|| c.error("linear_attn_config", "an object with num_heads, head_dim and short_conv_kernel_size", "nothing"))?;
        self.kda_heads = k.int("num_heads", 1)?;
        self.kda_head_dim = k.int("head_dim", 1)?;
        self.conv = k.int("short_conv_kernel_size", 1)?;
        self.gate_lower_bound = k.opt_float("gate_lower_bound")?;
        match self.gate_lower_bound {
            Some(bound) if bound >= 0.0 => Err(k.error("gate_lower_bound", "a number below 0, or none", bound.to_string())),
            _ => Ok(()),
        }
    }

    fn read_mla(&mut self, c: &Section<'_>) -> Result<(), ModelError> {
        let (nope, qk) = (c.opt_int("qk_nope_head_dim", 1)?, c.opt_int("qk_head_dim", 1)?);
        self.qk_dim = match (nope, qk) {
            (Some(n), Some(q)) if n != q => {
                return Err(c.error("qk_head_dim", format!("{n} (= qk_nope_head_dim: no rope)"), q.to_string()));
            }
            (Some(n), _) | (None, Some(n)) => n,
            (None, None) => return Err(c.error("qk_nope_head_dim", "a whole number of at least 1", "nothing")),
        };
        if let Some(kv) = c.opt_int("num_key_value_heads", 1)?
            && kv != self.attn_heads
        {
            return Err(c.error("num_key_value_heads", format!("{} (= num_attention_heads)", self.attn_heads), kv.to_string()));
        }
        if !self.index_topk.is_multiple_of(self.kpool) {
            return Err(c.error("index_topk", format!("a multiple of index_kpool ({})", self.kpool), self.index_topk.to_string()));
        }
        Ok(())
    }

    fn read_moe(&mut self, c: &Section<'_>) -> Result<(), ModelError> {
        self.norm_topk_prob = c.opt_bool("norm_topk_prob")?.ok_or_else(|| c.error("norm_topk_prob", "true or false", "nothing"))?;
        self.routed_scale = c.positive("routed_scaling_factor")?;
        if self.topk > self.experts {
            return Err(c.error("num_experts_per_tok", format!("at most n_routed_experts ({})", self.experts), self.topk.to_string()));
        }
        if !self.experts.is_multiple_of(self.groups) {
            return Err(c.error("n_group", format!("a divisor of n_routed_experts ({})", self.experts), self.groups.to_string()));
        }
        if self.groups > 1 && self.experts / self.groups < 2 {
            return Err(c.error("n_group", "groups of at least 2 experts (a group counts its two best)", self.groups.to_string()));
        }
        if self.topk_group > self.groups {
            return Err(c.error("topk_group", format!("at most n_group ({})", self.groups), self.topk_group.to_string()));
        }
        let reachable = self.experts / self.groups * self.topk_group;
        if self.topk > reachable {
            let needed = format!("at most {reachable} (topk_group {} × {} experts per group)", self.topk_group, self.experts / self.groups);
            return Err(c.error("num_experts_per_tok", needed, self.topk.to_string()));
        }
        Ok(())
    }

    /// Layer numbers of the KDA layers, ascending: the dense number of a layer is its place here.
    pub fn kda_layers(&self) -> Vec<usize> {
        self.layers_where(|l| l.mixer == Mixer::Kda)
    }

    /// Layer numbers of the MLA layers, ascending: the dense number of a layer is its place here.
    pub fn mla_layers(&self) -> Vec<usize> {
        self.layers_where(|l| l.mixer != Mixer::Kda)
    }

    /// Layer numbers of the MoE layers, ascending.
    pub fn moe_layers(&self) -> Vec<usize> {
        self.layers_where(|l| l.ffn == Ffn::Moe)
    }

    fn layers_where(&self, keep: impl Fn(&LayerSpec) -> bool) -> Vec<usize> {
        self.layer_specs.iter().enumerate().filter(|(_, l)| keep(l)).map(|(i, _)| i).collect()
    }

    /// Width of the shared expert.
    pub fn shared_intermediate(&self) -> usize {
        self.shared_experts * self.moe_intermediate
    }

    /// Width of q, k or v of a KDA layer: heads × head width.
    pub fn kda_width(&self) -> usize {
        self.kda_heads * self.kda_head_dim
    }

    /// Rows of an mHC projection: N(N+2).
    pub fn hc_rows(&self) -> usize {
        self.streams * (self.streams + 2)
    }
}

/// A number that keeps a division from 0: larger ones would drown what is divided by.
fn epsilon(c: &Section<'_>, key: &str) -> Result<f32, ModelError> {
    const LEAST: f32 = 1e-12;
    const MOST: f32 = 0.01;
    match c.positive(key)? {
        eps if (LEAST..=MOST).contains(&eps) => Ok(eps),
        odd => Err(c.error(key, format!("a number from {LEAST:e} to {MOST}"), format!("{odd:e}"))),
    }
}

/// Every iteration costs time at each of two sites a layer; the matrix has long converged after this many.
fn sinkhorn_iters(c: &Section<'_>) -> Result<usize, ModelError> {
    const KEY: &str = "hc_sinkhorn_iters";
    const MOST: usize = 1000;
    match c.int(KEY, 1)? {
        n if n <= MOST => Ok(n),
        odd => Err(c.error(KEY, format!("a whole number from 1 to {MOST}"), odd.to_string())),
    }
}

/// Switches of the family for which exactly one setting is implemented.
fn fixed_choices(c: &Section<'_>) -> Result<(), ModelError> {
    for (key, needed) in [
        ("mhc", json!(true)),
        ("scoring_func", json!("sigmoid")),
        ("topk_method", json!("noaux_tc")),
        ("hidden_act", json!("silu")),
        ("attention_bias", json!(false)),
        ("index_kpool_compress", json!(true)),
        ("mla_use_nope", json!(true)),
        ("qk_rope_head_dim", json!(0)),
    ] {
        c.only(key, &needed)?;
    }
    Ok(())
}

fn layer_specs(c: &Section<'_>, layers: usize) -> Result<Vec<LayerSpec>, ModelError> {
    const DSA: &str = "deepseek_sparse_attention";
    let kinds = c
        .opt_strings("layer_types", layers)?
        .ok_or_else(|| c.error("layer_types", format!("{layers} entries, \"linear_attention\" or \"{DSA}\""), "nothing"))?;
    let indexers = c.opt_strings("indexer_types", layers)?;
    let ffns = c.opt_strings("mlp_layer_types", layers)?;
    let dense_prefix = if ffns.is_some() { 0 } else { c.int("first_k_dense_replace", 0)? };

    let mut specs: Vec<LayerSpec> = Vec::with_capacity(layers);
    for (i, kind) in kinds.iter().enumerate() {
        let mixer = match *kind {
            "linear_attention" => Mixer::Kda,
            DSA | "full_attention" | "indexed_attention" => match indexers.as_ref().map_or("full", |list| list[i]) {
                "full" => Mixer::Mla { indexer: Indexer::Full },
                "shared" if i > 0 && specs[i - 1].mixer == (Mixer::Mla { indexer: Indexer::Full }) => {
                    Mixer::Mla { indexer: Indexer::Shared }
                }
                "shared" => {
                    let needed = "\"full\": a \"shared\" layer takes the selection of a full MLA layer directly before it";
                    return Err(c.error(&format!("indexer_types[{i}]"), needed, "\"shared\""));
                }
                other => return Err(c.error(&format!("indexer_types[{i}]"), "\"full\" or \"shared\"", format!("\"{other}\""))),
            },
            other => {
                let needed = format!("\"linear_attention\" or \"{DSA}\" (also spelt \"full_attention\", \"indexed_attention\")");
                return Err(c.error(&format!("layer_types[{i}]"), needed, format!("\"{other}\"")));
            }
        };
        let ffn = match ffns.as_ref().map(|list| list[i]) {
            None if i < dense_prefix => Ffn::Dense,
            None | Some("sparse") => Ffn::Moe,
            Some("dense") => Ffn::Dense,
            Some(other) => return Err(c.error(&format!("mlp_layer_types[{i}]"), "\"dense\" or \"sparse\"", format!("\"{other}\""))),
        };
        specs.push(LayerSpec { mixer, ffn });
    }
    Ok(specs)
}
