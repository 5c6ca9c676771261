//! What the routes share: the engine, the model's text side, and the settings.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::http::HeaderValue;
use tandem_grammar::{GrammarError, Vocabulary};
use tandem_model::Checkpoint;
use tokio::sync::Semaphore;

use super::{ApiError, Keys};
use crate::engine::{Engine, Limits};
use crate::text::glm::CLOSE;
use crate::text::{ChatTemplate, TemplateError, Tokenizer, TokenizerError};

/// Everything that [`super::router`] needs.
pub struct ApiParts {
    /// Where sequences are generated.
    pub engine: Engine,
    /// The served model.
    pub model: Model,
    /// Settings.
    pub options: Options,
    /// Renders `/metrics`; `None` = that route is 404.
    pub metrics: Option<Arc<dyn Fn() -> String + Send + Sync>>,
    /// What `/livez` asks: the reasons why this process makes no progress, empty when it does.
    pub stuck: Option<Arc<dyn Fn() -> Vec<String> + Send + Sync>>,
}

/// The served model as the API sees it.
pub struct Model {
    /// Names under which it is served; the first one is used in answers. At least one.
    pub names: Vec<String>,
    /// Unix seconds, for `/v1/models`.
    pub created: u64,
    /// Identity of the weights, for `system_fingerprint`.
    pub fingerprint: String,
    /// Rows of the embedding: token ids at or above it are refused.
    pub vocab: u32,
    /// Ids that end a sequence unless `ignore_eos`.
    pub eos_ids: Vec<u32>,
    /// Sampling when the request says nothing.
    pub defaults: Defaults,
    /// Text ↔ ids.
    pub tokenizer: Arc<Tokenizer>,
    /// Messages → text; `None` when the checkpoint has no template (chat is then refused, completions work).
    pub template: Option<Arc<ChatTemplate>>,
}

/// Sampling defaults from `generation_config.json`, already with temperature 0 where it says `do_sample: false`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Defaults {
    /// 0 = greedy.
    pub temperature: f32,
    /// 1 = off.
    pub top_p: f32,
    /// 0 = off.
    pub top_k: u32,
    /// 0 = off.
    pub min_p: f32,
    /// 1 = off.
    pub repetition_penalty: f32,
}

impl Default for Defaults {
    fn default() -> Self {
        Self { temperature: 1.0, top_p: 1.0, top_k: 0, min_p: 0.0, repetition_penalty: 1.0 }
    }
}

/// Why the text side of a checkpoint could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// The tokenizer.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The chat template.
    #[error(transparent)]
    Template(#[from] TemplateError),
}

impl Model {
    /// A model of a checkpoint, with its tokenizer and its template: the ids that end a sequence are the checkpoint's. One
    /// without a template is served without chat.
    ///
    /// # Errors
    /// Names the file or key that is missing or wrong.
    pub fn of(checkpoint: &Checkpoint, names: Vec<String>, defaults: Defaults) -> Result<Self, TextError> {
        let template = match ChatTemplate::of(checkpoint) {
            Ok(template) => Some(Arc::new(template)),
            Err(TemplateError::Absent) => {
                tracing::warn!("{}", TemplateError::Absent);
                None
            }
            Err(error) => return Err(error.into()),
        };
        Ok(Self {
            names,
            created: unix_now(),
            fingerprint: checkpoint.fingerprint().to_owned(),
            vocab: u32::try_from(checkpoint.geometry().vocab).unwrap_or(u32::MAX),
            eos_ids: checkpoint.generation().eos_token_ids.clone(),
            defaults,
            tokenizer: Arc::new(Tokenizer::of(checkpoint)?),
            template,
        })
    }

    /// The name used in answers.
    pub(super) fn name(&self) -> &str {
        self.names.first().map_or("tandem", String::as_str)
    }
}

/// Under which names reasoning is sent. Both by default: clients are split over the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReasoningFields {
    /// `reasoning_content` (DeepSeek, SGLang, z.ai).
    pub reasoning_content: bool,
    /// `reasoning` (vLLM since 2026, OpenRouter).
    pub reasoning: bool,
}

impl Default for ReasoningFields {
    fn default() -> Self {
        Self { reasoning_content: true, reasoning: true }
    }
}

/// Settings of the API.
#[derive(Clone, Debug)]
pub struct Options {
    /// Most `logprobs`, `top_logprobs` and `prompt_logprobs` per token; -1 = the whole vocabulary.
    pub max_logprobs: i64,
    /// Names of the reasoning text.
    pub reasoning_fields: ReasoningFields,
    /// Longest silence on a stream before a comment is sent.
    pub keep_alive: Duration,
    /// Most bytes of a request body; more is 413.
    pub body_limit: usize,
    /// Most sequences of one request (`n` times prompts).
    pub max_choices: u32,
    /// Who may ask.
    pub keys: Arc<Keys>,
    /// Origins of pages that may ask; none by default.
    pub cors_origins: Vec<HeaderValue>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            max_logprobs: 20,
            reasoning_fields: ReasoningFields::default(),
            keep_alive: Duration::from_secs(5),
            body_limit: 64 << 20,
            max_choices: 128,
            keys: Arc::default(),
            cors_origins: Vec::new(),
        }
    }
}

/// The routes' shared state.
pub(super) struct App {
    pub engine: Engine,
    pub model: Model,
    pub options: Options,
    pub metrics: Option<Arc<dyn Fn() -> String + Send + Sync>>,
    pub stuck: Option<Arc<dyn Fn() -> Vec<String> + Send + Sync>>,
    /// Built for the first request that asks for a form.
    vocabulary: OnceLock<Result<Vocabulary, GrammarError>>,
    /// Bounds how many long texts are tokenized at once.
    tokenizing: Semaphore,
}

/// Texts up to this many bytes are tokenized in place (well under a millisecond); longer ones on a blocking thread.
const IN_PLACE: usize = 4096;

impl App {
    pub fn new(parts: ApiParts) -> Self {
        let ApiParts { engine, model, options, metrics, stuck } = parts;
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self { engine, model, options, metrics, stuck, vocabulary: OnceLock::new(), tokenizing: Semaphore::new(cores) }
    }

    /// Whether `name` is the served model; an absent name means it.
    pub fn check_model(&self, name: Option<&str>) -> Result<(), ApiError> {
        match name {
            Some(name) if !self.model.names.iter().any(|n| n == name) => Err(ApiError::model_not_found(name, &self.model.names)),
            _ => Ok(()),
        }
    }

    /// Token ids of a prompt (of `field`, for errors) that an answer is to follow. One that cannot fit by its bytes alone is refused before
    /// minutes of tokenizing; one that fits or may is measured in tokens later.
    pub async fn encode_prompt(&self, field: &str, text: String, add_special: bool) -> Result<Vec<u32>, ApiError> {
        let limit = self.limits()?.longest();
        let least = self.model.tokenizer.least_tokens(&text);
        if least >= limit {
            return Err(ApiError::text_too_long(field, least, text.len(), limit));
        }
        self.encode(text, add_special).await
    }

    /// Token ids of `text`, without holding up the other requests when it is long.
    pub async fn encode(&self, text: String, add_special: bool) -> Result<Vec<u32>, ApiError> {
        let tokenizer = Arc::clone(&self.model.tokenizer);
        let refuse = |e: TokenizerError| ApiError::invalid("prompt", e.to_string());
        if text.len() <= IN_PLACE {
            return tokenizer.encode(&text, add_special).map_err(refuse);
        }
        let _permit = self.tokenizing.acquire().await.map_err(|_| ApiError::internal("tokenizer closed"))?;
        tokio::task::spawn_blocking(move || tokenizer.encode(&text, add_special))
            .await
            .map_err(|e| ApiError::internal(format!("tokenizer failed: {e}")))?
            .map_err(refuse)
    }

    /// The ids that close a thought.
    pub fn close_of_thought(&self) -> Result<Arc<[u32]>, ApiError> {
        let ids = self.model.tokenizer.encode(CLOSE, false).map_err(|e| ApiError::internal(e.to_string()))?;
        Ok(ids.into())
    }

    /// The compiler of grammars. Building it takes a while: not for async threads.
    pub fn vocabulary(&self) -> Result<&Vocabulary, String> {
        let build = || Vocabulary::new(self.model.tokenizer.table(self.model.vocab, &self.model.eos_ids));
        self.vocabulary.get_or_init(build).as_ref().map_err(ToString::to_string)
    }

    /// The engine's limits; 503 while no worker has told them.
    pub fn limits(&self) -> Result<Limits, ApiError> {
        let limits = self.engine.limits();
        if limits.max_seq_len == 0 { Err(ApiError::not_ready(&self.engine.readiness().reasons)) } else { Ok(limits) }
    }
}

/// Seconds since 1970.
pub(super) fn unix_now() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_secs())
}
