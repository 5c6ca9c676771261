//! A plan in words, for `tandem plan` and for the first lines of `tandem up`; and as JSON.

use std::fmt::Write as _;

use serde::Serialize;
use tandem_kernels::DeviceKind;
use tandem_model::{Shard, budget::Needs};

use super::{
    layout::{Device, Layout, Place},
    sizes::Sizes,
    time::Timing,
};
use crate::bytes::gib;

/// The lines of a plan, without its timing.
pub fn lines(sizes: &Sizes, layout: &Layout, devices: &[Device]) -> String {
    let g = &sizes.geometry;
    let mut out = format!(
        "model     {} ({} GiB; {} layers: {} KDA, {} MLA; {} with {} experts, top {})\n",
        sizes.name,
        gib(sizes.stored.total()),
        g.layers,
        g.kda_layers().len(),
        g.mla_layers().len(),
        g.moe_layers().len(),
        g.experts,
        g.topk
    );
    let name = |device: usize| devices.get(device).map_or("?", |d| d.room.device.as_str());
    for place in &layout.places {
        let weights = place.needs.weights.saturating_add(place.needs.unpacked);
        let _ = writeln!(out, "{:<9} {:>9} GiB on {}: {}", place.name, gib(weights), name(place.device), holds(place));
    }
    let attn = name(layout.ask.attn);
    let needs = layout.places.first().map_or_else(Needs::default, |p| p.needs);
    let limits = &layout.ask.limits;
    let _ =
        writeln!(out, "kv        {:>9} GiB on {attn}: {} tokens, longest sequence {}", gib(needs.kv), limits.kv_tokens, limits.max_seq_len);
    let _ = writeln!(out, "state     {:>9} GiB on {attn}: {} sequences", gib(needs.state), limits.max_batch);
    for (what, bytes, more) in [("prefixes", layout.ask.prefixes(g), ""), ("copies", layout.ask.parked(g), ", of sequences that make room")]
    {
        if bytes > 0 {
            let _ = writeln!(out, "{what:<9} {:>9} GiB of host memory at most{more}", gib(bytes));
        }
    }
    // More than padding: some types became f32.
    let more = sizes.cuda.total().saturating_sub(sizes.stored.total());
    if layout.places.iter().any(|p| layout.ask.kind(p.device) == DeviceKind::Cuda) && more > sizes.stored.total() / 8 {
        let _ = writeln!(
            out,
            "          no GPU kernel reads some of the types: all of the model would take {} GiB more there, as f32",
            gib(more)
        );
    }
    let workspace: u64 = layout.places.iter().map(|p| p.needs.workspace).fold(0, u64::saturating_add);
    let _ = writeln!(out, "workspace {:>9} GiB: steps of up to {} rows", gib(workspace), limits.max_rows);
    for (i, device) in devices.iter().enumerate().filter(|(i, _)| layout.needs_on(*i).next().is_some()) {
        let room = &device.room;
        let _ = writeln!(out, "{:<9} {:>9} GiB of {} GiB ({})", room.device, gib(layout.needed(i)), gib(room.bytes), room.origin);
    }
    out
}

fn holds(place: &Place) -> String {
    let shards = place.shards.iter().map(ToString::to_string).collect::<Vec<_>>().join(" + ");
    match (place.name == "attn", shards.is_empty()) {
        (true, true) => "attention, dense and shared FFN, embedding, head".to_owned(),
        (true, false) => format!("attention, dense and shared FFN, embedding, head; resident experts {shards}"),
        (false, _) => format!("routed experts {shards}"),
    }
}

/// The lines about a token's time.
pub fn timing_lines(timing: &Timing) -> String {
    let mut out =
        format!("token     behind {} others, one sequence; bytes that are read / bandwidth, a bound and no measurement:\n", timing.context);
    for row in timing.rows.iter().filter(|row| row.bytes > 0) {
        let _ = writeln!(out, "  {:<15} {:>8.3} ms  {:>9.4} GB on {}", row.part, row.ms, row.bytes as f64 / 1e9, row.device);
    }
    if timing.hops > 0 {
        let each = 1e3 * timing.hop_ms / timing.hops as f64;
        let _ = writeln!(out, "  {:<15} {:>8.3} ms  {} of {each:.0} us", "hops", timing.hop_ms, timing.hops);
    }
    // Less would print as −0.000.
    if timing.overlapped_ms >= 0.0005 {
        let _ = writeln!(out, "  {:<15} {:>8.3} ms  beside hops and remote experts", "overlapped", -timing.overlapped_ms);
    }
    let _ = writeln!(out, "  {:<15} {:>8.3} ms  {:.1} tokens/s", "total", timing.total_ms, 1e3 / timing.total_ms.max(f64::MIN_POSITIVE));
    out
}

/// A plan for scripts.
#[derive(Serialize)]
pub struct Json<'a> {
    /// Checkpoint.
    pub model: &'a str,
    /// Bytes of its weights.
    pub model_bytes: u64,
    /// Whether it fits.
    pub fits: bool,
    /// Why not: what is needed, what is there, what would work.
    pub refusal: Option<JsonRefusal>,
    /// Devices.
    pub devices: Vec<JsonDevice<'a>>,
    /// Processes.
    pub processes: Vec<JsonPlace<'a>>,
    /// Tokens in the caches.
    pub kv_tokens: usize,
    /// The most that would fit, all else being equal.
    pub most_kv_tokens: Option<usize>,
    /// Expected time of a token.
    pub token: Option<Timing>,
}

/// Why a plan does not fit.
#[derive(Serialize)]
pub struct JsonRefusal {
    /// The device.
    pub device: String,
    /// Bytes needed.
    pub needed: u64,
    /// Bytes there.
    pub available: u64,
    /// What would work.
    pub hint: String,
}

/// A device and what is on it.
#[derive(Serialize)]
pub struct JsonDevice<'a> {
    name: &'a str,
    usable_bytes: u64,
    needed_bytes: u64,
    bandwidth_bytes_per_s: Option<f64>,
}

/// A process and what it holds.
#[derive(Serialize)]
pub struct JsonPlace<'a> {
    name: &'a str,
    device: &'a str,
    weights_bytes: u64,
    unpacked_bytes: u64,
    kv_bytes: u64,
    state_bytes: u64,
    workspace_bytes: u64,
    host_bytes: u64,
    shards: Vec<String>,
}

/// Devices and processes of a layout for scripts.
pub fn json_parts<'a>(layout: &'a Layout, devices: &'a [Device]) -> (Vec<JsonDevice<'a>>, Vec<JsonPlace<'a>>) {
    let device = |(i, d): (usize, &'a Device)| JsonDevice {
        name: &d.room.device,
        usable_bytes: d.room.bytes,
        needed_bytes: layout.needed(i),
        bandwidth_bytes_per_s: d.bandwidth,
    };
    let place = |p: &'a Place| JsonPlace {
        name: &p.name,
        device: devices.get(p.device).map_or("?", |d| &d.room.device),
        weights_bytes: p.needs.weights,
        unpacked_bytes: p.needs.unpacked,
        kv_bytes: p.needs.kv,
        state_bytes: p.needs.state,
        workspace_bytes: p.needs.workspace,
        host_bytes: p.needs.host,
        shards: p.shards.iter().map(Shard::to_string).collect(),
    };
    (devices.iter().enumerate().map(device).collect(), layout.places.iter().map(place).collect())
}
