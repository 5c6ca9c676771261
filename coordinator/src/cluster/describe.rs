//! Members and routes as `/v1/stats` shows them.

use std::time::Duration;

use tandem_proto::control::v1 as wire;

use super::role_label;
use crate::membership::{Member, shard_from_wire};
use crate::stats;

/// A member at `now`.
pub(super) fn worker(member: &Member, now: Duration, busy: Option<f64>) -> stats::Worker {
    let hello = &member.hello;
    let report = member.report.clone().unwrap_or_default();
    stats::Worker {
        name: hello.name.clone(),
        role: role_label(hello.role()),
        state: state_label(member.state()),
        phase: report.phase,
        loaded_bytes: report.loaded_bytes,
        total_bytes: report.total_bytes,
        device: hello.device.clone(),
        arithmetic: hello.arithmetic.clone(),
        pid: hello.pid,
        version: hello.version.clone(),
        addresses: hello.addresses.iter().map(|address| format!("{}://{}", address.link, address.addr)).collect(),
        heartbeat_age_seconds: now.saturating_sub(member.heard).as_secs_f64(),
        busy,
        running: report.running,
        waiting: report.waiting,
        kv_tokens_used: report.kv_tokens_used,
        kv_tokens_total: report.kv_tokens_total,
        rows: report.rows,
        shards: member.shards.clone(),
        links: report.links.into_iter().map(|wire::LinkInUse { worker, link, addr }| stats::Link { worker, link, addr }).collect(),
        layer_waits: report.layer_waits.iter().map(layer_wait).collect(),
    }
}

/// A route.
pub(super) fn shard(route: &wire::Route) -> stats::Shard {
    let shard = route.shard.as_ref().map(shard_from_wire);
    stats::Shard {
        id: route.shard.as_ref().map_or(0, |shard| shard.id),
        what: shard.map(|shard| shard.to_string()).unwrap_or_default(),
        holders: route.holders.iter().map(holder).collect(),
    }
}

fn holder(holder: &wire::Holder) -> stats::Holder {
    stats::Holder { worker: holder.worker.clone(), ready: holder.ready, local: holder.local }
}

fn layer_wait(wait: &wire::LayerWait) -> stats::LayerWait {
    stats::LayerWait { layer: wait.layer, milliseconds: wait.seconds * 1e3 }
}

fn state_label(state: wire::WorkerState) -> &'static str {
    match state {
        wire::WorkerState::Loading => "loading",
        wire::WorkerState::Ready => "ready",
        wire::WorkerState::Draining => "draining",
        wire::WorkerState::Unspecified => "unknown",
    }
}
