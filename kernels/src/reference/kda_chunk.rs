//! KDA over a chunk of tokens at once: the same recurrence as `kda`, solved for sub-chunks.
//!
//! With `G_i` the running sum of the log decays inside a sub-chunk and `S` the state before it,
//! ```text
//! u_i = beta_i·(v_i − (k_i ⊙ e^G_i)ᵀS − Σ_{j<i} A_ij·u_j)      A_ij = Σ_d k_i·k_j·e^(G_i − G_j)
//! o_i = (q_i ⊙ e^G_i)ᵀS + Σ_{j≤i} B_ij·u_j                     B_ij = Σ_d q_i·k_j·e^(G_i − G_j)
//! S'  = e^G_last ⊙ S + Σ_j (k_j ⊙ e^(G_last − G_j)) ⊗ u_j
//! ```
//! Exponents are taken of differences, which are ≤ 0: nothing overflows under either decay form. (Fast variants factor e^(G_i − G_j)
//! into two; that needs sub-chunks of 16 to keep e^−G in range at −5 a token.)

use super::{
    Real,
    kda::{HeadToken, column_dot},
};

/// Tokens of one sub-chunk.
pub const SUB_CHUNK: usize = 16;

/// Runs a head over `tokens`, moving `state` `[Dh keys, Dh values]` on; the answer is o per token.
pub fn chunked<T: Real>(tokens: &[HeadToken<T>], state: &mut [T]) -> Vec<Vec<T>> {
    tokens.chunks(SUB_CHUNK).flat_map(|sub| sub_chunk(sub, state)).collect()
}

fn sub_chunk<T: Real>(tokens: &[HeadToken<T>], state: &mut [T]) -> Vec<Vec<T>> {
    let d = tokens[0].v.len();
    let (q, k): (Vec<_>, Vec<_>) = tokens.iter().map(HeadToken::normalized).unzip();
    let sums = running_sums(tokens);
    // Σ_d a_d·k_j,d·e^(G_i − G_j): the decayed product of a row at token i with the key of token j
    let product = |a: &[T], i: usize, j: usize| (0..d).map(|c| a[c] * k[j][c] * (sums[i][c] - sums[j][c]).exp()).sum::<T>();
    let decayed = |a: &[T], i: usize| -> Vec<T> { a.iter().zip(&sums[i]).map(|(&a, &g)| a * g.exp()).collect() };

    let mut u: Vec<Vec<T>> = Vec::new();
    let mut out = Vec::new();
    for (i, token) in tokens.iter().enumerate() {
        let key = decayed(&k[i], i);
        let a: Vec<T> = (0..i).map(|j| product(&k[i], i, j)).collect();
        u.push(
            (0..d)
                .map(|c| {
                    let earlier = a.iter().zip(&u).map(|(&a, u)| a * u[c]).sum::<T>();
                    token.beta * (token.v[c] - column_dot(&key, state, c) - earlier)
                })
                .collect(),
        );
        let query = decayed(&q[i], i);
        let b: Vec<T> = (0..=i).map(|j| product(&q[i], i, j)).collect();
        out.push((0..d).map(|c| column_dot(&query, state, c) + b.iter().zip(&u).map(|(&b, u)| b * u[c]).sum::<T>()).collect());
    }

    let last = &sums[tokens.len() - 1];
    for (row, values) in state.chunks_exact_mut(d).enumerate() {
        for (c, s) in values.iter_mut().enumerate() {
            let written = (0..tokens.len()).map(|j| k[j][row] * (last[row] - sums[j][row]).exp() * u[j][c]).sum::<T>();
            *s = last[row].exp() * *s + written;
        }
    }
    out
}

/// `G_i = Σ_{j≤i} g_j` per channel.
fn running_sums<T: Real>(tokens: &[HeadToken<T>]) -> Vec<Vec<T>> {
    let mut sum = vec![T::ZERO; tokens[0].g.len()];
    tokens
        .iter()
        .map(|t| {
            sum.iter_mut().zip(&t.g).for_each(|(s, &g)| *s += g);
            sum.clone()
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::{super::kda::recurrent_step, *};

    /// Hash-like numbers in (−1, 1).
    fn noise(i: usize) -> f64 {
        ((i as f64 * 12.9898).sin() * 43758.5453).fract()
    }

    fn tokens(count: usize, d: usize, bound: f64) -> Vec<HeadToken<f64>> {
        let row = |i: usize, salt: usize| (0..d).map(move |c| noise(i * 131 + c * 7 + salt)).collect::<Vec<_>>();
        (0..count)
            .map(|i| HeadToken {
                q: row(i, 1),
                k: row(i, 2),
                v: row(i, 3),
                g: row(i, 4).iter().map(|v| -bound * v.abs()).collect(),
                beta: noise(i * 17 + 5).abs(),
            })
            .collect()
    }

    #[test]
    fn chunked_is_the_recurrence() {
        // mild decay, the release's bound, and a decay that the softplus form can reach
        for bound in [0.1, 5.0, 400.0] {
            for count in [1, 2, 15, 16, 17, 33, 50] {
                let (d, tokens) = (6, tokens(count, 6, bound));
                let start: Vec<f64> = (0..d * d).map(noise).collect();
                let (mut whole, mut stepped) = (start.clone(), start);
                let got = chunked(&tokens, &mut whole);
                let want: Vec<_> = tokens.iter().map(|t| recurrent_step(t, &mut stepped)).collect();
                for (g, w) in got.iter().flatten().chain(&whole).zip(want.iter().flatten().chain(&stepped)) {
                    assert!((g - w).abs() < 1e-12, "bound {bound} count {count}: {g} {w}");
                }
            }
        }
    }
}
