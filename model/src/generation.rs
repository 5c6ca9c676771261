//! `generation_config.json` → [`GenerationConfig`]: sampling defaults, and the set of ids that end a sequence.
//!
//! EOS ids come from the first of: generation_config, `text_config.eos_token_id`, the top level of `config.json`.

use std::path::Path;

use serde_json::{Value, json};

use crate::{
    ModelError, gguf,
    json::{Section, read_object},
};

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
    /// Reads `generation_config.json` (may be absent) of a folder whose `config.json` is `config`.
    ///
    /// # Errors
    /// Names the file and the key that has another type or an impossible value.
    pub fn read(dir: &Path, config: &Value) -> Result<Self, ModelError> {
        let path = dir.join("generation_config.json");
        let generation = if path.exists() { read_object(&path)? } else { Value::Object(serde_json::Map::new()) };
        Self::from_json(&path, &generation, &dir.join("config.json"), config)
    }

    /// Sampling hints and end tokens of a GGUF header: `general.sampling.*`, and the set {eos, eot, eom} of `tokenizer.ggml.*`.
    ///
    /// # Errors
    /// Names the key that has an impossible value.
    pub fn from_gguf(path: &Path, header: &gguf::Header) -> Result<Self, ModelError> {
        let int = |key: &str| header.get(key).and_then(gguf::Value::as_u64);
        let ends = ["eos", "eot", "eom"].iter().filter_map(|end| int(&format!("tokenizer.ggml.{end}_token_id")));
        let mut generation = json!({ "eos_token_id": ends.collect::<Vec<_>>() });
        if let Some(pad) = int("tokenizer.ggml.padding_token_id") {
            generation["pad_token_id"] = pad.into();
        }
        for (hint, key) in [("temp", "temperature"), ("top_p", "top_p"), ("min_p", "min_p")] {
            if let Some(value) = header.get(&format!("general.sampling.{hint}")).and_then(gguf::Value::as_f64) {
                generation[key] = value.into();
            }
        }
        if let Some(top_k) = int("general.sampling.top_k") {
            generation["top_k"] = top_k.into();
        }
        Self::from_json(path, &generation, path, &json!({}))
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
        let mut eos_token_ids = first("eos_token_id")?;
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
