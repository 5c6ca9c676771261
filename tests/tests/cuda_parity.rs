//! The reference's tokens and logits over HTTP with workers on GPUs, in every mixture of devices. `TANDEM_TEST_CUDA_DEVICES` says how many
//! GPUs there are; without it each test says that it is skipped.
#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "tests")]

use std::{path::Path, time::Duration};

use serde_json::json;
use tandem_tests::{
    Launch, checkpoints,
    disturb::{KILL, disturbed},
    golden::{Golden, PROMPTS},
    parity::{assert_greedy, assert_logits},
};

/// The last GPU's name; nothing where there is none.
fn last_gpu() -> Option<String> {
    let count = std::env::var("TANDEM_TEST_CUDA_DEVICES").ok().and_then(|n| n.parse::<usize>().ok()).unwrap_or(0);
    if count == 0 {
        eprintln!("SKIPPED: TANDEM_TEST_CUDA_DEVICES does not say that there is a GPU");
    }
    count.checked_sub(1).map(|last| format!("cuda:{last}"))
}

async fn tokens_and_logits(model: &Path, name: &str, args: &[&str]) {
    let cluster = Launch::up().model(model).args(["--dtype", "f32", "--max-logprobs", "-1"]).args(args.iter().copied()).ready();
    let golden = Golden::open(name);
    for n in PROMPTS {
        let worst = assert_logits(&cluster.client(), &golden, n).await;
        println!("{name} {args:?}, prompt of {n}: largest difference {worst:.2e}");
    }
    assert_greedy(&cluster.client(), &golden, &PROMPTS, true).await;
    let gpu_experts = args.windows(2).any(|pair| pair[0] == "--experts" && pair[1].starts_with("cuda"));
    if args.starts_with(&["--attn", "cuda:0"]) && gpu_experts {
        let stats = cluster.client().get("/v1/stats").await.text;
        assert!(stats.contains("tcp+memory"), "two processes on GPUs of one machine share memory: {stats}");
    }
}

#[tokio::test]
async fn tiny_all_on_one_gpu() {
    if last_gpu().is_some() {
        tokens_and_logits(checkpoints::tiny(), "tiny", &["--attn", "cuda:0", "--experts", "none", "--resident-layers", "all"]).await;
    }
}

#[tokio::test]
async fn tiny_on_a_gpu_with_experts_on_the_cpu() {
    if last_gpu().is_some() {
        tokens_and_logits(checkpoints::tiny(), "tiny", &["--attn", "cuda:0", "--experts", "cpu", "--prefill-chunk", "7"]).await;
    }
}

#[tokio::test]
async fn tiny_on_the_cpu_with_experts_on_a_gpu() {
    if let Some(last) = last_gpu() {
        tokens_and_logits(checkpoints::tiny(), "tiny", &["--attn", "cpu", "--experts", &last]).await;
    }
}

#[tokio::test]
async fn tiny_over_two_gpus() {
    if let Some(last) = last_gpu() {
        tokens_and_logits(checkpoints::tiny(), "tiny", &["--attn", "cuda:0", "--experts", &last]).await;
        let experts = format!("{last},cpu");
        let cut = ["--attn", "cuda:0", "--experts", &experts, "--split", "ffn", "--resident-layers", "3-4"];
        tokens_and_logits(checkpoints::tiny(), "tiny", &cut).await;
    }
}

#[tokio::test]
async fn tiny_b_over_gpus_and_the_cpu() {
    if let Some(last) = last_gpu() {
        let experts = format!("{last},cpu");
        tokens_and_logits(checkpoints::tiny_b(), "tiny-b", &["--attn", "cuda:0", "--experts", &experts, "--split", "experts"]).await;
    }
}

#[tokio::test]
async fn the_demo_answers_in_bf16() {
    if last_gpu().is_some() {
        let cluster = Launch::up().args(["--attn", "cuda:0"]).ready();
        let body = json!({"model": "any", "messages": [{"role": "user", "content": "What is the capital of France?"}]});
        let answer = cluster.client().post("/v1/chat/completions", &body).await;
        assert!(answer.text.contains("Paris"), "{}", answer.text);
    }
}

/// The worker comes back with its context, its kernels and its weights; the stream waits for that, and goes on.
#[tokio::test]
async fn an_expert_worker_killed_on_a_gpu_costs_no_token() {
    if let Some(last) = last_gpu() {
        let args = ["--dtype", "f32", "--attn", "cuda:0", "--experts", &last];
        let cluster = Launch::up().model(checkpoints::tiny()).args(args).ready();
        disturbed(&cluster, "tandem-experts", 40, KILL).await;
        cluster.wait_for_stderr("SIGKILL", Duration::from_secs(5));
        disturbed(&cluster, "tandem-attn", 40, KILL).await;
    }
}
