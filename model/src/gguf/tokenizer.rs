//! The tokenizer keys of a GGUF header → the `tokenizer.json` that the published checkpoint has.
//!
//! GGUF cannot express two things, which are pinned for the `glm4` pre-tokenizer: its regular expression, and `ignore_merges` (a word
//! that is a vocabulary entry is taken whole). docs/checkpoints.md §4.6.

use std::path::Path;

use serde_json::{Value as Json, json};

use super::{Header, Value};
use crate::ModelError;

/// The `glm4` pre-tokenizer's split: contractions, words, up to three digits, punctuation, line ends, white space.
const GLM4_SPLIT: &str = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}\
                          | ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";

/// The chat template's key.
const TEMPLATE: &str = "tokenizer.chat_template";
/// `tokenizer.ggml.token_type` of ordinary tokens, of the one for what the others cannot spell, and of single bytes: all are text.
const NORMAL: u64 = 1;
const UNKNOWN: u64 = 2;
const BYTE: u64 = 6;
/// `tokenizer.ggml.token_type` of tokens that are no text of their own: matched whole, skipped when special tokens are.
const CONTROL: u64 = 3;
/// Matched whole, but ordinary text when decoded (`<think>`, `<tool_call>` …).
const USER_DEFINED: u64 = 4;
/// Fills the vocabulary up to the embedding's rows (`[PAD154856]` …): no text at all.
const UNUSED: u64 = 5;

/// `tokenizer.json` as the `tokenizers` library reads it.
///
/// # Errors
/// Names the key that is missing, or says something that is not read here; a chat template that is no text.
pub fn tokenizer_json(path: &Path, header: &Header) -> Result<Json, ModelError> {
    let k = Keys { path, header };
    if let Some(odd) = header.get(TEMPLATE).filter(|value| value.as_str().is_none()) {
        let (key, needed) = (TEMPLATE.to_owned(), "text in Jinja's language".to_owned());
        return Err(ModelError::Key { path: path.to_owned(), key, needed, got: odd.describe() });
    }
    k.one_of("model", &["gpt2"])?;
    k.one_of("pre", &["glm4", "chatglm-bpe"])?;
    let tokens = k.strings("tokens")?;
    let types = k.array("token_type")?;
    if types.len() != tokens.len() {
        return Err(k.error("token_type", format!("{} entries, as in tokens", tokens.len()), format!("{} entries", types.len())));
    }
    let mut vocab = serde_json::Map::with_capacity(tokens.len());
    let mut added = Vec::new();
    for (id, (token, kind)) in tokens.iter().zip(types).enumerate() {
        let special = match kind.as_u64() {
            Some(UNUSED) => continue,
            Some(CONTROL) => Some(true),
            Some(USER_DEFINED) => Some(false),
            Some(NORMAL | UNKNOWN | BYTE) => None,
            _ => return Err(k.error(&format!("token_type[{id}]"), "a type from 1 to 6", kind.describe())),
        };
        if let Some(first) = vocab.insert((*token).to_owned(), id.into()) {
            return Err(k.error("tokens", "each token once", format!("{token:?} as {first} and as {id}")));
        }
        let Some(special) = special else { continue };
        added.push(json!({
            "id": id, "content": token, "special": special,
            "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
        }));
    }
    let mut merges = Vec::new();
    for merge in k.strings("merges")? {
        let (left, right) = merge.split_once(' ').ok_or_else(|| k.error("merges", "pairs \"A B\"", format!("{merge:?}")))?;
        merges.push(json!([left, right]));
    }
    let byte_level = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false });
    Ok(json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                { "type": "Split", "pattern": { "Regex": GLM4_SPLIT }, "behavior": "Isolated", "invert": false },
                byte_level,
            ],
        },
        "post_processor": null,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null, "end_of_word_suffix": null,
            "fuse_unk": false, "byte_fallback": false, "ignore_merges": true, "vocab": vocab, "merges": merges,
        },
    }))
}

/// The chat template, where the file has one.
pub fn chat_template(header: &Header) -> Option<&str> {
    header.get(TEMPLATE)?.as_str()
}

/// The tokens that a template may name, as `tokenizer_config.json` calls them: `("bos_token", "[gMASK]")` …
pub fn named_tokens(header: &Header) -> Vec<(&'static str, &str)> {
    const NAMES: [(&str, &str); 7] = [
        ("bos_token", "bos"),
        ("eos_token", "eos"),
        ("pad_token", "padding"),
        ("unk_token", "unknown"),
        // Spelled so by every writer.
        ("sep_token", "seperator"),
        ("cls_token", "cls"),
        ("mask_token", "mask"),
    ];
    let tokens = header.get("tokenizer.ggml.tokens").and_then(Value::as_array).unwrap_or_default();
    let token = |key: &str| {
        let id = header.get(&format!("tokenizer.ggml.{key}_token_id"))?.as_u64()?;
        tokens.get(usize::try_from(id).ok()?)?.as_str()
    };
    NAMES.iter().filter_map(|(name, key)| Some((*name, token(key)?))).collect()
}

struct Keys<'a> {
    path: &'a Path,
    header: &'a Header,
}

impl<'a> Keys<'a> {
    fn error(&self, name: &str, needed: impl Into<String>, got: impl Into<String>) -> ModelError {
        let key = format!("tokenizer.ggml.{name}");
        ModelError::Key { path: self.path.to_owned(), key, needed: needed.into(), got: got.into() }
    }

    fn get(&self, name: &str) -> Option<&'a Value> {
        self.header.get(&format!("tokenizer.ggml.{name}"))
    }

    fn one_of(&self, name: &str, known: &[&str]) -> Result<(), ModelError> {
        let value = self.get(name);
        match value.and_then(Value::as_str) {
            Some(given) if known.contains(&given) => Ok(()),
            _ => Err(self.error(name, known.join(" or "), value.map_or_else(|| "nothing".to_owned(), Value::describe))),
        }
    }

    fn array(&self, name: &str) -> Result<&'a [Value], ModelError> {
        let value = self.get(name);
        let got = || value.map_or_else(|| "nothing".to_owned(), Value::describe);
        value.and_then(Value::as_array).ok_or_else(|| self.error(name, "an array", got()))
    }

    fn strings(&self, name: &str) -> Result<Vec<&'a str>, ModelError> {
        let items = self.array(name)?.iter().map(Value::as_str);
        items.map(|item| item.ok_or_else(|| self.error(name, "an array of strings", "something else in it"))).collect()
    }
}
