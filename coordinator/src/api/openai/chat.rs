//! `POST /v1/chat/completions`: row 1 of the life of one token; the answer (row 12) is `chat_answer`.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::chat_answer::Answer;
use crate::api::conversation::form::FormFields;
use crate::api::conversation::{self, Conversation, Message, Thinking, Tools};
use crate::api::request::{Common, Int};
use crate::api::request_id::RequestId;
use crate::api::settings;
use crate::api::state::App;
use crate::api::{ApiError, body, sse};

/// The fields that make a conversation; `/tokenize` takes the same ones.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct ChatFields {
    /// The messages.
    pub messages: Option<Vec<Map<String, Value>>>,
    tools: Option<Vec<Value>>,
    tool_choice: Option<Value>,
    parallel_tool_calls: Option<bool>,
    reasoning_effort: Option<String>,
    thinking: Option<Value>,
    thinking_token_budget: Option<Value>,
    chat_template_kwargs: Option<Map<String, Value>>,
    add_generation_prompt: Option<bool>,
    continue_final_message: Option<bool>,
}

impl ChatFields {
    /// The conversation.
    pub fn conversation(self) -> Result<Conversation, ApiError> {
        let kwargs = self.chat_template_kwargs.unwrap_or_default();
        for reserved in ["messages", "tools", "add_generation_prompt", "continue_final_message"] {
            if kwargs.contains_key(reserved) {
                let param = format!("chat_template_kwargs.{reserved}");
                return Err(ApiError::invalid(param.clone(), format!("{param} is a field of the request itself")));
            }
        }
        let thinking = Thinking::effort(self.reasoning_effort.as_deref(), "reasoning_effort")?
            .with_object(self.thinking.as_ref())?
            .with_budget(self.thinking_token_budget.as_ref(), "thinking_token_budget")?;
        Ok(Conversation {
            messages: Message::chat(self.messages),
            field: "messages",
            tools: Tools::chat(self.tools, self.tool_choice.as_ref(), self.parallel_tool_calls)?,
            thinking: thinking.with_kwargs(&kwargs),
            kwargs,
            form: None,
            add_generation_prompt: self.add_generation_prompt,
            continue_final_message: self.continue_final_message.unwrap_or(false),
        })
    }
}

/// Fields that would change the answer and that nothing here serves.
#[derive(Deserialize)]
struct UnservedFields {
    best_of: Option<Int>,
    functions: Option<Value>,
    function_call: Option<Value>,
    modalities: Option<Vec<String>>,
}

impl UnservedFields {
    fn refuse(&self, n: u32) -> Result<(), ApiError> {
        if self.best_of.is_some_and(|best| best.0 != i128::from(n)) {
            return Err(ApiError::unsupported("best_of", "best_of is only supported when it equals n"));
        }
        for (field, value, instead) in [("functions", &self.functions, "tools"), ("function_call", &self.function_call, "tool_choice")] {
            if value.is_some() {
                return Err(ApiError::unsupported(field, format!("{field} is not supported; send {instead}")));
            }
        }
        if let Some(other) = self.modalities.iter().flatten().find(|kind| *kind != "text") {
            let shown: String = other.chars().take(40).collect();
            return Err(ApiError::unsupported("modalities", format!("modalities has \"{shown}\"; only text is supported")));
        }
        Ok(())
    }
}

/// Chat's spelling of logprobs.
#[derive(Deserialize)]
struct LogprobFields {
    logprobs: Option<bool>,
    top_logprobs: Option<Int>,
}

/// The route.
pub async fn handle(
    State(app): State<Arc<App>>,
    Extension(RequestId(request_id)): Extension<RequestId>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let bytes = body::read(&headers, body, app.options.body_limit).await?;
    let size = bytes.len();
    let (common, logprobs, chat, form, unserved) = body::off_thread(size, move || {
        let (form, unserved) = (body::parse::<FormFields>(&bytes)?, body::parse::<UnservedFields>(&bytes)?);
        Ok((body::parse::<Common>(&bytes)?, body::parse::<LogprobFields>(&bytes)?, body::parse::<ChatFields>(&bytes)?, form, unserved))
    })
    .await?;
    app.check_model(common.model.as_deref())?;

    let mut settings = settings::settings(&common, &app.model, &app.options)?;
    settings::needs_a_token(&settings)?;
    unserved.refuse(settings.n)?;
    settings.logprobs = logprobs.count(&app)?;
    let conversation = Conversation { form: form.form()?, ..chat.conversation()? };
    let mut run = conversation::begin(&app, conversation, &settings, size, request_id).await?;

    let mut answer = Answer::new(&app, settings);
    if answer.settings.stream {
        return Ok(sse::response(run, answer, app.options.keep_alive));
    }
    let wholes = run.collect().await?;
    Ok(Json(answer.whole(&run, wholes)).into_response())
}

impl LogprobFields {
    fn count(&self, app: &App) -> Result<Option<u32>, ApiError> {
        let top = settings::logprob_count(self.top_logprobs, "top_logprobs", &app.model, &app.options)?;
        match (self.logprobs.unwrap_or(false), top) {
            (true, top) => Ok(Some(top.unwrap_or(0))),
            (false, Some(top)) if top > 0 => Err(ApiError::invalid("top_logprobs", "top_logprobs needs logprobs: true")),
            (false, _) => Ok(None),
        }
    }
}
