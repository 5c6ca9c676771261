//! [`ShardPlan`]: cutting the routed experts over workers so that each (layer, expert, intermediate index) belongs to exactly one shard.
//!
//! First the resident cells go to the attention worker, as local shards. The rest is cut over the expert workers along one axis. A
//! worker whose part is no single box (a gap left by resident experts) gets several shards.
//!
//! Neighbours: `shard.rs`, `resident.rs`; the coordinator hands the shards out.

use std::{fmt, ops::Range, str::FromStr};

use crate::{Geometry, Resident, Shard, resident::LayerExperts, shard::ranges_of};

/// The axis along which routed experts are cut over workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Split {
    /// Whole layers.
    Layers,
    /// Whole experts, the same ones of each layer.
    Experts,
    /// A slice of every expert's intermediate dimension.
    Ffn,
}

impl fmt::Display for Split {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Layers => "layers",
            Self::Experts => "experts",
            Self::Ffn => "ffn",
        })
    }
}

impl FromStr for Split {
    type Err = PlanError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "layers" => Ok(Self::Layers),
            "experts" => Ok(Self::Experts),
            "ffn" => Ok(Self::Ffn),
            _ => Err(PlanError::Split { got: text.to_owned() }),
        }
    }
}

/// Why a plan cannot be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// Not the name of an axis.
    #[error("split {got:?}: needed layers, experts or ffn")]
    Split {
        /// The text.
        got: String,
    },
    /// Resident ranges that do not fit the model.
    #[error("resident layers {text:?}: {reason}; written 3-6,8-11 or 3-6:0-63 (layers:experts, both ends included), all, or none")]
    Resident {
        /// The text.
        text: String,
        /// What is wrong with it.
        reason: String,
    },
    /// More workers than there are parts.
    #[error("{workers} expert workers cannot share the routed experts by {split}: the largest possible count is {largest}")]
    TooMany {
        /// Workers asked for.
        workers: usize,
        /// The axis.
        split: Split,
        /// The largest count that works.
        largest: usize,
    },
    /// Experts without a home.
    #[error(
        "no expert worker is given, but layers {layers} have experts that are not resident: give at least one worker, or make all resident"
    )]
    NoWorker {
        /// Layer numbers in text.
        layers: String,
    },
    /// A shard reaches outside of the model.
    #[error("shard {shard}: {reason}")]
    Outside {
        /// The shard in text.
        shard: String,
        /// What is outside.
        reason: String,
    },
    /// A cell belongs to two shards.
    #[error("shards {first} and {second} overlap: each (layer, expert, ffn index) must belong to exactly one shard")]
    Overlap {
        /// The one shard in text.
        first: String,
        /// The other shard in text.
        second: String,
    },
    /// A cell belongs to no shard.
    #[error("no shard covers layer {layer}, expert {expert}, ffn index {ffn}")]
    Gap {
        /// Layer.
        layer: u32,
        /// Expert.
        expert: u32,
        /// Intermediate index.
        ffn: u32,
    },
}

/// A cut of all routed experts.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct ShardPlan {
    /// All shards; ids are the places in this list. Those of expert workers come first, worker by worker.
    pub shards: Vec<Shard>,
    /// Ids of the shards that the attention worker holds.
    pub local: Vec<u32>,
    /// Ids of the shards that each expert worker holds.
    pub workers: Vec<Vec<u32>>,
}

/// Layers with the same experts left to place.
struct Group {
    layers: Vec<u32>,
    left: Vec<Range<u32>>,
}

impl ShardPlan {
    /// Cuts the routed experts over `workers` expert workers, for weights that may be cut anywhere along the intermediate dimension
    /// (float types). [`ShardPlan::with_block`] takes the block of quantised ones.
    ///
    /// # Errors
    /// More workers than parts (names the largest possible count), or no worker for experts that are not resident.
    pub fn new(g: &Geometry, split: Split, workers: usize, resident: &Resident) -> Result<Self, PlanError> {
        Self::with_block(g, split, workers, resident, 1)
    }

    /// As [`ShardPlan::new`]; cuts along the intermediate dimension fall on multiples of `block` ([`crate::Checkpoint::ffn_block`]).
    ///
    /// # Errors
    /// As [`ShardPlan::new`].
    pub fn with_block(g: &Geometry, split: Split, workers: usize, resident: &Resident, block: usize) -> Result<Self, PlanError> {
        let resident = resident.experts_by_layer(g)?;
        let groups = remaining(g, &resident);
        let largest = largest_count(g, split, &groups, block);
        if workers > largest {
            return Err(PlanError::TooMany { workers, split, largest });
        }
        if workers == 0 && largest > 0 {
            let mut layers: Vec<u32> = groups.iter().flat_map(|group| group.layers.clone()).collect();
            layers.sort_unstable();
            return Err(PlanError::NoWorker { layers: Text(&ranges_of(layers)).to_string() });
        }
        let mut plan = Self::default();
        for worker in 0..workers {
            let ids = match split {
                Split::Layers => plan.add_layers(g, &groups, worker, workers),
                Split::Experts => plan.add_experts(g, &groups, worker, workers),
                Split::Ffn => plan.add_slices(g, &groups, worker, workers, block),
            };
            plan.workers.push(ids);
        }
        let whole = 0..g.moe_intermediate as u32;
        for group in grouped(resident) {
            for experts in group.left {
                let id = plan.add(&group.layers, experts, whole.clone());
                plan.local.push(id);
            }
        }
        validate_cover(g, &plan.shards)?;
        Ok(plan)
    }

    fn add(&mut self, layers: &[u32], experts: Range<u32>, ffn: Range<u32>) -> u32 {
        let id = self.shards.len() as u32;
        self.shards.push(Shard { id, layers: ranges_of(layers.iter().copied()), experts, ffn });
        id
    }

    fn add_layers(&mut self, g: &Geometry, groups: &[Group], worker: usize, workers: usize) -> Vec<u32> {
        let mut all: Vec<u32> = groups.iter().flat_map(|group| group.layers.iter().copied()).collect();
        all.sort_unstable();
        let mine = &all[part(all.len(), worker, workers)];
        let mut ids = Vec::new();
        for group in groups {
            let layers: Vec<u32> = group.layers.iter().copied().filter(|l| mine.contains(l)).collect();
            if !layers.is_empty() {
                ids.extend(group.left.iter().map(|experts| self.add(&layers, experts.clone(), 0..g.moe_intermediate as u32)));
            }
        }
        ids
    }

    fn add_experts(&mut self, g: &Geometry, groups: &[Group], worker: usize, workers: usize) -> Vec<u32> {
        let mut ids = Vec::new();
        for group in groups {
            let left: Vec<u32> = group.left.iter().cloned().flatten().collect();
            let mine = &left[part(left.len(), worker, workers)];
            for experts in ranges_of(mine.iter().copied()) {
                ids.push(self.add(&group.layers, experts, 0..g.moe_intermediate as u32));
            }
        }
        ids
    }

    fn add_slices(&mut self, g: &Geometry, groups: &[Group], worker: usize, workers: usize, block: usize) -> Vec<u32> {
        let blocks = part(g.moe_intermediate.div_ceil(block), worker, workers);
        let ffn = (blocks.start * block) as u32..(blocks.end * block).min(g.moe_intermediate) as u32;
        let mut ids = Vec::new();
        for group in groups {
            ids.extend(group.left.iter().map(|experts| self.add(&group.layers, experts.clone(), ffn.clone())));
        }
        ids
    }
}

/// The `i`-th of `n` consecutive parts of `0..len`, as even as can be, the larger ones first.
fn part(len: usize, i: usize, n: usize) -> Range<usize> {
    let (each, extra) = (len / n, len % n);
    let start = i * each + i.min(extra);
    start..start + each + usize::from(i < extra)
}

/// The experts that are not resident, layers with equal ones together.
fn remaining(g: &Geometry, resident: &[LayerExperts]) -> Vec<Group> {
    let left = g.moe_layers().into_iter().filter_map(|layer| {
        let layer = layer as u32;
        let taken = resident.iter().find(|(l, _)| *l == layer).map_or(&[][..], |(_, ranges)| ranges);
        let free = ranges_of((0..g.experts as u32).filter(|e| !taken.iter().any(|r| r.contains(e))));
        (!free.is_empty()).then_some((layer, free))
    });
    grouped(left.collect())
}

fn grouped(by_layer: Vec<LayerExperts>) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    for (layer, left) in by_layer {
        match groups.iter_mut().find(|group| group.left == left) {
            Some(group) => group.layers.push(layer),
            None => groups.push(Group { layers: vec![layer], left }),
        }
    }
    groups
}

fn largest_count(g: &Geometry, split: Split, groups: &[Group], block: usize) -> usize {
    if groups.is_empty() {
        return 0;
    }
    match split {
        Split::Layers => groups.iter().map(|group| group.layers.len()).sum(),
        // Every worker has a part of every layer, so the layer with the fewest experts left decides.
        Split::Experts => groups.iter().map(|group| group.left.iter().map(|r| r.len()).sum()).min().unwrap_or(0),
        Split::Ffn => g.moe_intermediate.div_ceil(block),
    }
}

/// Checks that shards lie inside of the model.
///
/// # Errors
/// Names the first that does not, and why.
pub fn validate_inside(g: &Geometry, shard: &Shard) -> Result<(), PlanError> {
    let outside = |reason: String| Err(PlanError::Outside { shard: shard.to_string(), reason });
    let moe = g.moe_layers();
    if shard.layers.is_empty() || shard.layers.iter().any(Range::is_empty) || shard.experts.is_empty() || shard.ffn.is_empty() {
        return outside("it is empty".to_owned());
    }
    if let Some(layer) = shard.layer_ids().find(|l| !moe.contains(&(*l as usize))) {
        let moe = ranges_of(moe.iter().map(|l| *l as u32));
        return outside(format!("layer {layer} has no routed experts; layers {} have", Text(&moe)));
    }
    if shard.experts.end as usize > g.experts {
        return outside(format!("expert {} does not exist: a layer has {} experts", shard.experts.end - 1, g.experts));
    }
    if shard.ffn.end as usize > g.moe_intermediate {
        let last = shard.ffn.end - 1;
        return outside(format!("ffn index {last} does not exist: moe_intermediate_size is {}", g.moe_intermediate));
    }
    Ok(())
}

/// Checks that shards cover every (layer, expert, intermediate index) exactly once.
///
/// # Errors
/// Names the first shard that lies outside, the first two that overlap, or the first cell that is missing.
pub fn validate_cover(g: &Geometry, shards: &[Shard]) -> Result<(), PlanError> {
    for (i, shard) in shards.iter().enumerate() {
        validate_inside(g, shard)?;
        if let Some(first) = shards[..i].iter().find(|s| s.overlaps(shard)) {
            return Err(PlanError::Overlap { first: first.to_string(), second: shard.to_string() });
        }
    }
    for layer in g.moe_layers().into_iter().map(|l| l as u32) {
        let here: Vec<&Shard> = shards.iter().filter(|s| s.has_layer(layer)).collect();
        let cells: u64 = here.iter().map(|s| s.experts.len() as u64 * s.ffn.len() as u64).sum();
        if cells == g.experts as u64 * g.moe_intermediate as u64 {
            continue;
        }
        for expert in 0..g.experts as u32 {
            let mut slices: Vec<&Range<u32>> = here.iter().filter(|s| s.experts.contains(&expert)).map(|s| &s.ffn).collect();
            slices.sort_by_key(|r| r.start);
            let covered = slices.iter().fold(0, |end, r| if r.start <= end { r.end } else { end });
            if covered < g.moe_intermediate as u32 {
                return Err(PlanError::Gap { layer, expert, ffn: covered });
            }
        }
    }
    Ok(())
}

/// Ranges in text, both ends included.
struct Text<'a>(&'a [Range<u32>]);

impl fmt::Display for Text<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, r) in self.0.iter().enumerate() {
            f.write_str(if i == 0 { "" } else { "," })?;
            crate::shard::write_range(f, r)?;
        }
        Ok(())
    }
}
