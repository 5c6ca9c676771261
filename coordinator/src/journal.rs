//! The journal of one request: what its client has been sent so far. After the loss of an attention worker the request is submitted
//! again from here (prompt + emitted ids; the sampler's position is their count), and whatever a worker says twice is dropped by
//! index: no token twice, none lost. Pure; used by `scheduler/`.

use std::sync::Arc;

use crate::engine::{Finish, GenerateRequest, PromptPosition, TokenEvent};

/// The first prompt position that has a logprob: nothing precedes position 0.
const FIRST_PROMPT_POSITION: u32 = 1;

/// What the client of one request has been sent.
#[derive(Clone, Debug)]
pub struct Journal {
    request: Arc<GenerateRequest>,
    emitted: Vec<u32>,
    next_prompt_position: u32,
}

/// A worker's event does not continue what the client has seen, so the attempt that sent it cannot be trusted any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    /// Something between was lost.
    #[error("{what} {got} arrived where {expected} was next")]
    Gap {
        /// `token` or `prompt position`.
        what: &'static str,
        /// Index that was next.
        expected: u32,
        /// Index that arrived.
        got: u32,
    },
    /// A repeated token differs from the one that the client has.
    #[error("token {index} was {was} and came again as {got}")]
    Conflict {
        /// Index of the token.
        index: u32,
        /// The id that the client has.
        was: u32,
        /// The id that arrived.
        got: u32,
    },
}

impl Journal {
    /// The journal of a request that no worker has seen.
    pub fn new(request: Arc<GenerateRequest>) -> Self {
        Self { request, emitted: Vec::new(), next_prompt_position: FIRST_PROMPT_POSITION }
    }

    /// What the client asked for.
    pub fn request(&self) -> &Arc<GenerateRequest> {
        &self.request
    }

    /// Ids sent to the client, in order.
    pub fn emitted(&self) -> &[u32] {
        &self.emitted
    }

    /// Records a token. `Ok(true)`: new, to be sent on; `Ok(false)`: a repetition, to be dropped.
    ///
    /// # Errors
    /// [`Broken`] when the token does not continue the journal; nothing is recorded.
    pub fn token(&mut self, token: &TokenEvent) -> Result<bool, Broken> {
        let expected = self.emitted.len() as u32;
        if let Some(&was) = self.emitted.get(token.index as usize) {
            return if was == token.id { Ok(false) } else { Err(Broken::Conflict { index: token.index, was, got: token.id }) };
        }
        if token.index != expected {
            return Err(Broken::Gap { what: "token", expected, got: token.index });
        }
        self.emitted.push(token.id);
        Ok(true)
    }

    /// Records prompt positions from `first` on and returns those that the client has not had, possibly none.
    ///
    /// # Errors
    /// [`Broken::Gap`] when a position between is missing; nothing is recorded.
    pub fn prompt(&mut self, first: u32, mut positions: Vec<PromptPosition>) -> Result<Vec<PromptPosition>, Broken> {
        let expected = self.next_prompt_position;
        if first > expected {
            return Err(Broken::Gap { what: "prompt position", expected, got: first });
        }
        let repeated = ((expected - first) as usize).min(positions.len());
        positions.drain(..repeated);
        self.next_prompt_position += positions.len() as u32;
        Ok(positions)
    }

    /// Whether prompt logprobs were asked for and some are still to be sent.
    pub fn wants_prompt_logprobs(&self) -> bool {
        self.request.prompt_logprobs.is_some() && (self.next_prompt_position as usize) < self.request.prompt_ids.len()
    }

    /// The end that a lost worker can only have failed to report: nothing is left to compute.
    pub fn complete(&self) -> Option<Finish> {
        let all = self.emitted.len() >= self.request.max_tokens as usize && !self.wants_prompt_logprobs();
        all.then_some(Finish::Length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::TokenLogprob;

    fn journal(prompt: usize, max_tokens: u32, prompt_logprobs: bool) -> Journal {
        let request = GenerateRequest {
            prompt_ids: vec![7; prompt],
            max_tokens,
            prompt_logprobs: prompt_logprobs.then_some(0),
            ..GenerateRequest::default()
        };
        Journal::new(Arc::new(request))
    }

    fn token(index: u32, id: u32) -> TokenEvent {
        TokenEvent { id, index, logprob: None, top: Vec::new() }
    }

    fn positions(ids: std::ops::Range<u32>) -> Vec<PromptPosition> {
        ids.map(|id| PromptPosition { actual: TokenLogprob { id, logprob: -1.0, rank: 1 }, top: Vec::new() }).collect()
    }

    #[test]
    fn repeats_are_dropped_and_gaps_refused() {
        let mut journal = journal(3, 4, false);
        assert_eq!(journal.token(&token(0, 10)), Ok(true));
        assert_eq!(journal.token(&token(1, 11)), Ok(true));
        assert_eq!(journal.token(&token(0, 10)), Ok(false));
        assert_eq!(journal.token(&token(3, 13)), Err(Broken::Gap { what: "token", expected: 2, got: 3 }));
        assert_eq!(journal.token(&token(1, 99)), Err(Broken::Conflict { index: 1, was: 11, got: 99 }));
        assert_eq!(journal.emitted(), [10, 11]);
        assert_eq!(journal.complete(), None);
    }

    #[test]
    fn prompt_positions_overlap_cleanly() {
        let mut journal = journal(6, 1, true);
        assert_eq!(journal.prompt(1, positions(1..3)), Ok(positions(1..3)));
        assert_eq!(journal.prompt(1, positions(1..4)), Ok(positions(3..4)));
        assert_eq!(journal.prompt(1, positions(1..2)), Ok(vec![]));
        assert_eq!(journal.prompt(5, positions(5..6)), Err(Broken::Gap { what: "prompt position", expected: 4, got: 5 }));
        assert!(journal.wants_prompt_logprobs());
        assert_eq!(journal.prompt(4, positions(4..6)), Ok(positions(4..6)));
        assert!(!journal.wants_prompt_logprobs());
    }

    #[test]
    fn complete_only_when_nothing_is_left() {
        let mut short = journal(1, 1, true);
        assert_eq!(short.complete(), None);
        assert_eq!(short.token(&token(0, 1)), Ok(true));
        assert_eq!(short.complete(), Some(Finish::Length));
        let mut parity = journal(3, 0, true);
        assert_eq!(parity.complete(), None);
        parity.prompt(1, positions(1..3)).expect("no gap");
        assert_eq!(parity.complete(), Some(Finish::Length));
    }
}
