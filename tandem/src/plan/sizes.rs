//! A checkpoint in numbers: everything that a plan needs of it, counted once.

use std::collections::BTreeMap;

use tandem_model::{
    Checkpoint, Geometry, Shard,
    census::{Census, Part},
};

/// A checkpoint in numbers.
#[derive(Clone, Debug)]
pub struct Sizes {
    /// What it is called in the plan's first line.
    pub name: String,
    /// Geometry.
    pub geometry: Geometry,
    /// Bytes of each part.
    pub parts: BTreeMap<Part, u64>,
    /// Bytes of all routed experts of each MoE layer.
    pub routed: BTreeMap<u32, u64>,
    /// Cuts along the intermediate dimension fall on multiples of this.
    pub block: usize,
    /// Bytes of weights that are kept in another form than stored, beside the parts.
    pub unpacked: u64,
    /// Bytes of the trunk's parts that are narrowed to FP8, and so cannot be left on disk.
    pub narrowed: u64,
}

impl Sizes {
    /// Counts a checkpoint, from headers alone.
    pub fn of(checkpoint: &Checkpoint) -> Self {
        let census = Census::of(checkpoint);
        Self {
            name: checkpoint.dir().display().to_string(),
            geometry: checkpoint.geometry().clone(),
            parts: census.parts.iter().map(|(part, count)| (*part, count.bytes)).collect(),
            routed: census.experts.iter().map(|e| (e.layer as u32, e.bytes)).collect(),
            block: checkpoint.ffn_block(),
            unpacked: checkpoint.unpacked_bytes(),
            narrowed: checkpoint.narrowed_bytes(),
        }
    }

    /// Bytes of a part.
    pub fn part(&self, part: Part) -> u64 {
        self.parts.get(&part).copied().unwrap_or(0)
    }

    /// Bytes of everything.
    pub fn total(&self) -> u64 {
        self.parts.values().sum()
    }

    /// Bytes of everything but the routed experts.
    pub fn trunk(&self) -> u64 {
        self.total() - self.part(Part::Routed)
    }

    /// Bytes of a shard.
    pub fn shard(&self, shard: &Shard) -> u64 {
        shard.layer_ids().map(|layer| shard.share_of(&self.geometry, self.layer(layer))).sum()
    }

    /// Bytes of all routed experts of a layer.
    pub fn layer(&self, layer: u32) -> u64 {
        self.routed.get(&layer).copied().unwrap_or(0)
    }
}
