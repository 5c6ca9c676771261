//! What an attention worker needs of its device's memory, known before anything is allocated.
//!
//! Neighbours: `buffers.rs` and the backend's pools have the sizes, `model.rs` makes them; `tandem plan` and `tandem up` ask here.

use tandem_kernels::{DeviceKind, cpu::LatentType, scratch_bytes, state_bytes};
use tandem_model::{Checkpoint, Geometry, Shard, budget::Needs};
use tandem_worker_experts::{
    lending::region_bytes,
    memory::{self, weigh},
};

use crate::{
    buffers::{self, BufferSizes},
    cache::CacheOptions,
    dims::Dims,
    engine::parking::{ParkingOptions, Preemption, copy_bytes},
    micro_batch::capacities,
    model::{RunnerLimits, buffer_sizes},
};

/// Everything but weights: pools, buffers and scratch. `partials`: the largest number of local shards of one layer; `threads`: of the
/// CPU backend. `latents`: what the latent cache stores. `kind`: of the device.
pub fn pools(g: &Geometry, limits: RunnerLimits, latents: LatentType, partials: usize, threads: usize, kind: DeviceKind) -> Needs {
    let d = Dims::new(g);
    let spec = d.state_spec(limits.max_batch, limits.kv_tokens);
    let state = state_bytes(&spec, latents);
    let sizes = buffer_sizes(&d, limits, partials);
    let micro = capacities(limits.max_rows, limits.overlap_rows);
    let workspace = micro.into_iter().map(|rows| buffers::bytes(&d, BufferSizes { rows, ..sizes })).fold(0, u64::saturating_add);
    let experts = if partials > 0 { memory::scratch(g, limits.max_rows, kind) } else { 0 };
    let scratch = scratch_bytes(limits.max_rows, limits.max_seq_len, threads).saturating_add(experts);
    Needs { kv: state.pages, state: state.slots, workspace: workspace.saturating_add(scratch), ..Needs::default() }
}

/// Memory that a worker on a kind of device lends to expert workers of its machine.
pub fn lent(g: &Geometry, limits: RunnerLimits, kind: DeviceKind) -> u64 {
    // On a CPU nothing is lent unless somebody asks.
    if kind == DeviceKind::Cuda { region_bytes(g.hidden, limits.max_rows) } else { 0 }
}

/// The most host memory that remembered prefixes take: their budget, or as many points as pages can hold.
pub fn prefixes(g: &Geometry, limits: RunnerLimits, latents: LatentType, options: Option<CacheOptions>) -> u64 {
    let point = state_bytes(&Dims::new(g).state_spec(1, 0), latents).slots;
    options.map_or(0, |o| o.bytes.min((limits.kv_tokens.div_ceil(o.spacing.max(1)) as u64).saturating_mul(point)))
}

/// The most host memory that copies of sequences that made room take: their budget, or as much as all but one of the longest sequences
/// have. None where pages never run out: nobody has to make room.
pub fn parked(g: &Geometry, limits: RunnerLimits, latents: LatentType, options: ParkingOptions) -> u64 {
    let d = Dims::new(g);
    let longest = d.state_spec(1, limits.max_seq_len);
    let pages = d.state_spec(limits.max_batch, limits.kv_tokens).pages;
    if options.preemption == Preemption::Recompute || longest.pages.saturating_mul(limits.max_batch) <= pages {
        return 0;
    }
    let others = limits.max_batch.saturating_sub(1) as u64;
    options.bytes.min(copy_bytes(&longest, longest.pages, latents).saturating_mul(others))
}

/// All of it, with the trunk's weights and those of the shards that the worker holds itself, as they are on a kind of device, and host memory
/// (`host`: see [`prefixes`] and [`parked`]).
pub fn needs(
    checkpoint: &Checkpoint,
    limits: RunnerLimits,
    latents: LatentType,
    local: &[Shard],
    threads: usize,
    kind: DeviceKind,
    host: u64,
) -> Needs {
    let local_bytes: u64 = local.iter().map(|shard| checkpoint.shard_bytes_as(shard, weigh(kind))).sum();
    let g = checkpoint.geometry();
    let layers = g.layers as u32;
    let partials = (0..layers).map(|layer| local.iter().filter(|s| s.has_layer(layer)).count()).max().unwrap_or(0);
    let pools = pools(g, limits, latents, partials, threads, kind);
    Needs {
        weights: checkpoint.trunk_bytes_as(weigh(kind)).saturating_sub(checkpoint.narrowed_bytes()) + local_bytes,
        unpacked: checkpoint.unpacked_bytes() + checkpoint.narrowed_bytes(),
        host,
        workspace: pools.workspace.saturating_add(lent(g, limits, kind)),
        ..pools
    }
}
