//! `generation_config.json` → [`GenerationConfig`]: sampling defaults, and the set of ids that end a sequence.
//!
//! EOS ids come from the first of: generation_config, `text_config.eos_token_id`, the top level of `config.json`.

use std::path::Path;

use serde_json::{Value, json};

use crate::{
    ModelError, files, gguf,
    json::{Section, parse_object},
};

const EOS: &str = "eos_token_id";

/// A key of a header, read as what it must be; `None` where it is absent.
fn of_key<T>(
    path: &Path,
    header: &gguf::Header,
    key: &str,
    needed: &str,
    read: impl Fn(&gguf::Value) -> Option<T>,
) -> Result<Option<T>, ModelError> {
    let Some(value) = header.get(key) else { return Ok(None) };
    let error = || ModelError::Key { path: path.to_owned(), key: key.to_owned(), needed: needed.to_owned(), got: value.describe() };
    read(value).map(Some).ok_or_else(error)
}

/// The error for an end id that is no row of the vocabulary.
fn beyond(path: &Path, key: String, what: &str, vocab: usize, id: u32) -> ModelError {
    ModelError::Key { path: path.to_owned(), key, needed: format!("ids below {what} ({vocab})"), got: id.to_string() }
}

/// Sampling defaults of a checkpoint; a request's own values win.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerationConfig {
    /// Whether sampling is the default; `false` makes [`GenerationConfig::temperature`] 0.
    pub do_sample: bool,
    /// Default temperature (1 where the file says nothing, 0 where it says `do_sample: false`).
    pub temperature: f32,
    /// Default nucleus (1 = off).
    pub top_p: f32,
    /// Default top-k (0 = off).
    pub top_k: u32,
    /// Default min-p (0 = off).
    pub min_p: f32,
    /// Default repetition penalty (1 = off).
    pub repetition_penalty: f32,
    /// Ids that end a sequence, ascending.
    pub eos_token_ids: Vec<u32>,
    /// Padding id.
    pub pad_token_id: Option<u32>,
}

impl GenerationConfig {
    /// Reads `generation_config.json` (may be absent) of a folder whose `config.json` is `config`. End ids must lie below `vocab`.
    ///
    /// # Errors
    /// Names the file and the key that has another type or an impossible value.
    pub fn read(dir: &Path, config: &Value, vocab: usize) -> Result<Self, ModelError> {
        let path = dir.join("generation_config.json");
        let generation = match files::read_if_there(&path).map_err(|source| ModelError::Io { path: path.clone(), source })? {
            Some(text) => parse_object(&path, &text)?,
            None => Value::Object(serde_json::Map::new()),
        };
        let config_path = dir.join("config.json");
        let read = Self::from_json(&path, &generation, &config_path, config)?;
        let has = |value: Option<&Value>| value.is_some_and(|v| !v.is_null() && v.as_array().is_none_or(|list| !list.is_empty()));
        let text = config.get("text_config").and_then(|text| text.get(EOS));
        let (file, key) = match () {
            () if has(generation.get(EOS)) => (&path, EOS.to_owned()),
            () if has(text) => (&config_path, format!("text_config.{EOS}")),
            () => (&config_path, EOS.to_owned()),
        };
        match read.eos_token_ids.iter().find(|id| **id as usize >= vocab) {
            Some(id) => Err(beyond(file, key, "vocab_size", vocab, *id)),
            None => Ok(read),
        }
    }

    /// Sampling hints and end tokens of a GGUF header: `general.sampling.*`, and the set {eos, eot, eom} of `tokenizer.ggml.*`. End ids must
    /// lie below `vocab`.
    ///
    /// # Errors
    /// Names the key that has an impossible value.
    pub fn from_gguf(path: &Path, header: &gguf::Header, vocab: usize) -> Result<Self, ModelError> {
        let mut generation = json!({});
        let mut ends = Vec::new();
        for end in ["eos", "eot", "eom"] {
            let key = format!("tokenizer.ggml.{end}_token_id");
            let Some(id) = of_key(path, header, &key, "a token id", |v| u32::try_from(v.as_u64()?).ok())? else { continue };
            if id as usize >= vocab {
                return Err(beyond(path, key, "the vocabulary", vocab, id));
            }
            ends.push(id);
        }
        generation[EOS] = ends.into();
        let id = |v: &gguf::Value| u32::try_from(v.as_u64()?).ok();
        if let Some(pad) = of_key(path, header, "tokenizer.ggml.padding_token_id", "a token id", id)? {
            generation["pad_token_id"] = pad.into();
        }
        let number = |v: &gguf::Value| v.as_f64().filter(|f| f.is_finite());
        for (hint, key) in [("temp", "temperature"), ("top_p", "top_p"), ("min_p", "min_p")] {
            if let Some(value) = of_key(path, header, &format!("general.sampling.{hint}"), "a finite number", number)? {
                generation[key] = value.into();
            }
        }
        let whole = |v: &gguf::Value| u32::try_from(v.as_u64()?).ok();
        if let Some(top_k) = of_key(path, header, "general.sampling.top_k", "a whole number below 2^32", whole)? {
            generation["top_k"] = top_k.into();
        }
        Self::from_json(path, &generation, path, &json!({})).map_err(|error| match error {
            ModelError::Key { path, key, needed, got } => {
                let hint = if key == "temperature" { "temp" } else { &key };
                ModelError::Key { path, key: format!("general.sampling.{hint}"), needed, got }
            }
            other => other,
        })
    }

    /// As [`GenerationConfig::read`], from parsed files; the paths are for messages.
    ///
    /// # Errors
    /// Names the file and the key that has another type or an impossible value.
    pub fn from_json(path: &Path, generation: &Value, config_path: &Path, config: &Value) -> Result<Self, ModelError> {
        let g = Section::new(path, generation);
        let top = Section::new(config_path, config);
        let text = top.section("text_config")?;
        let first = |key: &str| -> Result<Vec<u32>, ModelError> {
            let own = g.token_ids(key)?;
            if !own.is_empty() {
                return Ok(own);
            }
            let nested = text.as_ref().map_or(Ok(Vec::new()), |t| t.token_ids(key))?;
            if nested.is_empty() { top.token_ids(key) } else { Ok(nested) }
        };
        let mut eos_token_ids = first(EOS)?;
        eos_token_ids.sort_unstable();
        eos_token_ids.dedup();

        let within = |key: &str, default: f32, low: f32, high: f32| -> Result<f32, ModelError> {
            let value = g.opt_float(key)?.unwrap_or(default);
            if (low..=high).contains(&value) {
                Ok(value)
            } else {
                Err(g.error(key, format!("a number from {low} to {high}"), value.to_string()))
            }
        };
        // A greedy checkpoint says do_sample: false, and may still carry a temperature that then means nothing. Where nothing is said,
        // servers sample at 1.0.
        let do_sample = g.opt_bool("do_sample")?.unwrap_or(true);
        let temperature = within("temperature", 1.0, 0.0, f32::MAX)?;
        Ok(Self {
            do_sample,
            temperature: if do_sample { temperature } else { 0.0 },
            top_p: within("top_p", 1.0, f32::MIN_POSITIVE, 1.0)?,
            top_k: g.opt_int("top_k", 0)?.unwrap_or(0).try_into().unwrap_or(u32::MAX),
            min_p: within("min_p", 0.0, 0.0, 1.0)?,
            repetition_penalty: within("repetition_penalty", 1.0, f32::MIN_POSITIVE, f32::MAX)?,
            eos_token_ids,
            pad_token_id: first("pad_token_id")?.first().copied(),
        })
    }
}
