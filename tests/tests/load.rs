//! Many streams at once, some of which are left by their clients: every answer is the one that its request gets alone, and nothing is held
//! when all is over.
//!
//! The short form is part of the suite. The long one is what the numbers in `docs/performance.md` come from:
//! `cargo test -p tandem-tests --test load -- --ignored --nocapture`. Neither asserts a time: they print what they saw.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use serde_json::{Value, json};
use tandem_tests::{Client, Launch};

/// Streams at a time.
const STREAMS: u64 = 64;

/// One request, and the token ids that it is answered with when it is alone.
struct Case {
    path: &'static str,
    body: Value,
    want: Vec<u64>,
}

/// What all streams saw.
#[derive(Default)]
struct Seen {
    finished: AtomicU64,
    left: AtomicU64,
    tokens: AtomicU64,
    /// Milliseconds between the tokens of a stream.
    gaps: Mutex<Vec<f64>>,
}

/// Short and long prompts, chat and text, greedy and sampled, with penalties, with several choices.
fn requests() -> Vec<(&'static str, Value)> {
    let chat = |text: &str, more: Value| merged(json!({ "messages": [{ "role": "user", "content": text }], "max_tokens": 60 }), more);
    let text = |prompt: Value, more: Value| merged(json!({ "prompt": prompt, "max_tokens": 90, "ignore_eos": true }), more);
    let ids = |n: u32, salt: u32| json!((0..n).map(|t| (t * t * 31 + t * salt) % 1400).collect::<Vec<u32>>());
    let long = "The quick brown fox jumps over the lazy dog. ".repeat(12);
    vec![
        ("/v1/chat/completions", chat("What is the capital of France?", json!({}))),
        ("/v1/chat/completions", chat("Repeat: 🤖🎉 안녕하세요", json!({ "temperature": 0.9, "seed": 3 }))),
        ("/v1/chat/completions", chat(&long, json!({ "temperature": 1.1, "seed": 4, "top_p": 0.9 }))),
        ("/v1/chat/completions", chat("Who are you?", json!({ "reasoning_effort": "none", "logprobs": true }))),
        ("/v1/completions", text(json!("Once upon a time"), json!({ "temperature": 1.2, "seed": 11, "presence_penalty": 0.5 }))),
        ("/v1/completions", text(json!("Once upon a time"), json!({ "temperature": 1.2, "seed": 12, "repetition_penalty": 1.2 }))),
        ("/v1/completions", text(ids(7, 3), json!({ "max_tokens": 140 }))),
        ("/v1/completions", text(ids(300, 7), json!({ "temperature": 0.8, "seed": 5 }))),
        ("/v1/completions", text(ids(700, 9), json!({ "max_tokens": 30 }))),
        ("/v1/completions", text(ids(700, 9), json!({ "max_tokens": 50, "temperature": 1.0, "seed": 6 }))),
    ]
}

fn merged(mut base: Value, more: Value) -> Value {
    base["model"] = json!("any");
    base["return_token_ids"] = json!(true);
    base.as_object_mut().unwrap().entry("temperature").or_insert(json!(0));
    for (key, value) in more.as_object().unwrap() {
        base[key] = value.clone();
    }
    base
}

/// Reads a stream; leaves it after `patience` tokens. Answers with the ids that came, and whether the stream reached its end.
async fn read(client: &Client, case: &Case, patience: usize, seen: &Seen) -> (Vec<u64>, bool) {
    let mut stream = client.live(case.path, &case.body).await;
    let (mut ids, mut last) = (Vec::new(), None);
    while let Some(data) = stream.next().await {
        if data == "[DONE]" {
            return (ids, true);
        }
        let chunk: Value = serde_json::from_str(&data).unwrap();
        assert!(chunk.get("error").is_none(), "{data}");
        let new = chunk["choices"][0]["token_ids"].as_array().map_or(0, |new| {
            ids.extend(new.iter().map(|id| id.as_u64().unwrap()));
            new.len()
        });
        if new > 0 {
            let now = Instant::now();
            if let Some(last) = last.replace(now) {
                let gap = now.duration_since(last).as_secs_f64() * 1e3;
                seen.gaps.lock().extend(std::iter::repeat_n(gap / new as f64, new));
            }
            seen.tokens.fetch_add(new as u64, Ordering::Relaxed);
        }
        if ids.len() >= patience {
            return (ids, false);
        }
    }
    panic!("the stream ended without [DONE]: {}", case.body);
}

/// A number below `n` that depends on stream and turn alone.
fn draw(stream: u64, turn: u64, n: u64) -> u64 {
    let mut x = (stream << 32 | turn).wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    x ^= x >> 29;
    x = x.wrapping_mul(0xBF58_476D_1CE4_E5B9);
    (x >> 33) % n
}

async fn under_load(length: Duration) {
    let places = STREAMS.to_string();
    let cluster = Launch::up().args(["--max-batch", &places, "--kv-tokens", "98304", "--max-num-batched-tokens", "128"]).ready();
    let client = cluster.client();
    let alone = Seen::default();
    let mut cases = Vec::new();
    for (path, body) in requests() {
        let mut case = Case { path, body, want: Vec::new() };
        let (want, whole) = read(&client, &case, usize::MAX, &alone).await;
        assert!(whole && !want.is_empty());
        case.want = want;
        cases.push(case);
    }
    let (cases, seen) = (Arc::new(cases), Arc::new(Seen::default()));
    let started = Instant::now();
    let streams = (0..STREAMS).map(|stream| {
        let (client, cases, seen) = (client.clone(), Arc::clone(&cases), Arc::clone(&seen));
        tokio::spawn(async move {
            for turn in 0.. {
                if started.elapsed() > length {
                    return;
                }
                let case = &cases[draw(stream, turn, cases.len() as u64) as usize];
                // A third of them go away: before the first token, or somewhere on the way.
                let leaves = draw(stream, turn + 1_000_000, 3) == 0;
                let patience = if leaves { draw(stream, turn + 2_000_000, case.want.len() as u64) as usize } else { usize::MAX };
                if patience == 0 {
                    let wait = Duration::from_millis(draw(stream, turn + 3_000_000, 40));
                    let _gone = tokio::time::timeout(wait, client.live(case.path, &case.body)).await;
                    seen.left.fetch_add(1, Ordering::Relaxed);
                    continue;
                }
                let (ids, whole) = read(&client, case, patience, &seen).await;
                assert_eq!(ids, case.want[..ids.len()], "stream {stream}, turn {turn}: {}", case.body);
                assert!(!whole || ids.len() == case.want.len());
                let counter = if whole { &seen.finished } else { &seen.left };
                counter.fetch_add(1, Ordering::Relaxed);
            }
        })
    });
    for stream in streams.collect::<Vec<_>>() {
        stream.await.unwrap();
    }
    let took = started.elapsed();
    // Nothing is held: no request, no place in a batch, no page but those of the prefix cache.
    for metric in ["tandem_requests_running", "tandem_requests_waiting", "tandem_kv_cache_usage_ratio"] {
        client.wait_metric(metric, &[], Duration::from_secs(30), |held| held == 0.0).await;
    }
    let stats = client.get("/v1/stats").await.body;
    assert_eq!(stats["requests"]["running"], 0, "{stats}");
    let (finished, left) = (seen.finished.load(Ordering::Relaxed), seen.left.load(Ordering::Relaxed));
    assert!(finished >= STREAMS && left > 0, "{finished} finished, {left} left");
    assert_eq!(client.metric("tandem_preemptions_total", &[]).await, 0.0, "there is room for all");
    let mut gaps = std::mem::take(&mut *seen.gaps.lock());
    gaps.sort_unstable_by(f64::total_cmp);
    let at = |share: f64| gaps[((gaps.len() - 1) as f64 * share) as usize];
    println!(
        "{STREAMS} streams, {:.0} s: {finished} answers whole and equal, {left} left by their clients, {} tokens; between two tokens of a stream \
         p50 {:.1} ms, p90 {:.1} ms, p99 {:.1} ms (p99/p50 {:.2}), most {:.1} ms",
        took.as_secs_f64(),
        seen.tokens.load(Ordering::Relaxed),
        at(0.5),
        at(0.9),
        at(0.99),
        at(0.99) / at(0.5),
        at(1.0)
    );
}

#[tokio::test]
async fn sixty_four_streams_are_answered_as_each_alone_and_leave_nothing() {
    under_load(Duration::from_secs(15)).await;
}

#[tokio::test]
#[ignore = "five minutes"]
async fn sixty_four_streams_for_five_minutes() {
    under_load(Duration::from_secs(300)).await;
}
