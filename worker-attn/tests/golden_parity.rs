//! The whole model in one process against the Hugging Face reference: prompt logits at every position, greedy continuations through the
//! cache, per-layer streams, router choices and DSA selections.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says so")]

mod common;

use std::sync::Arc;

use common::{Gold, LOGIT_TOLERANCE, argmax, cpu, max_diff, reference};
use tandem_kernels::Backend;
use tandem_model::synthetic::Preset;
use tandem_worker_attn::{Model, layers::Cx, observe::Observer, observe::Silent};

const PROMPTS: [usize; 6] = [1, 3, 4, 17, 70, 200];

/// Every prompt in chunks of `chunk`, then `steps` greedy tokens through the cache.
fn prompts_match<B: Backend>(model: &Arc<Model<B>>, gold: &Gold, chunk: usize, steps: usize) {
    let vocab = model.geometry().vocab;
    let mut runner = common::runner(model);
    for n in PROMPTS {
        let mut state = runner.pool().create().unwrap();
        let logits = runner.forward(&mut state, &gold.ids(&format!("p{n}.input_ids")), chunk, &mut Silent).unwrap();
        let worst = max_diff(&logits, &gold.f32s(&format!("p{n}.logits")));
        assert!(worst <= LOGIT_TOLERANCE, "prompt {n}, chunks of {chunk}: {worst:e}");
        let (greedy, greedy_logits) = (gold.ids(&format!("p{n}.greedy")), gold.f32s(&format!("p{n}.greedy_logits")));
        let mut next = argmax(&logits[(n - 1) * vocab..]);
        for (i, expected) in greedy.iter().enumerate().take(steps) {
            assert_eq!(next, *expected, "prompt {n}, token {i}");
            if i + 1 < greedy.len() {
                let logits = runner.forward(&mut state, &[next], 1, &mut Silent).unwrap();
                let worst = max_diff(&logits, &greedy_logits[(i + 1) * vocab..(i + 2) * vocab]);
                assert!(worst <= LOGIT_TOLERANCE, "prompt {n}, token {i}: {worst:e}");
                next = argmax(&logits);
            }
        }
        runner.pool().free(state);
    }
}

#[test]
fn reference_tiny() {
    let model = common::model(reference(), &common::preset(Preset::Tiny));
    prompts_match(&model, &Gold::open("tiny.safetensors"), 256, 48);
}

#[test]
fn reference_tiny_b_in_chunks() {
    let (model, gold) = (common::model(reference(), &common::preset(Preset::TinyB)), Gold::open("tiny-b.safetensors"));
    prompts_match(&model, &gold, 256, 48);
    for chunk in [1, 7, 64] {
        prompts_match(&model, &gold, chunk, 2);
    }
}

#[test]
fn cpu_in_chunks() {
    for (preset, gold) in [(Preset::Tiny, "tiny.safetensors"), (Preset::TinyB, "tiny-b.safetensors")] {
        let (model, gold) = (common::model(cpu(), &common::preset(preset)), Gold::open(gold));
        for chunk in [1, 7, 64, 256] {
            prompts_match(&model, &gold, chunk, 48);
        }
    }
}

/// Compares everything that a layer leaves behind with a per-layer dump.
struct Compare<'a> {
    gold: &'a Gold,
    checked: usize,
}

impl Compare<'_> {
    /// Values reach several hundred in the streams, so the difference is taken relative to the largest one.
    fn close<B: Backend>(&mut self, cx: &Cx<'_, B>, key: &str, buf: &B::Buf) {
        let expected = self.gold.f32s(key);
        let mut got = vec![0.0; expected.len()];
        cx.b.download(buf, 0, &mut got).unwrap();
        let scale = expected.iter().fold(1.0f32, |m, v| m.max(v.abs()));
        let worst = max_diff(&got, &expected) / scale;
        assert!(worst <= 2e-5, "{key}: {worst:e}");
        self.checked += 1;
    }
}

impl<B: Backend> Observer<B> for Compare<'_> {
    fn embedded(&mut self, cx: &Cx<'_, B>) {
        let embed = self.gold.f32s("embed");
        let copies: Vec<f32> = embed.chunks(cx.d.hidden).flat_map(|row| row.repeat(cx.d.mhc.streams)).collect();
        let mut got = vec![0.0; copies.len()];
        cx.b.download(&cx.buf.streams, 0, &mut got).unwrap();
        assert_eq!(got, copies, "the embedding is exact");
    }

    fn mixer(&mut self, cx: &Cx<'_, B>, layer: usize) {
        self.close(cx, &format!("layer{layer}.attn_out"), &cx.buf.y);
        let key = format!("layer{layer}.dsa_topk");
        if self.gold.has(&key) {
            let expected = self.gold.i32s(&key);
            let mut got = vec![0; expected.len()];
            cx.b.download_i32(&cx.buf.selected, 0, &mut got).unwrap();
            assert_eq!(got, expected, "{key}");
            self.checked += 1;
        }
    }

    fn routed(&mut self, cx: &Cx<'_, B>, layer: usize) {
        let (ids, weights) = (self.gold.i32s(&format!("layer{layer}.router_ids")), self.gold.f32s(&format!("layer{layer}.router_weights")));
        let (mut got_ids, mut got_weights) = (vec![0; ids.len()], vec![0.0; ids.len()]);
        cx.b.download_i32(&cx.buf.topk_ids, 0, &mut got_ids).unwrap();
        cx.b.download(&cx.buf.topk_weights, 0, &mut got_weights).unwrap();
        let k = cx.d.router.topk;
        for row in 0..cx.rows {
            // The dump is ascending by id, ours descending by score.
            let mut pairs: Vec<(i32, f32)> = (row * k..(row + 1) * k).map(|i| (got_ids[i], got_weights[i])).collect();
            pairs.sort_by_key(|p| p.0);
            let (got_ids, got_weights): (Vec<i32>, Vec<f32>) = pairs.into_iter().unzip();
            assert_eq!(got_ids, ids[row * k..(row + 1) * k], "layer {layer}, row {row}");
            assert!(max_diff(&got_weights, &weights[row * k..(row + 1) * k]) <= 1e-5, "layer {layer}, row {row}");
        }
        self.checked += 1;
    }

    fn ffn(&mut self, cx: &Cx<'_, B>, layer: usize) {
        self.close(cx, &format!("layer{layer}.ffn_out"), &cx.buf.y);
    }

    fn layer(&mut self, cx: &Cx<'_, B>, layer: usize) {
        self.close(cx, &format!("layer{layer}.streams"), &cx.buf.streams);
    }
}

fn layers_match<B: Backend>(model: &Arc<Model<B>>, gold: &Gold, checks: usize) {
    let mut runner = common::runner(model);
    let mut state = runner.pool().create().unwrap();
    let mut compare = Compare { gold, checked: 0 };
    let logits = runner.forward(&mut state, &gold.ids("input_ids"), 256, &mut compare).unwrap();
    assert!(max_diff(&logits, &gold.f32s("logits")) <= LOGIT_TOLERANCE);
    assert_eq!(compare.checked, checks);
}

fn all_layers_match<B: Backend>(backend: impl Fn() -> B) {
    // Three per layer, one per router, one per indexer.
    let model = common::model(backend(), &common::preset(Preset::Tiny));
    layers_match(&model, &Gold::open("tiny-debug.safetensors"), 9 * 3 + 6 + 2);
    let model = common::model(backend(), &common::preset(Preset::TinyB));
    layers_match(&model, &Gold::open("tiny-b-debug.safetensors"), 4 * 3 + 3 + 1);
}

#[test]
fn reference_layers() {
    all_layers_match(reference);
}

#[test]
fn cpu_layers() {
    all_layers_match(cpu);
}

/// Streams of the trained demo model after each layer, its final norm and its logits.
struct CompareDemo<'a>(&'a Gold);

impl CompareDemo<'_> {
    fn close<B: Backend>(&self, cx: &Cx<'_, B>, key: &str, buf: &B::Buf) {
        let expected = self.0.f32s(key);
        let mut got = vec![0.0; expected.len()];
        cx.b.download(buf, 0, &mut got).unwrap();
        let scale = expected.iter().fold(1.0f32, |m, v| m.max(v.abs()));
        assert!(max_diff(&got, &expected) / scale <= 2e-5, "{key}: {:e}", max_diff(&got, &expected) / scale);
    }
}

impl<B: Backend> Observer<B> for CompareDemo<'_> {
    fn embedded(&mut self, cx: &Cx<'_, B>) {
        self.close(cx, "layers.embedding", &cx.buf.streams);
    }

    fn layer(&mut self, cx: &Cx<'_, B>, layer: usize) {
        self.close(cx, &format!("layers.{layer}"), &cx.buf.streams);
    }
}

/// The conversations of `demo.json`: prompt logits (best 20 of each position) and greedy answers up to the stop token, where the margin
/// is clear.
fn demo_matches<B: Backend>(backend: B, longest: usize) {
    let model = common::model(backend, &common::demo());
    let gold = Gold::open("demo.safetensors");
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/gold/demo.json");
    let cases: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let limits = tandem_worker_attn::RunnerLimits { max_seq_len: 2048, ..common::limits() };
    let mut runner = tandem_worker_attn::Runner::local(Arc::clone(&model), limits).unwrap();
    let vocab = model.geometry().vocab;
    let ids = |v: &serde_json::Value| v.as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect::<Vec<u32>>();
    for (i, case) in cases["cases"].as_array().unwrap().iter().enumerate() {
        let (prompt, greedy) = (ids(&case["prompt_ids"]), ids(&case["greedy_ids"]));
        if prompt.len() > longest {
            continue;
        }
        let mut state = runner.pool().create().unwrap();
        let logits = if i == 0 {
            let logits = runner.forward(&mut state, &prompt, 256, &mut CompareDemo(&gold)).unwrap();
            let worst = max_diff(&logits, &gold.f32s("logits.full"));
            assert!(worst <= LOGIT_TOLERANCE, "{worst:e}");
            logits
        } else {
            runner.forward(&mut state, &prompt, 256, &mut Silent).unwrap()
        };
        let (top_ids, top) = (gold.ids(&format!("{i:02}.top_ids")), gold.f32s(&format!("{i:02}.top_logits")));
        let got: Vec<f32> = top_ids.iter().enumerate().map(|(at, id)| logits[at / 20 * vocab + *id as usize]).collect();
        let worst = max_diff(&got, &top);
        assert!(worst <= LOGIT_TOLERANCE, "case {i}: {worst:e}");
        let mut next = argmax(&logits[(prompt.len() - 1) * vocab..]);
        for expected in &greedy[..=case["stop_index"].as_u64().unwrap() as usize] {
            assert_eq!(next, *expected, "case {i}");
            next = argmax(&runner.forward(&mut state, &[next], 1, &mut Silent).unwrap());
        }
        runner.pool().free(state);
    }
}

#[test]
fn reference_demo() {
    demo_matches(reference(), 20);
}

#[test]
fn cpu_demo() {
    demo_matches(cpu(), 2000);
}
