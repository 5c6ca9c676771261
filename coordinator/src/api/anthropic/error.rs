//! Errors as Anthropic's clients read them: `{"type": "error", "error": {type, message}, "request_id"}`.

use axum::http::{HeaderName, HeaderValue, StatusCode};
use axum::response::Response;
use serde_json::{Value, json};

use crate::api::ApiError;

const HEADER: HeaderName = HeaderName::from_static("request-id");

/// The body of an error.
pub fn body(error: &ApiError, request_id: &str) -> Value {
    let kind = match error.status {
        StatusCode::UNAUTHORIZED => "authentication_error",
        StatusCode::FORBIDDEN => "permission_error",
        StatusCode::NOT_FOUND => "not_found_error",
        StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
        StatusCode::GATEWAY_TIMEOUT => "timeout_error",
        status if status.is_client_error() => "invalid_request_error",
        _ => "api_error",
    };
    json!({"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id})
}

/// The answer to a request that failed.
pub fn to_response(error: &ApiError, request_id: &str) -> Response {
    let mut response = error.respond(body(error, request_id));
    if let Ok(id) = HeaderValue::from_str(request_id) {
        response.headers_mut().insert(HEADER, id);
    }
    response
}
