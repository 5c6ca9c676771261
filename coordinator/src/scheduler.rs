//! Order among requests: waiting → running → ended, as a pure state machine with no I/O and no clock. `core.rs` puts inputs in (with the
//! time since start) and carries the [`Action`]s out. Row 3 of the life of a token.
//!
//! Rules: first come first served, work-conserving; while others wait, the choices of one API request get at most half of the places; a
//! request whose attention worker is lost goes back to its old place in the queue with its journal; every request ends exactly once.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use crate::engine::{AdmissionError, ErrorCode, Finish, GenerateRequest, GenerationError, GenerationEvent, Limits, check_request};
use crate::journal::Journal;
use crate::stats;

mod events;
mod pace;
mod places;
#[cfg(test)]
mod tests;

pub use events::WorkerEvent;
use pace::Pace;
use places::Places;

/// A request, from admission to its end. Ascending in order of arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// One try of a request on one worker; what attn.v1 calls `request_id`. Never reused, so whatever a former try still says is told apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AttemptId(pub u64);

/// One attached stream of an attention worker; a worker that attaches again gets a new one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct WorkerId(pub u64);

/// How long after a request's deadline its worker may still say, more precisely than the scheduler can, what was missing.
pub const DEADLINE_GRACE: Duration = Duration::from_millis(500);

/// Worker losses in a row, with no token between, after which a request is taken for their cause and ended. It must bear a worker that
/// is killed repeatedly in a long prefill, and must end a request that kills each worker it meets.
pub const MAX_FRUITLESS_ATTEMPTS: u32 = 8;

/// What the scheduler wants done, in this order.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Send the submission to the worker.
    Submit(Submission),
    /// Tell the worker to forget the attempt.
    Cancel {
        /// Where it runs.
        worker: WorkerId,
        /// Which one.
        attempt: AttemptId,
    },
    /// Send the event to the request's client; an end event is the last one.
    Emit {
        /// Whose client.
        request: RequestId,
        /// What.
        event: GenerationEvent,
    },
    /// A worker's loss or a broken attempt put the request back into the queue (counted and logged).
    Requeued {
        /// Which one.
        request: RequestId,
        /// Why, one line.
        why: String,
    },
    /// The worker took a running request out of its batch and later in again (counted).
    Preempted {
        /// Which one.
        request: RequestId,
    },
}

/// A request on its way to a worker.
#[derive(Clone, Debug, PartialEq)]
pub struct Submission {
    /// Where to.
    pub worker: WorkerId,
    /// Whose.
    pub request: RequestId,
    /// Its name on the wire.
    pub attempt: AttemptId,
    /// What the client asked for.
    pub what: Arc<GenerateRequest>,
    /// Ids that the client already has.
    pub emitted: Vec<u32>,
    /// Whether prompt logprobs are still to be sent.
    pub prompt_logprobs: bool,
    /// Time left until the deadline.
    pub left: Option<Duration>,
    /// Dispatch to every shard, whatever the router says.
    pub warmup: bool,
}

/// A request in the scheduler.
#[derive(Debug)]
struct Entry {
    /// The id of the first choice of its API request.
    group: RequestId,
    deadline: Option<Duration>,
    journal: Journal,
    phase: Phase,
    /// The client was told that prefill began.
    announced: bool,
    /// Submissions so far.
    attempts: u32,
    /// Attempts since the last token.
    fruitless: u32,
    warmup: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Waiting,
    Running {
        worker: WorkerId,
        attempt: AttemptId,
        /// The worker said that prefill began.
        started: bool,
    },
}

/// How many requests are where.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// In the coordinator's queue, or sent to a worker that has not begun with them.
    pub waiting: usize,
    /// In a worker's batch.
    pub running: usize,
}

/// The state machine.
#[derive(Debug)]
pub struct Scheduler {
    max_queue: usize,
    draining: bool,
    /// Of the last worker that was attached; kept while none is.
    limits: Limits,
    next_request: u64,
    next_attempt: u64,
    entries: BTreeMap<RequestId, Entry>,
    attempts: HashMap<AttemptId, RequestId>,
    places: Places,
    pace: Pace,
    actions: VecDeque<Action>,
}

impl Scheduler {
    /// An empty scheduler that lets `max_queue` requests wait.
    pub fn new(max_queue: usize) -> Self {
        Self {
            max_queue,
            draining: false,
            limits: Limits::default(),
            next_request: 1,
            next_attempt: 1,
            entries: BTreeMap::new(),
            attempts: HashMap::new(),
            places: Places::default(),
            pace: Pace::default(),
            actions: VecDeque::new(),
        }
    }

    /// What a request may ask for now.
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// Takes the actions that the inputs so far have caused.
    pub fn take_actions(&mut self) -> impl Iterator<Item = Action> + '_ {
        self.actions.drain(..)
    }

    /// How many requests are where.
    pub fn counts(&self) -> Counts {
        let running = self.entries.values().filter(|entry| matches!(entry.phase, Phase::Running { started: true, .. })).count();
        Counts { waiting: self.entries.len() - running, running }
    }

    /// Every client's request that is not over, the oldest first: its id, phase, tokens sent, submissions so far, and what it asked for.
    pub fn requests(&self) -> impl Iterator<Item = (RequestId, stats::Phase, usize, u32, &GenerateRequest)> {
        self.entries.iter().filter(|(_, entry)| !entry.warmup).map(|(id, entry)| {
            let generated = entry.journal.emitted().len();
            let phase = match entry.phase {
                Phase::Running { started: true, .. } if generated > 0 => stats::Phase::Decode,
                Phase::Running { started: true, .. } => stats::Phase::Prefill,
                _ => stats::Phase::Waiting,
            };
            (*id, phase, generated, entry.attempts, entry.journal.request().as_ref())
        })
    }

    /// Whether no request is left.
    pub fn is_idle(&self) -> bool {
        self.entries.is_empty()
    }

    /// Admits `requests`, the choices of one API request, all or none. Ids are consecutive; each deadline counts from `now`.
    ///
    /// # Errors
    /// [`AdmissionError`], and nothing has changed.
    pub fn admit(&mut self, now: Duration, requests: Vec<GenerateRequest>) -> Result<Vec<RequestId>, AdmissionError> {
        if self.draining {
            return Err(AdmissionError::Draining);
        }
        for request in &requests {
            check_request(request, self.limits)?;
        }
        let most = self.max_queue + self.limits.max_batch as usize;
        if requests.len() > most {
            let message = format!("n is {}; at most {most} sequences can run or wait at once", requests.len());
            return Err(AdmissionError::Invalid { field: "n", message });
        }
        let queued = self.entries.values().filter(|entry| entry.phase == Phase::Waiting).count();
        if queued + requests.len() > self.max_queue + self.places.free() {
            return Err(AdmissionError::QueueFull { limit: self.max_queue, retry_after: self.pace.retry_after() });
        }
        let group = RequestId(self.next_request);
        let ids = requests.into_iter().map(|request| self.insert(now, request, group, false)).collect();
        self.dispatch(now);
        Ok(ids)
    }

    /// Admits the warm-up request, whatever the limits say.
    pub fn admit_warmup(&mut self, now: Duration, request: GenerateRequest) -> RequestId {
        let id = self.insert(now, request, RequestId(self.next_request), true);
        self.dispatch(now);
        id
    }

    fn insert(&mut self, now: Duration, request: GenerateRequest, group: RequestId, warmup: bool) -> RequestId {
        let id = RequestId(self.next_request);
        self.next_request += 1;
        let deadline = request.deadline.map(|left| now + left);
        let journal = Journal::new(Arc::new(request));
        self.entries
            .insert(id, Entry { group, deadline, journal, phase: Phase::Waiting, announced: false, attempts: 0, fruitless: 0, warmup });
        id
    }

    /// Ends a request whose client is gone. No event follows. Unknown ids (already ended) are ignored.
    pub fn cancel(&mut self, now: Duration, id: RequestId) {
        if self.remove(id, true).is_some() {
            self.dispatch(now);
        }
    }

    /// An attention worker attached, with its limits; not [ready](Self::set_ready) yet.
    pub fn worker_up(&mut self, worker: WorkerId, limits: Limits) {
        self.places.add(worker, limits);
        self.limits = self.places.limits().unwrap_or(self.limits);
    }

    /// Whether the worker takes new requests. Its running ones go on either way.
    pub fn set_ready(&mut self, now: Duration, worker: WorkerId, ready: bool) {
        if self.places.set_ready(worker, ready) {
            self.dispatch(now);
        }
    }

    /// The worker is lost: its requests go back into the queue. Unknown workers are ignored.
    pub fn worker_down(&mut self, now: Duration, worker: WorkerId) {
        if !self.places.remove(worker) {
            return;
        }
        self.limits = self.places.limits().unwrap_or(self.limits);
        let lost: Vec<RequestId> = self
            .entries
            .iter()
            .filter(|(_, entry)| matches!(entry.phase, Phase::Running { worker: on, .. } if on == worker))
            .map(|(id, _)| *id)
            .collect();
        for id in lost {
            self.requeue(now, id, "the attention worker was lost");
        }
        self.dispatch(now);
    }

    /// Lets time pass: ends requests whose deadline is over.
    pub fn tick(&mut self, now: Duration) {
        let over: Vec<(RequestId, bool)> = self
            .entries
            .iter()
            .filter_map(|(id, entry)| {
                let running = entry.phase != Phase::Waiting;
                let end = entry.deadline? + if running { DEADLINE_GRACE } else { Duration::ZERO };
                (now >= end).then_some((*id, running))
            })
            .collect();
        for (id, running) in &over {
            let phase = if *running { "while running" } else { "while waiting for a free attention worker" };
            self.fail(now, *id, ErrorCode::Deadline, format!("the request's deadline passed {phase}"));
        }
        if !over.is_empty() {
            self.dispatch(now);
        }
    }

    /// Admits nothing more.
    pub fn drain(&mut self) {
        self.draining = true;
    }

    /// Ends every request with an error: the time for draining is over.
    pub fn abort_all(&mut self, now: Duration, message: &str) {
        let ids: Vec<RequestId> = self.entries.keys().copied().collect();
        for id in ids {
            self.fail(now, id, ErrorCode::Draining, message.to_owned());
        }
    }

    /// Puts waiting requests onto free places until there are none of either.
    fn dispatch(&mut self, now: Duration) {
        while let Some(worker) = self.places.least_loaded() {
            let Some(id) = self.next_waiting() else { return };
            let attempt = AttemptId(self.next_attempt);
            self.next_attempt += 1;
            let Some(entry) = self.entries.get_mut(&id) else { return };
            entry.phase = Phase::Running { worker, attempt, started: false };
            entry.attempts += 1;
            self.places.take(worker);
            self.attempts.insert(attempt, id);
            self.actions.push_back(Action::Submit(Submission {
                worker,
                request: id,
                attempt,
                what: entry.journal.request().clone(),
                emitted: entry.journal.emitted().to_vec(),
                prompt_logprobs: entry.journal.wants_prompt_logprobs(),
                left: entry.deadline.map(|deadline| deadline.saturating_sub(now)),
                warmup: entry.warmup,
            }));
        }
    }

    /// The oldest waiting request, but a new one whose siblings hold half of the places already yields to other API requests. One that
    /// had a place before has a client in the middle of a stream, so it does not yield.
    fn next_waiting(&self) -> Option<RequestId> {
        let mut held: HashMap<RequestId, usize> = HashMap::new();
        for entry in self.entries.values().filter(|entry| entry.phase != Phase::Waiting) {
            *held.entry(entry.group).or_default() += 1;
        }
        let share = (self.places.total() / 2).max(1);
        let waiting = || self.entries.iter().filter(|(_, entry)| entry.phase == Phase::Waiting);
        waiting()
            .find(|(_, entry)| entry.attempts > 0 || held.get(&entry.group).copied().unwrap_or(0) < share)
            .or_else(|| waiting().next())
            .map(|(id, _)| *id)
    }

    /// Takes a request out; tells its worker if `cancel`.
    fn remove(&mut self, id: RequestId, cancel: bool) -> Option<Entry> {
        let entry = self.entries.remove(&id)?;
        self.release(entry.phase, cancel);
        Some(entry)
    }

    /// Frees the place of a request that leaves its worker.
    fn release(&mut self, phase: Phase, cancel: bool) {
        if let Phase::Running { worker, attempt, .. } = phase {
            self.attempts.remove(&attempt);
            if self.places.give_back(worker) && cancel {
                self.actions.push_back(Action::Cancel { worker, attempt });
            }
        }
    }

    fn emit(&mut self, request: RequestId, event: GenerationEvent) {
        match (self.actions.back_mut(), event) {
            (Some(Action::Emit { request: last, event: GenerationEvent::Tokens(tokens) }), GenerationEvent::Tokens(more))
                if *last == request =>
            {
                tokens.extend(more);
            }
            (_, event) => self.actions.push_back(Action::Emit { request, event }),
        }
    }

    fn finish(&mut self, now: Duration, id: RequestId, reason: Finish) {
        if self.remove(id, false).is_some() {
            self.pace.ended(now);
            self.emit(id, GenerationEvent::Finished { reason });
        }
    }

    fn fail(&mut self, now: Duration, id: RequestId, code: ErrorCode, message: String) {
        if self.remove(id, true).is_some() {
            self.pace.ended(now);
            self.emit(id, GenerationEvent::Error(GenerationError { code, message }));
        }
    }

    /// Puts a running request back at its old place in the queue, or ends it where nothing is left to compute or nothing helps.
    fn requeue(&mut self, now: Duration, id: RequestId, why: &str) {
        let Some(entry) = self.entries.get_mut(&id) else { return };
        if let Some(reason) = entry.journal.complete() {
            return self.finish(now, id, reason);
        }
        entry.fruitless += 1;
        if entry.fruitless >= MAX_FRUITLESS_ATTEMPTS {
            let message = format!("gave up after {MAX_FRUITLESS_ATTEMPTS} attempts without progress; the last one: {why}");
            return self.fail(now, id, ErrorCode::Internal, message);
        }
        let phase = std::mem::replace(&mut entry.phase, Phase::Waiting);
        self.release(phase, true);
        self.actions.push_back(Action::Requeued { request: id, why: why.to_owned() });
    }
}
