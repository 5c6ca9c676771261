//! The chunked form of the KDA recurrence, up to 16 tokens at a time (docs/model.md, KDA).
//!
//! With G the running sum of log decays in the chunk, `K̃ = k⊙e^G`, `Q̃ = q⊙e^G`, `K̂ = k⊙e^−G`:
//! `A = K̃K̂ᵀ` below the diagonal, `B = Q̃K̂ᵀ` on and below it, and
//! `u_t = β_t (v_t − K̃_t S − Σ_{s<t} A_ts u_s)` (forward substitution), `O = Q̃S + BU`, `S ← e^{G_C}⊙S + (k⊙e^{G_C−G})ᵀU`.
//! The caller keeps the chunk short enough that e^±G is a normal f32.

use super::{
    kda::{CHUNK, Prepared},
    nn::{Mat, Start, nn},
    simd::Simd,
};

/// Elements of scratch that [`chunk`] needs.
pub(super) const fn scratch(dh: usize) -> usize {
    // [K̃; Q̃], [K̃S; Q̃S] rows; K̂ᵀ and the update's keys, transposed; A and B; e^{G_C}.
    4 * CHUNK * dh + 2 * CHUNK * dh + 2 * CHUNK * CHUNK + dh
}

/// `n` tokens of one head: reads q, k, v, g and beta, writes o, updates the state `[Dh keys, Dh values]`.
#[inline(always)]
pub(super) fn chunk<S: Simd>(s: S, n: usize, dh: usize, prep: &mut Prepared<'_>, state: &mut [f32], buf: &mut [f32]) {
    let (kq, rest) = buf.split_at_mut(2 * CHUNK * dh);
    let (from_state, rest) = rest.split_at_mut(2 * CHUNK * dh);
    let (k_inv, rest) = rest.split_at_mut(CHUNK * dh);
    let (k_last, rest) = rest.split_at_mut(CHUNK * dh);
    let (ab, rest) = rest.split_at_mut(2 * CHUNK * CHUNK);
    let decay = &mut rest[..dh];

    // Running sums, in place.
    for t in 1..n {
        let (before, now) = prep.g.split_at_mut(t * dh);
        for (g, p) in now[..dh].chunks_mut(S::LANES).zip(before[(t - 1) * dh..].chunks(S::LANES)) {
            let v = s.add(s.ld(g), s.ld(p));
            s.st(g, v);
        }
    }
    let last = &prep.g[(n - 1) * dh..n * dh];
    for (d, g) in decay.chunks_mut(S::LANES).zip(last.chunks(S::LANES)) {
        s.st(d, s.exp(s.ld(g)));
    }

    let mut inv = [0.0f32; 16];
    let mut rest = [0.0f32; 16];
    for t in 0..n {
        for i in (0..dh).step_by(S::LANES) {
            let end = (i + S::LANES).min(dh);
            let at = t * dh + i..t * dh + end;
            let g = s.ld(&prep.g[at.clone()]);
            let (k, q) = (s.ld(&prep.k[at.clone()]), s.ld(&prep.q[at.clone()]));
            let e = s.exp(g);
            s.st(&mut kq[at], s.mul(k, e));
            s.st(&mut kq[(n + t) * dh + i..(n + t) * dh + end], s.mul(q, e));
            s.st(&mut inv, s.mul(k, s.exp(s.sub(s.zero(), g))));
            s.st(&mut rest, s.mul(k, s.exp(s.sub(s.ld(&last[i..end]), g))));
            for (j, c) in (i..end).enumerate() {
                k_inv[c * CHUNK + t] = inv[j];
                k_last[c * CHUNK + t] = rest[j];
            }
        }
    }

    let (kq_rows, k_inv) = (Mat { data: kq, stride: dh }, Mat { data: k_inv, stride: CHUNK });
    nn(s, 2 * n, n, dh, kq_rows, k_inv, ab, CHUNK, Start::Zero);
    nn(s, 2 * n, dh, dh, kq_rows, Mat { data: state, stride: dh }, from_state, dh, Start::Zero);

    // Forward substitution: u replaces v.
    for t in 0..n {
        let (done, now) = prep.v.split_at_mut(t * dh);
        let u = &mut now[..dh];
        for (u, r) in u.chunks_mut(S::LANES).zip(from_state[t * dh..(t + 1) * dh].chunks(S::LANES)) {
            let v = s.sub(s.ld(u), s.ld(r));
            s.st(u, v);
        }
        let a = &mut ab[t * CHUNK..t * CHUNK + t];
        a.iter_mut().for_each(|a| *a = -*a);
        if t > 0 {
            nn(s, 1, dh, t, Mat { data: a, stride: CHUNK }, Mat { data: done, stride: dh }, u, dh, Start::Keep);
        }
        super::rows::scale(s, prep.beta[t], u);
    }

    // O = Q̃S + BU, B without what lies above its diagonal.
    for t in 0..n {
        ab[(n + t) * CHUNK + t + 1..(n + t + 1) * CHUNK].fill(0.0);
    }
    prep.o[..n * dh].copy_from_slice(&from_state[n * dh..2 * n * dh]);
    let (b, u) = (Mat { data: &ab[n * CHUNK..], stride: CHUNK }, Mat { data: prep.v, stride: dh });
    nn(s, n, dh, n, b, u, prep.o, dh, Start::Keep);
    nn(s, dh, dh, n, Mat { data: k_last, stride: CHUNK }, u, state, dh, Start::Scaled(decay));
}
