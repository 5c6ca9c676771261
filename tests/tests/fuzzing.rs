//! The fuzz targets over their corpus and over random mutations of it, bounded and without libFuzzer. `FUZZ_CASES` asks for more.
#![allow(clippy::unwrap_used, reason = "tests")]

#[path = "../../fuzz/src/targets.rs"]
#[allow(dead_code, missing_docs, reason = "the fuzz crate's library")]
mod targets;

use std::{fs, path::PathBuf};

use proptest::{
    prelude::*,
    sample::Index,
    test_runner::{Config, TestRunner},
};
use tandem_model::{
    gguf::write::{Typed, header},
    stubs::{
        GgufStub, Release,
        gguf::HeadCounts,
        release::{self, StubTensor},
    },
    synthetic::{Preset, TextConfig},
};
use tandem_quant::DType;

fn corpus(target: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../fuzz/corpus").join(target)
}

/// A change to an input.
#[derive(Clone, Debug)]
enum Edit {
    /// Overwrites a byte.
    Set(Index, u8),
    /// Overwrites 4 or 8 bytes with a number that lies at some edge.
    Number(Index, bool, u64),
    /// Cuts the end off.
    Cut(Index),
    /// Takes a piece out, or doubles it.
    Piece(Index, Index, bool),
}

fn edit() -> impl Strategy<Value = Edit> {
    let number = prop_oneof![
        Just(0),
        Just(1),
        Just(u64::from(u32::MAX)),
        Just(u64::MAX),
        Just(1 << 31),
        Just(1 << 63),
        (0u32..64).prop_map(|bit| 1u64 << bit),
        any::<u64>()
    ];
    prop_oneof![
        6 => (any::<Index>(), any::<u8>()).prop_map(|(at, byte)| Edit::Set(at, byte)),
        3 => (any::<Index>(), any::<bool>(), number).prop_map(|(at, wide, n)| Edit::Number(at, wide, n)),
        1 => any::<Index>().prop_map(Edit::Cut),
        2 => (any::<Index>(), any::<Index>(), any::<bool>()).prop_map(|(a, b, twice)| Edit::Piece(a, b, twice)),
    ]
}

fn apply(mut data: Vec<u8>, edits: &[Edit]) -> Vec<u8> {
    for edit in edits {
        if data.is_empty() {
            break;
        }
        match edit {
            Edit::Set(at, byte) => {
                let at = at.index(data.len());
                data[at] = *byte;
            }
            Edit::Number(at, wide, n) => {
                let at = at.index(data.len());
                let bytes = n.to_le_bytes();
                let bytes = &bytes[..if *wide { 8 } else { 4 }];
                data.iter_mut().skip(at).zip(bytes).for_each(|(to, from)| *to = *from);
            }
            Edit::Cut(at) => data.truncate(at.index(data.len())),
            Edit::Piece(a, b, twice) => {
                let (a, b) = (a.index(data.len()), b.index(data.len()));
                let (start, end) = (a.min(b), a.max(b).min(a.min(b) + 256));
                if *twice {
                    let piece = data[start..end].to_vec();
                    data.splice(start..start, piece);
                } else {
                    data.drain(start..end);
                }
            }
        }
    }
    data
}

fn run(name: &str, cases: u32) {
    let (_, target) = targets::TARGETS.iter().find(|(n, _)| *n == name).unwrap();
    let mut files: Vec<PathBuf> = fs::read_dir(corpus(name)).unwrap().map(|f| f.unwrap().path()).collect();
    files.sort();
    let seeds: Vec<Vec<u8>> = files.iter().map(|file| fs::read(file).unwrap()).collect();
    assert!(!seeds.is_empty(), "no corpus for {name}");
    target(&[]);
    // A seed that is refused would only ever lead to the first checks.
    files.iter().zip(&seeds).for_each(|(file, seed)| assert!(target(seed) || file.ends_with("none"), "{} is refused", file.display()));
    let cases = std::env::var("FUZZ_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(cases);
    let mut runner = TestRunner::new(Config { cases, failure_persistence: None, max_shrink_iters: 2000, ..Config::default() });
    let inputs = (any::<Index>(), prop::collection::vec(edit(), 1..8));
    let outcome = runner.run(&inputs, |(seed, edits)| {
        let data = apply(seeds[seed.index(seeds.len())].clone(), &edits);
        let shown = data.clone();
        std::panic::catch_unwind(|| target(&data))
            .map(|_| ())
            .map_err(|_| TestCaseError::fail(format!("panic over {} bytes: {shown:02x?}", shown.len())))
    });
    outcome.unwrap();
}

macro_rules! bounded {
    ($($name:ident: $cases:literal),* $(,)?) => {
        $(#[test] fn $name() { run(stringify!($name), $cases); })*

        #[test]
        fn every_target_is_run() {
            let run = [$(stringify!($name)),*];
            assert!(targets::TARGETS.iter().all(|(name, _)| run.contains(name)) && run.len() == targets::TARGETS.len());
        }
    };
}

bounded! {
    gguf: 2000, gguf_text: 300, safetensors: 2000, config: 2000, checkpoint: 300, sidecar: 3000, frame: 3000, route_table: 3000,
    placement: 5000,
}

/// Writes the seeds anew: `cargo test -p tandem-tests --test fuzzing -- --ignored`.
#[test]
#[ignore = "writes fuzz/corpus"]
fn write_the_corpus() {
    let put = |target: &str, name: &str, content: &[u8]| {
        fs::create_dir_all(corpus(target)).unwrap();
        fs::write(corpus(target).join(name), content).unwrap();
    };
    // The smallest model that has every kind of layer.
    let config = TextConfig {
        layers: Preset::TinyB.config().layers[1..3].to_vec(),
        vocab: 330,
        hidden: 32,
        experts: 2,
        topk: 1,
        groups: 1,
        topk_group: 1,
        mtp: true,
        eos: vec![329],
        ..Preset::TinyB.config()
    };
    let types = |_: &str, shape: &[usize]| match shape {
        [.., row] if shape.len() > 1 && row % 32 == 0 => DType::Q8_0,
        _ => DType::F32,
    };
    let file = |stub: &GgufStub| {
        let dir = tempfile::tempdir().unwrap();
        fs::read(stub.write(dir.path(), "m", 1).unwrap()).unwrap()
    };
    for (name, arch, counts) in [("listed", "glm5-next", HeadCounts::PerBlock), ("counted", "glm5next", HeadCounts::Absent)] {
        let whole = file(&GgufStub::new(&config, arch, counts, 330, types));
        put("checkpoint", name, &whole);
        let mut keys = GgufStub::new(&config, arch, counts, 330, types);
        keys.keys.retain(|(key, _)| !key.starts_with("tokenizer."));
        put("gguf", name, &file(&keys));
    }
    let mut text = GgufStub::new(&config, "glm5-next", HeadCounts::Absent, 330, types);
    text.keys.retain(|(key, _)| key.starts_with("tokenizer."));
    put("gguf_text", "keys", &header(&text.keys, &[]));
    put("gguf_text", "none", &header(&[("tokenizer.chat_template".into(), Typed::Str("{{ x }}".into()))], &[]));

    let tensors: Vec<StubTensor> = Release::Fp8.tensors_of(&config).into_iter().filter(|t| !t.name.contains("visual")).collect();
    let few: Vec<StubTensor> = tensors.iter().filter(|t| t.name.contains("layers.0.self_attn")).cloned().collect();
    put("safetensors", "header", &release::header(&few));
    put("safetensors", "index", br#"{"metadata":{"total_size":1},"weight_map":{"a.weight":"model-00001-of-00002.safetensors","b":"model-00002-of-00002.safetensors"}}"#);
    let json = config.to_json(false).to_string();
    put("config", "nested", json.as_bytes());
    put("config", "flat", config.to_json(true).to_string().as_bytes());
    put("config", "generation", br#"{"temperature":1.0,"top_p":0.95,"top_k":20,"do_sample":true,"eos_token_id":[1,2],"pad_token_id":1}"#);
    for release in [Release::Bf16, Release::Fp8, Release::LibertAi, Release::RedHat, Release::Quark] {
        let tensors: Vec<StubTensor> = release.tensors_of(&config).into_iter().filter(|t| !t.name.contains("visual")).collect();
        let length = (json.len() as u16).to_le_bytes();
        put("checkpoint", release.name(), &[&length, json.as_bytes(), &release::header(&tensors)].concat());
    }

    let words = |words: &[u32]| words.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<u8>>();
    put("sidecar", "p4mix", &[b"P4MIXv1\0".as_slice(), &words(&[1, 0, 7, 2, 64, 32, 2, 8]), &[0, 1, 0, 0], &[0x3F; 64]].concat());
    put("sidecar", "gumix", &[b"GUMIXs1\0".as_slice(), &words(&[1, 0, 3, 1, 2, 8, 128, 2, 4]), &[0, 1], &[0x3F; 32]].concat());
    frames(&put);
    for (name, text) in
        [("shard", "layers=3-6,8-11,experts=0-287,ffn=0-2047"), ("resident", "3-6:0-63,8"), ("all", "all"), ("split", "experts")]
    {
        put("placement", name, text.as_bytes());
    }
}

fn frames(put: &impl Fn(&str, &str, &[u8])) {
    use prost::Message as _;
    use tandem_proto::{
        control::v1 as wire,
        frame::{Dtype, Header, Kind},
    };
    let payload = [0x11; 2 * (2 * 8 + 16)];
    let data = Header { dtype: Dtype::F32, epoch: 7, step_id: 9, layer: 3, rows: 2, rows_total: 2, ..Header::new(Kind::Dispatch) };
    put("frame", "dispatch", &[data.encode(&payload).as_slice(), &payload].concat());
    let payload = [0x22; 16 + 2 * 16];
    let data = Header { kind: Kind::Combine, ..data };
    put("frame", "combine", &[data.encode(&payload).as_slice(), &payload].concat());
    put("frame", "ping", &Header::new(Kind::Ping).encode(&[]));
    let range = |start, end| Some(wire::Range { start, end });
    let holder = wire::Holder {
        worker: "experts-0".into(),
        epoch: 5,
        arithmetic: "avx2".into(),
        host: "h".into(),
        addresses: vec![wire::Address { link: "tcp".into(), addr: "127.0.0.1:1".into() }],
        ready: true,
        ..wire::Holder::default()
    };
    let shard = |id| wire::Shard { id, layers: vec![wire::Range { start: 3, end: 45 }], experts: range(0, 288), ffn: range(0, 2048) };
    let routes =
        vec![wire::Route { shard: Some(shard(0)), holders: vec![holder] }, wire::Route { shard: Some(shard(1)), holders: Vec::new() }];
    put("route_table", "two", &wire::RouteTable { version: 4, routes }.encode_to_vec());
}
