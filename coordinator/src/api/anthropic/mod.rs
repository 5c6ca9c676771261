//! Anthropic's messages: `POST /v1/messages` and `POST /v1/messages/count_tokens`.
//!
//! | file | idea |
//! |---|---|
//! | this file | the routes |
//! | `request` | what clients send, brought into the shared shape |
//! | `answer` | content blocks and typed events |
//! | `error` | errors in this face's shape |

mod answer;
mod error;
mod request;

use std::sync::Arc;

use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use serde_json::json;

use answer::Answer;
pub use error::to_response;
use request::MessagesRequest;

use super::request_id::RequestId;
use super::state::App;
use super::{ApiError, body, conversation, settings, sse};

/// `POST /v1/messages`.
pub async fn messages(
    State(app): State<Arc<App>>,
    Extension(RequestId(request_id)): Extension<RequestId>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    let id = request_id.clone();
    answer(app, request_id, headers, body).await.unwrap_or_else(|e| to_response(&e, &id))
}

async fn answer(app: Arc<App>, request_id: String, headers: HeaderMap, body: Body) -> Result<Response, ApiError> {
    let bytes = body::read(&headers, body, app.options.body_limit).await?;
    let size = bytes.len();
    let request: MessagesRequest = body::off_thread(size, move || body::parse(&bytes)).await?;
    app.check_model(request.model.as_deref())?;
    let (common, conversation) = request.split(true)?;
    let settings = settings::settings(&common, &app.model, &app.options).map_err(request::renamed)?;
    settings::needs_a_token(&settings)?;
    let stream = settings.stream;
    let mut run = conversation::begin(&app, conversation, &settings, size, request_id.clone()).await?;
    let mut answer = Answer::new(&app, request_id);
    if stream {
        return Ok(sse::response(run, answer, app.options.keep_alive));
    }
    let wholes = run.collect().await?;
    Ok(Json(answer.whole(&run, wholes)).into_response())
}

/// `POST /v1/messages/count_tokens`: the length of the prompt that the same request to `/v1/messages` would make.
pub async fn count_tokens(
    State(app): State<Arc<App>>,
    Extension(RequestId(request_id)): Extension<RequestId>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    count(app, headers, body).await.unwrap_or_else(|e| to_response(&e, &request_id))
}

async fn count(app: Arc<App>, headers: HeaderMap, body: Body) -> Result<Response, ApiError> {
    let bytes = body::read(&headers, body, app.options.body_limit).await?;
    let size = bytes.len();
    let request: MessagesRequest = body::off_thread(size, move || body::parse(&bytes)).await?;
    app.check_model(request.model.as_deref())?;
    let (_, conversation) = request.split(false)?;
    let renderer = Arc::clone(&app);
    let prompt = body::off_thread(size, move || conversation::render(&renderer, conversation)).await?;
    let tokens = app.encode(prompt, false).await?.len();
    Ok(Json(json!({"input_tokens": tokens})).into_response())
}
