//! `POST /v1/chat/completions`: row 1 of the life of one token; the answer (row 12) is `chat_answer`.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use serde_json::{Map, Value};

use super::chat_answer::Answer;
use super::request::{ChatOnly, Common};
use super::start::{Plan, start};
use super::{messages, validate};
use crate::api::request_id::RequestId;
use crate::api::run::RunPrompt;
use crate::api::state::App;
use crate::api::{ApiError, body, sse};
use crate::text::ChatTemplate;
use crate::text::reasoning::prompt_opens_reasoning;

/// The route.
pub async fn handle(
    State(app): State<Arc<App>>,
    Extension(RequestId(request_id)): Extension<RequestId>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let bytes = body::read(&headers, body, app.options.body_limit).await?;
    let size = bytes.len();
    let (common, chat) = body::off_thread(size, move || Ok((body::parse::<Common>(&bytes)?, body::parse::<ChatOnly>(&bytes)?))).await?;
    app.check_model(common.model.as_deref())?;

    let mut settings = validate::settings(&common, &app.model, &app.options)?;
    validate::needs_a_token(&settings)?;
    settings.logprobs = logprobs(&chat, &app)?;
    let renderer = Arc::clone(&app);
    let prompt = body::off_thread(size, move || render(&renderer, Rendering::from(chat))).await?;
    let reasoning = Some(prompt_opens_reasoning(&prompt));
    let ids = app.encode(prompt.clone(), false).await?;
    let prompts = vec![RunPrompt { ids, text: prompt }];
    let mut run = start(&app, Plan { settings: &settings, prompts, field: "messages", reasoning, request_id })?;

    let mut answer = Answer::new(&app, settings);
    if answer.settings.stream {
        return Ok(sse::response(run, answer, app.options.keep_alive));
    }
    let wholes = run.collect().await?;
    Ok(Json(answer.whole(&run, wholes)).into_response())
}

fn logprobs(chat: &ChatOnly, app: &App) -> Result<Option<u32>, ApiError> {
    let top = validate::logprob_count(chat.top_logprobs, "top_logprobs", &app.model, &app.options)?;
    match (chat.logprobs.unwrap_or(false), top) {
        (true, top) => Ok(Some(top.unwrap_or(0))),
        (false, Some(top)) if top > 0 => Err(ApiError::invalid("top_logprobs", "top_logprobs needs logprobs: true")),
        (false, _) => Ok(None),
    }
}

/// What the template is given; `/tokenize` takes the same fields.
pub struct Rendering {
    /// The conversation.
    pub messages: Vec<Map<String, Value>>,
    /// Declared tools.
    pub tools: Option<Vec<Value>>,
    /// Whether and how tools are to be used.
    pub tool_choice: Option<Value>,
    /// How hard to think.
    pub reasoning_effort: Option<String>,
    /// Further names for the template.
    pub kwargs: Option<Map<String, Value>>,
    /// End with the assistant's opening; the default unless the last message is continued.
    pub add_generation_prompt: Option<bool>,
    /// Leave the last message open.
    pub continue_final_message: bool,
}

impl From<ChatOnly> for Rendering {
    fn from(chat: ChatOnly) -> Self {
        Self {
            messages: chat.messages.unwrap_or_default(),
            tools: chat.tools,
            tool_choice: chat.tool_choice,
            reasoning_effort: chat.reasoning_effort,
            kwargs: chat.chat_template_kwargs,
            add_generation_prompt: chat.add_generation_prompt,
            continue_final_message: chat.continue_final_message.unwrap_or(false),
        }
    }
}

/// Messages → prompt text.
pub fn render(app: &App, rendering: Rendering) -> Result<String, ApiError> {
    let Some(template) = &app.model.template else {
        return Err(ApiError::unsupported("messages", crate::text::TemplateError::Absent.to_string()));
    };
    let messages = messages::normalize(rendering.messages, template.reads_parts())?;
    let tools = tools(rendering.tools, rendering.tool_choice)?;
    let kwargs = kwargs(rendering.kwargs, rendering.reasoning_effort)?;
    let open = rendering.continue_final_message;
    let opening = rendering.add_generation_prompt.unwrap_or(!open);
    if open && opening {
        let message = "continue_final_message and add_generation_prompt exclude each other";
        return Err(ApiError::invalid("continue_final_message", message));
    }
    let messages = Value::Array(messages);
    let prompt = template.render(&messages, tools.as_ref(), opening, &kwargs).map_err(|e| ApiError::invalid("messages", e.to_string()))?;
    if open { continued(prompt, &messages, template) } else { Ok(prompt) }
}

/// Cuts a prompt behind the last message's own text, so that the model goes on writing it.
fn continued(mut prompt: String, messages: &Value, template: &ChatTemplate) -> Result<String, ApiError> {
    let refuse = |what: &str| ApiError::invalid("continue_final_message", format!("continue_final_message: {what}"));
    let last = messages.as_array().and_then(|m| m.last()).and_then(|m| m.get("content"));
    let text = last.and_then(Value::as_str).ok_or_else(|| refuse("the last message's content must be a string"))?;
    let found = prompt.rfind(text.trim()).ok_or_else(|| refuse(&format!("{template:?} does not show the last message's text")))?;
    // A template may strip the text's trailing white space: keep it where it does not.
    let end = if prompt[found..].starts_with(text.trim_start()) { text.trim_start().len() } else { text.trim().len() };
    prompt.truncate(found + end);
    Ok(prompt)
}

fn tools(tools: Option<Vec<Value>>, choice: Option<Value>) -> Result<Option<Value>, ApiError> {
    let tools = tools.unwrap_or_default();
    for (i, tool) in tools.iter().enumerate() {
        let function = tool.get("function").unwrap_or(tool);
        if !function.get("name").is_some_and(Value::is_string) {
            let param = format!("tools[{i}].function.name");
            return Err(ApiError::invalid(param.clone(), format!("{param} must be a string")));
        }
    }
    match choice {
        None | Some(Value::Null) => {}
        Some(Value::String(choice)) if choice == "auto" => {}
        Some(Value::String(choice)) if choice == "none" => return Ok(None),
        Some(_) => {
            let message = "tool_choice must be \"auto\" or \"none\": this server cannot force a tool call";
            return Err(ApiError::unsupported("tool_choice", message));
        }
    }
    Ok((!tools.is_empty()).then_some(Value::Array(tools)))
}

/// The template's further names. `reasoning_effort` is mapped to the three levels that the family knows.
fn kwargs(kwargs: Option<Map<String, Value>>, effort: Option<String>) -> Result<Map<String, Value>, ApiError> {
    let mut kwargs = kwargs.unwrap_or_default();
    for reserved in ["messages", "tools", "add_generation_prompt", "continue_final_message"] {
        if kwargs.contains_key(reserved) {
            let param = format!("chat_template_kwargs.{reserved}");
            return Err(ApiError::invalid(param.clone(), format!("{param} is a field of the request itself")));
        }
    }
    if let Some(effort) = effort {
        let level = match effort.as_str() {
            // The least that the family's template can ask for.
            "none" | "minimal" | "low" => "low",
            "medium" => "medium",
            "high" => "high",
            "xhigh" | "max" => "max",
            other => {
                let message = format!("reasoning_effort is \"{other}\"; none, minimal, low, medium, high, xhigh and max are known");
                return Err(ApiError::invalid("reasoning_effort", message));
            }
        };
        kwargs.entry("reasoning_effort").or_insert_with(|| Value::from(level));
    }
    Ok(kwargs)
}
