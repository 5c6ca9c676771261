//! [`Shard`]: layers × experts × a slice of the intermediate dimension.
//!
//! Each (layer, expert, intermediate index) belongs to exactly one shard (`plan.rs` checks it); several workers may hold the same shard.
//! In text, ranges are inclusive: `layers=3-11,experts=0-287,ffn=0-2047`; layers may be several ranges (`layers=3-6,8-11,experts=…`).

use std::{fmt, ops::Range, str::FromStr};

use crate::Geometry;

/// Layers × experts × a slice of the intermediate dimension. Ranges are half-open here and inclusive in text.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Default)]
pub struct Shard {
    /// Number within its plan; not part of the text form.
    pub id: u32,
    /// Layer ranges, ascending.
    pub layers: Vec<Range<u32>>,
    /// Experts.
    pub experts: Range<u32>,
    /// Slice of the intermediate dimension.
    pub ffn: Range<u32>,
}

impl Shard {
    /// Whether the shard has experts of a layer.
    pub fn has_layer(&self, layer: u32) -> bool {
        self.layers.iter().any(|r| r.contains(&layer))
    }

    /// All layer numbers, ascending.
    pub fn layer_ids(&self) -> impl Iterator<Item = u32> + '_ {
        self.layers.iter().cloned().flatten()
    }

    /// The shard's part of `bytes`, the weights of all routed experts of one of its layers (every expert counts alike).
    pub fn share_of(&self, g: &Geometry, bytes: u64) -> u64 {
        let cells = u128::from(self.experts.end - self.experts.start) * u128::from(self.ffn.end - self.ffn.start);
        (u128::from(bytes) * cells / (g.experts as u128 * g.moe_intermediate as u128).max(1)) as u64
    }

    /// Whether the two share a (layer, expert, index) cell.
    pub fn overlaps(&self, other: &Shard) -> bool {
        let meet = |a: &Range<u32>, b: &Range<u32>| a.start.max(b.start) < a.end.min(b.end);
        meet(&self.experts, &other.experts)
            && meet(&self.ffn, &other.ffn)
            && self.layers.iter().any(|a| other.layers.iter().any(|b| meet(a, b)))
    }

    /// Whether both are the same cut, whatever their numbers.
    pub fn same_cut(&self, other: &Shard) -> bool {
        (&self.layers, &self.experts, &self.ffn) == (&other.layers, &other.experts, &other.ffn)
    }
}

/// Consecutive numbers as ranges; `ids` ascend.
pub fn ranges_of(ids: impl IntoIterator<Item = u32>) -> Vec<Range<u32>> {
    let mut ranges: Vec<Range<u32>> = Vec::new();
    for id in ids {
        match ranges.last_mut() {
            Some(last) if last.end == id => last.end += 1,
            _ => ranges.push(id..id + 1),
        }
    }
    ranges
}

pub(crate) fn write_range(f: &mut fmt::Formatter<'_>, r: &Range<u32>) -> fmt::Result {
    match r.len() {
        0 => f.write_str("none"),
        1 => write!(f, "{}", r.start),
        _ => write!(f, "{}-{}", r.start, r.end - 1),
    }
}

impl fmt::Display for Shard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("layers=")?;
        for (i, r) in self.layers.iter().enumerate() {
            f.write_str(if i == 0 { "" } else { "," })?;
            write_range(f, r)?;
        }
        f.write_str(",experts=")?;
        write_range(f, &self.experts)?;
        f.write_str(",ffn=")?;
        write_range(f, &self.ffn)
    }
}

/// A text that describes no shard.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?}: {reason}; a shard is written layers=3-11,experts=0-287,ffn=0-2047 (both ends included)")]
pub struct ShardTextError {
    /// The text.
    pub text: String,
    /// What is wrong with it.
    pub reason: String,
}

/// `3` or `3-6`, both ends included.
pub(crate) fn parse_range(text: &str) -> Result<Range<u32>, String> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let number = |s: &str| s.trim().parse::<u32>().ok().filter(|n| *n < u32::MAX).ok_or_else(|| format!("{s:?} is no number"));
    let (first, last) = (number(first)?, number(last)?);
    if first <= last { Ok(first..last + 1) } else { Err(format!("{text:?} runs backwards")) }
}

/// Sorts and merges ranges; an overlap is an error.
pub(crate) fn normalise(mut ranges: Vec<Range<u32>>) -> Result<Vec<Range<u32>>, String> {
    ranges.sort_by_key(|r| r.start);
    let mut merged: Vec<Range<u32>> = Vec::new();
    for r in ranges {
        match merged.last_mut() {
            Some(last) if r.start < last.end => return Err(format!("{} is named twice", r.start)),
            Some(last) if r.start == last.end => last.end = r.end,
            _ => merged.push(r),
        }
    }
    Ok(merged)
}

impl FromStr for Shard {
    type Err = ShardTextError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = |reason: String| ShardTextError { text: text.to_owned(), reason };
        let (mut layers, mut experts, mut ffn) = (Vec::new(), Vec::new(), Vec::new());
        let mut key = "";
        for part in text.split(',') {
            // A part without a key continues the ranges of the key before it: layers=3-6,8-11.
            let range = match part.split_once('=') {
                Some((k, r)) => {
                    key = k.trim();
                    r
                }
                None => part,
            };
            let list = match key {
                "layers" => &mut layers,
                "experts" => &mut experts,
                "ffn" => &mut ffn,
                "" => return Err(wrong("no key".to_owned())),
                other => return Err(wrong(format!("unknown key {other:?}"))),
            };
            list.push(parse_range(range).map_err(wrong)?);
        }
        let one = |name: &str, list: Vec<Range<u32>>| match <[_; 1]>::try_from(list) {
            Ok([range]) => Ok(range),
            Err(list) => Err(wrong(format!("{name} needs one range, got {}", list.len()))),
        };
        if layers.is_empty() {
            return Err(wrong("layers is missing".to_owned()));
        }
        Ok(Self { id: 0, layers: normalise(layers).map_err(wrong)?, experts: one("experts", experts)?, ffn: one("ffn", ffn)? })
    }
}
