//! The seam between the HTTP APIs (`api/`) and everything behind them: a request in token ids goes in, a stream of events comes out.
//! Row 4 of the life of a token. Behind it stand `core.rs` (scheduler, journal, attention workers) or, in tests, `engine/scripted.rs`.

use std::sync::Arc;

use tokio::sync::mpsc;

use crate::stats::Stats;

mod scripted;
mod types;

pub use scripted::{ScriptedGeneration, ScriptedWorker};
pub use types::{
    AdmissionError, ErrorCode, Finish, GenerateRequest, GenerationError, GenerationEvent, Guide, Limits, PromptPosition, Readiness,
    SamplingParams, ThoughtLimit, TokenEvent, TokenLogprob,
};

/// What stands behind an [`Engine`]. Calls MUST NOT block: they are made from async request handlers.
pub(crate) trait Inner: Send + Sync {
    /// Admits all of `requests` or none.
    fn submit(&self, requests: Vec<GenerateRequest>) -> Result<Vec<Generation>, AdmissionError>;
    /// What a request may ask for; zeros before an attention worker has joined.
    fn limits(&self) -> Limits;
    /// Whether a token can be made now.
    fn readiness(&self) -> Readiness;
    /// What is going on now.
    fn stats(&self) -> Stats;
}

/// Handle to the serving instance. Cloning is cheap; all clones are the same instance.
#[derive(Clone)]
pub struct Engine {
    inner: Arc<dyn Inner>,
}

impl Engine {
    pub(crate) fn new(inner: Arc<dyn Inner>) -> Self {
        Self { inner }
    }

    /// An engine with no workers: requests arrive at the returned [`ScriptedWorker`], which answers them as it likes. It is ready,
    /// and it admits whatever fits `limits`.
    pub fn scripted(limits: Limits) -> (Self, ScriptedWorker) {
        let (inner, worker) = scripted::pair(limits);
        (Self::new(inner), worker)
    }

    /// Admits `requests` (the `n` choices of one API request) all together or not at all, in that order.
    ///
    /// # Errors
    /// [`AdmissionError`] says why and, where it makes sense, when to come back. Nothing is queued then.
    pub fn submit(&self, requests: Vec<GenerateRequest>) -> Result<Vec<Generation>, AdmissionError> {
        self.inner.submit(requests)
    }

    /// What a request may ask for: zeros until the first attention worker has joined.
    pub fn limits(&self) -> Limits {
        self.inner.limits()
    }

    /// Whether a token can be made now, and if not, every reason.
    pub fn readiness(&self) -> Readiness {
        self.inner.readiness()
    }

    /// What is going on now.
    pub fn stats(&self) -> Stats {
        self.inner.stats()
    }
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("limits", &self.limits()).field("readiness", &self.readiness()).finish()
    }
}

/// One admitted sequence. Dropping it cancels the sequence in whatever phase it is: queued, prefill, decode or waiting for experts.
#[derive(Debug)]
pub struct Generation {
    id: u64,
    events: mpsc::UnboundedReceiver<GenerationEvent>,
    /// Is told when the value goes before its end.
    cancel: mpsc::UnboundedSender<Departure>,
    ended: bool,
}

/// A client's side of a sequence went before the sequence's end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Departure {
    /// Whose.
    pub id: u64,
    /// `Some`: complete from the client's view, with that many tokens (a stop string); `None`: abandoned.
    pub kept: Option<u32>,
}

impl Generation {
    /// A generation and the sender of its events. `cancel` is told when the generation goes before its end.
    pub(crate) fn channel(id: u64, cancel: mpsc::UnboundedSender<Departure>) -> (mpsc::UnboundedSender<GenerationEvent>, Self) {
        let (sender, events) = mpsc::unbounded_channel();
        (sender, Self { id, events, cancel, ended: false })
    }

    /// The next event; `None` after [`GenerationEvent::Finished`] or [`GenerationEvent::Error`]. If the other side vanishes without
    /// either, one `Error` with [`ErrorCode::Internal`] is made up, so that a caller always sees an end. Cancel-safe.
    pub async fn next(&mut self) -> Option<GenerationEvent> {
        if self.ended {
            return None;
        }
        let event = self.events.recv().await.unwrap_or_else(|| {
            GenerationEvent::Error(GenerationError {
                code: ErrorCode::Internal,
                message: "the engine stopped before the request ended".into(),
            })
        });
        self.ended = event.is_end();
        Some(event)
    }

    /// Ends the sequence because its text is complete: a stop string was found. `kept` = tokens that belong to the answer; later ones that
    /// are on their way are dropped and not counted.
    pub fn complete(mut self, kept: u32) {
        self.depart(Some(kept));
    }

    fn depart(&mut self, kept: Option<u32>) {
        if !std::mem::replace(&mut self.ended, true) {
            // No receiver means that the engine is gone and has nothing left to cancel.
            let _ = self.cancel.send(Departure { id: self.id, kept });
        }
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        self.depart(None);
    }
}

/// The largest sum of prompt and new tokens that one sequence may reach.
pub(crate) fn sequence_limit(limits: Limits) -> u64 {
    u64::from(limits.max_seq_len).min(limits.kv_tokens)
}

/// Refuses what can never be served within `limits`.
pub(crate) fn check_request(request: &GenerateRequest, limits: Limits) -> Result<(), AdmissionError> {
    let invalid = |field: &'static str, message: String| Err(AdmissionError::Invalid { field, message });
    if request.prompt_ids.is_empty() {
        return invalid("prompt", "the prompt has no tokens; at least one is needed".into());
    }
    if request.max_tokens == 0 && request.prompt_logprobs.is_none() {
        return invalid("max_tokens", "max_tokens is 0; at least 1 is needed unless prompt_logprobs is set".into());
    }
    let limit = sequence_limit(limits);
    let prompt = request.prompt_ids.len() as u64;
    if prompt + u64::from(request.max_tokens) > limit {
        return Err(AdmissionError::TooLong { prompt, max_tokens: request.max_tokens, limit });
    }
    Ok(())
}
