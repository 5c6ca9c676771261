//! Property: through any sequence of joins, heartbeats, deaths and pauses, the route table names live members only, its version rises exactly
//! when it changes, no two members share a session, and readiness means a loaded holder of every shard.

use proptest::prelude::*;

use super::*;

#[derive(Clone, Debug)]
enum Op {
    Join { name: usize, restart: bool },
    Beat { name: usize, ready: bool },
    Leave(usize),
    Attach(usize),
    Pass(u64),
}

const NAMES: [&str; 5] = ["attn-0", "attn-1", "experts-0", "experts-1", "experts-2"];

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        3 => (0..NAMES.len(), any::<bool>()).prop_map(|(name, restart)| Op::Join { name, restart }),
        6 => (0..NAMES.len(), prop::bool::weighted(0.8)).prop_map(|(name, ready)| Op::Beat { name, ready }),
        1 => (0..NAMES.len()).prop_map(Op::Leave),
        2 => (0usize..2).prop_map(Op::Attach),
        4 => (0u64..700).prop_map(Op::Pass),
    ]
}

proptest! {
    #[test]
    fn routes_and_readiness_follow_the_members(ops in prop::collection::vec(op(), 1..80)) {
        let mut membership = Membership::new(terms());
        let mut now = Duration::ZERO;
        let mut sessions = 0;
        let mut epochs = [1u64; NAMES.len()];
        let mut seen = membership.routes().clone();
        for op in ops {
            match op {
                Op::Join { name, restart } => {
                    sessions += 1;
                    epochs[name] += u64::from(restart);
                    let accept = membership.join(now, SessionId(sessions), hello(NAMES[name], epochs[name]));
                    prop_assert!(accept.is_ok(), "{:?}", accept);
                }
                Op::Beat { name, ready } => {
                    if let Some(member) = membership.members().get(NAMES[name]) {
                        let (session, shards) = (member.session, member.shards.clone());
                        let report = if ready { beat(wire::WorkerState::Ready, shards) } else { beat(wire::WorkerState::Loading, vec![]) };
                        membership.heartbeat(now, session, report);
                    }
                }
                Op::Leave(name) => {
                    if let Some(member) = membership.members().get(NAMES[name]) {
                        let session = member.session;
                        membership.leave(session, "gone");
                    }
                }
                Op::Attach(name) => {
                    let live = membership.members().contains_key(NAMES[name]);
                    prop_assert_eq!(membership.attach(NAMES[name], epochs[name]).is_ok(), live);
                }
                Op::Pass(milliseconds) => {
                    now += Duration::from_millis(milliseconds);
                    membership.tick(now);
                }
            }
            let routes = membership.routes();
            let changed = routes.routes != seen.routes;
            prop_assert_eq!(routes.version > seen.version, changed);
            seen = routes.clone();
            for route in &routes.routes {
                let id = route.shard.as_ref().expect("a shard").id;
                for holder in &route.holders {
                    let member = membership.members().get(&holder.worker);
                    prop_assert!(member.is_some_and(|m| m.hello.epoch == holder.epoch && m.shards.contains(&id)));
                }
                let holders = membership.members().values().filter(|member| member.shards.contains(&id)).count();
                prop_assert_eq!(route.holders.len(), holders);
            }
            let live: std::collections::BTreeSet<_> = membership.members().values().map(|member| member.session).collect();
            prop_assert_eq!(live.len(), membership.members().len());
            if membership.reasons(now, Strictness::Leased).is_empty() {
                prop_assert!(routes.routes.iter().all(|route| route.holders.iter().any(|holder| holder.ready)));
                prop_assert!(membership.members().values().any(Member::serving));
            }
        }
        // No two parts are held twice while another part has nobody, unless a name came back to its own.
        let fresh = membership.join(now, SessionId(sessions + 1), hello("late", 1)).expect("accepted");
        prop_assert_eq!(fresh.shards.len(), 1);
    }
}
