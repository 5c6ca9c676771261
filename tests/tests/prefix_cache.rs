//! The prefix cache through HTTP: with it and without it, one in a batch or alone, before and after a death, the answers are the same
//! bytes (T-34, T-37).
#![allow(clippy::unwrap_used, reason = "tests")]

use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tandem_tests::{Client, Cluster, Launch, checkpoints, cluster::send};

/// Few pages: what is remembered is given up again and again. Chunks of 112 rows.
const FLAGS: [&str; 8] = ["--dtype", "f32", "--max-num-batched-tokens", "128", "--kv-tokens", "2048", "--prefix-cache-interval", "256"];

fn cluster(more: &[&str]) -> Cluster {
    Launch::up().model(checkpoints::tiny()).args(FLAGS).args(more.iter().copied()).ready()
}

/// Of a document, its first `shared` tokens, then others.
fn prompt(shared: u32, salt: u32) -> Vec<u32> {
    (0..shared).map(|t| (t * t * 31 + t * 7) % 490).chain((0..11).map(|t| (t * 5 + salt) % 490)).collect()
}

fn body(prompt: &[u32]) -> Value {
    json!({ "model": "any", "prompt": prompt, "max_tokens": 4, "temperature": 0, "logprobs": 2, "ignore_eos": true, "return_token_ids": true })
}

/// What must be the same: tokens, logprobs, all of it.
fn choices(body: &Value) -> String {
    body["choices"].to_string()
}

fn cached(body: &Value) -> u64 {
    body["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
}

async fn answer(client: &Client, prompt: &[u32]) -> Value {
    let answer = client.post("/v1/completions", &body(prompt)).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    answer.body
}

#[tokio::test]
async fn t37_the_cache_shows_in_usage_and_metrics_and_in_no_answer() {
    let (with, without) = (cluster(&[]), cluster(&["--no-prefix-cache"]));
    let (with_cache, plain) = (with.client(), without.client());
    // Around the ends of selections (16 + 3 tokens), pools (4), pages (64), chunks (112) and remembered positions.
    let cuts =
        [0, 3, 15, 16, 19, 20, 63, 64, 65, 66, 67, 68, 111, 112, 113, 127, 128, 129, 191, 223, 224, 225, 255, 256, 257, 447, 448, 500];
    let prompts: Vec<Vec<u32>> = std::iter::once(prompt(600, 0)).chain(cuts.map(|cut| prompt(cut, 1))).collect();
    let mut want = Vec::new();
    let mut hits = 0;
    for (i, prompt) in prompts.iter().enumerate() {
        let (got, expected) = tokio::join!(answer(&with_cache, prompt), answer(&plain, prompt));
        assert_eq!(choices(&got), choices(&expected), "prompt {i}");
        assert_eq!(cached(&expected), 0);
        // Nothing of another prompt is ever taken: at most what this one shares with the document, and with the one before.
        assert!(cached(&got) < prompt.len() as u64);
        hits += cached(&got);
        want.push(choices(&expected));
    }
    assert!(hits > 2000, "most of the document's tokens came from the cache: {hits}");

    // The same prompt twice: more than nine tenths are there, and the answer is the same.
    let long = prompt(600, 2);
    let (first, second) = (answer(&with_cache, &long).await, answer(&with_cache, &long).await);
    assert_eq!(choices(&first), choices(&second));
    assert!(cached(&second) * 10 > long.len() as u64 * 9, "{} of {}", cached(&second), long.len());
    for (own, alias) in [
        ("tandem_prefix_cache_queries_total", "vllm:prefix_cache_queries_total"),
        ("tandem_prefix_cache_hits_total", "vllm:prefix_cache_hits_total"),
    ] {
        let value = with_cache.metric(own, &[]).await;
        assert!(value >= hits as f64 && value == with_cache.metric(alias, &[]).await, "{own} {value}");
        assert_eq!(plain.metric(own, &[]).await, 0.0);
    }
    let steps = with_cache.metric("vllm:iteration_tokens_total_count", &[]).await;
    let rows = with_cache.metric("vllm:iteration_tokens_total_sum", &[]).await;
    assert!(steps > 0.0 && rows > steps, "{steps} steps of {rows} tokens");

    // Logprobs of a prompt need all of its rows.
    let mut scored = body(&long);
    scored["prompt_logprobs"] = json!(1);
    let (got, expected) = tokio::join!(with_cache.post("/v1/completions", &scored), plain.post("/v1/completions", &scored));
    assert_eq!((choices(&got.body), cached(&got.body)), (choices(&expected.body), 0));

    // An answer is remembered too, when nobody waits: the next turn goes on behind it.
    let turn = |prompt: &[u32]| {
        let mut body = body(prompt);
        body["max_tokens"] = json!(160);
        body
    };
    let opening: Vec<u32> = (0..100).map(|t| (t * t * 17 + 3) % 490).collect();
    let computed = "vllm:iteration_tokens_total_sum";
    let before = with_cache.metric(computed, &[]).await;
    let said = with_cache.post("/v1/completions", &turn(&opening)).await.body;
    let ids: Vec<u32> = said["choices"][0]["token_ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
    assert_eq!(ids.len(), 160);
    with_cache.wait_metric(computed, &[], Duration::from_secs(20), |rows| rows >= before + 100.0 + 159.0 + 160.0).await;
    let next = [opening, ids, vec![5; 9]].concat();
    let (got, expected) = tokio::join!(answer(&with_cache, &next), answer(&plain, &next));
    assert_eq!((choices(&got), cached(&got)), (choices(&expected), 256), "of 259 tokens of the first turn, on the grid of 16");

    // The choices of one prompt compute it once, and are what they are apart.
    let mut several = body(&prompt(300, 77));
    (several["n"], several["temperature"], several["seed"]) = (json!(4), json!(1.2), json!(5));
    let before = with_cache.metric(computed, &[]).await;
    let (got, expected) = tokio::join!(with_cache.post("/v1/completions", &several), plain.post("/v1/completions", &several));
    assert_eq!(choices(&got.body), choices(&expected.body));
    let rows = with_cache.metric(computed, &[]).await - before;
    assert!(rows <= 311.0 + 4.0 * 4.0, "{rows} rows for a prompt of 311 tokens and four choices of four");

    // All at once, several times, while places and pages are short.
    let all = prompts.iter().chain(&prompts).map(|prompt| answer(&with_cache, prompt));
    for (i, got) in futures::future::join_all(all).await.iter().enumerate() {
        assert_eq!(choices(got), want[i % prompts.len()], "prompt {i}, in a crowd");
    }

    // The cache dies with its worker; what is answered does not change.
    send(with.pids("tandem-attn")[0], Signal::SIGKILL);
    let after = answer(&with_cache, &long).await;
    assert_eq!((choices(&after), cached(&after)), (choices(&first), 0));
    assert_eq!(choices(&answer(&with_cache, &long).await), choices(&first));

    // Nothing is held once all is done.
    with_cache.wait_metric("tandem_kv_cache_usage_ratio", &[], Duration::from_secs(10), |used| used == 0.0).await;
}

/// An agent's conversation: each turn is the whole history, answered anew.
#[tokio::test]
async fn t34_thirty_turns_are_the_same_with_and_without() {
    let flags = ["--max-batch", "2", "--kv-tokens", "16384"];
    let with = Launch::up().args(flags).ready();
    let without = Launch::up().args(flags).args(["--no-prefix-cache"]).ready();
    let (with_cache, plain) = (with.client(), without.client());
    let mut messages = vec![json!({ "role": "system", "content": "You answer briefly and keep track of what was said. ".repeat(6) })];
    let (mut hits, mut prompts) = (0, 0);
    for turn in 0..30 {
        messages.push(json!({ "role": "user", "content": format!("Turn {turn}: what is {turn} plus {}?", turn * 3 + 1) }));
        let body = json!({ "model": "any", "messages": messages, "max_tokens": 12, "temperature": 0 });
        let (got, expected) = tokio::join!(with_cache.post("/v1/chat/completions", &body), plain.post("/v1/chat/completions", &body));
        assert_eq!((got.status, expected.status), (200, 200), "{} {}", got.text, expected.text);
        assert_eq!(choices(&got.body), choices(&expected.body), "turn {turn}");
        hits += cached(&got.body);
        prompts += got.body["usage"]["prompt_tokens"].as_u64().unwrap();
        messages.push(json!({ "role": "assistant", "content": got.body["choices"][0]["message"]["content"] }));
    }
    assert!(hits * 10 > prompts * 8, "a turn goes on from the one before: {hits} of {prompts} prompt tokens");
}
