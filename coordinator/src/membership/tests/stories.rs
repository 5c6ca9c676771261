//! The interpreter of `testdata/*.txt`. Commands: `join experts-0 epoch=1 session=1 [shard=layers=..]`, `beat session=1 state=ready|loading|draining
//! [shards=0,1] [loaded=5 total=10]`, `attach attn-0 epoch=1`, `detach attn-0 epoch=1`, `leave session=1`, `at 1500` (milliseconds), `tick`,
//! `routes`, `ready?`. Output: accepts, refusals and changes, one a line.

use std::fmt::Write as _;

use super::*;
use crate::datadriven::{number, run, value};

struct Story {
    membership: Membership,
    now: Duration,
}

#[test]
fn stories() {
    run("src/membership/testdata", || {
        let mut story = Story { membership: Membership::new(terms()), now: Duration::ZERO };
        move |line: &str| story.command(line)
    });
}

impl Story {
    fn command(&mut self, line: &str) -> String {
        let mut out = String::new();
        let word = |n: usize| line.split_whitespace().nth(n).unwrap_or_default();
        let session = SessionId(number(line, "session", 0));
        let epoch = number(line, "epoch", 1);
        match word(0) {
            "join" => {
                let mut hello = hello(word(1), epoch);
                if let Some(text) = value(line, "shard") {
                    hello.requested_shards = vec![routes::shard_to_wire(&text.parse().expect("a shard in the story"))];
                }
                match self.membership.join(self.now, session, hello) {
                    Ok(accept) => {
                        writeln!(out, "accepted with shards {:?}", accept.shards.iter().map(|shard| shard.id).collect::<Vec<_>>())
                    }
                    Err(refuse) => {
                        writeln!(out, "refused: {}: needed {}, got {}; {}", refuse.field, refuse.needed, refuse.got, refuse.hint)
                    }
                }
                .expect("string");
            }
            "beat" => {
                let state = match value(line, "state") {
                    Some("loading") => wire::WorkerState::Loading,
                    Some("draining") => wire::WorkerState::Draining,
                    _ => wire::WorkerState::Ready,
                };
                let shards = value(line, "shards").map_or(vec![], |list| list.split(',').map(|id| id.parse().expect("an id")).collect());
                let mut beat = beat(state, shards);
                (beat.loaded_bytes, beat.total_bytes) = (number(line, "loaded", 0), number(line, "total", 0));
                self.membership.heartbeat(self.now, session, beat);
            }
            "attach" => {
                if let Err(why) = self.membership.attach(word(1), epoch) {
                    writeln!(out, "{why}").expect("string");
                }
            }
            "detach" => self.membership.detach(word(1), epoch),
            "leave" => self.membership.leave(session, "the stream ended"),
            "at" => self.now = Duration::from_millis(word(1).parse().expect("milliseconds")),
            "tick" => self.membership.tick(self.now),
            "routes" => out.push_str(&show(self.membership.routes())),
            "ready?" => {
                let reasons = self.membership.reasons(self.now, Strictness::Fresh);
                writeln!(out, "{}", if reasons.is_empty() { "ready".to_owned() } else { reasons.join("\n") }).expect("string");
            }
            other => panic!("unknown command {other}"),
        }
        let version = self.membership.routes().version;
        for change in self.membership.take_changes() {
            let text = match change {
                Change::Up { name, role, restart } => {
                    format!("up {name} {}{}", role.as_str_name(), if restart { " (restart)" } else { "" })
                }
                Change::Down { name, epoch, why, .. } => format!("down {name} epoch {epoch}: {why}"),
                Change::Close { session, why } => format!("close session {}: {why}", session.0),
                Change::Serving { name, ready, .. } => format!("{name} {}", if ready { "serves" } else { "does not serve" }),
                Change::Routes => format!("routes version {version}"),
            };
            writeln!(out, "{text}").expect("string");
        }
        out
    }
}

fn show(table: &wire::RouteTable) -> String {
    let mut out = format!("version {}\n", table.version);
    for route in &table.routes {
        let holders: Vec<String> = route
            .holders
            .iter()
            .map(|h| format!("{}@{}{}{}", h.worker, h.epoch, if h.ready { " ready" } else { "" }, if h.local { " local" } else { "" }))
            .collect();
        let shard = route.shard.as_ref().map_or(0, |shard| shard.id);
        writeln!(out, "shard {shard}: {}", if holders.is_empty() { "nobody".to_owned() } else { holders.join(", ") }).expect("string");
    }
    out
}
