//! What the attention side does between its calls and its links: events in, retries, deadlines, and when to spin or to park.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;

use super::HopTimings;
use super::fleet::Fleet;
use super::pending::{Pending, Took};
use super::session::{Event, Events, SessionId};
use crate::frame::{Frame, Header, Kind, MAX_PAYLOAD};
use crate::hop::{HopError, HopOptions, turn};
use crate::link::LinkKind;
use crate::payload::{BufferPool, RowShape};
use crate::route_table::RouteTable;

/// How long `submit` goes on offering rows to a transport that takes none.
const SUBMIT_PATIENCE: Duration = Duration::from_millis(1);
/// Payload buffers kept for the next layer.
const POOL_BYTES: usize = 32 << 20;
/// Turns of the runtime that bring a frame from the gRPC layer's queue to the socket.
const GRPC_TURNS: usize = 8;

/// See the module.
#[derive(Debug)]
pub(super) struct Drive {
    pub options: Arc<HopOptions>,
    pub shape: RowShape,
    pub fleet: Fleet,
    pub pool: BufferPool,
    events: Arc<Events>,
    routes: watch::Receiver<RouteTable>,
    routes_seen: bool,
    step_id: u64,
    step_rows: u32,
    pending: Vec<Pending>,
    /// Rows submitted so far in this step, per layer and shard: the next submission's `row_base`.
    bases: HashMap<(u16, u32), u32>,
    tickets: u64,
    /// Since when links have moved without a break: silence before that says nothing about a worker.
    driven_since: Instant,
    spin_until: Instant,
}

impl Drive {
    pub fn new(options: HopOptions, routes: watch::Receiver<RouteTable>) -> Self {
        let options = Arc::new(options);
        let shape = RowShape { hidden: options.hidden, topk: options.topk, precision: options.precision };
        let events = Arc::new(Events::default());
        let fleet = Fleet::new(Arc::clone(&options), Arc::clone(&events));
        let now = Instant::now();
        Self {
            options,
            shape,
            fleet,
            pool: BufferPool::new(POOL_BYTES),
            events,
            routes,
            routes_seen: false,
            step_id: 0,
            step_rows: 0,
            pending: Vec::new(),
            bases: HashMap::new(),
            tickets: 0,
            driven_since: now,
            spin_until: now,
        }
    }

    /// A new ticket and the first row of its submission.
    pub fn next_ticket(&mut self, layer: u16, shard: u32, rows: u32) -> (u64, u32) {
        self.tickets += 1;
        let next = self.bases.entry((layer, shard)).or_insert(0);
        let base = *next;
        *next += rows;
        (self.tickets, base)
    }

    pub fn remove(&mut self, ticket: u64) -> Option<Pending> {
        let at = self.pending.iter().position(|pending| pending.ticket == ticket)?;
        Some(self.pending.swap_remove(at))
    }

    pub async fn begin_step(&mut self, step_id: u64, rows: u32) {
        self.enter();
        (self.step_id, self.step_rows) = (step_id, rows);
        self.pending.clear();
        self.bases.clear();
        self.pump();
        let begin = self.begin_header();
        for session in self.fleet.sessions() {
            session.outbox.clear_bulk();
            session.outbox.post(Frame::bare(begin));
        }
        tokio::task::yield_now().await;
        self.pump();
    }

    pub async fn submit(&mut self, pending: Pending) {
        self.enter();
        let ticket = pending.ticket;
        self.pending.push(pending);
        self.pump();
        let (mut progress, mut patience) = (0, Instant::now() + SUBMIT_PATIENCE);
        loop {
            let assigned = self.pending.iter().find(|pending| pending.ticket == ticket).and_then(|pending| pending.assigned);
            let Some(assigned) = assigned else { return };
            let Some((_, session)) = self.fleet.session(assigned.session) else { return };
            if assigned.sent.is_some() {
                let turns = if session.kind == LinkKind::Grpc { GRPC_TURNS } else { 0 };
                for _ in 0..turns {
                    tokio::task::yield_now().await;
                }
                return;
            }
            let (sent, now) = (session.outbox.sent(), Instant::now());
            if sent != progress {
                (progress, patience) = (sent, now + SUBMIT_PATIENCE);
            } else if now > patience {
                return;
            }
            turn().await;
            self.pump();
        }
    }

    /// Waits until the ticket is answered, given up, or past its deadline; `None` when there is no such ticket.
    pub async fn wait(&mut self, ticket: u64) -> Option<()> {
        self.enter();
        if self.pending.iter().any(|pending| pending.ticket == ticket && pending.deadline <= self.driven_since) {
            // The caller was busy past the deadline: the answer may lie in the socket.
            for _ in 0..4 {
                self.pump();
                tokio::task::yield_now().await;
            }
        }
        loop {
            self.pump();
            let pending = self.pending.iter().find(|pending| pending.ticket == ticket)?;
            if pending.is_done() || pending.given_up || pending.deadline <= Instant::now() {
                return Some(());
            }
            let deadline = pending.deadline;
            self.idle(deadline).await;
        }
    }

    pub async fn tend(&mut self, budget: Duration) {
        self.enter();
        let end = Instant::now() + budget;
        self.spin_until = Instant::now();
        // Enough turns to read what the sockets hold, then wait for dials.
        for _ in 0..4 {
            self.pump();
            tokio::task::yield_now().await;
        }
        loop {
            self.pump();
            if !self.fleet.is_dialling() || Instant::now() >= end {
                return;
            }
            self.idle(end).await;
        }
    }

    /// The failure of a ticket that [`Drive::wait`] returned without an answer.
    pub fn failure(&self, pending: &Pending) -> HopError {
        let (layer, shard) = (pending.layer, pending.shard);
        if let Some(reason) = &pending.unreadable {
            return HopError::ReadBack { layer, reason: reason.clone() };
        }
        if let (true, Some((worker, message))) = (pending.given_up, pending.failed_on.last()) {
            return HopError::Expert { layer, shard, worker: worker.clone(), message: message.clone() };
        }
        let mut reasons = self.fleet.reasons(shard);
        reasons.extend(pending.failed_on.iter().map(|(worker, message)| format!("{worker} failed: {message}")));
        HopError::DeadlineNoHolder { layer, shard, waited: pending.submitted.elapsed(), reasons }
    }

    /// Metrics of a ticket that is done.
    pub fn record(&mut self, pending: &Pending, timings: &HopTimings) {
        let Some((_, session)) = pending.assigned.and_then(|assigned| self.fleet.session(assigned.session)) else { return };
        let metrics = &session.metrics;
        metrics.send.record(timings.send);
        metrics.queue.record(timings.queue);
        metrics.compute.record(timings.compute);
        metrics.ret.record(timings.ret);
        metrics.rows.increment(pending.rows as u64);
    }

    /// A call begins: links have not moved since the last one.
    fn enter(&mut self) {
        self.driven_since = Instant::now();
        self.spin_until = self.driven_since + self.options.spin;
    }

    fn head(&self, kind: Kind) -> Header {
        Header {
            epoch: self.options.epoch,
            step_id: self.step_id,
            route_version: self.fleet.route_version(),
            dtype: if kind == Kind::Dispatch { self.shape.precision.dtype() } else { Header::new(kind).dtype },
            ..Header::new(kind)
        }
    }

    fn begin_header(&self) -> Header {
        Header { rows: self.step_rows, ..self.head(Kind::BeginStep) }
    }

    /// Everything that can be done without waiting.
    fn pump(&mut self) {
        let now = Instant::now();
        if !self.routes_seen || self.routes.has_changed().unwrap_or(false) {
            self.routes_seen = true;
            let table = self.routes.borrow_and_update().clone();
            self.fleet.follow(table, now);
            self.unassign_lost("route");
        }
        let mut moved = false;
        while let Some(event) = self.events.pop() {
            moved = true;
            self.take(event, now);
        }
        if moved {
            self.spin_until = now + self.options.spin;
        }
        self.fleet.dial(now);
        self.give_up_silent(now);
        self.assign(now);
    }

    fn take(&mut self, event: Event, now: Instant) {
        match event {
            Event::Dialled { worker, session, result } => {
                if self.fleet.dialled(&worker, session, result, now) {
                    let begin = self.begin_header();
                    if let (false, Some((_, session))) = (self.pending.is_empty(), self.fleet.session(session)) {
                        session.outbox.post(Frame::bare(begin));
                    }
                }
            }
            Event::Sent { ticket, session, at } => {
                let found = self.pending.iter_mut().find(|pending| pending.ticket == ticket);
                if let Some(assigned) = found.and_then(|pending| pending.assigned.as_mut())
                    && assigned.session == session
                {
                    assigned.sent = Some(at);
                }
            }
            Event::Closed { session, reason } => {
                self.fleet.hang_up(session, &reason, now);
                self.unassign_lost("link");
            }
            Event::Frame { session, frame, at } => self.take_frame(session, frame, at, now),
        }
    }

    /// Takes a Combine or Error only if it is of this epoch and step, names a submission that is open, and comes from the worker that
    /// the submission was last sent to.
    fn take_frame(&mut self, id: SessionId, frame: Frame, at: Instant, now: Instant) {
        let head = self.head(Kind::Combine);
        let Some((holder, session)) = self.fleet.session(id) else { return };
        session.heard = at;
        let named = self
            .pending
            .iter_mut()
            .find(|p| p.is_named_by(&frame.header, &head) && p.assigned.is_some_and(|a| a.session == id) && !p.is_done());
        let Some(pending) = named else {
            tracing::debug!(worker = %holder.worker, header = ?frame.header, "dropped a stale answer");
            metrics::counter!("tandem_hop_stale_answers_total").increment(1);
            return;
        };
        if frame.header.kind == Kind::Error {
            let message = String::from_utf8_lossy(&frame.payload).into_owned();
            tracing::error!(worker = %holder.worker, layer = pending.layer, shard = pending.shard, %message, "an expert worker failed");
            pending.failed_on.push((holder.worker.clone(), message));
            pending.assigned = None;
            pending.given_up = !self.fleet.has_untried(pending.shard, &pending.failed_on);
            retry("error");
            return;
        }
        match pending.take(frame, &self.shape, at) {
            Took::Piece => {
                let (shard, arithmetic) = (pending.shard, holder.arithmetic.clone());
                self.fleet.pin(shard, &arithmetic);
            }
            Took::Stale => metrics::counter!("tandem_hop_stale_answers_total").increment(1),
            Took::Invalid(reason) => {
                self.fleet.hang_up(id, &reason, now);
                self.unassign_lost("invalid");
            }
        }
    }

    /// Takes submissions back from sessions that are gone.
    fn unassign_lost(&mut self, reason: &'static str) {
        // A partial in shared memory is gone with the session, answered or not.
        for pending in self.pending.iter_mut().filter(|pending| !pending.is_done() || pending.shared_with().is_some()) {
            if pending.assigned.is_some_and(|assigned| self.fleet.session(assigned.session).is_none()) {
                pending.forget_shared();
                pending.assigned = None;
                retry(reason);
            }
        }
    }

    /// Takes submissions back from workers that say nothing for too long: to a replica if there is one, else over a new link.
    fn give_up_silent(&mut self, now: Instant) {
        let limit = self.options.attempt_timeout;
        let mut hang_up = None;
        for pending in self.pending.iter_mut().filter(|pending| !pending.is_done()) {
            let Some(assigned) = pending.assigned else { continue };
            let heard = self.fleet.session(assigned.session).map_or(assigned.at, |(_, session)| session.look(now));
            if now.saturating_duration_since(assigned.at.max(heard).max(self.driven_since)) < limit {
                continue;
            }
            retry("timeout");
            pending.assigned = None;
            pending.avoid = Some(assigned.session);
            if self.fleet.choose(pending.shard, &pending.failed_on, pending.avoid).is_none() {
                hang_up = Some(assigned.session);
            }
        }
        if let Some(session) = hang_up {
            self.fleet.hang_up(session, &format!("no answer for {limit:?}"), now);
            self.unassign_lost("timeout");
        }
    }

    /// Sends every submission that has no worker to one, if there is one.
    fn assign(&mut self, now: Instant) {
        let head = self.head(Kind::Dispatch);
        for at in 0..self.pending.len() {
            let (before, rest) = self.pending.split_at_mut(at);
            let Some((pending, after)) = rest.split_first_mut() else { return };
            if pending.is_done() || pending.assigned.is_some() || pending.given_up {
                continue;
            }
            let Some(choice) = self.fleet.choose(pending.shard, &pending.failed_on, pending.avoid) else { continue };
            if let (Some(rows), Some(lender)) = (pending.lent_rows(), &self.options.lender) {
                // A worker puts partials where their rows are: two submissions of the same rows cannot both be answered there.
                let others = before.iter().chain(after.iter()).filter(|other| other.shared_with() == Some(choice.session.id));
                let taken = others.filter_map(Pending::lent_rows).any(|other| other.start < rows.end && rows.start < other.end);
                let fits = self.shape.shared_dispatch_len(rows.len()) <= MAX_PAYLOAD;
                let sees = !taken && fits && choice.session.window.as_ref().is_some_and(|window| rows.end <= window.rows as usize);
                if let Err(reason) = pending.encode_for(sees, lender, &self.shape, self.options.piece_bytes, &mut self.pool) {
                    pending.unreadable = Some(reason);
                    pending.given_up = true;
                    continue;
                }
            }
            if choice.mixed {
                metrics::counter!("tandem_hop_mixed_arithmetic_total").increment(1);
            }
            pending.send(&choice.session.outbox, choice.session.id, head, now);
        }
    }

    /// Waits for anything to happen: spins while something happened lately, then parks.
    async fn idle(&mut self, deadline: Instant) {
        let now = Instant::now();
        if now < self.spin_until {
            turn().await;
            return;
        }
        let silent =
            self.pending.iter().filter(|p| !p.is_done()).filter_map(|p| p.assigned).map(|_| now + self.options.attempt_timeout / 4);
        let wake = silent.chain(self.fleet.next_dial()).chain([deadline]).min().unwrap_or(deadline);
        let events = Arc::clone(&self.events);
        tokio::select! {
            () = events.arrived.notified() => {}
            changed = self.routes.changed() => {
                if changed.is_err() {
                    // No table will come any more; what is known still serves.
                    tokio::select! {
                        () = events.arrived.notified() => {}
                        () = tokio::time::sleep_until(wake.into()) => {}
                    }
                } else {
                    self.routes_seen = false;
                }
            }
            () = tokio::time::sleep_until(wake.into()) => {}
        }
    }
}

fn retry(reason: &'static str) {
    metrics::counter!("tandem_hop_retries_total", "reason" => reason).increment(1);
}
