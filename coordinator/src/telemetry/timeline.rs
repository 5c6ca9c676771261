//! One request's way through time: what each of its events adds to the metrics.

use std::time::Duration;

use super::{Outcome, Telemetry};
use crate::engine::GenerationEvent;

/// When what happened to a request; times are since the coordinator's start.
#[derive(Debug)]
pub(crate) struct Timeline {
    prompt: usize,
    admitted: Duration,
    started: Option<Duration>,
    first: Option<Duration>,
    last: Duration,
    tokens: u32,
    /// Tokens that the counter has. The newest event's are held back until the next one, since a stop string may cut them off.
    counted: u32,
}

impl Timeline {
    /// Of a request with a prompt of that many tokens.
    pub(crate) fn new(now: Duration, prompt: usize) -> Self {
        Self { prompt, admitted: now, started: None, first: None, last: now, tokens: 0, counted: 0 }
    }

    /// When it was admitted.
    pub(crate) fn admitted(&self) -> Duration {
        self.admitted
    }

    /// An event is on its way to the client.
    pub(crate) fn event(&mut self, telemetry: &Telemetry, now: Duration, event: &GenerationEvent) {
        match event {
            GenerationEvent::Started { cached_tokens } => {
                self.started = Some(now);
                if let Some(cached) = cached_tokens {
                    telemetry.prefix_queries.add(self.prompt as u64);
                    telemetry.prefix_hits.add(u64::from(*cached));
                }
                telemetry.queue.record(seconds(self.admitted, now));
            }
            GenerationEvent::PromptLogprobs(_) => {}
            GenerationEvent::Tokens(tokens) => self.tokens(telemetry, now, tokens.len() as u32),
            GenerationEvent::Finished { reason } => self.end(telemetry, now, (*reason).into(), None),
            GenerationEvent::Error(_) => self.end(telemetry, now, Outcome::Error, None),
        }
    }

    fn tokens(&mut self, telemetry: &Telemetry, now: Duration, new: u32) {
        if self.first.is_none() {
            self.first = Some(now);
            telemetry.ttft.record(seconds(self.admitted, now));
            telemetry.prompt_tokens.add(self.prompt as u64);
            telemetry.prefill.record(seconds(self.started.unwrap_or(self.admitted), now));
        } else {
            let each = seconds(self.last, now) / f64::from(new.max(1));
            for _ in 0..new {
                telemetry.inter_token.record(each);
            }
        }
        self.last = now;
        self.count(telemetry, self.tokens);
        self.tokens += new;
    }

    fn count(&mut self, telemetry: &Telemetry, upto: u32) {
        telemetry.generation_tokens.add(u64::from(upto.saturating_sub(self.counted)));
        self.counted = self.counted.max(upto);
    }

    /// The request is over. `kept`: tokens up to a stop string.
    pub(crate) fn end(&mut self, telemetry: &Telemetry, now: Duration, outcome: Outcome, kept: Option<u32>) {
        let tokens = kept.unwrap_or(self.tokens).min(self.tokens);
        self.count(telemetry, tokens);
        telemetry.outcomes[outcome as usize].add(1);
        telemetry.whole.record(seconds(self.admitted, now));
        if matches!(outcome, Outcome::Abort | Outcome::Error) {
            return;
        }
        telemetry.request_prompt_tokens.record(self.prompt as f64);
        telemetry.request_generation_tokens.record(f64::from(tokens));
        let started = self.started.unwrap_or(self.admitted);
        for inference in &telemetry.inference {
            inference.record(seconds(started, now));
        }
        let Some(first) = self.first else { return };
        telemetry.decode.record(seconds(first, self.last));
        if tokens > 1 {
            for per_token in &telemetry.per_token {
                per_token.record(seconds(first, self.last) / f64::from(tokens - 1));
            }
        }
    }
}

fn seconds(from: Duration, to: Duration) -> f64 {
    to.saturating_sub(from).as_secs_f64()
}
