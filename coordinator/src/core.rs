//! The scheduler at work: its actions go to the attention workers' streams and to the clients, its inputs come from there. One short lock,
//! nothing in it waits. Between `engine.rs` and `services/attn.rs`.

use std::collections::HashMap;
use std::time::Duration;

use parking_lot::Mutex;
use tandem_proto::attn::v1 as wire;
use tokio::sync::mpsc;
use tokio::time::Instant;

use crate::engine::{AdmissionError, Departure, GenerateRequest, Generation, GenerationEvent, Limits};
use crate::scheduler::{Action, AttemptId, Counts, RequestId, Scheduler, WorkerEvent, WorkerId};
use crate::services::attn::submit_to_wire;
use crate::stats::{self, Requests};
use crate::telemetry::{Outcome, Telemetry, Timeline};

/// Time since the coordinator's start: what the pure state machines are fed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Clock {
    start: Instant,
}

impl Clock {
    pub(crate) fn new() -> Self {
        Self { start: Instant::now() }
    }

    pub(crate) fn now(&self) -> Duration {
        self.start.elapsed()
    }
}

/// Where a worker's requests go in: its attn.v1 stream.
pub(crate) type Outlet = mpsc::UnboundedSender<wire::ToWorker>;

/// The client's side of an admitted request.
struct Client {
    events: mpsc::UnboundedSender<GenerationEvent>,
    /// `None` for the warm-up, which is nobody's request.
    timeline: Option<Timeline>,
    request_id: String,
}

struct State {
    scheduler: Scheduler,
    clients: HashMap<RequestId, Client>,
    outlets: HashMap<WorkerId, Outlet>,
    next_worker: u64,
}

/// Scheduler, clients and workers' streams.
pub(crate) struct Core {
    clock: Clock,
    state: Mutex<State>,
    telemetry: Telemetry,
    request_timeout: Duration,
    departures: mpsc::UnboundedSender<Departure>,
}

impl Core {
    /// An idle core, and the receiver that [`Core::departed`] must be fed from.
    pub(crate) fn new(
        clock: Clock,
        max_queue: usize,
        request_timeout: Duration,
        telemetry: Telemetry,
    ) -> (Self, mpsc::UnboundedReceiver<Departure>) {
        let (departures, receiver) = mpsc::unbounded_channel();
        let state = State { scheduler: Scheduler::new(max_queue), clients: HashMap::new(), outlets: HashMap::new(), next_worker: 1 };
        (Self { clock, state: Mutex::new(state), telemetry, request_timeout, departures }, receiver)
    }

    pub(crate) fn clock(&self) -> Clock {
        self.clock
    }

    pub(crate) fn telemetry(&self) -> &Telemetry {
        &self.telemetry
    }

    pub(crate) fn limits(&self) -> Limits {
        self.state.lock().scheduler.limits()
    }

    pub(crate) fn counts(&self) -> Counts {
        self.state.lock().scheduler.counts()
    }

    /// The requests that are not over.
    pub(crate) fn requests(&self) -> Requests {
        let now = self.clock.now();
        let state = self.state.lock();
        let Counts { waiting, running } = state.scheduler.counts();
        let list = state.scheduler.requests().filter_map(|(id, phase, generated_tokens, attempts, what)| {
            let client = state.clients.get(&id)?;
            let admitted = client.timeline.as_ref().map_or(now, Timeline::admitted);
            Some(stats::Request {
                id: client.request_id.clone(),
                phase,
                prompt_tokens: what.prompt_ids.len(),
                generated_tokens,
                max_tokens: what.max_tokens,
                age_seconds: now.saturating_sub(admitted).as_secs_f64(),
                attempts,
            })
        });
        Requests { waiting, running, list: list.collect() }
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.state.lock().scheduler.is_idle()
    }

    /// Admits all of `requests` or none.
    pub(crate) fn submit(&self, mut requests: Vec<GenerateRequest>) -> Result<Vec<Generation>, AdmissionError> {
        for request in &mut requests {
            request.deadline = Some(request.deadline.unwrap_or(self.request_timeout).min(self.request_timeout));
        }
        let now = self.clock.now();
        let mut state = self.state.lock();
        let clients: Vec<(Timeline, String)> =
            requests.iter().map(|request| (Timeline::new(now, request.prompt_ids.len()), request.request_id.clone())).collect();
        let max_tokens: Vec<u32> = requests.iter().map(|request| request.max_tokens).collect();
        let ids = state.scheduler.admit(now, requests)?;
        self.telemetry.admitted(&max_tokens);
        let generations = ids
            .into_iter()
            .zip(clients)
            .map(|(id, (timeline, request_id))| self.client(&mut state, id, Some(timeline), request_id))
            .collect();
        self.carry_out(&mut state, now);
        Ok(generations)
    }

    /// Submits the warm-up request: every shard of every layer, whatever the router says.
    pub(crate) fn warmup(&self, request: GenerateRequest) -> Generation {
        let now = self.clock.now();
        let mut state = self.state.lock();
        let id = state.scheduler.admit_warmup(now, request);
        let generation = self.client(&mut state, id, None, "warm-up".into());
        self.carry_out(&mut state, now);
        generation
    }

    fn client(&self, state: &mut State, id: RequestId, timeline: Option<Timeline>, request_id: String) -> Generation {
        let (events, generation) = Generation::channel(id.0, self.departures.clone());
        state.clients.insert(id, Client { events, timeline, request_id });
        generation
    }

    /// A client has gone before its request's end.
    pub(crate) fn departed(&self, departure: Departure) {
        let now = self.clock.now();
        let mut state = self.state.lock();
        let id = RequestId(departure.id);
        if let Some(mut client) = state.clients.remove(&id) {
            let outcome = if departure.kept.is_some() { Outcome::Stop } else { Outcome::Abort };
            if let Some(timeline) = &mut client.timeline {
                timeline.end(&self.telemetry, now, outcome, departure.kept);
            }
        }
        state.scheduler.cancel(now, id);
        self.carry_out(&mut state, now);
    }

    /// An attention worker attached; it gets nothing before [`Core::set_ready`].
    pub(crate) fn worker_up(&self, limits: Limits, outlet: Outlet) -> WorkerId {
        let mut state = self.state.lock();
        let worker = WorkerId(state.next_worker);
        state.next_worker += 1;
        state.outlets.insert(worker, outlet);
        state.scheduler.worker_up(worker, limits);
        worker
    }

    /// Whether the worker takes new requests.
    pub(crate) fn set_ready(&self, worker: WorkerId, ready: bool) {
        let now = self.clock.now();
        let mut state = self.state.lock();
        state.scheduler.set_ready(now, worker, ready);
        self.carry_out(&mut state, now);
    }

    /// The worker's stream is over, or its lease. Its requests wait for another one.
    pub(crate) fn worker_down(&self, worker: WorkerId) {
        let now = self.clock.now();
        let mut state = self.state.lock();
        state.outlets.remove(&worker);
        state.scheduler.worker_down(now, worker);
        self.carry_out(&mut state, now);
    }

    /// What a worker says about its attempts, in order.
    pub(crate) fn events(&self, worker: WorkerId, events: impl IntoIterator<Item = (AttemptId, WorkerEvent)>) {
        let now = self.clock.now();
        let mut state = self.state.lock();
        state.scheduler.events(now, worker, events);
        self.carry_out(&mut state, now);
    }

    /// Ends what is past its deadline.
    pub(crate) fn tick(&self) {
        let now = self.clock.now();
        let mut state = self.state.lock();
        state.scheduler.tick(now);
        self.carry_out(&mut state, now);
    }

    /// Admits nothing more.
    pub(crate) fn drain(&self) {
        self.state.lock().scheduler.drain();
    }

    /// Ends everything with an error.
    pub(crate) fn abort_all(&self, message: &str) {
        let now = self.clock.now();
        let mut state = self.state.lock();
        state.scheduler.abort_all(now, message);
        self.carry_out(&mut state, now);
    }

    fn carry_out(&self, state: &mut State, now: Duration) {
        let State { scheduler, clients, outlets, .. } = state;
        for action in scheduler.take_actions() {
            match action {
                Action::Submit(submission) => {
                    let message = wire::to_worker::Message::Submit(submit_to_wire(&submission));
                    send(outlets, submission.worker, message);
                }
                Action::Cancel { worker, attempt } => {
                    send(outlets, worker, wire::to_worker::Message::Cancel(wire::Cancel { request_id: attempt.0 }));
                }
                Action::Emit { request, event } => self.emit(clients, now, request, event),
                Action::Requeued { request, why } => {
                    self.telemetry.resumed();
                    let request_id = clients.get(&request).map_or("", |client| client.request_id.as_str());
                    tracing::warn!(request_id, %why, "request goes back into the queue with its journal");
                }
                Action::Preempted { .. } => self.telemetry.preempted(),
            }
        }
    }

    fn emit(&self, clients: &mut HashMap<RequestId, Client>, now: Duration, id: RequestId, event: GenerationEvent) {
        let Some(client) = clients.get_mut(&id) else { return };
        if let Some(timeline) = &mut client.timeline {
            timeline.event(&self.telemetry, now, &event);
        }
        if let GenerationEvent::Error(error) = &event {
            tracing::warn!(request_id = client.request_id, code = ?error.code, error = error.message, "request failed");
        }
        let end = event.is_end();
        // A client that is gone has left its departure in the channel.
        let _ = client.events.send(event);
        if end {
            clients.remove(&id);
        }
    }
}

/// A worker whose stream has just ended is not there to be told; its `worker_down` follows.
fn send(outlets: &HashMap<WorkerId, Outlet>, worker: WorkerId, message: wire::to_worker::Message) {
    if let Some(outlet) = outlets.get(&worker) {
        let _ = outlet.send(wire::ToWorker { message: Some(message) });
    }
}
