//! Damage done by rule: each tensor and each key of a small stub in turn is taken away, renamed, or given another type, shape or value. What is
//! damaged is refused by its name and file; the few changes that do no harm are listed, each with its reason.

use std::path::Path;

use serde_json::{Value, json};
use tandem_model::{
    gguf::write::Typed,
    stubs::{GgufStub, release::StubTensor},
};

use super::{
    tests::{CPU, gguf, safetensors},
    verdict::Verdict,
};

/// The reason of a refusal; `None` where it passes.
fn reason(path: &Path) -> Option<String> {
    Verdict::of(path, CPU, false).reason
}

/// Collects what is wrong, so that one run shows all of it.
#[derive(Default)]
struct Findings(Vec<String>);

impl Findings {
    /// A change that must be refused with some words.
    fn refuse(&mut self, what: &str, got: Option<String>, words: &[&str]) {
        match got {
            None => self.0.push(format!("{what}: passes")),
            Some(reason) => {
                if let Some(word) = words.iter().find(|word| !reason.contains(**word)) {
                    self.0.push(format!("{what}: no {word:?} in: {reason}"));
                }
            }
        }
    }

    fn none(self) {
        assert!(self.0.is_empty(), "{} wrong verdicts:\n{}", self.0.len(), self.0.join("\n"));
    }
}

#[test]
fn every_tensor_of_a_gguf_file_is_missed_and_judged_by_name() {
    let root = tempfile::tempdir().expect("writable");
    let mut names = Vec::new();
    gguf(root.path(), 1, |s| names = s.tensors.iter().map(|t| t.name.clone()).filter(|n| !n.starts_with("blk.4.")).collect());
    assert!(names.len() > 100);
    let mut findings = Findings::default();
    for name in &names {
        let mut try_it = |what: &str, words: &[&str], change: &dyn Fn(&mut GgufStub)| {
            let got = reason(&gguf(root.path(), 1, |s| change(s)));
            findings.refuse(&format!("{name}: {what}"), got, &[&["small.gguf", name], words].concat());
        };
        try_it("taken away", &["got nothing"], &|s| s.tensors.retain(|t| t.name != *name));
        try_it("renamed", &["got nothing"], &|s| s.tensor(name).expect("there").name = format!("{name}.old"));
        try_it("a type that is not read", &["TQ1_0"], &|s| s.tensor(name).expect("there").ggml_type = 34);
        try_it("one row more", &["needed shape"], &|s| s.tensor(name).expect("there").shape[0] += 1);
        try_it("another rank", &["needed shape"], &|s| s.tensor(name).expect("there").shape.insert(0, 2));
    }
    findings.none();
}

#[test]
fn every_key_of_a_gguf_file_is_read_or_refused_by_name() {
    /// Keys that nothing of this loader depends on.
    const UNREAD: [&str; 6] = [
        "general.type",
        "glm5-next.attention.key_length",
        "glm5-next.attention.value_length",
        "tokenizer.ggml.bos_token_id",
        "tokenizer.ggml.unknown_token_id",
        "tokenizer.ggml.padding_token_id",
    ];
    /// Keys that a file may leave out: others or the tensors say the same, or the family has one value.
    const OPTIONAL: [&str; 19] = [
        "general.sampling.temp",
        "general.sampling.top_p",
        "glm5-next.attention.head_count_kv",
        "glm5-next.attention.indexer.kpool_select_tail",
        "glm5-next.attention.key_length_mla",
        "glm5-next.attention.value_length_mla",
        "glm5-next.expert_gating_func",
        "glm5-next.expert_group_count",
        "glm5-next.expert_group_used_count",
        "glm5-next.expert_weights_norm",
        "glm5-next.kda.gate_lower_bound",
        "glm5-next.kda.head_dim",
        "glm5-next.rope.dimension_count",
        "glm5-next.swiglu_clamp_exp",
        "glm5-next.vocab_size",
        "tokenizer.chat_template",
        "tokenizer.ggml.eos_token_id",
        "tokenizer.ggml.eot_token_id",
        "tokenizer.ggml.eom_token_id",
    ];
    /// Keys of which 0 is a value.
    const MAY_BE_0: [&str; 7] = [
        // The tensors of experts are then missed.
        "glm5-next.leading_dense_block_count",
        "glm5-next.rope.dimension_count",
        "glm5-next.expert_group_count",
        "glm5-next.expert_group_used_count",
        "tokenizer.ggml.eos_token_id",
        "tokenizer.ggml.eot_token_id",
        "tokenizer.ggml.eom_token_id",
    ];
    let root = tempfile::tempdir().expect("writable");
    let mut keys = Vec::new();
    gguf(root.path(), 1, |s| keys = s.keys.clone());
    let mut findings = Findings::default();
    for (key, value) in keys.iter().filter(|(key, _)| !UNREAD.contains(&key.as_str())) {
        if !OPTIONAL.contains(&key.as_str()) {
            let got = reason(&gguf(root.path(), 1, |s| s.unset(key)));
            findings.refuse(&format!("{key}: taken away"), got, &["small.gguf", key]);
        }
        let mut try_it = |what: &str, value: Typed| {
            let got = reason(&gguf(root.path(), 1, |s| s.set(key, value)));
            findings.refuse(&format!("{key}: {what}"), got, &["small.gguf", key]);
        };
        match value {
            Typed::Str(_) => try_it("a number", Typed::U32(3)),
            _ => try_it("text", Typed::Str("odd".into())),
        }
        match value {
            Typed::U32(_) => {
                if !MAY_BE_0.contains(&key.as_str()) {
                    try_it("zero", Typed::U32(0));
                }
                try_it("a fraction", Typed::F32(2.5));
                try_it("too large", Typed::U32(u32::MAX));
            }
            Typed::F32(_) => {
                try_it("not a number", Typed::F32(f32::NAN));
                try_it("infinite", Typed::F32(f32::INFINITY));
            }
            Typed::I32s(list) => {
                try_it("one entry", Typed::I32s(list[..1].to_vec()));
                try_it("one entry more", Typed::I32s([list.as_slice(), &[1, 1]].concat()));
            }
            Typed::F32s(list) => {
                try_it("one entry", Typed::F32s(list[..1].to_vec()));
                try_it("odd entry", Typed::F32s(list.iter().map(|_| f32::NAN).collect()));
            }
            Typed::Strs(list) => try_it("numbers", Typed::I32s(vec![1; list.len()])),
            _ => {}
        }
    }
    findings.none();
}

/// The prefix of a name's layer, which messages keep.
fn base(name: &str) -> &str {
    [".weight_scale_inv", ".weight"].iter().find_map(|suffix| name.strip_suffix(suffix)).unwrap_or(name)
}

#[test]
fn every_tensor_of_safetensors_is_missed_and_judged_by_name() {
    let root = tempfile::tempdir().expect("writable");
    let mut names = Vec::new();
    safetensors(root.path(), |_, t| {
        let trunk = |t: &&StubTensor| !t.name.starts_with("model.visual.") && !t.name.contains(".layers.4.");
        names = t.iter().filter(trunk).map(|t| t.name.clone()).collect();
    });
    // One expert and one layer of a kind stand for all.
    names.retain(|n| !n.contains(".experts.") || n.contains(".experts.1."));
    assert!(names.len() > 80, "{}", names.len());
    let mut findings = Findings::default();
    for name in &names {
        let mut try_it = |what: &str, words: &[&str], change: &dyn Fn(&mut StubTensor, &mut bool)| {
            let got = reason(&safetensors(root.path(), |_, tensors| {
                tensors.retain_mut(|t| {
                    let mut keep = true;
                    if t.name == *name {
                        change(t, &mut keep);
                    }
                    keep
                });
            }));
            findings.refuse(&format!("{name}: {what}"), got, &[&[base(name)], words].concat());
        };
        try_it("taken away", &[], &|_, keep| *keep = false);
        try_it("renamed", &[], &|t, _| t.name = format!("{name}.old"));
        try_it("integers", &[".safetensors", "I32"], &|t, _| t.dtype = serde_json::from_value(json!("I32")).expect("a type"));
        try_it("one row more", &[".safetensors", "needed shape"], &|t, _| t.shape[0] += 1);
        try_it("another rank", &[".safetensors"], &|t, _| t.shape.insert(0, 2));
    }
    findings.none();
}

#[test]
fn every_key_of_a_config_is_read_or_refused_by_name() {
    /// Keys that nothing of this loader depends on: of training, of other implementations, or said again elsewhere.
    const UNREAD: [&str; 11] = [
        "attention_dropout",
        "dtype",
        "eos_token_id",
        "first_k_dense_replace",
        "head_dim",
        "index_share_for_mtp_iteration",
        "indexer_rope_interleave",
        "initializer_range",
        "moe_router_dtype",
        "pad_token_id",
        "use_cache",
    ];
    /// Keys that a config may leave out: the family has one value, or another key says the same.
    const OPTIONAL: [&str; 20] = [
        "attention_bias",
        "hidden_act",
        "index_kpool_always_select_tail",
        "index_kpool_compress",
        "indexer_types",
        "mhc",
        "mla_use_nope",
        "mlp_layer_types",
        "model_type",
        "n_group",
        "num_key_value_heads",
        "num_nextn_predict_layers",
        "qk_head_dim",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "scoring_func",
        "swiglu_limit",
        "tie_word_embeddings",
        "topk_group",
        "topk_method",
    ];
    /// Keys of which 0 is a value.
    const MAY_BE_0: [&str; 2] = ["num_nextn_predict_layers", "qk_rope_head_dim"];
    let root = tempfile::tempdir().expect("writable");
    let mut keys = Vec::new();
    safetensors(root.path(), |c, _| {
        keys = c["text_config"].as_object().expect("an object").iter().map(|(k, v)| (k.clone(), v.clone())).collect();
    });
    let mut findings = Findings::default();
    for (key, value) in keys.iter().filter(|(key, _)| !UNREAD.contains(&key.as_str())) {
        let mut try_it = |what: &str, value: Value| {
            let optional = value.is_null() && OPTIONAL.contains(&key.as_str());
            if optional || value == json!(0) && MAY_BE_0.contains(&key.as_str()) {
                return;
            }
            let got = reason(&safetensors(root.path(), |c, _| c["text_config"][key.as_str()] = value));
            findings.refuse(&format!("{key}: {what}"), got, &["config.json", &format!("text_config.{key}")]);
        };
        try_it("taken away", Value::Null);
        match value {
            Value::String(_) => try_it("a number", json!(3)),
            _ => try_it("text", json!("odd")),
        }
        match value {
            Value::Number(n) if n.is_u64() => {
                try_it("zero", json!(0));
                try_it("a fraction", json!(2.5));
                try_it("negative", json!(-1));
                try_it("huge", json!(u64::MAX));
            }
            Value::Number(_) => try_it("huge", json!(1e300)),
            Value::Array(list) => {
                try_it("one entry", json!(list[..1]));
                try_it("odd entries", json!(list.iter().map(|_| json!({})).collect::<Vec<_>>()));
            }
            Value::Object(_) => try_it("a list", json!([])),
            _ => {}
        }
    }
    findings.none();
}
