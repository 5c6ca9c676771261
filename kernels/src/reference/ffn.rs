//! The gated MLP (dense, shared and routed experts alike) and an expert shard's additive partial.

use super::{
    Real,
    linear::{linear, round_bf16},
    norm::silu,
};
use crate::Precision;

/// `silu(min(gate, limit)) · clamp(up, ±limit)`: the gate is clamped from above only, before SiLU.
pub fn swiglu<T: Real>(gate: T, up: T, limit: Option<T>) -> T {
    match limit {
        Some(l) => silu(gate.at_most(l)) * up.at_least(-l).at_most(l),
        None => silu(gate) * up,
    }
}

/// The weights of one gated MLP, or of the intermediate slice of it that a shard owns.
#[derive(Clone, Copy, Debug)]
pub struct Mlp<'a, T> {
    /// `[I, D]`.
    pub gate: &'a [T],
    /// `[I, D]`.
    pub up: &'a [T],
    /// `[D, I]`.
    pub down: &'a [T],
}

/// One row through a gated MLP: `x` `[D]` → `[D]`. In bf16 precision both products see bf16 inputs.
pub fn mlp<T: Real>(x: &[T], w: &Mlp<'_, T>, limit: Option<T>, precision: Precision) -> Vec<T> {
    let input = |x: &[T]| match precision {
        Precision::F32 => x.to_vec(),
        Precision::Bf16 => round_bf16(x),
    };
    let x = input(x);
    let hidden: Vec<T> = linear(&x, w.gate).into_iter().zip(linear(&x, w.up)).map(|(g, u)| swiglu(g, u, limit)).collect();
    linear(&input(&hidden), w.down)
}

/// A shard's partial for one row: `Σ weight·expert(x)` over the chosen experts that the shard holds, in ascending expert id.
/// `expert(id)` is `None` for an expert (or an id) that is not held.
pub fn partial<'a, T: Real>(
    x: &[T],
    chosen: &[(i32, T)],
    expert: impl Fn(i32) -> Option<Mlp<'a, T>>,
    limit: Option<T>,
    precision: Precision,
) -> Vec<T> {
    let mut held: Vec<(i32, T, Mlp<'_, T>)> = chosen.iter().filter_map(|&(id, w)| expert(id).map(|e| (id, w, e))).collect();
    held.sort_by_key(|&(id, ..)| id);
    let mut sum = vec![T::ZERO; x.len()];
    for (_, weight, e) in held {
        let y = mlp(x, &e, limit, precision);
        sum.iter_mut().zip(y).for_each(|(s, y)| *s += weight * y);
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gate_is_clamped_from_above_only() {
        assert_eq!(swiglu(20.0_f64, 20.0, Some(10.0)), silu(10.0) * 10.0);
        assert_eq!(swiglu(-20.0_f64, -20.0, Some(10.0)), silu(-20.0) * -10.0);
        assert_eq!(swiglu(20.0_f64, 20.0, None), silu(20.0) * 20.0);
        assert!(swiglu(f32::NAN, 1.0, Some(10.0)).is_nan() && swiglu(1.0, f32::NAN, Some(10.0)).is_nan());
    }

    #[test]
    fn intermediate_slices_add_up() {
        let noise = |n: usize, salt: usize| (0..n).map(|i| ((i * 3 + salt) as f64).sin()).collect::<Vec<_>>();
        let (x, gate, up, down) = (noise(3, 1), noise(12, 2), noise(12, 3), noise(12, 4));
        let whole = mlp(&x, &Mlp { gate: &gate, up: &up, down: &down }, Some(1.0), Precision::F32);
        let slice = |from: usize, to: usize| {
            let down: Vec<f64> = down.chunks_exact(4).flat_map(|r| r[from..to].to_vec()).collect();
            mlp(&x, &Mlp { gate: &gate[from * 3..to * 3], up: &up[from * 3..to * 3], down: &down }, Some(1.0), Precision::F32)
        };
        for ((w, a), b) in whole.iter().zip(slice(0, 1)).zip(slice(1, 4)) {
            assert!((w - a - b).abs() < 1e-12);
        }
    }

    #[test]
    fn absent_experts_add_nothing() {
        let w = [1.0_f64];
        let e = |id: i32| (id == 7).then_some(Mlp { gate: &w, up: &w, down: &w });
        assert_eq!(partial(&[2.0], &[(3, 1.0), (-1, 1.0)], e, None, Precision::F32), [0.0]);
        assert_eq!(partial(&[2.0], &[(3, 1.0), (7, 0.5)], e, None, Precision::F32), [0.5 * silu(2.0) * 2.0]);
    }
}
