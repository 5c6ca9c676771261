//! Which shards a joining worker gets.
//!
//! An attention worker hosts the plan's local shards. An expert worker gets, in this order: what it asks for; what its name held before;
//! the part of the plan that its name's number points at, if nobody holds that; the part with the fewest holders (a replica, once every
//! part has one).

use tandem_model::Shard;
use tandem_proto::control::v1 as wire;

use super::Membership;
use super::hello::refuse;
use super::routes::shard_from_wire;

pub(super) fn assign(membership: &Membership, hello: &wire::Hello) -> Result<Vec<u32>, wire::Refuse> {
    let plan = &membership.terms.plan;
    if hello.role() == wire::Role::Attn {
        return Ok(plan.local.clone());
    }
    if plan.workers.is_empty() {
        let hint = "end this worker, or start `tandem serve` with fewer --resident-layers";
        return Err(refuse("role", "no expert worker: the attention worker holds every expert", "experts", hint));
    }
    if !hello.requested_shards.is_empty() {
        return requested(membership, hello);
    }
    if let Some(past) = membership.past.get(&hello.name).filter(|past| !past.shards.is_empty()) {
        return Ok(past.shards.clone());
    }
    let holders: Vec<usize> = plan.workers.iter().map(|part| holders(membership, &hello.name, part)).collect();
    let own = number(&hello.name).filter(|part| holders.get(*part) == Some(&0));
    let part = own.or_else(|| (0..holders.len()).min_by_key(|part| holders[*part])).unwrap_or(0);
    Ok(plan.workers[part].clone())
}

/// How many members other than `name` hold the whole of a part.
fn holders(membership: &Membership, name: &str, part: &[u32]) -> usize {
    let others = || membership.members.values().filter(|member| member.hello.name != name);
    let each = part.iter().map(|shard| others().filter(|member| member.shards.contains(shard)).count());
    each.min().unwrap_or(0)
}

/// The number at the end of a name such as `experts-1`.
fn number(name: &str) -> Option<usize> {
    let digits = name.len() - name.trim_end_matches(|c: char| c.is_ascii_digit()).len();
    name[name.len() - digits..].parse().ok()
}

/// The plan's shards that make up what the worker asks for, cell by cell.
fn requested(membership: &Membership, hello: &wire::Hello) -> Result<Vec<u32>, wire::Refuse> {
    let plan = &membership.terms.plan;
    let mut ids = Vec::new();
    for asked in hello.requested_shards.iter().map(shard_from_wire) {
        let inside: Vec<&Shard> = plan.shards.iter().filter(|shard| contains(&asked, shard)).collect();
        // The plan covers each cell once, so equal volumes mean equal sets of cells.
        if inside.iter().map(|shard| volume(shard)).sum::<u64>() != volume(&asked) || volume(&asked) == 0 {
            let needed = plan.shards.iter().map(|shard| format!("`{shard}`")).collect::<Vec<_>>().join(" or ");
            let hint =
                "ask for one of these or a union of them, or change --split, --expert-workers or --resident-layers of `tandem serve`";
            return Err(refuse("requested_shards", needed, format!("`{asked}`"), hint));
        }
        ids.extend(inside.iter().map(|shard| shard.id).filter(|id| !plan.local.contains(id)));
    }
    ids.sort_unstable();
    ids.dedup();
    if ids.is_empty() {
        let hint = "ask for a shard that is not resident on the attention worker";
        return Err(refuse("requested_shards", "a shard that an expert worker has to hold", "only resident shards", hint));
    }
    Ok(ids)
}

fn contains(outer: &Shard, inner: &Shard) -> bool {
    let within = |inner: &std::ops::Range<u32>, outer: &std::ops::Range<u32>| outer.start <= inner.start && inner.end <= outer.end;
    within(&inner.experts, &outer.experts) && within(&inner.ffn, &outer.ffn) && inner.layer_ids().all(|layer| outer.has_layer(layer))
}

/// Cells: layers × experts × indices.
fn volume(shard: &Shard) -> u64 {
    let layers: u64 = shard.layers.iter().map(|range| range.len() as u64).sum();
    layers * shard.experts.len() as u64 * shard.ffn.len() as u64
}
