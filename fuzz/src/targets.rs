//! What is fuzzed: every parser of bytes or text that come from outside. A target takes any bytes and says whether they were accepted; it
//! must not panic, hang, or ask for more memory than its input justifies.
//!
//! `fuzz_targets/` hands these functions to libFuzzer; `tests/tests/fuzzing.rs` runs them over `corpus/` and mutations of it.

use std::{fs, path::Path};

use bytes::Bytes;
use prost::Message as _;
use tandem_coordinator::text::{ChatTemplate, Tokenizer};
use tandem_model::{
    Checkpoint, GenerationConfig, Geometry, Resident, Shard, Split,
    census::Census,
    gguf::{self, Header, sidecar},
    storage::safetensors,
};
use tandem_proto::{
    control::v1 as wire,
    frame::{Frame, RawHeader},
    payload::{Precision, RowShape},
    route_table::RouteTable,
};

/// A target's name and function.
pub type Target = (&'static str, fn(&[u8]) -> bool);

/// Every target; each has a folder of this name in `corpus/`.
pub const TARGETS: [Target; 9] = [
    ("gguf", gguf),
    ("gguf_text", gguf_text),
    ("safetensors", safetensors),
    ("config", config),
    ("checkpoint", checkpoint),
    ("sidecar", sidecar),
    ("frame", frame),
    ("route_table", route_table),
    ("placement", placement),
];

const PATH: &str = "input";

/// A GGUF header, the model's keys in it, and the geometry that they give.
pub fn gguf(data: &[u8]) -> bool {
    let Ok(header) = Header::parse(data) else { return false };
    let _ = header.check_extents(data.len() as u64);
    header.tensors.iter().for_each(|t| {
        let _ = (t.elems(), t.bytes(), gguf::names::classify(&t.name, 45));
    });
    let path = Path::new(PATH);
    let _ = GenerationConfig::from_gguf(path, &header, 154_880);
    gguf::config::config(path, &header, &header.tensors).is_ok_and(|config| Geometry::from_json(path, &config).is_ok())
}

/// The tokenizer's keys of a GGUF header, up to an encoded and decoded text.
pub fn gguf_text(data: &[u8]) -> bool {
    let Ok(header) = Header::parse(data) else { return false };
    let path = Path::new(PATH);
    let _ = gguf::tokenizer::named_tokens(&header);
    if let Some(template) = gguf::tokenizer::chat_template(&header) {
        let _ = ChatTemplate::new(template, PATH, Default::default());
    }
    let Ok(json) = gguf::tokenizer::tokenizer_json(path, &header) else { return false };
    let Ok(tokenizer) = Tokenizer::from_bytes(json.to_string().as_bytes(), path) else { return false };
    if let Ok(ids) = tokenizer.encode("The <|user|> th\u{e9}\n", false) {
        let _ = tokenizer.decode(&ids, true);
    }
    true
}

/// A safetensors header, or the index of a set where it begins as JSON does.
pub fn safetensors(data: &[u8]) -> bool {
    let path = Path::new(PATH);
    if data.first() == Some(&b'{') {
        return serde_json::from_slice(data).is_ok_and(|index| safetensors::files_of(path, &index).is_ok());
    }
    let Ok(header) = safetensors::header(path, data) else { return false };
    assert!(header.start <= data.len() && header.start <= header.end);
    true
}

/// config.json and generation_config.json.
pub fn config(data: &[u8]) -> bool {
    let Ok(value) = serde_json::from_slice::<serde_json::Value>(data) else { return false };
    let path = Path::new(PATH);
    let generation = GenerationConfig::from_json(path, &value, path, &value);
    let Ok(g) = Geometry::from_json(path, &value) else { return generation.is_ok() };
    // Sizes are multiplied in pairs everywhere: none may overflow.
    let _ = (g.shared_intermediate(), g.kda_width(), g.hc_rows(), g.attn_heads * (g.qk_dim + g.v_dim), g.moe_layers());
    true
}

/// A whole checkpoint: a GGUF file, or config.json and a safetensors header with two bytes of the config's length before them.
pub fn checkpoint(data: &[u8]) -> bool {
    let Ok(dir) = tempfile::tempdir() else { return false };
    let put = |name: &str, content: &[u8]| fs::write(dir.path().join(name), content).is_ok();
    let written = match data {
        [b'G', b'G', ..] => put("model.gguf", data),
        [a, b, rest @ ..] => {
            let length = usize::from(u16::from_le_bytes([*a, *b])).min(rest.len());
            put("config.json", &rest[..length]) && put("model.safetensors", &rest[length..])
        }
        _ => false,
    };
    if !written {
        return false;
    }
    let Ok(checkpoint) = Checkpoint::open_headers(dir.path()) else { return false };
    let census = Census::of(&checkpoint);
    assert_eq!(census.total(), checkpoint.total_bytes());
    let _ = (checkpoint.ffn_block(), checkpoint.unpacked_bytes(), checkpoint.narrowed_tensors());
    let _ = (checkpoint.embed(), Checkpoint::open(dir.path()));
    true
}

/// ROCmFP codebooks of both kinds.
pub fn sidecar(data: &[u8]) -> bool {
    sidecar::Kind::ALL.map(|kind| sidecar::read(kind, data, &mut sidecar::Codebooks::new()).is_ok()).contains(&true)
}

/// A frame of the expert hop with the payloads that it may carry.
pub fn frame(data: &[u8]) -> bool {
    if let Ok(raw) = RawHeader::decode(data) {
        assert!(raw.payload_len() <= tandem_proto::frame::MAX_PAYLOAD);
    }
    let Ok(frame) = Frame::decode(&Bytes::copy_from_slice(data)) else { return false };
    assert_eq!(frame.validate(), Ok(()));
    let shape = RowShape { hidden: 4, topk: 2, precision: Precision::F32 };
    // A receiver has checked the rows against what it holds buffers for.
    let rows = (frame.header.rows as usize).min(64);
    let (mut ids, mut weights, mut x) = (vec![0; rows * 2], vec![0.0; rows * 2], vec![0.0; rows * 4]);
    let _ = shape.get_dispatch(frame.header.dtype, &frame.payload, rows, &mut ids, &mut weights, &mut x);
    if shape.combine_timings(frame.header.dtype, &frame.payload, rows).is_ok() {
        shape.get_partial(&frame.payload, &mut x);
    }
    true
}

/// A route table as the coordinator pushes it.
pub fn route_table(data: &[u8]) -> bool {
    let Ok(table) = wire::RouteTable::decode(data) else { return false };
    let Ok(table) = RouteTable::from_wire(1, &table) else { return false };
    assert_eq!(table.accepts(&table), Ok(false));
    for route in &table.routes {
        assert!(table.route(route.shard.id).is_some());
    }
    true
}

/// Shards, resident layers and splits as people write them.
pub fn placement(data: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(data) else { return false };
    let mut accepted = text.parse::<Split>().is_ok();
    if let Ok(shard) = text.parse::<Shard>() {
        let again = shard.to_string().parse::<Shard>();
        assert!(again.is_ok_and(|a| a.same_cut(&shard)), "{shard} does not read back");
        accepted = true;
    }
    if let Ok(resident) = text.parse::<Resident>() {
        assert_eq!(resident.to_string().parse::<Resident>().ok().as_ref(), Some(&resident));
        let config = tandem_model::synthetic::Preset::Tiny.config().to_json(false);
        if let Ok(g) = Geometry::from_json(Path::new(PATH), &config) {
            let _ = resident.experts_by_layer(&g);
        }
        accepted = true;
    }
    accepted
}
