//! Membership at work: workers' streams go in, its changes come out to the streams, to `core.rs` and to the metrics. Locks: the cluster's
//! first, then the core's; never the other way.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tandem_proto::attn::v1 as attn;
use tandem_proto::control::v1 as wire;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::core::{Core, Outlet};
use crate::engine::Limits;
use crate::membership::{Change, Membership, SessionId, Strictness, Terms};
use crate::scheduler::WorkerId;
use crate::stats;
use crate::telemetry;

mod describe;

/// A member's control.v1 stream.
pub(crate) struct Session {
    pub(crate) id: SessionId,
    pub(crate) routes: watch::Receiver<wire::RouteTable>,
    pub(crate) drain: watch::Receiver<Option<wire::Drain>>,
    /// Cancelled when the stream must end.
    pub(crate) closed: CancellationToken,
}

/// The coordinator's hold on a member's control.v1 stream.
struct Stream {
    closed: CancellationToken,
    drain: watch::Sender<Option<wire::Drain>>,
}

/// An attention worker's attn.v1 stream.
pub(crate) struct Attachment {
    pub(crate) worker: WorkerId,
    pub(crate) closed: CancellationToken,
    name: String,
    epoch: u64,
}

/// The attached stream of one attention worker.
struct Attached {
    epoch: u64,
    worker: WorkerId,
    closed: CancellationToken,
}

/// Busy time at the last heartbeat, to make a rate of it.
struct Busy {
    at: Duration,
    seconds: f64,
    share: Option<f64>,
}

struct State {
    membership: Membership,
    next_session: u64,
    sessions: HashMap<SessionId, Stream>,
    /// What members that join from now on are told at once.
    drain: Option<wire::Drain>,
    attached: HashMap<String, Attached>,
    busy: HashMap<String, Busy>,
}

/// The members and their streams.
pub(crate) struct Cluster {
    core: Arc<Core>,
    /// What attention workers are told of the tokens.
    vocabulary: attn::Vocabulary,
    state: Mutex<State>,
    routes: watch::Sender<wire::RouteTable>,
}

impl Cluster {
    pub(crate) fn new(core: Arc<Core>, terms: Terms, vocabulary: attn::Vocabulary) -> Self {
        let membership = Membership::new(terms);
        let routes = watch::Sender::new(membership.routes().clone());
        telemetry::route_table(membership.routes().version);
        let state =
            State { membership, next_session: 1, sessions: HashMap::new(), drain: None, attached: HashMap::new(), busy: HashMap::new() };
        Self { core, vocabulary, state: Mutex::new(state), routes }
    }

    pub(crate) fn core(&self) -> &Core {
        &self.core
    }

    pub(crate) fn vocabulary(&self) -> &attn::Vocabulary {
        &self.vocabulary
    }

    /// A worker says Hello.
    pub(crate) fn join(&self, hello: wire::Hello) -> Result<(wire::Accept, Session), wire::Refuse> {
        let mut state = self.state.lock();
        let id = SessionId(state.next_session);
        state.next_session += 1;
        let (name, pid, device, version) = (hello.name.clone(), hello.pid, hello.device.clone(), hello.version.clone());
        let accept = state.membership.join(self.core.clock().now(), id, hello).inspect_err(|refuse| {
            tracing::warn!(worker = name, pid, field = refuse.field, needed = refuse.needed, got = refuse.got, "worker refused");
        })?;
        let shards: Vec<u32> = accept.shards.iter().map(|shard| shard.id).collect();
        tracing::info!(worker = name, pid, device, version, ?shards, "worker joined");
        let closed = CancellationToken::new();
        let drain = watch::Sender::new(state.drain.clone());
        let told = drain.subscribe();
        state.sessions.insert(id, Stream { closed: closed.clone(), drain });
        self.carry_out(&mut state);
        Ok((accept, Session { id, routes: self.routes.subscribe(), drain: told, closed }))
    }

    /// A member's heartbeat.
    pub(crate) fn heartbeat(&self, session: SessionId, beat: wire::Heartbeat) {
        let mut state = self.state.lock();
        state.membership.heartbeat(self.core.clock().now(), session, beat);
        self.carry_out(&mut state);
    }

    /// A member's stream is over.
    pub(crate) fn leave(&self, session: SessionId, why: &str) {
        let mut state = self.state.lock();
        state.sessions.remove(&session);
        state.membership.leave(session, why);
        self.carry_out(&mut state);
    }

    /// An attention worker opens its attn.v1 stream. A former stream of the same process is over then.
    pub(crate) fn attach(&self, name: &str, epoch: u64, outlet: Outlet) -> Result<Attachment, String> {
        let mut state = self.state.lock();
        if let Some(former) = state.attached.remove(name) {
            state.membership.detach(name, former.epoch);
            self.end(&former);
            self.carry_out(&mut state);
        }
        let limits = state.membership.attach(name, epoch)?;
        let limits = Limits { max_seq_len: limits.max_seq_len, max_batch: limits.max_batch, kv_tokens: limits.kv_tokens };
        self.core.telemetry().cache_config(limits.kv_tokens);
        let worker = self.core.worker_up(limits, outlet);
        let closed = CancellationToken::new();
        state.attached.insert(name.to_owned(), Attached { epoch, worker, closed: closed.clone() });
        self.carry_out(&mut state);
        Ok(Attachment { worker, closed, name: name.to_owned(), epoch })
    }

    /// An attn.v1 stream is over.
    pub(crate) fn detach(&self, attachment: &Attachment) {
        let mut state = self.state.lock();
        if state.attached.get(&attachment.name).is_some_and(|attached| attached.worker == attachment.worker) {
            state.attached.remove(&attachment.name);
            state.membership.detach(&attachment.name, attachment.epoch);
            self.carry_out(&mut state);
        }
        self.core.worker_down(attachment.worker);
    }

    /// Ends leases, and tells how busy the workers are.
    pub(crate) fn tick(&self) {
        let now = self.core.clock().now();
        let mut state = self.state.lock();
        state.membership.tick(now);
        self.carry_out(&mut state);
        let State { membership, busy, .. } = &mut *state;
        for (name, member) in membership.members() {
            let seconds = member.report.as_ref().map(|report| report.busy_seconds);
            if let Some(share) = seconds.and_then(|seconds| busy_share(busy, name, member.heard, seconds)) {
                telemetry::worker_busy(name, share);
            }
        }
    }

    /// Every reason why no token can be made now.
    pub(crate) fn reasons(&self, strictness: Strictness) -> Vec<String> {
        self.state.lock().membership.reasons(self.core.clock().now(), strictness)
    }

    /// Used share of the attention workers' latent pools; `None` before one has reported.
    pub(crate) fn kv_usage(&self) -> Option<f64> {
        let state = self.state.lock();
        let reports = state.membership.members().values().filter_map(|member| member.report.as_ref());
        let (used, total) = reports.fold((0, 0), |(used, total), report| (used + report.kv_tokens_used, total + report.kv_tokens_total));
        (total > 0).then(|| used as f64 / total as f64)
    }

    /// Attention workers whose stream is there.
    pub(crate) fn attached(&self) -> usize {
        self.state.lock().attached.len()
    }

    /// The members and the route table, for people.
    pub(crate) fn stats(&self) -> (Vec<stats::Worker>, Vec<stats::Shard>) {
        let now = self.core.clock().now();
        let state = self.state.lock();
        let workers = state.membership.members().values().map(|member| {
            let busy = state.busy.get(&member.hello.name).and_then(|busy| busy.share);
            describe::worker(member, now, busy)
        });
        (workers.collect(), state.membership.routes().routes.iter().map(describe::shard).collect())
    }

    /// Whether no member is left.
    pub(crate) fn is_empty(&self) -> bool {
        self.state.lock().membership.members().is_empty()
    }

    /// Tells every member to drain, those that still join included.
    pub(crate) fn drain(&self, reason: &str, timeout: Duration) {
        let drain = drain_message(reason, timeout);
        let mut state = self.state.lock();
        state.drain = Some(drain.clone());
        for stream in state.sessions.values() {
            stream.drain.send_replace(Some(drain.clone()));
        }
    }

    /// Tells one member to drain.
    ///
    /// # Errors
    /// Nobody has that name; says who is there.
    pub(crate) fn drain_worker(&self, name: &str, timeout: Duration) -> Result<(), String> {
        let state = self.state.lock();
        let members = state.membership.members();
        let stream = members.get(name).and_then(|member| state.sessions.get(&member.session)).ok_or_else(|| {
            let names: Vec<&str> = members.keys().map(String::as_str).collect();
            format!("no worker is called {name:?}; these are here: {}", names.join(", "))
        })?;
        stream.drain.send_replace(Some(drain_message("an operator asked for it", timeout)));
        Ok(())
    }

    fn end(&self, attached: &Attached) {
        attached.closed.cancel();
        self.core.worker_down(attached.worker);
    }

    fn carry_out(&self, state: &mut State) {
        let changes: Vec<Change> = state.membership.take_changes().collect();
        for change in changes {
            match change {
                Change::Up { name, role, restart } => telemetry::worker_up(&name, role_label(role), true, restart),
                Change::Down { name, role, epoch, why } => {
                    tracing::warn!(worker = name, %why, "worker gone");
                    telemetry::worker_up(&name, role_label(role), false, false);
                    state.busy.remove(&name);
                    if state.attached.get(&name).is_some_and(|attached| attached.epoch == epoch)
                        && let Some(attached) = state.attached.remove(&name)
                    {
                        self.end(&attached);
                    }
                }
                Change::Close { session, why } => {
                    if let Some(stream) = state.sessions.remove(&session) {
                        tracing::info!(session = session.0, %why, "control stream closed");
                        stream.closed.cancel();
                    }
                }
                Change::Serving { name, epoch, ready } => {
                    if let Some(attached) = state.attached.get(&name).filter(|attached| attached.epoch == epoch) {
                        self.core.set_ready(attached.worker, ready);
                    }
                }
                Change::Routes => {
                    let table = state.membership.routes().clone();
                    telemetry::route_table(table.version);
                    self.routes.send_replace(table);
                }
            }
        }
    }
}

/// Busy seconds per second between two heartbeats; `None` while there is no newer one.
fn busy_share(busy: &mut HashMap<String, Busy>, name: &str, at: Duration, seconds: f64) -> Option<f64> {
    let Some(last) = busy.get_mut(name) else {
        busy.insert(name.to_owned(), Busy { at, seconds, share: None });
        return None;
    };
    // At least a second apart, so that one step's boundary does not show as a jump.
    let apart = at.checked_sub(last.at).filter(|apart| *apart >= Duration::from_secs(1))?;
    let share = ((seconds - last.seconds).max(0.0) / apart.as_secs_f64()).min(1.0);
    *last = Busy { at, seconds, share: Some(share) };
    Some(share)
}

fn drain_message(reason: &str, timeout: Duration) -> wire::Drain {
    wire::Drain { reason: reason.into(), timeout_ms: u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX) }
}

fn role_label(role: wire::Role) -> &'static str {
    match role {
        wire::Role::Attn => "attn",
        wire::Role::Experts => "experts",
        wire::Role::Unspecified => "unknown",
    }
}
