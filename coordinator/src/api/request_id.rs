//! `X-Request-Id` on every answer: the client's own if it is sane, else a new one.

use axum::extract::{MatchedPath, Request};
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::Response;

const HEADER: HeaderName = HeaderName::from_static("x-request-id");
/// Longest id that is echoed: ids end up in logs and in other people's headers.
const LONGEST: usize = 256;

/// The request's id, as an extension of the request.
#[derive(Clone, Debug)]
pub struct RequestId(pub String);

/// Finds or mints the id, puts it on the request and on the answer, and counts the answer.
pub async fn layer(mut request: Request, next: Next) -> Response {
    let id = of(request.headers());
    let route = request.extensions().get::<MatchedPath>().map_or("other".to_owned(), |path| path.as_str().to_owned());
    let method = request.method().as_str().to_owned();
    request.extensions_mut().insert(RequestId(id.clone()));
    let mut response = next.run(request).await;
    stamp(&id, &mut response);
    let status = response.status().as_u16();
    // Methods are free text on the wire: only the usual ones may become a label.
    let method =
        if matches!(method.as_str(), "GET" | "POST" | "HEAD" | "OPTIONS" | "PUT" | "DELETE" | "PATCH") { method } else { "other".into() };
    metrics::counter!("tandem_http_responses_total", "route" => route, "method" => method, "status" => status.to_string()).increment(1);
    response
}

/// The id of a request with these headers: its own if sane, else a new one.
pub fn of(headers: &HeaderMap) -> String {
    let own = headers.get(HEADER).and_then(|value| value.to_str().ok()).filter(|id| is_sane(id));
    own.map_or_else(|| mint("req-"), str::to_owned)
}

/// Puts the id on an answer.
pub fn stamp(id: &str, response: &mut Response) {
    if let Ok(value) = HeaderValue::from_str(id) {
        response.headers_mut().insert(HEADER, value);
    }
}

/// 1 to 256 characters of those that need no quoting in a log line.
fn is_sane(id: &str) -> bool {
    (1..=LONGEST).contains(&id.len()) && id.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.:/+=@".contains(&b))
}

/// A new random id with 128 bits behind `prefix`.
pub fn mint(prefix: &str) -> String {
    format!("{prefix}{:032x}", rand::random::<u128>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sane_ids_are_short_and_plain() {
        for good in ["a", "req_1-2.3:4", "AbC/+=@", &"x".repeat(256)] {
            assert!(is_sane(good), "{good}");
        }
        for bad in ["", "a b", "a\"b", "é", "a;b", &"x".repeat(257)] {
            assert!(!is_sane(bad), "{bad}");
        }
        assert!(is_sane(&mint("chatcmpl-")));
        assert_ne!(mint("a"), mint("a"));
    }
}
