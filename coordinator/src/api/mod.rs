//! The HTTP APIs: OpenAI's chat and text completions over [`crate::engine::Engine`], and the routes around them.
//!
//! Row 1 of the life of one token (validate, permit, request id) and row 12 (text deltas, chunks out).
//!
//! | module | idea |
//! |---|---|
//! | `openai` | request types, validation, chat and text completions, their answers |
//! | `choice` | one sequence's tokens → text, stop strings, reasoning, counts (pure) |
//! | `run` | the running sequences of one request, merged; dropping it cancels them all |
//! | `sse` | server-sent events with keep-alive |
//! | `error`, `request_id`, `body` | what every route shares |
//! | `system`, `tokens` | health, metrics, version, models; tokenize and detokenize |
//! | `stats` | `/v1/stats` and the status page |
//! | `serve` | the listener |

mod body;
mod choice;
mod error;
mod openai;
pub(crate) mod request_id;
mod run;
mod serve;
mod sse;
mod state;
mod stats;
mod system;
mod tokens;

use std::sync::Arc;

use axum::Router;
use axum::routing::{get, post};

pub use error::ApiError;
pub use serve::serve;
use state::App;
pub use state::{ApiParts, Defaults, Model, Options, ReasoningFields, TextError};

/// The routes over `parts`. Every answer, errors included, carries `X-Request-Id`; every error body has OpenAI's shape.
pub fn router(parts: ApiParts) -> Router {
    Router::new()
        .route("/v1/chat/completions", post(openai::chat::handle))
        .route("/v1/completions", post(openai::completions::handle))
        .route("/v1/models", get(system::models))
        .route("/v1/models/{*id}", get(system::model))
        .route("/v1/stats", get(stats::stats))
        .route("/", get(stats::page))
        .route("/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .route("/livez", get(system::livez))
        .route("/readyz", get(system::readyz))
        .route("/health", get(system::readyz))
        .route("/version", get(system::version))
        .route("/metrics", get(system::metrics))
        .method_not_allowed_fallback(system::method_not_allowed)
        .fallback(system::not_found)
        .layer(axum::middleware::from_fn(request_id::layer))
        .with_state(Arc::new(App::new(parts)))
}

#[cfg(test)]
mod tests;
