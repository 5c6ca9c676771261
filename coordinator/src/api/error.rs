//! Errors as OpenAI's clients read them: a status, and `{"error": {message, type, param, code}}` with all four keys.

use std::time::Duration;

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::engine::{AdmissionError, ErrorCode, GenerationError};

/// Seconds that a client should wait while the server loads or a worker is away.
const RETRY_NOT_READY: u64 = 5;
/// Seconds that a client should wait while the server shuts down: another instance, or this one after its restart.
const RETRY_DRAINING: u64 = 10;

/// A refused or failed request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    /// HTTP status.
    pub status: StatusCode,
    /// OpenAI's `type`.
    pub kind: &'static str,
    /// One line for a person.
    pub message: String,
    /// Field at fault.
    pub param: Option<String>,
    /// Machine-readable reason.
    pub code: Option<&'static str>,
    /// `Retry-After` in seconds.
    pub retry_after: Option<u64>,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, code: Option<&'static str>, message: impl Into<String>) -> Self {
        Self { status, kind, message: message.into(), param: None, code, retry_after: None }
    }

    /// 400: the value of `param` is wrong.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        let error = Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", Some("invalid_value"), message);
        Self { param: Some(param.into()), ..error }
    }

    /// 400: `param` asks for something that this server does not do. Ignoring it would fail open.
    pub fn unsupported(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { code: Some("unsupported_value"), ..Self::invalid(param, message) }
    }

    /// 400: the body is not what the route reads.
    pub fn malformed(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", Some("invalid_json"), message)
    }

    /// 400: no room for the prompt and one token. The phrases are those that agents look for.
    pub fn prompt_too_long(param: &str, prompt: u64, limit: u64) -> Self {
        Self::too_long(param, &format!("{prompt} tokens"), limit)
    }

    /// The same for a text whose tokens were not counted: its bytes alone make more of them than fit.
    pub fn text_too_long(param: &str, least: u64, bytes: usize, limit: u64) -> Self {
        Self::too_long(param, &format!("at least {least} tokens ({bytes} bytes)"), limit)
    }

    fn too_long(param: &str, prompt: &str, limit: u64) -> Self {
        let most = limit.saturating_sub(1);
        let message = format!(
            "prompt is too long: {prompt} > {most} maximum; this model's maximum context length is {limit} tokens, \
             of which the answer needs at least 1"
        );
        let error = Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", Some("context_length_exceeded"), message);
        Self { param: Some(param.to_owned()), ..error }
    }

    /// 404: another model was asked for.
    pub fn model_not_found(name: &str, served: &[String]) -> Self {
        let shown: String = name.chars().take(200).collect();
        let message = format!("The model `{shown}` does not exist; this server has {}.", served.join(", "));
        let error = Self::new(StatusCode::NOT_FOUND, "invalid_request_error", Some("model_not_found"), message);
        Self { param: Some("model".into()), ..error }
    }

    /// 404: no such route.
    pub fn not_found(method: &str, path: &str) -> Self {
        let path: String = path.chars().take(200).collect();
        Self::new(StatusCode::NOT_FOUND, "invalid_request_error", Some("not_found"), format!("Unknown URL: {method} {path}"))
    }

    /// 404: a thing of that name is not there.
    pub fn absent(code: &'static str, message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, "invalid_request_error", Some(code), message)
    }

    /// 401: no key that this server knows.
    pub fn unauthorized(given: bool) -> Self {
        let message = if given {
            "Incorrect API key provided. Send a key of this server as `Authorization: Bearer KEY` or as `x-api-key: KEY`."
        } else {
            "You didn't provide an API key. Send a key of this server as `Authorization: Bearer KEY` or as `x-api-key: KEY`."
        };
        Self::new(StatusCode::UNAUTHORIZED, "authentication_error", Some("invalid_api_key"), message)
    }

    /// 431: more header bytes than this server reads.
    pub fn headers_too_large(limit: usize) -> Self {
        let message = format!("the request's headers are larger than {limit} bytes");
        Self::new(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, "invalid_request_error", Some("headers_too_large"), message)
    }

    /// 405: a known route, another method.
    pub fn method_not_allowed(method: &str, path: &str) -> Self {
        let message = format!("Method {method} is not allowed for {path}");
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "invalid_request_error", Some("method_not_allowed"), message)
    }

    /// 413: the body is larger than this server reads.
    pub fn body_too_large(limit: usize) -> Self {
        let message = format!("the request body is larger than {limit} bytes");
        Self::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", Some("request_too_large"), message)
    }

    /// 408: the body stopped coming after `got` bytes.
    pub fn body_too_slow(got: usize, silence: Duration) -> Self {
        let message = format!("the request body stopped after {got} bytes: nothing more came for {} s", silence.as_secs_f32());
        Self::new(StatusCode::REQUEST_TIMEOUT, "invalid_request_error", Some("request_timeout"), message)
    }

    /// 503: no token can be made now.
    pub fn not_ready(reasons: &[String]) -> Self {
        let reasons = if reasons.is_empty() { "starting".to_owned() } else { reasons.join("; ") };
        let message = format!("the server is not ready: {reasons}");
        let error = Self::new(StatusCode::SERVICE_UNAVAILABLE, "service_unavailable_error", Some("server_not_ready"), message);
        Self { retry_after: Some(RETRY_NOT_READY), ..error }
    }

    /// 500: our fault.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", Some("internal_error"), message)
    }

    /// `{"error": {…}}`.
    pub fn to_json(&self) -> Value {
        json!({"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}})
    }
}

impl From<AdmissionError> for ApiError {
    fn from(error: AdmissionError) -> Self {
        let message = error.to_string();
        match error {
            AdmissionError::QueueFull { retry_after, .. } => {
                let error = Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", Some("rate_limit_exceeded"), message);
                Self { retry_after: Some(whole_seconds(retry_after)), ..error }
            }
            AdmissionError::TooLong { prompt, limit, .. } if prompt >= limit => Self::prompt_too_long("prompt", prompt, limit),
            AdmissionError::TooLong { .. } => {
                let code = Some("context_length_exceeded");
                Self { code, ..Self::invalid("max_tokens", message) }
            }
            AdmissionError::Draining => {
                let kind = "service_unavailable_error";
                let error = Self::new(StatusCode::SERVICE_UNAVAILABLE, kind, Some("server_shutting_down"), message);
                Self { retry_after: Some(RETRY_DRAINING), ..error }
            }
            AdmissionError::NotReady { reasons } => Self::not_ready(&reasons),
            AdmissionError::Invalid { field, .. } => Self::invalid(field, message),
        }
    }
}

impl From<GenerationError> for ApiError {
    fn from(error: GenerationError) -> Self {
        let (status, kind, code, retry_after) = match error.code {
            ErrorCode::Invalid => (StatusCode::BAD_REQUEST, "invalid_request_error", "invalid_value", None),
            ErrorCode::NonFinite => (StatusCode::INTERNAL_SERVER_ERROR, "server_error", "non_finite", None),
            ErrorCode::Deadline => (StatusCode::GATEWAY_TIMEOUT, "timeout_error", "deadline_exceeded", None),
            ErrorCode::ExpertsUnavailable => {
                (StatusCode::SERVICE_UNAVAILABLE, "service_unavailable_error", "experts_unavailable", Some(RETRY_NOT_READY))
            }
            ErrorCode::Draining => {
                (StatusCode::SERVICE_UNAVAILABLE, "service_unavailable_error", "server_shutting_down", Some(RETRY_DRAINING))
            }
            ErrorCode::Internal => (StatusCode::INTERNAL_SERVER_ERROR, "server_error", "internal_error", None),
        };
        Self { retry_after, ..Self::new(status, kind, Some(code), error.message) }
    }
}

impl ApiError {
    /// The answer with this body.
    pub fn respond(&self, body: Value) -> Response {
        let mut response = (self.status, axum::Json(body)).into_response();
        if let Some(seconds) = self.retry_after {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        self.respond(self.to_json())
    }
}

/// Rounded up, at least 1: `Retry-After: 0` makes clients hammer.
fn whole_seconds(duration: Duration) -> u64 {
    duration.as_millis().div_ceil(1000).clamp(1, u128::from(u32::MAX)) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retry_after_is_never_zero() {
        assert_eq!(whole_seconds(Duration::ZERO), 1);
        assert_eq!(whole_seconds(Duration::from_millis(1001)), 2);
    }

    #[test]
    fn all_four_keys_are_there() {
        let value = ApiError::internal("x").to_json();
        let keys: Vec<&String> = value["error"].as_object().unwrap().keys().collect();
        assert_eq!(keys, ["message", "type", "param", "code"]);
        assert!(value["error"]["param"].is_null());
    }
}
