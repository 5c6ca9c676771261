//! Every rule about a request's values, and the defaults. What passes here can be queued.
//!
//! A refusal names the field, what is allowed and what came. Limits that depend on the prompt's length are checked in
//! `conversation/start.rs`.

use serde_json::{Map, Value};

use super::ApiError;
use super::request::{Common, Int, Strings};
use crate::api::state::{Defaults, Model, Options};
use crate::engine::SamplingParams;

/// Most stop strings (OpenAI allows 4; longer lists are common with other servers).
const MOST_STOPS: usize = 64;
/// Most bytes of one stop string.
const LONGEST_STOP: usize = 1024;
/// Most entries of `stop_token_ids`.
const MOST_STOP_IDS: usize = 1024;
/// Bounds of `logit_bias` values.
const BIAS: f64 = 100.0;

/// A request's settings, checked.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Server-sent events.
    pub stream: bool,
    /// A usage chunk at the end of the stream.
    pub include_usage: bool,
    /// The usage so far in each chunk.
    pub continuous_usage: bool,
    /// Choices per prompt.
    pub n: u32,
    /// Most new tokens; `None` = as many as fit.
    pub max_tokens: Option<u64>,
    /// The field that said so, for errors.
    pub max_tokens_field: &'static str,
    /// No end before that many.
    pub min_tokens: u32,
    /// Sampler settings.
    pub sampling: SamplingParams,
    /// Stop strings.
    pub stop: Vec<String>,
    /// Show what stopped the text.
    pub include_stop: bool,
    /// The request's own stop ids (reported as `stop_reason`; the model's EOS ids are not).
    pub stop_token_ids: Vec<u32>,
    /// The model's EOS ids do not stop.
    pub ignore_eos: bool,
    /// Drop special tokens' text.
    pub skip_special: bool,
    /// Top-n logprobs of new tokens.
    pub logprobs: Option<u32>,
    /// Top-n logprobs of prompt tokens.
    pub prompt_logprobs: Option<u32>,
    /// Answer with `token_ids`.
    pub token_ids: bool,
    /// `token_id:N` in place of token texts.
    pub tokens_as_ids: bool,
}

/// Checks the shared fields.
pub fn settings(common: &Common, model: &Model, options: &Options) -> Result<Settings, ApiError> {
    if common.use_beam_search == Some(true) {
        return Err(ApiError::unsupported("use_beam_search", "beam search is not supported"));
    }
    let stream = common.stream.unwrap_or(false);
    let stream_options = common.stream_options.unwrap_or_default();
    let include_usage = stream_options.include_usage.unwrap_or(false);
    if common.stream_options.is_some() && !stream {
        return Err(ApiError::invalid("stream_options", "stream_options is only allowed when stream is true"));
    }
    let n = int(common.n, "n", 1, i128::from(options.max_choices))?.unwrap_or(1) as u32;
    let (max_tokens, max_tokens_field) = max_tokens(common)?;
    let min_tokens = int(common.min_tokens, "min_tokens", 0, i128::from(u32::MAX))?.unwrap_or(0) as u32;
    if max_tokens.is_some_and(|most| u64::from(min_tokens) > most) {
        return Err(ApiError::invalid(
            "min_tokens",
            format!("min_tokens is {min_tokens}, more than max_tokens {}", max_tokens.unwrap_or(0)),
        ));
    }
    let prompt_logprobs = logprob_count(common.prompt_logprobs, "prompt_logprobs", model, options)?;
    if prompt_logprobs.is_some() && stream {
        return Err(ApiError::unsupported("prompt_logprobs", "prompt_logprobs is not available when stream is true"));
    }
    Ok(Settings {
        stream,
        include_usage,
        continuous_usage: include_usage && stream_options.continuous_usage_stats.unwrap_or(false),
        n,
        max_tokens,
        max_tokens_field,
        min_tokens,
        sampling: sampling(common, &model.defaults, model.vocab)?,
        stop: stops(common.stop.as_ref())?,
        include_stop: common.include_stop_str_in_output.unwrap_or(false),
        stop_token_ids: stop_ids(common.stop_token_ids.as_deref(), model.vocab)?,
        ignore_eos: common.ignore_eos.unwrap_or(false),
        skip_special: common.skip_special_tokens.unwrap_or(true),
        logprobs: None,
        prompt_logprobs,
        token_ids: common.return_token_ids.unwrap_or(false),
        tokens_as_ids: common.return_tokens_as_token_ids.unwrap_or(false),
    })
}

/// `value` within `low..=high`.
pub fn int(value: Option<Int>, field: &str, low: i128, high: i128) -> Result<Option<i128>, ApiError> {
    match value {
        Some(Int(v)) if v < low || v > high => {
            Err(ApiError::invalid(field, format!("{field} must be an integer from {low} to {high}, got {v}")))
        }
        other => Ok(other.map(|v| v.0)),
    }
}

fn float(value: Option<f64>, field: &str, ok: impl Fn(f64) -> bool, allowed: &str) -> Result<Option<f32>, ApiError> {
    match value {
        // The narrowed value must pass too: 1e39 is finite as f64 only.
        Some(v) if !(v.is_finite() && (v as f32).is_finite() && ok(v)) => {
            Err(ApiError::invalid(field, format!("{field} must be a number {allowed}, got {v}")))
        }
        other => Ok(other.map(|v| v as f32)),
    }
}

/// A count of logprobs: -1 = the whole vocabulary where the server allows that.
pub fn logprob_count(value: Option<Int>, field: &str, model: &Model, options: &Options) -> Result<Option<u32>, ApiError> {
    let Some(Int(asked)) = value else { return Ok(None) };
    let vocab = i128::from(model.vocab);
    let most = if options.max_logprobs < 0 { vocab } else { i128::from(options.max_logprobs).min(vocab) };
    let wanted = if asked == -1 { vocab } else { asked };
    if wanted < 0 || wanted > most {
        let whole = if options.max_logprobs < 0 { ", or -1 for the whole vocabulary" } else { " (--max-logprobs)" };
        return Err(ApiError::invalid(field, format!("{field} must be an integer from 0 to {most}{whole}, got {asked}")));
    }
    Ok(Some(wanted as u32))
}

fn max_tokens(common: &Common) -> Result<(Option<u64>, &'static str), ApiError> {
    let fields = [
        ("max_tokens", common.max_tokens),
        ("max_completion_tokens", common.max_completion_tokens),
        ("max_output_tokens", common.max_output_tokens),
    ];
    let mut said: Option<(u64, &'static str)> = None;
    for (field, value) in fields {
        let Some(most) = int(value, field, 0, i128::from(u64::MAX))?.map(|most| most as u64) else { continue };
        match said {
            Some((other, name)) if other != most => {
                let message = format!("{name} ({other}) and {field} ({most}) are both given and differ; send one of them");
                return Err(ApiError::invalid(field, message));
            }
            Some(_) => {}
            None => said = Some((most, field)),
        }
    }
    Ok(said.map_or((None, "max_tokens"), |(most, field)| (Some(most), field)))
}

/// Refuses `max_tokens: 0`, which only text completions that return the prompt can mean.
pub fn needs_a_token(settings: &Settings) -> Result<(), ApiError> {
    let field = settings.max_tokens_field;
    if settings.max_tokens == Some(0) {
        return Err(ApiError::invalid(field, format!("{field} must be at least 1, got 0")));
    }
    Ok(())
}

fn sampling(common: &Common, defaults: &Defaults, vocab: u32) -> Result<SamplingParams, ApiError> {
    let temperature = float(common.temperature, "temperature", |v| (0.0..=2.0).contains(&v), "from 0 to 2")?;
    let top_p = float(common.top_p, "top_p", |v| (0.0..=1.0).contains(&v), "from 0 to 1")?;
    let min_p = float(common.min_p, "min_p", |v| (0.0..=1.0).contains(&v), "from 0 to 1")?;
    let penalty = |value, field| float(value, field, |v| (-2.0..=2.0).contains(&v), "from -2 to 2").map(|v| v.unwrap_or(0.0));
    // The f32 must stay above 0 as well: it divides logits.
    let repetition = float(common.repetition_penalty, "repetition_penalty", |v| v as f32 > 0.0 && v <= 10.0, "above 0, at most 10")?;
    // -1 is vLLM's "off".
    let top_k = int(common.top_k, "top_k", -1, i128::from(u32::MAX))?.map(|k| k.max(0) as u32);
    let seed = int(common.seed, "seed", i128::from(i64::MIN), i128::from(u64::MAX))?;
    let (mut top_p, mut top_k) = (top_p.unwrap_or(defaults.top_p), top_k.unwrap_or(defaults.top_k));
    if top_p == 0.0 {
        // The smallest set of tokens that reaches probability 0, never empty: the likeliest one.
        (top_p, top_k) = (1.0, 1);
    }
    Ok(SamplingParams {
        temperature: temperature.unwrap_or(defaults.temperature),
        top_k,
        top_p,
        min_p: min_p.unwrap_or(defaults.min_p),
        repetition_penalty: repetition.unwrap_or(defaults.repetition_penalty),
        frequency_penalty: penalty(common.frequency_penalty, "frequency_penalty")?,
        presence_penalty: penalty(common.presence_penalty, "presence_penalty")?,
        // Two's complement keeps negative seeds apart from each other.
        seed: seed.map_or_else(rand::random, |seed| seed as u64),
        logit_bias: logit_bias(common.logit_bias.as_ref(), vocab)?,
    })
}

fn logit_bias(map: Option<&Map<String, Value>>, vocab: u32) -> Result<Vec<(u32, f32)>, ApiError> {
    let refuse = |message: String| Err(ApiError::invalid("logit_bias", message));
    let mut out = Vec::new();
    for (key, value) in map.into_iter().flatten() {
        let shown: String = key.chars().take(40).collect();
        let Some(id) = key.parse::<u32>().ok().filter(|&id| id < vocab) else {
            return refuse(format!("logit_bias key \"{shown}\" is no token id; ids are 0 to {}", vocab.saturating_sub(1)));
        };
        match value.as_f64() {
            Some(bias) if (-BIAS..=BIAS).contains(&bias) => out.push((id, bias as f32)),
            _ => return refuse(format!("logit_bias of token {id} must be a number from -{BIAS} to {BIAS}, got {value}")),
        }
    }
    // Two spellings of one id ("7", "07"): the later one stands, as with equal keys.
    out.reverse();
    out.sort_by_key(|&(id, _)| id);
    out.dedup_by_key(|&mut (id, _)| id);
    Ok(out)
}

fn stops(stop: Option<&Strings>) -> Result<Vec<String>, ApiError> {
    let stops = stop.map_or(&[][..], |s| &s.0);
    if stops.len() > MOST_STOPS {
        return Err(ApiError::invalid("stop", format!("stop has {} strings; at most {MOST_STOPS} are allowed", stops.len())));
    }
    for (i, text) in stops.iter().enumerate() {
        if text.is_empty() {
            return Err(ApiError::invalid("stop", format!("stop[{i}] is empty: it would end every answer at once")));
        }
        if text.len() > LONGEST_STOP {
            return Err(ApiError::invalid("stop", format!("stop[{i}] has {} bytes; at most {LONGEST_STOP} are allowed", text.len())));
        }
    }
    Ok(stops.to_vec())
}

fn stop_ids(ids: Option<&[Int]>, vocab: u32) -> Result<Vec<u32>, ApiError> {
    let ids = ids.unwrap_or_default();
    if ids.len() > MOST_STOP_IDS {
        let message = format!("stop_token_ids has {} ids; at most {MOST_STOP_IDS} are allowed", ids.len());
        return Err(ApiError::invalid("stop_token_ids", message));
    }
    ids.iter().enumerate().map(|(i, &id)| token_id(id, vocab, "stop_token_ids", i)).collect()
}

/// A token id of the model, at `field[i]`.
pub fn token_id(Int(id): Int, vocab: u32, field: &str, i: usize) -> Result<u32, ApiError> {
    u32::try_from(id)
        .ok()
        .filter(|&id| id < vocab)
        .ok_or_else(|| ApiError::invalid(field, format!("{field}[{i}] is {id}; token ids are 0 to {}", vocab.saturating_sub(1))))
}
