//! The workers of the route table: whom to dial, who is connected, who may compute a shard.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::HopLink;
use super::session::{Established, Events, Session, SessionId, spawn_dial};
use crate::backoff;
use crate::experts::v1::Hello;
use crate::frame::{MAX_PAYLOAD, VERSION};
use crate::hop::shared::OpenWindow;
use crate::hop::{CREDITS, HopOptions};
use crate::route_table::{Holder, RouteTable};

const FIRST_RETRY: Duration = Duration::from_millis(10);
const LAST_RETRY: Duration = Duration::from_millis(500);

/// Every worker that the table names, by name.
#[derive(Debug)]
pub(super) struct Fleet {
    options: Arc<HopOptions>,
    events: Arc<Events>,
    table: RouteTable,
    workers: HashMap<String, Worker>,
    /// Arithmetic that serves a shard: a running sequence has seen no other.
    pinned: HashMap<u32, String>,
    next_session: SessionId,
}

#[derive(Debug)]
struct Worker {
    holder: Holder,
    /// Shards for which the table calls it ready.
    ready: Vec<u32>,
    link: LinkState,
}

#[derive(Debug)]
enum LinkState {
    Down {
        retry_at: Instant,
        failures: u32,
        reason: String,
    },
    /// `last` = why the dial before failed.
    Dialling {
        session: SessionId,
        task: tokio::task::AbortHandle,
        failures: u32,
        last: String,
    },
    Live(Session),
}

/// A worker that may compute a shard now.
pub(super) struct Choice<'a> {
    pub session: &'a Session,
    /// Its arithmetic is not the one that the shard is pinned to.
    pub mixed: bool,
}

impl Fleet {
    pub fn new(options: Arc<HopOptions>, events: Arc<Events>) -> Self {
        Self { options, events, table: RouteTable::default(), workers: HashMap::new(), pinned: HashMap::new(), next_session: 1 }
    }

    pub fn route_version(&self) -> u32 {
        self.table.version
    }

    /// Follows a new table: sessions of workers that left or restarted are dropped, new ones are dialled by [`Fleet::dial`].
    pub fn follow(&mut self, table: RouteTable, now: Instant) {
        let mut wanted: HashMap<&str, (&Holder, Vec<u32>)> = HashMap::new();
        for route in &table.routes {
            for holder in route.holders.iter().filter(|holder| !holder.local) {
                let (_, ready) = wanted.entry(&holder.worker).or_insert_with(|| (holder, Vec::new()));
                if holder.ready {
                    ready.push(route.shard.id);
                }
            }
        }
        self.workers.retain(|name, worker| match wanted.get(name.as_str()) {
            Some((holder, _)) if holder.epoch == worker.holder.epoch => true,
            Some((holder, _)) => {
                tracing::info!(worker = %name, epoch = holder.epoch, "an expert worker restarted");
                false
            }
            None => {
                tracing::info!(worker = %name, "an expert worker left the route table");
                false
            }
        });
        for (name, (holder, ready)) in wanted {
            match self.workers.get_mut(name) {
                Some(worker) => {
                    let moved = worker.holder.addresses != holder.addresses;
                    (worker.holder, worker.ready) = (holder.clone(), ready);
                    if moved && let LinkState::Down { retry_at, .. } = &mut worker.link {
                        *retry_at = now;
                    }
                }
                None => {
                    let link = LinkState::Down { retry_at: now, failures: 0, reason: "not dialled yet".into() };
                    self.workers.insert(name.to_owned(), Worker { holder: holder.clone(), ready, link });
                }
            }
        }
        self.table = table;
    }

    /// Dials every ready worker that is down and due. On the hop's runtime.
    pub fn dial(&mut self, now: Instant) {
        for worker in self.workers.values_mut() {
            let LinkState::Down { retry_at, failures, reason } = &worker.link else { continue };
            if worker.ready.is_empty() || *retry_at > now {
                continue;
            }
            let (session, options) = (self.next_session, &self.options);
            self.next_session += 1;
            let hello = Hello {
                protocol_version: u32::from(VERSION),
                name: options.name.clone(),
                epoch: options.epoch,
                peer_epoch: worker.holder.epoch,
                fingerprint: options.fingerprint.clone(),
                precision: options.precision.to_string(),
                hidden: options.hidden as u32,
                topk: options.topk as u32,
                shards: worker.ready.clone(),
                max_rows: options.max_rows,
                max_payload: MAX_PAYLOAD as u32,
                credits: CREDITS,
                arithmetic: String::new(),
                host: options.host.clone(),
                shared: options.lender.as_ref().map(|lender| lender.lent.handle.clone()).unwrap_or_default(),
                shared_rows: options.lender.as_ref().map_or(0, |lender| lender.lent.rows),
            };
            let task = spawn_dial(&self.events, &worker.holder, hello, session, options.link, options.connect_timeout);
            worker.link = LinkState::Dialling { session, task, failures: *failures, last: reason.clone() };
        }
    }

    /// A dial ended. Returns whether a session came up.
    pub fn dialled(&mut self, name: &str, id: SessionId, result: Result<Box<Established>, String>, now: Instant) -> bool {
        let Some(worker) = self.workers.get_mut(name) else { return false };
        let LinkState::Dialling { session, failures, .. } = worker.link else { return false };
        if session != id {
            return false;
        }
        match result {
            Ok(established) => {
                let (kind, reason) = (established.kind, established.reason.clone());
                let window = window_onto(&self.options, name, &established);
                let shared = window.is_some();
                tracing::info!(worker = %name, epoch = worker.holder.epoch, link = %kind, %reason, shared, "connected to an expert worker");
                metrics::gauge!("tandem_link_info", "worker" => name.to_owned(), "link" => kind.name(), "reason" => reason_label(&reason))
                    .set(1.0);
                metrics::gauge!("tandem_link_shared", "worker" => name.to_owned()).set(f64::from(u8::from(shared)));
                worker.link = LinkState::Live(Session::start(&self.events, id, *established, name, window));
                true
            }
            Err(reason) => {
                // Said once per cause: a worker that stays away is retried many times.
                if failures == 0 {
                    tracing::warn!(worker = %name, %reason, "cannot connect to an expert worker");
                }
                let wait = backoff::wait(failures, FIRST_RETRY, LAST_RETRY);
                worker.link = LinkState::Down { retry_at: now + wait, failures: failures + 1, reason };
                false
            }
        }
    }

    /// A session ended or is to end; its worker is dialled again at once.
    pub fn hang_up(&mut self, session: SessionId, reason: &str, now: Instant) {
        for (name, worker) in &mut self.workers {
            if matches!(&worker.link, LinkState::Live(live) if live.id == session) {
                tracing::warn!(worker = %name, %reason, "lost the link to an expert worker");
                metrics::gauge!("tandem_link_shared", "worker" => name.clone()).set(0.0);
                worker.link = LinkState::Down { retry_at: now, failures: 0, reason: reason.to_owned() };
            }
        }
    }

    /// The running session of that id, and its worker.
    pub fn session(&mut self, id: SessionId) -> Option<(&Holder, &mut Session)> {
        self.workers.values_mut().find_map(|worker| match &mut worker.link {
            LinkState::Live(session) if session.id == id => Some((&worker.holder, session)),
            _ => None,
        })
    }

    /// All running sessions.
    pub fn sessions(&self) -> impl Iterator<Item = &Session> {
        self.workers.values().filter_map(|worker| match &worker.link {
            LinkState::Live(session) => Some(session),
            _ => None,
        })
    }

    /// The running sessions.
    pub fn links(&self) -> Vec<HopLink> {
        let live = self.workers.iter().filter_map(|(name, worker)| match &worker.link {
            LinkState::Live(session) => {
                let (kind, addr, shared) = (session.kind, session.peer.clone(), session.window.is_some());
                Some(HopLink { worker: name.clone(), kind, addr, shared })
            }
            _ => None,
        });
        let mut links: Vec<_> = live.collect();
        links.sort_by(|a, b| a.worker.cmp(&b.worker));
        links
    }

    /// Who computes `shard`, in the table's order: connected, ready, not among `failed`; with the pinned arithmetic if there is one
    /// such worker, with another only if that is allowed.
    pub fn choose(&self, shard: u32, failed: &[(String, String)], except: Option<SessionId>) -> Option<Choice<'_>> {
        let route = self.table.route(shard)?;
        let pinned = self.pinned.get(&shard);
        let usable = route.holders.iter().filter(|holder| !holder.local && holder.ready).filter_map(|holder| {
            let LinkState::Live(session) = &self.workers.get(&holder.worker)?.link else { return None };
            let fits = session.shards.contains(&shard) && Some(session.id) != except;
            let fresh = failed.iter().all(|(worker, _)| *worker != holder.worker);
            let mixed = pinned.is_some_and(|pinned| *pinned != holder.arithmetic);
            (fits && fresh).then_some(Choice { session, mixed })
        });
        let mut mixed = None;
        for choice in usable {
            if !choice.mixed {
                return Some(choice);
            }
            mixed.get_or_insert(choice);
        }
        mixed.filter(|_| self.options.allow_mixed_experts)
    }

    /// Whether the table names a ready holder of `shard` that has not failed, connected or not.
    pub fn has_untried(&self, shard: u32, failed: &[(String, String)]) -> bool {
        let holders = self.table.route(shard).map(|route| route.holders.as_slice()).unwrap_or_default();
        holders.iter().any(|h| !h.local && h.ready && failed.iter().all(|(worker, _)| *worker != h.worker))
    }

    /// An answer for `shard` came from `arithmetic`: the sequences of this step depend on it.
    pub fn pin(&mut self, shard: u32, arithmetic: &str) {
        self.pinned.entry(shard).or_insert_with(|| arithmetic.to_owned());
    }

    pub fn unpin_all(&mut self) {
        self.pinned.clear();
    }

    /// Why nobody can compute `shard` now, holder by holder.
    pub fn reasons(&self, shard: u32) -> Vec<String> {
        let Some(route) = self.table.route(shard) else {
            return vec![format!("route table {} does not name the shard", self.table.version)];
        };
        if route.holders.is_empty() {
            return vec![format!("route table {} names no worker for it", self.table.version)];
        }
        route.holders.iter().map(|holder| format!("{}: {}", holder.worker, self.reason(shard, holder))).collect()
    }

    fn reason(&self, shard: u32, holder: &Holder) -> String {
        if holder.local {
            return "it is held by this worker itself: nothing to dial".into();
        }
        if !holder.ready {
            return "not ready".into();
        }
        let pinned = self.pinned.get(&shard).filter(|pinned| **pinned != holder.arithmetic);
        if let Some(pinned) = pinned.filter(|_| !self.options.allow_mixed_experts) {
            let got = &holder.arithmetic;
            return format!("arithmetic is {got}; needed {pinned}, which began the running sequences (--allow-mixed-experts permits it)");
        }
        match self.workers.get(&holder.worker).map(|worker| &worker.link) {
            None => "not in use".into(),
            Some(LinkState::Down { reason, .. }) => reason.clone(),
            Some(LinkState::Dialling { last, .. }) => format!("connecting ({last})"),
            Some(LinkState::Live(session)) if !session.shards.contains(&shard) => "connected, but holds other shards".into(),
            Some(LinkState::Live(session)) => format!("connected over {}, no answer", session.kind),
        }
    }

    /// When the next dial is due.
    pub fn next_dial(&self) -> Option<Instant> {
        let due = self.workers.values().filter(|worker| !worker.ready.is_empty()).filter_map(|worker| match worker.link {
            LinkState::Down { retry_at, .. } => Some(retry_at),
            _ => None,
        });
        due.min()
    }

    /// A dial is going on.
    pub fn is_dialling(&self) -> bool {
        self.workers.values().any(|worker| matches!(worker.link, LinkState::Dialling { .. }))
    }

    /// Shards with a connected, ready holder, or held here; ascending.
    pub fn reachable(&self) -> Vec<u32> {
        let reachable = |shard: u32, holder: &Holder| {
            holder.local
                || (holder.ready
                    && self
                        .workers
                        .get(&holder.worker)
                        .is_some_and(|worker| matches!(&worker.link, LinkState::Live(session) if session.shards.contains(&shard))))
        };
        let routes = self.table.routes.iter();
        routes.filter(|route| route.holders.iter().any(|h| reachable(route.shard.id, h))).map(|route| route.shard.id).collect()
    }
}

/// A window onto what the worker's Welcome lends, if it lends anything.
fn window_onto(options: &HopOptions, worker: &str, established: &Established) -> Option<OpenWindow> {
    let (lender, welcome) = (options.lender.as_ref()?, &established.welcome);
    if welcome.shared.is_empty() {
        return None;
    }
    let opened = OpenWindow::open(lender, &welcome.shared, welcome.shared_rows);
    opened.inspect_err(|reason| tracing::info!(%worker, %reason, "its memory cannot be shared: rows go over the link")).ok()
}

impl Drop for Worker {
    fn drop(&mut self) {
        if let LinkState::Dialling { task, .. } = &self.link {
            task.abort();
        }
    }
}

/// The choice without its detail: a label must not take unbounded values.
fn reason_label(reason: &str) -> &'static str {
    if reason.ends_with("first offered") { "first" } else { "fallback" }
}
