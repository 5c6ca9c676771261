//! Ranking: the one rule for ties that the indexer, the router and the sampler share.

use std::cmp::Ordering;

use super::Real;

/// Indices by descending value; equals by lowest index, NaN last (with −∞).
pub fn descending<T: Real>(values: &[T]) -> Vec<usize> {
    let key = |i: usize| if values[i].is_nan() { T::NEG_INFINITY } else { values[i] };
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|&a, &b| key(b).partial_cmp(&key(a)).unwrap_or(Ordering::Equal)); // stable: lower indices stay first
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equals_by_lowest_index_and_nan_last() {
        assert_eq!(descending(&[1.0, f64::NAN, 3.0, 1.0, 3.0]), [2, 4, 0, 3, 1]);
        assert_eq!(descending(&[-0.0_f32, 0.0]), [0, 1]);
    }
}
