//! `config.json` and `generation_config.json`: every layout that is read, and refusals that name the key.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::path::Path;

use proptest::prelude::*;
use serde_json::{Value, json};
use tandem_model::{
    Ffn, GenerationConfig, Geometry, Indexer, Mixer,
    synthetic::{Preset, TextConfig},
};

fn read(config: &Value) -> Result<Geometry, String> {
    Geometry::from_json(Path::new("config.json"), config).map_err(|e| e.to_string())
}

fn tiny(change: impl FnOnce(&mut Value)) -> Result<Geometry, String> {
    let mut config = Preset::Tiny.config().to_json(false);
    change(&mut config["text_config"]);
    read(&config)
}

#[test]
fn nested_and_flat_are_the_same() {
    let nested = read(&Preset::TinyB.config().to_json(false)).unwrap();
    assert_eq!(nested, read(&Preset::TinyB.config().to_json(true)).unwrap());
    assert_eq!((nested.kpool, nested.groups, nested.topk_group, nested.shared_experts), (3, 3, 2, 2));
    assert_eq!(nested.gate_lower_bound, Some(-3.0));
    assert!(!nested.norm_topk_prob);
}

#[test]
fn every_spelling_of_the_sparse_kind_is_the_same() {
    let published = tiny(|_| {}).unwrap();
    for spelling in ["full_attention", "indexed_attention"] {
        let other = tiny(|c| {
            for kind in c["layer_types"].as_array_mut().unwrap() {
                if kind == "deepseek_sparse_attention" {
                    *kind = json!(spelling);
                }
            }
        });
        assert_eq!(other.unwrap(), published, "{spelling}");
    }
    assert_eq!(published.mla_layers(), [3, 7]);
    assert_eq!(published.kda_layers().len(), 7);
}

#[test]
fn absent_keys_have_the_meaning_of_the_family() {
    let g = tiny(|c| {
        let c = c.as_object_mut().unwrap();
        for key in ["mlp_layer_types", "indexer_types", "swiglu_limit", "index_kpool_always_select_tail", "n_group", "topk_group"] {
            c.remove(key);
        }
        c["linear_attn_config"].as_object_mut().unwrap().remove("gate_lower_bound");
    })
    .unwrap();
    assert_eq!((g.swiglu_limit, g.gate_lower_bound, g.always_tail, g.groups, g.topk_group), (None, None, true, 1, 1));
    assert_eq!(g.moe_layers(), [3, 4, 5, 6, 7, 8]);
    assert_eq!(g.layer_specs[0].ffn, Ffn::Dense);
    assert_eq!(g.layer_specs[3].mixer, Mixer::Mla { indexer: Indexer::Full });
}

#[test]
fn a_shared_indexer_follows_a_full_one() {
    let kinds = |c: &mut Value| c["layer_types"][4] = json!("full_attention");
    let g = tiny(|c| {
        kinds(c);
        c["indexer_types"][4] = json!("shared");
    });
    assert_eq!(g.unwrap().layer_specs[4].mixer, Mixer::Mla { indexer: Indexer::Shared });
    let error = tiny(|c| c["indexer_types"][7] = json!("shared")).unwrap_err();
    assert!(error.contains("text_config.indexer_types[7]") && error.contains("directly before it"), "{error}");
    let twice = tiny(|c| {
        kinds(c);
        c["layer_types"][5] = json!("full_attention");
        c["indexer_types"][4] = json!("shared");
        c["indexer_types"][5] = json!("shared");
    });
    assert!(twice.unwrap_err().contains("indexer_types[5]"));
}

#[test]
fn refusals_name_file_key_needed_and_got() {
    type Change = fn(&mut Value);
    let cases: [(Change, &str, &str); 20] = [
        (|c| c["hidden_size"] = json!("big"), "text_config.hidden_size", "got \"big\""),
        (|c| c["hidden_size"] = json!(0), "text_config.hidden_size", "at least 1, got 0"),
        (|c| c["rms_norm_eps"] = Value::Null, "text_config.rms_norm_eps", "got nothing"),
        (|c| c["hc_eps"] = json!(0.0), "text_config.hc_eps", "above 0, got 0"),
        (|c| c["hc_eps"] = json!(1.0), "text_config.hc_eps", "from 1e-12 to 0.01, got 1e0"),
        (|c| c["rms_norm_eps"] = json!(1e-20), "text_config.rms_norm_eps", "from 1e-12 to 0.01, got 1e-20"),
        (|c| c["hc_sinkhorn_iters"] = json!(1_000_000), "text_config.hc_sinkhorn_iters", "from 1 to 1000, got 1000000"),
        (|c| c["layer_types"] = json!(["linear_attention"]), "text_config.layer_types", "needed 9 entries"),
        (|c| c["layer_types"][2] = json!("mamba"), "text_config.layer_types[2]", "got \"mamba\""),
        (|c| c["mlp_layer_types"][2] = json!("wide"), "text_config.mlp_layer_types[2]", "got \"wide\""),
        (|c| c["index_topk"] = json!(18), "text_config.index_topk", "multiple of index_kpool (4), got 18"),
        (|c| c["index_kpool"] = json!(0), "text_config.index_kpool", "at least 1"),
        (|c| c["num_experts_per_tok"] = json!(17), "text_config.num_experts_per_tok", "at most n_routed_experts (16), got 17"),
        (|c| c["n_group"] = json!(5), "text_config.n_group", "divisor of n_routed_experts (16)"),
        (|c| c["topk_group"] = json!(2), "text_config.topk_group", "at most n_group (1)"),
        (|c| c["linear_attn_config"]["gate_lower_bound"] = json!(1.0), "text_config.linear_attn_config.gate_lower_bound", "below 0"),
        (|c| c["linear_attn_config"] = Value::Null, "text_config.linear_attn_config", "got nothing"),
        (|c| c["qk_rope_head_dim"] = json!(64), "text_config.qk_rope_head_dim", "nothing else is implemented"),
        (|c| c["num_key_value_heads"] = json!(1), "text_config.num_key_value_heads", "needed 4 (= num_attention_heads)"),
        (|c| c["scoring_func"] = json!("softmax"), "text_config.scoring_func", "got \"softmax\""),
    ];
    for (change, key, words) in cases {
        let error = tiny(change).unwrap_err();
        assert!(error.starts_with("config.json: ") && error.contains(key) && error.contains(words), "{error}");
    }
    let other = read(&json!({ "model_type": "llama" })).unwrap_err();
    assert!(other.contains("model_type: needed \"glm5_next\" (GLM-5.3-Flash), got \"llama\""), "{other}");
}

fn generation(generation: &Value, config: &Value) -> GenerationConfig {
    GenerationConfig::from_json(Path::new("generation_config.json"), generation, Path::new("config.json"), config).unwrap()
}

#[test]
fn end_ids_come_from_the_first_file_that_has_them() {
    let config = json!({ "eos_token_id": 9, "text_config": { "eos_token_id": [7, 5] } });
    assert_eq!(generation(&json!({ "eos_token_id": [3, 1, 2, 1] }), &config).eos_token_ids, [1, 2, 3]);
    assert_eq!(generation(&json!({ "eos_token_id": 3 }), &config).eos_token_ids, [3]);
    assert_eq!(generation(&json!({}), &config).eos_token_ids, [5, 7]);
    assert_eq!(generation(&json!({}), &json!({ "eos_token_id": 9 })).eos_token_ids, [9]);
    assert_eq!(generation(&json!({}), &json!({})).eos_token_ids, [0u32; 0]);
}

/// The file that the ids were really read from.
#[test]
fn end_ids_beyond_the_vocabulary_name_their_file() {
    let dir = tempfile::tempdir().unwrap();
    let generation_file = dir.path().join("generation_config.json");
    let said = |config: &Value| GenerationConfig::read(dir.path(), config, 100).unwrap_err().to_string();
    let end = "needed ids below vocab_size (100), got 100";
    let nested = said(&json!({ "text_config": { "eos_token_id": [7, 100] }, "eos_token_id": 3 }));
    assert!(nested.contains(&format!("/config.json: text_config.eos_token_id: {end}")), "{nested}");
    let top = said(&json!({ "text_config": {}, "eos_token_id": 100 }));
    assert!(top.contains(&format!("/config.json: eos_token_id: {end}")), "{top}");
    std::fs::write(&generation_file, "{\"eos_token_id\": [100]}").unwrap();
    let own = said(&json!({ "eos_token_id": 3 }));
    assert!(own.contains(&format!("/generation_config.json: eos_token_id: {end}")), "{own}");
    std::fs::write(&generation_file, "{\"eos_token_id\": []}").unwrap();
    let empty = said(&json!({ "eos_token_id": 100 }));
    assert!(empty.contains("/config.json: eos_token_id"), "{empty}");
}

#[test]
fn no_sampling_means_temperature_0() {
    let greedy = generation(&json!({ "do_sample": false, "temperature": 0.7 }), &json!({}));
    assert_eq!((greedy.do_sample, greedy.temperature), (false, 0.0));
    let sampled = generation(&json!({ "do_sample": true, "temperature": 0.7, "top_p": 0.95, "top_k": 20 }), &json!({}));
    assert_eq!((sampled.temperature, sampled.top_p, sampled.top_k), (0.7, 0.95, 20));
    assert_eq!(generation(&json!({}), &json!({})).temperature, 1.0);
    let bad = json!({ "top_p": 1.5 });
    let error = GenerationConfig::from_json(Path::new("generation_config.json"), &bad, Path::new("config.json"), &json!({}));
    assert!(error.unwrap_err().to_string().starts_with("generation_config.json: top_p: needed a number from"));
}

proptest! {
    #[test]
    fn every_random_geometry_is_valid(seed in any::<u64>()) {
        let config = TextConfig::random(seed);
        let g = read(&config.to_json(seed % 2 == 0)).unwrap();
        prop_assert_eq!(&g.layer_specs, &config.layers);
        prop_assert_eq!((g.hidden, g.experts, g.streams), (config.hidden, config.experts, config.streams));
        prop_assert_eq!(g.kpool, if g.mla_layers().is_empty() { 1 } else { config.kpool });
        prop_assert_eq!(g.mtp_layers, usize::from(config.mtp));
    }

    /// Damaged configs are refused, never a panic.
    #[test]
    fn any_value_in_any_place_is_read_or_refused(
        seed in 0u64..50, pick in any::<prop::sample::Index>(),
        value in prop_oneof![Just(Value::Null), any::<i64>().prop_map(Value::from), any::<f64>().prop_map(Value::from), "[a-z]{0,4}".prop_map(Value::from), Just(json!([])), Just(json!({}))],
    ) {
        let mut config = TextConfig::random(seed).to_json(true);
        let object = config.as_object_mut().unwrap();
        let key = object.keys().nth(pick.index(object.len())).unwrap().clone();
        object.insert(key, value);
        let _ = read(&config);
    }
}
