//! MLA without positions, over chosen latent rows: with k and v made for every row (the meaning), and absorbed (what serves).

use super::{
    Real,
    linear::{dot, linear},
    norm::softmax,
};

/// Sizes of one attention head.
#[derive(Clone, Copy, Debug)]
pub struct Head {
    /// q and k width.
    pub qk: usize,
    /// v width.
    pub v: usize,
}

/// The meaning: `k_h = c·Wk[h]`, `v_h = c·Wv[h]` for every latent row `c`, then softmax attention at scale qk^−½.
///
/// `q` `[heads·qk]`; `kv_b` `[heads·(qk + v), latent]`, per head k rows, then v rows; the answer is `[heads·v]`. No rows: zeros.
pub fn attend_naive<T: Real>(q: &[T], rows: &[&[T]], kv_b: &[T], head: Head) -> Vec<T> {
    attend(q, rows, kv_b, head, |q, wk, wv| {
        let scores = rows.iter().map(|c| dot(q, &linear(c, wk)) * scale::<T>(head)).collect::<Vec<_>>();
        let values: Vec<Vec<T>> = rows.iter().map(|c| linear(c, wv)).collect();
        weighted_sum(&softmax(&scores), values.iter().map(Vec::as_slice))
    })
}

/// The same, absorbed: q is folded through Wk onto the latent, the weighted latent goes out through Wv.
pub fn attend_absorbed<T: Real>(q: &[T], rows: &[&[T]], kv_b: &[T], head: Head) -> Vec<T> {
    attend(q, rows, kv_b, head, |q, wk, wv| {
        let folded = weighted_sum(q, wk.chunks_exact(rows[0].len()));
        let scores = rows.iter().map(|c| dot(&folded, c) * scale::<T>(head)).collect::<Vec<_>>();
        linear(&weighted_sum(&softmax(&scores), rows.iter().copied()), wv)
    })
}

/// Runs `one` for each head with its q, its k rows and its v rows of `kv_b`.
fn attend<T: Real>(q: &[T], rows: &[&[T]], kv_b: &[T], head: Head, one: impl Fn(&[T], &[T], &[T]) -> Vec<T>) -> Vec<T> {
    let heads = q.len() / head.qk;
    let Some(latent) = rows.first().map(|c| c.len()) else { return vec![T::ZERO; heads * head.v] };
    q.chunks_exact(head.qk)
        .zip(kv_b.chunks_exact((head.qk + head.v) * latent))
        .flat_map(|(q, w)| {
            let (wk, wv) = w.split_at(head.qk * latent);
            one(q, wk, wv)
        })
        .collect()
}

fn scale<T: Real>(head: Head) -> T {
    T::ONE / T::of(head.qk as f64).sqrt()
}

/// `Σ_i weights[i]·rows[i]`.
fn weighted_sum<'a, T: Real>(weights: &[T], rows: impl Iterator<Item = &'a [T]>) -> Vec<T> {
    let mut sum = Vec::new();
    for (&w, row) in weights.iter().zip(rows) {
        sum.resize(row.len(), T::ZERO);
        sum.iter_mut().zip(row).for_each(|(s, &x)| *s += w * x);
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absorbed_is_the_naive_form() {
        let noise = |n: usize, salt: usize| (0..n).map(|i| ((i * 7 + salt) as f64 * 1.7).sin()).collect::<Vec<_>>();
        let (heads, head, latent) = (3, Head { qk: 5, v: 4 }, 7);
        let (q, kv_b, cache) = (noise(heads * 5, 1), noise(heads * 9 * latent, 2), noise(6 * latent, 3));
        for count in 0..=6 {
            let rows: Vec<&[f64]> = cache.chunks_exact(latent).take(count).collect();
            let (a, b) = (attend_naive(&q, &rows, &kv_b, head), attend_absorbed(&q, &rows, &kv_b, head));
            assert_eq!(a.len(), heads * head.v);
            assert!(a.iter().zip(&b).all(|(x, y)| (x - y).abs() < 1e-12), "{a:?} {b:?}");
        }
    }

    #[test]
    fn one_row_gets_all_the_weight() {
        // latent 1: k = 3·c, v = (2·c, 5·c)
        assert_eq!(attend_naive(&[9.0_f64], &[&[4.0]], &[3.0, 2.0, 5.0], Head { qk: 1, v: 2 }), [8.0, 20.0]);
    }
}
