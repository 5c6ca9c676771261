//! Sampling of one row of logits.
//!
//! Order: allowed tokens and logit bias, repetition, frequency and presence penalties, temperature, top-k, top-p, min-p. Then the token is the first one, in
//! ascending id, at which the running sum of the kept probabilities exceeds `uniform` times their whole sum. Log-probabilities and ranks
//! are those of the raw logits.

use super::{Real, order::descending};
use crate::{SampleRow, Sampled};

/// Samples (or, with `forced`, judges) one row.
pub fn sample<T: Real>(logits: &[T], row: &SampleRow) -> Sampled {
    let finite = logits.iter().all(|v| v.is_finite() || *v == T::NEG_INFINITY);
    let token = match row.forced {
        Some(token) => token as usize,
        None if !finite => 0,
        None => choose(&adjusted(logits, row), row),
    };
    let log_sum = log_sum_exp(logits);
    let logprob = |id: usize| (logits[id] - log_sum).to_f32();
    let top = descending(logits).into_iter().take(row.logprobs.unwrap_or(0) as usize).map(|id| (id as u32, logprob(id))).collect();
    let rank = 1 + logits.iter().filter(|&&v| v > logits[token]).count();
    Sampled { token: token as u32, logprob: logprob(token), rank: rank as u32, top, finite }
}

/// Logits after mask, bias and penalties.
fn adjusted<T: Real>(logits: &[T], row: &SampleRow) -> Vec<T> {
    let mut out = logits.to_vec();
    for (_, v) in out.iter_mut().enumerate().filter(|(id, _)| !row.allows(*id)) {
        *v = T::NEG_INFINITY;
    }
    for &(id, bias) in &row.bias {
        out[id as usize] += T::of_f32(bias);
    }
    let repetition = T::of_f32(row.repetition_penalty);
    for &(id, count) in &row.seen {
        let v = &mut out[id as usize];
        *v = if *v > T::ZERO { *v / repetition } else { *v * repetition };
        *v -= T::of_f32(row.frequency_penalty) * T::of(f64::from(count));
        *v -= T::of_f32(row.presence_penalty) * if count > 0 { T::ONE } else { T::ZERO };
    }
    out
}

/// The token for adjusted logits: the best one at temperature 0, else a draw from what the cuts keep.
fn choose<T: Real>(logits: &[T], row: &SampleRow) -> usize {
    let order = descending(logits);
    if row.temperature <= 0.0 {
        return order[0];
    }
    let probabilities = kept(logits, &order, row);
    let target = row.uniform * probabilities.iter().sum::<f64>();
    let mut sum = 0.0;
    for (id, &p) in probabilities.iter().enumerate() {
        sum += p;
        if p > 0.0 && sum > target {
            return id;
        }
    }
    order[0]
}

/// Probability per id, not renormalised, with zero for what top-k, top-p and min-p cut. The best token always stays.
fn kept<T: Real>(logits: &[T], order: &[usize], row: &SampleRow) -> Vec<f64> {
    let scaled = |id: usize| ((logits[id] - logits[order[0]]) / T::of_f32(row.temperature)).to_f64().exp();
    let k = if row.top_k == 0 { order.len() } else { (row.top_k as usize).min(order.len()) };
    let mass = order[..k].iter().map(|&id| scaled(id)).sum::<f64>();
    let mut out = vec![0.0; logits.len()];
    let mut before = 0.0;
    for &id in &order[..k] {
        let p = scaled(id);
        // top-p keeps the shortest run of best tokens whose mass reaches it; min-p is relative to the best token, whose p is 1 here
        if id != order[0] && ((row.top_p < 1.0 && before >= f64::from(row.top_p) * mass) || p < f64::from(row.min_p)) {
            break;
        }
        out[id] = p;
        before += p;
    }
    out
}

/// ln Σ e^x.
fn log_sum_exp<T: Real>(logits: &[T]) -> T {
    let max = logits.iter().fold(T::NEG_INFINITY, |m, &v| v.at_least(m));
    logits.iter().map(|&v| (v - max).exp()).sum::<T>().ln() + max
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row() -> SampleRow {
        SampleRow::greedy(0)
    }

    /// The tokens that a sweep over `uniform` reaches.
    fn reachable(logits: &[f64], row: &SampleRow) -> Vec<u32> {
        let mut seen: Vec<u32> =
            (0..1000).map(|i| sample(logits, &SampleRow { uniform: f64::from(i) / 1000.0, ..row.clone() }).token).collect();
        assert!(seen.is_sorted(), "tokens come in ascending id");
        seen.dedup();
        seen
    }

    #[test]
    fn greedy_takes_the_lowest_id_among_equals() {
        let s = sample(&[1.0, 3.0, 3.0, 2.0], &SampleRow { logprobs: Some(3), ..row() });
        assert_eq!((s.token, s.rank, s.finite), (1, 1, true));
        assert_eq!(s.top.iter().map(|t| t.0).collect::<Vec<_>>(), [1, 2, 3]);
        let log_sum = (1f64.exp() + 2.0 * 3f64.exp() + 2f64.exp()).ln();
        assert!((f64::from(s.logprob) - (3.0 - log_sum)).abs() < 1e-6);
    }

    #[test]
    fn forced_tokens_are_judged_by_raw_logits() {
        let s = sample(&[1.0, 3.0, 3.0, 2.0], &SampleRow { forced: Some(0), bias: vec![(0, 100.0)], temperature: 7.0, ..row() });
        assert_eq!((s.token, s.rank), (0, 4));
        assert!((f64::from(s.logprob) + 2.9).abs() < 0.1);
    }

    #[test]
    fn bias_and_penalties() {
        let logits = [2.0, 1.9, -1.0, 0.0];
        let token = |r: SampleRow| sample(&logits, &r).token;
        assert_eq!(token(SampleRow { bias: vec![(0, f32::NEG_INFINITY)], ..row() }), 1);
        assert_eq!(token(SampleRow { bias: vec![(3, 2.5)], ..row() }), 3);
        assert_eq!(token(SampleRow { allowed: Some(vec![0b1100]), ..row() }), 3);
        assert_eq!(token(SampleRow { allowed: Some(vec![0b0100]), bias: vec![(1, 100.0)], temperature: 2.0, uniform: 0.9, ..row() }), 2);
        assert_eq!(token(SampleRow { repetition_penalty: 1.1, seen: vec![(0, 0)], ..row() }), 1);
        assert_eq!(token(SampleRow { presence_penalty: 0.2, seen: vec![(0, 0)], ..row() }), 0, "presence counts the output alone");
        assert_eq!(token(SampleRow { presence_penalty: 0.2, seen: vec![(0, 1)], ..row() }), 1);
        assert_eq!(token(SampleRow { frequency_penalty: 0.04, seen: vec![(0, 3)], ..row() }), 1);
        assert_eq!(token(SampleRow { frequency_penalty: 0.04, seen: vec![(0, 2)], ..row() }), 0);
    }

    #[test]
    fn cuts_keep_what_they_should() {
        let logits: Vec<f64> = [0.1, 0.4, 0.2, 0.3].iter().map(|p: &f64| p.ln()).collect();
        let warm = SampleRow { temperature: 1.0, ..row() };
        assert_eq!(reachable(&logits, &warm), [0, 1, 2, 3]);
        assert_eq!(reachable(&logits, &SampleRow { top_k: 2, ..warm.clone() }), [1, 3]);
        assert_eq!(reachable(&logits, &SampleRow { top_k: 9, ..warm.clone() }), [0, 1, 2, 3]);
        assert_eq!(reachable(&logits, &SampleRow { top_p: 0.65, ..warm.clone() }), [1, 3]);
        assert_eq!(reachable(&logits, &SampleRow { top_p: 0.75, ..warm.clone() }), [1, 2, 3]);
        assert_eq!(reachable(&logits, &SampleRow { top_p: 0.0, ..warm.clone() }), [1], "the best token always stays");
        assert_eq!(reachable(&logits, &SampleRow { min_p: 0.6, ..warm.clone() }), [1, 3]);
        // top-p works on what top-k left: 0.4/0.7 < 0.6 but 0.4/0.4 is enough
        assert_eq!(reachable(&logits, &SampleRow { top_k: 2, top_p: 0.56, ..warm.clone() }), [1]);
        assert_eq!(reachable(&logits, &SampleRow { temperature: 1e-4, ..warm }), [1]);
    }

    #[test]
    fn a_draw_is_the_inverse_of_the_running_sum() {
        let logits: Vec<f64> = [0.25, 0.5, 0.25].iter().map(|p: &f64| p.ln()).collect();
        let at = |uniform| sample(&logits, &SampleRow { temperature: 1.0, uniform, ..row() }).token;
        assert_eq!([at(0.0), at(0.2499), at(0.2501), at(0.7499), at(0.7501), at(0.9999)], [0, 0, 1, 1, 2, 2]);
    }

    #[test]
    fn non_finite_rows_are_reported() {
        for bad in [f64::NAN, f64::INFINITY] {
            assert!(!sample(&[0.0, bad, 1.0], &row()).finite);
        }
        assert!(sample(&[0.0, f64::NEG_INFINITY], &row()).finite);
    }
}
