//! The engine: sequences, scheduler and runner put together, one step at a time. Synchronous, owned by the step thread.
//!
//! | file | idea |
//! |---|---|
//! | this file | [`Engine`]: take requests, plan, step, emit, free |
//! | [`sequence`] | a request and its tokens |
//! | [`events`] | what is said about it |
//! | [`thread`] | the dedicated thread and its mailbox |
//!
//! Neighbours: `scheduler.rs` decides, `model.rs` computes, `service/` talks to the coordinator.
//!
//! A sequence ends in exactly one way, with exactly one closing event; everything it held is free before the next step is planned.
//! State that a failed step left half-updated is freed with its sequence and never continued.

pub mod events;
pub mod sequence;
pub mod thread;

use std::{collections::HashMap, sync::Arc, time::Instant};

use tandem_kernels::{Backend, BatchDesc, SampleRow, Sampled};
use tandem_proto::attn::v1::{ErrorCode, Event};

use self::sequence::{Purpose, Request, Sequence};
use crate::{
    hop::{Hop, HopError, HopSegment, Notify},
    model::{Runner, StepError, StepResult, push_segment},
    scheduler::{Capacity, Plan, Planned, Scheduler},
    telemetry,
};

/// Where events go. Called with all events of a step together; in between with the failure of a sequence that cannot wait.
pub type Sink = Arc<dyn Fn(Vec<Event>) + Send + Sync>;

/// How steps are filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pace {
    /// Rows of one sequence in one step; the rows of a whole step are the runner's `max_rows`.
    pub prefill_chunk: usize,
}

/// Sequences over a runner.
pub struct Engine<B: Backend, H: Hop<B>> {
    runner: Runner<B, H>,
    scheduler: Scheduler,
    sequences: HashMap<u64, Sequence>,
    sink: Sink,
}

/// A step that is formed and can be computed.
struct Formed {
    desc: BatchDesc,
    segments: Vec<HopSegment>,
    samples: Vec<SampleRow>,
    /// For each sample: place in `rows`, and what it is for.
    purposes: Vec<(usize, Purpose)>,
    rows: Vec<Planned>,
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
        Self { runner, scheduler: Scheduler::new(capacity), sequences: HashMap::new(), sink }
    }

    /// Sequences that hold state, sequences that do not.
    pub fn counts(&self) -> (usize, usize) {
        (self.scheduler.running(), self.scheduler.waiting())
    }

    /// Token places in use, in all.
    pub fn kv_tokens(&mut self) -> (usize, usize) {
        let pool = self.runner.pool();
        (pool.used_tokens(), pool.total_tokens())
    }

    /// Whether no sequence lives here.
    pub fn is_idle(&self) -> bool {
        self.sequences.is_empty()
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
            (self.sink)(vec![events::error(id, ErrorCode::Invalid, reason)]);
        } else if self.sequences.contains_key(&id) {
            (self.sink)(vec![events::error(id, ErrorCode::Invalid, format!("request id {id} is in use"))]);
        } else {
            let sequence = Sequence::new(request);
            if sequence.generated() >= sequence.request.max_tokens && sequence.request.prompt_logprobs.is_none() {
                // Its earlier life had said all but the end.
                telemetry::finished("length");
                (self.sink)(vec![events::length(id)]);
                return;
            }
            self.scheduler.submit(id, sequence.tokens.len());
            self.sequences.insert(id, sequence);
        }
    }

    /// Ends a sequence because nobody wants it any more.
    pub fn cancel(&mut self, id: u64) {
        if self.sequences.contains_key(&id) {
            self.end(id, "cancelled");
            (self.sink)(vec![events::cancelled(id)]);
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
        (self.sink)(ids.into_iter().map(|id| events::error(id, code, message)).collect());
    }

    /// Runs one step: ends what is overdue, lets requests join, computes, emits. Returns how many rows were computed (0: nobody could
    /// run).
    ///
    /// # Errors
    /// The device failed; the sequences of the step have been ended with an error, the others are intact.
    pub fn step(&mut self, now: Instant) -> Result<usize, StepError> {
        let timer = Instant::now();
        let mut out = self.end_overdue(now);
        let plan = self.scheduler.plan();
        let formed = self.apply(plan, &mut out);
        telemetry::phase("plan", timer.elapsed());
        if formed.rows.is_empty() {
            self.emit(out);
            return Ok(0);
        }
        // Started events go out before the step: they say that prefill begins.
        self.emit(std::mem::take(&mut out));
        let sink = Arc::clone(&self.sink);
        let notify = Notify::new(move |id, failure| sink(vec![events::failed(id, failure)]));
        let Formed { desc, segments, samples, purposes, rows } = formed;
        let total = desc.tokens.len();
        let result = match self.runner.step(&desc, segments, notify, samples) {
            Ok(result) => result,
            Err(StepError::Hop(HopError::Abandoned)) => StepResult { sampled: Vec::new(), failures: self.runner.hop().failures() },
            Err(e) => {
                let told: Vec<usize> = self.runner.hop().failures().iter().map(|f| f.0).collect();
                for (i, p) in rows.iter().enumerate() {
                    self.end(p.id, "error");
                    if !told.contains(&i) {
                        out.push(events::error(p.id, ErrorCode::Internal, format!("the step failed: {e}")));
                    }
                }
                self.emit(out);
                return Err(e);
            }
        };
        let timer = Instant::now();
        self.settle(&rows, &purposes, result, &mut out);
        self.emit(out);
        telemetry::phase("emit", timer.elapsed());
        Ok(total)
    }

    /// Applies a plan to real state and describes the step.
    fn apply(&mut self, plan: Plan, out: &mut Vec<Event>) -> Formed {
        telemetry::preempted(plan.preempted.len());
        for id in &plan.preempted {
            if let Some(state) = self.sequences.get_mut(id).and_then(|s| s.state.take()) {
                self.runner.pool().free(state);
            }
        }
        for id in &plan.admitted {
            self.admit(*id, out);
        }
        let max_seq_len = self.runner.limits().max_seq_len;
        let mut formed =
            Formed { desc: BatchDesc::default(), segments: Vec::new(), samples: Vec::new(), purposes: Vec::new(), rows: Vec::new() };
        for p in plan.rows {
            let Some(s) = self.sequences.get_mut(&p.id) else { continue };
            let Some(state) = s.state.as_mut() else { continue };
            let (from, to) = (state.tokens(), state.tokens() + p.rows);
            if let Err(e) = self.runner.pool().grow(state, to) {
                // The scheduler counts the same pages, so this is a fault of ours: end the one sequence, keep the others.
                out.push(events::error(p.id, ErrorCode::Internal, e.to_string()));
                self.end(p.id, "error");
                continue;
            }
            let row0 = formed.desc.tokens.len();
            push_segment(&mut formed.desc, state, &s.tokens[from..to]);
            let (request_id, deadline, warmup) = (p.id, s.request.deadline, s.request.warmup);
            formed.segments.push(HopSegment { request_id, rows: row0..row0 + p.rows, deadline, warmup });
            for (purpose, row) in s.sample_rows(row0 as u32, p.rows, max_seq_len) {
                formed.samples.push(row);
                formed.purposes.push((formed.rows.len(), purpose));
            }
            formed.rows.push(p);
        }
        let decode = formed.rows.iter().filter(|p| p.rows == 1).count();
        telemetry::rows(decode, formed.desc.tokens.len() - decode);
        formed
    }

    fn admit(&mut self, id: u64, out: &mut Vec<Event>) {
        let Some(s) = self.sequences.get_mut(&id) else { return };
        match self.runner.pool().create() {
            Ok(state) => {
                s.state = Some(state);
                // Said again after a preemption: the coordinator counts those.
                out.push(events::started(id));
            }
            Err(e) => {
                out.push(events::error(id, ErrorCode::Internal, e.to_string()));
                self.end(id, "error");
            }
        }
    }

    /// Takes in what a step gave: frees failed sequences, appends tokens, ends what is finished.
    fn settle(&mut self, rows: &[Planned], purposes: &[(usize, Purpose)], result: StepResult, out: &mut Vec<Event>) {
        let mut failed = vec![false; rows.len()];
        for (segment, failure) in result.failures {
            failed[segment] = true;
            self.end(rows[segment].id, events::failure_reason(&failure));
        }
        let mut of: Vec<Vec<(Purpose, Sampled)>> = rows.iter().map(|_| Vec::new()).collect();
        for ((place, purpose), sampled) in purposes.iter().zip(result.sampled) {
            of[*place].push((*purpose, sampled));
        }
        let (mut prefilled, mut generated) = (0, 0);
        for ((p, sampled), failed) in rows.iter().zip(of).zip(failed) {
            if failed {
                continue;
            }
            if let Some(state) = self.sequences.get_mut(&p.id).and_then(|s| s.state.as_mut()) {
                state.advance(p.rows);
            }
            prefilled += p.rows;
            let next = sampled.iter().any(|s| s.0 == Purpose::Next);
            generated += usize::from(next);
            prefilled -= usize::from(next && p.rows == 1);
            self.scheduler.completed(p.id, p.rows, usize::from(next));
            self.settle_sequence(p, sampled, out);
        }
        telemetry::tokens(prefilled, generated);
    }

    fn settle_sequence(&mut self, p: &Planned, sampled: Vec<(Purpose, Sampled)>, out: &mut Vec<Event>) {
        let max_seq_len = self.runner.limits().max_seq_len;
        let Some(s) = self.sequences.get_mut(&p.id) else { return };
        let bad = sampled.iter().filter(|(_, row)| !row.finite).count();
        if bad > 0 {
            telemetry::nan_rows(bad);
            out.push(events::error(p.id, ErrorCode::NonFinite, format!("NaN or infinity in the logits of {bad} of the request's rows")));
            self.end(p.id, "error");
            return;
        }
        let mut prompt = Vec::new();
        let mut next = None;
        let mut first = None;
        for (purpose, row) in sampled {
            match purpose {
                Purpose::Prompt(position) => {
                    first.get_or_insert(position);
                    s.sent_prompt_position(position);
                    prompt.push(row);
                }
                Purpose::Next => next = Some(row),
            }
        }
        if let Some(first) = first {
            out.push(events::prompt_logprobs(p.id, first, &prompt));
        }
        if let Some(row) = next {
            if s.request.stop_ids.contains(&row.token) {
                out.push(events::stopped(p.id, row.token));
                self.end(p.id, "stop");
                return;
            }
            out.push(events::token(p.id, s.generated(), &row, s.request.logprobs));
            s.push(row.token);
        }
        if p.last && !s.wants_token(max_seq_len) {
            out.push(events::length(p.id));
            self.end(p.id, "length");
        }
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
        if let Some(s) = self.sequences.remove(&id) {
            telemetry::finished(reason);
            if let Some(state) = s.state {
                self.runner.pool().free(state);
            }
        }
    }

    fn emit(&self, events: Vec<Event>) {
        if !events.is_empty() {
            (self.sink)(events);
        }
    }
}
