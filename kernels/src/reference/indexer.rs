//! The indexer: which token positions a query attends to. Keys are pooled over `kpool` tokens counted from the sequence's start.

use super::{
    Real,
    linear::dot,
    norm::{layer_norm, softmax},
    order::descending,
};

/// The raw index key of one token: a true LayerNorm with bias, eps 1e-6.
pub fn key<T: Real>(raw: &[T], weight: &[T], bias: &[T]) -> Vec<T> {
    layer_norm(raw, weight, bias, T::of(1e-6))
}

/// The pooled key of a complete pool: per channel, softmax over the pool's tokens of (gate + ape), then the weighted sum of keys.
/// `keys`, `gates`, `ape` are `[kpool, dim]`.
pub fn pooled_key<T: Real>(keys: &[T], gates: &[T], ape: &[T], kpool: usize) -> Vec<T> {
    let dim = keys.len() / kpool;
    (0..dim)
        .map(|c| {
            let logits: Vec<T> = (0..kpool).map(|t| gates[t * dim + c] + ape[t * dim + c]).collect();
            softmax(&logits).into_iter().enumerate().map(|(t, p)| p * keys[t * dim + c]).sum()
        })
        .collect()
}

/// Score of a pool: `Σ_h w[h]·heads^−½ · relu(iq[h]·pk · dim^−½)`. `iq` `[heads, dim]`, `weights` `[heads]` as projected.
pub fn pool_score<T: Real>(iq: &[T], weights: &[T], pooled: &[T]) -> T {
    let per_head = T::ONE / T::of(weights.len() as f64).sqrt();
    let per_dim = T::ONE / T::of(pooled.len() as f64).sqrt();
    iq.chunks_exact(pooled.len()).zip(weights).map(|(q, &w)| w * per_head * (dot(q, pooled) * per_dim).at_least(T::ZERO)).sum()
}

/// How many tokens may be chosen, and how.
#[derive(Clone, Copy, Debug)]
pub struct Selection {
    /// Tokens per pool.
    pub kpool: usize,
    /// index_topk, in tokens.
    pub topk: usize,
    /// Append the tokens of the incomplete pool.
    pub always_tail: bool,
}

impl Selection {
    /// Largest number of positions one query can select.
    pub fn width(&self) -> usize {
        self.topk + if self.always_tail { self.kpool - 1 } else { 0 }
    }

    /// Whether a query that sees `visible` tokens takes them all, so that no pool needs a score.
    pub fn takes_all(&self, visible: usize) -> bool {
        visible <= self.width()
    }
}

/// The positions that a query at position `t` attends to, ascending. `score(p)` is asked only where not everything fits, for complete
/// pools p (last token ≤ t). Among equal scores the lowest pool comes first; a NaN score ranks last.
pub fn select<T: Real>(t: usize, s: &Selection, score: impl Fn(usize) -> T) -> Vec<usize> {
    let visible = t + 1;
    if s.takes_all(visible) {
        return (0..visible).collect();
    }
    let pools = visible / s.kpool;
    let scores: Vec<T> = (0..pools).map(score).collect();
    let mut chosen: Vec<usize> = descending(&scores).into_iter().take(s.topk / s.kpool).collect();
    chosen.sort_unstable();
    let mut positions: Vec<usize> = chosen.into_iter().flat_map(|p| p * s.kpool..(p + 1) * s.kpool).collect();
    if s.always_tail {
        positions.extend(pools * s.kpool..visible);
    }
    positions
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: Selection = Selection { kpool: 2, topk: 4, always_tail: true };

    #[test]
    fn everything_that_fits_is_taken() {
        for t in 0..5 {
            assert_eq!(select(t, &S, |_| -> f64 { panic!("no score is needed") }), (0..=t).collect::<Vec<_>>());
        }
    }

    #[test]
    fn best_pools_and_the_tail() {
        let scores = [1.0, 5.0, 2.0, 9.0_f64];
        assert_eq!(select(5, &S, |p| scores[p]), [2, 3, 4, 5]);
        assert_eq!(select(6, &S, |p| scores[p]), [2, 3, 4, 5, 6]);
        assert_eq!(select(7, &S, |p| scores[p]), [2, 3, 6, 7]);
        let no_tail = Selection { always_tail: false, ..S };
        assert_eq!(select(6, &no_tail, |p| scores[p]), [2, 3, 4, 5]);
        assert_eq!(select(3, &no_tail, |p| scores[p]), [0, 1, 2, 3]);
    }

    #[test]
    fn ties_go_to_the_lowest_pool() {
        assert_eq!(select(9, &S, |p| if p == 4 { 1.0 } else { 0.0_f64 }), [0, 1, 8, 9]);
        assert_eq!(select(9, &S, |p| if p == 0 { f64::NAN } else { 0.0 }), [2, 3, 4, 5]);
    }

    #[test]
    fn pooling_by_hand() {
        // gates (+ape) equal in channel 0, ln 3 apart in channel 1
        let pk = pooled_key(&[1.0, 4.0, 3.0, 8.0_f64], &[0.0, 0.0, -1.0, 3.0_f64.ln()], &[0.0, 0.0, 1.0, 0.0], 2);
        assert!((pk[0] - 2.0).abs() < 1e-12 && (pk[1] - 7.0).abs() < 1e-12, "{pk:?}");
        // relu before the head weight: the negative head adds nothing, whatever its weight
        let score = pool_score(&[4.0, 0.0, 0.0, 0.0, -4.0, 0.0, 0.0, 0.0_f64], &[2.0, -7.0], &[3.0, 0.0, 0.0, 0.0]);
        assert!((score - 2.0 / 2.0_f64.sqrt() * 6.0).abs() < 1e-12, "{score}");
    }
}
