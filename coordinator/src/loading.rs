//! The HTTP server before the checkpoint is open: the port answers from the first second, with 503 and the reasons, and `/livez` and
//! `/metrics` work already. Once the routes are there, everything goes to them.

use axum::Router;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde_json::json;
use tokio::sync::watch;
use tower_service::Service as _;

use crate::api::{ApiError, request_id};
use crate::engine::Engine;

#[derive(Clone)]
struct Loading {
    routes: watch::Receiver<Option<Router>>,
    engine: Engine,
}

/// A router that answers for itself until `routes` has something.
pub(crate) fn router(routes: watch::Receiver<Option<Router>>, engine: Engine) -> Router {
    Router::new().fallback(answer).with_state(Loading { routes, engine })
}

async fn answer(State(loading): State<Loading>, request: Request) -> Response {
    let routes = loading.routes.borrow().clone();
    if let Some(mut routes) = routes {
        return match routes.call(request).await {
            Ok(response) => response,
            Err(never) => match never {},
        };
    }
    let id = request_id::of(request.headers());
    let mut response = match request.uri().path() {
        "/livez" => axum::Json(json!({"live": true, "reasons": []})).into_response(),
        "/metrics" => tandem_runtime::admin::exposition(tandem_runtime::metrics::render()),
        "/version" => axum::Json(json!({"version": env!("CARGO_PKG_VERSION")})).into_response(),
        path => {
            let reasons = loading.engine.readiness().reasons;
            if matches!(path, "/readyz" | "/health") {
                (StatusCode::SERVICE_UNAVAILABLE, axum::Json(json!({"ready": false, "reasons": reasons}))).into_response()
            } else {
                ApiError::not_ready(&reasons).into_response()
            }
        }
    };
    request_id::stamp(&id, &mut response);
    response
}
