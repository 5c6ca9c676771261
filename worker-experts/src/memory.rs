//! What an expert worker needs of its device's memory, known before anything is allocated.
//!
//! Neighbours: `batcher.rs` has the buffers, `bank.rs` the weights; `tandem plan` and `tandem up` ask here.

use tandem_kernels::{DeviceKind, cuda, expert_scratch_bytes, weight_bytes};
use tandem_model::{
    Checkpoint, Geometry, Shard, Weighed,
    budget::{Needs, Room, Short, fits},
};
use tandem_runtime::memory;

use crate::lending::{REGIONS, region_bytes};

/// Everything but weights, for dispatches of up to `max_rows` rows on a kind of device: the joined batch, and the scratch of the experts that it
/// chooses.
pub fn pools(g: &Geometry, max_rows: usize, kind: DeviceKind) -> Needs {
    let row = 3 * g.hidden + 2 * g.topk;
    let batch = (max_rows as u64).saturating_mul(4 * row as u64);
    Needs { workspace: batch.saturating_add(scratch(g, max_rows, kind)), ..Needs::default() }
}

/// Scratch of the experts of any shard for up to `max_rows` rows on a kind of device.
pub fn scratch(g: &Geometry, max_rows: usize, kind: DeviceKind) -> u64 {
    expert_scratch_bytes(kind, max_rows, g.topk, g.experts, g.hidden, g.moe_intermediate)
}

/// Memory that a worker on a kind of device lends to attention workers of its machine, for dispatches of up to `max_rows` rows.
pub fn lent(g: &Geometry, max_rows: usize, kind: DeviceKind) -> u64 {
    // On a CPU nothing is lent unless somebody asks.
    if kind == DeviceKind::Cuda { REGIONS as u64 * region_bytes(g.hidden, max_rows) } else { 0 }
}

/// Bytes that a tensor takes in the memory of a kind of device.
pub fn weigh(kind: DeviceKind) -> impl Fn(&Weighed<'_>) -> u64 {
    move |w| if w.matrix { weight_bytes(kind, w.dtype, w.scales, w.shape, w.bytes) } else { w.bytes }
}

/// The kind of a device by its name.
pub fn kind_of(device: &str) -> DeviceKind {
    if cuda::ordinal(device).is_some() { DeviceKind::Cuda } else { DeviceKind::Cpu }
}

/// All of it, with the weights of the worker's shards on its device.
pub fn needs(checkpoint: &Checkpoint, shards: &[Shard], max_rows: usize, device: &str) -> Needs {
    let (kind, g) = (kind_of(device), checkpoint.geometry());
    let weights = shards.iter().map(|shard| checkpoint.shard_bytes_as(shard, weigh(kind))).sum();
    let pools = pools(g, max_rows, kind);
    Needs { weights, workspace: pools.workspace.saturating_add(lent(g, max_rows, kind)), ..pools }
}

/// The memory behind a device that the process may use; `None` where it cannot be known.
pub fn room(device: &str) -> Option<Room> {
    if let Some(ordinal) = cuda::ordinal(device) {
        let found = cuda::probe::device(ordinal).ok()?;
        return Some(Room { device: device.to_owned(), bytes: found.memory, origin: format!("all that {} has", found.name) });
    }
    host()
}

/// This machine's own memory.
fn host() -> Option<Room> {
    memory::free().map(|free| Room { device: "cpu".to_owned(), bytes: free.bytes, origin: free.bound.to_string() })
}

/// Refuses what does not fit a device, before anything is loaded. `paging`: weights may stay on disk.
///
/// # Errors
/// [`Short`], with what would work.
pub fn check(name: &str, device: &str, needs: Needs, paging: bool) -> Result<(), Short> {
    const HINT: &str = "use a machine with more memory, fewer layers or experts per worker, lower --kv-tokens, --max-batch, --prefix-cache-bytes and \
                        --preemption-bytes, or \
                        --allow-paging to read weights from disk as they are needed (slow)";
    let fit = |room: Option<Room>, needs, paging| match room {
        Some(room) => fits(&[(name, needs)], &room, paging).map_err(|short| Short { hint: HINT.to_owned(), ..short }),
        None => Ok(()),
    };
    if kind_of(device) == DeviceKind::Cpu {
        return fit(room(device), needs, paging);
    }
    let (own, on_host) = needs.apart();
    fit(room(device), own, false)?;
    fit(host(), on_host, false)
}
