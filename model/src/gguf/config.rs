//! The model's keys of a GGUF header → the same `config.json` that the published checkpoint has, so that one validation serves both.
//!
//! Read are both spellings of the architecture (`glm5next`, `glm5-next`) and the early dialect whose KDA sizes stand under `ssm.*`;
//! what a header leaves out (per-layer kinds, head widths) is taken from the tensors. Keys and defaults: docs/checkpoints.md §4.1, §4.2.
//!
//! Neighbours: `keys.rs` says errors about the result in the header's own keys again.

use std::{collections::BTreeSet, path::Path};

use serde_json::{Value as Json, json};

use super::{TensorInfo, Value, header::Header};
use crate::ModelError;

/// Architectures that are read.
pub const ARCHITECTURES: [&str; 2] = ["glm5-next", "glm5next"];

/// Reader of one header's keys, with the tensors of all shards beside it.
struct Keys<'a> {
    path: &'a Path,
    header: &'a Header,
    tensors: &'a [TensorInfo],
    prefix: &'a str,
}

/// `config.json` as the published checkpoint of this model would have it. `tensors` are those of all shards.
///
/// # Errors
/// Names the key that is missing, of another type or impossible; refuses other architectures, adapters, projectors, draft-only files and
/// the dialect whose tensors are named `kda_*`.
pub fn config(path: &Path, header: &Header, tensors: &[TensorInfo]) -> Result<Json, ModelError> {
    let prefix = architecture(path, header, tensors)?;
    let k = Keys { path, header, tensors, prefix };
    k.refuse_what_is_no_trunk()?;
    let blocks = k.int("block_count")?;
    let nextn = k.opt_int("nextn_predict_layers")?.unwrap_or(0);
    // A block has tensors: a larger number would be counted up to, block by block.
    if blocks > tensors.len() as u64 {
        return Err(k.error("block_count", format!("at most as many blocks as there are tensors ({})", tensors.len()), blocks.to_string()));
    }
    if blocks == 0 {
        return Err(k.error("block_count", "a whole number of at least 1", "0"));
    }
    if let Some(draft) = k.draft_blocks().into_iter().find(|n| *n < blocks.saturating_sub(nextn)) {
        let needed = format!("{} (blk.{draft} has nextn tensors: it is a draft block)", blocks - draft);
        return Err(k.error("nextn_predict_layers", needed, nextn.to_string()));
    }
    let layers = blocks
        .checked_sub(nextn)
        .filter(|n| *n > 0)
        .ok_or_else(|| k.error("nextn_predict_layers", format!("fewer than block_count ({blocks})"), nextn.to_string()))?;
    k.refuse_without_head()?;
    let heads = k.int("attention.head_count")?;
    let is_kda = k.kda_layers(layers, blocks)?;
    let has_kda = is_kda.iter().any(|kda| *kda);
    let has_mla = is_kda.iter().any(|kda| !*kda);
    let dense = k.int("leading_dense_block_count")?;
    if dense > layers {
        return Err(k.error("leading_dense_block_count", format!("at most the {layers} blocks of the trunk"), dense.to_string()));
    }
    k.only_int("rope.dimension_count", 0)?;
    k.only_int("expert_gating_func", 2)?;
    k.only_float("attention.layer_norm_epsilon", 1e-6)?;
    let mut text = json!({
        "model_type": "glm5_next_text",
        "vocab_size": k.vocab()?,
        "hidden_size": k.int("embedding_length")?,
        "intermediate_size": k.int("feed_forward_length")?,
        "num_hidden_layers": layers,
        "num_nextn_predict_layers": nextn,
        "num_attention_heads": heads,
        "max_position_embeddings": k.int("context_length")?,
        "rms_norm_eps": k.float("attention.layer_norm_rms_epsilon")?,
        "hc_mult": k.int("hyper_connection.count")?,
        "hc_sinkhorn_iters": k.int("hyper_connection.sinkhorn_iterations")?,
        "hc_eps": k.float("hyper_connection.epsilon")?,
        "layer_types": is_kda.iter().map(|kda| if *kda { "linear_attention" } else { "deepseek_sparse_attention" }).collect::<Vec<_>>(),
        "mlp_layer_types": (0..layers).map(|i| if i < dense { "dense" } else { "sparse" }).collect::<Vec<_>>(),
        "tie_word_embeddings": false,
        "swiglu_limit": k.swiglu_limit(layers, blocks)?,
    });
    if has_kda {
        text["linear_attn_config"] = k.linear_attn()?;
    }
    if has_mla {
        k.mla(&mut text, heads, [layers, blocks])?;
    }
    if dense < layers {
        k.moe(&mut text)?;
    }
    Ok(json!({ "model_type": "glm5_next", "text_config": text }))
}

fn architecture<'a>(path: &Path, header: &'a Header, tensors: &[TensorInfo]) -> Result<&'a str, ModelError> {
    let needed = || ARCHITECTURES.map(|a| format!("\"{a}\"")).join(" or ");
    let error = |got: String| ModelError::Key { path: path.to_owned(), key: "general.architecture".to_owned(), needed: needed(), got };
    let arch = header.architecture().ok_or_else(|| error("nothing".to_owned()))?;
    if !ARCHITECTURES.contains(&arch) {
        return Err(error(format!("\"{arch}\" (another model)")));
    }
    if let Some(odd) = tensors.iter().find(|t| t.name.ends_with(".kda_q.weight")) {
        return Err(ModelError::Tensor {
            path: path.to_owned(),
            tensor: odd.name.clone(),
            needed: "llama.cpp's tensor names (blk.N.attn_q.weight …)".to_owned(),
            got: "the DwarfStar dialect (kda_*), which stores the model differently: use a llama.cpp, unsloth, ggml-org or bartowski file"
                .to_owned(),
        });
    }
    Ok(arch)
}

/// The number of a tensor's block.
fn block_of(tensor: &TensorInfo) -> Option<u64> {
    tensor.name.strip_prefix("blk.")?.split_once('.')?.0.parse().ok()
}

impl Keys<'_> {
    fn error(&self, suffix: &str, needed: impl Into<String>, got: impl Into<String>) -> ModelError {
        let key = format!("{}.{suffix}", self.prefix);
        ModelError::Key { path: self.path.to_owned(), key, needed: needed.into(), got: got.into() }
    }

    fn get(&self, suffix: &str) -> Option<&Value> {
        self.header.get(&format!("{}.{suffix}", self.prefix))
    }

    fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.iter().find(|t| t.name == name)
    }

    fn opt_int(&self, suffix: &str) -> Result<Option<u64>, ModelError> {
        let Some(value) = self.get(suffix) else { return Ok(None) };
        let int = value.as_u64().filter(|n| *n < 1 << 32);
        int.map(Some).ok_or_else(|| self.error(suffix, "a whole number from 0 to 2^32", value.describe()))
    }

    fn int(&self, suffix: &str) -> Result<u64, ModelError> {
        self.opt_int(suffix)?.ok_or_else(|| self.error(suffix, "a whole number", "nothing"))
    }

    fn opt_float(&self, suffix: &str) -> Result<Option<f64>, ModelError> {
        let Some(value) = self.get(suffix) else { return Ok(None) };
        value.as_f64().filter(|f| f.is_finite()).map(Some).ok_or_else(|| self.error(suffix, "a number", value.describe()))
    }

    fn float(&self, suffix: &str) -> Result<f64, ModelError> {
        self.opt_float(suffix)?.ok_or_else(|| self.error(suffix, "a number", "nothing"))
    }

    fn opt_bool(&self, suffix: &str) -> Result<Option<bool>, ModelError> {
        let Some(value) = self.get(suffix) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| self.error(suffix, "true or false", value.describe()))
    }

    fn only_int(&self, suffix: &str, wanted: u64) -> Result<(), ModelError> {
        match self.opt_int(suffix)? {
            Some(got) if got != wanted => Err(self.error(suffix, wanted.to_string(), got.to_string())),
            _ => Ok(()),
        }
    }

    fn only_float(&self, suffix: &str, wanted: f64) -> Result<(), ModelError> {
        match self.opt_float(suffix)? {
            Some(got) if (got / wanted - 1.0).abs() > 1e-5 => Err(self.error(suffix, wanted.to_string(), got.to_string())),
            _ => Ok(()),
        }
    }

    fn refuse_what_is_no_trunk(&self) -> Result<(), ModelError> {
        let whole = |got: &str| ModelError::File { path: self.path.to_owned(), needed: "the whole model".to_owned(), got: got.to_owned() };
        if let Some(kind) = self.header.get("general.type").and_then(Value::as_str)
            && kind != "model"
        {
            return Err(whole(&format!("general.type \"{kind}\" (an add-on to a model)")));
        }
        let drafts = self.draft_blocks();
        if !drafts.is_empty() && self.tensors.iter().filter_map(block_of).all(|n| drafts.contains(&n)) {
            return Err(whole("an MTP-only draft: it has the draft block and no trunk layers"));
        }
        Ok(())
    }

    /// Numbers of the blocks that have nextn tensors.
    fn draft_blocks(&self) -> BTreeSet<u64> {
        self.tensors.iter().filter(|t| t.name.contains(".nextn.")).filter_map(block_of).collect()
    }

    /// The model's head is a matrix of its own, and no key can say otherwise: without it the file is not whole.
    fn refuse_without_head(&self) -> Result<(), ModelError> {
        if self.tensor("output.weight").is_some() {
            return Ok(());
        }
        Err(ModelError::Tensor {
            path: self.path.to_owned(),
            tensor: "output.weight (lm_head.weight)".to_owned(),
            needed: "the head [vocab, hidden]: in this model it is never tied to token_embd.weight".to_owned(),
            got: "nothing: no shard has it".to_owned(),
        })
    }

    fn vocab(&self) -> Result<u64, ModelError> {
        match (self.opt_int("vocab_size")?, self.tensor("token_embd.weight")) {
            (Some(n), _) => Ok(n),
            (None, Some(embed)) => Ok(embed.shape[0] as u64),
            (None, None) => Err(self.error("vocab_size", "a whole number (there is no token_embd.weight to take it from)", "nothing")),
        }
    }

    /// A key with a value per layer: one entry for each trunk layer, or for each block with the draft's; those of the trunk come back, each
    /// with its number. `None` where the key is absent, or one value for all (the caller looks at it).
    fn per_layer<T>(
        &self,
        key: &str,
        [layers, blocks]: [u64; 2],
        needed: &str,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<Vec<T>>, ModelError> {
        let bytes: Vec<Value>;
        let items = match self.get(key) {
            Some(Value::Array(items)) => items.as_slice(),
            Some(Value::Bytes(list)) => {
                bytes = list.iter().map(|b| Value::Int(i128::from(*b))).collect();
                &bytes
            }
            _ => return Ok(None),
        };
        let len = items.len() as u64;
        if len != layers && len != blocks {
            let both = if layers == blocks { layers.to_string() } else { format!("{blocks} or {layers}") };
            return Err(self.error(key, format!("{both} entries (one per block)"), format!("{len} entries")));
        }
        let odd = |i: usize, item: &Value| self.error(&format!("{key}[{i}]"), needed, item.describe());
        let values = items.iter().enumerate().map(|(i, item)| read(item).ok_or_else(|| odd(i, item)));
        let mut values: Vec<T> = values.collect::<Result<_, _>>()?;
        values.truncate(usize::try_from(layers).unwrap_or(usize::MAX));
        Ok(Some(values))
    }

    /// Which trunk layers are KDA: by `head_count_kv` (0 = KDA), else by who has an `ssm_a`.
    fn kda_layers(&self, layers: u64, blocks: u64) -> Result<Vec<bool>, ModelError> {
        const KEY: &str = "attention.head_count_kv";
        if let Some(heads) = self.per_layer(KEY, [layers, blocks], "a whole number", Value::as_u64)? {
            return Ok(heads.into_iter().map(|n| n == 0).collect());
        }
        // One number for all says nothing of layers.
        self.opt_int(KEY)?;
        Ok((0..layers).map(|i| self.tensor(&format!("blk.{i}.ssm_a")).is_some()).collect())
    }

    /// One clamp for all layers and parts, as the model has it.
    fn swiglu_limit(&self, layers: u64, blocks: u64) -> Result<Json, ModelError> {
        let mut limit: Option<f64> = None;
        let finite = |value: &Value| value.as_f64().filter(|f| f.is_finite());
        for key in ["swiglu_clamp_exp", "swiglu_clamp_shexp"] {
            let listed = self.per_layer(key, [layers, blocks], "a finite number", finite)?;
            let values = match listed {
                Some(values) => values,
                None => self.opt_float(key)?.into_iter().collect(),
            };
            for value in values {
                match limit {
                    Some(other) if (other - value).abs() > 1e-6 * other.abs() => {
                        return Err(self.error(key, format!("one clamp everywhere ({other})"), value.to_string()));
                    }
                    _ => limit = Some(value),
                }
            }
        }
        Ok(limit.map_or(Json::Null, |limit| json!(limit)))
    }

    fn linear_attn(&self) -> Result<Json, ModelError> {
        let len = |suffix: &str| {
            let tensor = self.tensors.iter().find(|t| t.name.starts_with("blk.") && t.name.ends_with(suffix));
            tensor.map(TensorInfo::elems)
        };
        let head_dim = match (self.opt_int("kda.head_dim")?, self.opt_int("ssm.state_size")?, len(".ssm_norm.weight")) {
            (Some(n), ..) | (None, Some(n), _) | (None, None, Some(n)) => n,
            (None, None, None) => return Err(self.error("kda.head_dim", "a whole number", "nothing")),
        };
        // As many as the other layers have, where the widths say the same: an odd ssm_a is then told as such.
        let heads = match (self.int("attention.head_count")?, len(".ssm_dt.bias")) {
            (heads, Some(width)) if heads.checked_mul(head_dim) == Some(width) => heads,
            _ => len(".ssm_a").ok_or_else(|| self.error("attention.head_count_kv", "an ssm_a tensor in every KDA layer", "none"))?,
        };
        Ok(json!({
            "num_heads": heads,
            "head_dim": head_dim,
            "short_conv_kernel_size": self.int("ssm.conv_kernel")?,
            // Early writers leave the bound out; every release of the model has −5.
            "gate_lower_bound": self.opt_float("kda.gate_lower_bound")?.unwrap_or(-5.0),
        }))
    }

    fn mla(&self, text: &mut Json, heads: u64, [layers, blocks]: [u64; 2]) -> Result<(), ModelError> {
        let shape = |suffix: &str, axis: usize| {
            let tensor = self.tensors.iter().find(|t| t.name.starts_with("blk.") && t.name.ends_with(suffix))?;
            tensor.shape.get(axis).map(|n| *n as u64)
        };
        let qk = match self.opt_int("attention.key_length_mla")? {
            Some(n) => Some(n),
            None => shape(".attn_q_b.weight", 0).map(|rows| rows / heads.max(1)),
        };
        let v = match self.opt_int("attention.value_length_mla")? {
            Some(n) => Some(n),
            None => shape(".attn_v_b.weight", 1),
        };
        let kpool = match self.opt_int("attention.indexer.kpool")? {
            Some(n) => n,
            None => self.opt_int("attention.indexer.block_size")?.ok_or_else(|| {
                self.error("attention.indexer.kpool", "a whole number (attention.indexer.block_size in the early dialect)", "nothing")
            })?,
        };
        text["q_lora_rank"] = self.int("attention.q_lora_rank")?.into();
        text["kv_lora_rank"] = self.int("attention.kv_lora_rank")?.into();
        text["qk_nope_head_dim"] = qk.ok_or_else(|| self.error("attention.key_length_mla", "a whole number", "nothing"))?.into();
        text["v_head_dim"] = v.ok_or_else(|| self.error("attention.value_length_mla", "a whole number", "nothing"))?.into();
        text["index_n_heads"] = self.int("attention.indexer.head_count")?.into();
        text["index_head_dim"] = self.int("attention.indexer.key_length")?.into();
        text["index_topk"] = self.int("attention.indexer.top_k")?.into();
        text["index_kpool"] = kpool.into();
        text["index_kpool_always_select_tail"] = self.opt_bool("attention.indexer.kpool_select_tail")?.unwrap_or(true).into();
        const TYPES: &str = "attention.indexer.types";
        match self.per_layer(TYPES, [layers, blocks], "true (an indexer of its own) or false", Value::as_bool)? {
            Some(own) => text["indexer_types"] = own.iter().map(|own| if *own { "full" } else { "shared" }).collect::<Vec<_>>().into(),
            None if self.get(TYPES).is_some() => {
                let got = self.get(TYPES).map_or_else(String::new, Value::describe);
                return Err(self.error(TYPES, "an array of true and false, one per block", got));
            }
            None => {}
        }
        Ok(())
    }

    fn moe(&self, text: &mut Json) -> Result<(), ModelError> {
        let (inter, shared) = (self.int("expert_feed_forward_length")?, self.int("expert_shared_count")?);
        if let Some(width) = self.opt_int("expert_shared_feed_forward_length")?
            && width != inter * shared
        {
            let needed = format!("{} (expert_feed_forward_length × expert_shared_count)", inter * shared);
            return Err(self.error("expert_shared_feed_forward_length", needed, width.to_string()));
        }
        text["moe_intermediate_size"] = inter.into();
        text["n_shared_experts"] = shared.into();
        text["n_routed_experts"] = self.int("expert_count")?.into();
        text["num_experts_per_tok"] = self.int("expert_used_count")?.into();
        text["n_group"] = self.opt_int("expert_group_count")?.unwrap_or(1).max(1).into();
        text["topk_group"] = self.opt_int("expert_group_used_count")?.unwrap_or(1).max(1).into();
        text["routed_scaling_factor"] = self.float("expert_weights_scale")?.into();
        text["norm_topk_prob"] = self.opt_bool("expert_weights_norm")?.unwrap_or(true).into();
        Ok(())
    }
}
