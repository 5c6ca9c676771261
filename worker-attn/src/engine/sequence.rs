//! A request on the worker: what was asked, the tokens so far, the state that holds them.
//!
//! Neighbours: `engine/mod.rs` keeps the sequences, `service/` makes requests out of attn.v1 messages.

use std::time::{Duration, Instant};

use tandem_kernels::SampleRow;
use tandem_proto::attn::v1 as wire;

use crate::{
    guide::{Guide, GuideText},
    sampler::{SamplingParams, Seen, forced_row},
    state::{SeqState, Snapshot},
};

/// How long a lesson may take, waiting for experts included.
const LESSON_PATIENCE: Duration = Duration::from_secs(5);

/// What a sequence is to be continued with.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Unique among the sequences that live on the worker.
    pub id: u64,
    /// The prompt; never empty.
    pub prompt: Vec<u32>,
    /// Tokens that an earlier life of the request generated: continued, never emitted again.
    pub emitted: Vec<u32>,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// End the sequence; not emitted.
    pub stop_ids: Vec<u32>,
    /// Generated tokens in all, `emitted` included.
    pub max_tokens: usize,
    /// Stop ids cannot be chosen before that many.
    pub min_tokens: usize,
    /// Logprobs with each token: how many alternatives.
    pub logprobs: Option<u32>,
    /// Logprobs of the prompt: how many alternatives.
    pub prompt_logprobs: Option<u32>,
    /// What the generated text is held to.
    pub guide: Option<GuideText>,
    /// How long the thought may be that the prompt has opened.
    pub thought: Option<ThoughtLimit>,
    /// When it must have ended.
    pub deadline: Instant,
    /// Dispatch to every shard whatever the router says.
    pub warmup: bool,
}

/// A thought that ends when it has had its tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ThoughtLimit {
    /// Most of them before it is closed.
    pub tokens: usize,
    /// What closes it, in this order; not empty.
    pub close: Vec<u32>,
}

impl ThoughtLimit {
    /// How much of what closes it the generated tokens end in.
    fn progress(&self, generated: &[u32]) -> usize {
        (0..=self.close.len()).rev().find(|n| generated.ends_with(&self.close[..*n])).unwrap_or(0)
    }

    /// Whether the generated tokens have closed it.
    fn is_closed(&self, generated: &[u32]) -> bool {
        generated.windows(self.close.len().max(1)).any(|window| window == self.close)
    }
}

impl Request {
    /// Reads an attn.v1 Submit that arrived at `now`; a request without a deadline gets `patience`.
    pub fn from_wire(submit: wire::Submit, now: Instant, patience: Duration) -> Self {
        let sampling = submit.sampling.map_or_else(SamplingParams::default, |s| SamplingParams {
            temperature: s.temperature,
            top_k: s.top_k,
            top_p: s.top_p,
            min_p: s.min_p,
            repetition_penalty: s.repetition_penalty,
            frequency_penalty: s.frequency_penalty,
            presence_penalty: s.presence_penalty,
            seed: s.seed,
            choice: s.choice,
            logit_bias: s.logit_bias.into_iter().map(|b| (b.token, b.bias)).collect(),
        });
        let left = if submit.deadline_ms == 0 { patience } else { Duration::from_millis(submit.deadline_ms) };
        // A year from now is as good as never, and cannot overflow.
        let deadline = now + left.min(Duration::from_secs(365 * 24 * 3600));
        Self {
            id: submit.request_id,
            prompt: submit.prompt_ids,
            emitted: submit.emitted_ids,
            sampling,
            stop_ids: submit.stop_ids,
            max_tokens: submit.max_tokens as usize,
            min_tokens: submit.min_tokens as usize,
            logprobs: submit.logprobs,
            prompt_logprobs: submit.prompt_logprobs,
            guide: submit.guide.map(|guide| GuideText { grammar: guide.grammar, after: guide.after }),
            thought: submit.thought.map(|thought| ThoughtLimit { tokens: thought.tokens as usize, close: thought.close_ids }),
            deadline,
            warmup: submit.warmup,
        }
    }

    /// One that nobody has asked for: `tokens` are to be computed for the prefix cache. It has a few seconds, since a request may come that has
    /// to wait for its step.
    pub fn lesson(id: u64, tokens: Vec<u32>, now: Instant) -> Self {
        let submit = wire::Submit { request_id: id, prompt_ids: tokens, ..wire::Submit::default() };
        Self::from_wire(submit, now, LESSON_PATIENCE)
    }

    /// Whether the worker can serve it at all.
    ///
    /// # Errors
    /// What does not fit, with both numbers.
    pub fn validate(&self, vocab: usize, max_seq_len: usize, kv_tokens: usize) -> Result<(), String> {
        if self.prompt.is_empty() {
            return Err("the prompt is empty: needed at least one token id".to_owned());
        }
        let close = self.thought.as_ref().map_or(&[][..], |thought| &thought.close);
        if let Some(id) = self.prompt.iter().chain(&self.emitted).chain(&self.stop_ids).chain(close).find(|id| **id as usize >= vocab) {
            return Err(format!("token id {id}: needed ids below {vocab}"));
        }
        if self.thought.is_some() && close.is_empty() {
            return Err("a limited thought without ids that close it: needed at least one".to_owned());
        }
        self.sampling.validate(vocab)?;
        if self.max_tokens == 0 && self.prompt_logprobs.is_none() {
            return Err("max_tokens is 0: needed at least 1 where no prompt logprobs are asked for".to_owned());
        }
        if self.guide.is_some() && self.stop_ids.is_empty() {
            return Err("a grammar without stop ids: needed at least one id that can end the text".to_owned());
        }
        let (prompt, emitted) = (self.prompt.len(), self.emitted.len());
        // A prompt that is only scored needs no place for a generated token.
        let room = max_seq_len + usize::from(self.max_tokens == 0);
        if prompt + emitted >= room {
            return Err(format!("{prompt} prompt tokens and {emitted} generated ones leave no room: max_seq_len is {max_seq_len}"));
        }
        // The last generated token needs no state.
        let needed = (prompt + self.max_tokens.max(1) - 1).min(max_seq_len);
        if needed > kv_tokens {
            return Err(format!(
                "{prompt} prompt tokens and max_tokens {} need state for {needed} tokens, but the pool holds {kv_tokens} (kv_tokens)",
                self.max_tokens
            ));
        }
        Ok(())
    }
}

/// A request that lives on the worker.
#[derive(Debug)]
pub struct Sequence {
    /// What was asked.
    pub request: Request,
    /// Prompt and generated tokens.
    pub tokens: Vec<u32>,
    /// State of the first of them; `None` while waiting.
    pub state: Option<SeqState>,
    /// A copy of it while the sequence has to make room.
    pub parked: Option<Snapshot>,
    /// What penalties look at.
    pub seen: Seen,
    /// What the next token is held to.
    pub guide: Option<Guide>,
    /// Tokens of its prompt that came from the prefix cache; `None` where that was not asked.
    pub cached: Option<usize>,
    /// What it shares with sequences of the same prompt that arrived with it; `None` where it shares nothing.
    pub group: Option<u64>,
    /// A thought of limited length has not been closed yet.
    thinking: bool,
    /// Next prompt position whose logprob is to be sent.
    prompt_position: usize,
}

/// What a sampled row of a sequence is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// The logprob of the prompt token at this position.
    Prompt(usize),
    /// The next token.
    Next,
}

impl Sequence {
    /// A sequence that waits.
    pub fn new(request: Request) -> Self {
        let tokens = [request.prompt.as_slice(), &request.emitted].concat();
        let seen = Seen::new(&request.sampling, &request.prompt, &request.emitted);
        let thinking = request.thought.as_ref().is_some_and(|thought| !thought.is_closed(&request.emitted));
        // The work on a prompt can be shared where nothing is wanted of it but the next token.
        let shares = !request.warmup && request.emitted.is_empty() && request.prompt_logprobs.is_none();
        let group = shares.then_some(request.id);
        Self { request, tokens, state: None, parked: None, seen, guide: None, cached: None, group, thinking, prompt_position: 1 }
    }

    /// Generated tokens so far.
    pub fn generated(&self) -> usize {
        self.tokens.len() - self.request.prompt.len()
    }

    /// Whether the prefix cache may serve it and learn from it. A warm-up is there to compute.
    pub fn may_use_cache(&self) -> bool {
        !self.request.warmup
    }

    /// Tokens whose state is computed.
    pub fn computed(&self) -> usize {
        self.state.as_ref().map_or(0, SeqState::tokens)
    }

    /// Whether another token is to be sampled once all known ones are computed.
    pub fn wants_token(&self, max_seq_len: usize) -> bool {
        self.generated() < self.request.max_tokens && self.tokens.len() < max_seq_len
    }

    /// The rows to sample when the next `rows` rows, the first of which is row `row0` of the step, are computed.
    pub fn sample_rows(&self, row0: u32, rows: usize, max_seq_len: usize) -> Vec<(Purpose, SampleRow)> {
        let computed = self.computed();
        let mut out = Vec::new();
        if let Some(top) = self.request.prompt_logprobs {
            // The row at position p tells the logprob of position p + 1.
            let first = self.prompt_position.max(computed + 1);
            for position in first..(computed + rows + 1).min(self.request.prompt.len()) {
                let row = row0 + (position - 1 - computed) as u32;
                out.push((Purpose::Prompt(position), forced_row(row, self.request.prompt[position], top)));
            }
        }
        if computed + rows == self.tokens.len() && self.wants_token(max_seq_len) {
            out.push((Purpose::Next, self.next_row(row0 + rows as u32 - 1)));
        }
        out
    }

    /// The next token's row, where the last known token is row `row` of the step.
    pub fn next_row(&self, row: u32) -> SampleRow {
        let index = self.generated();
        let banned: &[u32] = if index < self.request.min_tokens { &self.request.stop_ids } else { &[] };
        let mut sample = self.request.sampling.row(row, index as u64, &self.seen, banned, self.request.logprobs);
        if let Some(thought) = self.request.thought.as_ref().filter(|thought| self.thinking && index >= thought.tokens) {
            sample.forced = thought.close.get(thought.progress(&self.tokens[self.request.prompt.len()..])).copied();
        }
        sample
    }

    /// Logprobs of the prompt up to and with `position` were sent.
    pub fn sent_prompt_position(&mut self, position: usize) {
        self.prompt_position = self.prompt_position.max(position + 1);
    }

    /// A generated token becomes known.
    pub fn push(&mut self, token: u32) {
        self.tokens.push(token);
        self.seen.push(token);
        if let Some(guide) = &mut self.guide {
            guide.push(token);
        }
        if let Some(thought) = self.request.thought.as_ref().filter(|_| self.thinking) {
            self.thinking = !self.tokens[self.request.prompt.len()..].ends_with(&thought.close);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request() -> Request {
        Request::from_wire(
            wire::Submit { request_id: 1, prompt_ids: vec![4, 5, 6], max_tokens: 2, ..wire::Submit::default() },
            Instant::now(),
            Duration::from_secs(5),
        )
    }

    #[test]
    fn chunks_cover_each_prompt_position_once() {
        let mut s = Sequence::new(Request { prompt_logprobs: Some(0), ..request() });
        let rows = s.sample_rows(10, 2, 100);
        assert_eq!(
            rows.iter().map(|r| (r.0, r.1.row, r.1.forced)).collect::<Vec<_>>(),
            [(Purpose::Prompt(1), 10, Some(5)), (Purpose::Prompt(2), 11, Some(6))]
        );
        s.sent_prompt_position(2);
        // Computed anew after a preemption: nothing is sent twice.
        let rows = s.sample_rows(0, 3, 100);
        assert_eq!(rows.iter().map(|r| (r.0, r.1.row)).collect::<Vec<_>>(), [(Purpose::Next, 2)]);
    }

    #[test]
    fn a_resumed_sequence_goes_on_where_it_was() {
        let fresh = Request { max_tokens: 9, min_tokens: 3, stop_ids: vec![7], ..request() };
        let mut s = Sequence::new(fresh.clone());
        s.push(8);
        let resumed = Sequence::new(Request { emitted: vec![8], ..fresh });
        assert_eq!((resumed.generated(), &resumed.tokens), (1, &vec![4, 5, 6, 8]));
        let (a, b) = (s.sample_rows(0, 4, 100), resumed.sample_rows(0, 4, 100));
        assert_eq!(a[0].1.uniform, b[0].1.uniform);
        assert_eq!(b[0].1.bias, [(7, f32::NEG_INFINITY)]);
    }

    #[test]
    fn a_thought_is_closed_when_it_has_had_its_tokens() {
        let limited =
            |tokens, close: &[u32]| Request { max_tokens: 99, thought: Some(ThoughtLimit { tokens, close: close.to_vec() }), ..request() };
        let forced = |s: &Sequence| s.next_row(0).forced;
        let mut s = Sequence::new(limited(2, &[7]));
        assert_eq!(forced(&s), None);
        s.push(1);
        assert_eq!(forced(&s), None);
        s.push(2);
        assert_eq!(forced(&s), Some(7));
        s.push(7);
        assert_eq!(forced(&s), None, "closed");
        s.push(3);
        assert_eq!(forced(&s), None, "for good");
        // Over several tokens, from where the model has begun it; and taken up again in between.
        let mut s = Sequence::new(limited(2, &[7, 7, 8]));
        [1, 7].iter().for_each(|t| s.push(*t));
        assert_eq!(forced(&s), Some(7));
        s.push(7);
        let resumed = Sequence::new(Request { emitted: vec![1, 7, 7], ..limited(2, &[7, 7, 8]) });
        assert_eq!((forced(&s), forced(&resumed)), (Some(8), Some(8)));
        assert_eq!(forced(&Sequence::new(Request { emitted: vec![7, 1, 2, 3], ..limited(2, &[7]) })), None, "closed before");
        assert_eq!(forced(&Sequence::new(limited(0, &[7]))), Some(7));
        assert!(limited(2, &[]).validate(100, 100, 200).unwrap_err().contains("close it"));
    }

    #[test]
    fn what_cannot_be_served_is_said_with_numbers() {
        let r = Request { prompt: vec![1; 10], max_tokens: 5, ..request() };
        assert_eq!(r.validate(100, 100, 14), Ok(()));
        assert!(r.validate(100, 100, 13).unwrap_err().contains("need state for 14 tokens, but the pool holds 13"));
        assert!(r.validate(100, 10, 100).unwrap_err().contains("max_seq_len is 10"));
        assert_eq!(r.validate(100, 11, 100), Ok(()));
        assert!(r.validate(1, 100, 100).unwrap_err().contains("below 1"));
        let scored = Request { max_tokens: 0, prompt_logprobs: Some(0), ..r.clone() };
        assert_eq!(scored.validate(100, 10, 100), Ok(()));
        assert!(Request { max_tokens: 0, ..r }.validate(100, 100, 100).is_err());
    }
}
