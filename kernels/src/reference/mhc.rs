//! mHC, manifold-constrained hyper-connections: N residual streams, read by `pre`, written by `post` and mixed by `comb`.

use super::{
    Real,
    linear::linear,
    norm::{rms, sigmoid, softmax},
};

/// Sizes and constants of a site, in the reference's number type.
#[derive(Clone, Copy, Debug)]
pub struct Site<T> {
    /// Streams N.
    pub streams: usize,
    /// rms_norm_eps, for the norm of the flattened streams.
    pub rms_eps: T,
    /// hc_eps: in `pre`, in `comb` and in every Sinkhorn denominator.
    pub hc_eps: T,
    /// Sinkhorn iterations in all: one column pass, then `iters − 1` pairs of row and column passes.
    pub iters: usize,
}

/// The gates of one token at one site.
#[derive(Clone, Debug)]
pub struct Gates<T> {
    /// `[N]`.
    pub pre: Vec<T>,
    /// `[N]`.
    pub post: Vec<T>,
    /// `[N, N]`, row-major.
    pub comb: Vec<T>,
}

/// Computes the gates of one token: `streams` `[N·D]`, `fn_` `[N(N+2), N·D]`, `base` `[N(N+2)]`, `scale` `[3]`.
pub fn gates<T: Real>(streams: &[T], fn_: &[T], base: &[T], scale: &[T], site: &Site<T>) -> Gates<T> {
    let n = site.streams;
    let w = linear(&rms(streams, site.rms_eps), fn_);
    let scaled = |i: usize, part: usize| w[i] * scale[part] + base[i];
    let pre = (0..n).map(|i| sigmoid(scaled(i, 0)) + site.hc_eps).collect();
    let post = (n..2 * n).map(|i| T::of(2.0) * sigmoid(scaled(i, 1))).collect();
    let logits: Vec<T> = (2 * n..2 * n + n * n).map(|i| scaled(i, 2)).collect();
    let mut comb: Vec<T> = logits.chunks_exact(n).flat_map(softmax).map(|v| v + site.hc_eps).collect();
    sinkhorn(&mut comb, site);
    Gates { pre, post, comb }
}

/// Sinkhorn: columns once, then rows and columns `iters − 1` times.
fn sinkhorn<T: Real>(comb: &mut [T], site: &Site<T>) {
    if site.iters == 0 {
        return;
    }
    divide_by_sums(comb, site.streams, 1, site.hc_eps);
    for _ in 1..site.iters {
        divide_by_sums(comb, 1, site.streams, site.hc_eps);
        divide_by_sums(comb, site.streams, 1, site.hc_eps);
    }
}

/// Divides each line of the square matrix by (its sum + eps). A line's elements are `step` apart; lines start `between` apart, so
/// (N, 1) is columns and (1, N) is rows.
fn divide_by_sums<T: Real>(m: &mut [T], step: usize, between: usize, eps: T) {
    let n = step.max(between);
    for line in 0..n {
        let at = |i: usize| line * between + i * step;
        let sum = (0..n).map(|i| m[at(i)]).sum::<T>() + eps;
        (0..n).for_each(|i| m[at(i)] = m[at(i)] / sum);
    }
}

/// What the sublayer reads: `Σ_n pre[n]·S[n]`, `[D]`.
pub fn read<T: Real>(streams: &[T], pre: &[T]) -> Vec<T> {
    let d = streams.len() / pre.len();
    (0..d).map(|i| pre.iter().enumerate().map(|(n, &p)| p * streams[n * d + i]).sum()).collect()
}

/// The end of the sublayer: `S'[m] = post[m]·y + Σ_n comb[n, m]·S[n]`, `[N·D]`. `comb` is used transposed.
pub fn post<T: Real>(streams: &[T], y: &[T], post: &[T], comb: &[T]) -> Vec<T> {
    let (n, d) = (post.len(), y.len());
    let mixed = |m: usize, i: usize| (0..n).map(|k| comb[k * n + m] * streams[k * d + i]).sum::<T>();
    (0..n).flat_map(|m| (0..d).map(move |i| (m, i))).map(|(m, i)| post[m] * y[i] + mixed(m, i)).collect()
}

/// The plain mean over streams that ends the trunk, `[D]`.
pub fn mean<T: Real>(streams: &[T], n: usize) -> Vec<T> {
    let d = streams.len() / n;
    (0..d).map(|i| (0..n).map(|k| streams[k * d + i]).sum::<T>() / T::of(n as f64)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_sinkhorn_iteration_is_one_column_pass() {
        let site = Site { streams: 2, rms_eps: 1e-5, hc_eps: 0.5, iters: 1 };
        let mut m = [1.0, 2.0, 2.5, 3.5_f64];
        sinkhorn(&mut m, &site);
        assert_eq!(m, [0.25, 2.0 / 6.0, 2.5 / 4.0, 3.5 / 6.0]);
    }

    #[test]
    fn rows_and_columns_are_told_apart() {
        let mut rows = [1.0, 3.0, 2.0, 6.0_f64];
        divide_by_sums(&mut rows, 1, 2, 0.0);
        assert_eq!(rows, [0.25, 0.75, 0.25, 0.75]);
        let mut columns = [1.0, 3.0, 3.0, 1.0_f64];
        divide_by_sums(&mut columns, 2, 1, 0.0);
        assert_eq!(columns, [0.25, 0.75, 0.75, 0.25]);
        divide_by_sums(&mut [4.0_f64], 1, 1, 0.0);
    }

    #[test]
    fn comb_is_used_transposed() {
        // stream 0 goes wholly to stream 1, stream 1 to none
        let s = post(&[1.0, 2.0, 10.0, 20.0_f64], &[100.0, 200.0], &[1.0, 0.0], &[0.0, 1.0, 0.0, 0.0]);
        assert_eq!(s, [100.0, 200.0, 1.0, 2.0]);
        assert_eq!(read(&[1.0, 2.0, 10.0, 20.0_f64], &[1.0, 0.5]), [6.0, 12.0]);
        assert_eq!(mean(&[1.0, 2.0, 3.0, 6.0_f64], 2), [2.0, 4.0]);
    }

    #[test]
    fn gates_of_zero_weights_come_from_the_base() {
        let site = Site { streams: 2, rms_eps: 1e-5, hc_eps: 1e-6, iters: 20 };
        let g = gates(&[1.0, -2.0_f64], &[0.0; 16], &[0.0; 8], &[1.0; 3], &site);
        assert_eq!(g.pre, [0.5 + 1e-6; 2]);
        assert_eq!(g.post, [1.0; 2]);
        assert!(g.comb.iter().all(|c| (c - 0.5).abs() < 1e-6), "{:?}", g.comb);
    }
}
