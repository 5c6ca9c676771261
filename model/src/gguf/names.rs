//! GGUF tensor names → canonical names, and what the converter did to the values on the way (docs/checkpoints.md §4.3).

/// What a GGUF tensor is to us.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GgufName {
    /// A tensor whose values are as published.
    Same(String),
    /// A_log, stored as −exp(A_log): the canonical name.
    NegExp(String),
    /// The k rows of kv_b_proj, `[heads, latent, qk]`: per head transposed. Canonical name of kv_b_proj.
    KeyUp(String),
    /// The v rows of kv_b_proj, `[heads, v, latent]`. Canonical name of kv_b_proj.
    ValueUp(String),
    /// The experts of a layer, stacked `[experts, out, in]`: canonical name of the stack, `layers.N.mlp.experts.gate_proj`.
    Stack(String),
    /// NVFP4's factor of the tensor with this GGUF base name (without `.weight`): one value, or one per expert.
    Scale(String),
    /// Part of a draft block, or an activation scale: skipped.
    Skipped,
    /// Nothing that is known.
    Unknown,
}

/// GGUF → published names inside a layer; values as published.
const LAYER: &[(&str, &str)] = &[
    ("attn_norm.weight", "input_layernorm.weight"),
    ("ffn_norm.weight", "post_attention_layernorm.weight"),
    ("hc_attn_fn.weight", "hc_attn_fn"),
    ("hc_attn_base.weight", "hc_attn_base"),
    ("hc_attn_scale.weight", "hc_attn_scale"),
    ("hc_ffn_fn.weight", "hc_ffn_fn"),
    ("hc_ffn_base.weight", "hc_ffn_base"),
    ("hc_ffn_scale.weight", "hc_ffn_scale"),
    ("attn_q.weight", "self_attn.q_proj.weight"),
    ("attn_k.weight", "self_attn.k_proj.weight"),
    ("attn_v.weight", "self_attn.v_proj.weight"),
    ("attn_output.weight", "self_attn.o_proj.weight"),
    ("ssm_conv1d_q.weight", "self_attn.q_conv1d.weight"),
    ("ssm_conv1d_k.weight", "self_attn.k_conv1d.weight"),
    ("ssm_conv1d_v.weight", "self_attn.v_conv1d.weight"),
    ("ssm_f_a.weight", "self_attn.f_a_proj.weight"),
    ("ssm_f_b.weight", "self_attn.f_b_proj.weight"),
    ("ssm_g_a.weight", "self_attn.g_a_proj.weight"),
    ("ssm_g_b.weight", "self_attn.g_b_proj.weight"),
    ("ssm_beta.weight", "self_attn.b_proj.weight"),
    ("ssm_dt.bias", "self_attn.dt_bias"),
    ("ssm_norm.weight", "self_attn.o_norm.weight"),
    ("attn_q_a.weight", "self_attn.q_a_proj.weight"),
    ("attn_q_a_norm.weight", "self_attn.q_a_layernorm.weight"),
    ("attn_q_b.weight", "self_attn.q_b_proj.weight"),
    ("attn_kv_a_mqa.weight", "self_attn.kv_a_proj_with_mqa.weight"),
    ("attn_kv_a_norm.weight", "self_attn.kv_a_layernorm.weight"),
    ("indexer.attn_q_b.weight", "self_attn.indexer.wq_b.weight"),
    ("indexer.attn_k.weight", "self_attn.indexer.wk.weight"),
    ("indexer.k_norm.weight", "self_attn.indexer.k_norm.weight"),
    ("indexer.k_norm.bias", "self_attn.indexer.k_norm.bias"),
    ("indexer.proj.weight", "self_attn.indexer.weights_proj.weight"),
    ("indexer_compressor_gate.weight", "self_attn.indexer.index_kpool_compress_gate"),
    ("indexer_compressor_ape.weight", "self_attn.indexer.index_kpool_compress_ape"),
    ("ffn_gate.weight", "mlp.gate_proj.weight"),
    ("ffn_up.weight", "mlp.up_proj.weight"),
    ("ffn_down.weight", "mlp.down_proj.weight"),
    ("ffn_gate_inp.weight", "mlp.gate.weight"),
    ("exp_probs_b.bias", "mlp.gate.e_score_correction_bias"),
    ("ffn_gate_shexp.weight", "mlp.shared_experts.gate_proj.weight"),
    ("ffn_up_shexp.weight", "mlp.shared_experts.up_proj.weight"),
    ("ffn_down_shexp.weight", "mlp.shared_experts.down_proj.weight"),
];

/// The GGUF name of a tensor inside a layer whose values are as published.
pub fn of_published(rest: &str) -> Option<&'static str> {
    LAYER.iter().find(|(_, published)| *published == rest).map(|(gguf, _)| *gguf)
}

/// The name under which a file of this format has a tensor, from its canonical name: the way back of [`classify`], for messages.
pub fn stored(canonical: &str) -> Option<String> {
    match canonical {
        "embed_tokens.weight" => return Some("token_embd.weight".to_owned()),
        "norm.weight" => return Some("output_norm.weight".to_owned()),
        "lm_head.weight" => return Some("output.weight".to_owned()),
        _ => {}
    }
    let (n, rest) = canonical.strip_prefix("layers.")?.split_once('.')?;
    let name = match rest {
        "self_attn.A_log" | "self_attn.A_log.neg_exp" => "ssm_a",
        "self_attn.kv_b_proj.weight" | "self_attn.kv_b_proj.weight.k_b" => "attn_k_b.weight",
        "self_attn.kv_b_proj.weight.v_b" => "attn_v_b.weight",
        "mlp.experts.gate_proj" => "ffn_gate_exps.weight",
        "mlp.experts.up_proj" => "ffn_up_exps.weight",
        "mlp.experts.down_proj" => "ffn_down_exps.weight",
        _ => of_published(rest)?,
    };
    Some(format!("blk.{n}.{name}"))
}

/// Classifies a stored name; `layers` is the number of trunk layers.
pub fn classify(stored: &str, layers: usize) -> GgufName {
    if stored.ends_with(".input_scale") {
        return GgufName::Skipped;
    }
    let number = stored.strip_prefix("blk.").and_then(|s| s.split_once('.'));
    if let Some((n, _)) = number
        && n.parse::<usize>().is_ok_and(|n| n >= layers)
    {
        return GgufName::Skipped;
    }
    if let Some(base) = stored.strip_suffix(".scale") {
        return GgufName::Scale(base.to_owned());
    }
    match stored {
        "token_embd.weight" => return GgufName::Same("embed_tokens.weight".to_owned()),
        "output_norm.weight" => return GgufName::Same("norm.weight".to_owned()),
        "output.weight" => return GgufName::Same("lm_head.weight".to_owned()),
        _ => {}
    }
    let Some((n, rest)) = number else { return GgufName::Unknown };
    let layer = |name: &str| format!("layers.{n}.{name}");
    match rest {
        "ssm_a" => GgufName::NegExp(layer("self_attn.A_log")),
        "attn_k_b.weight" => GgufName::KeyUp(layer("self_attn.kv_b_proj.weight")),
        "attn_v_b.weight" => GgufName::ValueUp(layer("self_attn.kv_b_proj.weight")),
        "ffn_gate_exps.weight" => GgufName::Stack(layer("mlp.experts.gate_proj")),
        "ffn_up_exps.weight" => GgufName::Stack(layer("mlp.experts.up_proj")),
        "ffn_down_exps.weight" => GgufName::Stack(layer("mlp.experts.down_proj")),
        _ => match LAYER.iter().find(|(gguf, _)| *gguf == rest) {
            Some((_, published)) => GgufName::Same(layer(published)),
            None => GgufName::Unknown,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_all_kinds() {
        for (stored, want) in [
            ("token_embd.weight", GgufName::Same("embed_tokens.weight".into())),
            ("blk.3.ssm_a", GgufName::NegExp("layers.3.self_attn.A_log".into())),
            ("blk.3.attn_k_b.weight", GgufName::KeyUp("layers.3.self_attn.kv_b_proj.weight".into())),
            ("blk.3.ffn_up_exps.weight", GgufName::Stack("layers.3.mlp.experts.up_proj".into())),
            ("blk.3.ffn_up_exps.scale", GgufName::Scale("blk.3.ffn_up_exps".into())),
            ("blk.3.ffn_up_exps.input_scale", GgufName::Skipped),
            ("blk.45.nextn.eh_proj.weight", GgufName::Skipped),
            ("blk.3.kda_q.weight", GgufName::Unknown),
            ("rope_freqs.weight", GgufName::Unknown),
        ] {
            assert_eq!(classify(stored, 45), want, "{stored}");
        }
    }
}
