//! `POST /v1/completions`: text or token ids in, text out, nothing added on either side. How parity is measured from outside.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use serde::Deserialize;

use super::completion_answer::Answer;
use crate::api::conversation::form::FormFields;
use crate::api::conversation::start::{Plan, guide, start};
use crate::api::request::{Common, Int, Prompt, Prompts};
use crate::api::request_id::RequestId;
use crate::api::run::RunPrompt;
use crate::api::settings::{self, Settings};
use crate::api::state::App;
use crate::api::{ApiError, body, sse};

/// The fields of text completions alone.
#[derive(Clone, Debug, Deserialize)]
struct CompletionOnly {
    prompt: Option<Prompts>,
    echo: Option<bool>,
    logprobs: Option<Int>,
    best_of: Option<Int>,
    suffix: Option<String>,
    add_special_tokens: Option<bool>,
}

/// `max_tokens` when the request says nothing, as OpenAI has it.
const DEFAULT_MAX_TOKENS: u64 = 16;

/// The route.
pub async fn handle(
    State(app): State<Arc<App>>,
    Extension(RequestId(request_id)): Extension<RequestId>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let bytes = body::read(&headers, body, app.options.body_limit).await?;
    let (common, own, form) = body::off_thread(bytes.len(), move || {
        Ok((body::parse::<Common>(&bytes)?, body::parse::<CompletionOnly>(&bytes)?, body::parse::<FormFields>(&bytes)?.form()?))
    })
    .await?;
    app.check_model(common.model.as_deref())?;

    let mut settings = settings::settings(&common, &app.model, &app.options)?;
    settings.logprobs = settings::logprob_count(own.logprobs, "logprobs", &app.model, &app.options)?;
    let echo = own.echo.unwrap_or(false);
    refuse_legacy(&own, &settings)?;
    let prompt_only = prompt_only(&mut settings, echo)?;
    let wants_prompt_logprobs = settings.prompt_logprobs.is_some();
    if echo && settings.prompt_logprobs.is_none() {
        // Echoed tokens carry logprobs like the others.
        settings.prompt_logprobs = settings.logprobs;
    }
    let prompts = prompts(&app, own).await?;
    let guide = match form {
        Some(form) => Some(guide(&app, form.grammar(), false, &settings).await?),
        None => None,
    };
    let mut run = start(&app, Plan { settings: &settings, prompts, field: "prompt", format: None, guide, thought: None, request_id })?;

    let mut answer = Answer::new(&app, settings, echo, prompt_only, wants_prompt_logprobs);
    if answer.settings.stream {
        return Ok(sse::response(run, answer, app.options.keep_alive));
    }
    let wholes = run.collect().await?;
    Ok(Json(answer.whole(&run, wholes)).into_response())
}

fn refuse_legacy(own: &CompletionOnly, settings: &Settings) -> Result<(), ApiError> {
    if own.suffix.as_deref().is_some_and(|suffix| !suffix.is_empty()) {
        return Err(ApiError::unsupported("suffix", "suffix is not supported"));
    }
    if own.best_of.is_some_and(|best| best.0 != i128::from(settings.n)) {
        return Err(ApiError::unsupported("best_of", "best_of is only supported when it equals n"));
    }
    Ok(())
}

/// `max_tokens: 0` means "only the prompt", which makes sense when the prompt comes back. The engine then generates one token (that
/// is how it runs a prompt), which is not shown.
fn prompt_only(settings: &mut Settings, echo: bool) -> Result<bool, ApiError> {
    if settings.max_tokens.is_none() {
        settings.max_tokens = Some(DEFAULT_MAX_TOKENS.max(u64::from(settings.min_tokens)));
    }
    if settings.max_tokens == Some(0) && (echo || settings.prompt_logprobs.is_some()) {
        settings.max_tokens = Some(1);
        return Ok(true);
    }
    settings::needs_a_token(settings)?;
    Ok(false)
}

async fn prompts(app: &App, own: CompletionOnly) -> Result<Vec<RunPrompt>, ApiError> {
    let add_special = own.add_special_tokens.unwrap_or(false);
    let list = own.prompt.map(|p| p.0).unwrap_or_default();
    if list.is_empty() {
        return Err(ApiError::invalid("prompt", "prompt is missing or an empty list; text or token ids are needed"));
    }
    if list.len() > app.options.max_choices as usize {
        let message = format!("prompt has {} entries; at most {} are allowed", list.len(), app.options.max_choices);
        return Err(ApiError::invalid("prompt", message));
    }
    let several = list.len() > 1;
    let mut prompts = Vec::with_capacity(list.len());
    for (i, prompt) in list.into_iter().enumerate() {
        let field = if several { format!("prompt[{i}]") } else { "prompt".to_owned() };
        let prompt = match prompt {
            Prompt::Text(text) => RunPrompt { ids: app.encode_prompt(&field, text.clone(), add_special).await?, text },
            Prompt::Ids(ids) => {
                let ids: Result<Vec<u32>, ApiError> =
                    ids.into_iter().enumerate().map(|(k, id)| settings::token_id(id, app.model.vocab, &field, k)).collect();
                let ids = ids?;
                let text = app.model.tokenizer.decode(&ids, false);
                RunPrompt { ids, text }
            }
        };
        if prompt.ids.is_empty() {
            return Err(ApiError::invalid(field.clone(), format!("{field} is empty; at least one token is needed")));
        }
        prompts.push(prompt);
    }
    Ok(prompts)
}
