//! One refusal per field of the Hello: the field is named, with what was needed, what came, and what would work.

use super::*;

fn refused(change: impl FnOnce(&mut wire::Hello), name: &str) -> wire::Refuse {
    let mut hello = hello(name, 5);
    change(&mut hello);
    let mut membership = Membership::new(terms());
    let refuse = membership.join(Duration::ZERO, SessionId(1), hello).expect_err("refused");
    assert!(membership.members().is_empty() && membership.take_changes().next().is_none(), "a refusal changes nothing");
    assert!(!refuse.needed.is_empty() && !refuse.hint.is_empty(), "{refuse:?}");
    refuse
}

#[test]
fn each_field_is_refused_by_name() {
    let field = |change: fn(&mut wire::Hello), name: &str| {
        let refuse = refused(change, name);
        (refuse.field, refuse.got)
    };
    let pair = |field: &str, got: &str| (field.to_owned(), got.to_owned());
    assert_eq!(field(|h| h.protocol_version = 9, "attn-0"), pair("protocol_version", "9"));
    assert_eq!(field(|h| h.name.clear(), "attn-0"), pair("name", ""));
    assert_eq!(field(|h| h.name = "a b".into(), "attn-0"), pair("name", "a b"));
    assert_eq!(field(|h| h.epoch = 0, "attn-0"), pair("epoch", "0"));
    assert_eq!(field(|h| h.fingerprint = "beef".into(), "experts-0"), pair("fingerprint", "beef"));
    assert_eq!(field(|h| h.precision = "bf16".into(), "experts-0"), pair("precision", "bf16"));
    assert_eq!(field(|h| h.role = 7, "experts-0"), pair("role", "7"));
    assert_eq!(field(|h| h.limits = None, "attn-0"), pair("limits.max_batch", "0"));
    assert_eq!(field(|h| h.limits.as_mut().expect("limits").kv_tokens = 0, "attn-0"), pair("limits.kv_tokens", "0"));
    assert_eq!(field(|h| h.addresses.clear(), "experts-0"), pair("addresses", "none"));
    assert_eq!(field(|h| h.addresses[0].addr = "nohost".into(), "experts-0"), pair("addresses", "tcp nohost"));
    assert_eq!(field(|h| h.addresses[0].addr = "h:0".into(), "experts-0"), pair("addresses", "tcp h:0"));
    let wrong_local = refused(|h| h.local_shards = vec![routes::shard_to_wire(&terms().plan.shards[0])], "attn-0");
    assert_eq!(wrong_local.field, "local_shards");
    assert_eq!(wrong_local.needed, "layers=9-10,experts=0-7,ffn=0-15");
}

#[test]
fn a_shard_that_cuts_across_the_plan_is_refused_with_what_would_fit() {
    let odd: Shard = "layers=3-7,experts=0-7,ffn=0-15".parse().expect("a shard");
    let refuse = refused(|h| h.requested_shards = vec![routes::shard_to_wire(&odd)], "experts-0");
    assert_eq!((refuse.field.as_str(), refuse.got.as_str()), ("requested_shards", "`layers=3-7,experts=0-7,ffn=0-15`"));
    assert!(refuse.needed.contains("`layers=3-5,experts=0-7,ffn=0-15`"), "{refuse:?}");
    let resident = terms().plan.shards[2].clone();
    assert_eq!(refused(|h| h.requested_shards = vec![routes::shard_to_wire(&resident)], "experts-0").got, "only resident shards");
    assert_eq!(refused(|h| h.requested_shards = vec![wire::Shard::default()], "experts-0").field, "requested_shards");
}

#[test]
fn no_expert_worker_where_everything_is_resident() {
    let mut terms = terms();
    terms.plan = ShardPlan { local: vec![0, 1, 2], workers: vec![], ..terms.plan };
    let mut membership = Membership::new(terms);
    let refuse = membership.join(Duration::ZERO, SessionId(1), hello("experts-0", 1)).expect_err("refused");
    assert_eq!(refuse.field, "role");
    let accept = membership.join(Duration::ZERO, SessionId(2), hello("attn-0", 1)).expect("accepted");
    assert_eq!(accept.shards.len(), 3);
}

#[test]
fn a_live_name_keeps_its_role() {
    let mut membership = Membership::new(terms());
    membership.join(Duration::ZERO, SessionId(1), hello("experts-0", 1)).expect("accepted");
    let attn = wire::Hello { name: "experts-0".into(), ..hello("attn-0", 2) };
    let refuse = membership.join(Duration::ZERO, SessionId(2), attn).expect_err("refused");
    assert_eq!((refuse.field.as_str(), refuse.got.as_str()), ("role", "ROLE_ATTN"));
}
