//! What fewer bits cost on the trained demo model, in its latent cache or its weights: f32 everywhere else, teacher forcing over its golden
//! prompts.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says so")]

mod common;

use std::sync::Arc;

use common::{Gold, argmax};
use tandem_kernels::{
    Precision,
    cpu::{CpuBackend, CpuOptions, LatentType},
};
use tandem_model::{Checkpoint, narrow::Fp8Groups};
use tandem_worker_attn::{Runner, RunnerLimits, observe::Silent};

/// Logits of every row of every golden prompt with its greedy answer.
fn logits(latents: LatentType, checkpoint: &Checkpoint) -> (Vec<Vec<f32>>, usize) {
    let backend = CpuBackend::new(CpuOptions { latents: Some(latents), ..CpuOptions::new(Precision::F32) }).unwrap();
    let model = common::model(backend, checkpoint);
    let limits = RunnerLimits { max_seq_len: 2048, ..common::limits() };
    let mut runner = Runner::local(Arc::clone(&model), limits).unwrap();
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/gold/demo.json");
    let cases: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let ids = |v: &serde_json::Value| v.as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect::<Vec<u32>>();
    let rows = cases["cases"].as_array().unwrap().iter().map(|case| {
        let tokens = [ids(&case["prompt_ids"]), ids(&case["greedy_ids"])].concat();
        let mut state = runner.pool().create().unwrap();
        let logits = runner.forward(&mut state, &tokens, 256, &mut Silent).unwrap();
        runner.pool().free(state);
        logits
    });
    (rows.collect(), model.geometry().vocab)
}

fn log_softmax(row: &[f32]) -> Vec<f64> {
    let most = row.iter().copied().fold(f32::MIN, f32::max);
    let norm = row.iter().map(|v| f64::from(v - most).exp()).sum::<f64>().ln() + f64::from(most);
    row.iter().map(|v| f64::from(*v) - norm).collect()
}

/// Mean KL divergence of the next token's distribution in nats, and the share of rows whose first choice differs.
fn cost(exact: &[Vec<f32>], other: &[Vec<f32>], vocab: usize, what: &str) -> (f64, f64) {
    let (mut kl, mut flips, mut rows) = (0.0, 0, 0);
    for (a, b) in exact.iter().zip(other).flat_map(|(a, b)| a.chunks_exact(vocab).zip(b.chunks_exact(vocab))) {
        let (p, q) = (log_softmax(a), log_softmax(b));
        kl += p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum::<f64>();
        flips += usize::from(argmax(a) != argmax(b));
        rows += 1;
    }
    let (kl, flips) = (kl / f64::from(rows), flips as f64 / f64::from(rows));
    println!("{what}: {rows} tokens, mean KL {kl:.2e} nats, first choice differs for {:.2} %", 100.0 * flips);
    assert!(kl > 0.0, "{what} is used at all");
    (kl, flips)
}

/// The most that the mean KL divergence may be, and the share of tokens whose first choice may change: docs/operations.md.
#[test]
fn fewer_bits_cost_what_the_manual_says() {
    let (exact, vocab) = logits(LatentType::F32, &common::demo());
    assert!(Gold::open("demo.safetensors").has("logits.full"), "the prompts are those of the goldens");
    for (latents, most_kl, most_flips) in [(LatentType::Bf16, 1e-6, 0.001), (LatentType::Fp8, 1e-4, 0.005)] {
        let (kl, flips) = cost(&exact, &logits(latents, &common::demo()).0, vocab, &format!("{latents:?} latents"));
        assert!(kl <= most_kl && flips <= most_flips, "{latents:?}: KL {kl:e}, flips {flips}");
    }
    let group = |attention, kda, mlp| Fp8Groups { attention, kda, mlp };
    for groups in [group(true, false, false), group(false, true, false), group(false, false, true), group(true, true, true)] {
        let narrowed = logits(LatentType::F32, &common::demo().with_fp8(groups)).0;
        let (kl, flips) = cost(&exact, &narrowed, vocab, &format!("weights of {groups} in FP8"));
        assert!(kl <= 1.2e-4 && flips <= 0.008, "{groups}: KL {kl:e}, flips {flips}");
    }
}
