//! The router: which experts a row goes to, and with what weight.

use super::{Real, norm::sigmoid, order::descending};

/// Constants of the router, in the reference's number type.
#[derive(Clone, Copy, Debug)]
pub struct Routing<T> {
    /// Experts per token k.
    pub topk: usize,
    /// Groups of neighbouring experts (1: none).
    pub groups: usize,
    /// Groups kept.
    pub topk_group: usize,
    /// Divide the chosen scores by (their sum + 1e-20).
    pub norm_topk: bool,
    /// routed_scaling_factor.
    pub scale: T,
}

/// Chooses experts for one row: `logits` and `bias` `[E]`. The answer is (expert, weight) in descending biased score, ties by lowest id.
/// The bias chooses; the weight comes from the unbiased score.
pub fn route<T: Real>(logits: &[T], bias: &[T], r: &Routing<T>) -> Vec<(usize, T)> {
    let scores: Vec<T> = logits.iter().map(|&v| sigmoid(v)).collect();
    let mut biased: Vec<T> = scores.iter().zip(bias).map(|(&s, &b)| s + b).collect();
    mask_groups(&mut biased, r);
    let chosen: Vec<usize> = descending(&biased).into_iter().take(r.topk).collect();
    let sum = chosen.iter().map(|&e| scores[e]).sum::<T>() + T::of(1e-20);
    chosen.into_iter().map(|e| (e, r.scale * if r.norm_topk { scores[e] / sum } else { scores[e] })).collect()
}

/// Masks the experts outside the `topk_group` groups with the largest sum of their two best biased scores.
fn mask_groups<T: Real>(biased: &mut [T], r: &Routing<T>) {
    if r.groups <= 1 || r.topk_group >= r.groups {
        return;
    }
    let size = biased.len() / r.groups;
    let sums: Vec<T> = biased.chunks_exact(size).map(|g| descending(g).into_iter().take(2).map(|e| g[e]).sum()).collect();
    for lost in descending(&sums).into_iter().skip(r.topk_group) {
        biased[lost * size..(lost + 1) * size].fill(T::NEG_INFINITY);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const R: Routing<f64> = Routing { topk: 2, groups: 1, topk_group: 1, norm_topk: false, scale: 2.0 };

    #[test]
    fn bias_chooses_but_does_not_weigh() {
        assert_eq!(route(&[0.0, 0.0, 0.0], &[0.0, 0.1, 0.3], &R), [(2, 1.0), (1, 1.0)]);
        assert_eq!(route(&[0.0, 0.0, 0.0], &[0.0; 3], &R), [(0, 1.0), (1, 1.0)]);
    }

    #[test]
    fn normalised_weights_sum_to_the_scale() {
        let w = route(&[1.0, -2.0, 0.5], &[0.0; 3], &Routing { norm_topk: true, ..R });
        assert_eq!((w[0].0, w[1].0), (0, 2));
        assert!((w[0].1 + w[1].1 - 2.0).abs() < 1e-12);
    }

    #[test]
    fn a_group_is_judged_by_its_two_best() {
        // the single best expert (id 0) sits in a group whose two best are weaker than those of the other group
        let grouped = Routing { groups: 2, topk_group: 1, ..R };
        let ids: Vec<usize> = route(&[0.0; 6], &[0.9, 0.0, 0.0, 0.5, 0.0, 0.6], &grouped).into_iter().map(|(e, _)| e).collect();
        assert_eq!(ids, [5, 3]);
    }

    #[test]
    fn more_experts_asked_than_groups_leave_fills_by_lowest_id() {
        let grouped = Routing { topk: 3, groups: 2, topk_group: 1, ..R };
        let ids: Vec<usize> = route(&[0.0; 4], &[0.0, 0.0, 0.5, 0.6], &grouped).into_iter().map(|(e, _)| e).collect();
        assert_eq!(ids, [3, 2, 0]);
    }
}
