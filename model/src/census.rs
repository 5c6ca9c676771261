//! [`Census`]: the tensors that the model uses, counted by part, by stored type and by layer, from headers alone.
//!
//! Neighbours: `checkpoint.rs` has the tensors; `tandem check` prints a census, `tandem plan` sizes devices with one.

use std::{collections::BTreeMap, fmt};

use tandem_quant::DType;

use crate::{Checkpoint, Weighed, inventory::Need};

/// A part of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Part {
    /// embed_tokens: one row is read per token.
    Embedding,
    /// Kimi delta attention.
    Kda,
    /// Multi-head latent attention, without its indexer.
    Mla,
    /// The indexers of MLA layers.
    Indexer,
    /// mHC sites.
    Hyper,
    /// RMSNorms of layers and of the end.
    Norms,
    /// Dense FFNs.
    Dense,
    /// Routers with their biases.
    Router,
    /// Shared experts.
    Shared,
    /// Routed experts.
    Routed,
    /// lm_head.
    Head,
}

impl Part {
    /// Every part, in the order of a token's way.
    pub const ALL: [Self; 11] = [
        Self::Embedding,
        Self::Hyper,
        Self::Norms,
        Self::Kda,
        Self::Mla,
        Self::Indexer,
        Self::Dense,
        Self::Router,
        Self::Shared,
        Self::Routed,
        Self::Head,
    ];

    /// Its name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Embedding => "embedding",
            Self::Kda => "kda",
            Self::Mla => "mla",
            Self::Indexer => "indexer",
            Self::Hyper => "mhc",
            Self::Norms => "norms",
            Self::Dense => "dense ffn",
            Self::Router => "router",
            Self::Shared => "shared expert",
            Self::Routed => "routed experts",
            Self::Head => "head",
        }
    }

    /// The part of a needed tensor; `kda` tells whether a layer's mixer is KDA.
    fn of(need: &Need, kda: impl Fn(usize) -> bool) -> Self {
        if need.routed {
            return Self::Routed;
        }
        let (layer, rest) = match need.name.strip_prefix("layers.").and_then(|s| s.split_once('.')) {
            Some((layer, rest)) => (layer.parse().unwrap_or(0), rest),
            None if need.name.starts_with("embed_tokens") => return Self::Embedding,
            None if need.name.starts_with("lm_head") => return Self::Head,
            None => return Self::Norms,
        };
        match rest {
            _ if rest.starts_with("hc_") => Self::Hyper,
            _ if rest.starts_with("self_attn.indexer.") => Self::Indexer,
            _ if rest.starts_with("self_attn.") => {
                if kda(layer) {
                    Self::Kda
                } else {
                    Self::Mla
                }
            }
            _ if rest.starts_with("mlp.shared_experts.") => Self::Shared,
            _ if rest.starts_with("mlp.gate.") => Self::Router,
            _ if rest.starts_with("mlp.") => Self::Dense,
            _ => Self::Norms,
        }
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A number of tensors and their bytes, scales included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// Tensors, not counting scales beside them.
    pub tensors: usize,
    /// Bytes on disk.
    pub bytes: u64,
}

impl Count {
    fn add(&mut self, bytes: u64) {
        self.tensors += 1;
        self.bytes += bytes;
    }
}

/// How a MoE layer's routed experts are stored: the types of gate, up and down, each set as text (`Q4_K`, or `Q4_K/Q6_K` where experts
/// of one layer differ).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerExperts {
    /// Layer number.
    pub layer: usize,
    /// Types of gate, up, down.
    pub types: [String; 3],
    /// Bytes of all experts.
    pub bytes: u64,
}

/// The tensors that the model uses, counted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Census {
    /// By part.
    pub parts: BTreeMap<Part, Count>,
    /// By stored type.
    pub types: BTreeMap<DType, Count>,
    /// Types of matrices, each with the stored name of the first tensor that has it: what a device needs kernels for.
    pub matrices: BTreeMap<DType, String>,
    /// The routed experts of each MoE layer, ascending.
    pub experts: Vec<LayerExperts>,
}

impl Census {
    /// Counts bytes on disk.
    pub fn of(checkpoint: &Checkpoint) -> Self {
        Self::weighed(checkpoint, |w| w.bytes)
    }

    /// Counts, where a tensor takes as many bytes as `weigh` says.
    pub fn weighed(checkpoint: &Checkpoint, weigh: impl Fn(&Weighed<'_>) -> u64) -> Self {
        let g = checkpoint.geometry();
        let kda = g.kda_layers();
        let mut census = Self { parts: BTreeMap::new(), types: BTreeMap::new(), matrices: BTreeMap::new(), experts: Vec::new() };
        let mut experts: BTreeMap<usize, ([Vec<DType>; 3], u64)> = BTreeMap::new();
        for need in checkpoint.needs() {
            // Opening has checked every layout.
            let Ok(layout) = checkpoint.layout(&need.name) else { continue };
            let bytes = weigh(&checkpoint.weighed(need, &layout));
            census.parts.entry(Part::of(need, |layer| kda.contains(&layer))).or_default().add(bytes);
            census.types.entry(layout.dtype).or_default().add(bytes);
            if need.matrix {
                census.matrices.entry(layout.dtype).or_insert_with(|| layout.weight.stored_name.clone());
            }
            if need.routed
                && let Some(layer) = need.layer()
            {
                let (types, sum) = experts.entry(layer).or_default();
                *sum += bytes;
                let places: &[usize] = match () {
                    () if need.name.contains("gate_up_proj") => &[0, 1],
                    () if need.name.contains("gate_proj") => &[0],
                    () if need.name.contains("up_proj") => &[1],
                    () => &[2],
                };
                for place in places {
                    if !types[*place].contains(&layout.dtype) {
                        types[*place].push(layout.dtype);
                    }
                }
            }
        }
        let text = |types: Vec<DType>| types.iter().map(|t| t.name()).collect::<Vec<_>>().join("/");
        census.experts = experts.into_iter().map(|(layer, (types, bytes))| LayerExperts { layer, types: types.map(text), bytes }).collect();
        census
    }

    /// Bytes of a part.
    pub fn bytes(&self, part: Part) -> u64 {
        self.parts.get(&part).map_or(0, |count| count.bytes)
    }

    /// Bytes of everything.
    pub fn total(&self) -> u64 {
        self.parts.values().map(|count| count.bytes).sum()
    }
}
