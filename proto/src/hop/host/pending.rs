//! Submissions on their way, as the attention side remembers them: pieces, their payloads for a retry, and the answers as they arrive.

use std::ops::Range;
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::Arrived;
use super::session::SessionId;
use crate::frame::{Dtype, Frame, Header, Kind, MAX_PAYLOAD};
use crate::hop::outbox::{Outbox, Outgoing};
use crate::hop::{HopTimings, LATENCY_ROWS, Lender};
use crate::payload::{BufferPool, ExpertTimings, RowShape};

/// One submission.
#[derive(Debug)]
pub(super) struct Pending {
    pub ticket: u64,
    pub layer: u16,
    pub shard: u32,
    pub rows: usize,
    pub deadline: Instant,
    pub submitted: Instant,
    /// Who computes it now.
    pub assigned: Option<Assigned>,
    /// Workers that answered with an error, with their words.
    pub failed_on: Vec<(String, String)>,
    /// Session that was silent for too long: not the one to try next.
    pub avoid: Option<SessionId>,
    /// Why rows in lent memory could not be read back for a worker that does not see them.
    pub unreadable: Option<String>,
    /// Set when every holder failed.
    pub given_up: bool,
    base: u32,
    /// First row in lent memory, where the submission's rows lie there; its ids and weights.
    lent: Option<LentRows>,
    /// The pieces say where the rows are; otherwise they hold them.
    shared: bool,
    pieces: Vec<Piece>,
    missing: usize,
    expert: ExpertTimings,
    done_at: Option<Instant>,
}

/// The session that a submission was sent to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Assigned {
    pub session: SessionId,
    pub at: Instant,
    /// When the transport had taken the last piece.
    pub sent: Option<Instant>,
}

#[derive(Debug)]
struct Piece {
    offset: u32,
    rows: u32,
    dispatch: Bytes,
    partial: Option<Bytes>,
}

/// What a Combine was.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Took {
    /// A piece that was missing.
    Piece,
    /// Not of this submission, or had already.
    Stale,
    /// Of this submission, but not of its shape.
    Invalid(String),
}

/// Rows in lent memory, and what their frames hold besides.
#[derive(Debug)]
struct LentRows {
    row: usize,
    ids: Vec<i32>,
    weights: Vec<f32>,
}

/// Where the activations of a submission are.
#[derive(Clone, Copy)]
pub(super) enum Rows<'a> {
    /// Here, rows × hidden.
    Host(&'a [f32]),
    /// In lent memory.
    Lent { row: usize, rows: usize },
}

/// What a submission consists of.
pub(super) struct Submission<'a> {
    pub ticket: u64,
    pub layer: u16,
    pub shard: u32,
    pub base: u32,
    pub x: Rows<'a>,
    pub ids: &'a [i32],
    pub weights: &'a [f32],
    pub deadline: Instant,
}

impl Pending {
    /// Encodes the pieces, where their rows are here.
    pub fn new(submission: &Submission<'_>, shape: &RowShape, piece_bytes: usize, pool: &mut BufferPool) -> Self {
        let Submission { ticket, layer, shard, base, x, ids, weights, deadline } = *submission;
        let submitted = Instant::now();
        let (rows, lent, pieces) = match x {
            Rows::Host(x) => (x.len() / shape.hidden, None, host_pieces(base, ids, weights, x, shape, piece_bytes, pool)),
            // Encoded once it is known who computes it.
            Rows::Lent { row, rows } => (rows, Some(LentRows { row, ids: ids.to_vec(), weights: weights.to_vec() }), Vec::new()),
        };
        Self {
            ticket,
            layer,
            shard,
            rows,
            deadline,
            submitted,
            assigned: None,
            failed_on: Vec::new(),
            avoid: None,
            unreadable: None,
            given_up: false,
            base,
            missing: pieces.len().max(1),
            lent,
            shared: false,
            pieces,
            expert: ExpertTimings::default(),
            done_at: None,
        }
    }

    /// The rows' places in lent memory.
    pub fn lent_rows(&self) -> Option<Range<usize>> {
        self.lent.as_ref().map(|lent| lent.row..lent.row + self.rows)
    }

    /// The session that answers in shared memory.
    pub fn shared_with(&self) -> Option<SessionId> {
        self.assigned.filter(|_| self.shared).map(|assigned| assigned.session)
    }

    /// Forgets an answer that lies in shared memory.
    pub fn forget_shared(&mut self) {
        if self.shared {
            self.pieces.iter_mut().for_each(|piece| piece.partial = None);
            self.missing = self.pieces.len();
            self.done_at = None;
        }
    }

    /// Encodes rows that lie in lent memory for a worker that sees it, or else reads them back. Partials that came already are kept.
    ///
    /// # Errors
    /// They cannot be read back.
    pub fn encode_for(
        &mut self,
        sees: bool,
        lender: &Lender,
        shape: &RowShape,
        piece_bytes: usize,
        pool: &mut BufferPool,
    ) -> Result<(), String> {
        let Some(LentRows { row, ids, weights }) = &self.lent else { return Ok(()) };
        let partly = self.pieces.iter().any(|piece| piece.partial.is_some());
        if !self.pieces.is_empty() && (partly || sees == self.shared) {
            return Ok(());
        }
        self.pieces = if sees {
            let mut payload = pool.take(0);
            shape.put_shared_dispatch(&mut payload, *row as u64, ids, weights);
            vec![Piece { offset: self.base, rows: self.rows as u32, dispatch: payload.freeze(), partial: None }]
        } else {
            let mut x = vec![0.0; self.rows * shape.hidden];
            lender.memory.read(lender.lent.region, *row, &mut x)?;
            host_pieces(self.base, ids, weights, &x, shape, piece_bytes, pool)
        };
        self.missing = self.pieces.len();
        self.shared = sees;
        Ok(())
    }

    /// Queues every piece that has no answer, under its one key.
    pub fn send(&mut self, outbox: &Outbox, session: SessionId, head: Header, now: Instant) {
        self.assigned = Some(Assigned { session, at: now, sent: None });
        let last = self.pieces.iter().rposition(|piece| piece.partial.is_none());
        for (i, piece) in self.pieces.iter().enumerate().filter(|(_, piece)| piece.partial.is_none()) {
            let header = Header {
                kind: Kind::Dispatch,
                layer: self.layer,
                shard_id: self.shard,
                row_offset: piece.offset,
                rows: piece.rows,
                rows_total: self.rows as u32,
                row_base: self.base,
                dtype: if self.shared { Dtype::Shared } else { head.dtype },
                ..head
            };
            let ticket = (Some(i) == last).then_some(self.ticket);
            outbox.push(Outgoing { frame: Frame { header, payload: piece.dispatch.clone() }, ticket });
        }
    }

    /// Whether `header` names this submission within the step that `head` describes.
    pub fn is_named_by(&self, header: &Header, head: &Header) -> bool {
        (header.epoch, header.step_id) == (head.epoch, head.step_id)
            && (header.layer, header.shard_id, header.row_base) == (self.layer, self.shard, self.base)
    }

    /// Takes the Combine of a piece.
    pub fn take(&mut self, frame: Frame, shape: &RowShape, at: Instant) -> Took {
        let header = &frame.header;
        let found = self.pieces.iter_mut().find(|p| p.offset == header.row_offset);
        let Some(piece) = found.filter(|p| p.partial.is_none()) else { return Took::Stale };
        if self.shared != (header.dtype == Dtype::Shared) {
            return Took::Invalid(format!("a Combine of {:?} for a dispatch of another kind", header.dtype));
        }
        if piece.rows != header.rows {
            return Took::Invalid(format!("a Combine of {} rows for a piece of {}", header.rows, piece.rows));
        }
        let timings = if self.shared {
            shape.get_shared_combine(&frame.payload, piece.rows as usize).map(|(timings, _)| timings)
        } else {
            shape.combine_timings(header.dtype, &frame.payload, piece.rows as usize)
        };
        match timings {
            Ok(timings) => self.expert = timings,
            Err(error) => return Took::Invalid(error.to_string()),
        }
        piece.partial = Some(frame.payload);
        self.missing -= 1;
        if self.missing == 0 {
            self.done_at = Some(at);
        }
        Took::Piece
    }

    /// Every piece has its answer.
    pub fn is_done(&self) -> bool {
        self.missing == 0
    }

    /// Where the time went, once done. Only differences of one clock each; the return is what remains, so the phases add up.
    pub fn timings(&self) -> HopTimings {
        let Some(done) = self.done_at else { return HopTimings::default() };
        let total = done.saturating_duration_since(self.submitted);
        let compute = self.expert.compute.min(total);
        let queue = self.expert.queue.min(total - compute);
        let sent =
            self.assigned.and_then(|assigned| assigned.sent).map_or(Duration::ZERO, |at| at.saturating_duration_since(self.submitted));
        let send = sent.min(total - compute - queue);
        HopTimings { send, queue, compute, ret: total - compute - queue - send, total }
    }

    /// Writes the partial to `out` (rows × hidden), or says where it is, and gives the payloads back.
    pub fn finish(self, shape: &RowShape, out: &mut [f32], window: Option<u64>, pool: &mut BufferPool) -> Arrived {
        if let (true, Some(window), Some(lent)) = (self.shared, window, &self.lent) {
            let answer = self.pieces.first().and_then(|piece| piece.partial.as_ref());
            let read = answer.and_then(|payload| shape.get_shared_combine(payload, self.rows).ok());
            return Arrived::Shared { window, row: lent.row, non_finite: read.map_or_else(Vec::new, |(_, bad)| bad) };
        }
        for piece in self.pieces {
            let start = (piece.offset - self.base) as usize * shape.hidden;
            if let Some(partial) = &piece.partial {
                shape.get_partial(partial, &mut out[start..start + piece.rows as usize * shape.hidden]);
            }
            pool.give(piece.dispatch);
        }
        Arrived::Host
    }
}

/// Pieces that hold their rows. Decode-sized submissions are one piece; others are cut at `piece_bytes`.
fn host_pieces(
    base: u32,
    ids: &[i32],
    weights: &[f32],
    x: &[f32],
    shape: &RowShape,
    piece_bytes: usize,
    pool: &mut BufferPool,
) -> Vec<Piece> {
    let rows = x.len() / shape.hidden;
    let limit = if rows <= LATENCY_ROWS as usize { MAX_PAYLOAD } else { piece_bytes.min(MAX_PAYLOAD) };
    let step = shape.rows_per_piece(limit);
    let mut piece = |start: usize| {
        let end = (start + step).min(rows);
        let mut payload = pool.take((end - start) * shape.dispatch_row());
        let (h, k) = (start * shape.hidden..end * shape.hidden, start * shape.topk..end * shape.topk);
        shape.put_dispatch(&mut payload, &ids[k.clone()], &weights[k], &x[h]);
        Piece { offset: base + start as u32, rows: (end - start) as u32, dispatch: payload.freeze(), partial: None }
    };
    (0..rows).step_by(step).map(&mut piece).collect()
}
