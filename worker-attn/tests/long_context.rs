//! Long contexts: selection and attention against the reference ops, in chunks, row by row and from the cache, around every internal limit
//! (selection, pool, page, chunk) and at 2k, 4k, 8k, 64k and 200k tokens, which is far beyond what `tiny`'s config says.
//!
//! The oracle sees what the layers see: from the projections of each row it makes pooled keys, scores, the selection and the attention
//! with the reference ops in f64, over the whole past: of every row up to 8k tokens, beyond that of the rows around each limit and of a random
//! sample. Up to 4k, logits are compared with those of the reference backend too. The long ones are ignored by default: `scripts/long-context`
//! runs them and prints the largest differences.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says so")]

mod common;
#[path = "common/requests.rs"]
mod requests;

use std::sync::{Arc, LazyLock};

use common::{argmax, cpu, max_diff, reference};
use requests::{Answer, Harness, request};
use tandem_kernels::{
    Backend,
    cpu::CpuBackend,
    reference::{
        indexer::{self, Selection},
        mla,
    },
};
use tandem_model::{Checkpoint, MixerTensors, synthetic::Preset};
use tandem_worker_attn::{
    Model, Runner, RunnerLimits,
    cache::CacheOptions,
    engine::sequence::Request,
    hop::LocalOnly,
    layers::Cx,
    observe::{Observer, Silent},
    state::SeqState,
};

type B = CpuBackend;

/// f32 against f64 over a few thousand products: relative to the largest value.
const ATTENTION_REL: f64 = 2e-5;
/// Scores nearer to each other than this, relative to the largest, may fall either way in f32.
const SCORE_REL: f64 = 1e-5;
/// Chunks of a step.
const CHUNK: usize = 256;

static CHECKPOINT: LazyLock<Checkpoint> = LazyLock::new(|| common::preset(Preset::Tiny));
static MODEL: LazyLock<Arc<Model<B>>> = LazyLock::new(|| common::model(cpu(), &CHECKPOINT));

fn tokens(n: usize) -> Vec<u32> {
    let vocab = MODEL.geometry().vocab as u64;
    // A linear congruential walk: no period that a pool or a page could see.
    (0..n as u64)
        .scan(12345u64, |x, _| {
            *x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            Some(((*x >> 33) % vocab) as u32)
        })
        .collect()
}

fn limits(tokens: usize) -> RunnerLimits {
    RunnerLimits { max_rows: CHUNK, max_batch: 2, max_seq_len: tokens, kv_tokens: tokens.next_multiple_of(64) + 128, overlap_rows: 0 }
}

/// One MLA layer as the oracle knows it.
struct Layer {
    norm: (Vec<f64>, Vec<f64>),
    ape: Vec<f64>,
    kv_b: Vec<f64>,
    /// Raw keys and gates of the incomplete pool.
    raw: (Vec<f64>, Vec<f64>),
    pooled: Vec<Vec<f64>>,
    latents: Vec<f32>,
}

/// Checks the rows at some positions.
struct Oracle<'a> {
    layers: Vec<Option<Layer>>,
    probe: &'a dyn Fn(usize) -> bool,
    /// Position of the first row of the chunk that runs.
    base: usize,
    checked: usize,
    ties: usize,
    /// The largest difference of an attention's values, relative to the row's largest.
    apart: f64,
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|v| f64::from(*v)).collect()
}

impl<'a> Oracle<'a> {
    fn new(probe: &'a dyn Fn(usize) -> bool) -> Self {
        let layer = |i: usize| match CHECKPOINT.layer(i).unwrap().mixer {
            MixerTensors::Mla(t) => {
                let index = t.indexer.unwrap();
                Some(Layer {
                    norm: (wide(&index.k_norm_w), wide(&index.k_norm_b)),
                    ape: wide(&index.ape),
                    kv_b: wide(&t.kv_b.to_f32()),
                    raw: (Vec::new(), Vec::new()),
                    pooled: Vec::new(),
                    latents: Vec::new(),
                })
            }
            MixerTensors::Kda(_) => None,
        };
        Self { layers: (0..MODEL.dims().layers).map(layer).collect(), probe, base: 0, checked: 0, ties: 0, apart: 0.0 }
    }

    /// Runs `tokens` behind what ran before, `chunk` at a time; answers with the logits of the last row.
    fn run(&mut self, runner: &mut Runner<B, LocalOnly>, state: &mut SeqState, tokens: &[u32], chunk: usize) -> Vec<f32> {
        let mut last = Vec::new();
        for tokens in tokens.chunks(chunk) {
            let logits = runner.forward(state, tokens, chunk, self).unwrap();
            last = logits[logits.len() - MODEL.dims().vocab..].to_vec();
            self.base += tokens.len();
        }
        last
    }
}

fn download(cx: &Cx<'_, B>, buf: &<B as Backend>::Buf, width: usize) -> Vec<f32> {
    let mut out = vec![0.0; cx.rows * width];
    cx.b.download(buf, 0, &mut out).unwrap();
    out
}

impl Observer<B> for Oracle<'_> {
    fn mixer(&mut self, cx: &Cx<'_, B>, layer: usize) {
        let Some(l) = &mut self.layers[layer] else { return };
        let (p, m) = (cx.d.indexer, cx.d.mla);
        let key_at = cx.d.q_lora + m.latent;
        let (gate_at, weights_at) = (key_at + p.dim, key_at + 2 * p.dim);
        let stride = weights_at + p.heads;
        let (proj, latent) = (download(cx, &cx.buf.proj, stride), download(cx, &cx.buf.latent, m.latent));
        let probed = (0..cx.rows).any(|r| (self.probe)(self.base + r));
        let rest = probed.then(|| {
            let mut selected = vec![0; cx.rows * p.width()];
            cx.b.download_i32(&cx.buf.selected, 0, &mut selected).unwrap();
            let q = download(cx, &cx.buf.q, m.heads * m.qk_dim);
            (download(cx, &cx.buf.iq, p.heads * p.dim), q, download(cx, &cx.buf.mixed, m.heads * m.v_dim), selected)
        });
        let selection = Selection { kpool: p.kpool, topk: p.topk, always_tail: p.always_tail };
        for r in 0..cx.rows {
            let (t, row) = (self.base + r, &proj[r * stride..(r + 1) * stride]);
            l.latents.extend(&latent[r * m.latent..(r + 1) * m.latent]);
            l.raw.0.extend(indexer::key(&wide(&row[key_at..gate_at]), &l.norm.0, &l.norm.1));
            l.raw.1.extend(wide(&row[gate_at..weights_at]));
            if (t + 1) % p.kpool == 0 {
                l.pooled.push(indexer::pooled_key(&l.raw.0, &l.raw.1, &l.ape, p.kpool));
                l.raw.0.clear();
                l.raw.1.clear();
            }
            let Some((iq, q, mixed, selected)) = rest.as_ref().filter(|_| (self.probe)(t)) else { continue };
            let scores: Vec<f64> = if selection.takes_all(t + 1) {
                Vec::new()
            } else {
                let (iq, w) = (wide(&iq[r * p.heads * p.dim..(r + 1) * p.heads * p.dim]), wide(&row[weights_at..]));
                l.pooled.iter().map(|pooled| indexer::pool_score(&iq, &w, pooled)).collect()
            };
            let want = indexer::select(t, &selection, |pool| scores[pool]);
            let got: Vec<usize> = selected[r * p.width()..(r + 1) * p.width()].iter().filter(|s| **s >= 0).map(|s| *s as usize).collect();
            if got != want {
                let most = scores.iter().fold(0.0f64, |m, s| m.max(s.abs()));
                let pools = |a: &[usize], b: &[usize]| a.iter().filter(|x| !b.contains(x)).map(|x| scores[x / p.kpool]).collect::<Vec<_>>();
                let apart = pools(&got, &want).into_iter().zip(pools(&want, &got)).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                assert!(got.len() == want.len() && apart <= SCORE_REL * most, "layer {layer}, position {t}: {got:?}, reference {want:?}");
                self.ties += 1;
            }
            let latents: Vec<Vec<f64>> = got.iter().map(|s| wide(&l.latents[s * m.latent..(s + 1) * m.latent])).collect();
            let rows: Vec<&[f64]> = latents.iter().map(Vec::as_slice).collect();
            let head = mla::Head { qk: m.qk_dim, v: m.v_dim };
            let want = mla::attend_absorbed(&wide(&q[r * m.heads * m.qk_dim..(r + 1) * m.heads * m.qk_dim]), &rows, &l.kv_b, head);
            let got = &mixed[r * m.heads * m.v_dim..(r + 1) * m.heads * m.v_dim];
            let most = want.iter().fold(0.0f64, |m, v| m.max(v.abs()));
            let apart = want.iter().zip(got).map(|(w, g)| (w - f64::from(*g)).abs()).fold(0.0, f64::max);
            assert!(
                apart <= ATTENTION_REL * most,
                "layer {layer}, position {t}: attention {apart:.2e} of {most:.2e} away from the reference"
            );
            self.apart = self.apart.max(apart / most);
            self.checked += 1;
        }
    }
}

/// Positions (of a row, so one less than the tokens it sees) around a length.
fn around(length: usize) -> impl Fn(usize) -> bool {
    move |t| (t + 1).abs_diff(length) <= 1
}

/// A random sample of positions: one in 2048.
fn sampled(t: usize) -> bool {
    (t as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 53 == 0
}

/// Prefills `length + 1` tokens, checks the rows around `length`, around the internal limits next to it and in a random sample (up to 8k: every
/// row), then decodes two. Answers with the logits behind `length` tokens.
fn at_length(length: usize) -> Vec<f32> {
    let g = MODEL.geometry();
    assert!(g.index_topk < 2048 && g.kpool == 4, "the limits that the positions below are about");
    let near = [64, CHUNK, g.index_topk + g.kpool - 1].map(|limit| length / limit * limit);
    let probe = |t: usize| length < 9000 || sampled(t) || around(length)(t) || near.iter().any(|n| around(*n)(t)) || t > length;
    let ids = tokens(length + 3);
    let mut oracle = Oracle::new(&probe);
    let mut runner = Runner::local(Arc::clone(&MODEL), limits(length + 3)).unwrap();
    let mut state = runner.pool().create().unwrap();
    let logits = oracle.run(&mut runner, &mut state, &ids[..length], CHUNK);
    oracle.run(&mut runner, &mut state, &ids[length..], 1);
    let layers = g.mla_layers().len();
    println!("{length} tokens: {} rows checked, {} near ties, attention at most {:.1e} away", oracle.checked, oracle.ties, oracle.apart);
    assert!(
        oracle.checked >= 5 * layers && oracle.ties <= 1 + oracle.checked / 50,
        "{} rows checked, {} near ties",
        oracle.checked,
        oracle.ties
    );
    logits
}

#[test]
fn t35_every_row_up_to_4k_selects_and_attends_as_the_reference_does() {
    let ids = tokens(4098);
    let mut runner = Runner::local(Arc::clone(&MODEL), limits(4100)).unwrap();
    let mut state = runner.pool().create().unwrap();
    let every = |_| true;
    let mut oracle = Oracle::new(&every);
    let chunked = oracle.run(&mut runner, &mut state, &ids, CHUNK);
    assert_eq!(oracle.checked, ids.len() * MODEL.geometry().mla_layers().len());
    assert!(oracle.ties < 20, "{} near ties", oracle.ties);
    runner.pool().free(state);
    // Other chunks on the grid give the same bits, row by row ones the same numbers.
    let none = |_| false;
    let mut state = runner.pool().create().unwrap();
    let other = Oracle::new(&none).run(&mut runner, &mut state, &ids, 112);
    assert_eq!(other.iter().map(|v| v.to_bits()).collect::<Vec<_>>(), chunked.iter().map(|v| v.to_bits()).collect::<Vec<_>>());
    runner.pool().free(state);
    let mut state = runner.pool().create().unwrap();
    let rows = Oracle::new(&none).run(&mut runner, &mut state, &ids, 1);
    let most = chunked.iter().fold(0.0f32, |m, v| m.max(v.abs()));
    assert!(max_diff(&rows, &chunked) <= 5e-4 * most, "{} of {most}", max_diff(&rows, &chunked));
}

/// Answers of three tokens behind the first `n` tokens, for each n, one after the other in one engine.
fn answers(lengths: &[usize], cache: Option<CacheOptions>) -> Vec<Answer> {
    let most = lengths.iter().max().unwrap() + 4;
    let ids = tokens(most);
    let mut h = match cache {
        Some(options) => Harness::caching(&MODEL, limits(most), CHUNK, options),
        None => Harness::local(&MODEL, limits(most), CHUNK),
    };
    for (i, n) in lengths.iter().enumerate() {
        h.submit(Request { logprobs: Some(3), ..request(i as u64, &ids[..*n], 3) });
        h.finish();
    }
    let answers = h.finish();
    h.assert_empty();
    answers.into_values().collect()
}

/// Behind what prompts of the `warm` lengths have left, prompts of these lengths are answered as without a cache.
fn from_the_cache(warm: &[usize], lengths: &[usize], least: usize) {
    let options = CacheOptions { interval: 1024, ..CacheOptions::default() };
    let (plain, cached) = (answers(lengths, None), answers(&[warm, lengths].concat(), Some(options)));
    let cached = &cached[warm.len()..];
    for ((n, a), b) in lengths.iter().zip(&plain).zip(cached) {
        assert_eq!((&a.tokens, &a.logprobs, &a.top), (&b.tokens, &b.logprobs, &b.top), "{n} tokens, {:?} of them from the cache", b.cached);
    }
    let hits: usize = cached.iter().map(|a| a.cached.unwrap() as usize).sum();
    assert!(hits >= least, "{hits} tokens from the cache");
}

#[test]
fn t35_from_the_cache_it_is_the_same_around_2k_and_4k() {
    from_the_cache(&[4098], &[2047, 2048, 2049, 4095, 4096, 4097], 3 * 1024 + 3 * 4000);
}

/// What a prompt of `length` tokens is answered when all but its end comes from the cache, against the logits that were computed whole.
fn against_the_cache(length: usize, logits: &[f32]) {
    let options = CacheOptions { interval: 1024, ..CacheOptions::default() };
    let answers = answers(&[length + 2, length], Some(options));
    let (hits, likeliest) = (answers[1].cached.unwrap() as usize, &answers[1].top[0]);
    assert!(hits + 1024 > length, "{hits} tokens from the cache");
    let most = logits.iter().copied().fold(f32::MIN, f32::max);
    let norm = most + logits.iter().map(|v| (v - most).exp()).sum::<f32>().ln();
    assert_eq!(answers[1].tokens[0], argmax(logits));
    assert_eq!(likeliest.len(), 3);
    let apart = likeliest.iter().map(|l| (l.logprob - (logits[l.id as usize] - norm)).abs()).fold(0.0, f32::max);
    println!("{length} tokens: {hits} from the cache, logprobs at most {apart:.1e} away");
    assert!(apart <= 1e-5, "logprobs {apart} away");
}

#[test]
#[ignore = "slow: scripts/long-context"]
fn logits_up_to_4k_are_the_reference_backends() {
    let ids = tokens(4098);
    let slow = common::model(reference(), &CHECKPOINT);
    let vocab = MODEL.geometry().vocab;
    let (mut a, mut b) = (Runner::local(Arc::clone(&MODEL), limits(4100)).unwrap(), Runner::local(slow, limits(4100)).unwrap());
    let (mut fast, mut slow) = (a.pool().create().unwrap(), b.pool().create().unwrap());
    let (mut apart, mut far) = (0.0f32, Vec::new());
    for (i, chunk) in ids.chunks(CHUNK).enumerate() {
        let got = a.forward(&mut fast, chunk, CHUNK, &mut Silent).unwrap();
        let want = b.forward(&mut slow, chunk, CHUNK, &mut Silent).unwrap();
        for (r, (got, want)) in got.chunks_exact(vocab).zip(want.chunks_exact(vocab)).enumerate() {
            let diff = max_diff(got, want);
            apart = apart.max(diff);
            if diff > common::LOGIT_TOLERANCE {
                far.push((i * CHUNK + r, diff));
            }
        }
    }
    println!("4098 tokens: logits at most {apart:.1e} away, {} rows further than {:e}: {far:?}", far.len(), common::LOGIT_TOLERANCE);
    // A near tie in a selection that falls the other way shows in the rows behind it.
    assert!(far.len() <= ids.len() / 50, "{far:?}");
}

#[test]
#[ignore = "slow: scripts/long-context"]
fn at_8k() {
    let logits = [8191, 8192, 8193].map(at_length);
    against_the_cache(8192, &logits[1]);
}

#[test]
#[ignore = "slow: scripts/long-context"]
fn at_64k() {
    against_the_cache(65_536, &at_length(65_536));
}

#[test]
#[ignore = "slow: scripts/long-context"]
fn at_200k() {
    against_the_cache(200_000, &at_length(200_000));
}
