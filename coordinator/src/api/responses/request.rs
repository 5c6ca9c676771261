//! What clients of responses send, brought into the shared shape: input items → chat messages.

use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::api::ApiError;
use crate::api::conversation::{Conversation, Message, Thinking, Tools, form};

/// `input`: a text, or a list of items.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum Input {
    Text(String),
    Items(Vec<Value>),
    Other(Value),
}

/// The fields of responses beside the shared ones.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct ResponsesRequest {
    input: Option<Input>,
    /// A system message before all others; part of the answer's echo.
    pub instructions: Option<Value>,
    /// Declared functions; part of the answer's echo.
    pub tools: Option<Vec<Value>>,
    /// Part of the answer's echo.
    pub tool_choice: Option<Value>,
    /// Part of the answer's echo.
    pub parallel_tool_calls: Option<bool>,
    /// Part of the answer's echo.
    pub reasoning: Option<Map<String, Value>>,
    /// Part of the answer's echo.
    pub text: Option<Map<String, Value>>,
    /// Part of the answer's echo.
    pub metadata: Option<Value>,
    chat_template_kwargs: Option<Map<String, Value>>,
    previous_response_id: Option<Value>,
    conversation: Option<Value>,
    prompt: Option<Value>,
    background: Option<bool>,
    truncation: Option<Value>,
}

impl ResponsesRequest {
    /// The conversation.
    pub fn conversation(self) -> Result<Conversation, ApiError> {
        self.refuse_stored()?;
        let mut messages = Vec::new();
        match self.instructions.as_ref().filter(|given| !given.is_null()) {
            None => {}
            Some(Value::String(text)) => messages.push(message("instructions", "system", json!(text))),
            Some(_) => return Err(ApiError::invalid("instructions", "instructions must be a string")),
        }
        match self.input {
            Some(Input::Text(text)) => messages.push(message("input", "user", json!(text))),
            Some(Input::Items(items)) => Items::default().read(items, &mut messages)?,
            None => {}
            Some(Input::Other(other)) if other.is_null() => {}
            Some(Input::Other(_)) => return Err(ApiError::invalid("input", "input must be a string or a list of items")),
        }
        let mut tools = Tools::default();
        for (i, tool) in self.tools.unwrap_or_default().into_iter().enumerate() {
            let path = format!("tools[{i}]");
            let kind = tool.get("type").and_then(Value::as_str).unwrap_or("none").to_owned();
            match tool {
                Value::Object(mut tool) if kind == "function" => {
                    tool.remove("type");
                    tools.declare(path, Value::Object(tool), "parameters")?;
                }
                _ => {
                    let message =
                        format!("{path}.type is \"{kind}\": this server runs no tools of its own; only \"function\" is supported");
                    return Err(ApiError::unsupported(format!("{path}.type"), message));
                }
            }
        }
        if self.parallel_tool_calls == Some(false) {
            tools.one_call();
        }
        tools.choose(self.tool_choice.as_ref())?;
        let kwargs = self.chat_template_kwargs.unwrap_or_default();
        let effort = match self.reasoning.as_ref().and_then(|reasoning| reasoning.get("effort")) {
            None | Some(Value::Null) => None,
            Some(Value::String(effort)) => Some(effort.as_str()),
            Some(_) => return Err(ApiError::invalid("reasoning.effort", "reasoning.effort must be a string")),
        };
        let format = self.text.as_ref().and_then(|text| text.get("format"));
        Ok(Conversation {
            messages,
            field: "input",
            tools,
            thinking: Thinking::effort(effort, "reasoning.effort")?.with_kwargs(&kwargs),
            kwargs,
            form: format.map(|format| form::response_format(format, "text.format")).transpose()?.flatten(),
            add_generation_prompt: None,
            continue_final_message: false,
        })
    }

    fn refuse_stored(&self) -> Result<(), ApiError> {
        let stored = [("previous_response_id", &self.previous_response_id), ("conversation", &self.conversation), ("prompt", &self.prompt)];
        for (field, value) in stored {
            if value.as_ref().is_some_and(|value| !value.is_null()) {
                return Err(ApiError::unsupported(
                    field,
                    format!("{field} is not supported: this server stores nothing; send the whole input"),
                ));
            }
        }
        if self.background == Some(true) {
            return Err(ApiError::unsupported("background", "background responses are not supported: this server stores nothing"));
        }
        if self.truncation.as_ref().is_some_and(|way| way == "auto") {
            return Err(ApiError::unsupported("truncation", "truncation \"auto\" is not supported; only \"disabled\" is"));
        }
        Ok(())
    }
}

fn message(path: &str, role: &str, content: Value) -> Message {
    let mut value = Map::new();
    value.insert("role".into(), json!(role));
    value.insert("content".into(), content);
    Message { path: path.to_owned(), value }
}

/// Joins what belongs to one turn of the assistant: its thought, its text and its calls come as items of their own.
#[derive(Default)]
struct Items {
    turn: Option<Message>,
}

impl Items {
    fn read(mut self, items: Vec<Value>, out: &mut Vec<Message>) -> Result<(), ApiError> {
        for (i, item) in items.into_iter().enumerate() {
            self.item(&format!("input[{i}]"), item, out)?;
        }
        out.extend(self.turn.take());
        Ok(())
    }

    fn turn(&mut self, path: &str) -> &mut Map<String, Value> {
        &mut self.turn.get_or_insert_with(|| message(path, "assistant", json!(""))).value
    }

    fn item(&mut self, path: &str, item: Value, out: &mut Vec<Message>) -> Result<(), ApiError> {
        let Value::Object(mut item) = item else { return Err(ApiError::invalid(path, format!("{path} must be an object"))) };
        let kind = match item.get("type") {
            None | Some(Value::Null) if item.contains_key("role") => "message".to_owned(),
            Some(Value::String(kind)) => kind.clone(),
            _ => return Err(ApiError::invalid(format!("{path}.type"), format!("{path}.type must be a string"))),
        };
        match kind.as_str() {
            "message" => {
                let assistant = item.get("role").is_some_and(|role| role == "assistant");
                let content = item.remove("content").unwrap_or(Value::Null);
                let has_text = self.turn.as_ref().is_some_and(|turn| turn.value.get("content") != Some(&json!("")));
                let has_calls = self.turn.as_ref().is_some_and(|turn| turn.value.contains_key("tool_calls"));
                if !assistant || has_text || has_calls {
                    out.extend(self.turn.take());
                }
                if assistant {
                    let text = text_of(&content, &format!("{path}.content"))?;
                    self.turn(path).insert("content".into(), json!(text));
                } else {
                    let mut value = Map::new();
                    value.insert("role".into(), item.remove("role").unwrap_or(Value::Null));
                    value.insert("content".into(), content);
                    out.push(Message { path: path.to_owned(), value });
                }
            }
            "reasoning" => {
                out.extend(self.turn.take());
                let parts = item.get("content").and_then(Value::as_array).filter(|parts| !parts.is_empty());
                let parts = parts.or_else(|| item.get("summary").and_then(Value::as_array));
                let texts: Vec<&str> = parts.into_iter().flatten().filter_map(|part| part.get("text")?.as_str()).collect();
                let thought = json!(texts.join("\n"));
                self.turn(path).insert("reasoning_content".into(), thought);
            }
            "function_call" => {
                let text = |key: &str| {
                    let field = format!("{path}.{key}");
                    let found = item.get(key).and_then(Value::as_str).map(str::to_owned);
                    found.ok_or_else(|| ApiError::invalid(field.clone(), format!("{field} must be a string")))
                };
                let call = json!({"id": text("call_id")?, "type": "function", "function": {"name": text("name")?, "arguments": text("arguments")?}});
                let calls = self.turn(path).entry("tool_calls").or_insert_with(|| json!([]));
                if let Some(calls) = calls.as_array_mut() {
                    calls.push(call);
                }
            }
            "function_call_output" => {
                out.extend(self.turn.take());
                let output = item.get("output").cloned().unwrap_or(Value::Null);
                let mut result = message(path, "tool", json!(text_of(&output, &format!("{path}.output"))?));
                let id = item.get("call_id").and_then(Value::as_str);
                let id = id.ok_or_else(|| ApiError::invalid(format!("{path}.call_id"), format!("{path}.call_id must be a string")))?;
                result.value.insert("tool_call_id".into(), json!(id));
                out.push(result);
            }
            other => {
                let message =
                    format!("{path} has type \"{other}\"; message, reasoning, function_call and function_call_output are supported");
                return Err(ApiError::unsupported(path, message));
            }
        }
        Ok(())
    }
}

/// Text of a string or of a list of text parts.
fn text_of(content: &Value, path: &str) -> Result<String, ApiError> {
    match content {
        Value::String(text) => Ok(text.clone()),
        Value::Array(parts) => parts
            .iter()
            .enumerate()
            .map(|(k, part)| {
                let known = matches!(part.get("type").and_then(Value::as_str), Some("output_text" | "input_text" | "text"));
                let text = part.get("text").and_then(Value::as_str).filter(|_| known);
                text.or_else(|| part.get("refusal")?.as_str()).ok_or_else(|| {
                    let path = format!("{path}[{k}]");
                    ApiError::unsupported(path.clone(), format!("{path} is no text part: this server takes text only"))
                })
            })
            .collect(),
        _ => Err(ApiError::invalid(path, format!("{path} must be a string or a list of text parts"))),
    }
}
