//! Whether a token can be made now, judged from the members: an attention worker that takes requests, and a loaded holder of every shard,
//! all heard from lately.

use std::time::Duration;

use tandem_proto::control::v1 as wire;

use super::{Member, Membership};

/// A heartbeat older than this makes `/readyz` say no, well before the lease is over.
const FRESH: Duration = Duration::from_secs(1);

/// How much silence is borne.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strictness {
    /// `/readyz`: every needed worker was heard a moment ago.
    Fresh,
    /// Admission: no needed worker's lease is over. On a busy machine a heartbeat may be late, which is no reason to turn a client away.
    Leased,
}

impl Membership {
    /// Every reason why no token can be made now; none = ready.
    pub fn reasons(&self, now: Duration, strictness: Strictness) -> Vec<String> {
        let mut reasons = Vec::new();
        let borne = match strictness {
            Strictness::Fresh => FRESH.max(self.terms.heartbeat * 3),
            Strictness::Leased => self.terms.lease,
        };
        let silent = |member: &Member| now.saturating_sub(member.heard) > borne;
        let attn: Vec<&Member> = self.members.values().filter(|member| member.hello.role() == wire::Role::Attn).collect();
        if attn.is_empty() {
            reasons.push("no attention worker has joined".into());
        } else if !attn.iter().any(|member| member.serving() && !silent(member)) {
            reasons.extend(attn.iter().map(|member| describe(member, now, silent(member))));
        }
        for shard in &self.terms.plan.shards {
            if self.terms.plan.local.contains(&shard.id) {
                continue;
            }
            let holders: Vec<&Member> = self.members.values().filter(|member| member.shards.contains(&shard.id)).collect();
            let good = |member: &&Member| member.holds(shard.id) && !silent(member) && member.state() != wire::WorkerState::Draining;
            if holders.iter().any(good) {
                continue;
            }
            let why = match &holders[..] {
                [] => "no worker holds it".to_owned(),
                some => some.iter().map(|member| describe(member, now, silent(member))).collect::<Vec<_>>().join(", "),
            };
            reasons.push(format!("shard {} ({shard}): {why}", shard.id));
        }
        reasons
    }
}

fn describe(member: &Member, now: Duration, silent: bool) -> String {
    let name = &member.hello.name;
    if silent {
        return format!("{name} was last heard {:.1} s ago", now.saturating_sub(member.heard).as_secs_f64());
    }
    match (member.state(), &member.report) {
        (wire::WorkerState::Draining, _) => format!("{name} is draining"),
        (wire::WorkerState::Ready, _) => format!("{name} has not attached"),
        (_, Some(report)) if report.total_bytes > 0 => {
            let percent = 100 * report.loaded_bytes.min(report.total_bytes) / report.total_bytes;
            format!("{name} is loading{} ({percent} %)", phase(&report.phase))
        }
        (_, Some(report)) => format!("{name} is loading{}", phase(&report.phase)),
        (_, None) => format!("{name} is starting"),
    }
}

fn phase(phase: &str) -> String {
    if phase.is_empty() { String::new() } else { format!(": {phase}") }
}
