//! Chat answers: one object, or chunks.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::logprobs::{self, Names};
use super::usage::usage;
use crate::api::ApiError;
use crate::api::choice::{Delta, StopReason, TokenOut};
use crate::api::request_id::mint;
use crate::api::run::{Run, Whole};
use crate::api::settings::Settings;
use crate::api::sse::{Encoder, Frames};
use crate::api::state::{App, ReasoningFields, unix_now};
use crate::text::{Part, Tokenizer};

/// Writes one request's answer.
pub struct Answer {
    id: String,
    created: u64,
    model: String,
    fingerprint: String,
    tokenizer: Arc<Tokenizer>,
    fields: ReasoningFields,
    /// The request's settings.
    pub settings: Settings,
    /// For each sequence: its first chunk is out, and so many calls have begun.
    opened: Vec<Option<usize>>,
}

impl Answer {
    /// An answer with a new id.
    pub fn new(app: &App, settings: Settings) -> Self {
        Self {
            id: mint("chatcmpl-"),
            created: unix_now(),
            model: app.model.name().to_owned(),
            fingerprint: system_fingerprint(&app.model.fingerprint),
            tokenizer: Arc::clone(&app.model.tokenizer),
            fields: app.options.reasoning_fields,
            opened: Vec::new(),
            settings,
        }
    }

    fn names(&self) -> Names<'_> {
        Names { tokenizer: &self.tokenizer, as_ids: self.settings.tokens_as_ids }
    }

    fn envelope(&self, object: &str, choices: Vec<Value>) -> Map<String, Value> {
        let mut map = Map::new();
        map.insert("id".into(), json!(self.id));
        map.insert("object".into(), json!(object));
        map.insert("created".into(), json!(self.created));
        map.insert("model".into(), json!(self.model));
        map.insert("system_fingerprint".into(), json!(self.fingerprint));
        map.insert("choices".into(), Value::Array(choices));
        map
    }

    fn insert_reasoning(&self, map: &mut Map<String, Value>, text: &Value) {
        if self.fields.reasoning_content {
            map.insert("reasoning_content".into(), text.clone());
        }
        if self.fields.reasoning {
            map.insert("reasoning".into(), text.clone());
        }
    }

    /// The answer that is not streamed.
    pub fn whole(&mut self, run: &Run, wholes: Vec<Whole>) -> Value {
        let choices = wholes.into_iter().enumerate().map(|(i, whole)| self.whole_choice(run, i, whole)).collect();
        let mut answer = self.envelope("chat.completion", choices);
        answer.insert("usage".into(), usage(run));
        if self.settings.prompt_logprobs.is_some() {
            answer.insert("prompt_logprobs".into(), logprobs::prompt(&run.choices[0].prompt_positions, &self.tokenizer));
        }
        if self.settings.token_ids {
            answer.insert("prompt_token_ids".into(), json!(run.prompts[0].ids));
        }
        Value::Object(answer)
    }

    fn whole_choice(&self, run: &Run, i: usize, whole: Whole) -> Value {
        let mut message = Map::new();
        message.insert("role".into(), json!("assistant"));
        let (content, reasoning, calls) = (whole.content(), whole.reasoning(), whole.calls());
        message.insert("content".into(), if content.is_empty() && !calls.is_empty() { Value::Null } else { json!(content) });
        let reasoning = if reasoning.is_empty() { Value::Null } else { json!(reasoning) };
        self.insert_reasoning(&mut message, &reasoning);
        message.insert("refusal".into(), Value::Null);
        if !calls.is_empty() {
            let call = |(name, arguments): &(&str, String)| json!({"id": mint("call_"), "type": "function", "function": {"name": name, "arguments": arguments}});
            message.insert("tool_calls".into(), calls.iter().map(call).collect());
        }
        let end = whole.end.as_ref();
        let mut choice = json!({
            "index": i,
            "message": message,
            "logprobs": self.logprobs(&whole.tokens),
            "finish_reason": end.map(|e| e.finish_reason),
            "stop_reason": stop_reason(end.and_then(|e| e.stop_reason.as_ref())),
        });
        if self.settings.token_ids {
            choice["token_ids"] = ids(&whole.tokens);
            choice["prompt_token_ids"] = json!(run.prompt_of(i).ids);
        }
        choice
    }

    fn logprobs(&self, tokens: &[TokenOut]) -> Value {
        if self.settings.logprobs.is_some() { logprobs::chat(tokens, self.names()) } else { Value::Null }
    }

    fn chunk(&self, run: &Run, choices: Vec<Value>) -> Value {
        let mut chunk = self.envelope("chat.completion.chunk", choices);
        if self.settings.continuous_usage {
            chunk.insert("usage".into(), usage(run));
        } else if self.settings.include_usage {
            chunk.insert("usage".into(), Value::Null);
        }
        Value::Object(chunk)
    }
}

fn choice_chunk(i: usize, delta: Map<String, Value>) -> Value {
    json!({"index": i, "delta": delta, "logprobs": null, "finish_reason": null})
}

impl Encoder for Answer {
    fn delta(&mut self, run: &Run, i: usize, delta: Delta, out: &mut Frames) {
        self.opened.resize(run.choices.len(), None);
        let mut chunks = Vec::new();
        if self.opened[i].is_none() {
            self.opened[i] = Some(0);
            let first = json!({"role": "assistant", "content": ""});
            let mut chunk = choice_chunk(i, first.as_object().cloned().unwrap_or_default());
            if self.settings.token_ids {
                chunk["prompt_token_ids"] = json!(run.prompt_of(i).ids);
            }
            out.data(&self.chunk(run, vec![chunk]));
        }
        for part in delta.parts {
            let mut map = Map::new();
            match part {
                Part::Content(text) => {
                    map.insert("content".into(), Value::from(text));
                }
                Part::Reasoning(text) => self.insert_reasoning(&mut map, &Value::from(text)),
                Part::Call(name) => {
                    let index = self.opened[i].map_or(0, |begun| begun);
                    self.opened[i] = Some(index + 1);
                    let function = json!({"name": name, "arguments": ""});
                    map.insert(
                        "tool_calls".into(),
                        json!([{"index": index, "id": mint("call_"), "type": "function", "function": function}]),
                    );
                }
                Part::Arguments(text) => {
                    let index = self.opened[i].map_or(0, |begun| begun.saturating_sub(1));
                    map.insert("tool_calls".into(), json!([{"index": index, "function": {"arguments": text}}]));
                }
            }
            chunks.push(choice_chunk(i, map));
        }
        // Tokens whose text is still held go out all the same when their ids or logprobs are wanted.
        let wanted = self.settings.token_ids || self.settings.logprobs.is_some();
        if wanted && !delta.tokens.is_empty() {
            if chunks.is_empty() {
                chunks.push(choice_chunk(i, Map::new()));
            }
            if let Some(chunk) = chunks.last_mut() {
                chunk["logprobs"] = self.logprobs(&delta.tokens);
                if self.settings.token_ids {
                    chunk["token_ids"] = ids(&delta.tokens);
                }
            }
        }
        if let Some(end) = delta.end {
            let mut chunk = choice_chunk(i, Map::new());
            chunk["finish_reason"] = json!(end.finish_reason);
            chunk["stop_reason"] = stop_reason(end.stop_reason.as_ref());
            chunks.push(chunk);
        }
        for chunk in chunks {
            out.data(&self.chunk(run, vec![chunk]));
        }
    }

    fn last(&mut self, run: &Run, out: &mut Frames) {
        if self.settings.include_usage {
            let mut chunk = self.envelope("chat.completion.chunk", Vec::new());
            chunk.insert("usage".into(), usage(run));
            out.data(&Value::Object(chunk));
        }
        out.done();
    }

    fn failed(&mut self, _run: &Run, error: &ApiError, out: &mut Frames) {
        out.data(&error.to_json());
    }
}

/// The ids of `tokens`.
pub fn ids(tokens: &[TokenOut]) -> Value {
    tokens.iter().map(|t| t.event.id).collect()
}

/// vLLM's `stop_reason`: the stop string, the stop id, or null.
pub fn stop_reason(reason: Option<&StopReason>) -> Value {
    match reason {
        None => Value::Null,
        Some(StopReason::Text(text)) => json!(text),
        Some(StopReason::Id(id)) => json!(id),
    }
}

/// Short, stable name of the weights.
pub fn system_fingerprint(fingerprint: &str) -> String {
    format!("fp_{}", fingerprint.chars().filter(char::is_ascii_alphanumeric).take(12).collect::<String>())
}
