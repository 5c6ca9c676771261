//! The running sequences of one request, merged into one stream of updates.
//!
//! A [`Run`] owns its [`Generation`]s, and dropping one cancels its sequence. So a client that goes away cancels everything in every
//! phase: the server drops the handler (not streamed) or the body (streamed), and with it the run.

use futures::future::BoxFuture;
use futures::stream::{FuturesUnordered, StreamExt};

use super::ApiError;
use super::choice::{Choice, Delta, End, TokenOut};
use crate::engine::{Generation, GenerationEvent};
use crate::text::Part;

/// What happened to one sequence of a run.
#[derive(Debug)]
pub enum Update {
    /// Sequence `.0` went on.
    Delta(usize, Delta),
    /// A sequence failed, and with it the request: all others are cancelled.
    Failed(ApiError),
}

/// One prompt of a run.
#[derive(Clone, Debug)]
pub struct RunPrompt {
    /// Its tokens.
    pub ids: Vec<u32>,
    /// Its text, for `echo`.
    pub text: String,
}

type Step = BoxFuture<'static, (usize, Generation, Option<GenerationEvent>)>;

/// The sequences of one request. Sequence `i` belongs to prompt `i / n`.
pub struct Run {
    steps: FuturesUnordered<Step>,
    /// The sequences' texts and counts.
    pub choices: Vec<Choice>,
    /// The prompts.
    pub prompts: Vec<RunPrompt>,
    /// Choices per prompt.
    pub n: usize,
    request_id: String,
    /// All sequences ended, or the request failed.
    over: bool,
}

/// The whole answer of one sequence.
#[derive(Debug, Default)]
pub struct Whole {
    /// Its text, in order; neighbours are of different kinds.
    pub parts: Vec<Part>,
    /// The tokens that count.
    pub tokens: Vec<TokenOut>,
    /// How it ended.
    pub end: Option<End>,
}

impl Run {
    /// Joins `generations` with their texts, `n` for each prompt.
    pub fn new(generations: Vec<Generation>, choices: Vec<Choice>, prompts: Vec<RunPrompt>, n: usize, request_id: String) -> Self {
        let steps = generations.into_iter().enumerate().map(|(i, generation)| step(i, generation)).collect();
        Self { steps, choices, prompts, n, request_id, over: false }
    }

    /// The prompt of sequence `choice`.
    pub fn prompt_of(&self, choice: usize) -> &RunPrompt {
        &self.prompts[choice / self.n.max(1)]
    }

    /// Tokens of all prompts; a prompt counts once, however many choices it has.
    pub fn prompt_tokens(&self) -> u64 {
        self.prompts.iter().map(|prompt| prompt.ids.len() as u64).sum()
    }

    /// Tokens generated so far.
    pub fn completion_tokens(&self) -> u64 {
        self.choices.iter().map(|choice| u64::from(choice.completion_tokens)).sum()
    }

    /// Of these, tokens of reasoning.
    pub fn reasoning_tokens(&self) -> u64 {
        self.choices.iter().map(|choice| u64::from(choice.reasoning_tokens)).sum()
    }

    /// The next update that shows; `None` when all sequences have ended, or one has failed. Cancel-safe.
    pub async fn next(&mut self) -> Option<Update> {
        loop {
            let Some((i, generation, event)) = self.steps.next().await else {
                self.over = true;
                return None;
            };
            let choice = &mut self.choices[i];
            let delta = match event {
                Some(GenerationEvent::Started { cached_tokens }) => {
                    choice.cached_tokens = cached_tokens.unwrap_or(0);
                    None
                }
                Some(GenerationEvent::PromptLogprobs(mut positions)) => {
                    choice.prompt_positions.append(&mut positions);
                    None
                }
                Some(GenerationEvent::Tokens(events)) => Some(choice.tokens(events)),
                Some(GenerationEvent::Finished { reason }) => Some(choice.finish(reason)),
                Some(GenerationEvent::Error(error)) => return Some(self.fail(error.into())),
                None => return Some(self.fail(ApiError::internal("a sequence ended without a reason"))),
            };
            if choice.is_ended() {
                // One that ended at a stop string is cancelled at once, as complete; to one that ended by itself this is nothing new.
                generation.complete(choice.completion_tokens);
            } else {
                self.steps.push(step(i, generation));
            }
            if let Some(delta) = delta {
                return Some(Update::Delta(i, delta));
            }
        }
    }

    /// Prompt tokens that came from the prefix cache. A prompt counts once, with its first choice.
    pub fn cached_tokens(&self) -> u64 {
        self.choices.iter().step_by(self.n.max(1)).map(|choice| u64::from(choice.cached_tokens)).sum()
    }

    fn fail(&mut self, error: ApiError) -> Update {
        self.steps.clear();
        self.over = true;
        tracing::warn!(request_id = %self.request_id, status = error.status.as_u16(), "request failed: {}", error.message);
        Update::Failed(error)
    }

    /// Waits for all sequences.
    pub async fn collect(&mut self) -> Result<Vec<Whole>, ApiError> {
        let mut all: Vec<Whole> = self.choices.iter().map(|_| Whole::default()).collect();
        while let Some(update) = self.next().await {
            match update {
                Update::Delta(i, delta) => all[i].add(delta),
                Update::Failed(error) => return Err(error),
            }
        }
        Ok(all)
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        if !self.over {
            metrics::counter!("tandem_http_client_disconnects_total").increment(1);
            tracing::info!(request_id = %self.request_id, "client went away; its sequences are cancelled");
        }
    }
}

impl Whole {
    fn add(&mut self, delta: Delta) {
        for part in delta.parts {
            part.join(&mut self.parts);
        }
        self.tokens.extend(delta.tokens);
        self.end = delta.end.or(self.end.take());
    }

    /// All of the reasoning.
    pub fn reasoning(&self) -> String {
        self.parts.iter().filter_map(|part| if let Part::Reasoning(text) = part { Some(text.as_str()) } else { None }).collect()
    }

    /// All of the content.
    pub fn content(&self) -> String {
        self.parts.iter().filter_map(|part| if let Part::Content(text) = part { Some(text.as_str()) } else { None }).collect()
    }

    /// Names and arguments of the calls.
    pub fn calls(&self) -> Vec<(&str, String)> {
        let mut calls: Vec<(&str, String)> = Vec::new();
        for part in &self.parts {
            match (part, calls.last_mut()) {
                (Part::Call(name), _) => calls.push((name, String::new())),
                (Part::Arguments(text), Some(call)) => call.1.push_str(text),
                _ => {}
            }
        }
        calls
    }
}

fn step(i: usize, mut generation: Generation) -> Step {
    Box::pin(async move {
        let event = generation.next().await;
        (i, generation, event)
    })
}
