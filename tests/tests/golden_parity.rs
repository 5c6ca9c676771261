//! The reference's tokens and logits over HTTP, whatever the placement, the transport, the batch and the chunking.
#![allow(clippy::unwrap_used, reason = "tests")]

use tandem_tests::{
    Launch, checkpoints,
    golden::{Golden, PROMPTS},
    parity::{assert_greedy, assert_logits},
};

fn f32_up(model: &std::path::Path, args: &[&str]) -> Launch {
    Launch::up().model(model).args(["--dtype", "f32", "--max-logprobs", "-1"]).args(args.iter().copied())
}

async fn tiny_tokens(args: &[&str], together: bool) {
    let cluster = f32_up(checkpoints::tiny(), args).ready();
    assert_greedy(&cluster.client(), &Golden::open("tiny"), &PROMPTS, together).await;
}

#[tokio::test]
async fn tiny_tokens_and_logits() {
    let cluster = f32_up(checkpoints::tiny(), &[]).ready();
    let golden = Golden::open("tiny");
    for n in PROMPTS {
        let worst = assert_logits(&cluster.client(), &golden, n).await;
        println!("tiny, prompt of {n}: largest difference {worst:.2e}");
    }
    assert_greedy(&cluster.client(), &golden, &PROMPTS, false).await;
}

#[tokio::test]
async fn tiny_b_tokens_and_logits() {
    let cluster = f32_up(checkpoints::tiny_b(), &["--experts", "cpu,cpu", "--split", "experts"]).ready();
    let golden = Golden::open("tiny-b");
    for n in PROMPTS {
        let worst = assert_logits(&cluster.client(), &golden, n).await;
        println!("tiny-b, prompt of {n}: largest difference {worst:.2e}");
    }
    assert_greedy(&cluster.client(), &golden, &PROMPTS, true).await;
}

#[tokio::test]
async fn three_workers_by_layers() {
    tiny_tokens(&["--experts", "cpu,cpu,cpu", "--split", "layers"], true).await;
}

#[tokio::test]
async fn three_workers_by_experts() {
    tiny_tokens(&["--experts", "cpu,cpu,cpu", "--split", "experts", "--link", "tcp"], true).await;
}

#[tokio::test]
async fn three_workers_by_ffn_slice_over_grpc() {
    tiny_tokens(&["--experts", "cpu,cpu,cpu", "--split", "ffn", "--link", "grpc"], true).await;
}

#[tokio::test]
async fn workers_that_share_memory_with_attention() {
    tiny_tokens(&["--experts", "cpu,cpu", "--split", "ffn", "--shared-rows", "on"], true).await;
    tiny_tokens(&["--experts", "cpu,cpu", "--split", "experts", "--shared-rows", "on", "--resident-layers", "3-5:0-3"], true).await;
}

#[tokio::test]
async fn resident_layers_and_expert_ranges() {
    tiny_tokens(&["--resident-layers", "3-4,7", "--experts", "cpu"], true).await;
    tiny_tokens(&["--resident-layers", "3-5:0-7", "--experts", "cpu,cpu", "--split", "ffn"], true).await;
}

#[tokio::test]
async fn everything_resident_needs_no_expert_worker() {
    let cluster = f32_up(checkpoints::tiny(), &["--resident-layers", "all"]).ready();
    assert!(cluster.pids("tandem-experts").is_empty());
    assert_greedy(&cluster.client(), &Golden::open("tiny"), &PROMPTS, true).await;
}

#[tokio::test]
async fn chunked_at_1_7_and_64() {
    for chunk in ["1", "7", "64"] {
        tiny_tokens(&["--prefill-chunk", chunk], true).await;
    }
}

#[tokio::test]
async fn steps_in_two_micro_batches() {
    tiny_tokens(&["--overlap-rows", "2"], true).await;
    tiny_tokens(&["--overlap-rows", "5", "--experts", "cpu,cpu", "--split", "ffn", "--shared-rows", "on", "--resident-layers", "4"], true)
        .await;
}

#[tokio::test]
async fn several_streams_share_batches_and_each_equals_its_solo_run() {
    let cluster = f32_up(checkpoints::tiny(), &["--max-batch", "4", "--experts", "cpu,cpu", "--split", "layers"]).ready();
    let (client, golden) = (cluster.client(), Golden::open("tiny"));
    // Three rounds of all prompts at once: more than max_batch, so requests join and leave in mid-flight.
    let rounds = (0..3).map(|_| assert_greedy(&client, &golden, &PROMPTS, true));
    futures::future::join_all(rounds).await;
    let metrics = client.get("/metrics").await.text;
    assert!(
        tandem_tests::client::metric_in(&metrics, "vllm:generation_tokens_total", &[])
            >= f64::from(u32::try_from(3 * 48 * PROMPTS.len()).unwrap())
    );
}
