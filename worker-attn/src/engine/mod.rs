//! The engine: sequences, scheduler and runner put together, one step at a time. Synchronous, owned by the step thread.
//!
//! | file | idea |
//! |---|---|
//! | this file | [`Engine`]: take requests, plan, step, emit, free |
//! | [`sequence`] | a request and its tokens |
//! | [`events`] | what is said about it |
//! | [`lessons`] | answers that the prefix cache learns while nobody waits |
//! | [`parking`] | what becomes of the state of a sequence that makes room |
//! | `settle` | what a step gave: tokens, ends, points, failures |
//! | `room` | who gets state, where it comes from, who gives it up |
//! | [`thread`] | the dedicated thread and its mailbox |
//!
//! Neighbours: `scheduler.rs` decides, `model.rs` computes, `cache/` remembers, `service/` talks to the coordinator.
//!
//! A sequence ends in exactly one way, with exactly one closing event; everything it held is free before the next step is planned.
//! State that a failed step left half-updated is freed with its sequence and never continued.
//!
//! The prefix cache (`cache/`) is asked when a sequence joins, and fed when a chunk ends at a position that it chose. Sequences with the same
//! prompt that arrive together (the choices of one request) compute it once: the first one leads, the others get copies of its state, and
//! their first tokens are sampled from the same row.

pub mod events;
pub mod lessons;
pub mod parking;
mod room;
pub mod sequence;
mod settle;
pub mod thread;

use std::{collections::HashMap, ops::Range, sync::Arc, time::Instant};

use tandem_kernels::{Backend, BatchDesc, SampleRow};
use tandem_proto::attn::v1::{ErrorCode, Event, StepEvents};

use self::{
    lessons::{Lessons, is_lesson},
    parking::{Parking, ParkingOptions},
    sequence::{Purpose, Request, Sequence},
};
use crate::{
    cache::{CacheOptions, Lease, PrefixCache},
    guide::Guides,
    hop::{Hop, HopError, HopSegment, Notify},
    model::{Runner, StepError, StepResult, push_segment},
    scheduler::{Capacity, Plan, Planned, Scheduler},
    telemetry,
};

/// Where events go. Called with all events of a step together; in between with the failure of a sequence that cannot wait.
pub type Sink = Arc<dyn Fn(StepEvents) + Send + Sync>;

/// How steps are filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// Rows of one sequence in one step; the rows of a whole step are the runner's `max_rows`.
    pub prefill_chunk: usize,
    /// The prefix cache; `None` = every prompt is computed whole.
    pub cache: Option<CacheOptions>,
    /// How sequences make room.
    pub parking: ParkingOptions,
}

/// Sequences over a runner.
pub struct Engine<B: Backend, H: Hop<B>> {
    runner: Runner<B, H>,
    scheduler: Scheduler,
    sequences: HashMap<u64, Sequence>,
    cache: Option<PrefixCache>,
    parking: Parking,
    guides: Guides,
    lessons: Lessons,
    sink: Sink,
}

/// A step that is formed and can be computed.
#[derive(Default)]
struct Formed {
    desc: BatchDesc,
    segments: Vec<HopSegment>,
    samples: Vec<SampleRow>,
    /// For each sample: place in `rows`, and what it is for.
    purposes: Vec<(usize, Purpose)>,
    /// Those that have rows, in the order of `segments`; then those that follow one of them and sample from its last row.
    rows: Vec<Planned>,
    /// Where the followers begin in `rows`, and for each the place of its leader.
    leaders: Vec<usize>,
    /// Rows that must be known to be finite, with their place in `rows`.
    watched: Vec<(usize, Range<usize>)>,
}

impl<B: Backend, H: Hop<B>> Engine<B, H> {
    /// An engine without sequences.
    pub fn new(mut runner: Runner<B, H>, pace: Pace, sink: Sink) -> Self {
        let limits = runner.limits();
        let spec = runner.pool().spec();
        let capacity = Capacity {
            slots: spec.slots,
            pages: spec.pages,
            page_tokens: if spec.mla_layers == 0 { 0 } else { spec.page_tokens },
            max_rows: limits.max_rows,
            prefill_chunk: pace.prefill_chunk.clamp(1, limits.max_rows),
        };
        let (page_tokens, scheduler) = (spec.page_tokens, Scheduler::new(capacity));
        let chunk = scheduler.capacity().prefill_chunk;
        let model = runner.model();
        // Where a cut between chunks changes bits, or chunks do not lie on the backend's grid, only the chunks' own ends are the same for all.
        let grid = model.backend().prefill_grid(&model.dims().kda).filter(|grid| chunk.is_multiple_of(*grid)).unwrap_or(chunk);
        let cache = pace.cache.map(|options| PrefixCache::new(options, page_tokens, grid));
        let lessons = Lessons::new(pace.cache.map(|options| options.spacing), grid);
        let (sequences, parking, guides) = (HashMap::new(), Parking::new(pace.parking), Guides::default());
        // Nobody has asked for a lesson, so nobody hears of it.
        let sink: Sink = Arc::new(move |mut step: StepEvents| {
            step.events.retain(|event| !is_lesson(event.request_id));
            if !step.events.is_empty() || step.rows > 0 {
                sink(step);
            }
        });
        Self { runner, scheduler, sequences, cache, parking, guides, lessons, sink }
    }

    /// The same engine, with masks from `guides` (which the service tells the vocabulary).
    #[must_use]
    pub fn guided(mut self, guides: Guides) -> Self {
        self.guides = guides;
        self
    }

    /// Where masks come from.
    pub fn guides(&self) -> &Guides {
        &self.guides
    }

    /// Requests that hold state, requests that do not.
    pub fn counts(&self) -> (usize, usize) {
        if self.lessons.running().is_some() { (0, 0) } else { (self.scheduler.running(), self.scheduler.waiting()) }
    }

    /// Whether there is nothing to do.
    pub fn is_idle(&self) -> bool {
        self.sequences.is_empty() && self.lessons.is_empty()
    }

    /// The runner.
    pub fn runner(&mut self) -> &mut Runner<B, H> {
        &mut self.runner
    }

    /// A request arrives; it joins at the next step that has room.
    pub fn submit(&mut self, request: Request) {
        let id = request.id;
        let limits = self.runner.limits();
        let pool = self.runner.pool();
        let kv_tokens = if pool.spec().mla_layers == 0 { usize::MAX } else { pool.total_tokens() };
        let vocab = self.runner.model().dims().vocab;
        if let Err(reason) = request.validate(vocab, limits.max_seq_len, kv_tokens) {
            telemetry::finished("error");
            self.emit(vec![events::error(id, ErrorCode::Invalid, reason)]);
        } else if self.sequences.contains_key(&id) {
            self.emit(vec![events::error(id, ErrorCode::Invalid, format!("request id {id} is in use"))]);
        } else {
            let mut sequence = Sequence::new(request);
            if sequence.generated() >= sequence.request.max_tokens && sequence.request.prompt_logprobs.is_none() {
                // Its earlier life had said all but the end.
                telemetry::finished("length");
                self.emit(vec![events::length(id)]);
                return;
            }
            if let Some(text) = sequence.request.guide.take() {
                sequence.guide = Some(self.guides.guide(text, &sequence.request.emitted));
            }
            self.put_lesson_off();
            let like = |s: &&Sequence| s.group.is_some() && s.generated() == 0 && s.request.prompt == sequence.request.prompt;
            if let (Some(own), Some(other)) = (&mut sequence.group, self.sequences.values().find(like)) {
                *own = other.group.unwrap_or(*own);
            }
            self.scheduler.resume(id, sequence.request.prompt.len(), sequence.generated(), sequence.group);
            self.sequences.insert(id, sequence);
        }
    }

    /// Begins to learn an answer, if there is one to be learned.
    fn begin_lesson(&mut self, now: Instant) {
        while self.sequences.is_empty() {
            let Some((id, tokens)) = self.lessons.begin() else { return };
            if self.cache.as_ref().is_some_and(|cache| cache.knows(&tokens)) {
                self.lessons.ended(id);
                continue;
            }
            self.scheduler.submit(id, tokens.len(), None);
            self.sequences.insert(id, Sequence::new(Request::lesson(id, tokens, now)));
        }
    }

    /// Somebody waits now.
    fn put_lesson_off(&mut self) {
        if let Some(id) = self.lessons.running() {
            let tokens = self.sequences.get_mut(&id).map(|s| std::mem::take(&mut s.tokens));
            self.end(id, "lesson");
            tokens.into_iter().for_each(|tokens| self.lessons.again(tokens));
        }
    }

    /// Ends a sequence because nobody wants it any more.
    pub fn cancel(&mut self, id: u64) {
        if self.sequences.contains_key(&id) {
            self.end(id, "cancelled");
            self.emit(vec![events::cancelled(id)]);
        }
    }

    /// Ends all sequences without a word: whoever submitted them is gone.
    pub fn clear(&mut self) {
        for id in self.sequences.keys().copied().collect::<Vec<_>>() {
            self.end(id, "cancelled");
        }
    }

    /// Ends all sequences with an error.
    pub fn fail_all(&mut self, code: ErrorCode, message: &str) {
        let ids: Vec<u64> = self.sequences.keys().copied().collect();
        for id in &ids {
            self.end(*id, "error");
        }
        self.emit(ids.into_iter().map(|id| events::error(id, code, message)).collect());
    }

    /// Runs one step: ends what is overdue, lets requests join, computes, emits. Returns how many rows were computed (0: nobody could
    /// run).
    ///
    /// # Errors
    /// The device failed; the sequences of the step have been ended with an error, the others are intact.
    pub fn step(&mut self, now: Instant) -> Result<usize, StepError> {
        let timer = Instant::now();
        self.begin_lesson(now);
        let mut out = self.end_overdue(now);
        let (plan, leases) = self.plan();
        let formed = self.apply(plan, leases, &mut out);
        telemetry::phase("plan", timer.elapsed());
        if formed.rows.is_empty() {
            self.emit(out);
            return Ok(0);
        }
        // Started events go out before the step: they say that prefill begins.
        self.emit(std::mem::take(&mut out));
        let sink = Arc::clone(&self.sink);
        let notify = Notify::new(move |id, failure| sink(StepEvents { events: vec![events::failed(id, failure)], rows: 0 }));
        let Formed { desc, segments, samples, purposes, rows, leaders, watched } = formed;
        let total = desc.tokens.len();
        let timer = Instant::now();
        let (places, watched): (Vec<usize>, Vec<Range<usize>>) = watched.into_iter().unzip();
        let (sequences, vocab) = (&mut self.sequences, self.runner.model().dims().vocab);
        let hold = |samples: &mut [SampleRow]| hold(sequences, vocab, &rows, &purposes, samples);
        let mut result = match self.runner.step(&desc, segments, notify, samples, &watched, hold) {
            Ok(result) => result,
            Err(StepError::Hop(HopError::Abandoned)) => StepResult { failures: self.runner.hop().failures(), ..StepResult::default() },
            Err(e) => {
                let told: Vec<usize> = self.runner.hop().failures().iter().map(|f| f.0).collect();
                // Followers have no state yet: they are not part of it.
                for (i, p) in rows[..rows.len() - leaders.len()].iter().enumerate() {
                    self.end(p.id, "error");
                    if !told.contains(&i) {
                        out.push(events::error(p.id, ErrorCode::Internal, format!("the step failed: {e}")));
                    }
                }
                self.emit(out);
                return Err(e);
            }
        };
        if rows.iter().any(|p| p.rows > 1) {
            self.parking.prefilled(timer.elapsed(), total);
        }
        let timer = Instant::now();
        self.end_non_finite(&rows, &places, &mut result, &mut out);
        let points = self.settle(&rows, &leaders, &purposes, result, &mut out);
        (self.sink)(StepEvents { events: out, rows: total as u32 });
        telemetry::phase("emit", timer.elapsed());
        let timer = Instant::now();
        self.keep(points);
        telemetry::phase("keep", timer.elapsed());
        Ok(total)
    }

    /// Applies a plan to real state and describes the step.
    fn apply(&mut self, plan: Plan, mut leases: HashMap<u64, Lease>, out: &mut Vec<Event>) -> Formed {
        telemetry::preempted(plan.preempted.len());
        for id in &plan.preempted {
            self.make_room(*id);
        }
        for id in &plan.admitted {
            self.admit(*id, leases.remove(id), out);
        }
        let max_seq_len = self.runner.limits().max_seq_len;
        let mut formed = Formed::default();
        for p in plan.rows {
            let begun = self.begun(p.id);
            let Some(s) = self.sequences.get_mut(&p.id) else { continue };
            let (from, to) = (s.computed(), s.computed() + p.rows);
            let grown =
                begun.and_then(|()| s.state.as_mut().map_or(Ok(()), |state| room::grow(&mut self.cache, &mut self.runner, state, to)));
            if let Err(e) = grown {
                // The scheduler counts the same pages, so this is a fault of ours: end the one sequence, keep the others.
                out.push(events::error(p.id, ErrorCode::Internal, e.to_string()));
                self.end(p.id, "error");
                continue;
            }
            let Some(state) = s.state.as_ref() else { continue };
            let row0 = formed.desc.tokens.len();
            push_segment(&mut formed.desc, state, &s.tokens[from..to]);
            let (request_id, deadline, warmup) = (p.id, s.request.deadline, s.request.warmup);
            formed.segments.push(HopSegment { request_id, rows: row0..row0 + p.rows, deadline, warmup });
            for (purpose, row) in s.sample_rows(row0 as u32, p.rows, max_seq_len) {
                formed.samples.push(row);
                formed.purposes.push((formed.rows.len(), purpose));
            }
            if p.kept && self.cache.is_some() {
                formed.watched.push((formed.rows.len(), row0..row0 + p.rows));
            }
            formed.rows.push(p);
        }
        for place in 0..formed.rows.len() {
            let Planned { id, last, .. } = formed.rows[place];
            let row = formed.segments[place].rows.end as u32 - 1;
            for follower in if last { self.scheduler.followers(id) } else { Vec::new() } {
                let Some(s) = self.sequences.get(&follower) else { continue };
                if s.wants_token(max_seq_len) {
                    formed.samples.push(s.next_row(row));
                    formed.purposes.push((formed.rows.len(), Purpose::Next));
                }
                formed.rows.push(Planned { id: follower, rows: 0, last: true, point: false, kept: false });
                formed.leaders.push(place);
            }
        }
        let decode = formed.rows.iter().filter(|p| p.rows == 1).count();
        telemetry::rows(decode, formed.desc.tokens.len() - decode);
        formed
    }

    /// Ends the sequences whose deadline has passed.
    fn end_overdue(&mut self, now: Instant) -> Vec<Event> {
        let overdue: Vec<u64> = self.sequences.values().filter(|s| s.request.deadline <= now).map(|s| s.request.id).collect();
        let mut out = Vec::new();
        for id in overdue {
            self.end(id, "error");
            out.push(events::error(id, ErrorCode::Deadline, "the request's deadline passed before it was finished"));
        }
        out
    }

    /// Frees everything a sequence holds.
    fn end(&mut self, id: u64, reason: &'static str) {
        self.scheduler.remove(id);
        self.lessons.ended(id);
        if let Some(s) = self.sequences.remove(&id) {
            if is_lesson(id) {
                if reason == "error" {
                    // The next would fare no better.
                    self.lessons.forget();
                }
            } else {
                telemetry::finished(reason);
                if matches!(reason, "stop" | "length") && s.may_use_cache() {
                    self.lessons.add(&s.tokens, s.request.prompt.len());
                }
            }
            self.parking.unpark(s.parked.map_or(0, |copy| copy.len()));
            if let Some(state) = s.state {
                self.runner.pool().free(state);
            }
        }
    }

    fn emit(&self, events: Vec<Event>) {
        if !events.is_empty() {
            (self.sink)(StepEvents { events, rows: 0 });
        }
    }
}

/// Holds the rows of sequences that have a grammar to it. Called when the layers are done: the masks were computed meanwhile.
fn hold(sequences: &mut HashMap<u64, Sequence>, vocab: usize, rows: &[Planned], purposes: &[(usize, Purpose)], samples: &mut [SampleRow]) {
    let timer = Instant::now();
    for ((place, purpose), sample) in purposes.iter().zip(samples) {
        let Some(s) = sequences.get_mut(&rows[*place].id).filter(|_| *purpose == Purpose::Next) else { continue };
        if let Some(guide) = &mut s.guide {
            guide.hold(sample, vocab, &s.request.stop_ids);
        }
    }
    telemetry::phase("masks", timer.elapsed());
}
