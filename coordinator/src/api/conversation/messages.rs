//! Chat messages as the template wants them: checked, text only, tool arguments as mappings, one name for reasoning.

use serde_json::{Map, Value};

use crate::api::ApiError;

/// Content part types that this server has no use for.
const MEDIA: [&str; 14] = [
    "image",
    "image_url",
    "input_image",
    "image_embeds",
    "image_pil",
    "video",
    "video_url",
    "input_video",
    "audio",
    "audio_url",
    "input_audio",
    "file",
    "input_file",
    "document",
];

/// One message in chat completions' form.
#[derive(Clone, Debug)]
pub struct Message {
    /// Where it stands in the request (`messages[1]`), for errors.
    pub path: String,
    /// `{role, content, …}`.
    pub value: Map<String, Value>,
}

impl Message {
    /// The messages of chat completions.
    pub fn chat(messages: Option<Vec<Map<String, Value>>>) -> Vec<Self> {
        let message = |(i, value)| Self { path: format!("messages[{i}]"), value };
        messages.unwrap_or_default().into_iter().enumerate().map(message).collect()
    }
}

/// Checks `messages` and puts them in the template's form. `field` names them all; `reads_parts` is
/// [`crate::text::ChatTemplate::reads_parts`]: if not, lists of text parts become one string.
pub fn normalize(messages: Vec<Message>, field: &str, reads_parts: bool) -> Result<Vec<Value>, ApiError> {
    if messages.is_empty() {
        return Err(ApiError::invalid(field, format!("{field} is missing or empty; at least one message is needed")));
    }
    messages.into_iter().map(|message| one(&message.path, message.value, reads_parts).map(Value::Object)).collect()
}

fn one(path: &str, mut message: Map<String, Value>, reads_parts: bool) -> Result<Map<String, Value>, ApiError> {
    let field = |name: &str| format!("{path}.{name}");
    let role = match message.get("role") {
        Some(Value::String(role)) => match role.as_str() {
            "developer" => "system",
            "system" | "user" | "assistant" | "tool" => role,
            other => {
                let message = format!("{} is \"{other}\"; system, developer, user, assistant and tool are known", field("role"));
                return Err(ApiError::invalid(field("role"), message));
            }
        },
        _ => return Err(ApiError::invalid(field("role"), format!("{} must be a string", field("role")))),
    }
    .to_owned();
    reasoning(path, &mut message)?;
    let calls = tool_calls(path, &mut message)?;
    let may_be_absent = role == "assistant" && (calls || message.contains_key("reasoning_content"));
    let content = content(&field("content"), message.remove("content").unwrap_or(Value::Null), reads_parts, may_be_absent)?;
    message.insert("role".into(), Value::from(role));
    message.insert("content".into(), content);
    Ok(message)
}

/// `reasoning` and `reasoning_content` mean the same; the template reads the latter.
fn reasoning(path: &str, message: &mut Map<String, Value>) -> Result<(), ApiError> {
    let mut found = None;
    for name in ["reasoning_content", "reasoning"] {
        match message.remove(name) {
            None | Some(Value::Null) => {}
            Some(Value::String(text)) => found = found.or(Some(text)),
            Some(_) => {
                let param = format!("{path}.{name}");
                return Err(ApiError::invalid(param.clone(), format!("{param} must be a string or null")));
            }
        }
    }
    if let Some(text) = found {
        message.insert("reasoning_content".into(), Value::from(text));
    }
    Ok(())
}

/// Parses each call's `arguments` into a mapping. Returns whether there is any call.
fn tool_calls(path: &str, message: &mut Map<String, Value>) -> Result<bool, ApiError> {
    let bad = |path: String, needed: &str| Err(ApiError::invalid(path.clone(), format!("{path} must be {needed}")));
    let calls = match message.get_mut("tool_calls") {
        None => return Ok(false),
        Some(Value::Null) => {
            message.remove("tool_calls");
            return Ok(false);
        }
        Some(Value::Array(calls)) => calls,
        Some(_) => return bad(format!("{path}.tool_calls"), "a list"),
    };
    for (j, call) in calls.iter_mut().enumerate() {
        let path = format!("{path}.tool_calls[{j}]");
        let function = match call.get_mut("function") {
            Some(function) => function,
            None => call,
        };
        let Some(function) = function.as_object_mut() else { return bad(path, "an object with a function") };
        if !function.get("name").is_some_and(Value::is_string) {
            return bad(format!("{path}.function.name"), "a string");
        }
        let arguments = match function.get("arguments") {
            None | Some(Value::Null) => Value::Object(Map::new()),
            Some(Value::String(text)) if text.trim().is_empty() => Value::Object(Map::new()),
            Some(Value::String(text)) => serde_json::from_str(text).unwrap_or(Value::Null),
            Some(other) => other.clone(),
        };
        if !arguments.is_object() {
            return bad(format!("{path}.function.arguments"), "a JSON object, as text or as an object");
        }
        function.insert("arguments".into(), arguments);
    }
    Ok(!calls.is_empty())
}

fn content(path: &str, content: Value, reads_parts: bool, may_be_absent: bool) -> Result<Value, ApiError> {
    match content {
        Value::String(_) => Ok(content),
        Value::Null if may_be_absent => Ok(Value::from("")),
        Value::Null => Err(ApiError::invalid(path, format!("{path} is missing or null; a string or a list of text parts is needed"))),
        Value::Array(mut parts) => {
            for (k, part) in parts.iter_mut().enumerate() {
                check_part(&format!("{path}[{k}]"), part)?;
            }
            if reads_parts {
                return Ok(Value::Array(parts));
            }
            let texts: Vec<&str> = parts.iter().filter_map(|p| p.as_str().or_else(|| p.get("text")?.as_str())).collect();
            Ok(Value::from(texts.join("\n")))
        }
        _ => Err(ApiError::invalid(path, format!("{path} must be a string or a list of text parts"))),
    }
}

/// Accepts text under its several type names (renamed to `text`) and what the family's template reads in tool results.
fn check_part(path: &str, part: &mut Value) -> Result<(), ApiError> {
    if part.is_string() {
        return Ok(());
    }
    let Some(object) = part.as_object_mut() else {
        return Err(ApiError::invalid(path, format!("{path} must be an object with a type")));
    };
    let kind = object.get("type").and_then(Value::as_str).unwrap_or_default();
    match kind {
        "text" | "input_text" | "output_text" => {
            if !object.get("text").is_some_and(Value::is_string) {
                return Err(ApiError::invalid(format!("{path}.text"), format!("{path}.text must be a string")));
            }
            object.insert("type".into(), Value::from("text"));
            Ok(())
        }
        "tool_reference" => Ok(()),
        _ if object.contains_key("output") => Ok(()),
        kind if MEDIA.contains(&kind) => {
            Err(ApiError::unsupported(path, format!("{path} has type \"{kind}\": this server takes text only")))
        }
        kind => Err(ApiError::invalid(format!("{path}.type"), format!("{path}.type is \"{kind}\"; \"text\" is needed"))),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn run(messages: Value, reads_parts: bool) -> Result<Value, ApiError> {
        let messages = messages.as_array().unwrap().iter().map(|m| m.as_object().unwrap().clone()).collect();
        normalize(Message::chat(Some(messages)), "messages", reads_parts).map(Value::Array)
    }

    #[test]
    fn messages_are_brought_to_the_templates_form() {
        let got = run(
            json!([
                {"role": "developer", "content": "be brief"},
                {"role": "user", "content": [{"type": "input_text", "text": "a"}, "b"]},
                {"role": "assistant", "content": null, "reasoning": "hm",
                 "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"x\": 9007199254740993}"}}]},
                {"role": "tool", "tool_call_id": "1", "content": "ok"},
            ]),
            true,
        )
        .unwrap();
        assert_eq!(got[0]["role"], "system");
        assert_eq!(got[1]["content"], json!([{"type": "text", "text": "a"}, "b"]));
        assert_eq!((&got[2]["content"], &got[2]["reasoning_content"]), (&json!(""), &json!("hm")));
        assert_eq!(got[2]["tool_calls"][0]["function"]["arguments"], json!({"x": 9_007_199_254_740_993_u64}));
        let joined = run(json!([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]), false);
        assert_eq!(joined.unwrap()[0]["content"], "a\nb");
    }

    #[test]
    fn bad_messages_are_named() {
        let cases = [
            (json!([]), "messages"),
            (json!([{"content": "x"}]), "messages[0].role"),
            (json!([{"role": "king", "content": "x"}]), "messages[0].role"),
            (json!([{"role": "user", "content": null}]), "messages[0].content"),
            (json!([{"role": "user"}]), "messages[0].content"),
            (json!([{"role": "user", "content": 5}]), "messages[0].content"),
            (json!([{"role": "assistant", "content": null}]), "messages[0].content"),
            (json!([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]), "messages[0].content[0]"),
            (json!([{"role": "user", "content": [{"type": "text"}]}]), "messages[0].content[0].text"),
            (json!([{"role": "user", "content": [7]}]), "messages[0].content[0]"),
            (json!([{"role": "user", "content": [{"type": "smell"}]}]), "messages[0].content[0].type"),
            (json!([{"role": "assistant", "content": "", "reasoning": 5}]), "messages[0].reasoning"),
            (
                json!([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1"}}]}]),
                "messages[0].tool_calls[0].function.arguments",
            ),
            (json!([{"role": "assistant", "tool_calls": [{"function": {}}]}]), "messages[0].tool_calls[0].function.name"),
        ];
        for (messages, param) in cases {
            let error = run(messages.clone(), true).unwrap_err();
            assert_eq!((error.status.as_u16(), error.param.as_deref()), (400, Some(param)), "{messages}");
            assert!(error.message.contains(param), "{}", error.message);
        }
    }
}
