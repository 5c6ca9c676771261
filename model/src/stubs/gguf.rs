//! GGUF stubs: the model's keys and tensors as a converter writes them (docs/checkpoints.md §4.2, §4.3, §4.5, §4.6), in one file or several.

use std::{
    fs,
    path::{Path, PathBuf},
};

use tandem_quant::DType;

use super::TEMPLATE;
use crate::{
    Mixer, ModelError,
    gguf::{
        TensorInfo, names,
        write::{Typed, header, place},
    },
    synthetic::{TextConfig, recipe::recipes},
};

/// How a writer says which layers are KDA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadCounts {
    /// One entry per block, the draft block's included.
    PerBlock,
    /// One entry per trunk layer.
    PerLayer,
    /// Not at all: readers look who has an `ssm_a`.
    Absent,
}

/// Keys and tensors of one model.
#[derive(Clone, Debug)]
pub struct GgufStub {
    /// Key-value pairs, in file order.
    pub keys: Vec<(String, Typed)>,
    /// Tensors, in file order; [`GgufStub::write`] sets their offsets.
    pub tensors: Vec<TensorInfo>,
}

/// Added tokens of the model from id 154820 on; the flag says whether they are text when decoded.
const ADDED: [(&str, bool); 36] = [
    ("<|endoftext|>", false),
    ("[MASK]", false),
    ("[gMASK]", false),
    ("[sMASK]", false),
    ("<sop>", false),
    ("<eop>", false),
    ("<|system|>", false),
    ("<|user|>", false),
    ("<|assistant|>", false),
    ("<|observation|>", false),
    ("<|begin_of_image|>", false),
    ("<|end_of_image|>", false),
    ("<|begin_of_video|>", false),
    ("<|end_of_video|>", false),
    ("<|begin_of_audio|>", false),
    ("<|end_of_audio|>", false),
    ("<|begin_of_transcription|>", false),
    ("<|end_of_transcription|>", false),
    ("<|code_prefix|>", false),
    ("<|code_middle|>", false),
    ("<|code_suffix|>", false),
    ("<think>", true),
    ("</think>", true),
    ("<tool_call>", true),
    ("</tool_call>", true),
    ("<tool_response>", true),
    ("</tool_response>", true),
    ("<arg_key>", true),
    ("</arg_key>", true),
    ("<arg_value>", true),
    ("</arg_value>", true),
    ("/nothink", true),
    ("<|begin_of_box|>", false),
    ("<|end_of_box|>", false),
    ("<|image|>", false),
    ("<|video|>", false),
];
/// Padding of the model's vocabulary behind the added tokens.
const PADDING: usize = 24;

impl GgufStub {
    /// The model of `config` under the architecture name `arch`; `type_of` gives each tensor's type from its GGUF name and row-major
    /// shape. `tokens` is the length of the vocabulary that is written (the model's, or shorter for a smaller file).
    pub fn new(config: &TextConfig, arch: &str, counts: HeadCounts, tokens: usize, type_of: impl Fn(&str, &[usize]) -> DType) -> Self {
        let mut stub = Self { keys: keys(config, arch, counts), tensors: Vec::new() };
        stub.keys.extend(tokenizer(tokens.min(config.vocab)));
        for (name, shape) in tensors(config) {
            let ggml_type = type_of(&name, &shape).ggml_id().unwrap_or_default();
            stub.tensors.push(TensorInfo { name, shape, ggml_type, offset: 0 });
        }
        stub
    }

    /// Leaves only what a draft-only sidecar has: embedding, head, final norm and the draft block of `config`.
    pub fn keep_draft(&mut self, config: &TextConfig) {
        let block = format!("blk.{}.", config.layers.len());
        self.tensors.retain(|t| !t.name.starts_with("blk.") || t.name.starts_with(&block));
    }

    /// A tensor by name.
    pub fn tensor(&mut self, name: &str) -> Option<&mut TensorInfo> {
        self.tensors.iter_mut().find(|t| t.name == name)
    }

    /// Sets a key, or adds it.
    pub fn set(&mut self, key: &str, value: Typed) {
        match self.keys.iter_mut().find(|(k, _)| k == key) {
            Some((_, old)) => *old = value,
            None => self.keys.push((key.to_owned(), value)),
        }
    }

    /// Removes a key.
    pub fn unset(&mut self, key: &str) {
        self.keys.retain(|(k, _)| k != key);
    }

    /// Writes the headers: `STEM.gguf`, or `STEM-00001-of-0000N.gguf` … where `shards` is more than one; the first of several shards
    /// then holds the keys and no tensor, as published. Returns the first file.
    ///
    /// # Errors
    /// A file cannot be written.
    pub fn write(&self, dir: &Path, stem: &str, shards: usize) -> Result<PathBuf, ModelError> {
        fs::create_dir_all(dir).map_err(|source| ModelError::Io { path: dir.to_owned(), source })?;
        let put = |name: String, keys: &[(String, Typed)], tensors: &[TensorInfo]| {
            let path = dir.join(name);
            let mut tensors = tensors.to_vec();
            place(&mut tensors);
            fs::write(&path, header(keys, &tensors)).map_err(|source| ModelError::Io { path: path.clone(), source })?;
            Ok(path)
        };
        if shards <= 1 {
            return put(format!("{stem}.gguf"), &self.keys, &self.tensors);
        }
        let each = self.tensors.len().div_ceil(shards - 1);
        let mut parts: Vec<&[TensorInfo]> = self.tensors.chunks(each.max(1)).collect();
        parts.insert(0, &[]);
        let count = parts.len();
        let mut first = None;
        for (i, part) in parts.into_iter().enumerate() {
            let mut keys: Vec<(String, Typed)> = if i == 0 { self.keys.clone() } else { Vec::new() };
            keys.push(("split.no".to_owned(), Typed::U16(i as u16)));
            keys.push(("split.count".to_owned(), Typed::U16(count as u16)));
            keys.push(("split.tensors.count".to_owned(), Typed::I32(self.tensors.len() as i32)));
            let path = put(format!("{stem}-{:05}-of-{count:05}.gguf", i + 1), &keys, part)?;
            first.get_or_insert(path);
        }
        Ok(first.unwrap_or_else(|| dir.to_owned()))
    }
}

/// Names and row-major shapes of all tensors, trunk and draft block, in the order of layers.
pub fn tensors(config: &TextConfig) -> Vec<(String, Vec<usize>)> {
    let layers = config.layers.len();
    let mut list = Vec::new();
    for recipe in recipes(config, 0, false) {
        let bare = recipe.name.strip_prefix("model.language_model.").unwrap_or(&recipe.name);
        let shape = recipe.shape;
        let Some((block, rest)) = bare.strip_prefix("layers.").and_then(|s| s.split_once('.')) else {
            let name = match bare {
                "embed_tokens.weight" => "token_embd.weight",
                "norm.weight" => "output_norm.weight",
                _ => "output.weight",
            };
            list.push((name.to_owned(), shape));
            continue;
        };
        let mut put = |name: &str, shape: Vec<usize>| list.push((format!("blk.{block}.{name}"), shape));
        match rest {
            "self_attn.A_log" => put("ssm_a", shape),
            "self_attn.kv_b_proj.weight" => {
                put("attn_k_b.weight", vec![config.attn_heads, config.kv_lora, config.qk_dim]);
                put("attn_v_b.weight", vec![config.attn_heads, config.v_dim, config.kv_lora]);
            }
            "eh_proj.weight" => put("nextn.eh_proj.weight", shape),
            "enorm.weight" => put("nextn.enorm.weight", shape),
            "hnorm.weight" => put("nextn.hnorm.weight", shape),
            "shared_head.norm.weight" => put("nextn.shared_head_norm.weight", shape),
            _ => match rest.strip_prefix("mlp.experts.") {
                Some(expert) => {
                    // The stack stands where its first expert does.
                    if let Some(matrix) = expert.strip_prefix("0.").and_then(|m| m.strip_suffix("_proj.weight")) {
                        put(&format!("ffn_{matrix}_exps.weight"), [&[config.experts], shape.as_slice()].concat());
                    }
                }
                None => {
                    if let Some(name) = names::of_published(rest) {
                        put(name, shape);
                    }
                }
            },
        }
        debug_assert!(block.parse::<usize>().is_ok_and(|n| n <= layers), "{bare}");
    }
    list
}

fn keys(c: &TextConfig, arch: &str, counts: HeadCounts) -> Vec<(String, Typed)> {
    let layers = c.layers.len();
    let blocks = layers + usize::from(c.mtp);
    let int = |n: usize| Typed::U32(n as u32);
    let float = |f: f64| Typed::F32(f as f32);
    let mut list: Vec<(String, Typed)> = vec![
        ("general.architecture".into(), Typed::Str(arch.into())),
        ("general.type".into(), Typed::Str("model".into())),
        ("general.sampling.temp".into(), Typed::F32(1.0)),
        ("general.sampling.top_p".into(), Typed::F32(0.95)),
    ];
    let mut put = |suffix: &str, value: Typed| list.push((format!("{arch}.{suffix}"), value));
    for (suffix, value) in [
        ("block_count", blocks),
        ("context_length", c.max_position),
        ("embedding_length", c.hidden),
        ("feed_forward_length", c.intermediate),
        ("vocab_size", c.vocab),
        ("attention.head_count", c.attn_heads),
        ("attention.q_lora_rank", c.q_lora),
        ("attention.kv_lora_rank", c.kv_lora),
        ("attention.key_length", c.kv_lora),
        ("attention.value_length", c.kv_lora),
        ("attention.key_length_mla", c.qk_dim),
        ("attention.value_length_mla", c.v_dim),
        ("rope.dimension_count", 0),
        ("attention.indexer.head_count", c.index_heads),
        ("attention.indexer.key_length", c.index_dim),
        ("attention.indexer.top_k", c.index_topk),
        ("attention.indexer.kpool", c.kpool),
        ("ssm.conv_kernel", c.conv),
        ("kda.head_dim", c.kda_head_dim),
        ("hyper_connection.count", c.streams),
        ("hyper_connection.sinkhorn_iterations", c.sinkhorn_iters),
        ("expert_count", c.experts),
        ("expert_used_count", c.topk),
        ("expert_feed_forward_length", c.moe_intermediate),
        ("expert_shared_count", c.shared_experts),
        ("expert_group_count", c.groups),
        ("expert_group_used_count", c.topk_group),
        ("expert_gating_func", 2),
        ("leading_dense_block_count", c.layers.iter().take_while(|l| l.ffn == crate::Ffn::Dense).count()),
    ] {
        put(suffix, int(value));
    }
    put("attention.layer_norm_rms_epsilon", float(c.rms_eps));
    put("hyper_connection.epsilon", float(c.hc_eps));
    put("expert_weights_scale", float(c.routed_scale));
    put("expert_weights_norm", Typed::Bool(c.norm_topk_prob));
    put("attention.indexer.kpool_select_tail", Typed::Bool(c.always_tail));
    if let Some(bound) = c.gate_lower_bound {
        put("kda.gate_lower_bound", float(bound));
    }
    if let Some(limit) = c.swiglu_limit {
        put("swiglu_clamp_exp", Typed::F32s(vec![limit as f32; blocks]));
    }
    if c.mtp {
        put("nextn_predict_layers", int(1));
    }
    let kinds = c.layers.iter().map(|l| i32::from(l.mixer != Mixer::Kda));
    match counts {
        HeadCounts::PerBlock => put("attention.head_count_kv", Typed::I32s(kinds.chain(c.mtp.then_some(1)).collect())),
        HeadCounts::PerLayer => put("attention.head_count_kv", Typed::I32s(kinds.collect())),
        HeadCounts::Absent => {}
    }
    list
}

/// The tokenizer's keys with a vocabulary of `len` entries: the bytes, unused entries, the model's added tokens at the end (at their own ids
/// where `len` is the model's).
fn tokenizer(len: usize) -> Vec<(String, Typed)> {
    const NORMAL: i32 = 1;
    const CONTROL: i32 = 3;
    const USER_DEFINED: i32 = 4;
    const UNUSED: i32 = 5;
    // GPT-2's alphabet: printable bytes stand for themselves, the others for characters from U+0100 on.
    let printable = |b: &u32| matches!(b, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
    let bytes = (0..256).filter(printable).chain(0x100..0x100 + 68).filter_map(char::from_u32).map(|c| c.to_string());
    let mut tokens: Vec<String> = bytes.chain(["th".to_owned(), "the".to_owned()]).collect();
    let mut types = vec![NORMAL; tokens.len()];
    let added_at = len.saturating_sub(ADDED.len() + PADDING).max(tokens.len());
    for i in tokens.len()..added_at {
        tokens.push(format!("[unused{i}]"));
        types.push(UNUSED);
    }
    for (token, is_text) in ADDED {
        tokens.push(token.to_owned());
        types.push(if is_text { USER_DEFINED } else { CONTROL });
    }
    for i in tokens.len()..len {
        tokens.push(format!("[PAD{i}]"));
        types.push(UNUSED);
    }
    let id = |offset: usize| Typed::U32((added_at + offset) as u32);
    let merges = ["t h", "th e"].map(str::to_owned).to_vec();
    [
        ("ggml.model", Typed::Str("gpt2".into())),
        ("ggml.pre", Typed::Str("glm4".into())),
        ("ggml.tokens", Typed::Strs(tokens)),
        ("ggml.token_type", Typed::I32s(types)),
        ("ggml.merges", Typed::Strs(merges)),
        ("ggml.eos_token_id", id(0)),
        ("ggml.bos_token_id", id(2)),
        ("ggml.eot_token_id", id(7)),
        ("ggml.eom_token_id", id(9)),
        ("ggml.unknown_token_id", id(0)),
        ("ggml.padding_token_id", id(0)),
        ("chat_template", Typed::Str(TEMPLATE.into())),
    ]
    .map(|(key, value)| (format!("tokenizer.{key}"), value))
    .into()
}
