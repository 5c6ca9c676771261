//! Expected milliseconds per token, by part: bytes that a decode step of one sequence reads, divided by the bandwidth of the device that
//! reads them, and one hop for each layer whose experts lie elsewhere. It is a bound: kernels that are limited by anything but memory are
//! slower.
//!
//! Attention and experts of a layer work in turn, but for the shared and resident experts, which run while the hop is under way. Routing is
//! taken as uniform; where workers hold different experts, the busiest one counts (a mean over draws).

use std::collections::BTreeMap;

use serde::Serialize;
use tandem_model::{Shard, census::Part, synthetic::hash::Stream};

use super::{
    layout::{Device, Layout},
    sizes::Sizes,
};

/// Draws of experts per layer.
const DRAWS: u64 = 32;

/// One part of a token's time.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Row {
    /// The part.
    pub part: &'static str,
    /// The device that reads it; several, comma-separated, where workers share it.
    pub device: String,
    /// Bytes read for a token, over all devices.
    pub bytes: u64,
    /// Milliseconds; of parts that overlap, as if they did not.
    pub ms: f64,
}

/// What a token takes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Timing {
    /// Tokens that the sequence has already.
    pub context: usize,
    /// By part.
    pub rows: Vec<Row>,
    /// Layers with a hop.
    pub hops: usize,
    /// Milliseconds of all hops.
    pub hop_ms: f64,
    /// Milliseconds that run beside others.
    pub overlapped_ms: f64,
    /// All in all.
    pub total_ms: f64,
}

/// The time of a token behind `context` others with hops of `hop` seconds; nothing where a device's bandwidth is not known.
pub fn timing(sizes: &Sizes, layout: &Layout, devices: &[Device], context: usize, hop: f64) -> Option<Timing> {
    let of = |device: usize| devices.get(device)?.bandwidth.filter(|b| *b > 0.0);
    let attn = of(layout.ask.attn)?;
    let (g, weights) = (&sizes.geometry, sizes.on(layout.ask.kind(layout.ask.attn)));
    let attn_name = devices.get(layout.ask.attn)?.room.device.clone();
    let mut rows = Vec::new();
    let mut put = |part, bytes: u64| rows.push(Row { part, device: attn_name.clone(), bytes, ms: 1e3 * bytes as f64 / attn });
    for part in [Part::Hyper, Part::Norms, Part::Kda, Part::Mla, Part::Indexer, Part::Dense, Part::Router, Part::Head] {
        // A tied head is the embedding, read whole.
        let bytes = if part == Part::Head && weights.part(part) == 0 { weights.part(Part::Embedding) } else { weights.part(part) };
        put(part.name(), bytes);
    }
    let elem = if layout.ask.precision == tandem_kernels::Precision::F32 { 4 } else { 2 };
    let width = g.kda_heads * g.kda_head_dim;
    // Every layer's matrix is read and written; taps are small beside it.
    put("kda state", 2 * 4 * (g.kda_layers().len() * width * g.kda_head_dim) as u64);
    let selected = context.min(g.index_topk + g.kpool - 1);
    let scanned = if context > selected { context / g.kpool * g.index_dim * 4 } else { 0 };
    put("kv cache", (g.mla_layers().len() * (selected * g.kv_lora * elem + scanned)) as u64);
    let before: f64 = rows.iter().map(|row| row.ms).sum();

    let moe = g.moe_layers();
    let shared_each = weights.part(Part::Shared) as f64 / moe.len().max(1) as f64;
    rows.push(Row {
        part: Part::Shared.name(),
        device: attn_name.clone(),
        bytes: weights.part(Part::Shared),
        ms: 1e3 * weights.part(Part::Shared) as f64 / attn,
    });
    let (mut total, mut routed_ms, mut hops, mut read) = (before, 0.0, 0, BTreeMap::<usize, f64>::new());
    for layer in moe {
        let remote = layout.places[1..].iter().any(|p| p.shards.iter().any(|s| s.has_layer(layer as u32)));
        let hop = if remote { hop } else { 0.0 };
        hops += usize::from(remote);
        let draws = loads(sizes, layout, layer as u32);
        let share = 1.0 / draws.len() as f64;
        for loads in draws {
            let (mut here, mut local, mut elsewhere) = (shared_each, 0.0, 0.0f64);
            for (device, bytes) in loads {
                *read.entry(device).or_default() += share * bytes;
                if device == layout.ask.attn {
                    here += bytes;
                    local = bytes / attn;
                } else {
                    elsewhere = elsewhere.max(bytes / of(device)?);
                }
            }
            routed_ms += 1e3 * share * elsewhere.max(local);
            // Workers on the attention worker's own device share its bandwidth, and their rows make the hop all the same.
            total += 1e3 * share * (here / attn).max(hop + elsewhere.max(local));
        }
    }
    let names: Vec<String> = read.keys().filter_map(|d| Some(devices.get(*d)?.room.device.clone())).collect();
    rows.push(Row { part: Part::Routed.name(), device: names.join(","), bytes: read.values().sum::<f64>() as u64, ms: routed_ms });
    let hop_ms = 1e3 * hop * hops as f64;
    let apart: f64 = rows.iter().map(|row| row.ms).sum::<f64>() + hop_ms;
    Some(Timing { context, rows, hops, hop_ms, overlapped_ms: (apart - total).max(0.0), total_ms: total })
}

/// Bytes of routed experts that each device reads for one token in a layer, in one or several draws of the chosen experts.
fn loads(sizes: &Sizes, layout: &Layout, layer: u32) -> Vec<BTreeMap<usize, f64>> {
    let g = &sizes.geometry;
    let each = |device| sizes.on(layout.ask.kind(device)).layer(layer) as f64 / g.experts.max(1) as f64;
    let holders: Vec<(usize, &Shard)> =
        layout.places.iter().flat_map(|p| p.shards.iter().filter(|s| s.has_layer(layer)).map(|s| (p.device, s))).collect();
    let slice = |s: &Shard| (s.ffn.end - s.ffn.start) as f64 / g.moe_intermediate.max(1) as f64;
    // Where everybody holds all experts, it does not matter which are chosen.
    let draws = if holders.iter().all(|(_, s)| s.experts.len() == g.experts) { 1 } else { DRAWS };
    let draw = |draw: u64| {
        let chosen = chosen(g.experts, g.topk, u64::from(layer) << 8 | draw);
        let mut loads: BTreeMap<usize, f64> = BTreeMap::new();
        for (device, shard) in &holders {
            let count = chosen.iter().filter(|e| shard.experts.contains(e)).count();
            *loads.entry(*device).or_default() += each(*device) * count as f64 * slice(shard);
        }
        loads
    };
    (0..draws).map(draw).collect()
}

/// `count` different experts, uniformly drawn.
fn chosen(experts: usize, count: usize, seed: u64) -> Vec<u32> {
    let stream = Stream::new(seed, "chosen experts");
    let mut chosen = Vec::with_capacity(count);
    let mut i = 0;
    while chosen.len() < count.min(experts) {
        let expert = (stream.bits(i) % experts.max(1) as u64) as u32;
        i += 1;
        if !chosen.contains(&expert) {
            chosen.push(expert);
        }
    }
    chosen
}
