//! What attention workers say about their attempts, and what follows from it.

use std::time::Duration;

use super::{Action, AttemptId, Phase, RequestId, Scheduler, WorkerId};
use crate::engine::{ErrorCode, Finish, GenerationEvent, PromptPosition, TokenEvent};
use crate::journal::Broken;

/// One event of one attempt.
#[derive(Clone, Debug, PartialEq)]
pub enum WorkerEvent {
    /// Prefill begins (again, after a preemption).
    Started {
        /// Tokens of the prompt whose state came from the prefix cache; `None` where it was not asked.
        cached_tokens: Option<u32>,
    },
    /// Prompt logprobs from position `first` on.
    PromptLogprobs {
        /// Position of the first entry; the prompt's second token is 1.
        first: u32,
        /// Consecutive positions.
        positions: Vec<PromptPosition>,
    },
    /// A token.
    Token(TokenEvent),
    /// Complete.
    Finished(Finish),
    /// The worker dropped the attempt, asked or not.
    Cancelled,
    /// Failed.
    Failed {
        /// Kind.
        code: ErrorCode,
        /// One line.
        message: String,
    },
}

impl Scheduler {
    /// Events of one worker, in their order. Those of attempts that are over, or that run elsewhere now, are dropped.
    pub fn events(&mut self, now: Duration, worker: WorkerId, events: impl IntoIterator<Item = (AttemptId, WorkerEvent)>) {
        for (attempt, event) in events {
            if let Some(id) = self.current(worker, attempt) {
                self.event(now, id, event);
            }
        }
        self.dispatch(now);
    }

    /// The request that this attempt of this worker runs.
    fn current(&self, worker: WorkerId, attempt: AttemptId) -> Option<RequestId> {
        let id = *self.attempts.get(&attempt)?;
        let Phase::Running { worker: on, .. } = self.entries.get(&id)?.phase else { return None };
        (on == worker).then_some(id)
    }

    fn event(&mut self, now: Duration, id: RequestId, event: WorkerEvent) {
        match event {
            WorkerEvent::Started { cached_tokens } => self.started(id, cached_tokens),
            WorkerEvent::PromptLogprobs { first, positions } => self.prompt(now, id, first, positions),
            WorkerEvent::Token(token) => self.token(now, id, token),
            WorkerEvent::Finished(reason) => self.finish(now, id, reason),
            WorkerEvent::Cancelled => self.requeue(now, id, "the attention worker dropped it"),
            WorkerEvent::Failed { code, message } => {
                // The worker has forgotten it already, but a Cancel for an unknown attempt is harmless.
                self.fail(now, id, code, message);
            }
        }
    }

    fn started(&mut self, id: RequestId, cached_tokens: Option<u32>) {
        let Some(entry) = self.entries.get_mut(&id) else { return };
        if let Phase::Running { started, .. } = &mut entry.phase
            && std::mem::replace(started, true)
        {
            self.actions.push_back(Action::Preempted { request: id });
        }
        if !std::mem::replace(&mut entry.announced, true) {
            self.emit(id, GenerationEvent::Started { cached_tokens });
        }
    }

    fn prompt(&mut self, now: Duration, id: RequestId, first: u32, positions: Vec<PromptPosition>) {
        let Some(entry) = self.entries.get_mut(&id) else { return };
        match entry.journal.prompt(first, positions) {
            Ok(new) if new.is_empty() => {}
            Ok(new) => self.emit(id, GenerationEvent::PromptLogprobs(new)),
            Err(broken) => self.broken(now, id, broken),
        }
    }

    fn token(&mut self, now: Duration, id: RequestId, token: TokenEvent) {
        let Some(entry) = self.entries.get_mut(&id) else { return };
        match entry.journal.token(&token) {
            Ok(false) => {}
            Ok(true) => {
                entry.fruitless = 0;
                self.emit(id, GenerationEvent::Tokens(vec![token]));
            }
            Err(broken) => self.broken(now, id, broken),
        }
    }

    /// The attempt contradicts the journal: the client has the truth, so the attempt goes and the journal stays.
    fn broken(&mut self, now: Duration, id: RequestId, broken: Broken) {
        self.requeue(now, id, &broken.to_string());
    }
}
