//! The prefix cache: what is answered does not depend on it by a single bit, and whatever it holds is given up when it is needed.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says so")]

mod common;
#[path = "common/requests.rs"]
mod requests;

use std::sync::{Arc, LazyLock};

use common::{Gold, cpu, reference};
use proptest::prelude::*;
use requests::{Answer, End, Harness, request};
use tandem_kernels::{Backend, cpu::CpuBackend};
use tandem_model::{
    Checkpoint,
    synthetic::{Options, Preset, TextConfig, write_with},
};
use tandem_proto::attn::v1::ErrorCode;
use tandem_worker_attn::{Model, RunnerLimits, cache::CacheOptions, engine::sequence::Request, sampler::SamplingParams};

type B = CpuBackend;

/// Pages of 63 tokens, pools of 3, a selection that is narrower than the prompts.
static TINY_B: LazyLock<Arc<Model<B>>> = LazyLock::new(|| common::model(cpu(), &common::preset(Preset::TinyB)));
static PROMPT: LazyLock<Vec<u32>> = LazyLock::new(|| Gold::open("tiny-b.safetensors").ids("p200.input_ids"));

fn limits() -> RunnerLimits {
    RunnerLimits { max_rows: 64, max_batch: 4, max_seq_len: 300, kv_tokens: 2048, overlap_rows: 0 }
}

/// Remembers whatever it may.
fn eager() -> CacheOptions {
    CacheOptions { bytes: 1 << 30, interval: 32, spacing: 1 }
}

/// The first `shared` tokens of the prompt, then others.
fn branch(shared: usize, salt: u32) -> Vec<u32> {
    PROMPT[..shared].iter().copied().chain((0..23).map(|i| (i * 7 + salt * 31 + shared as u32) % 384)).collect()
}

fn ask(id: u64, prompt: &[u32]) -> Request {
    let sampling = if id.is_multiple_of(2) {
        SamplingParams::default()
    } else {
        SamplingParams { temperature: 1.1, top_p: 0.9, repetition_penalty: 1.1, seed: id, ..SamplingParams::default() }
    };
    Request { logprobs: Some(3), sampling, ..request(id, prompt, 5) }
}

/// All that a client sees of an answer: tokens, bits of their logprobs, (id, bits) of the likeliest, the end.
type Seen = (Vec<u32>, Vec<u32>, Vec<Vec<(u32, u32)>>, Option<End>);

fn seen(a: &Answer) -> Seen {
    let top = a.top.iter().map(|t| t.iter().map(|l| (l.id, l.logprob.to_bits())).collect()).collect();
    (a.tokens.clone(), a.logprobs.iter().map(|l| l.logprob.to_bits()).collect(), top, a.end.clone())
}

fn alone<B: Backend>(model: &Arc<Model<B>>, chunk: usize, r: Request) -> Answer {
    let (id, mut h) = (r.id, Harness::local(model, limits(), chunk));
    h.submit(r);
    h.finish().remove(&id).unwrap()
}

#[test]
fn prefixes_that_end_anywhere_are_gone_on_from_bit_for_bit() {
    // Around the ends of blocks (16), pools (3), pages (63), chunks and the selection's width.
    let cuts =
        [1, 2, 3, 15, 16, 17, 31, 32, 33, 47, 48, 49, 61, 62, 63, 64, 65, 66, 79, 80, 95, 96, 97, 112, 125, 126, 127, 128, 150, 189, 190];
    // On the backend's grid, off it, and row by row.
    for chunk in [48, 16, 7, 1] {
        let mut h = Harness::caching(&TINY_B, limits(), chunk, eager());
        h.submit(ask(0, &PROMPT));
        let mut want = vec![(0, alone(&TINY_B, chunk, ask(0, &PROMPT)))];
        h.finish();
        for (i, &cut) in cuts.iter().enumerate() {
            let id = i as u64 + 1;
            h.submit(ask(id, &branch(cut, 1)));
            h.finish();
            want.push((id, alone(&TINY_B, chunk, ask(id, &branch(cut, 1)))));
        }
        let got = h.finish();
        let grid = if chunk == 7 || chunk == 1 { chunk } else { 16 };
        for ((id, want), cut) in want.iter().zip([0].iter().chain(&cuts)) {
            assert_eq!(seen(&got[id]), seen(want), "chunk {chunk}, {cut} tokens shared");
            // Points lie every 32 tokens, and where earlier prompts parted.
            let cached = got[id].cached.unwrap() as usize;
            assert!(cached <= *cut && cached.is_multiple_of(grid), "chunk {chunk}: {cached} of {cut}");
            assert!(cached >= (cut / 32 * 32 / grid * grid).min(192), "chunk {chunk}: {cached} of {cut}");
        }
        h.assert_empty();
    }
}

#[test]
fn the_same_prompt_again_is_almost_free_and_the_same() {
    let mut h = Harness::caching(&TINY_B, limits(), 48, CacheOptions::default());
    let mut answers = Vec::new();
    for id in [2, 4, 6] {
        h.submit(Request { id, ..ask(0, &PROMPT) });
        let mut rows = 0;
        while !h.engine.is_idle() {
            rows += h.step();
        }
        answers.push((rows, h.answers().remove(&id).unwrap()));
    }
    let cached: Vec<Option<u32>> = answers.iter().map(|a| a.1.cached).collect();
    assert_eq!(cached, [Some(0), Some(192), Some(192)], "200 tokens, of which the last four may be the template's");
    assert_eq!(answers.iter().map(|a| a.0).collect::<Vec<_>>(), [204, 12, 12], "rows: the prompt once, then its end and four tokens");
    assert!(answers.iter().all(|a| seen(&a.1) == seen(&answers[0].1)));
}

#[test]
fn a_batch_that_shares_answers_as_each_alone() {
    let prompts: Vec<Vec<u32>> =
        [200, 70, 130, 16, 130, 64, 200, 96, 33].iter().zip(0u32..).map(|(s, i)| branch((*s).min(180), i % 3)).collect();
    let mut h = Harness::caching(&TINY_B, limits(), 16, eager());
    for round in 0..3 {
        for (i, p) in prompts.iter().enumerate() {
            h.submit(ask(round * 100 + i as u64 * 2, p));
            // They join at different times, and find what others have just left or are about to leave.
            for _ in 0..(i + round as usize) % 4 {
                h.step();
            }
        }
    }
    let got = h.finish();
    for (i, p) in prompts.iter().enumerate() {
        let want = seen(&alone(&TINY_B, 16, ask(i as u64 * 2, p)));
        for round in 0..3 {
            assert_eq!(seen(&got[&(round * 100 + i as u64 * 2)]), want, "prompt {i}, round {round}");
        }
    }
    assert!(got.range(200..).all(|(_, a)| a.cached.unwrap() > 0), "by then everything is known");
    h.assert_empty();
}

#[test]
fn under_pressure_it_gives_up_points_and_nothing_else() {
    let prompts: Vec<Vec<u32>> = (0..12).map(|i| branch([180, 120, 64, 0][i % 4], i as u32)).collect();
    let want: Vec<_> = prompts.iter().enumerate().map(|(i, p)| seen(&alone(&TINY_B, 16, ask(i as u64 * 2, p)))).collect();
    let point = {
        let mut h = Harness::caching(&TINY_B, limits(), 16, eager());
        h.submit(ask(0, &prompts[2]));
        h.finish();
        let (points, bytes) = h.engine.cache().unwrap().size();
        bytes / points as u64
    };
    // Pages for little more than one sequence; room for three points; both; room for none.
    for (kv_tokens, bytes) in [(5 * 63, 1 << 30), (2048, 3 * point + point / 2), (5 * 63, 3 * point), (2048, point / 2)] {
        let mut h = Harness::caching(&TINY_B, RunnerLimits { kv_tokens, ..limits() }, 16, CacheOptions { bytes, ..eager() });
        let mut hits = 0;
        for round in 0..2 {
            for (i, p) in prompts.iter().enumerate() {
                h.submit(ask(round * 100 + i as u64 * 2, p));
                if i % 3 == 2 {
                    h.finish();
                }
            }
            let got = h.finish();
            for (i, want) in want.iter().enumerate() {
                let a = &got[&(round * 100 + i as u64 * 2)];
                hits += a.cached.unwrap();
                if a.started == 1 {
                    assert_eq!(&seen(a), want, "prompt {i}, kv {kv_tokens}, bytes {bytes}");
                } else {
                    // Sent back in the middle of its answer: what it had generated is then prefilled, which rounds differently.
                    assert_eq!(&a.tokens, &want.0, "prompt {i}, kv {kv_tokens}, bytes {bytes}");
                }
            }
        }
        h.assert_empty();
        let (points, used) = h.engine.cache().unwrap().size();
        assert!(used <= bytes, "{used} of {bytes} bytes");
        let pool = h.engine.runner().pool();
        assert!(pool.used_tokens() <= kv_tokens);
        if bytes < point {
            assert_eq!((points, hits, pool.used_tokens()), (0, 0, 0), "what cannot hold a point holds nothing");
        } else {
            assert!(hits > 0 && points > 0);
        }
    }
}

#[test]
fn prompt_logprobs_and_warm_ups_read_nothing() {
    let mut h = Harness::caching(&TINY_B, limits(), 16, eager());
    h.submit(ask(0, &PROMPT));
    h.finish();
    h.submit(Request { prompt_logprobs: Some(1), ..ask(2, &PROMPT) });
    h.submit(Request { warmup: true, ..ask(4, &PROMPT) });
    let got = h.finish();
    assert_eq!((got[&2].cached, got[&4].cached, got[&2].prompt.len()), (None, None, 199));
    let want = alone(&TINY_B, 16, Request { prompt_logprobs: Some(1), ..ask(2, &PROMPT) });
    assert_eq!((seen(&got[&2]), &got[&2].prompt), (seen(&want), &want.prompt));
    h.assert_empty();
}

#[test]
fn cancelled_in_mid_prefill_it_leaves_what_was_complete() {
    let mut h = Harness::caching(&TINY_B, limits(), 16, eager());
    h.submit(ask(0, &PROMPT));
    for _ in 0..7 {
        h.step();
    }
    h.engine.cancel(0);
    h.assert_empty();
    h.submit(ask(2, &PROMPT));
    let got = h.finish();
    assert_eq!(got[&2].cached, Some(96));
    assert_eq!(seen(&got[&2]), seen(&alone(&TINY_B, 16, ask(2, &PROMPT))));
}

/// A checkpoint whose embedding of token 7 is NaN.
fn poisoned(dir: &std::path::Path) -> Checkpoint {
    tandem_model::synthetic::write(Preset::TinyB, dir, &[]).unwrap();
    for file in std::fs::read_dir(dir).unwrap().map(|f| f.unwrap().path()).filter(|f| f.extension().is_some_and(|e| e == "safetensors")) {
        let mut bytes = std::fs::read(&file).unwrap();
        let (header, tensors) = safetensors::SafeTensors::read_metadata(&bytes).unwrap();
        let Some(info) =
            tensors.tensors().into_iter().find(|(name, _)| name.ends_with("embed_tokens.weight")).map(|(_, info)| info.clone())
        else {
            continue;
        };
        let row = (info.data_offsets.1 - info.data_offsets.0) / info.shape[0];
        let at = 8 + header + info.data_offsets.0 + 7 * row;
        bytes[at..at + row].fill(0xff);
        std::fs::write(&file, bytes).unwrap();
        return Checkpoint::open(dir).unwrap();
    }
    panic!("no embedding");
}

#[test]
fn a_row_that_is_not_finite_ends_its_request_and_enters_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let model = common::model(cpu(), &poisoned(dir.path()));
    let mut h = Harness::caching(&model, limits(), 16, eager());
    let clean: Vec<u32> = PROMPT.iter().map(|t| if *t == 7 { 8 } else { *t }).collect();
    let mut bad = clean.clone();
    bad[70] = 7;
    h.submit(ask(0, &bad));
    h.submit(ask(2, &clean));
    let got = h.finish();
    assert!(matches!(&got[&0].end, Some(End::Error(ErrorCode::NonFinite, m)) if m.contains("of the request's rows")), "{:?}", got[&0].end);
    assert_eq!(got[&2].end, Some(End::Length));
    // What lay before the row is good, and of the rest nothing is there.
    h.submit(ask(4, &bad));
    let got = h.finish();
    assert_eq!(got[&4].cached, Some(64));
    assert!(matches!(&got[&4].end, Some(End::Error(ErrorCode::NonFinite, _))));
    h.submit(ask(6, &clean));
    assert_eq!(seen(&h.finish()[&6]), seen(&alone(&model, 16, ask(6, &clean))));
    h.assert_empty();
}

fn any_geometry<B: Backend>(backend: B, seed: u64, chunk: usize, prompts: &[(usize, u32)], spacing: usize) {
    let dir = tempfile::tempdir().unwrap();
    write_with(&TextConfig::random(seed), &Options { seed, ..Options::default() }, dir.path()).unwrap();
    let model = common::model(backend, &Checkpoint::open(dir.path()).unwrap());
    let vocab = model.geometry().vocab as u32;
    let prompt = |(shared, salt): (usize, u32)| -> Vec<u32> {
        (0..shared as u32).map(|t| (t * t * 31 + t * 7) % vocab).chain((0..9).map(|t| (t * 5 + salt) % vocab)).collect()
    };
    let mut h = Harness::caching(&model, limits(), chunk, CacheOptions { spacing, interval: 24, ..eager() });
    for (i, p) in prompts.iter().enumerate() {
        h.submit(ask(i as u64 * 2, &prompt(*p)));
        if i % 2 == 1 {
            h.finish();
        }
    }
    let got = h.finish();
    for (i, p) in prompts.iter().enumerate() {
        assert_eq!(seen(&got[&(i as u64 * 2)]), seen(&alone(&model, chunk, ask(i as u64 * 2, &prompt(*p)))), "seed {seed}, prompt {i}");
    }
    h.assert_empty();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, ..ProptestConfig::default() })]
    #[test]
    fn no_geometry_shows_it(
        seed in 0u64..1000,
        chunk in 1usize..40,
        prompts in prop::collection::vec((0usize..100, 0u32..3), 2..7),
        spacing in 1usize..40,
    ) {
        any_geometry(cpu(), seed, chunk, &prompts, spacing);
        any_geometry(reference(), seed, chunk, &prompts[..2], spacing);
    }
}

/// The choices of one request: one prompt, as many seeds.
fn choices(n: u32, max_tokens: usize) -> Vec<Request> {
    let sampling = |choice| SamplingParams { temperature: 1.1, seed: 7, choice, ..SamplingParams::default() };
    (0..n).map(|i| Request { logprobs: Some(3), sampling: sampling(i), ..request(u64::from(i), &PROMPT, max_tokens) }).collect()
}

#[test]
fn choices_compute_their_prompt_once_and_answer_as_each_alone() {
    for cached in [false, true] {
        for max_tokens in [1, 6] {
            let mut h = match cached {
                true => Harness::caching(&TINY_B, limits(), 48, CacheOptions::default()),
                false => Harness::local(&TINY_B, limits(), 48),
            };
            // Six choices over four places: the last two come when the prompt is long computed.
            let all = choices(6, max_tokens);
            all.iter().for_each(|r| h.submit(r.clone()));
            let mut rows = Vec::new();
            while h.engine.counts() != (0, 0) {
                rows.push(h.step());
            }
            let got = h.finish();
            for r in all {
                let (id, want) = (r.id, alone(&TINY_B, 48, r));
                assert_eq!((seen(&got[&id]), got[&id].started), (seen(&want), 1), "choice {id}");
            }
            let first: usize = rows.iter().take(5).sum();
            assert_eq!(first, 200, "the first four compute it once, in five chunks: {rows:?}");
            let prompts = if cached { 200 + 8 } else { 2 * 200 };
            let least = prompts + 6 * (max_tokens - 1);
            assert!((least..=least + 8).contains(&rows.iter().sum()), "{rows:?}, least {least}");
            h.assert_empty();
        }
    }
}

#[test]
fn a_choice_whose_leader_goes_computes_the_prompt_itself() {
    let mut h = Harness::local(&TINY_B, limits(), 48);
    choices(3, 5).into_iter().for_each(|r| h.submit(r));
    h.step();
    h.step();
    h.engine.cancel(0);
    h.step();
    h.engine.cancel(2);
    let got = h.finish();
    assert_eq!((&got[&0].end, &got[&2].end, got[&0].tokens.len()), (&Some(End::Cancelled), &Some(End::Cancelled), 0));
    assert_eq!(seen(&got[&1]), seen(&alone(&TINY_B, 48, choices(3, 5).remove(1))));
    h.assert_empty();
}

#[test]
fn choices_make_room_for_each_other_and_lose_nothing() {
    // Pages for two sequences and a bit: followers have to make room, and find no pages for their copies.
    for kv_tokens in [300, 420, 500, 640] {
        let mut h = Harness::local(&TINY_B, RunnerLimits { kv_tokens, ..limits() }, 48);
        let all = choices(5, 60);
        all.iter().for_each(|r| h.submit(r.clone()));
        let got = h.finish();
        for r in all {
            let (id, want) = (r.id, alone(&TINY_B, 48, r));
            // What was computed anew after making room has other bits, and near ties may fall otherwise: only the first tokens are compared.
            assert_eq!((got[&id].tokens[0], got[&id].tokens.len(), &got[&id].end), (want.tokens[0], 60, &want.end), "choice {id}");
        }
        h.assert_empty();
    }
}

#[test]
fn an_answer_is_learned_while_nobody_waits_and_the_next_turn_goes_on_behind_it() {
    let turn = |id, tokens: &[u32]| Request { max_tokens: 90, ..ask(id, tokens) };
    let mut h = Harness::caching(&TINY_B, limits(), 48, CacheOptions { spacing: 64, ..eager() });
    h.submit(turn(0, &PROMPT[..100]));
    let first = h.finish().remove(&0).unwrap();
    assert_eq!(first.end, Some(End::Length));
    let next = [&PROMPT[..100], &first.tokens, &PROMPT[100..120]].concat();
    h.submit(turn(2, &next));
    let second = h.finish().remove(&2).unwrap();
    assert_eq!(second.cached, Some(176), "190 tokens of the first turn, on the grid");
    assert_eq!(seen(&second), seen(&alone(&TINY_B, 48, turn(2, &next))));
    h.assert_empty();
    // A request puts a lesson off and does not wait for it; it is learned later.
    h.submit(turn(4, &branch(60, 3)));
    while h.engine.counts() != (0, 0) {
        h.step();
    }
    h.step();
    h.submit(turn(6, &branch(61, 4)));
    assert_eq!(h.engine.counts(), (0, 1));
    h.finish();
    let long = [branch(60, 3), h.answers()[&4].tokens.clone(), vec![1; 9]].concat();
    h.submit(turn(8, &long));
    assert_eq!(h.finish()[&8].cached, Some(160), "173 tokens");
    h.assert_empty();
}
