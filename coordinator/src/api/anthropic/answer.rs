//! Answers of messages: one object, or typed events.

use serde_json::{Value, json};

use super::error;
use crate::api::ApiError;
use crate::api::blocks::{self, Blocks, Kind, Step};
use crate::api::choice::{Delta, End, StopReason};
use crate::api::request_id::mint;
use crate::api::run::{Run, Whole};
use crate::api::sse::{Encoder, Frames};
use crate::api::state::App;

/// Stands where Anthropic signs its model's thoughts. Clients want a string there and send it back; nothing reads it.
const SIGNATURE: &str = "unsigned";

/// Writes one request's answer.
pub struct Answer {
    id: String,
    model: String,
    request_id: String,
    blocks: Blocks,
    /// The open block's kind, and how many have begun.
    open: Option<Kind>,
    begun: usize,
    end: Option<End>,
}

impl Answer {
    /// An answer with a new id.
    pub fn new(app: &App, request_id: String) -> Self {
        let model = app.model.name().to_owned();
        Self { id: mint("msg_"), model, request_id, blocks: Blocks::default(), open: None, begun: 0, end: None }
    }

    fn message(&self, content: &[Value], end: Option<&End>, usage: &Value) -> Value {
        let (reason, sequence) = stop(end);
        json!({
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": usage,
        })
    }

    /// The answer that is not streamed.
    pub fn whole(&mut self, run: &Run, wholes: Vec<Whole>) -> Value {
        let whole = wholes.into_iter().next().unwrap_or_default();
        let content: Vec<Value> = blocks::whole(whole.parts)
            .into_iter()
            .map(|block| match block.kind {
                Kind::Reasoning => json!({"type": "thinking", "thinking": block.text, "signature": SIGNATURE}),
                Kind::Text => json!({"type": "text", "text": block.text}),
                Kind::Call(name) => {
                    // Cut off by `max_tokens`, the arguments are no JSON; the stop reason tells.
                    let input: Value = serde_json::from_str(&block.text).unwrap_or_else(|_| json!({}));
                    json!({"type": "tool_use", "id": mint("toolu_"), "name": name, "input": input})
                }
            })
            .collect();
        self.message(&content, whole.end.as_ref(), &usage(run))
    }

    fn steps(&mut self, steps: Vec<Step>, out: &mut Frames) {
        for step in steps {
            match step {
                Step::Open(kind) => {
                    let block = match &kind {
                        Kind::Reasoning => json!({"type": "thinking", "thinking": "", "signature": ""}),
                        Kind::Text => json!({"type": "text", "text": ""}),
                        Kind::Call(name) => json!({"type": "tool_use", "id": mint("toolu_"), "name": name, "input": {}}),
                    };
                    let event = json!({"type": "content_block_start", "index": self.begun, "content_block": block});
                    out.event("content_block_start", &event);
                    self.begun += 1;
                    self.open = Some(kind);
                }
                Step::Add(text) => {
                    let delta = match &self.open {
                        Some(Kind::Reasoning) => json!({"type": "thinking_delta", "thinking": text}),
                        Some(Kind::Call(_)) => json!({"type": "input_json_delta", "partial_json": text}),
                        _ => json!({"type": "text_delta", "text": text}),
                    };
                    self.delta_event(&delta, out);
                }
                Step::Close => {
                    if self.open.take() == Some(Kind::Reasoning) {
                        self.delta_event(&json!({"type": "signature_delta", "signature": SIGNATURE}), out);
                    }
                    let event = json!({"type": "content_block_stop", "index": self.begun.saturating_sub(1)});
                    out.event("content_block_stop", &event);
                }
            }
        }
    }

    fn delta_event(&self, delta: &Value, out: &mut Frames) {
        let event = json!({"type": "content_block_delta", "index": self.begun.saturating_sub(1), "delta": delta});
        out.event("content_block_delta", &event);
    }
}

impl Encoder for Answer {
    fn open(&mut self, run: &Run, out: &mut Frames) {
        let message = self.message(&[], None, &usage(run));
        out.event("message_start", &json!({"type": "message_start", "message": message}));
    }

    fn delta(&mut self, _run: &Run, _choice: usize, delta: Delta, out: &mut Frames) {
        let mut steps = Vec::new();
        for part in delta.parts {
            self.blocks.part(part, &mut steps);
        }
        self.end = delta.end.or(self.end.take());
        self.steps(steps, out);
    }

    fn last(&mut self, run: &Run, out: &mut Frames) {
        let mut steps = Vec::new();
        self.blocks.close(&mut steps);
        self.steps(steps, out);
        let (reason, sequence) = stop(self.end.as_ref());
        let delta = json!({"stop_reason": reason, "stop_sequence": sequence});
        out.event("message_delta", &json!({"type": "message_delta", "delta": delta, "usage": usage(run)}));
        out.event("message_stop", &json!({"type": "message_stop"}));
    }

    fn failed(&mut self, _run: &Run, error: &ApiError, out: &mut Frames) {
        out.event("error", &error::body(error, &self.request_id));
    }

    fn silence(&mut self, out: &mut Frames) {
        out.event("ping", &json!({"type": "ping"}));
    }
}

/// `stop_reason` and `stop_sequence`.
fn stop(end: Option<&End>) -> (Option<&'static str>, Option<&str>) {
    match end {
        None => (None, None),
        Some(End { stop_reason: Some(StopReason::Text(text)), .. }) => (Some("stop_sequence"), Some(text)),
        Some(End { finish_reason: "tool_calls", .. }) => (Some("tool_use"), None),
        Some(End { finish_reason: "length", .. }) => (Some("max_tokens"), None),
        Some(_) => (Some("end_turn"), None),
    }
}

fn usage(run: &Run) -> Value {
    // Here a prompt's cached tokens are not part of its input tokens.
    let cached = run.cached_tokens();
    json!({
        "input_tokens": run.prompt_tokens().saturating_sub(cached),
        "output_tokens": run.completion_tokens(),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
    })
}
