//! One streamed answer of `/v1/chat/completions`: reasoning and content as they come, and what it cost.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use serde_json::Value;

use crate::{
    client::{chain, sse::Events},
    failure::Failure,
};

/// New text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// Of the reasoning.
    Reasoning(String),
    /// Of the answer.
    Content(String),
}

/// An answer that is still coming.
pub struct Answer {
    response: reqwest::Response,
    events: Events,
    ready: VecDeque<Piece>,
    tally: Tally,
    over: bool,
}

/// What has come so far.
#[derive(Debug, Default)]
struct Tally {
    content: String,
    finish: Option<String>,
    completion_tokens: Option<u64>,
    began: Option<Instant>,
    first: Option<Duration>,
}

impl Answer {
    /// Of a response whose status is a success.
    pub fn begin(response: reqwest::Response) -> Self {
        let tally = Tally { began: Some(Instant::now()), ..Tally::default() };
        Self { response, events: Events::default(), ready: VecDeque::new(), tally, over: false }
    }

    /// The next piece; `None` at the end. Cancel-safe.
    ///
    /// # Errors
    /// The stream broke, or the server reports an error in it.
    pub async fn next(&mut self) -> Result<Option<Piece>, Failure> {
        loop {
            if let Some(piece) = self.ready.pop_front() {
                return Ok(Some(piece));
            }
            if self.over {
                return Ok(None);
            }
            let bytes =
                self.response.chunk().await.map_err(|error| Failure::unavailable(format!("the answer broke off: {}", chain(&error))))?;
            let Some(bytes) = bytes else {
                return Err(Failure::unavailable("the server closed the connection before the answer was over"));
            };
            for data in self.events.push(&bytes) {
                if data == "[DONE]" {
                    self.over = true;
                } else {
                    self.ready.extend(self.tally.take(&data)?);
                }
            }
        }
    }

    /// The answer's text so far, without reasoning.
    pub fn content(&self) -> &str {
        &self.tally.content
    }

    /// One line about length, speed and an unusual end; `None` before anything came.
    pub fn summary(&self) -> Option<String> {
        self.tally.summary()
    }
}

impl Tally {
    fn take(&mut self, data: &str) -> Result<Vec<Piece>, Failure> {
        let event: Value =
            serde_json::from_str(data).map_err(|error| Failure::unavailable(format!("the server sent no JSON: {error}: {data:.200}")))?;
        if !event["error"].is_null() {
            let message = event["error"]["message"].as_str().map_or_else(|| event["error"].to_string(), str::to_owned);
            return Err(Failure::unavailable(message));
        }
        if let Some(tokens) = event["usage"]["completion_tokens"].as_u64() {
            self.completion_tokens = Some(tokens);
        }
        let choice = &event["choices"][0];
        if let Some(finish) = choice["finish_reason"].as_str() {
            self.finish = Some(finish.to_owned());
        }
        let text = |key: &str| choice["delta"][key].as_str().filter(|text| !text.is_empty()).map(str::to_owned);
        let reasoning = text("reasoning_content").or_else(|| text("reasoning")).map(Piece::Reasoning);
        let content = text("content").map(|content| {
            self.content.push_str(&content);
            Piece::Content(content)
        });
        let pieces: Vec<Piece> = reasoning.into_iter().chain(content).collect();
        if !pieces.is_empty() && self.first.is_none() {
            self.first = self.began.map(|began| began.elapsed());
        }
        Ok(pieces)
    }

    fn summary(&self) -> Option<String> {
        let (first, all) = (self.first?, self.began?.elapsed());
        let mut parts = Vec::new();
        if let Some(tokens) = self.completion_tokens {
            parts.push(format!("{tokens} tokens"));
            let decode = all.saturating_sub(first).as_secs_f64();
            if tokens > 1 && decode > 0.0 {
                parts.push(format!("{:.1} tokens/s", (tokens - 1) as f64 / decode));
            }
        }
        parts.push(format!("first after {:.2} s", first.as_secs_f64()));
        match self.finish.as_deref() {
            Some("stop") => {}
            Some("length") => parts.push("cut off by the length limit".into()),
            Some(other) => parts.push(format!("ended by {other}")),
            None => parts.push("stopped".into()),
        }
        Some(parts.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deltas_become_pieces_and_a_summary() {
        let mut tally = Tally { began: Some(Instant::now()), ..Tally::default() };
        assert_eq!(tally.summary(), None);
        let delta = |delta: &str| format!(r#"{{"choices":[{{"delta":{delta},"finish_reason":null}}]}}"#);
        let mut take = |data: &str| tally.take(data).expect("no error");
        assert_eq!(take(&delta(r#"{"role":"assistant","content":""}"#)), []);
        // Both spellings carry the same text: it is shown once.
        assert_eq!(take(&delta(r#"{"reasoning_content":"hm","reasoning":"hm"}"#)), [Piece::Reasoning("hm".into())]);
        assert_eq!(take(&delta(r#"{"reasoning":"m"}"#)), [Piece::Reasoning("m".into())]);
        assert_eq!(take(&delta(r#"{"content":"a\nb"}"#)), [Piece::Content("a\nb".into())]);
        assert_eq!(take(r#"{"choices":[{"delta":{},"finish_reason":"length"}]}"#), []);
        assert_eq!(take(r#"{"choices":[],"usage":{"completion_tokens":3}}"#), []);
        let summary = tally.summary().expect("something came");
        assert!(summary.starts_with("3 tokens, ") && summary.ends_with("cut off by the length limit"), "{summary}");
        assert_eq!(tally.content, "a\nb");
    }

    #[test]
    fn an_error_in_the_stream_is_the_failure() {
        let failure = Tally::default().take(r#"{"error":{"message":"no worker","type":"x"}}"#).expect_err("an error");
        assert_eq!(failure.reason, "no worker");
        assert!(Tally::default().take("nonsense").expect_err("no JSON").reason.contains("no JSON"));
    }
}
