//! Who belongs to the instance: joins, leases, shard assignment, the route table, readiness. A pure state machine with no I/O and no
//! clock; `services/control.rs` feeds it and `cluster.rs` carries its [`Change`]s out.
//!
//! Rules: a member is known by its name; a join under a live name replaces that member (a restarted process), and the replaced process is
//! refused from then on; silence longer than the lease is death; a shard's additive partial may come from any of its holders.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use tandem_model::ShardPlan;
use tandem_proto::control::v1 as wire;

mod assign;
mod hello;
mod readiness;
mod routes;
#[cfg(test)]
mod tests;

pub use hello::PROTOCOL_VERSION;
pub use readiness::Strictness;
pub(crate) use routes::shard_from_wire;

/// One Join stream. A worker that dials again gets a new one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionId(pub u64);

/// What every member must agree on.
#[derive(Clone, Debug)]
pub struct Terms {
    /// New per coordinator start.
    pub coordinator_epoch: u64,
    /// Of the checkpoint.
    pub fingerprint: String,
    /// `f32` or `bf16`.
    pub precision: String,
    /// Who has to hold what.
    pub plan: ShardPlan,
    /// How often members report.
    pub heartbeat: Duration,
    /// Silence that counts as death.
    pub lease: Duration,
}

/// What follows from the inputs so far, in order.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    /// A worker joined.
    Up {
        /// Its name.
        name: String,
        /// Its role.
        role: wire::Role,
        /// A worker of that name was here before, as another process.
        restart: bool,
    },
    /// A member is gone.
    Down {
        /// Its name.
        name: String,
        /// Its role.
        role: wire::Role,
        /// Of its process.
        epoch: u64,
        /// One line.
        why: String,
    },
    /// The stream of this session must end.
    Close {
        /// Which stream.
        session: SessionId,
        /// One line.
        why: String,
    },
    /// An attention worker takes new requests, or does not.
    Serving {
        /// Its name.
        name: String,
        /// Of its process.
        epoch: u64,
        /// Whether it does.
        ready: bool,
    },
    /// [`Membership::routes`] has a new version.
    Routes,
}

/// A live member.
#[derive(Clone, Debug)]
pub struct Member {
    /// What it said first.
    pub hello: wire::Hello,
    /// Its stream.
    pub session: SessionId,
    /// Ids of the shards that it has to hold.
    pub shards: Vec<u32>,
    /// What it said last; `None` before the first heartbeat.
    pub report: Option<wire::Heartbeat>,
    /// When that was (or the join).
    pub heard: Duration,
    /// Attention worker: its attn.v1 stream is there.
    pub attached: bool,
    /// Place in the order of joins.
    order: u64,
}

/// What is remembered under a name for the coordinator's life.
#[derive(Debug, Default)]
struct Past {
    epoch: u64,
    shards: Vec<u32>,
    /// Processes that another one has replaced, the newest last.
    replaced: VecDeque<u64>,
}

/// How many replaced processes are remembered per name: more than can be alive at once.
const REPLACED: usize = 16;

/// The state machine.
#[derive(Debug)]
pub struct Membership {
    terms: Terms,
    members: BTreeMap<String, Member>,
    past: BTreeMap<String, Past>,
    routes: wire::RouteTable,
    changes: VecDeque<Change>,
    joins: u64,
    ticked: Duration,
}

impl Membership {
    /// Nobody is here; every shard's route is empty.
    pub fn new(terms: Terms) -> Self {
        let routes = routes::build(&terms.plan, &BTreeMap::new());
        Self {
            terms,
            members: BTreeMap::new(),
            past: BTreeMap::new(),
            routes: wire::RouteTable { version: 1, routes },
            changes: VecDeque::new(),
            joins: 0,
            ticked: Duration::ZERO,
        }
    }

    /// The current route table.
    pub fn routes(&self) -> &wire::RouteTable {
        &self.routes
    }

    /// The live members, by name.
    pub fn members(&self) -> &BTreeMap<String, Member> {
        &self.members
    }

    /// What every member must agree on.
    pub fn terms(&self) -> &Terms {
        &self.terms
    }

    /// Takes the changes that the inputs so far have caused.
    pub fn take_changes(&mut self) -> impl Iterator<Item = Change> + '_ {
        self.changes.drain(..)
    }

    /// A worker says Hello on a new session.
    ///
    /// # Errors
    /// The refusal to send, by field; nothing has changed then.
    pub fn join(&mut self, now: Duration, session: SessionId, hello: wire::Hello) -> Result<wire::Accept, wire::Refuse> {
        hello::check(&self.terms, &hello)?;
        let name = hello.name.clone();
        if let Some(member) = self.members.get(&name)
            && member.hello.role != hello.role
        {
            return Err(hello::refuse(
                "role",
                format!("{}, as the live worker {name} says", member.hello.role().as_str_name()),
                hello.role().as_str_name(),
                "give each worker its own name (--name)",
            ));
        }
        if self.past.get(&name).is_some_and(|past| past.replaced.contains(&hello.epoch)) {
            return Err(hello::refuse(
                "epoch",
                format!("the process that replaced this one under the name {name}"),
                format!("{:#x}", hello.epoch),
                "two processes use one name: stop this one, or give it another name (--name)",
            ));
        }
        let shards = assign::assign(self, &hello)?;
        let old = self.members.remove(&name);
        let same_process = old.as_ref().is_some_and(|old| old.hello.epoch == hello.epoch);
        let (mut report, mut attached) = (None, false);
        match old {
            // A network fault between two live processes: nothing that it holds or runs is lost.
            Some(old) if same_process => {
                self.changes.push_back(Change::Close { session: old.session, why: "it dialled again".into() });
                (report, attached) = (old.report, old.attached);
            }
            Some(old) => self.gone(old, "a new process took its name", true),
            None => {}
        }
        let past = self.past.entry(name.clone()).or_default();
        let restart = past.epoch != 0 && past.epoch != hello.epoch;
        if restart {
            past.replaced.push_back(past.epoch);
            if past.replaced.len() > REPLACED {
                past.replaced.pop_front();
            }
        }
        past.epoch = hello.epoch;
        past.shards.clone_from(&shards);
        if !same_process {
            self.changes.push_back(Change::Up { name: name.clone(), role: hello.role(), restart });
        }
        self.joins += 1;
        let accept = wire::Accept {
            coordinator_epoch: self.terms.coordinator_epoch,
            heartbeat_ms: millis(self.terms.heartbeat),
            lease_ms: millis(self.terms.lease),
            shards: shards.iter().filter_map(|id| self.terms.plan.shards.get(*id as usize)).map(routes::shard_to_wire).collect(),
        };
        let member = Member { hello, session, shards, report, heard: now, attached, order: self.joins };
        self.members.insert(name, member);
        self.refresh();
        Ok(accept)
    }

    /// A member's heartbeat. One of a session that is over is ignored.
    pub fn heartbeat(&mut self, now: Duration, session: SessionId, report: wire::Heartbeat) {
        let Some(member) = self.members.values_mut().find(|member| member.session == session) else { return };
        member.heard = now;
        let before = member.serving();
        member.report = Some(report);
        self.serving_changed(session, before);
        self.refresh();
    }

    /// The attn.v1 stream of an attention worker has begun.
    ///
    /// # Errors
    /// One line, if no live attention worker has that name and epoch.
    pub fn attach(&mut self, name: &str, epoch: u64) -> Result<wire::Limits, String> {
        let member =
            self.members.get_mut(name).filter(|member| member.hello.epoch == epoch && member.hello.role() == wire::Role::Attn).ok_or_else(
                || format!("attach: no live attention worker is called {name} with epoch {epoch:#x}; join over control.v1 first"),
            )?;
        let before = member.serving();
        member.attached = true;
        let (session, limits) = (member.session, member.hello.limits.unwrap_or_default());
        self.serving_changed(session, before);
        Ok(limits)
    }

    /// The attn.v1 stream of an attention worker has ended.
    pub fn detach(&mut self, name: &str, epoch: u64) {
        let Some(member) = self.members.get_mut(name).filter(|member| member.hello.epoch == epoch) else { return };
        let (session, before) = (member.session, member.serving());
        member.attached = false;
        self.serving_changed(session, before);
    }

    /// A session's stream has ended, with a Goodbye or without.
    pub fn leave(&mut self, session: SessionId, why: &str) {
        let name = self.members.iter().find(|(_, member)| member.session == session).map(|(name, _)| name.clone());
        if let Some(member) = name.and_then(|name| self.members.remove(&name)) {
            self.gone(member, why, false);
            self.refresh();
        }
    }

    /// Lets time pass: members whose lease is over are dead. If this process itself was stopped for a while, nobody could be heard, so that
    /// time does not count against anybody.
    pub fn tick(&mut self, now: Duration) {
        let since = now.saturating_sub(self.ticked);
        if since > self.terms.lease / 2 {
            for member in self.members.values_mut() {
                member.heard = (member.heard + since).min(now);
            }
        }
        self.ticked = now;
        let dead: Vec<String> = self
            .members
            .iter()
            .filter(|(_, member)| now.saturating_sub(member.heard) > self.terms.lease)
            .map(|(name, _)| name.clone())
            .collect();
        for member in dead.iter().filter_map(|name| self.members.remove(name)).collect::<Vec<_>>() {
            self.gone(member, &format!("no heartbeat for {:?}", self.terms.lease), true);
        }
        if !dead.is_empty() {
            self.refresh();
        }
    }

    fn gone(&mut self, member: Member, why: &str, close: bool) {
        if close {
            self.changes.push_back(Change::Close { session: member.session, why: why.to_owned() });
        }
        let role = member.hello.role();
        self.changes.push_back(Change::Down { name: member.hello.name, role, epoch: member.hello.epoch, why: why.to_owned() });
    }

    fn serving_changed(&mut self, session: SessionId, before: bool) {
        let Some(member) = self.members.values().find(|member| member.session == session) else { return };
        if member.serving() != before {
            self.changes.push_back(Change::Serving { name: member.hello.name.clone(), epoch: member.hello.epoch, ready: !before });
        }
    }

    /// Makes a new route table if it would say something new.
    fn refresh(&mut self) {
        let routes = routes::build(&self.terms.plan, &self.members);
        if routes != self.routes.routes {
            self.routes = wire::RouteTable { version: self.routes.version + 1, routes };
            self.changes.push_back(Change::Routes);
        }
    }
}

impl Member {
    /// What it says it is doing.
    pub fn state(&self) -> wire::WorkerState {
        self.report.as_ref().map_or(wire::WorkerState::Loading, wire::Heartbeat::state)
    }

    /// Attention worker: takes new requests.
    fn serving(&self) -> bool {
        self.attached && self.state() == wire::WorkerState::Ready && self.hello.role() == wire::Role::Attn
    }

    /// Whether the weights of a shard that it has to hold are loaded.
    fn holds(&self, shard: u32) -> bool {
        match self.hello.role() {
            wire::Role::Attn => self.state() == wire::WorkerState::Ready,
            _ => self.report.as_ref().is_some_and(|report| report.shards_ready.contains(&shard)),
        }
    }
}

fn millis(duration: Duration) -> u32 {
    u32::try_from(duration.as_millis()).unwrap_or(u32::MAX)
}
