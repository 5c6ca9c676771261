//! Rows on their way to a shard, and the wait for what comes back.
//!
//! Neighbours: `host.rs` says what goes; `on_device.rs` and `on_host.rs` sum what came.

use std::{ops::Range, time::Instant};

use tandem_kernels::Backend;
use tandem_proto::hop::{Arrived, HopError as LinkError};

use super::{
    super::{Failure, HopError},
    HostRows, PATIENCE, Transport,
};

/// A shard that somebody else holds.
#[derive(Clone, Debug)]
pub(super) struct Remote {
    pub(super) id: u32,
    pub(super) experts: Range<u32>,
}

/// Rows on their way.
pub(super) struct Pending<K> {
    pub(super) shard: Remote,
    /// First row of the piece that the rows are of, in its micro-batch.
    pub(super) piece: usize,
    /// Rows of the step, ascending.
    rows: Vec<u32>,
    /// They were submitted from lent memory: all rows of the micro-batch, those that do not go there without an expert.
    lent: bool,
    ticket: K,
}

/// Rows gathered for one dispatch.
#[derive(Default)]
pub(super) struct SentRows {
    /// Empty where the rows lie behind each other as they are.
    x: Vec<f32>,
    ids: Vec<i32>,
    weights: Vec<f32>,
}

fn holds(shard: &Remote, id: i32) -> bool {
    u32::try_from(id).is_ok_and(|id| shard.experts.contains(&id))
}

impl<T: Transport, B: Backend> HostRows<T, B> {
    /// The rows of a piece that go to a shard: those with one of its experts, and all rows of warm-up sequences. Failed sequences stay at
    /// home.
    pub(super) fn rows_for(&self, micro: usize, shard: &Remote, piece: Range<usize>) -> Vec<u32> {
        let away = &self.away[micro];
        let chosen = |row: usize| away.ids[(row - away.first) * self.shape.topk..][..self.shape.topk].iter().any(|id| holds(shard, *id));
        (away.first + piece.start..away.first + piece.end)
            .filter(|row| {
                let segment = self.owner[*row] as usize;
                self.failed[segment].is_none() && (self.step.segments[segment].warmup || chosen(*row))
            })
            .map(|row| row as u32)
            .collect()
    }

    /// Sends rows of a micro-batch's layer to a shard; `None` where there was nothing to send, or it could not be.
    pub(super) fn send(
        &mut self,
        micro: usize,
        shard: Remote,
        piece: usize,
        rows: Vec<u32>,
        lent: bool,
    ) -> Result<Option<Pending<T::Ticket>>, HopError> {
        let (away, sent) = (&self.away[micro], &mut self.sent);
        let (Some(first), Some(last)) = (rows.first(), rows.last()) else { return Ok(None) };
        let run = *first as usize - away.first..*last as usize + 1 - away.first;
        let (d, k) = (self.shape.hidden, self.shape.topk);
        sent.x.clear();
        sent.ids.clear();
        sent.weights.clear();
        let scattered = run.len() > rows.len() && !lent;
        for &row in &rows {
            let row = row as usize - away.first;
            if scattered {
                sent.x.extend(&away.x[row * d..(row + 1) * d]);
            }
            if lent {
                // Rows lie where they lie in the micro-batch: those between, which stay at home, choose nobody.
                sent.ids.resize(row * k, -1);
                sent.weights.resize(row * k, 0.0);
            }
            sent.weights.extend(&away.weights[row * k..(row + 1) * k]);
            let start = sent.ids.len();
            sent.ids.extend(away.ids[row * k..(row + 1) * k].iter().map(|id| if holds(&shard, *id) { *id } else { -1 }));
            if sent.ids[start..].iter().all(|id| *id < 0) {
                // A warm-up row that chose nobody here: run the shard's first expert all the same, with weight 0.
                sent.ids[start] = shard.experts.start as i32;
                sent.weights[start] = 0.0;
            }
        }
        let until = rows.iter().map(|row| self.step.segments[self.owner[*row as usize] as usize].deadline).min();
        let deadline = until.unwrap_or_else(Instant::now).min(Instant::now() + PATIENCE);
        let layer = away.layer as u16;
        let submitted = if lent {
            sent.ids.resize(away.rows * k, -1);
            sent.weights.resize(away.rows * k, 0.0);
            self.transport.submit_lent(layer, shard.id, away.first..away.first + away.rows, &sent.ids, &sent.weights, deadline)
        } else {
            let x = if scattered { &sent.x } else { &away.x[run.start * d..run.end * d] };
            self.transport.submit(layer, shard.id, x, &sent.ids, &sent.weights, deadline)
        };
        match submitted {
            Ok(ticket) => Ok(Some(Pending { shard, piece, rows, lent, ticket })),
            Err(e) => self.fail_rows(&rows, &Failure::Internal { message: e.to_string() }).map(|()| None),
        }
    }

    /// Waits for one dispatch, as often as it takes; `None` where nothing came of it. What came is all rows of the micro-batch where they were lent.
    pub(super) fn wait(&mut self, micro: usize, pending: Pending<T::Ticket>) -> Result<Option<(u32, Vec<u32>, Arrived)>, HopError> {
        let mut next = Some(pending);
        while let Some(Pending { shard, piece, rows, lent, ticket }) = next {
            let len = if lent { self.away[micro].rows } else { rows.len() } * self.shape.hidden;
            self.partial.resize(self.partial.len().max(len), 0.0);
            next = match self.transport.collect(ticket, &mut self.partial[..len]) {
                Ok(arrived) => return Ok(Some((shard.id, rows, arrived))),
                Err(e @ LinkError::DeadlineNoHolder { .. }) => {
                    self.end_overdue(&rows, &e.to_string())?;
                    let left = rows.into_iter().filter(|row| self.failed[self.owner[*row as usize] as usize].is_none()).collect();
                    self.send(micro, shard, piece, left, lent)?
                }
                Err(e) => {
                    self.fail_rows(&rows, &Failure::Internal { message: e.to_string() })?;
                    None
                }
            };
        }
        Ok(None)
    }
}
