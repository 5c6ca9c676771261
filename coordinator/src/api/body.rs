//! Reading a JSON body: bounded, and with the field's path in every error.

use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, header};
use http_body_util::BodyExt;
use serde::de::{DeserializeOwned, IgnoredAny};

use super::ApiError;

/// How long a client may send nothing in the middle of a body. Whoever stops there must not hold a connection for ever.
const SILENCE: Duration = Duration::from_secs(30);

/// Reads at most `limit` bytes; a body that stops coming is a 408.
pub async fn read(headers: &HeaderMap, body: Body, limit: usize) -> Result<Bytes, ApiError> {
    let declared = headers.get(header::CONTENT_LENGTH).and_then(|v| v.to_str().ok()?.parse::<u64>().ok());
    if declared.is_some_and(|length| length > limit as u64) {
        return Err(ApiError::body_too_large(limit));
    }
    collect(body, limit, SILENCE).await
}

async fn collect(mut body: Body, limit: usize, silence: Duration) -> Result<Bytes, ApiError> {
    let mut all = Vec::new();
    loop {
        match tokio::time::timeout(silence, body.frame()).await {
            Err(_) => return Err(ApiError::body_too_slow(all.len(), silence)),
            Ok(None) => return Ok(all.into()),
            Ok(Some(Err(error))) => return Err(ApiError::malformed(format!("the request body could not be read: {error}"))),
            Ok(Some(Ok(frame))) => {
                let Ok(data) = frame.into_data() else { continue };
                if all.len() + data.len() > limit {
                    return Err(ApiError::body_too_large(limit));
                }
                all.extend_from_slice(&data);
            }
        }
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

    #[tokio::test]
    async fn a_body_that_stops_coming_is_not_waited_for() {
        let said = futures::stream::iter([Ok::<_, std::io::Error>("{\"a\""), Ok(": [")]);
        let body = Body::from_stream(futures::StreamExt::chain(said, futures::stream::pending()));
        let error = collect(body, 100, Duration::from_millis(20)).await.unwrap_err();
        assert_eq!((error.status.as_u16(), error.code), (408, Some("request_timeout")));
        assert!(error.message.contains("after 7 bytes"), "{}", error.message);
        let pieces = || Body::from_stream(futures::stream::iter(["ab", "cd"].map(Ok::<_, std::io::Error>)));
        assert_eq!(collect(pieces(), 4, SILENCE).await.unwrap(), "abcd");
        assert_eq!(collect(pieces(), 3, SILENCE).await.unwrap_err().status.as_u16(), 413);
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
