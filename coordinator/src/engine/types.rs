//! Plain data that crosses the [`Engine`](super::Engine) seam. No transport types: `services/attn.rs` converts to and from attn.v1.

use std::sync::Arc;
use std::time::Duration;

/// One sequence to generate: one choice of one API request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerateRequest {
    /// Token ids of the whole prompt; at least one, each below the vocabulary size.
    pub prompt_ids: Vec<u32>,
    /// How to pick tokens.
    pub sampling: SamplingParams,
    /// Index among the `n` choices of its API request: part of the sampler's RNG key.
    pub choice: u32,
    /// Ids that end the sequence (not emitted); empty with `ignore_eos`.
    pub stop_ids: Vec<u32>,
    /// Most tokens to generate; at least 1 unless `prompt_logprobs` is set.
    pub max_tokens: u32,
    /// `stop_ids` are banned before that many generated tokens.
    pub min_tokens: u32,
    /// Top-n logprobs with each token; 0 = only the token's own; `None` = none.
    pub logprobs: Option<u32>,
    /// The same for each prompt position from the second on.
    pub prompt_logprobs: Option<u32>,
    /// The form that the answer is held to.
    pub guide: Option<Guide>,
    /// How long the thought may be that the prompt has opened.
    pub thought: Option<ThoughtLimit>,
    /// Time from admission until the request ends with [`ErrorCode::Deadline`]; `None` = the coordinator's `request_timeout`.
    pub deadline: Option<Duration>,
    /// The id that the client sees; for logs only.
    pub request_id: String,
}

/// A grammar over a sequence's text. It was compiled with the model's vocabulary before the request was admitted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Guide {
    /// What [`tandem_grammar::Grammar::to_text`] wrote.
    pub grammar: Arc<str>,
    /// It holds behind the first occurrence of this text; from the beginning if it is empty.
    pub after: String,
}

/// A thought that ends when it has had its tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ThoughtLimit {
    /// Most of them before it is closed.
    pub tokens: u32,
    /// What closes it: generated in this order where the model has not done so by itself. Not empty.
    pub close: Arc<[u32]>,
}

/// Sampler settings of one sequence, with neutral values as default (greedy).
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// 0 = greedy.
    pub temperature: f32,
    /// Keep the k likeliest; 0 = all.
    pub top_k: u32,
    /// Keep the likeliest until their probabilities reach p; 1 = all.
    pub top_p: f32,
    /// Drop tokens below this share of the likeliest one's probability; 0 = none.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens seen in prompt or output; 1 = off.
    pub repetition_penalty: f32,
    /// Subtracted per occurrence in the output; 0 = off.
    pub frequency_penalty: f32,
    /// Subtracted once per token seen in the output; 0 = off.
    pub presence_penalty: f32,
    /// Key of the counter-based RNG, with the choice index and the token's position.
    pub seed: u64,
    /// Added to the logits of these ids.
    pub logit_bias: Vec<(u32, f32)>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            seed: 0,
            logit_bias: Vec::new(),
        }
    }
}

/// What happens to one sequence, in order: `Started` once, `PromptLogprobs` pieces if asked for, `Tokens`, then one end event. A restart
/// of a worker shows nowhere in it.
#[derive(Clone, Debug, PartialEq)]
pub enum GenerationEvent {
    /// Prefill began.
    Started {
        /// Tokens of the prompt whose state came from the worker's prefix cache; `None` where it was not asked.
        cached_tokens: Option<u32>,
    },
    /// The next prompt positions, ascending; the first piece begins at position 1 (the second token).
    PromptLogprobs(Vec<PromptPosition>),
    /// Tokens of one step, in order; never empty.
    Tokens(Vec<TokenEvent>),
    /// The end: complete.
    Finished {
        /// Why.
        reason: Finish,
    },
    /// The end: failed. Tokens sent before stay valid.
    Error(GenerationError),
}

impl GenerationEvent {
    /// Whether no event follows this one.
    pub fn is_end(&self) -> bool {
        matches!(self, Self::Finished { .. } | Self::Error(_))
    }
}

/// One generated token.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenEvent {
    /// Token id.
    pub id: u32,
    /// 0-based among the generated tokens; consecutive.
    pub index: u32,
    /// Its own logprob, if `logprobs` was asked for.
    pub logprob: Option<TokenLogprob>,
    /// The likeliest alternatives, best first.
    pub top: Vec<TokenLogprob>,
}

/// Log-probability of one token at one position.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenLogprob {
    /// Token id.
    pub id: u32,
    /// Natural log of its probability.
    pub logprob: f32,
    /// 1 = the likeliest.
    pub rank: u32,
}

/// Logprobs of one prompt position.
#[derive(Clone, Debug, PartialEq)]
pub struct PromptPosition {
    /// The prompt's token there.
    pub actual: TokenLogprob,
    /// The likeliest tokens there, best first.
    pub top: Vec<TokenLogprob>,
}

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// A stop id was drawn (and not emitted).
    Stop {
        /// Which one.
        id: u32,
    },
    /// `max_tokens` were generated.
    Length,
}

/// The end of a sequence that failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct GenerationError {
    /// Kind of failure.
    pub code: ErrorCode,
    /// One line for the client.
    pub message: String,
}

/// Kind of failure of a running sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorCode {
    /// The attention worker found that the request can never be served (HTTP 400).
    Invalid,
    /// A NaN or infinity in this sequence's rows (500).
    NonFinite,
    /// The request's deadline passed (504).
    Deadline,
    /// No worker for a needed shard before the deadline (503).
    ExpertsUnavailable,
    /// The instance shut down before the request ended (503).
    Draining,
    /// Anything else (500).
    Internal,
}

/// Why a request was not admitted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AdmissionError {
    /// Too many requests wait (HTTP 429 + Retry-After).
    #[error("the queue is full: {limit} requests are waiting (limit {limit}); retry in {} s", retry_after.as_secs())]
    QueueFull {
        /// Most requests that may wait.
        limit: usize,
        /// When a place is likely to be free.
        retry_after: Duration,
    },
    /// The sequence cannot fit (400).
    #[error("prompt is too long: {prompt} tokens + {max_tokens} new tokens > {limit} maximum; the maximum context length is {limit}")]
    TooLong {
        /// Prompt tokens.
        prompt: u64,
        /// New tokens asked for.
        max_tokens: u32,
        /// Most tokens in all.
        limit: u64,
    },
    /// The instance is shutting down (503 + Retry-After).
    #[error("the server is shutting down and takes no new requests")]
    Draining,
    /// No token can be made now (503 + Retry-After).
    #[error("the server is not ready: {}", reasons.join("; "))]
    NotReady {
        /// Every reason, as in [`Readiness`].
        reasons: Vec<String>,
    },
    /// A field can never be served (400).
    #[error("{message}")]
    Invalid {
        /// Name of the API field.
        field: &'static str,
        /// What was needed and what was there.
        message: String,
    },
}

/// What a request may ask for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Limits {
    /// Most tokens of one sequence, prompt included.
    pub max_seq_len: u32,
    /// Sequences that run at once, over all attention workers.
    pub max_batch: u32,
    /// Tokens that one attention worker's latent pool holds in all.
    pub kv_tokens: u64,
}

impl Limits {
    /// Most tokens of one sequence that also fit the pool.
    pub fn longest(&self) -> u64 {
        u64::from(self.max_seq_len).min(self.kv_tokens)
    }
}

/// Whether a token can be made now.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Readiness {
    /// True exactly when `reasons` is empty.
    pub ready: bool,
    /// What is missing, one short line each.
    pub reasons: Vec<String>,
}

impl Readiness {
    /// Ready, or not for these reasons.
    pub fn from_reasons(reasons: Vec<String>) -> Self {
        Self { ready: reasons.is_empty(), reasons }
    }
}
