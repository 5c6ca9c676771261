//! The KDA mixer between its projections: one item per (sequence, head), which holds everything a head needs from the convolution to
//! the gated norm, so that a head's state passes through the cache once per step.
//!
//! A segment is taken in blocks of 16 tokens, counted from its first row. A block of few tokens takes the recurrence token by token; from
//! [`CHUNK_FROM`] tokens on, `kda_chunk.rs` takes it at once. What a block does depends on the block alone, so that a prompt that is cut
//! between blocks gives the same bits as one that is not ([`grid`]).

use super::{
    Engine,
    aligned::Aligned,
    buf::CpuBatch,
    disjoint::Disjoint,
    isa::Kernel,
    kda_chunk,
    nn::{Mat, Start, nn},
    rows,
    simd::Simd,
    state::CpuState,
};
use crate::KdaParams;

/// Tokens that a head prepares together, and the longest sub-chunk.
pub(super) const CHUNK: usize = 16;
/// Tokens of a block from which the chunked form pays.
const CHUNK_FROM: usize = 8;
/// Keys of the state read at a time: 16 × 128 f32 = 8 KiB.
const KEY_BLOCK: usize = 16;
/// The sum of log decays in a sub-chunk stays above −80, so that e^±sum is a normal f32.
const DECAY_RANGE: f32 = 80.0;

/// The inputs of the op.
pub(super) struct Inputs<'a> {
    pub(super) proj: &'a [f32],
    pub(super) proj_stride: usize,
    pub(super) beta0: usize,
    pub(super) f: &'a [f32],
    pub(super) g: &'a [f32],
    pub(super) conv: &'a [f32],
    pub(super) a_log: &'a [f32],
    pub(super) dt_bias: &'a [f32],
    pub(super) o_norm: &'a [f32],
}

/// Tokens of a block: a prompt may be cut at multiples of it without changing a bit.
pub(super) fn grid(p: &KdaParams) -> usize {
    chunk_for(p).unwrap_or(1)
}

/// Tokens per sub-chunk; `None`: the decay has no bound that keeps the chunked form in range.
fn chunk_for(p: &KdaParams) -> Option<usize> {
    let bound = p.lower_bound?.abs();
    let tokens = if bound > 0.0 { (DECAY_RANGE / bound) as usize } else { CHUNK };
    (tokens >= 4).then_some(tokens.min(CHUNK))
}

/// Runs the mixer of `layer` for all segments.
pub(super) fn kda(e: &Engine, batch: &CpuBatch, layer: usize, inp: &Inputs<'_>, p: &KdaParams, state: &mut CpuState, out: &mut [f32]) {
    let sizes = state.sizes();
    let (heads, dh) = (p.dims.heads, p.dims.head_dim);
    let base = state.slot_at(layer, 0, 1);
    let (pool, conv, out) = (Disjoint::new(&mut state.kda), Disjoint::new(&mut state.conv), Disjoint::new(out));
    let segments = &batch.desc.segments;
    let work = batch.desc.tokens.len() * heads * dh * dh * 4;
    e.pool.run(segments.len() * heads, work, |worker, item| {
        let (seg, head) = (&segments[item / heads], item % heads);
        let slot = base + seg.slot as usize;
        let at = slot * sizes.kda + head * dh * dh;
        let local = &mut *e.locals.of(worker);
        e.isa.run(Head {
            inp,
            p,
            head,
            row0: seg.row0 as usize,
            rows: seg.rows as usize,
            // SAFETY: slots are distinct (`set_batch` checks), and this head's part of the slot is this item's.
            state: unsafe { pool.range(at..at + dh * dh) },
            conv,
            conv_at: slot * sizes.conv,
            out,
            buf: &mut local.a,
        });
    });
}

struct Head<'a> {
    inp: &'a Inputs<'a>,
    p: &'a KdaParams,
    head: usize,
    row0: usize,
    rows: usize,
    state: &'a mut [f32],
    conv: Disjoint<'a, f32>,
    conv_at: usize,
    out: Disjoint<'a, f32>,
    buf: &'a mut Aligned,
}

/// Prepared rows of one head, each `[CHUNK, Dh]`.
pub(super) struct Prepared<'a> {
    pub(super) q: &'a mut [f32],
    pub(super) k: &'a mut [f32],
    pub(super) v: &'a mut [f32],
    /// Log decay per channel.
    pub(super) g: &'a mut [f32],
    /// Outputs before the norm.
    pub(super) o: &'a mut [f32],
    pub(super) beta: [f32; CHUNK],
}

impl Kernel for Head<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        let (dh, taps) = (self.p.dims.head_dim, self.p.dims.conv);
        let block = CHUNK * dh;
        let buf = std::mem::take(self.buf);
        let mut buf = buf;
        let need = 5 * block + 3 * dh * taps + 4 * dh + kda_chunk::scratch(dh);
        {
            let all = buf.sized(need);
            let (q, rest) = all.split_at_mut(block);
            let (k, rest) = rest.split_at_mut(block);
            let (v, rest) = rest.split_at_mut(block);
            let (g, rest) = rest.split_at_mut(block);
            let (o, rest) = rest.split_at_mut(block);
            let (w, rest) = rest.split_at_mut(3 * dh * taps);
            let (pair, chunk_buf) = rest.split_at_mut(4 * dh);
            let mut prep = Prepared { q, k, v, g, o, beta: [0.0; CHUNK] };
            self.transpose_taps(w);
            let chunk = chunk_for(self.p);
            let step = chunk.unwrap_or(CHUNK);
            let mut t0 = 0;
            while t0 < self.rows {
                let n = (self.rows - t0).min(step);
                self.prepare(s, t0, n, w, &mut prep);
                if chunk.is_some() && n >= CHUNK_FROM {
                    kda_chunk::chunk(s, n, dh, &mut prep, self.state, chunk_buf);
                } else {
                    for t in 0..n {
                        self.step(s, t, &mut prep, pair);
                    }
                }
                self.finish(s, t0, n, &mut prep);
                t0 += n;
            }
        }
        self.keep_taps();
        *self.buf = buf;
    }
}

impl Head<'_> {
    /// Where section `sec` (q, k, v) of this head starts in a projection row.
    #[inline(always)]
    fn channels(&self, sec: usize) -> usize {
        (sec * self.p.dims.heads + self.head) * self.p.dims.head_dim
    }

    /// The convolution's input of token `t` of the segment (negative: from before the step).
    #[inline(always)]
    fn input(&self, t: isize, sec: usize) -> &[f32] {
        let dh = self.p.dims.head_dim;
        let c = self.channels(sec);
        if t >= 0 {
            let at = (self.row0 + t as usize) * self.inp.proj_stride + c;
            return &self.inp.proj[at..at + dh];
        }
        let kept = self.p.dims.conv as isize - 1;
        let width = 3 * self.p.dims.heads * dh;
        let at = self.conv_at + (kept + t) as usize * width + c;
        // SAFETY: this head's channels of this slot are this item's, and nothing writes them before `keep_taps`.
        unsafe { self.conv.range(at..at + dh) }
    }

    /// `[3·Dh, taps]` weights of this head as `[3][taps][Dh]`.
    #[inline(always)]
    fn transpose_taps(&self, w: &mut [f32]) {
        let (dh, taps) = (self.p.dims.head_dim, self.p.dims.conv);
        for sec in 0..3 {
            let c = self.channels(sec);
            let from = &self.inp.conv[c * taps..(c + dh) * taps];
            let to = &mut w[sec * dh * taps..(sec + 1) * dh * taps];
            if taps == 4 {
                let (a, rest) = to.split_at_mut(dh);
                let (b, rest) = rest.split_at_mut(dh);
                let (c, d) = rest.split_at_mut(dh);
                for (i, t) in from.as_chunks::<4>().0.iter().enumerate() {
                    (a[i], b[i], c[i], d[i]) = (t[0], t[1], t[2], t[3]);
                }
            } else {
                for (i, t) in from.chunks_exact(taps).enumerate() {
                    t.iter().enumerate().for_each(|(j, v)| to[j * dh + i] = *v);
                }
            }
        }
    }

    /// Convolution, SiLU, L2 norms, decay and beta of tokens `t0..t0 + n`.
    #[inline(always)]
    fn prepare<S: Simd>(&self, s: S, t0: usize, n: usize, w: &[f32], prep: &mut Prepared<'_>) {
        let (dh, taps) = (self.p.dims.head_dim, self.p.dims.conv);
        for i in 0..n {
            let t = (t0 + i) as isize;
            let span = i * dh..(i + 1) * dh;
            for sec in 0..3 {
                let out = match sec {
                    0 => &mut prep.q[span.clone()],
                    1 => &mut prep.k[span.clone()],
                    _ => &mut prep.v[span.clone()],
                };
                out.fill(0.0);
                for j in 0..taps {
                    let x = self.input(t + 1 - taps as isize + j as isize, sec);
                    let w = &w[(sec * taps + j) * dh..(sec * taps + j + 1) * dh];
                    for ((o, x), w) in out.chunks_mut(S::LANES).zip(x.chunks(S::LANES)).zip(w.chunks(S::LANES)) {
                        let v = s.mul_add(s.ld(w), s.ld(x), s.ld(o));
                        s.st(o, v);
                    }
                }
                for o in out.chunks_mut(S::LANES) {
                    let v = s.silu(s.ld(o));
                    s.st(o, v);
                }
            }
            let (q, k) = (&mut prep.q[span.clone()], &mut prep.k[span.clone()]);
            let inv = (rows::sum_squares(s, q) + 1e-6).sqrt().recip() * (dh as f32).sqrt().recip();
            rows::scale(s, inv, q);
            let inv = (rows::sum_squares(s, k) + 1e-6).sqrt().recip();
            rows::scale(s, inv, k);
            let row = self.row0 + t0 + i;
            let beta = self.inp.proj[row * self.inp.proj_stride + self.inp.beta0 + self.head];
            prep.beta[i] = 1.0 / (1.0 + (-beta).exp());
            self.decay(s, row, &mut prep.g[span]);
        }
    }

    /// The log decay of a row.
    #[inline(always)]
    fn decay<S: Simd>(&self, s: S, row: usize, g: &mut [f32]) {
        let (heads, dh) = (self.p.dims.heads, self.p.dims.head_dim);
        let a = self.inp.a_log[self.head].exp();
        let at = (row * heads + self.head) * dh;
        let (f, bias) = (&self.inp.f[at..at + dh], &self.inp.dt_bias[self.head * dh..(self.head + 1) * dh]);
        match self.p.lower_bound {
            Some(bound) => {
                let (a, bound) = (s.splat(a), s.splat(bound));
                for ((g, f), b) in g.chunks_mut(S::LANES).zip(f.chunks(S::LANES)).zip(bias.chunks(S::LANES)) {
                    let z = s.mul(a, s.add(s.ld(f), s.ld(b)));
                    s.st(g, s.mul(bound, s.sigmoid(z)));
                }
            }
            None => {
                for ((g, f), b) in g.iter_mut().zip(f).zip(bias) {
                    let z = f + b;
                    *g = -a * if z > 20.0 { z } else { z.exp().ln_1p() };
                }
            }
        }
    }

    /// One token of the recurrence: `u = beta·(v − (e⊙k)ᵀS)`, `o = (e⊙q)ᵀS + (q·k)·u`, `S = e⊙S + k⊗u`.
    #[inline(always)]
    fn step<S: Simd>(&mut self, s: S, t: usize, prep: &mut Prepared<'_>, pair: &mut [f32]) {
        let dh = self.p.dims.head_dim;
        let span = t * dh..(t + 1) * dh;
        let (q, k, v) = (&prep.q[span.clone()], &prep.k[span.clone()], &prep.v[span.clone()]);
        let decay = &mut prep.g[span.clone()];
        let (keyed, read) = pair.split_at_mut(2 * dh);
        let mut dot = s.zero();
        for i in (0..dh).step_by(S::LANES) {
            let end = (i + S::LANES).min(dh);
            let e = s.exp(s.ld(&decay[i..end]));
            let (kv, qv) = (s.ld(&k[i..end]), s.ld(&q[i..end]));
            dot = s.mul_add(kv, qv, dot);
            s.st(&mut keyed[i..end], s.mul(e, kv));
            s.st(&mut keyed[dh + i..dh + end], s.mul(e, qv));
            s.st(&mut decay[i..end], e);
        }
        let qk = s.sum(dot);
        for key in (0..dh).step_by(KEY_BLOCK) {
            let n = KEY_BLOCK.min(dh - key);
            let start = if key == 0 { Start::Zero } else { Start::Keep };
            let (a, b) = (Mat { data: &keyed[key..], stride: dh }, Mat { data: &self.state[key * dh..], stride: dh });
            nn(s, 2, dh, n, a, b, read, dh, start);
        }
        let (u, from_state) = read.split_at_mut(dh);
        let (beta, qk) = (s.splat(prep.beta[t]), s.splat(qk));
        let o = &mut prep.o[span];
        for i in (0..dh).step_by(S::LANES) {
            let end = (i + S::LANES).min(dh);
            let uv = s.mul(beta, s.sub(s.ld(&v[i..end]), s.ld(&u[i..end])));
            s.st(&mut u[i..end], uv);
            s.st(&mut o[i..end], s.mul_add(qk, uv, s.ld(&from_state[i..end])));
        }
        for ((row, e), k) in self.state.chunks_exact_mut(dh).zip(&*decay).zip(k) {
            let (e, k) = (s.splat(*e), s.splat(*k));
            for (x, u) in row.chunks_mut(S::LANES).zip(u.chunks(S::LANES)) {
                let x_new = s.mul_add(e, s.ld(x), s.mul(k, s.ld(u)));
                s.st(x, x_new);
            }
        }
    }

    /// The gated norm: `out = rms_norm(o) ⊙ sigmoid(g)`.
    #[inline(always)]
    fn finish<S: Simd>(&self, s: S, t0: usize, n: usize, prep: &mut Prepared<'_>) {
        let (heads, dh) = (self.p.dims.heads, self.p.dims.head_dim);
        for i in 0..n {
            let o = &mut prep.o[i * dh..(i + 1) * dh];
            rows::rms_norm_in_place(s, o, self.inp.o_norm, self.p.eps);
            let at = ((self.row0 + t0 + i) * heads + self.head) * dh;
            // SAFETY: this head's columns of the segment's rows are this item's.
            let out = unsafe { self.out.range(at..at + dh) };
            for ((out, o), g) in out.chunks_mut(S::LANES).zip(o.chunks(S::LANES)).zip(self.inp.g[at..at + dh].chunks(S::LANES)) {
                s.st(out, s.mul(s.ld(o), s.sigmoid(s.ld(g))));
            }
        }
    }

    /// Keeps the last `conv − 1` inputs for the next step.
    #[inline(always)]
    fn keep_taps(&self) {
        let dh = self.p.dims.head_dim;
        let kept = self.p.dims.conv - 1;
        let width = 3 * self.p.dims.heads * dh;
        for i in 0..kept {
            let t = (self.rows + i) as isize - kept as isize;
            for sec in 0..3 {
                let at = self.conv_at + i * width + self.channels(sec);
                // SAFETY: this head's channels of this slot are this item's. The source is a later tap or the projection, never this one.
                unsafe { self.conv.range(at..at + dh) }.copy_from_slice(self.input(t, sec));
            }
        }
    }
}
