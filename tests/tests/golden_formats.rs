//! Quantised checkpoints over HTTP: each reproduces the reference's tokens and log-probabilities for its own dequantised weights.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::path::Path;

use serde_json::{Value, json};
use tandem_model::synthetic::Quantised;
use tandem_tests::{
    Client, Cluster, Launch, checkpoints,
    golden::{Golden, PROMPTS, fixtures},
    parity::{assert_greedy, assert_logits},
};

fn up(model: &Path, args: &[&str]) -> Cluster {
    Launch::up().model(model).args(["--dtype", "f32", "--max-logprobs", "-1"]).args(args.iter().copied()).ready()
}

async fn reproduces(client: &Client, name: &str) {
    let golden = Golden::open(name);
    for n in PROMPTS {
        let worst = assert_logits(client, &golden, n).await;
        println!("{name}, prompt of {n}: largest difference {worst:.2e}");
    }
    assert_greedy(client, &golden, &PROMPTS, true).await;
}

#[tokio::test]
async fn fp8_cut_anywhere() {
    // 64 wide experts in three slices: none but the first begins on a scale's block.
    let cluster = up(&checkpoints::twin(checkpoints::tiny(), Quantised::Fp8), &["--experts", "cpu,cpu,cpu", "--split", "ffn"]);
    reproduces(&cluster.client(), "tiny-fp8").await;
    let cluster = up(&checkpoints::twin(checkpoints::tiny_b(), Quantised::Fp8), &["--experts", "cpu,cpu", "--split", "experts"]);
    reproduces(&cluster.client(), "tiny-b-fp8").await;
}

#[tokio::test]
async fn nvfp4_of_modelopt_cut_in_blocks() {
    let cluster = up(&checkpoints::twin(checkpoints::tiny(), Quantised::Nvfp4), &["--experts", "cpu,cpu,cpu", "--split", "ffn"]);
    reproduces(&cluster.client(), "tiny-nvfp4").await;
    let cluster = up(&checkpoints::twin(checkpoints::tiny_b(), Quantised::Nvfp4), &["--resident-layers", "1-2", "--experts", "cpu"]);
    reproduces(&cluster.client(), "tiny-b-nvfp4").await;
}

#[tokio::test]
async fn nvfp4_of_compressed_tensors() {
    let cluster = up(&checkpoints::twin(checkpoints::tiny_b(), Quantised::Nvfp4Packed), &[]);
    reproduces(&cluster.client(), "tiny-b-nvfp4").await;
}

#[tokio::test]
async fn gguf_of_thirteen_types_with_its_own_tokenizer() {
    let Some(model) = checkpoints::gguf("tinyk-MIX") else { return };
    let cluster = up(&model, &["--experts", "cpu,cpu", "--split", "experts"]);
    let client = cluster.client();
    reproduces(&client, "tinyk-MIX").await;

    // The reference tokenizer's cases, and the template of the file.
    let cases: Value = serde_json::from_slice(&std::fs::read(fixtures().join("gold/tokenizer-cases.json")).unwrap()).unwrap();
    for case in cases.as_array().unwrap() {
        let (text, ids) = (&case["text"], &case["ids"]);
        let tokenized = client.post("/tokenize", &json!({ "model": "any", "prompt": text, "add_special_tokens": false })).await;
        assert_eq!(&tokenized.body["tokens"], ids, "{text}: {}", tokenized.text);
        let back = client.post("/detokenize", &json!({ "model": "any", "tokens": ids })).await;
        assert_eq!(&back.body["prompt"], text, "{}", back.text);
    }
    let messages = json!([{ "role": "user", "content": "hi" }]);
    let rendered = client.post("/tokenize", &json!({ "model": "any", "messages": messages })).await;
    let text = client.post("/detokenize", &json!({ "model": "any", "tokens": rendered.body["tokens"] })).await;
    assert_eq!(text.body["prompt"], "[gMASK]<sop><|user|>\nhi<|assistant|>\n", "{}", rendered.text);
}

#[tokio::test]
async fn gguf_as_llama_quantize_makes_it() {
    let Some(model) = checkpoints::gguf("tinyk-Q4_K_M") else { return };
    let cluster = up(&model, &[]);
    reproduces(&cluster.client(), "tinyk-Q4_K_M").await;
}
