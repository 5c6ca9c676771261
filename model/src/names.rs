//! The spellings of a tensor name in the wild → one canonical name.
//!
//! Canonical is the published name without its prefix: `layers.3.self_attn.q_a_proj.weight`, `embed_tokens.weight`, `lm_head.weight`.
//! Read are the published names (`model.language_model.…`), text-only exports (`model.…`), and the module names that `transformers`
//! itself uses (`attn_hc.fn`, `self_attn.forget_gate.A_log`; fused `conv1d` and stacked `experts.gate_up_proj` keep their own names and
//! are taken apart in `tensors.rs`).

/// What a stored tensor is to us.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Name {
    /// A tensor of the trunk, by canonical name.
    Trunk(String),
    /// Part of a draft (MTP) block: recognised and skipped.
    Mtp,
    /// Part of the vision tower: recognised and skipped.
    Vision,
}

/// Classifies a stored name; `layers` is num_hidden_layers. Names that fit nothing come back as [`Name::Trunk`] unchanged, and turn out
/// to be unknown when nothing asks for them.
pub fn classify(stored: &str, layers: usize) -> Name {
    if ["model.visual.", "visual.", "model.vision_tower."].iter().any(|p| stored.starts_with(p)) {
        return Name::Vision;
    }
    let bare = ["model.language_model.", "language_model.model.", "language_model.", "model."]
        .iter()
        .find_map(|prefix| stored.strip_prefix(prefix))
        .unwrap_or(stored);
    let Some((number, rest)) = bare.strip_prefix("layers.").and_then(|s| s.split_once('.')) else {
        return if bare.starts_with("mtp.") { Name::Mtp } else { Name::Trunk(bare.to_owned()) };
    };
    match number.parse::<usize>() {
        Ok(n) if n >= layers => Name::Mtp,
        _ => Name::Trunk(format!("layers.{number}.{}", published(rest))),
    }
}

/// A name inside a layer, in its published spelling.
fn published(rest: &str) -> String {
    if let Some(part) = rest.strip_prefix("self_attn.forget_gate.") {
        return format!("self_attn.{part}");
    }
    for site in ["attn", "ffn"] {
        if let Some(part) = rest.strip_prefix(site).and_then(|s| s.strip_prefix("_hc.")) {
            return format!("hc_{site}_{part}");
        }
    }
    rest.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_spelling_has_one_canonical_name() {
        for (stored, canonical) in [
            ("model.language_model.embed_tokens.weight", "embed_tokens.weight"),
            ("model.embed_tokens.weight", "embed_tokens.weight"),
            ("lm_head.weight", "lm_head.weight"),
            ("language_model.lm_head.weight", "lm_head.weight"),
            ("model.language_model.layers.7.self_attn.A_log", "layers.7.self_attn.A_log"),
            ("model.layers.7.self_attn.forget_gate.A_log", "layers.7.self_attn.A_log"),
            ("model.language_model.layers.7.self_attn.forget_gate.f_a_proj.weight", "layers.7.self_attn.f_a_proj.weight"),
            ("model.language_model.layers.0.attn_hc.fn", "layers.0.hc_attn_fn"),
            ("model.layers.0.ffn_hc.scale", "layers.0.hc_ffn_scale"),
            ("model.language_model.layers.0.hc_ffn_scale", "layers.0.hc_ffn_scale"),
            ("model.language_model.layers.8.mlp.experts.gate_up_proj", "layers.8.mlp.experts.gate_up_proj"),
        ] {
            assert_eq!(classify(stored, 9), Name::Trunk(canonical.to_owned()), "{stored}");
        }
        assert_eq!(classify("model.visual.blocks.0.norm1.weight", 9), Name::Vision);
        assert_eq!(classify("model.language_model.layers.9.eh_proj.weight", 9), Name::Mtp);
        assert_eq!(classify("model.layers.45.shared_head.norm.weight", 45), Name::Mtp);
    }
}
