//! Reading a JSON body: bounded, and with the field's path in every error.

use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, header};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use serde::de::{DeserializeOwned, IgnoredAny};

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
    // A derived struct would also read a list, field by field in order of declaration.
    if bytes.iter().find(|b| !b.is_ascii_whitespace()).is_some_and(|&b| b != b'{') && serde_json::from_slice::<IgnoredAny>(bytes).is_ok() {
        return Err(ApiError::malformed("the request body must be a JSON object"));
    }
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
            ApiError::malformed(format!("the request body lacks something: {inner}"))
        } else {
            ApiError::malformed(format!("the request body is not valid JSON: {inner}"))
        }
    })?;
    deserializer.end().map_err(|error| ApiError::malformed(format!("the request body is not valid JSON: {error}")))?;
    Ok(value)
}

/// Bodies up to this size are parsed and rendered in place (well under a millisecond).
const IN_PLACE: usize = 64 << 10;

/// Runs `work` on a body of `size` bytes: a large one on a blocking thread, so that it does not hold up the streams of others.
pub async fn off_thread<T: Send + 'static>(
    size: usize,
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    if size <= IN_PLACE {
        return work();
    }
    tokio::task::spawn_blocking(work).await.map_err(|e| ApiError::internal(format!("the request could not be handled: {e}")))?
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    #[derive(Debug, serde::Deserialize)]
    struct Sample {
        #[serde(rename = "a")]
        _a: Option<Vec<u32>>,
    }

    #[test]
    fn errors_name_the_path_or_say_that_it_is_no_json() {
        let wrong = parse::<Sample>(br#"{"a": [1, "x"]}"#).unwrap_err();
        assert_eq!(wrong.param.as_deref(), Some("a[1]"));
        assert_eq!(wrong.message, "a[1]: invalid type: string \"x\", expected u32");
        for text in [&b"{"[..], b"", b"[1]", b"{} x", b"{\"a\": NaN}", b"\xff", b"{\"a\": 1e999}"] {
            let error = parse::<Sample>(text).unwrap_err();
            assert_eq!((error.status.as_u16(), error.code), (400, Some("invalid_json")), "{text:?}: {}", error.message);
        }
        let deep = format!("{{\"a\": {}", "[".repeat(10_000));
        assert!(parse::<Value>(deep.as_bytes()).is_err(), "deep nesting ends in an error");
    }
}
