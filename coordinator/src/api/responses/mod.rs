//! OpenAI's responses: `POST /v1/responses`, without a store: a conversation is sent whole each time.
//!
//! | file | idea |
//! |---|---|
//! | this file | the routes |
//! | `request` | what clients send, brought into the shared shape |
//! | `answer` | output items and typed events |

mod answer;
mod request;

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};

use answer::Answer;
use request::ResponsesRequest;

use super::request::Common;
use super::request_id::RequestId;
use super::state::App;
use super::{ApiError, body, conversation, settings, sse};

/// `POST /v1/responses`.
pub async fn create(
    State(app): State<Arc<App>>,
    Extension(RequestId(request_id)): Extension<RequestId>,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let bytes = body::read(&headers, body, app.options.body_limit).await?;
    let size = bytes.len();
    let (common, request) =
        body::off_thread(size, move || Ok((body::parse::<Common>(&bytes)?, body::parse::<ResponsesRequest>(&bytes)?))).await?;
    app.check_model(common.model.as_deref())?;
    // One answer, and no usage chunks: usage is part of the last event.
    let common = Common { n: None, stream_options: None, ..common };
    let settings = settings::settings(&common, &app.model, &app.options)?;
    settings::needs_a_token(&settings)?;
    let mut answer = Answer::new(&app, &request, &settings);
    let conversation = request.conversation()?;
    let mut run = conversation::begin(&app, conversation, &settings, size, request_id).await?;
    if settings.stream {
        return Ok(sse::response(run, answer, app.options.keep_alive));
    }
    let wholes = run.collect().await?;
    Ok(Json(answer.whole(&run, wholes)).into_response())
}

/// `GET`, `DELETE` and `POST …/cancel` of one response: nothing is stored, so there is none.
pub async fn stored(Path(id): Path<String>) -> ApiError {
    let shown: String = id.chars().take(100).collect();
    ApiError::absent("response_not_found", format!("Response with id '{shown}' not found: this server stores no responses"))
}
