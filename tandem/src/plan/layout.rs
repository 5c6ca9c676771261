//! What goes where: processes, their devices, and what each needs of memory. Pure: the same numbers always give the same plan.
//!
//! Neighbours: `sizes.rs` is the checkpoint, `device.rs` the devices; the workers' own `memory.rs` say what they allocate; `advise.rs`
//! looks for a layout that fits where this one does not.

use tandem_kernels::{DeviceKind, Precision, cpu::LatentType};
use tandem_model::{
    Geometry, PlanError, Resident, Shard, ShardPlan, Split,
    budget::{Needs, Room, Short, fits},
};
use tandem_worker_attn::{RunnerLimits, cache::CacheOptions, engine::parking::ParkingOptions, memory};
use tandem_worker_experts::{memory as experts, service::batch_rows};

use super::sizes::Sizes;

/// A device that processes are placed on.
#[derive(Clone, Debug, PartialEq)]
pub struct Device {
    /// What it is.
    pub kind: DeviceKind,
    /// Its name, and the memory that plans may use of it.
    pub room: Room,
    /// Bytes that it reads in a second, where known.
    pub bandwidth: Option<f64>,
}

/// What is asked for.
#[derive(Clone, Debug, PartialEq)]
pub struct Ask {
    /// Kinds of all devices.
    pub kinds: Vec<DeviceKind>,
    /// Device of the attention worker, by its place in the list.
    pub attn: usize,
    /// Devices of the expert workers.
    pub experts: Vec<usize>,
    /// How the experts are cut.
    pub split: Split,
    /// What the attention worker keeps.
    pub resident: Resident,
    /// Steps and pools.
    pub limits: RunnerLimits,
    /// Of activations.
    pub precision: Precision,
    /// What the latent cache stores.
    pub latents: LatentType,
    /// Compute threads of a CPU worker.
    pub threads: usize,
    /// Weights may stay on disk.
    pub paging: bool,
    /// The attention worker's prefix cache.
    pub cache: Option<CacheOptions>,
    /// How its sequences make room.
    pub parking: ParkingOptions,
}

impl Ask {
    /// The most host memory that the attention worker's prefix cache takes.
    pub fn prefixes(&self, g: &Geometry) -> u64 {
        memory::prefixes(g, self.limits, self.latents, self.cache)
    }

    /// The most host memory that the attention worker's copies of sequences take.
    pub fn parked(&self, g: &Geometry) -> u64 {
        memory::parked(g, self.limits, self.latents, self.parking)
    }

    /// The kind of a device; CPU where there is no such place.
    pub fn kind(&self, device: usize) -> DeviceKind {
        self.kinds.get(device).copied().unwrap_or(DeviceKind::Cpu)
    }

    /// The device in whose memory the attention worker has its prefixes and copies: its own CPU, else the first CPU of the list.
    pub fn host(&self) -> Option<usize> {
        if self.kind(self.attn) == DeviceKind::Cpu { Some(self.attn) } else { self.kinds.iter().position(|kind| *kind == DeviceKind::Cpu) }
    }
}

/// A process and what it needs.
#[derive(Clone, Debug, PartialEq)]
pub struct Place {
    /// `attn`, `experts-0` …
    pub name: String,
    /// Its device, by its place in the list.
    pub device: usize,
    /// Its memory.
    pub needs: Needs,
    /// Its shards of the routed experts.
    pub shards: Vec<Shard>,
}

/// What goes where.
#[derive(Clone, Debug, PartialEq)]
pub struct Layout {
    /// The attention worker, then the expert workers.
    pub places: Vec<Place>,
    /// What was asked for.
    pub ask: Ask,
}

/// Cuts the experts and adds everything up. Whether it fits is for [`Layout::check`] to say.
///
/// # Errors
/// A split that is impossible with this many workers.
pub fn lay_out(sizes: &Sizes, ask: &Ask) -> Result<Layout, PlanError> {
    let g = &sizes.geometry;
    let plan = ShardPlan::with_block(g, ask.split, ask.experts.len(), &ask.resident, sizes.block)?;
    let of = |ids: &[u32]| -> Vec<Shard> { ids.iter().filter_map(|id| plan.shards.get(*id as usize)).cloned().collect() };
    let local = of(&plan.local);
    let partials = (0..g.layers as u32).map(|layer| local.iter().filter(|s| s.has_layer(layer)).count()).max().unwrap_or(0);
    let held = |device: usize, shards: &[Shard]| sizes.on(ask.kind(device)).shards(g, shards);
    let pools = memory::pools(g, ask.limits, ask.latents, partials, ask.threads, ask.kind(ask.attn));
    let attn = Needs {
        weights: sizes.on(ask.kind(ask.attn)).trunk().saturating_sub(sizes.narrowed).saturating_add(held(ask.attn, &local)),
        unpacked: sizes.unpacked.saturating_add(sizes.narrowed),
        host: ask.prefixes(g).saturating_add(ask.parked(g)),
        workspace: pools.workspace.saturating_add(memory::lent(g, ask.limits, ask.kind(ask.attn))),
        ..pools
    };
    let mut places = vec![Place { name: "attn".to_owned(), device: ask.attn, needs: attn, shards: local }];
    for (i, (device, ids)) in ask.experts.iter().zip(&plan.workers).enumerate() {
        let shards = of(ids);
        let (kind, rows) = (ask.kind(*device), batch_rows(ask.kind(*device)));
        let pools = experts::pools(g, rows, kind);
        let workspace = pools.workspace.saturating_add(experts::lent(g, rows, kind));
        let needs = Needs { weights: held(*device, &shards), workspace, ..pools };
        places.push(Place { name: format!("experts-{i}"), device: *device, needs, shards });
    }
    Ok(Layout { places, ask: ask.clone() })
}

impl Layout {
    /// Checks that every device has room for its processes. Weights can stay on disk on CPUs only.
    ///
    /// # Errors
    /// The first device that has not, with both numbers.
    pub fn check(&self, devices: &[Device]) -> Result<(), Short> {
        for (i, device) in devices.iter().enumerate() {
            let here: Vec<(&str, Needs)> = self.needs_on(i).collect();
            fits(&here, &device.room, self.ask.paging && device.kind == DeviceKind::Cpu)?;
        }
        Ok(())
    }

    /// The processes of a device.
    pub fn on(&self, device: usize) -> impl Iterator<Item = &Place> {
        self.places.iter().filter(move |p| p.device == device)
    }

    /// What processes need of a device's memory: its own, and the attention worker's host memory where its device is another.
    pub fn needs_on(&self, device: usize) -> impl Iterator<Item = (&str, Needs)> {
        let own = move |p: &Place| if self.ask.kind(p.device) == DeviceKind::Cpu { p.needs } else { p.needs.apart().0 };
        let beside = self.places.first().filter(|p| p.device != device && self.ask.host() == Some(device));
        let beside = beside.map(|p| (p.name.as_str(), p.needs.apart().1)).filter(|(_, needs)| needs.host > 0);
        self.on(device).map(move |p| (p.name.as_str(), own(p))).chain(beside)
    }

    /// What a device's processes need together.
    pub fn needed(&self, device: usize) -> u64 {
        self.needs_on(device).map(|(_, needs)| needs.total()).fold(0, u64::saturating_add)
    }
}
