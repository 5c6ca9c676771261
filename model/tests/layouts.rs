//! The same weights under every spelling, cut into any files, read the same; what is wrong with a folder is named.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{fs, path::Path};

use proptest::prelude::*;
use tandem_model::{
    Checkpoint, FfnTensors, LayerTensors, MixerTensors,
    synthetic::{self, Files, Naming, Options, Preset, TextConfig},
};
use tandem_quant::{DType, MatrixSource};

fn write(config: &TextConfig, options: &Options) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    synthetic::write_with(config, options, dir.path()).unwrap();
    dir
}

fn open(config: &TextConfig, options: &Options) -> Checkpoint {
    // The maps outlive the folder.
    Checkpoint::open(write(config, options).path()).unwrap()
}

/// All values of a layer, in one order.
fn values(layer: &LayerTensors) -> Vec<Vec<f32>> {
    let mut all = vec![layer.input_norm.clone(), layer.post_norm.clone()];
    let mut add = |m: &MatrixSource| all.push(m.to_f32());
    for hc in [&layer.attn_hc, &layer.ffn_hc] {
        add(&hc.fn_);
    }
    match &layer.mixer {
        MixerTensors::Kda(k) => {
            [&k.q, &k.k, &k.v, &k.f_a, &k.f_b, &k.g_a, &k.g_b, &k.b, &k.o].into_iter().for_each(&mut add);
            all.extend([k.conv.clone(), k.a_log.clone(), k.dt_bias.clone(), k.o_norm.clone()]);
        }
        MixerTensors::Mla(m) => {
            [&m.q_a, &m.q_b, &m.kv_a, &m.kv_b, &m.o].into_iter().for_each(&mut add);
            if let Some(i) = &m.indexer {
                [&i.wq_b, &i.wk, &i.weights, &i.gate].into_iter().for_each(&mut add);
                all.extend([i.k_norm_w.clone(), i.k_norm_b.clone(), i.ape.clone()]);
            }
            all.extend([m.q_a_norm.clone(), m.kv_a_norm.clone()]);
        }
    }
    for hc in [&layer.attn_hc, &layer.ffn_hc] {
        all.extend([hc.base.clone(), hc.scale.clone()]);
    }
    match &layer.ffn {
        FfnTensors::Dense(m) => all.extend([&m.gate, &m.up, &m.down].map(MatrixSource::to_f32)),
        FfnTensors::Moe(m) => {
            all.extend([&m.router, &m.shared.gate, &m.shared.up, &m.shared.down].map(MatrixSource::to_f32));
            all.push(m.bias.clone());
        }
    }
    all
}

fn everything(c: &Checkpoint) -> Vec<Vec<f32>> {
    let g = c.geometry();
    let mut all = vec![c.embed().unwrap().to_f32(), c.lm_head().unwrap().to_f32(), c.final_norm().unwrap()];
    for i in 0..g.layers {
        all.extend(values(&c.layer(i).unwrap()));
        if g.moe_layers().contains(&i) {
            for e in 0..g.experts {
                let m = c.expert(i, e).unwrap();
                all.extend([&m.gate, &m.up, &m.down].map(MatrixSource::to_f32));
            }
        }
    }
    all
}

/// What `transformers` keeps in F32 holds more digits there: round it as the release does.
fn rounded(values: Vec<Vec<f32>>) -> Vec<Vec<u32>> {
    let round = |v: f32| half::bf16::from_f32(v).to_f32().to_bits();
    values.into_iter().map(|t| t.into_iter().map(round).collect()).collect()
}

fn naming() -> impl Strategy<Value = Naming> {
    prop_oneof![Just(Naming::Published), Just(Naming::TextOnly), Just(Naming::Transformers)]
}

fn files() -> impl Strategy<Value = Files> {
    prop_oneof![Just(Files::Single), Just(Files::ByGroup), (2usize..6).prop_map(Files::Shards)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn every_layout_reads_the_same(seed in any::<u64>(), naming in naming(), files in files(), flat_config in any::<bool>(), vision in any::<bool>()) {
        let config = TextConfig::random(seed);
        let plain = open(&config, &Options { seed, ..Options::default() });
        let other = open(&config, &Options { seed, naming, files, flat_config, vision, ..Options::default() });
        prop_assert_eq!(plain.geometry(), other.geometry());
        prop_assert!(rounded(everything(&plain)) == rounded(everything(&other)));
        prop_assert_eq!(other.warnings().iter().any(|w| w.contains("MTP")), config.mtp);
        prop_assert_eq!(other.warnings().iter().any(|w| w.contains("vision")), vision);
        prop_assert!(!other.warnings().iter().any(|w| w.contains("unknown")), "{:?}", other.warnings());
        if naming == Naming::Published {
            prop_assert_eq!(plain.fingerprint(), other.fingerprint());
        }
    }

    #[test]
    fn every_float_type_reads_within_its_rounding(seed in any::<u64>(), f16 in any::<bool>()) {
        let config = TextConfig::random(seed);
        let exact = everything(&open(&config, &Options { seed, floats: DType::F32, ..Options::default() }));
        let floats = if f16 { DType::F16 } else { DType::Bf16 };
        let step = if f16 { 2f32.powi(-11) } else { 2f32.powi(-8) };
        for (exact, narrow) in exact.iter().flatten().zip(everything(&open(&config, &Options { seed, floats, ..Options::default() })).iter().flatten()) {
            prop_assert!((exact - narrow).abs() <= exact.abs() * step + 1e-7, "{} {}", exact, narrow);
        }
    }
}

#[test]
fn the_fingerprint_sees_config_weights_and_types() {
    let config = TextConfig::random(7);
    let base = Options { seed: 7, ..Options::default() };
    let print = |config: &TextConfig, options: &Options| open(config, options).fingerprint().to_owned();
    let own = print(&config, &base);
    assert_eq!(own.len(), 32);
    assert_eq!(
        own,
        print(&config, &Options { files: Files::Single, vision: true, ..base.clone() }),
        "files and skipped parts do not matter"
    );
    assert_ne!(own, print(&config, &Options { seed: 8, ..base.clone() }), "weights");
    assert_ne!(own, print(&config, &Options { floats: DType::F16, ..base.clone() }), "types");
    assert_ne!(own, print(&TextConfig { rms_eps: 2e-5, ..config.clone() }, &base), "an epsilon");
    assert_ne!(own, print(&TextConfig { routed_scale: 1.25, ..config }, &base), "a scale");
}

#[test]
fn narrowed_and_unknown_tensors_are_named() {
    let config = Preset::TinyB.config();
    let narrow = open(&config, &Options { narrow: true, ..Options::default() });
    let warning = narrow.warnings().iter().find(|w| w.contains("narrower than F32")).unwrap();
    assert!(warning.contains("hc_attn_base") && warning.contains("BF16"), "{warning}");
    assert!(open(&config, &Options::default()).warnings().is_empty());

    // A fifth layer's worth of names that the config does not know: what was layer 3 is a draft block to a config of three layers.
    let mut shorter = config.clone();
    shorter.layers.pop();
    let dir = write(&config, &Options::default());
    fs::write(dir.path().join("config.json"), shorter.to_json(false).to_string()).unwrap();
    assert!(Checkpoint::open(dir.path()).unwrap().warnings()[0].contains("MTP"));

    // An indexer on a layer that shares the selection of another: nothing asks for it.
    let mut shared = config;
    shared.layers[1].mixer = shared.layers[2].mixer;
    let dir = write(&shared, &Options::default());
    let mut json = shared.to_json(false);
    json["text_config"]["indexer_types"][2] = "shared".into();
    fs::write(dir.path().join("config.json"), json.to_string()).unwrap();
    let warnings = Checkpoint::open(dir.path()).unwrap().warnings().to_vec();
    assert!(
        warnings[0].starts_with("7 tensors are unknown and were ignored: model.language_model.layers.2.self_attn.indexer."),
        "{warnings:?}"
    );
}

fn error(dir: &Path) -> String {
    Checkpoint::open(dir).unwrap_err().to_string()
}

#[test]
fn broken_folders_are_named() {
    let config = TextConfig::random(3);
    let three = || write(&config, &Options { files: Files::Shards(3), ..Options::default() });
    let shard = "model-00002-of-00003.safetensors";

    let dir = tempfile::tempdir().unwrap();
    assert!(error(dir.path()).contains("config.json"), "{}", error(dir.path()));
    assert!(error(&dir.path().join("nothing")).contains("no such"), "{}", error(&dir.path().join("nothing")));

    let dir = three();
    fs::remove_file(dir.path().join(shard)).unwrap();
    let missing = error(dir.path());
    assert!(
        missing.contains(shard) && missing.contains("model.safetensors.index.json says that it holds") && missing.contains("no such file"),
        "{missing}"
    );

    let dir = three();
    fs::remove_file(dir.path().join("model.safetensors.index.json")).unwrap();
    assert!(error(dir.path()).contains("but no model.safetensors.index.json"), "{}", error(dir.path()));

    let dir = three();
    let bytes = fs::read(dir.path().join(shard)).unwrap();
    fs::write(dir.path().join(shard), &bytes[..bytes.len() - 10]).unwrap();
    let short = error(dir.path());
    assert!(short.contains(shard) && short.contains(&format!("needed {} bytes", bytes.len())) && short.contains("truncated"), "{short}");
    fs::write(dir.path().join(shard), &bytes[..40]).unwrap();
    assert!(error(dir.path()).contains("truncated"), "{}", error(dir.path()));
    fs::write(dir.path().join(shard), "version https://git-lfs.github.com/spec/v1\noid sha256:00").unwrap();
    assert!(error(dir.path()).contains("Git LFS pointer"), "{}", error(dir.path()));

    let dir = three();
    let (one, two) = (dir.path().join("model-00001-of-00003.safetensors"), dir.path().join(shard));
    fs::copy(one, two).unwrap();
    let twice = error(dir.path());
    assert!(twice.contains("no such tensor in it") || twice.contains("each tensor once"), "{twice}");
}

#[test]
fn tensors_that_do_not_fit_the_config_are_named() {
    let config = Preset::TinyB.config();
    let dir = write(&config, &Options { files: Files::Single, ..Options::default() });
    let with = |config: &TextConfig| {
        fs::write(dir.path().join("config.json"), config.to_json(false).to_string()).unwrap();
        error(dir.path())
    };
    let wide = with(&TextConfig { intermediate: 200, ..config.clone() });
    assert!(wide.contains("layers.0.mlp.gate_proj.weight") && wide.contains("[200, 128]") && wide.contains("[192, 128]"), "{wide}");
    let more = with(&TextConfig { experts: 15, ..config.clone() });
    assert!(more.contains("layers.1.mlp.gate.weight"), "{more}");
    let mut longer = config.clone();
    longer.layers.push(config.layers[3]);
    let missing = with(&longer);
    assert!(
        missing.contains("tensor model.language_model.layers.4.input_layernorm.weight") && missing.contains("got nothing"),
        "{missing}"
    );
    fs::write(dir.path().join("generation_config.json"), r#"{"eos_token_id": 384}"#).unwrap();
    let vocabulary = with(&config);
    assert!(vocabulary.contains("generation_config.json: eos_token_id: needed ids below vocab_size (384), got 384"), "{vocabulary}");
}
