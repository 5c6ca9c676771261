//! Matrix products: `y = x·Wᵀ` with `W` stored `[out, in]`.

use super::Real;

/// Σ a·b, in order.
pub fn dot<T: Real>(a: &[T], b: &[T]) -> T {
    a.iter().zip(b).map(|(&x, &y)| x * y).sum()
}

/// One row: `x` `[in]`, `w` `[out, in]` → `[out]`.
pub fn linear<T: Real>(x: &[T], w: &[T]) -> Vec<T> {
    w.chunks_exact(x.len()).map(|row| dot(x, row)).collect()
}

/// The row as a matrix product sees it in bf16 precision.
pub fn round_bf16<T: Real>(x: &[T]) -> Vec<T> {
    x.iter().map(|v| v.round_bf16()).collect()
}
