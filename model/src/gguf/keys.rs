//! What a GGUF header calls the keys of `config.json`, so that an error about the geometry names what is in the file.
//!
//! Neighbours: `config.rs` reads these keys; `geometry.rs` judges the result under the names of `config.json`.

use super::Header;
use crate::ModelError;

/// Key of `config.json` (its last part) → suffixes behind the architecture, the usual one first.
const KEYS: &[(&str, &[&str])] = &[
    ("vocab_size", &["vocab_size"]),
    ("hidden_size", &["embedding_length"]),
    ("intermediate_size", &["feed_forward_length"]),
    ("num_hidden_layers", &["block_count"]),
    ("num_nextn_predict_layers", &["nextn_predict_layers"]),
    ("num_attention_heads", &["attention.head_count"]),
    ("num_heads", &["attention.head_count"]),
    ("max_position_embeddings", &["context_length"]),
    ("rms_norm_eps", &["attention.layer_norm_rms_epsilon"]),
    ("hc_mult", &["hyper_connection.count"]),
    ("hc_sinkhorn_iters", &["hyper_connection.sinkhorn_iterations"]),
    ("hc_eps", &["hyper_connection.epsilon"]),
    ("layer_types", &["attention.head_count_kv"]),
    ("mlp_layer_types", &["leading_dense_block_count"]),
    ("swiglu_limit", &["swiglu_clamp_exp", "swiglu_clamp_shexp"]),
    ("head_dim", &["kda.head_dim", "ssm.state_size"]),
    ("short_conv_kernel_size", &["ssm.conv_kernel"]),
    ("gate_lower_bound", &["kda.gate_lower_bound"]),
    ("q_lora_rank", &["attention.q_lora_rank"]),
    ("kv_lora_rank", &["attention.kv_lora_rank"]),
    ("qk_nope_head_dim", &["attention.key_length_mla"]),
    ("v_head_dim", &["attention.value_length_mla"]),
    ("index_n_heads", &["attention.indexer.head_count"]),
    ("index_head_dim", &["attention.indexer.key_length"]),
    ("index_topk", &["attention.indexer.top_k"]),
    ("index_kpool", &["attention.indexer.kpool", "attention.indexer.block_size"]),
    ("index_kpool_always_select_tail", &["attention.indexer.kpool_select_tail"]),
    ("indexer_types", &["attention.indexer.types"]),
    ("moe_intermediate_size", &["expert_feed_forward_length"]),
    ("n_shared_experts", &["expert_shared_count"]),
    ("n_routed_experts", &["expert_count"]),
    ("num_experts_per_tok", &["expert_used_count"]),
    ("n_group", &["expert_group_count"]),
    ("topk_group", &["expert_group_used_count"]),
    ("routed_scaling_factor", &["expert_weights_scale"]),
    ("norm_topk_prob", &["expert_weights_norm"]),
];

/// Suffixes that are read or need not be, beside those of [`KEYS`]: they say one thing only, or what others say, too.
const OTHERS: &[&str] = &[
    "attention.indexer.index_share_mtp",
    "attention.key_length",
    "attention.layer_norm_epsilon",
    "attention.value_length",
    "expert_gating_func",
    "expert_shared_feed_forward_length",
    "gumix.sidecar",
    "p4mix.sidecar",
    "rope.dimension_count",
    "rope.freq_base",
    "ssm.group_count",
    "ssm.inner_size",
    "ssm.time_step_rank",
];

/// Keys of the architecture that nothing here knows: spelt wrongly, or of a newer writer.
pub fn unknown(header: &Header) -> Vec<String> {
    let Some(prefix) = header.architecture() else { return Vec::new() };
    let known = |suffix: &str| OTHERS.contains(&suffix) || KEYS.iter().any(|(_, suffixes)| suffixes.contains(&suffix));
    let of_model = header.values.keys().filter(|key| key.strip_prefix(prefix).and_then(|k| k.strip_prefix('.')).is_some_and(|s| !known(s)));
    of_model.cloned().collect()
}

/// The same error about the header's key: `glm5-next.expert_used_count (num_experts_per_tok)`. Other errors come back as they are.
pub fn in_own_keys(error: ModelError, header: &Header) -> ModelError {
    let ModelError::Key { path, key, needed, got } = error else { return error };
    let dotted = key.split('[').next().unwrap_or(&key);
    let (last, index) = (dotted.rsplit('.').next().unwrap_or(dotted), &key[dotted.len()..]);
    let Some(suffix) = suffix(last, header) else { return ModelError::Key { path, key, needed, got } };
    let prefix = header.architecture().unwrap_or_default();
    let key = format!("{prefix}.{suffix}{index} ({last})");
    ModelError::Key { path, key, needed: reworded(&needed, header), got }
}

/// The suffix that the header has for a key, else the usual one.
fn suffix(key: &str, header: &Header) -> Option<&'static str> {
    let (_, suffixes) = KEYS.iter().find(|(json, _)| *json == key)?;
    let prefix = header.architecture().unwrap_or_default();
    suffixes.iter().find(|suffix| header.get(&format!("{prefix}.{suffix}")).is_some()).or(suffixes.first()).copied()
}

/// Words that are keys of `config.json`, in the header's terms.
fn reworded(text: &str, header: &Header) -> String {
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find(is_word) {
        let len = rest[start..].find(|c| !is_word(c)).unwrap_or(rest.len() - start);
        let word = &rest[start..start + len];
        out.push_str(&rest[..start]);
        out.push_str(if word.contains('_') { suffix(word, header).unwrap_or(word) } else { word });
        rest = &rest[start + len..];
    }
    out + rest
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::gguf::Value;

    #[test]
    fn keys_and_words_become_the_headers_own() {
        let header = Header {
            version: 3,
            values: [
                ("general.architecture".to_owned(), Value::String("glm5next".to_owned())),
                ("glm5next.attention.indexer.block_size".to_owned(), Value::Int(4)),
            ]
            .into(),
            tensors: Vec::new(),
            data_start: 0,
        };
        let said = |key: &str, needed: &str| {
            let error =
                ModelError::Key { path: PathBuf::from("m.gguf"), key: key.to_owned(), needed: needed.to_owned(), got: "1".to_owned() };
            in_own_keys(error, &header).to_string()
        };
        assert_eq!(
            said("text_config.index_topk", "a multiple of index_kpool (4)"),
            "m.gguf: glm5next.attention.indexer.top_k (index_topk): needed a multiple of attention.indexer.block_size (4), got 1"
        );
        assert_eq!(
            said("text_config.indexer_types[3]", "\"full\""),
            "m.gguf: glm5next.attention.indexer.types[3] (indexer_types): needed \"full\", got 1"
        );
        assert_eq!(said("general.type", "model"), "m.gguf: general.type: needed model, got 1");
        assert_eq!(unknown(&header), Vec::<String>::new());
        let mut header = header;
        for key in ["glm5next.atention.head_count_kv", "glm5next.rope.dimension_count", "other.key"] {
            header.values.insert(key.to_owned(), Value::Int(0));
        }
        assert_eq!(unknown(&header), ["glm5next.atention.head_count_kv"]);
    }
}
