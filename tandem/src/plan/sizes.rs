//! A checkpoint in numbers: everything that a plan needs of it, counted once.

use std::collections::BTreeMap;

use tandem_kernels::DeviceKind;
use tandem_model::{
    Checkpoint, Geometry, Shard,
    census::{Census, Part},
};
use tandem_worker_experts::memory::weigh;

/// A checkpoint in numbers.
#[derive(Clone, Debug)]
pub struct Sizes {
    /// What it is called in the plan's first line.
    pub name: String,
    /// Geometry.
    pub geometry: Geometry,
    /// Weights as stored, which is how a CPU has them.
    pub stored: Weights,
    /// Weights as a GPU has them: padded, and of types without a kernel as f32.
    pub cuda: Weights,
    /// Cuts along the intermediate dimension fall on multiples of this.
    pub block: usize,
    /// Bytes of weights that are kept in another form than stored, beside the parts.
    pub unpacked: u64,
    /// Bytes of the trunk's parts that are narrowed to FP8, and so cannot be left on disk.
    pub narrowed: u64,
}

/// Bytes of weights in some device's memory.
#[derive(Clone, Debug, Default)]
pub struct Weights {
    /// Bytes of each part.
    pub parts: BTreeMap<Part, u64>,
    /// Bytes of all routed experts of each MoE layer.
    pub routed: BTreeMap<u32, u64>,
}

impl Weights {
    fn of(checkpoint: &Checkpoint, kind: DeviceKind) -> Self {
        let census = Census::weighed(checkpoint, weigh(kind));
        Self {
            parts: census.parts.iter().map(|(part, count)| (*part, count.bytes)).collect(),
            routed: census.experts.iter().map(|e| (e.layer as u32, e.bytes)).collect(),
        }
    }

    /// Bytes of a part.
    pub fn part(&self, part: Part) -> u64 {
        self.parts.get(&part).copied().unwrap_or(0)
    }

    /// Bytes of everything.
    pub fn total(&self) -> u64 {
        self.parts.values().copied().fold(0, u64::saturating_add)
    }

    /// Bytes of everything but the routed experts.
    pub fn trunk(&self) -> u64 {
        self.total() - self.part(Part::Routed)
    }

    /// Bytes of some shards.
    pub fn shards(&self, geometry: &Geometry, shards: &[Shard]) -> u64 {
        shards.iter().flat_map(|s| s.layer_ids().map(move |layer| s.share_of(geometry, self.layer(layer)))).fold(0, u64::saturating_add)
    }

    /// Bytes of all routed experts of a layer.
    pub fn layer(&self, layer: u32) -> u64 {
        self.routed.get(&layer).copied().unwrap_or(0)
    }
}

impl Sizes {
    /// Counts a checkpoint, from headers alone.
    pub fn of(checkpoint: &Checkpoint) -> Self {
        Self {
            name: checkpoint.dir().display().to_string(),
            geometry: checkpoint.geometry().clone(),
            stored: Weights::of(checkpoint, DeviceKind::Cpu),
            cuda: Weights::of(checkpoint, DeviceKind::Cuda),
            block: checkpoint.ffn_block(),
            unpacked: checkpoint.unpacked_bytes(),
            narrowed: checkpoint.narrowed_bytes(),
        }
    }

    /// The weights as a kind of device has them.
    pub fn on(&self, kind: DeviceKind) -> &Weights {
        match kind {
            DeviceKind::Cpu => &self.stored,
            DeviceKind::Cuda => &self.cuda,
        }
    }
}
