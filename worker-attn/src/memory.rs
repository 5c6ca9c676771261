//! What an attention worker needs of its device's memory, known before anything is allocated.
//!
//! Neighbours: `buffers.rs` and the backend's pools have the sizes, `model.rs` makes them; `tandem plan` and `tandem up` ask here.

use tandem_kernels::{Precision, scratch_bytes, state_bytes};
use tandem_model::{Checkpoint, Geometry, Shard, budget::Needs};

use crate::{
    buffers,
    cache::CacheOptions,
    dims::Dims,
    model::{RunnerLimits, buffer_sizes},
};

/// Everything but weights: pools, buffers and scratch. `partials`: the largest number of local shards of one layer; `threads`: of the
/// CPU backend.
pub fn pools(g: &Geometry, limits: RunnerLimits, precision: Precision, partials: usize, threads: usize) -> Needs {
    let d = Dims::new(g);
    let spec = d.state_spec(limits.max_batch, limits.kv_tokens);
    let state = state_bytes(&spec, precision);
    let workspace = buffers::bytes(&d, buffer_sizes(&d, limits, partials));
    // Local shards keep the hidden rows of all chosen experts.
    let experts = if partials > 0 { limits.max_rows.saturating_mul(g.topk * g.moe_intermediate) as u64 } else { 0 };
    let scratch = scratch_bytes(limits.max_rows, limits.max_seq_len, threads).saturating_add(experts.saturating_mul(4));
    Needs { kv: state.pages, state: state.slots, workspace: workspace.saturating_add(scratch), ..Needs::default() }
}

/// The most host memory that remembered prefixes take: their budget, or as many points as pages can hold.
pub fn prefixes(g: &Geometry, limits: RunnerLimits, precision: Precision, options: Option<CacheOptions>) -> u64 {
    let point = state_bytes(&Dims::new(g).state_spec(1, 0), precision).slots;
    options.map_or(0, |o| o.bytes.min((limits.kv_tokens.div_ceil(o.spacing.max(1)) as u64).saturating_mul(point)))
}

/// All of it, with the trunk's weights and those of the shards that the worker holds itself.
pub fn needs(checkpoint: &Checkpoint, limits: RunnerLimits, precision: Precision, local: &[Shard], threads: usize) -> Needs {
    let local_bytes: u64 = local.iter().map(|shard| checkpoint.shard_bytes(shard)).sum();
    let layers = checkpoint.geometry().layers as u32;
    let partials = (0..layers).map(|layer| local.iter().filter(|s| s.has_layer(layer)).count()).max().unwrap_or(0);
    Needs {
        weights: checkpoint.trunk_bytes() - checkpoint.narrowed_bytes() + local_bytes,
        unpacked: checkpoint.unpacked_bytes() + checkpoint.narrowed_bytes(),
        ..pools(checkpoint.geometry(), limits, precision, partials, threads)
    }
}
