//! Stubs of all releases and mixes: their lists are the published ones, and they open without data.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::collections::BTreeMap;

use sha2::{Digest, Sha256};
use tandem_model::{
    Checkpoint,
    census::{Census, Part},
    stubs::{self, Release, gguf, mixes::MIXES},
};
use tandem_quant::DType;

fn hex(lines: &mut [String]) -> String {
    lines.sort();
    let digest = Sha256::digest(lines.concat());
    digest.iter().map(|b| format!("{b:02x}")).collect()
}

/// SHA-256 of the sorted lines "name TAB type TAB AxB" of the full lists that were compiled from the releases' own headers and sizes.
#[test]
fn lists_are_the_published_ones() {
    for (release, count, bytes, sum) in [
        (Release::Bf16, 38_770, 642_646_653_816, "25e8303890acc317fe0085bcbfa89123ed4293276daa645a2f78b88923056f22"),
        (Release::Fp8, 76_108, 328_326_771_576, "38d8d33838d1760fdd297c401534afe8c6822766f7e04c874bec9f28b9742ea5"),
        (Release::LibertAi, 113_074, 194_644_803_576, "9e6fc883377ac9900b98322f88e5c89d65921835a073e867178cd236ae670aa9"),
    ] {
        let list = release.tensors();
        assert_eq!(list.len(), count, "{}", release.name());
        assert_eq!(list.iter().map(stubs::release::StubTensor::bytes).sum::<u64>(), bytes, "{}", release.name());
        let mut lines: Vec<String> = list
            .iter()
            .map(|t| {
                let shape: Vec<String> = t.shape.iter().map(usize::to_string).collect();
                let shape = if shape.is_empty() { "scalar".to_owned() } else { shape.join("x") };
                format!("{}\t{:?}\t{shape}\n", t.name, t.dtype)
            })
            .collect();
        assert_eq!(hex(&mut lines), sum, "{}", release.name());
    }
    assert_eq!(Release::LibertAiScales.tensors().len(), 150_226);

    let list = gguf::tensors(&stubs::config());
    assert_eq!(list.len(), 1412);
    let mut lines: Vec<String> = list
        .iter()
        .map(|(name, shape)| format!("{name}\t{}\n", shape.iter().rev().map(usize::to_string).collect::<Vec<_>>().join(",")))
        .collect();
    assert_eq!(hex(&mut lines), "cf0e9b1e78191923b0a88216bbafcac798acdf94352530d170df444113996ef3");
}

#[test]
fn published_censuses_are_met() {
    let counts = |name: &str| {
        let mix = stubs::Mix::find("unsloth", name).unwrap();
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        for tensor in mix.stub(400).tensors {
            *counts.entry(DType::from_ggml(tensor.ggml_type).unwrap().name()).or_default() += 1;
        }
        counts
    };
    let iq1 = [
        ("F32", 638),
        ("Q8_0", 346),
        ("Q5_K", 248),
        ("IQ1_S", 56),
        ("Q6_K", 49),
        ("IQ3_XXS", 39),
        ("IQ2_XXS", 28),
        ("IQ4_XS", 3),
        ("Q4_K", 2),
        ("Q2_K", 2),
        ("Q3_K", 1),
    ];
    assert_eq!(counts("UD-IQ1_S"), BTreeMap::from(iq1));
    let q2 = [
        ("F32", 638),
        ("Q8_0", 346),
        ("Q5_K", 181),
        ("Q6_K", 117),
        ("IQ2_XS", 82),
        ("IQ3_XXS", 41),
        ("IQ4_XS", 3),
        ("Q2_K", 2),
        ("Q3_K", 1),
        ("Q4_K", 1),
    ];
    assert_eq!(counts("UD-Q2_K_XL"), BTreeMap::from(q2));
}

#[test]
fn a_release_stub_opens_and_its_parts_add_up() {
    let dir = tempfile::tempdir().unwrap();
    Release::Fp8.write(dir.path(), &[]).unwrap();
    let error = Checkpoint::open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("truncated"), "data is needed to serve: {error}");
    let c = Checkpoint::open_headers(dir.path()).unwrap();
    assert!(c.is_stub() && c.fingerprint().is_empty());
    assert_eq!((c.tensor_count(), c.file_count()), (76_108, 62));
    assert_eq!(c.skipped().iter().map(|s| s.tensors).sum::<usize>(), 347 + 22 + 3 * 288 + 3 * 288 + 4 + 3 + 3);
    let census = Census::of(&c);
    // docs/checkpoints.md §2.8, as published.
    for (part, bytes) in [
        (Part::Kda, 9_366_356_992),
        (Part::Mla, 1_476_710_400),
        (Part::Indexer, 164_381_184),
        (Part::Shared, 1_057_222_656),
        (Part::Dense, 453_095_424),
        (Part::Router, 99_138_816),
        (Part::Hyper, 70_788_600),
        (Part::Norms, 745_472),
        (Part::Embedding, 1_268_776_960),
        (Part::Head, 1_268_776_960),
        (Part::Routed, 304_480_124_928),
    ] {
        assert_eq!(census.bytes(part), bytes, "{part}");
    }
    assert_eq!(census.total(), c.total_bytes());
    assert_eq!(census.experts.len(), 42);
    assert_eq!(census.experts[0].types, ["F8_E4M3"; 3].map(str::to_owned));
    assert_eq!(c.ffn_block(), 1);
    let error = c.embed().unwrap_err().to_string();
    assert!(error.contains("header-only stub"), "{error}");
}

#[test]
fn every_mix_opens() {
    let dir = tempfile::tempdir().unwrap();
    for (i, mix) in MIXES.iter().enumerate() {
        let path = mix.stub(400).write(dir.path(), &format!("{}-{}", mix.publisher, mix.name), [1, 3, 5][i % 3]).unwrap();
        let c = Checkpoint::open_headers(&path).unwrap_or_else(|e| panic!("{} {}: {e}", mix.publisher, mix.name));
        assert!(c.is_stub());
        assert_eq!((c.geometry().layers, c.geometry().mla_layers().len()), (45, 11));
        assert!(!c.warnings().iter().any(|w| w.contains("unknown") || w.contains("narrow")), "{}: {:?}", mix.name, c.warnings());
        let census = Census::of(&c);
        assert_eq!(census.total(), c.total_bytes());
        assert!(census.experts.iter().all(|e| e.types.iter().all(|t| !t.contains('/'))), "one type a stack");
        let block = census.experts.iter().map(|e| DType::ALL.iter().find(|d| d.name() == e.types[2]).unwrap().block_elems()).max();
        assert_eq!(Some(c.ffn_block()), block, "{}", mix.name);
    }
}
