//! A synchronous engine for tests: submit, step until idle, look at the events.

#![allow(dead_code)]

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use tandem_kernels::Backend;
use tandem_proto::attn::v1::{ErrorCode, Event, FinishReason, PromptPosition, Submit, TokenLogprob, event::Kind};
use tandem_worker_attn::{
    Model, Runner, RunnerLimits,
    cache::CacheOptions,
    engine::{
        Engine, Pace,
        parking::{ParkingOptions, Preemption},
        sequence::Request,
    },
    hop::{Hop, LocalOnly},
};

/// How a request ended.
#[derive(Clone, Debug, PartialEq)]
pub enum End {
    Stop(u32),
    Length,
    Cancelled,
    Error(ErrorCode, String),
}

/// All that was said about a request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answer {
    pub started: usize,
    /// What the first start said of the prefix cache.
    pub cached: Option<u32>,
    pub tokens: Vec<u32>,
    pub indices: Vec<u32>,
    pub logprobs: Vec<TokenLogprob>,
    pub top: Vec<Vec<TokenLogprob>>,
    pub prompt: Vec<PromptPosition>,
    pub end: Option<End>,
}

/// An engine whose events are kept.
pub struct Harness<B: Backend, H: Hop<B>> {
    pub engine: Engine<B, H>,
    events: Arc<Mutex<Vec<Event>>>,
}

impl<B: Backend> Harness<B, LocalOnly> {
    pub fn local(model: &Arc<Model<B>>, limits: RunnerLimits, chunk: usize) -> Self {
        Self::new(Runner::local(Arc::clone(model), limits).unwrap(), pace(chunk))
    }

    /// One with a prefix cache.
    pub fn caching(model: &Arc<Model<B>>, limits: RunnerLimits, chunk: usize, options: CacheOptions) -> Self {
        Self::new(Runner::local(Arc::clone(model), limits).unwrap(), Pace { cache: Some(options), ..pace(chunk) })
    }
}

impl<B: Backend, H: Hop<B>> Harness<B, H> {
    pub fn new(runner: Runner<B, H>, pace: Pace) -> Self {
        let events = Arc::new(Mutex::new(Vec::new()));
        let sink = Arc::clone(&events);
        let engine = Engine::new(runner, pace, Arc::new(move |new| sink.lock().extend(new.events)));
        Self { engine, events }
    }

    pub fn submit(&mut self, request: Request) {
        self.engine.submit(request);
    }

    pub fn step(&mut self) -> usize {
        self.engine.step(Instant::now()).unwrap()
    }

    /// Steps until nothing lives any more.
    pub fn finish(&mut self) -> BTreeMap<u64, Answer> {
        for _ in 0..10_000 {
            if self.engine.is_idle() {
                return self.answers();
            }
            self.step();
        }
        panic!("the engine does not come to rest");
    }

    pub fn answers(&self) -> BTreeMap<u64, Answer> {
        let mut answers: BTreeMap<u64, Answer> = BTreeMap::new();
        for e in self.events.lock().iter() {
            let a = answers.entry(e.request_id).or_default();
            assert_eq!(a.end, None, "nothing follows the end of request {}", e.request_id);
            match e.kind.clone().unwrap() {
                Kind::Started(s) => {
                    a.cached = if a.started == 0 { s.cached_tokens } else { a.cached };
                    a.started += 1;
                }
                Kind::Token(t) => {
                    a.tokens.push(t.id);
                    a.indices.push(t.index);
                    a.logprobs.extend(t.logprob);
                    a.top.push(t.top);
                }
                Kind::PromptLogprobs(p) => {
                    assert_eq!(p.first_position as usize, a.prompt.len() + 1, "ascending, without a gap");
                    a.prompt.extend(p.positions);
                }
                Kind::Finish(f) => {
                    a.end = Some(match f.reason() {
                        FinishReason::Stop => End::Stop(f.stop_id.unwrap()),
                        FinishReason::Length => End::Length,
                        _ => End::Cancelled,
                    });
                }
                Kind::Error(e) => a.end = Some(End::Error(e.code(), e.message)),
            }
        }
        answers
    }

    /// Asserts that nothing is held.
    pub fn assert_empty(&mut self) {
        assert!(self.engine.is_idle());
        assert_eq!(self.engine.counts(), (0, 0));
        assert_eq!(self.engine.kv_tokens().0, 0, "no page is held but by the prefix cache");
        let pool = self.engine.runner().pool();
        assert_eq!(pool.free_slots(), pool.spec().slots);
    }
}

/// Chunks of that many rows, no prefix cache, no copies.
pub fn pace(chunk: usize) -> Pace {
    Pace { prefill_chunk: chunk, cache: None, parking: ParkingOptions { preemption: Preemption::Recompute, bytes: 0 } }
}

/// A greedy request for `max_tokens` tokens.
pub fn request(id: u64, prompt: &[u32], max_tokens: usize) -> Request {
    let submit = Submit { request_id: id, prompt_ids: prompt.to_vec(), max_tokens: max_tokens as u32, ..Submit::default() };
    Request::from_wire(submit, Instant::now(), Duration::from_secs(3600))
}
