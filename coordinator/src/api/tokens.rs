//! `/tokenize` and `/detokenize`, with vLLM's fields.

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use serde::Deserialize;
use serde_json::{Value, json};

use super::conversation::render;
use super::openai::chat::ChatFields;
use super::request::Int;
use super::settings::token_id;
use super::state::App;
use super::{ApiError, body};

#[derive(Deserialize)]
struct TokenizeRequest {
    model: Option<String>,
    prompt: Option<String>,
    add_special_tokens: Option<bool>,
    return_token_strs: Option<bool>,
}

/// `{prompt}` or `{messages}` → `{count, max_model_len, tokens, token_strs}`.
pub async fn tokenize(State(app): State<Arc<App>>, headers: HeaderMap, body: Body) -> Result<Json<Value>, ApiError> {
    let bytes = body::read(&headers, body, app.options.body_limit).await?;
    let size = bytes.len();
    let (request, chat) =
        body::off_thread(size, move || Ok((body::parse::<TokenizeRequest>(&bytes)?, body::parse::<ChatFields>(&bytes)?))).await?;
    app.check_model(request.model.as_deref())?;
    let text = match (request.prompt, chat.messages.is_some()) {
        (Some(prompt), false) => prompt,
        (None, true) => {
            let conversation = chat.conversation()?;
            let renderer = Arc::clone(&app);
            body::off_thread(size, move || render(&renderer, conversation)).await?
        }
        _ => return Err(ApiError::invalid("prompt", "either prompt (a string) or messages is needed")),
    };
    let ids = app.encode(text, request.add_special_tokens.unwrap_or(false)).await?;
    let strings: Option<Vec<String>> =
        request.return_token_strs.unwrap_or(false).then(|| ids.iter().map(|&id| app.model.tokenizer.token_text(id)).collect());
    Ok(Json(json!({
        "count": ids.len(),
        "max_model_len": app.engine.limits().max_seq_len,
        "tokens": ids,
        "token_strs": strings,
    })))
}

#[derive(Deserialize)]
struct DetokenizeRequest {
    model: Option<String>,
    tokens: Option<Vec<Int>>,
}

/// `{tokens}` → `{prompt}`.
pub async fn detokenize(State(app): State<Arc<App>>, headers: HeaderMap, body: Body) -> Result<Json<Value>, ApiError> {
    let bytes = body::read(&headers, body, app.options.body_limit).await?;
    let request: DetokenizeRequest = body::off_thread(bytes.len(), move || body::parse(&bytes)).await?;
    app.check_model(request.model.as_deref())?;
    let tokens = request.tokens.ok_or_else(|| ApiError::invalid("tokens", "tokens (a list of token ids) is needed"))?;
    let ids: Result<Vec<u32>, ApiError> =
        tokens.into_iter().enumerate().map(|(i, id)| token_id(id, app.model.vocab, "tokens", i)).collect();
    Ok(Json(json!({"prompt": app.model.tokenizer.decode(&ids?, false)})))
}
