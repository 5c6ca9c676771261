//! JSON and SSE requests to a coordinator.

use std::time::{Duration, Instant};

use futures::StreamExt;
use serde_json::Value;

use crate::sse;

/// An HTTP client of one coordinator.
#[derive(Clone, Debug)]
pub struct Client {
    base: String,
    http: reqwest::Client,
}

/// A JSON answer.
#[derive(Clone, Debug)]
pub struct Answer {
    /// HTTP status.
    pub status: u16,
    /// Headers.
    pub headers: reqwest::header::HeaderMap,
    /// The body; `Value::Null` where it is no JSON.
    pub body: Value,
    /// The body as text.
    pub text: String,
}

impl Client {
    /// A client of `http://HOST:PORT`. Each request gives up after two minutes: a hang fails the test.
    pub fn new(base: &str) -> Self {
        let http = reqwest::Client::builder().timeout(Duration::from_secs(120)).no_proxy().build().unwrap();
        Self { base: base.to_owned(), http }
    }

    /// GET.
    pub async fn get(&self, path: &str) -> Answer {
        answer(self.http.get(format!("{}{path}", self.base)).send().await.expect("GET")).await
    }

    /// POST a JSON body.
    pub async fn post(&self, path: &str, body: &Value) -> Answer {
        answer(self.raw(path, body).await).await
    }

    /// POST any body as JSON content.
    pub async fn post_text(&self, path: &str, body: String) -> Answer {
        let request = self.http.post(format!("{}{path}", self.base)).header("content-type", "application/json").body(body);
        answer(request.send().await.expect("POST")).await
    }

    /// POST and leave the body unread.
    pub async fn raw(&self, path: &str, body: &Value) -> reqwest::Response {
        let request = self.http.post(format!("{}{path}", self.base)).header("content-type", "application/json");
        request.body(body.to_string()).send().await.expect("POST")
    }

    /// POST with `stream: true` and read all events; the framing is checked.
    pub async fn stream(&self, path: &str, body: &Value) -> sse::Stream {
        let mut body = body.clone();
        body["stream"] = true.into();
        let response = self.raw(path, &body).await;
        let status = response.status().as_u16();
        let content_type = response.headers().get("content-type").map(|v| v.to_str().unwrap().to_owned()).unwrap_or_default();
        let mut bytes = Vec::new();
        let mut chunks = response.bytes_stream();
        while let Some(chunk) = chunks.next().await {
            bytes.extend_from_slice(&chunk.expect("the stream ends by itself"));
        }
        assert_eq!(status, 200, "{}", String::from_utf8_lossy(&bytes));
        assert!(content_type.starts_with("text/event-stream"), "{content_type}");
        sse::Stream::parse(&bytes)
    }

    /// POST with `stream: true`, to be read event by event. Dropping it closes the connection.
    pub async fn live(&self, path: &str, body: &Value) -> Live {
        let mut body = body.clone();
        body["stream"] = true.into();
        let response = self.raw(path, &body).await;
        let status = response.status().as_u16();
        if status != 200 {
            panic!("{status}: {}", response.text().await.unwrap_or_default());
        }
        Live { response, bytes: Vec::new(), parsed: 0 }
    }

    /// One sample of `/metrics`, summed over the label sets that contain `labels` (`key="value"` fragments).
    pub async fn metric(&self, name: &str, labels: &[&str]) -> f64 {
        metric_in(&self.get("/metrics").await.text, name, labels)
    }

    /// Waits until a metric satisfies `wanted`.
    pub async fn wait_metric(&self, name: &str, labels: &[&str], limit: Duration, wanted: impl Fn(f64) -> bool) {
        let until = Instant::now() + limit;
        loop {
            let value = self.metric(name, labels).await;
            if wanted(value) {
                return;
            }
            assert!(Instant::now() < until, "{name}{labels:?} is still {value}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

/// A stream that is being read.
pub struct Live {
    response: reqwest::Response,
    bytes: Vec<u8>,
    parsed: usize,
}

impl Live {
    /// Reads until `events` more events (comments not counted) have arrived; false where the stream ended before.
    pub async fn read(&mut self, events: usize) -> bool {
        let mut left = events;
        loop {
            while let Some(end) = self.bytes[self.parsed..].windows(2).position(|pair| pair == b"\n\n") {
                let comment = self.bytes[self.parsed] == b':';
                self.parsed += end + 2;
                left -= usize::from(!comment);
                if left == 0 {
                    return true;
                }
            }
            match self.response.chunk().await.expect("the stream goes on") {
                Some(chunk) => self.bytes.extend_from_slice(&chunk),
                None => return false,
            }
        }
    }

    /// The data of the next event; `None` where the stream ends.
    pub async fn next(&mut self) -> Option<String> {
        let from = loop {
            let from = self.parsed;
            if !self.read(1).await {
                return None;
            }
            // Comments may stand before it.
            let event = &self.bytes[from..self.parsed];
            if let Some(at) = event.windows(6).position(|part| part == b"data: ") {
                break from + at + 6;
            }
        };
        Some(String::from_utf8_lossy(&self.bytes[from..self.parsed]).trim_end().to_owned())
    }

    /// Reads to the end.
    pub async fn finish(mut self) -> sse::Stream {
        while let Some(chunk) = self.response.chunk().await.expect("the stream ends by itself") {
            self.bytes.extend_from_slice(&chunk);
        }
        sse::Stream::parse(&self.bytes)
    }
}

/// A sample of Prometheus text, summed over matching label sets (0 where none matches). A family that is not there at all is a mistake
/// in the test, which could never fail. Of a histogram, `NAME_count` and `NAME_sum` are samples.
pub fn metric_in(text: &str, name: &str, labels: &[&str]) -> f64 {
    let family = |name: &str| text.contains(&format!("# TYPE {name} "));
    let histogram = name.strip_suffix("_count").or(name.strip_suffix("_sum"));
    assert!(family(name) || histogram.is_some_and(family), "there is no metric {name}");
    text.lines()
        .filter(|line| {
            line.strip_prefix(name).is_some_and(|rest| rest.starts_with([' ', '{'])) && labels.iter().all(|label| line.contains(label))
        })
        .filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok())
        .sum()
}

async fn answer(response: reqwest::Response) -> Answer {
    let (status, headers) = (response.status().as_u16(), response.headers().clone());
    let text = response.text().await.expect("body");
    Answer { status, headers, body: serde_json::from_str(&text).unwrap_or(Value::Null), text }
}
