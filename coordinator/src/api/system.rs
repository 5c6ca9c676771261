//! Health, version, metrics, the model list, and clean errors for everything else.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use axum::http::{Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::ApiError;
use super::state::App;

/// Whether this process makes progress. Never false because of a worker: restarting the coordinator would not help.
pub async fn livez(State(app): State<Arc<App>>) -> Response {
    let reasons = app.stuck.as_ref().map_or(Vec::new(), |stuck| stuck());
    let status = if reasons.is_empty() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(json!({"live": reasons.is_empty(), "reasons": reasons}))).into_response()
}

/// Whether a token can be made now (`/readyz`, and `/health` for those who know that name).
pub async fn readyz(State(app): State<Arc<App>>) -> Response {
    let readiness = app.engine.readiness();
    let status = if readiness.ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(json!({"ready": readiness.ready, "reasons": readiness.reasons}))).into_response()
}

/// The release.
pub async fn version() -> Json<Value> {
    Json(json!({"version": env!("CARGO_PKG_VERSION")}))
}

/// The process's metrics.
pub async fn metrics(State(app): State<Arc<App>>) -> Response {
    match &app.metrics {
        Some(render) => ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], render()).into_response(),
        None => ApiError::not_found("GET", "/metrics").into_response(),
    }
}

fn describe(app: &App, name: &str) -> Value {
    // 0 before an attention worker has told its limit.
    let longest = Some(app.engine.limits().max_seq_len).filter(|&longest| longest > 0);
    json!({
        "id": name,
        "object": "model",
        "created": app.model.created,
        "owned_by": "tandem",
        "root": app.model.name(),
        "parent": null,
        // Three spellings of one number, since clients look for one each.
        "max_model_len": longest,
        "context_length": longest,
        "context_window": longest,
    })
}

/// `GET /v1/models`.
pub async fn models(State(app): State<Arc<App>>) -> Json<Value> {
    let data: Vec<Value> = app.model.names.iter().map(|name| describe(&app, name)).collect();
    Json(json!({"object": "list", "data": data}))
}

/// `GET /v1/models/{id}`; ids may contain slashes.
pub async fn model(State(app): State<Arc<App>>, Path(id): Path<String>) -> Result<Json<Value>, ApiError> {
    app.check_model(Some(&id))?;
    Ok(Json(describe(&app, &id)))
}

/// Anything else.
pub async fn not_found(method: Method, uri: Uri) -> ApiError {
    ApiError::not_found(method.as_str(), uri.path())
}

/// A known path with another method; the router adds `Allow`.
pub async fn method_not_allowed(method: Method, uri: Uri) -> ApiError {
    ApiError::method_not_allowed(method.as_str(), uri.path())
}
