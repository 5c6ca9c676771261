//! Whether the columns of a matrix lie in the order that the rest of the model expects.
//!
//! A decoder that takes nibbles in another order permutes columns inside of blocks: norms and histograms stay as they are. But columns
//! have companions. Column `i` of an expert's down_proj meets row `i` of its gate and up (the same hidden unit), and column `d` of gate and up
//! meets column `d` of the router (the same input). In trained weights the norms of companions are correlated; under a permutation the
//! correlation moves to that permutation, which names the fault.

/// A name, and the true place of a decoded column.
type Permutation = (&'static str, fn(usize) -> usize);

/// The orders that confusions of packing lead to: name, and the place that a decoded column truly has. Each is a permutation of blocks of
/// at most 64.
const PERMUTATIONS: [Permutation; 7] = [
    ("as decoded", |i| i),
    ("neighbours swapped (low and high nibble of a byte)", |i| i ^ 1),
    ("halves of 16 swapped", |i| i ^ 8),
    ("halves of 32 swapped", |i| i ^ 16),
    ("halves of 64 swapped", |i| i ^ 32),
    ("pairs read as halves of 32", |i| i / 32 * 32 + if i % 32 < 16 { 2 * (i % 32) } else { 2 * (i % 32 - 16) + 1 }),
    ("halves of 32 read as pairs", |i| i / 32 * 32 + if i.is_multiple_of(2) { i % 32 / 2 } else { 16 + i % 32 / 2 }),
];

/// Correlation that is no accident, in standard deviations of an uncorrelated sample.
const SIGNIFICANT: f64 = 6.0;
/// How much better than the decoded order another one must fit.
const CLEARLY: f64 = 0.08;

/// Correlations of companions, under each permutation; summed over matrices.
#[derive(Clone, Debug, Default)]
pub(super) struct Sums {
    correlation: [f64; PERMUTATIONS.len()],
    matrices: usize,
    columns: usize,
}

impl Sums {
    /// Takes in one matrix: logarithms of its column norms, and of their companions.
    pub(super) fn observe(&mut self, columns: &[f64], companions: &[f64]) {
        if columns.len() != companions.len() || !columns.len().is_multiple_of(64) {
            return;
        }
        for (sum, (_, place)) in self.correlation.iter_mut().zip(PERMUTATIONS) {
            let moved: Vec<f64> = (0..columns.len()).map(|i| companions[place(i)]).collect();
            *sum += correlation(columns, &moved);
        }
        self.matrices += 1;
        self.columns += columns.len();
    }

    pub(super) fn add(&mut self, other: &Self) {
        self.correlation.iter_mut().zip(other.correlation).for_each(|(a, b)| *a += b);
        self.matrices += other.matrices;
        self.columns += other.columns;
    }

    pub(super) fn judge(&self, what: &'static str) -> Order {
        let mean = self.correlation.map(|c| c / self.matrices.max(1) as f64);
        let best = (0..mean.len()).max_by(|a, b| mean[*a].abs().total_cmp(&mean[*b].abs())).unwrap_or(0);
        let noise = 1.0 / (self.columns.max(1) as f64).sqrt();
        Order { what, as_decoded: mean[0], best: PERMUTATIONS[best].0, best_correlation: mean[best], noise }
    }
}

/// How the columns of some matrices fit their companions.
#[derive(Clone, Debug)]
pub struct Order {
    /// Which matrices.
    pub what: &'static str,
    /// Mean correlation in the decoded order, −1 to 1.
    pub as_decoded: f64,
    /// The order that fits best.
    pub best: &'static str,
    /// Its mean correlation.
    pub best_correlation: f64,
    /// Standard deviation of the correlation of unrelated columns.
    pub noise: f64,
}

/// What an [`Order`] says.
pub(super) enum Verdict {
    /// The decoded order fits.
    Sound,
    /// Another one fits better.
    Wrong(String),
    /// None fits.
    Unknown(String),
}

impl Order {
    pub(super) fn verdict(&self) -> Verdict {
        let (own, best) = (self.as_decoded.abs(), self.best_correlation.abs());
        if best < SIGNIFICANT * self.noise {
            let what = self.what;
            return Verdict::Unknown(format!(
                "{what}: column norms show no structure (untrained weights?): the order of elements cannot be judged"
            ));
        }
        if best > own + CLEARLY.max(SIGNIFICANT * self.noise) {
            return Verdict::Wrong(format!(
                "{}: elements are in another order than their types say: {} (correlation of column norms with their companions {:.2}, as decoded {:.2})",
                self.what, self.best, self.best_correlation, self.as_decoded
            ));
        }
        Verdict::Sound
    }
}

fn correlation(a: &[f64], b: &[f64]) -> f64 {
    let n = a.len() as f64;
    let (ma, mb) = (a.iter().sum::<f64>() / n, b.iter().sum::<f64>() / n);
    let (mut ab, mut aa, mut bb) = (0.0, 0.0, 0.0);
    for (x, y) in a.iter().zip(b) {
        let (x, y) = (x - ma, y - mb);
        ab += x * y;
        aa += x * x;
        bb += y * y;
    }
    if aa * bb > 0.0 { ab / (aa * bb).sqrt() } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_order_is_a_permutation_and_is_recognised() {
        let stream = crate::synthetic::hash::Stream::new(1, "norms");
        let norms: Vec<f64> = (0..256).map(|i| stream.normal(i)).collect();
        for (name, place) in PERMUTATIONS {
            let mut hit = vec![false; 256];
            (0..256).for_each(|i| hit[place(i)] = true);
            assert!(hit.iter().all(|h| *h), "{name}");
            let decoded: Vec<f64> = (0..256).map(|i| norms[place(i)]).collect();
            let mut sums = Sums::default();
            sums.observe(&decoded, &norms);
            let order = sums.judge("x");
            assert_eq!(order.best, name);
            assert_eq!(matches!(order.verdict(), Verdict::Sound), name == "as decoded");
        }
        let mut sums = Sums::default();
        sums.observe(&norms, &vec![1.0; 256]);
        assert!(matches!(sums.judge("x").verdict(), Verdict::Unknown(_)));
    }
}
