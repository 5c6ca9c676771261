//! KDA (Kimi delta attention), token by token: convolution, decay, delta rule, gated norm. The chunked form is in `kda_chunk`.

use super::{
    Real,
    norm::{l2_normalize, rms_norm, sigmoid, silu, softplus},
};

/// Causal depthwise convolution and SiLU of one token. `x` `[C]`; `weight` `[C, taps]`, its last tap for the current token; `carry`
/// `[taps − 1, C]` holds the tokens before, oldest first (zeros before the sequence), and is moved on by one.
pub fn conv_silu<T: Real>(x: &[T], weight: &[T], carry: &mut [T]) -> Vec<T> {
    let channels = x.len();
    let taps = weight.len() / channels;
    let out = (0..channels)
        .map(|c| {
            let before = (0..taps - 1).map(|t| weight[c * taps + t] * carry[t * channels + c]).sum::<T>();
            silu(before + weight[c * taps + taps - 1] * x[c])
        })
        .collect();
    if taps > 1 {
        carry.copy_within(channels.., 0);
        carry[(taps - 2) * channels..].copy_from_slice(x);
    }
    out
}

/// Log decay per channel (≤ 0): `lower_bound · sigmoid(e^a_log · (f + dt_bias))`, or `−e^a_log · softplus(f + dt_bias)` where the
/// config has no bound. `f`, `dt_bias` `[H·Dh]`, `a_log` `[H]`.
pub fn log_decay<T: Real>(f: &[T], dt_bias: &[T], a_log: &[T], lower_bound: Option<T>) -> Vec<T> {
    let head_dim = f.len() / a_log.len();
    f.iter()
        .zip(dt_bias)
        .enumerate()
        .map(|(i, (&f, &bias))| {
            let a = a_log[i / head_dim].exp();
            match lower_bound {
                Some(bound) => bound * sigmoid(a * (f + bias)),
                None => -a * softplus(f + bias),
            }
        })
        .collect()
}

/// One head's inputs for one token, after convolution: q and k still unnormalised.
#[derive(Clone, Debug)]
pub struct HeadToken<T> {
    /// Query `[Dh]`.
    pub q: Vec<T>,
    /// Key `[Dh]`.
    pub k: Vec<T>,
    /// Value `[Dh]`.
    pub v: Vec<T>,
    /// Log decay `[Dh]`.
    pub g: Vec<T>,
    /// Write strength in (0, 1).
    pub beta: T,
}

impl<T: Real> HeadToken<T> {
    /// q and k as the recurrence uses them: unit length, q scaled by Dh^−½.
    pub fn normalized(&self) -> (Vec<T>, Vec<T>) {
        let scale = T::ONE / T::of(self.q.len() as f64).sqrt();
        (l2_normalize(&self.q).into_iter().map(|v| v * scale).collect(), l2_normalize(&self.k))
    }
}

/// One step of the delta rule for one head: `state` `[Dh keys, Dh values]` moves on, the answer is o `[Dh]`.
pub fn recurrent_step<T: Real>(token: &HeadToken<T>, state: &mut [T]) -> Vec<T> {
    let d = token.v.len();
    let (q, k) = token.normalized();
    for (row, &g) in state.chunks_exact_mut(d).zip(&token.g) {
        let decay = g.exp();
        row.iter_mut().for_each(|s| *s *= decay);
    }
    let u: Vec<T> = (0..d).map(|j| token.beta * (token.v[j] - column_dot(&k, state, j))).collect();
    for (row, &k) in state.chunks_exact_mut(d).zip(&k) {
        row.iter_mut().zip(&u).for_each(|(s, &u)| *s += k * u);
    }
    (0..d).map(|j| column_dot(&q, state, j)).collect()
}

/// `Σ_i x[i]·state[i, column]`.
pub(super) fn column_dot<T: Real>(x: &[T], state: &[T], column: usize) -> T {
    x.iter().zip(state.chunks_exact(x.len())).map(|(&x, row)| x * row[column]).sum()
}

/// The end of a head: `rms_norm(o, weight, eps) ⊙ sigmoid(gate)`.
pub fn gated_norm<T: Real>(o: &[T], weight: &[T], eps: T, gate: &[T]) -> Vec<T> {
    rms_norm(o, weight, eps).into_iter().zip(gate).map(|(o, &g)| o * sigmoid(g)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_tap_meets_the_current_token() {
        let (weight, mut carry) = ([1.0, 10.0, 100.0_f64], vec![0.0; 2]);
        let outs: Vec<f64> = [1.0, 2.0, 3.0].iter().map(|&x| conv_silu(&[x], &weight, &mut carry)[0]).collect();
        assert_eq!(outs, [silu(100.0), silu(210.0), silu(321.0)]);
        assert_eq!(carry, [2.0, 3.0]);
    }

    #[test]
    fn one_tap_carries_nothing() {
        assert_eq!(conv_silu(&[3.0_f64], &[2.0], &mut []), [silu(6.0)]);
    }

    #[test]
    fn both_decay_forms() {
        let bounded = log_decay(&[0.5_f64, 0.0], &[-0.5, 0.0], &[0.0], Some(-5.0));
        assert_eq!(bounded, [-2.5, -2.5]);
        let open = log_decay(&[25.0_f64], &[0.0], &[2.0_f64.ln()], None);
        assert!((open[0] + 50.0).abs() < 1e-12);
    }

    #[test]
    fn delta_rule_by_hand() {
        // one channel: k normalises to about 1, q likewise; state decays by half, then moves half way from 2 to v = 10
        let token = HeadToken { q: vec![1e6_f64], k: vec![1e6], v: vec![10.0], g: vec![0.5_f64.ln()], beta: 0.5 };
        let mut state = [4.0];
        let o = recurrent_step(&token, &mut state);
        assert!((state[0] - 6.0).abs() < 1e-9 && (o[0] - 6.0).abs() < 1e-9, "{state:?} {o:?}");
    }
}
