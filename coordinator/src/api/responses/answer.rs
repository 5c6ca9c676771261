//! Answers of responses: one object, or typed events. Each block of the answer is an output item.

use serde_json::{Map, Value, json};

use super::request::ResponsesRequest;
use crate::api::ApiError;
use crate::api::blocks::{self, Block, Blocks, Kind, Step};
use crate::api::choice::{Delta, End};
use crate::api::request_id::mint;
use crate::api::run::{Run, Whole};
use crate::api::settings::Settings;
use crate::api::sse::{Encoder, Frames};
use crate::api::state::{App, unix_now};

/// An item that is being written.
struct Open {
    block: Block,
    id: String,
    /// Of a call.
    call_id: String,
}

/// Writes one request's answer.
pub struct Answer {
    /// What the answer says of the request, and who it is.
    envelope: Map<String, Value>,
    blocks: Blocks,
    open: Option<Open>,
    /// Items that are complete.
    output: Vec<Value>,
    end: Option<End>,
    /// Number of the next event.
    sequence: u64,
}

impl Answer {
    /// An answer with a new id.
    pub fn new(app: &App, request: &ResponsesRequest, settings: &Settings) -> Self {
        let envelope = json!({
            "id": mint("resp_"),
            "object": "response",
            "created_at": unix_now(),
            "status": "in_progress",
            "background": false,
            "error": null,
            "incomplete_details": null,
            "instructions": request.instructions,
            "max_output_tokens": settings.max_tokens,
            "metadata": request.metadata.clone().unwrap_or_else(|| json!({})),
            "model": app.model.name(),
            "output": [],
            "parallel_tool_calls": request.parallel_tool_calls.unwrap_or(true),
            "previous_response_id": null,
            "reasoning": request.reasoning.clone().map_or_else(|| json!({"effort": null, "summary": null}), Value::Object),
            "store": false,
            "temperature": settings.sampling.temperature,
            "text": request.text.clone().map_or_else(|| json!({"format": {"type": "text"}}), Value::Object),
            "tool_choice": request.tool_choice.clone().filter(|choice| !choice.is_null()).unwrap_or_else(|| json!("auto")),
            "tools": request.tools.clone().unwrap_or_default(),
            "top_p": settings.sampling.top_p,
            "truncation": "disabled",
            "usage": null,
        });
        let envelope = envelope.as_object().cloned().unwrap_or_default();
        Self { envelope, blocks: Blocks::default(), open: None, output: Vec::new(), end: None, sequence: 0 }
    }

    /// The answer that is not streamed.
    pub fn whole(&mut self, run: &Run, wholes: Vec<Whole>) -> Value {
        let whole = wholes.into_iter().next().unwrap_or_default();
        self.end = whole.end;
        let last = self.status();
        let mut blocks = blocks::whole(whole.parts).into_iter().peekable();
        while let Some(block) = blocks.next() {
            let status = if blocks.peek().is_none() { last } else { "completed" };
            self.output.push(begin(block).item(status));
        }
        self.response(run)
    }

    /// `completed`, or `incomplete` where the tokens ran out.
    fn status(&self) -> &'static str {
        if self.end.as_ref().is_some_and(|end| end.finish_reason == "length") { "incomplete" } else { "completed" }
    }

    /// The whole object as it is at the end.
    fn response(&self, run: &Run) -> Value {
        let mut response = self.envelope.clone();
        let status = self.status();
        response.insert("status".into(), json!(status));
        if status == "incomplete" {
            response.insert("incomplete_details".into(), json!({"reason": "max_output_tokens"}));
        }
        response.insert("output".into(), json!(self.output));
        response.insert("usage".into(), usage(run));
        Value::Object(response)
    }

    fn event(&mut self, name: &str, mut value: Value, out: &mut Frames) {
        if let Some(object) = value.as_object_mut() {
            object.insert("type".into(), json!(name));
            object.insert("sequence_number".into(), json!(self.sequence));
        }
        self.sequence += 1;
        out.event(name, &value);
    }

    fn step(&mut self, step: Step, out: &mut Frames) {
        let index = self.output.len();
        match step {
            Step::Open(kind) => {
                let open = begin(Block { kind: kind.clone(), text: String::new() });
                let (item, id) = (open.item("in_progress"), open.id.clone());
                self.open = Some(open);
                self.event("response.output_item.added", json!({"output_index": index, "item": item}), out);
                if let Some(part) = part(&kind, "") {
                    let event = json!({"item_id": id, "output_index": index, "content_index": 0, "part": part});
                    self.event("response.content_part.added", event, out);
                }
            }
            Step::Add(text) => {
                let Some(open) = &mut self.open else { return };
                open.block.text.push_str(&text);
                let (name, event) = match open.block.kind {
                    Kind::Reasoning => (
                        "response.reasoning_text.delta",
                        json!({"item_id": open.id, "output_index": index, "content_index": 0, "delta": text}),
                    ),
                    Kind::Text => (
                        "response.output_text.delta",
                        json!({"item_id": open.id, "output_index": index, "content_index": 0, "delta": text, "logprobs": []}),
                    ),
                    Kind::Call(_) => {
                        ("response.function_call_arguments.delta", json!({"item_id": open.id, "output_index": index, "delta": text}))
                    }
                };
                self.event(name, event, out);
            }
            Step::Close => self.close(index, out),
        }
    }

    /// Ends the open item. It is incomplete if the whole answer is, since then it is the last one.
    fn close(&mut self, index: usize, out: &mut Frames) {
        let Some(open) = self.open.take() else { return };
        let (id, text) = (open.id.clone(), open.block.text.clone());
        match &open.block.kind {
            Kind::Reasoning => {
                let event = json!({"item_id": id, "output_index": index, "content_index": 0, "text": text});
                self.event("response.reasoning_text.done", event, out);
            }
            Kind::Text => {
                let event = json!({"item_id": id, "output_index": index, "content_index": 0, "text": text, "logprobs": []});
                self.event("response.output_text.done", event, out);
            }
            Kind::Call(name) => {
                let event = json!({"item_id": id, "output_index": index, "name": name, "arguments": text});
                self.event("response.function_call_arguments.done", event, out);
            }
        }
        if let Some(part) = part(&open.block.kind, &text) {
            let event = json!({"item_id": id, "output_index": index, "content_index": 0, "part": part});
            self.event("response.content_part.done", event, out);
        }
        let item = open.item(self.status());
        self.output.push(item.clone());
        self.event("response.output_item.done", json!({"output_index": index, "item": item}), out);
    }
}

impl Encoder for Answer {
    fn open(&mut self, _run: &Run, out: &mut Frames) {
        for name in ["response.created", "response.in_progress"] {
            let response = Value::Object(self.envelope.clone());
            self.event(name, json!({"response": response}), out);
        }
    }

    fn delta(&mut self, _run: &Run, _choice: usize, delta: Delta, out: &mut Frames) {
        let mut steps = Vec::new();
        for part in delta.parts {
            self.blocks.part(part, &mut steps);
        }
        steps.into_iter().for_each(|step| self.step(step, out));
        self.end = delta.end.or(self.end.take());
    }

    fn last(&mut self, run: &Run, out: &mut Frames) {
        let mut steps = Vec::new();
        self.blocks.close(&mut steps);
        steps.into_iter().for_each(|step| self.step(step, out));
        let name = format!("response.{}", self.status());
        let response = self.response(run);
        self.event(&name, json!({"response": response}), out);
    }

    fn failed(&mut self, run: &Run, error: &ApiError, out: &mut Frames) {
        self.event("error", json!({"code": error.code, "message": error.message, "param": error.param}), out);
        let Value::Object(mut response) = self.response(run) else { return };
        response.insert("status".into(), json!("failed"));
        response.insert("error".into(), json!({"code": error.code.unwrap_or("server_error"), "message": error.message}));
        self.event("response.failed", json!({"response": response}), out);
    }
}

fn begin(block: Block) -> Open {
    let id = mint(match block.kind {
        Kind::Reasoning => "rs_",
        Kind::Text => "msg_",
        Kind::Call(_) => "fc_",
    });
    Open { block, id, call_id: mint("call_") }
}

impl Open {
    /// The item as it is now.
    fn item(&self, status: &str) -> Value {
        let Self { block, id, call_id } = self;
        // An item that has just begun has no content yet.
        let content: Vec<Value> = if block.text.is_empty() { Vec::new() } else { part(&block.kind, &block.text).into_iter().collect() };
        match &block.kind {
            Kind::Reasoning => json!({"id": id, "type": "reasoning", "summary": [], "content": content, "status": status}),
            Kind::Text => json!({"id": id, "type": "message", "role": "assistant", "status": status, "content": content}),
            Kind::Call(name) => {
                json!({"id": id, "type": "function_call", "call_id": call_id, "name": name, "arguments": block.text, "status": status})
            }
        }
    }
}

/// The one content part of a text item.
fn part(kind: &Kind, text: &str) -> Option<Value> {
    match kind {
        Kind::Reasoning => Some(json!({"type": "reasoning_text", "text": text})),
        Kind::Text => Some(json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []})),
        Kind::Call(_) => None,
    }
}

fn usage(run: &Run) -> Value {
    let (input, output) = (run.prompt_tokens(), run.completion_tokens());
    json!({
        "input_tokens": input,
        "input_tokens_details": {"cached_tokens": run.cached_tokens(), "cache_write_tokens": 0},
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": run.reasoning_tokens()},
        "total_tokens": input + output,
    })
}
