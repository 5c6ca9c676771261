//! The HTTP APIs over [`crate::engine::Engine`]: several faces, one path between them and the engine.
//!
//! Row 1 of the life of one token (validate, permit, request id) and row 12 (text deltas, chunks out).
//!
//! ```text
//! openai (chat, completions) ─┐                                                  ┌─ openai answers
//! responses ──────────────────┼─ settings, conversation ─ engine ─ run, choice ──┼─ responses' items and events
//! anthropic (messages) ───────┘                                                  └─ anthropic's blocks and events
//! ```
//!
//! | module | idea |
//! |---|---|
//! | `openai`, `responses`, `anthropic` | the faces: own fields, own answers |
//! | `blocks` | an answer as a row of blocks, for the faces that show it so |
//! | `request`, `settings` | fields that all faces share, and every rule about their values |
//! | `conversation` | messages, tools, thinking and form → prompt, grammar, running sequences |
//! | `choice` | one sequence's tokens → text, stop strings, reasoning, calls, counts (pure) |
//! | `run` | the running sequences of one request, merged; dropping it cancels them all |
//! | `sse` | server-sent events with keep-alive |
//! | `error`, `request_id`, `body`, `auth` | what every route shares |
//! | `openapi` | the description of all this, for tools |
//! | `system`, `tokens` | health, metrics, version, models; tokenize and detokenize |
//! | `stats` | `/v1/stats` and the status page |
//! | `serve` | the listener |

mod anthropic;
mod auth;
mod blocks;
mod body;
mod choice;
mod conversation;
mod error;
mod openai;
mod openapi;
mod request;
pub(crate) mod request_id;
mod responses;
mod run;
mod serve;
mod settings;
mod sse;
mod state;
mod stats;
mod system;
mod tokens;

use std::sync::Arc;

use axum::Router;
use axum::http::{HeaderValue, Method};
use axum::routing::{get, post};
use tower_http::cors::{AllowOrigin, Any, CorsLayer};

pub use auth::Keys;
pub use error::ApiError;
pub use serve::serve;
use state::App;
pub use state::{ApiParts, Defaults, Model, Options, ReasoningFields, TextError};

/// The routes over `parts`. Every answer, errors included, carries `X-Request-Id`; every error body has OpenAI's shape.
pub fn router(parts: ApiParts) -> Router {
    let keys = Arc::clone(&parts.options.keys);
    let origins = parts.options.cors_origins.clone();
    let router = Router::new()
        .route("/v1/chat/completions", post(openai::chat::handle))
        .route("/v1/completions", post(openai::completions::handle))
        .route("/v1/responses", post(responses::create))
        .route("/v1/responses/{id}", get(responses::stored).delete(responses::stored))
        .route("/v1/responses/{id}/cancel", post(responses::stored))
        .route("/v1/messages", post(anthropic::messages))
        .route("/v1/messages/count_tokens", post(anthropic::count_tokens))
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
        .route("/openapi.json", get(openapi::document))
        .route("/metrics", get(system::metrics))
        .method_not_allowed_fallback(system::method_not_allowed)
        .fallback(system::not_found)
        .layer(axum::middleware::from_fn_with_state(keys, auth::layer));
    // Outside of the keys: a browser asks whether it may ask without one.
    let router = if origins.is_empty() { router } else { router.layer(cors(&origins)) };
    router.layer(axum::middleware::from_fn(request_id::layer)).with_state(Arc::new(App::new(parts)))
}

/// Lets pages from `origins` ask (`*` = from anywhere).
fn cors(origins: &[HeaderValue]) -> CorsLayer {
    let allowed = if origins.iter().any(|origin| origin == "*") { AllowOrigin::any() } else { AllowOrigin::list(origins.to_vec()) };
    CorsLayer::new().allow_origin(allowed).allow_methods([Method::GET, Method::POST]).allow_headers(Any).expose_headers(Any)
}

#[cfg(test)]
mod tests;
