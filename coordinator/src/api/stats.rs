//! What the instance is doing now: `/v1/stats` for tools, and `/`, one page for people that draws it (`status.html`: no build step, nothing
//! fetched from elsewhere).

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::state::App;

/// Only what the page itself holds may run, and it may talk to nobody but its own server.
const POLICY: &str = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// `GET /v1/stats`.
pub async fn stats(State(app): State<Arc<App>>) -> Response {
    // The model's name belongs to the API; the rest to the engine.
    let mut body = json!({"model": app.model.name()});
    if let (Value::Object(body), Ok(Value::Object(stats))) = (&mut body, serde_json::to_value(app.engine.stats())) {
        body.extend(stats);
    }
    ([(header::CACHE_CONTROL, "no-store")], Json(body)).into_response()
}

/// `GET /`.
pub async fn page() -> Response {
    let headers = [
        (header::CONTENT_TYPE, "text/html; charset=utf-8"),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::CACHE_CONTROL, "no-cache"),
    ];
    (headers, include_str!("status.html")).into_response()
}
