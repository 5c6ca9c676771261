//! The router's choice, given its logits (docs/model.md, Router). Always in f32.

use super::{aligned::Aligned, buf::sized, isa::Kernel, simd::Simd};
use crate::RouterParams;

/// One row: logits become scores in place.
pub(super) struct Route<'a> {
    pub(super) logits: &'a mut [f32],
    pub(super) bias: &'a [f32],
    pub(super) p: &'a RouterParams,
    pub(super) keys: &'a mut Vec<u32>,
    pub(super) biased: &'a mut Aligned,
    pub(super) ids: &'a mut [i32],
    pub(super) weights: &'a mut [f32],
}

/// A value as an integer of the same order, at least 1; NaN as −∞, −0 as 0.
#[inline(always)]
fn ordered(x: f32) -> u32 {
    let x = if x.is_nan() { f32::NEG_INFINITY } else { x + 0.0 };
    let bits = x.to_bits();
    if bits >> 31 == 1 { !bits } else { bits | 0x8000_0000 }
}

/// The place of the largest; the lowest among equals.
#[inline(always)]
fn best(keys: &[u32]) -> usize {
    let top = keys.iter().copied().max().unwrap_or(0);
    keys.iter().position(|&k| k == top).unwrap_or(0)
}

impl Kernel for Route<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let p = self.p;
        for x in self.logits.chunks_mut(S::LANES) {
            let v = s.sigmoid(s.ld(x));
            s.st(x, v);
        }
        let scores = &*self.logits;
        let e = scores.len();
        let biased = self.biased.sized(e);
        for ((b, x), bias) in biased.iter_mut().zip(scores).zip(self.bias) {
            *b = x + bias;
        }
        let all = sized(self.keys, e + p.groups);
        let (keys, groups) = all.split_at_mut(e);
        if p.groups > 1 && p.topk_group < p.groups {
            let size = e / p.groups;
            for (g, key) in groups.iter_mut().enumerate() {
                *key = ordered(two_best(&biased[g * size..(g + 1) * size]));
            }
            for _ in 0..p.topk_group {
                groups[best(groups)] = 0;
            }
            for (g, key) in groups.iter().enumerate() {
                if *key != 0 {
                    biased[g * size..(g + 1) * size].fill(f32::NEG_INFINITY);
                }
            }
        }
        for (k, b) in keys.iter_mut().zip(&*biased) {
            *k = ordered(*b);
        }
        let mut sum = 0.0;
        for (id, weight) in self.ids.iter_mut().zip(self.weights.iter_mut()) {
            let at = best(keys);
            keys[at] = 0;
            *id = at as i32;
            *weight = scores[at];
            sum += scores[at];
        }
        for weight in self.weights.iter_mut() {
            *weight = p.scale * if p.norm_topk { *weight / (sum + 1e-20) } else { *weight };
        }
    }
}

/// The sum of the two largest (of the one, where there is but one).
fn two_best(x: &[f32]) -> f32 {
    let (mut first, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
    for &v in x {
        if v > first {
            (first, second) = (v, first);
        } else if v > second {
            second = v;
        }
    }
    if x.len() < 2 { first } else { first + second }
}
