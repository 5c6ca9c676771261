//! Norms, softmax and the scalar curves that the other ops are made of.

use super::Real;

/// 1 / (1 + e^−x).
pub fn sigmoid<T: Real>(x: T) -> T {
    T::ONE / (T::ONE + (-x).exp())
}

/// x · sigmoid(x).
pub fn silu<T: Real>(x: T) -> T {
    x * sigmoid(x)
}

/// ln(1 + e^x); x itself above 20.
pub fn softplus<T: Real>(x: T) -> T {
    if x > T::of(20.0) { x } else { x.exp().ln_1p() }
}

/// x / sqrt(mean(x²) + eps), without a weight.
pub fn rms<T: Real>(x: &[T], eps: T) -> Vec<T> {
    let mean = x.iter().map(|&v| v * v).sum::<T>() / T::of(x.len() as f64);
    let scale = T::ONE / (mean + eps).sqrt();
    x.iter().map(|&v| v * scale).collect()
}

/// RMSNorm: [`rms`] times `weight`.
pub fn rms_norm<T: Real>(x: &[T], weight: &[T], eps: T) -> Vec<T> {
    rms(x, eps).into_iter().zip(weight).map(|(v, &w)| v * w).collect()
}

/// LayerNorm with weight and bias, over the population variance.
pub fn layer_norm<T: Real>(x: &[T], weight: &[T], bias: &[T], eps: T) -> Vec<T> {
    let n = T::of(x.len() as f64);
    let mean = x.iter().copied().sum::<T>() / n;
    let variance = x.iter().map(|&v| (v - mean) * (v - mean)).sum::<T>() / n;
    let scale = T::ONE / (variance + eps).sqrt();
    x.iter().zip(weight).zip(bias).map(|((&v, &w), &b)| (v - mean) * scale * w + b).collect()
}

/// x / sqrt(Σx² + 1e-6): the eps sits inside the root.
pub fn l2_normalize<T: Real>(x: &[T]) -> Vec<T> {
    let scale = T::ONE / (x.iter().map(|&v| v * v).sum::<T>() + T::of(1e-6)).sqrt();
    x.iter().map(|&v| v * scale).collect()
}

/// Softmax, shifted by the maximum.
pub fn softmax<T: Real>(x: &[T]) -> Vec<T> {
    let max = x.iter().fold(T::NEG_INFINITY, |m, &v| v.at_least(m));
    let e: Vec<T> = x.iter().map(|&v| (v - max).exp()).collect();
    let sum = e.iter().copied().sum::<T>();
    e.into_iter().map(|v| v / sum).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(a: &[f64], b: &[f64]) {
        assert!(a.len() == b.len() && a.iter().zip(b).all(|(x, y)| (x - y).abs() < 1e-12), "{a:?} {b:?}");
    }

    #[test]
    fn norms_by_hand() {
        // mean square of (3, 4) is 12.5; with eps 3.5 the root is 4
        close(&rms_norm(&[3.0, 4.0], &[1.0, 2.0], 3.5), &[0.75, 2.0]);
        // mean 2, variance 4; with eps 5 the root is 3
        close(&layer_norm(&[0.0, 4.0], &[3.0, 1.5], &[1.0, 0.0], 5.0), &[-1.0, 1.0]);
        close(&l2_normalize(&[3.0, 4.0]), &[3.0 / 25.000001_f64.sqrt(), 4.0 / 25.000001_f64.sqrt()]);
        close(&l2_normalize(&[0.0, 0.0]), &[0.0, 0.0]);
    }

    #[test]
    fn softmax_stays_in_range() {
        close(&softmax(&[1000.0, 1000.0 + 3.0_f64.ln()]), &[0.25, 0.75]);
        close(&softmax(&[5.0]), &[1.0]);
    }

    #[test]
    fn curves_at_their_ends() {
        assert_eq!(sigmoid(-1000.0_f64), 0.0);
        assert_eq!(sigmoid(1000.0_f32), 1.0);
        assert_eq!(softplus(21.0_f64), 21.0);
        assert!((softplus(0.0_f64) - 2.0_f64.ln()).abs() < 1e-15);
        assert_eq!(silu(0.0_f64), 0.0);
    }
}
