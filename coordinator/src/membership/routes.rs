//! The route table: shard → holders, made anew from the members and compared with the last one.

use std::collections::BTreeMap;

use tandem_model::{Shard, ShardPlan};
use tandem_proto::control::v1 as wire;

use super::Member;

/// One route per shard, ascending. Holders in order of preference: the attention worker itself, then those that are ready and stay, then
/// by order of joining, so that a route changes as little as can be.
pub(super) fn build(plan: &ShardPlan, members: &BTreeMap<String, Member>) -> Vec<wire::Route> {
    plan.shards
        .iter()
        .map(|shard| {
            let mut holders: Vec<&Member> = members.values().filter(|member| member.shards.contains(&shard.id)).collect();
            holders.sort_by_key(|member| (!local(member), !member.holds(shard.id), draining(member), member.order));
            wire::Route { shard: Some(shard_to_wire(shard)), holders: holders.iter().map(|member| holder(member, shard.id)).collect() }
        })
        .collect()
}

fn local(member: &Member) -> bool {
    member.hello.role() == wire::Role::Attn
}

fn draining(member: &Member) -> bool {
    member.state() == wire::WorkerState::Draining
}

fn holder(member: &Member, shard: u32) -> wire::Holder {
    wire::Holder {
        worker: member.hello.name.clone(),
        epoch: member.hello.epoch,
        arithmetic: member.hello.arithmetic.clone(),
        host: member.hello.host.clone(),
        addresses: member.hello.addresses.clone(),
        ready: member.holds(shard),
        local: local(member),
    }
}

pub(super) fn shard_to_wire(shard: &Shard) -> wire::Shard {
    let range = |range: &std::ops::Range<u32>| wire::Range { start: range.start, end: range.end };
    wire::Shard {
        id: shard.id,
        layers: shard.layers.iter().map(range).collect(),
        experts: Some(range(&shard.experts)),
        ffn: Some(range(&shard.ffn)),
    }
}

/// Backward or missing ranges come out empty, which no plan contains.
pub(crate) fn shard_from_wire(shard: &wire::Shard) -> Shard {
    let range = |range: &wire::Range| range.start..range.end.max(range.start);
    Shard {
        id: shard.id,
        layers: shard.layers.iter().map(range).collect(),
        experts: shard.experts.as_ref().map(range).unwrap_or_default(),
        ffn: shard.ffn.as_ref().map(range).unwrap_or_default(),
    }
}
