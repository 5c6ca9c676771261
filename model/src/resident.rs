//! [`Resident`]: which routed experts the attention worker keeps for itself.
//!
//! In text: `all`, `none`, layer ranges (`3-6,8-11`), each with optional experts (`3-6:0-63`); both ends included.
//!
//! Neighbours: `plan.rs` takes these cells out before it cuts the rest over expert workers.

use std::{fmt, ops::Range, str::FromStr};

use crate::{
    Geometry, PlanError,
    shard::{normalise, parse_range, write_range},
};

/// A layer and some of its experts, as disjoint ascending ranges.
pub type LayerExperts = (u32, Vec<Range<u32>>);

/// Some layers' experts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResidentRange {
    /// Layers.
    pub layers: Range<u32>,
    /// Experts of these layers; `None`: all.
    pub experts: Option<Range<u32>>,
}

/// Which routed experts the attention worker keeps for itself.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub enum Resident {
    /// None: all go to expert workers.
    #[default]
    None,
    /// All: no expert worker is needed.
    All,
    /// Some.
    Ranges(Vec<ResidentRange>),
}

impl Resident {
    /// The resident experts of each MoE layer, ascending; layers with none are left out.
    /// Dense layers inside a range are passed over: they are always at the attention worker.
    ///
    /// # Errors
    /// A layer or expert that does not exist, a range without any MoE layer, an expert named twice.
    pub fn experts_by_layer(&self, g: &Geometry) -> Result<Vec<LayerExperts>, PlanError> {
        let moe: Vec<u32> = g.moe_layers().iter().map(|l| *l as u32).collect();
        let everything = 0..g.experts as u32;
        let ranges = match self {
            Self::None => return Ok(Vec::new()),
            Self::All => return Ok(moe.into_iter().map(|layer| (layer, vec![everything.clone()])).collect()),
            Self::Ranges(ranges) => ranges,
        };
        let wrong = |reason: String| PlanError::Resident { text: self.to_string(), reason };
        for r in ranges {
            if r.layers.end as usize > g.layers {
                return Err(wrong(format!("layer {} does not exist: the model has {} layers", r.layers.end - 1, g.layers)));
            }
            if !moe.iter().any(|l| r.layers.contains(l)) {
                return Err(wrong(format!("no layer of {}-{} has routed experts: they are dense", r.layers.start, r.layers.end - 1)));
            }
            if let Some(e) = &r.experts
                && e.end as usize > g.experts
            {
                return Err(wrong(format!("expert {} does not exist: a layer has {} experts", e.end - 1, g.experts)));
            }
        }
        let mut list = Vec::new();
        for layer in moe {
            let here = ranges.iter().filter(|r| r.layers.contains(&layer)).map(|r| r.experts.clone().unwrap_or(everything.clone()));
            let merged = normalise(here.collect()).map_err(|e| wrong(format!("layer {layer}: expert {e}")))?;
            if !merged.is_empty() {
                list.push((layer, merged));
            }
        }
        Ok(list)
    }
}

impl fmt::Display for Resident {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ranges = match self {
            Self::None => return f.write_str("none"),
            Self::All => return f.write_str("all"),
            Self::Ranges(ranges) => ranges,
        };
        for (i, r) in ranges.iter().enumerate() {
            f.write_str(if i == 0 { "" } else { "," })?;
            write_range(f, &r.layers)?;
            if let Some(experts) = &r.experts {
                f.write_str(":")?;
                write_range(f, experts)?;
            }
        }
        Ok(())
    }
}

impl FromStr for Resident {
    type Err = PlanError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.trim() {
            "" | "none" => return Ok(Self::None),
            "all" => return Ok(Self::All),
            _ => {}
        }
        let parse = |part: &str| {
            let (layers, experts) = match part.split_once(':') {
                Some((layers, experts)) => (layers, Some(parse_range(experts)?)),
                None => (part, None),
            };
            Ok(ResidentRange { layers: parse_range(layers)?, experts })
        };
        let ranges = text.split(',').map(parse).collect::<Result<Vec<_>, String>>();
        ranges.map(Self::Ranges).map_err(|reason| PlanError::Resident { text: text.to_owned(), reason })
    }
}
