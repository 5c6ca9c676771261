//! Server-sent events: the updates of a run through one face's [`Encoder`], with a sign of life in silence.
//!
//! The headers go out before prefill begins. A first sign of life goes out after a second of silence, then one whenever nothing was sent
//! for the keep-alive interval of wall-clock time (queue, prefill, a held stop string, an expert worker's restart), so that neither a
//! proxy nor a client gives up.

use std::convert::Infallible;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::Response;
use serde_json::Value;
use tokio::time::Instant;

use super::ApiError;
use super::choice::Delta;
use super::run::{Run, Update};

/// Longest silence at the beginning of a stream.
const FIRST: Duration = Duration::from_secs(1);

/// Text of events that are ready to be sent.
#[derive(Debug, Default)]
pub struct Frames(String);

impl Frames {
    /// An event without a name.
    pub fn data(&mut self, value: &Value) {
        self.0.push_str("data: ");
        // JSON text has no line breaks of its own, so one line is one event.
        self.0.push_str(&value.to_string());
        self.0.push_str("\n\n");
    }

    /// An event with a name.
    pub fn event(&mut self, name: &str, value: &Value) {
        self.0.push_str("event: ");
        self.0.push_str(name);
        self.0.push('\n');
        self.data(value);
    }

    /// What chat and text completions end with.
    pub fn done(&mut self) {
        self.0.push_str("data: [DONE]\n\n");
    }

    /// A line that clients pass over.
    pub fn comment(&mut self, text: &str) {
        self.0.push_str(": ");
        self.0.push_str(text);
        self.0.push_str("\n\n");
    }
}

/// Turns what happens to a request into one face's events.
pub trait Encoder: Send + 'static {
    /// Before anything has happened.
    fn open(&mut self, _run: &Run, _out: &mut Frames) {}
    /// Sequence `choice` went on.
    fn delta(&mut self, run: &Run, choice: usize, delta: Delta, out: &mut Frames);
    /// All sequences have ended.
    fn last(&mut self, run: &Run, out: &mut Frames);
    /// The request failed: nothing follows.
    fn failed(&mut self, run: &Run, error: &ApiError, out: &mut Frames);
    /// Nothing was sent for a while.
    fn silence(&mut self, out: &mut Frames) {
        out.comment("keep-alive");
    }
}

struct State<E> {
    run: Run,
    encoder: E,
    keep_alive: Duration,
    /// When the silence becomes too long.
    due: Instant,
    begun: bool,
    over: bool,
}

/// Streams `run` as `encoder` writes it.
pub fn response<E: Encoder>(run: Run, encoder: E, keep_alive: Duration) -> Response {
    let due = Instant::now() + keep_alive.min(FIRST);
    let state = State { run, encoder, keep_alive, due, begun: false, over: false };
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

impl<E: Encoder> State<E> {
    async fn next(&mut self) -> Option<Bytes> {
        if self.over {
            return None;
        }
        let mut frames = Frames::default();
        if !std::mem::replace(&mut self.begun, true) {
            self.encoder.open(&self.run, &mut frames);
            if !frames.0.is_empty() {
                // What opens a stream says nothing of the answer: the first second still counts.
                return Some(Bytes::from(frames.0));
            }
        }
        while frames.0.is_empty() && !self.over {
            match tokio::time::timeout_at(self.due, self.run.next()).await {
                Err(_) => self.encoder.silence(&mut frames),
                Ok(Some(Update::Delta(choice, delta))) => self.encoder.delta(&self.run, choice, delta, &mut frames),
                Ok(Some(Update::Failed(error))) => {
                    self.over = true;
                    self.encoder.failed(&self.run, &error, &mut frames);
                }
                Ok(None) => {
                    self.over = true;
                    self.encoder.last(&self.run, &mut frames);
                }
            }
        }
        self.due = Instant::now() + self.keep_alive;
        Some(Bytes::from(frames.0))
    }
}
