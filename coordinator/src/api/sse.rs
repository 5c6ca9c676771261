//! Server-sent events: one `data:` per chunk, comments in silence, `[DONE]` at the end.
//!
//! The headers go out before prefill begins. A comment goes out whenever nothing was sent for the keep-alive interval of wall-clock
//! time (queue, prefill, a held stop string, an expert worker's restart), so that no proxy gives up. An error inside the stream
//! is a `data:` line like any other and ends the stream without `[DONE]`.

use std::convert::Infallible;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::Response;
use serde_json::Value;
use tokio::time::Instant;

use super::choice::Delta;
use super::run::{Run, Update};

/// Turns updates into chunks.
pub trait Chunks: Send + 'static {
    /// The chunks of one delta of sequence `choice`.
    fn delta(&mut self, run: &Run, choice: usize, delta: Delta, out: &mut Vec<Value>);
    /// The chunks behind all others.
    fn last(&mut self, run: &Run, out: &mut Vec<Value>);
}

struct State<C> {
    run: Run,
    chunks: C,
    keep_alive: Duration,
    /// When the silence becomes too long.
    due: Instant,
    over: bool,
}

/// Streams `run` as `chunks`.
pub fn response<C: Chunks>(run: Run, chunks: C, keep_alive: Duration) -> Response {
    let due = Instant::now() + keep_alive;
    let state = State { run, chunks, keep_alive, due, over: false };
    let stream = futures::stream::unfold(state, |mut state| async move {
        let bytes = state.next().await?;
        Some((Ok::<_, Infallible>(bytes), state))
    });
    let mut response = Response::new(Body::from_stream(stream));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // nginx would collect the chunks otherwise.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

impl<C: Chunks> State<C> {
    async fn next(&mut self) -> Option<Bytes> {
        if self.over {
            return None;
        }
        let mut values = Vec::new();
        let mut text = String::new();
        while text.is_empty() {
            match tokio::time::timeout_at(self.due, self.run.next()).await {
                Err(_) => text.push_str(": keep-alive\n\n"),
                Ok(Some(Update::Delta(choice, delta))) => self.chunks.delta(&self.run, choice, delta, &mut values),
                Ok(Some(Update::Failed(error))) => {
                    self.over = true;
                    values.push(error.to_json());
                }
                Ok(None) => {
                    self.over = true;
                    self.chunks.last(&self.run, &mut values);
                    append(&values, &mut text);
                    values.clear();
                    text.push_str("data: [DONE]\n\n");
                }
            }
            append(&values, &mut text);
            values.clear();
        }
        self.due = Instant::now() + self.keep_alive;
        Some(Bytes::from(text))
    }
}

fn append(values: &[Value], out: &mut String) {
    for value in values {
        out.push_str("data: ");
        // JSON text has no line breaks of its own, so one line is one event.
        out.push_str(&value.to_string());
        out.push_str("\n\n");
    }
}
