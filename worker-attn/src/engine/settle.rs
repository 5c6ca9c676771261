//! What a step gave is taken in: tokens are appended and said, what is finished or has failed ends, and points are made.
//!
//! Points come last, when the step's events are on their way: the copy of a state takes longer than a client should wait for the token behind it.
//!
//! Neighbours: `engine/mod.rs` formed and ran the step; `room.rs` copies a leader's state for those that follow it.

use tandem_kernels::{Backend, Sampled};
use tandem_proto::attn::v1::{ErrorCode, Event};

use super::{Engine, events, sequence::Purpose};
use crate::{
    guide::Guide,
    hop::{Failure, Hop},
    model::StepResult,
    scheduler::Planned,
    telemetry,
};

/// What became of a sequence: whether its state may be kept, and how it ends, if it does.
struct Settled {
    whole: bool,
    end: Option<&'static str>,
}

/// A sequence whose state the prefix cache is to keep, and how it ends behind that, if it does.
pub(super) struct Point {
    id: u64,
    end: Option<&'static str>,
}

impl<B: Backend, H: Hop<B>> Engine<B, H> {
    /// Ends the sequences whose watched rows are not finite: their state must not enter the cache.
    pub(super) fn end_non_finite(&mut self, rows: &[Planned], places: &[usize], result: &mut StepResult, out: &mut Vec<Event>) {
        for (&place, &bad) in places.iter().zip(&result.non_finite).filter(|(_, bad)| **bad > 0) {
            telemetry::nan_rows(bad);
            if result.failures.iter().all(|f| f.0 != place) {
                let message = format!("NaN or infinity in the hidden state of {bad} of the request's rows");
                out.push(events::error(rows[place].id, ErrorCode::NonFinite, message.clone()));
                result.failures.push((place, Failure::Internal { message }));
            }
        }
    }

    /// Takes in what a step gave: frees failed sequences, appends tokens, ends what is finished. Returns the points that the plan wants, whose
    /// sequences are still there: [`Engine::keep`] makes them.
    pub(super) fn settle(
        &mut self,
        rows: &[Planned],
        leaders: &[usize],
        purposes: &[(usize, Purpose)],
        result: StepResult,
        out: &mut Vec<Event>,
    ) -> Vec<Point> {
        let mut failed = vec![false; rows.len()];
        for (segment, failure) in result.failures {
            failed[segment] = true;
            self.end(rows[segment].id, events::failure_reason(&failure));
        }
        let mut of: Vec<Vec<(Purpose, Sampled)>> = rows.iter().map(|_| Vec::new()).collect();
        for ((place, purpose), sampled) in purposes.iter().zip(result.sampled) {
            of[*place].push((*purpose, sampled));
        }
        for (p, failed) in rows.iter().zip(&failed) {
            let state = self.sequences.get_mut(&p.id).and_then(|s| s.state.as_mut());
            if let Some(state) = state.filter(|_| !failed) {
                state.advance(p.rows);
            }
        }
        // While the leaders have their state: one that is finished gives it back below.
        let own = rows.len() - leaders.len();
        for (place, leader) in (own..).zip(leaders) {
            failed[place] = failed[*leader] || !self.fork(rows[place].id, rows[*leader].id);
        }
        let (mut prefilled, mut generated) = (0, 0);
        let mut points = Vec::new();
        for ((p, sampled), failed) in rows.iter().zip(of).zip(failed) {
            if failed {
                continue;
            }
            prefilled += p.rows;
            let next = sampled.iter().any(|s| s.0 == Purpose::Next);
            generated += usize::from(next);
            prefilled -= usize::from(next && p.rows == 1);
            self.scheduler.completed(p.id, p.rows, usize::from(next));
            let Settled { whole, end } = self.settle_sequence(p, sampled, out);
            if p.point && whole {
                points.push(Point { id: p.id, end });
            } else if let Some(reason) = end {
                self.end(p.id, reason);
            }
        }
        telemetry::tokens(prefilled, generated);
        points
    }

    /// Copies states for the prefix cache; what is finished ends then.
    pub(super) fn keep(&mut self, points: Vec<Point>) {
        for Point { id, end } in points {
            if let (Some(cache), Some(s)) = (&mut self.cache, self.sequences.get(&id))
                && let Some(state) = &s.state
                && let Err(e) = cache.store(self.runner.pool(), &s.tokens[..state.tokens()], state)
            {
                // The sequence is none the worse for it.
                tracing::warn!(error = %e, "the prefix cache could not save a state");
            }
            if let Some(reason) = end {
                self.end(id, reason);
            }
        }
    }

    fn settle_sequence(&mut self, p: &Planned, sampled: Vec<(Purpose, Sampled)>, out: &mut Vec<Event>) -> Settled {
        let max_seq_len = self.runner.limits().max_seq_len;
        let Some(s) = self.sequences.get_mut(&p.id) else { return Settled { whole: false, end: None } };
        let bad = sampled.iter().filter(|(_, row)| !row.finite).count();
        if bad > 0 {
            telemetry::nan_rows(bad);
            out.push(events::error(p.id, ErrorCode::NonFinite, format!("NaN or infinity in the logits of {bad} of the request's rows")));
            return Settled { whole: false, end: Some("error") };
        }
        let ends = |reason| Settled { whole: true, end: Some(reason) };
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
            if let Some(why) = s.guide.as_mut().and_then(Guide::failure) {
                out.push(events::error(p.id, ErrorCode::Internal, why));
                return ends("error");
            }
            if s.request.stop_ids.contains(&row.token) {
                out.push(events::stopped(p.id, row.token));
                return ends("stop");
            }
            out.push(events::token(p.id, s.generated(), &row, s.request.logprobs));
            s.push(row.token);
        }
        if p.last && !s.wants_token(max_seq_len) {
            out.push(events::length(p.id));
            return ends("length");
        }
        Settled { whole: true, end: None }
    }
}
