//! Continuous batching over a whole small model: what a request is answered depends on nothing but the request, and whatever it held is
//! free when it ends.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says so")]

mod common;
#[path = "common/requests.rs"]
mod requests;

use std::{
    collections::BTreeMap,
    sync::{Arc, LazyLock},
    time::{Duration, Instant},
};

use common::Gold;
use requests::{Answer, End, Harness, request};
use tandem_kernels::{
    Precision,
    cpu::{CpuBackend, CpuOptions},
};
use tandem_model::synthetic::Preset;
use tandem_proto::attn::v1::ErrorCode;
use tandem_worker_attn::{
    Model, Runner, RunnerLimits,
    cache::CacheOptions,
    engine::{
        Pace,
        parking::{ParkingOptions, Preemption},
        sequence::Request,
    },
    guide::GuideText,
    hop::LocalOnly,
    sampler::SamplingParams,
};

type B = CpuBackend;

static MODEL: LazyLock<Arc<Model<B>>> = LazyLock::new(|| common::model(common::cpu(), &common::preset(Preset::TinyB)));
static GOLD: LazyLock<Gold> = LazyLock::new(|| Gold::open("tiny-b.safetensors"));

fn limits() -> RunnerLimits {
    RunnerLimits { max_rows: 64, max_batch: 4, max_seq_len: 300, kv_tokens: 1024, overlap_rows: 0 }
}

fn harness() -> Harness<B, LocalOnly> {
    Harness::local(&MODEL, limits(), 16)
}

fn prompt(n: usize) -> Vec<u32> {
    GOLD.ids(&format!("p{n}.input_ids"))
}

/// Sampling with everything on.
fn sampled(seed: u64, choice: u32) -> SamplingParams {
    SamplingParams {
        temperature: 1.3,
        top_k: 50,
        top_p: 0.95,
        min_p: 0.001,
        repetition_penalty: 1.2,
        frequency_penalty: 0.3,
        presence_penalty: 0.2,
        seed,
        choice,
        logit_bias: vec![(7, 1.5)],
    }
}

#[test]
fn greedy_continuations_match_the_goldens_when_all_prompts_run_together() {
    let mut h = harness();
    let prompts = [1, 3, 4, 17, 70, 200];
    for n in prompts {
        h.submit(request(n as u64, &prompt(n), 48));
    }
    let answers = h.finish();
    for n in prompts {
        assert_eq!(answers[&(n as u64)].tokens, GOLD.ids(&format!("p{n}.greedy")), "prompt {n}");
        assert_eq!(answers[&(n as u64)].end, Some(End::Length));
    }
    h.assert_empty();
}

#[test]
fn a_batch_answers_bit_for_bit_as_each_request_alone() {
    let requests = || {
        let with = |id, n, sampling| Request { sampling, logprobs: Some(3), ..request(id, &prompt(n), 12) };
        [
            with(1, 17, SamplingParams::default()),
            with(2, 70, sampled(5, 0)),
            with(3, 3, sampled(5, 1)),
            with(4, 4, SamplingParams { temperature: 0.7, seed: 9, ..SamplingParams::default() }),
            with(5, 1, sampled(6, 0)),
        ]
    };
    let mut together = harness();
    for (i, r) in requests().into_iter().enumerate() {
        together.submit(r);
        // Each joins when the others are somewhere else.
        for _ in 0..i {
            together.step();
        }
    }
    let together = together.finish();
    for r in requests() {
        let id = r.id;
        let mut alone = harness();
        alone.submit(r);
        assert_eq!(alone.finish()[&id], together[&id], "request {id}");
    }
}

#[test]
fn a_seed_gives_one_answer_and_choices_differ() {
    let mut h = harness();
    for (id, seed, choice) in [(1, 11, 0), (2, 11, 0), (3, 11, 1), (4, 12, 0)] {
        h.submit(Request { sampling: sampled(seed, choice), ..request(id, &prompt(4), 16) });
    }
    let a = h.finish();
    assert_eq!(a[&1].tokens, a[&2].tokens);
    assert_ne!(a[&1].tokens, a[&3].tokens);
    assert_ne!(a[&1].tokens, a[&4].tokens);
}

#[test]
fn a_preempted_request_is_answered_the_same() {
    let run = |kv_tokens| {
        let mut h = Harness::local(&MODEL, RunnerLimits { kv_tokens, ..limits() }, 16);
        for (id, n) in [(1, 70), (2, 17), (3, 4)] {
            h.submit(Request { sampling: if id == 2 { sampled(3, 0) } else { SamplingParams::default() }, ..request(id, &prompt(n), 100) });
        }
        let answers = h.finish();
        h.assert_empty();
        answers
    };
    // Pages hold 63 tokens: the three need 3 + 2 + 2 of them in the end, and get 4.
    let (roomy, tight) = (run(1024), run(252));
    assert!(tight.values().any(|a| a.started > 1), "somebody was preempted");
    assert!(roomy.values().all(|a| a.started == 1));
    for (id, a) in &roomy {
        assert_eq!((&tight[id].tokens, &tight[id].indices, &tight[id].end), (&a.tokens, &a.indices, &a.end), "request {id}");
    }
}

/// Six requests where pages are short, and each of them alone.
fn crowd(parking: Option<ParkingOptions>, cache: bool) -> (BTreeMap<u64, Answer>, u64) {
    let tight = RunnerLimits { kv_tokens: if parking.is_some() { 252 } else { 4096 }, ..limits() };
    let cache = cache.then(|| CacheOptions { spacing: 1, interval: 16, ..CacheOptions::default() });
    let pace = Pace { parking: parking.unwrap_or_default(), cache, ..requests::pace(16) };
    let mut h = Harness::new(Runner::local(Arc::clone(&MODEL), tight).unwrap(), pace);
    for (id, n) in [(1, 70), (2, 17), (3, 4), (4, 70), (5, 1), (6, 17)] {
        let sampling = if id % 2 == 0 { sampled(id, 0) } else { SamplingParams::default() };
        h.submit(Request { sampling, logprobs: Some(2), ..request(id, &prompt(n), 100) });
    }
    let mut most = 0;
    while !h.engine.is_idle() {
        h.step();
        most = most.max(h.engine.parked_bytes());
    }
    assert_eq!(h.engine.parked_bytes(), 0);
    h.assert_empty();
    (h.answers(), most)
}

#[test]
fn a_copy_brings_a_preempted_request_back_bit_for_bit() {
    let roomy = crowd(None, false).0;
    for cache in [false, true] {
        let (tight, most) = crowd(Some(ParkingOptions { preemption: Preemption::Snapshot, bytes: 1 << 30 }), cache);
        assert!(tight.values().any(|a| a.started > 1) && most > 0, "somebody made room");
        for (id, a) in &tight {
            let mut a = a.clone();
            (a.started, a.cached) = (1, None);
            assert_eq!(a, roomy[id], "request {id}, cache {cache}");
        }
    }
}

#[test]
fn copies_keep_to_their_budget_and_the_rest_is_computed_again() {
    let roomy = crowd(None, false).0;
    let budget = 400_000;
    for options in [(Preemption::Snapshot, budget), (Preemption::Auto, budget), (Preemption::Auto, 1 << 30), (Preemption::Snapshot, 0)] {
        let (tight, most) = crowd(Some(ParkingOptions { preemption: options.0, bytes: options.1 }), true);
        assert!(most <= options.1, "{most} bytes");
        assert!(tight.values().any(|a| a.started > 1));
        for (id, a) in &tight {
            assert_eq!(
                (&a.tokens, &a.indices, &a.end),
                (&roomy[id].tokens, &roomy[id].indices, &roomy[id].end),
                "request {id}, {options:?}"
            );
        }
        // The earliest never makes room.
        assert_eq!(tight[&1].started, 1);
    }
}

#[test]
fn a_request_that_is_cancelled_while_it_makes_room_leaves_no_copy() {
    let pace = Pace { parking: ParkingOptions { preemption: Preemption::Snapshot, bytes: 1 << 30 }, ..requests::pace(16) };
    let mut h = Harness::new(Runner::local(Arc::clone(&MODEL), RunnerLimits { kv_tokens: 189, ..limits() }).unwrap(), pace);
    h.submit(request(1, &prompt(70), 90));
    h.submit(request(2, &prompt(17), 90));
    while h.engine.parked_bytes() == 0 {
        assert!(h.step() > 0);
    }
    h.engine.cancel(2);
    assert_eq!(h.engine.parked_bytes(), 0);
    assert_eq!(h.finish()[&1].tokens.len(), 90);
    h.assert_empty();
}

#[test]
fn a_resumed_request_goes_on_with_the_same_tokens() {
    for sampling in [SamplingParams::default(), sampled(21, 2)] {
        let whole = {
            let mut h = harness();
            h.submit(Request { sampling: sampling.clone(), ..request(1, &prompt(17), 30) });
            h.finish()[&1].clone()
        };
        for cut in [1, 12, 29, 30] {
            let mut h = harness();
            h.submit(Request { sampling: sampling.clone(), emitted: whole.tokens[..cut].to_vec(), ..request(2, &prompt(17), 30) });
            let rest = h.finish()[&2].clone();
            assert_eq!(rest.tokens, whole.tokens[cut..], "cut at {cut}");
            assert_eq!(rest.indices, (cut as u32..30).collect::<Vec<_>>());
            assert_eq!(rest.end, Some(End::Length));
        }
    }
}

/// Not the tokens alone: in bf16, where a chunk rounds elsewhere than rows that are computed one by one, every logprob is the same to the bit,
/// wherever an earlier life ended, in company and alone, and where a sequence that made room computes its state again.
#[test]
fn a_resumed_request_goes_on_bit_for_bit_in_bf16() {
    let backend = CpuBackend::new(CpuOptions::new(Precision::Bf16)).unwrap();
    let model = common::model(backend, &common::preset(Preset::TinyB));
    let ask = |id, emitted: &[u32]| Request { logprobs: Some(3), emitted: emitted.to_vec(), ..request(id, &prompt(70), 60) };
    let whole = {
        let mut h = Harness::local(&model, limits(), 16);
        h.submit(ask(1, &[]));
        h.finish()[&1].clone()
    };
    for cut in [1, 2, 31, 59] {
        let mut h = Harness::local(&model, limits(), 16);
        if cut == 31 {
            h.submit(request(9, &prompt(200), 40));
        }
        h.submit(ask(2, &whole.tokens[..cut]));
        let rest = h.finish()[&2].clone();
        assert_eq!((&rest.tokens[..], &rest.logprobs[..]), (&whole.tokens[cut..], &whole.logprobs[cut..]), "cut at {cut}");
    }
    // Room for one of them at its full length, not for two.
    let parking = ParkingOptions { preemption: Preemption::Recompute, bytes: 0 };
    let runner = Runner::local(Arc::clone(&model), RunnerLimits { kv_tokens: 224, ..limits() }).unwrap();
    let mut h = Harness::new(runner, Pace { prefill_chunk: 16, cache: None, parking });
    h.submit(request(8, &prompt(70), 100));
    h.submit(ask(2, &[]));
    let answers = h.finish();
    assert!(answers[&2].started > 1, "it made room");
    assert_eq!((&answers[&2].tokens, &answers[&2].logprobs), (&whole.tokens, &whole.logprobs));
}

/// A grammar holds whatever else shapes the choice: greedy or sampled, with logprobs, alone or beside others, resumed at any token.
#[test]
fn a_guided_request_keeps_to_its_grammar_and_so_does_its_resumption() {
    let vocab = MODEL.dims().vocab as u32;
    // Token i is the text "i,"; the last one ends an answer.
    let mut table = tandem_grammar::TokenTable { stops: vec![vocab - 1], special: vec![vocab - 1], ..Default::default() };
    for id in 0..vocab {
        table.bytes.extend(format!("{id},").bytes());
        table.ends.push(table.bytes.len() as u32);
    }
    let text = GuideText { grammar: tandem_grammar::Grammar::regex("((7|9|13),){5,6}").to_text(), after: b"11,".to_vec() };
    let guided = |id, sampling: &SamplingParams| {
        let guide = Some(text.clone());
        Request {
            sampling: sampling.clone(),
            guide,
            stop_ids: vec![vocab - 1],
            min_tokens: 130,
            logprobs: Some(1),
            ..request(id, &prompt(17), 150)
        }
    };
    // Everything but the tag is unlikely at first, so that the reasoning is short.
    let greedy = SamplingParams { logit_bias: vec![(11, 3.0)], ..SamplingParams::default() };
    let warm = SamplingParams { logit_bias: vec![(11, 9.0)], ..sampled(5, 1) };
    for sampling in [greedy, warm] {
        let mut h = harness();
        h.engine.guides().set_vocabulary(table.clone());
        h.submit(guided(1, &sampling));
        h.submit(request(3, &prompt(4), 20));
        let answers = h.finish();
        let whole = answers[&1].clone();
        assert_eq!(answers[&3].tokens, GOLD.ids("p4.greedy")[..20], "its neighbour is untouched");
        let Some(tag) = whole.tokens.iter().position(|id| id.to_string().ends_with("11")) else {
            assert_eq!(whole.end, Some(End::Length));
            panic!("the tag never came: {:?}", whole.tokens);
        };
        let held = &whole.tokens[tag + 1..];
        assert!(held.iter().all(|id| [7, 9, 13].contains(id)), "{held:?}");
        assert_eq!(whole.end, Some(End::Stop(vocab - 1)), "the end is possible though min_tokens bans it: nothing else is");
        assert_eq!(held.len(), 6, "as long as something else is possible, min_tokens holds");
        for cut in [1, tag, tag + 1, tag + 3, tag + 7] {
            let mut h = harness();
            h.engine.guides().set_vocabulary(table.clone());
            h.submit(Request { emitted: whole.tokens[..cut].to_vec(), ..guided(2, &sampling) });
            let rest = h.finish()[&2].clone();
            assert_eq!((rest.tokens, rest.end), (whole.tokens[cut..].to_vec(), whole.end.clone()), "cut at {cut}");
        }
    }
    let mut h = harness();
    h.submit(guided(1, &SamplingParams::default()));
    h.submit(Request { stop_ids: vec![], ..guided(2, &SamplingParams::default()) });
    let answers = h.finish();
    let failed = |id: u64, code| matches!(&answers[&id].end, Some(End::Error(got, _)) if *got == code);
    assert!(failed(1, ErrorCode::Internal) && answers[&1].tokens.is_empty(), "no vocabulary, no token");
    assert!(failed(2, ErrorCode::Invalid), "nothing could end it");
    h.assert_empty();
}

#[test]
fn stop_ids_end_without_being_emitted_and_are_banned_before_min_tokens() {
    let greedy = GOLD.ids("p17.greedy");
    let stop = greedy[5];
    let first = greedy.iter().position(|id| *id == stop).unwrap();
    let mut h = harness();
    h.submit(Request { stop_ids: vec![stop], ..request(1, &prompt(17), 48) });
    h.submit(Request { stop_ids: vec![stop], min_tokens: first + 3, ..request(2, &prompt(17), 48) });
    let a = h.finish();
    assert_eq!((&a[&1].tokens, &a[&1].end), (&greedy[..first].to_vec(), &Some(End::Stop(stop))));
    assert!(a[&2].tokens.len() >= first + 3 && !a[&2].tokens[..first + 3].contains(&stop));
}

#[test]
fn a_bias_forces_or_bans_a_token() {
    let first = GOLD.ids("p4.greedy")[0];
    let mut h = harness();
    let with =
        |id, bias| Request { sampling: SamplingParams { logit_bias: bias, ..SamplingParams::default() }, ..request(id, &prompt(4), 4) };
    h.submit(with(1, vec![(123, 100.0)]));
    h.submit(with(2, vec![(first, f32::NEG_INFINITY)]));
    let a = h.finish();
    assert_eq!(a[&1].tokens, [123; 4]);
    assert_ne!(a[&2].tokens[0], first);
}

#[test]
fn prompt_logprobs_cover_every_position_once_whatever_the_chunks() {
    let vocab = MODEL.geometry().vocab;
    let (ids, logits) = (prompt(17), GOLD.f32s("p17.logits"));
    for chunk in [1, 5, 16] {
        let mut h = Harness::local(&MODEL, limits(), chunk);
        h.submit(Request { prompt_logprobs: Some(2), logprobs: Some(2), ..request(1, &ids, 1) });
        h.submit(Request { prompt_logprobs: Some(0), ..request(2, &ids, 0) });
        h.submit(Request { prompt_logprobs: Some(1), ..request(3, &ids[..1], 0) });
        let a = h.finish();
        assert_eq!((a[&1].prompt.len(), a[&2].prompt.len(), a[&3].prompt.len()), (16, 16, 0));
        assert_eq!((a[&1].tokens.len(), a[&2].tokens.len(), &a[&2].end, &a[&3].end), (1, 0, &Some(End::Length), &Some(End::Length)));
        for (p, position) in a[&1].prompt.iter().enumerate() {
            let row = &logits[p * vocab..(p + 1) * vocab];
            let max = row.iter().copied().fold(f32::MIN, f32::max);
            let norm = row.iter().map(|v| f64::from(v - max).exp()).sum::<f64>().ln() as f32 + max;
            let actual = position.actual.unwrap();
            assert_eq!(actual.id, ids[p + 1]);
            assert!((actual.logprob - (row[ids[p + 1] as usize] - norm)).abs() <= 2e-4, "position {}", p + 1);
            assert_eq!(position.top[0].id, common::argmax(row));
            assert_eq!((position.top.len(), position.top[1].rank), (2, 2));
        }
    }
}

#[test]
fn cancelling_frees_everything_at_once_in_every_phase() {
    let mut h = harness();
    h.submit(request(1, &prompt(200), 48));
    h.submit(request(2, &prompt(4), 48));
    for id in 3..9 {
        h.submit(request(id, &prompt(3), 48));
    }
    for _ in 0..3 {
        h.step();
    }
    // 1 is in the middle of its prefill, 2 decodes, 8 waits.
    for id in [1, 2, 8] {
        h.engine.cancel(id);
    }
    let a = h.finish();
    for id in [1, 2, 8] {
        assert_eq!(a[&id].end, Some(End::Cancelled));
    }
    assert_eq!((a[&1].tokens.len(), a[&8].started), (0, 0));
    assert_eq!(a[&7].tokens, GOLD.ids("p3.greedy"), "the others went on");
    h.assert_empty();
    h.engine.cancel(1);
    assert_eq!(h.answers(), a, "cancelling what is gone says nothing");
}

#[test]
fn an_overdue_request_ends_with_an_error_and_the_others_go_on() {
    let mut h = harness();
    h.submit(Request { deadline: Instant::now() + Duration::from_secs(3000), ..request(1, &prompt(4), 20) });
    h.submit(request(2, &prompt(3), 20));
    h.step();
    h.engine.step(Instant::now() + Duration::from_secs(3001)).unwrap();
    let a = h.finish();
    assert!(matches!(a[&1].end, Some(End::Error(ErrorCode::Deadline, _))));
    assert_eq!(a[&2].tokens, GOLD.ids("p3.greedy")[..20]);
    h.assert_empty();
}

#[test]
fn what_can_never_run_is_refused_with_numbers() {
    let mut h = Harness::local(&MODEL, RunnerLimits { kv_tokens: 63, ..limits() }, 16);
    h.submit(request(1, &prompt(70), 10));
    h.submit(request(2, &[], 10));
    h.submit(request(3, &[384], 10));
    h.submit(request(4, &prompt(3), 5));
    let a = h.finish();
    let reason = |id: u64| match &a[&id].end {
        Some(End::Error(ErrorCode::Invalid, reason)) => reason.clone(),
        other => panic!("{other:?}"),
    };
    assert!(reason(1).contains("70 prompt tokens") && reason(1).contains("holds 63"), "{}", reason(1));
    assert!(reason(2).contains("empty"));
    assert!(reason(3).contains("384"));
    assert_eq!(a[&4].tokens.len(), 5, "the next one is served");
}

#[test]
fn a_sequence_ends_where_the_context_ends() {
    let mut h = Harness::local(&MODEL, RunnerLimits { max_seq_len: 24, ..limits() }, 16);
    h.submit(request(1, &prompt(17), 100));
    let a = h.finish();
    assert_eq!((a[&1].tokens.as_slice(), &a[&1].end), (&GOLD.ids("p17.greedy")[..7], &Some(End::Length)));
    h.assert_empty();
}
