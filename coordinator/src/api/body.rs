//! Reading a JSON body: bounded, and with the field's path in every error.

use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, header};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde::de::DeserializeOwned;

use super::ApiError;

/// Reads at most `limit` bytes.
pub async fn read(headers: &HeaderMap, body: Body, limit: usize) -> Result<Bytes, ApiError> {
    let declared = headers.get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse::<u64>().ok());
    if declared.is_some_and(|length| length > limit as u64) {
        return Err(ApiError::body_too_large(limit));
    }
    match Limited::new(body, limit).collect().await {
        Ok(collected) => Ok(collected.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => Err(ApiError::body_too_large(limit)),
        Err(error) => Err(ApiError::malformed(format!("the request body could not be read: {error}"))),
    }
}

/// Parses `bytes` as `T`. A value of the wrong type names its path (`messages[1].role`) in `param`.
pub fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    let mut deserializer = serde_json::Deserializer::from_slice(bytes);
    let value = serde_path_to_error::deserialize(&mut deserializer).map_err(|error| {
        let path = error.path().to_string();
        let inner = error.into_inner();
        if inner.is_data() && path != "." {
            // Without the position: a client has no lines to count in.
            let text = inner.to_string();
            let text = text.rsplit_once(" at line ").map_or(text.as_str(), |(head, _)| head);
            ApiError::invalid(path.clone(), format!("{path}: {text}"))
        } else if inner.is_data() {
            ApiError::malformed(format!("the request body must be a JSON object with this route's fields: {inner}"))
        } else {
            ApiError::malformed(format!("the request body is not valid JSON: {inner}"))
        }
    })?;
    deserializer.end().map_err(|error| ApiError::malformed(format!("the request body is not valid JSON: {error}")))?;
    Ok(value)
}
