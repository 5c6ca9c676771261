//! Stories (`testdata/`), one refusal per field, and a property test over random lives of workers.

mod lives;
mod refusals;
mod stories;

use super::*;
use tandem_model::Shard;

/// Two expert workers by layers, and one shard on the attention worker.
fn terms() -> Terms {
    let shard = |id: u32, layers: std::ops::Range<u32>| Shard { id, layers: vec![layers], experts: 0..8, ffn: 0..16 };
    Terms {
        coordinator_epoch: 77,
        fingerprint: "f00d".into(),
        precision: "f32".into(),
        plan: ShardPlan { shards: vec![shard(0, 3..6), shard(1, 6..9), shard(2, 9..11)], local: vec![2], workers: vec![vec![0], vec![1]] },
        heartbeat: Duration::from_millis(250),
        lease: Duration::from_secs(2),
    }
}

fn hello(name: &str, epoch: u64) -> wire::Hello {
    let attn = name.starts_with("attn");
    wire::Hello {
        protocol_version: PROTOCOL_VERSION,
        role: if attn { wire::Role::Attn } else { wire::Role::Experts }.into(),
        name: name.into(),
        epoch,
        fingerprint: "f00d".into(),
        precision: "f32".into(),
        arithmetic: "cpu".into(),
        limits: Some(wire::Limits { max_batch: 4, max_seq_len: 100, kv_tokens: 1000, max_rows: 64 }),
        addresses: if attn { vec![] } else { vec![wire::Address { link: "tcp".into(), addr: "127.0.0.1:4000".into() }] },
        ..wire::Hello::default()
    }
}

fn beat(state: wire::WorkerState, shards_ready: Vec<u32>) -> wire::Heartbeat {
    wire::Heartbeat { state: state.into(), shards_ready, ..wire::Heartbeat::default() }
}
