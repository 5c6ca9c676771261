//! What clients of messages send, brought into the shared shape: content blocks → chat messages.

use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::api::ApiError;
use crate::api::conversation::tools::ToolChoice;
use crate::api::conversation::{Conversation, Message, Thinking, Tools, form};
use crate::api::request::{Common, Int, Strings};

/// The fields of `/v1/messages`; `count_tokens` takes those that make the prompt.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct MessagesRequest {
    /// The model's name.
    pub model: Option<String>,
    messages: Option<Vec<Map<String, Value>>>,
    system: Option<Value>,
    max_tokens: Option<Int>,
    stream: Option<bool>,
    temperature: Option<f64>,
    top_p: Option<f64>,
    top_k: Option<Int>,
    stop_sequences: Option<Vec<String>>,
    tools: Option<Vec<Value>>,
    tool_choice: Option<Value>,
    thinking: Option<Value>,
    output_config: Option<Value>,
    // Beside Anthropic's.
    seed: Option<Int>,
    min_p: Option<f64>,
}

impl MessagesRequest {
    /// The shared fields and the conversation. `generates`: tokens are to be generated, so there must be a `max_tokens`.
    pub fn split(self, generates: bool) -> Result<(Common, Conversation), ApiError> {
        if generates && self.max_tokens.is_none() {
            return Err(ApiError::invalid("max_tokens", "max_tokens is needed: an integer of at least 1"));
        }
        let stops = self.stop_sequences.filter(|stops| !stops.is_empty()).map(Strings);
        let common = Common {
            max_tokens: self.max_tokens,
            stream: self.stream,
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            min_p: self.min_p,
            seed: self.seed,
            stop: stops,
            ..Common::default()
        };
        let mut messages = Vec::new();
        if let Some(system) = self.system.filter(|system| !system.is_null()) {
            let content = text_of(&system, "system")?;
            messages.push(message("system", "system", json!(content)));
        }
        for (i, given) in self.messages.unwrap_or_default().into_iter().enumerate() {
            convert(&format!("messages[{i}]"), given, &mut messages)?;
        }
        // A last message of the assistant is the beginning of the answer.
        let open = messages
            .last()
            .is_some_and(|last| last.value.get("role") == Some(&json!("assistant")) && !last.value.contains_key("tool_calls"));
        let effort = self.output_config.as_ref().and_then(|config| config.get("effort")?.as_str());
        let format = self.output_config.as_ref().and_then(|config| config.get("format")).filter(|format| !format.is_null());
        let conversation = Conversation {
            messages,
            field: "messages",
            tools: tools(self.tools.unwrap_or_default(), self.tool_choice.as_ref())?,
            // Thinking is off here unless it is asked for.
            thinking: match &self.thinking {
                None | Some(Value::Null) => Thinking::OFF,
                thinking => Thinking::effort(effort, "output_config.effort")?.with_object(thinking.as_ref())?,
            },
            kwargs: Map::new(),
            form: format.map(|format| form::response_format(format, "output_config.format")).transpose()?.flatten(),
            add_generation_prompt: None,
            continue_final_message: open,
        };
        Ok((common, conversation))
    }
}

/// An error about a shared field under this face's name for it.
pub fn renamed(error: ApiError) -> ApiError {
    match error.param.as_deref() {
        Some("stop") => {
            ApiError { message: error.message.replacen("stop", "stop_sequences", 1), param: Some("stop_sequences".into()), ..error }
        }
        _ => error,
    }
}

fn tools(declared: Vec<Value>, choice: Option<&Value>) -> Result<Tools, ApiError> {
    let mut tools = Tools::default();
    for (i, tool) in declared.into_iter().enumerate() {
        let path = format!("tools[{i}]");
        match tool.get("type").and_then(Value::as_str) {
            None | Some("custom") => tools.declare(path, tool, "input_schema")?,
            Some(kind) => {
                let message = format!("{path}.type is \"{kind}\": this server runs no tools of its own; only \"custom\" is supported");
                return Err(ApiError::unsupported(format!("{path}.type"), message));
            }
        }
    }
    if let Some(choice) = choice.filter(|choice| !choice.is_null()) {
        let set = match choice.get("type").and_then(Value::as_str) {
            Some("auto") => ToolChoice::Auto,
            Some("any") => ToolChoice::Required,
            Some("none") => ToolChoice::None,
            Some("tool") => ToolChoice::Named(tools.declared(choice.get("name").and_then(Value::as_str), "tool_choice.name")?),
            _ => return Err(ApiError::invalid("tool_choice.type", "tool_choice.type must be \"auto\", \"any\", \"tool\" or \"none\"")),
        };
        if choice.get("disable_parallel_tool_use") == Some(&Value::Bool(true)) {
            tools.one_call();
        }
        tools.set_choice(set)?;
    }
    Ok(tools)
}

fn message(path: &str, role: &str, content: Value) -> Message {
    let mut value = Map::new();
    value.insert("role".into(), json!(role));
    value.insert("content".into(), content);
    Message { path: path.to_owned(), value }
}

/// One message → one or more chat messages: results of calls become messages of their own.
fn convert(path: &str, given: Map<String, Value>, out: &mut Vec<Message>) -> Result<(), ApiError> {
    let content = given.get("content").unwrap_or(&Value::Null);
    match given.get("role").and_then(Value::as_str) {
        Some("user") => user(path, content, out),
        Some("assistant") => assistant(path, content, out),
        Some("system") => {
            out.push(message(path, "system", json!(text_of(content, &format!("{path}.content"))?)));
            Ok(())
        }
        _ => Err(ApiError::invalid(format!("{path}.role"), format!("{path}.role must be \"user\" or \"assistant\""))),
    }
}

/// The blocks of a content, each with its path and type; a string is one text block.
fn blocks<'a>(path: &str, content: &'a Value) -> Result<Vec<(String, &'a str, &'a Value)>, ApiError> {
    let path = format!("{path}.content");
    match content {
        Value::String(_) => Ok(vec![(path, "text", content)]),
        Value::Array(list) => list
            .iter()
            .enumerate()
            .map(|(k, block)| {
                let path = format!("{path}[{k}]");
                match block.get("type").and_then(Value::as_str) {
                    Some(kind) => Ok((path, kind, block)),
                    None => Err(ApiError::invalid(format!("{path}.type"), format!("{path}.type must be a string"))),
                }
            })
            .collect(),
        _ => Err(ApiError::invalid(path.clone(), format!("{path} must be a string or a list of content blocks"))),
    }
}

fn refuse(path: &str, kind: &str) -> ApiError {
    ApiError::unsupported(path, format!("{path} has type \"{kind}\": this server takes text, thinking and tool blocks only"))
}

fn string<'a>(block: &'a Value, key: &str, path: &str) -> Result<&'a str, ApiError> {
    let found = if block.is_string() { block.as_str() } else { block.get(key).and_then(Value::as_str) };
    found.ok_or_else(|| ApiError::invalid(format!("{path}.{key}"), format!("{path}.{key} must be a string")))
}

/// Text of a string or of a list of text blocks, one line apart.
fn text_of(content: &Value, path: &str) -> Result<String, ApiError> {
    match content {
        Value::Null => Ok(String::new()),
        Value::String(text) => Ok(text.clone()),
        Value::Array(list) => {
            let text = |(k, block): (usize, &Value)| {
                let path = format!("{path}[{k}]");
                match block.get("type").and_then(Value::as_str) {
                    Some("text") => string(block, "text", &path).map(str::to_owned),
                    kind => Err(refuse(&path, kind.unwrap_or("none"))),
                }
            };
            Ok(list.iter().enumerate().map(text).collect::<Result<Vec<String>, _>>()?.join("\n"))
        }
        _ => Err(ApiError::invalid(path, format!("{path} must be a string or a list of text blocks"))),
    }
}

fn user(path: &str, content: &Value, out: &mut Vec<Message>) -> Result<(), ApiError> {
    let mut texts: Vec<&str> = Vec::new();
    let flush = |texts: &mut Vec<&str>, out: &mut Vec<Message>| {
        if !texts.is_empty() {
            out.push(message(path, "user", json!(texts.join("\n"))));
            texts.clear();
        }
    };
    let all = blocks(path, content)?;
    if all.is_empty() {
        return Err(ApiError::invalid(format!("{path}.content"), format!("{path}.content is empty; at least one block is needed")));
    }
    for (path, kind, block) in all {
        match kind {
            "text" => texts.push(string(block, "text", &path)?),
            "tool_result" => {
                flush(&mut texts, out);
                let id = string(block, "tool_use_id", &path)?;
                let mut result =
                    message(&path, "tool", json!(text_of(block.get("content").unwrap_or(&Value::Null), &format!("{path}.content"))?));
                result.value.insert("tool_call_id".into(), json!(id));
                out.push(result);
            }
            other => return Err(refuse(&path, other)),
        }
    }
    flush(&mut texts, out);
    Ok(())
}

fn assistant(path: &str, content: &Value, out: &mut Vec<Message>) -> Result<(), ApiError> {
    let (mut texts, mut thoughts, mut calls) = (Vec::new(), Vec::new(), Vec::new());
    for (path, kind, block) in blocks(path, content)? {
        match kind {
            "text" => texts.push(string(block, "text", &path)?),
            "thinking" => thoughts.push(string(block, "thinking", &path)?),
            // Not ours, so not readable.
            "redacted_thinking" => {}
            "tool_use" => {
                let (id, name) = (string(block, "id", &path)?, string(block, "name", &path)?);
                let input = block.get("input").cloned().unwrap_or_else(|| json!({}));
                if !input.is_object() {
                    return Err(ApiError::invalid(format!("{path}.input"), format!("{path}.input must be an object")));
                }
                calls.push(json!({"id": id, "type": "function", "function": {"name": name, "arguments": input}}));
            }
            other => return Err(refuse(&path, other)),
        }
    }
    let mut value = message(path, "assistant", json!(texts.join("\n")));
    if !thoughts.is_empty() {
        value.value.insert("reasoning_content".into(), json!(thoughts.join("\n")));
    }
    if !calls.is_empty() {
        value.value.insert("tool_calls".into(), Value::Array(calls));
    }
    out.push(value);
    Ok(())
}
