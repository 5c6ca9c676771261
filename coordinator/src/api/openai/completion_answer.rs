//! Text-completion answers: one object, or chunks.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use super::chat_answer::{ids, stop_reason, system_fingerprint};
use super::logprobs::{self, Columns, Names};
use super::usage::usage;
use crate::api::ApiError;
use crate::api::choice::{Delta, TokenOut};
use crate::api::request_id::mint;
use crate::api::run::{Run, Whole};
use crate::api::settings::Settings;
use crate::api::sse::{Encoder, Frames};
use crate::api::state::{App, unix_now};
use crate::text::{Part, Tokenizer};

/// Writes one request's answer.
pub struct Answer {
    id: String,
    created: u64,
    model: String,
    fingerprint: String,
    tokenizer: Arc<Tokenizer>,
    /// The request's settings.
    pub settings: Settings,
    echo: bool,
    prompt_only: bool,
    prompt_logprobs: bool,
    /// Characters of the echoed prompt, once sequence `i`'s first chunk is out.
    opened: Vec<Option<usize>>,
}

impl Answer {
    /// An answer with a new id. `echo` shows the prompt first; `prompt_only` shows nothing else; `prompt_logprobs` shows that field
    /// (the settings may ask the engine for them on behalf of `echo` alone).
    pub fn new(app: &App, settings: Settings, echo: bool, prompt_only: bool, prompt_logprobs: bool) -> Self {
        Self {
            id: mint("cmpl-"),
            created: unix_now(),
            model: app.model.name().to_owned(),
            fingerprint: system_fingerprint(&app.model.fingerprint),
            tokenizer: Arc::clone(&app.model.tokenizer),
            settings,
            echo,
            prompt_only,
            prompt_logprobs,
            opened: Vec::new(),
        }
    }

    fn envelope(&self, choices: Vec<Value>) -> Map<String, Value> {
        let mut map = Map::new();
        map.insert("id".into(), json!(self.id));
        map.insert("object".into(), json!("text_completion"));
        map.insert("created".into(), json!(self.created));
        map.insert("model".into(), json!(self.model));
        map.insert("system_fingerprint".into(), json!(self.fingerprint));
        map.insert("choices".into(), Value::Array(choices));
        map
    }

    fn usage(&self, run: &Run) -> Value {
        let mut usage = usage(run);
        if self.prompt_only {
            usage["completion_tokens"] = json!(0);
            usage["total_tokens"] = usage["prompt_tokens"].clone();
        }
        usage
    }

    /// Logprob columns of the echoed prompt (if any) and of `tokens`, whose text begins at character `base`.
    fn columns(&self, echoed: Option<(&Run, usize)>, tokens: &[TokenOut], base: usize) -> Value {
        if self.settings.logprobs.is_none() {
            return Value::Null;
        }
        let names = Names { tokenizer: &self.tokenizer, as_ids: self.settings.tokens_as_ids };
        let mut columns = Columns::default();
        let mut base = base;
        if let Some((run, i)) = echoed {
            base = columns.prompt(&run.prompt_of(i).ids, &run.choices[i].prompt_positions, names);
        }
        columns.generated(tokens, base, names);
        columns.into_json()
    }

    /// The answer that is not streamed.
    pub fn whole(&mut self, run: &Run, wholes: Vec<Whole>) -> Value {
        let choices = wholes.into_iter().enumerate().map(|(i, whole)| self.whole_choice(run, i, whole)).collect();
        let mut answer = self.envelope(choices);
        answer.insert("usage".into(), self.usage(run));
        Value::Object(answer)
    }

    fn whole_choice(&self, run: &Run, i: usize, mut whole: Whole) -> Value {
        if self.prompt_only {
            whole = Whole { end: whole.end, ..Whole::default() };
        }
        let prompt = run.prompt_of(i);
        let text = if self.echo { prompt.text.clone() + &whole.content() } else { whole.content() };
        let end = whole.end.as_ref();
        let mut choice = json!({
            "index": i,
            "text": text,
            "logprobs": self.columns(self.echo.then_some((run, i)), &whole.tokens, 0),
            "finish_reason": if self.prompt_only { Some("length") } else { end.map(|e| e.finish_reason) },
            "stop_reason": if self.prompt_only { Value::Null } else { stop_reason(end.and_then(|e| e.stop_reason.as_ref())) },
        });
        if self.prompt_logprobs {
            choice["prompt_logprobs"] = logprobs::prompt(&run.choices[i].prompt_positions, &self.tokenizer);
        }
        if self.settings.token_ids {
            choice["token_ids"] = ids(&whole.tokens);
            choice["prompt_token_ids"] = json!(prompt.ids);
        }
        choice
    }

    fn chunk(&self, run: &Run, choice: Value) -> Value {
        let mut chunk = self.envelope(vec![choice]);
        if self.settings.continuous_usage {
            chunk.insert("usage".into(), self.usage(run));
        } else if self.settings.include_usage {
            chunk.insert("usage".into(), Value::Null);
        }
        Value::Object(chunk)
    }
}

impl Encoder for Answer {
    fn delta(&mut self, run: &Run, i: usize, delta: Delta, out: &mut Frames) {
        self.opened.resize(run.choices.len(), None);
        let Delta { parts, mut tokens, end } = delta;
        let mut text = String::new();
        for part in parts {
            // Without a parser all text is content.
            if let Part::Content(part) = part {
                text.push_str(&part);
            }
        }
        if self.prompt_only {
            text.clear();
            tokens.clear();
        }
        let first = self.opened[i].is_none();
        let echoed = (first && self.echo).then_some((run, i));
        let base = *self.opened[i].get_or_insert_with(|| if self.echo { run.prompt_of(i).text.chars().count() } else { 0 });
        if echoed.is_some() {
            text.insert_str(0, &run.prompt_of(i).text);
        }
        let wants_tokens = self.settings.token_ids || self.settings.logprobs.is_some();
        let shows_ids = first && self.settings.token_ids;
        if !text.is_empty() || shows_ids || (wants_tokens && !tokens.is_empty()) {
            let logprobs = self.columns(echoed, &tokens, base);
            let mut choice = json!({"index": i, "text": text, "logprobs": logprobs, "finish_reason": null, "stop_reason": null});
            if self.settings.token_ids {
                choice["token_ids"] = ids(&tokens);
                if first {
                    choice["prompt_token_ids"] = json!(run.prompt_of(i).ids);
                }
            }
            out.data(&self.chunk(run, choice));
        }
        if let Some(end) = end {
            let reason = if self.prompt_only { "length" } else { end.finish_reason };
            let stop = if self.prompt_only { Value::Null } else { stop_reason(end.stop_reason.as_ref()) };
            let choice = json!({"index": i, "text": "", "logprobs": null, "finish_reason": reason, "stop_reason": stop});
            out.data(&self.chunk(run, choice));
        }
    }

    fn last(&mut self, run: &Run, out: &mut Frames) {
        if self.settings.include_usage {
            let mut chunk = self.envelope(Vec::new());
            chunk.insert("usage".into(), self.usage(run));
            out.data(&Value::Object(chunk));
        }
        out.done();
    }

    fn failed(&mut self, _run: &Run, error: &ApiError, out: &mut Frames) {
        out.data(&error.to_json());
    }
}
