//! Whole models on a backend, without the serving loop: golden parity, and random geometries against the oracle.
//!
//! The goldens are what transformers answers in f32 for `tiny` and `tiny-b` (`tests/fixtures/gold`); the checkpoints are made on the spot.

#![expect(clippy::unwrap_used, reason = "in a test an error is a failure")]

mod agreement;
mod every_kernel;
mod forward;
mod geometries;

use std::{fs, path::PathBuf};

use forward::{Model, Trace};
use safetensors::SafeTensors;
use tandem_kernels::{
    Backend, Precision,
    cpu::{CpuBackend, CpuOptions},
    cuda::{CudaBackend, CudaOptions},
    reference::ReferenceBackend,
};
use tandem_model::{
    Checkpoint,
    synthetic::{Preset, write},
};
use tempfile::TempDir;

/// Largest |Δlogit| (the goldens' README: f32 noise is 4.6e-5, a wrong epsilon starts at 1.2e-4).
const LOGITS_ABS_TOL: f32 = 1e-4;
/// Streams and block outputs reach several hundred, so they are judged relative to their largest value. Same noise, same margin.
const STREAMS_REL_TOL: f32 = 1e-5;
/// Router weights are sigmoid scores times the scale; they inherit the noise of the row.
const ROUTER_WEIGHT_ABS_TOL: f32 = 2e-5;

/// A checkpoint made here from its hash, and one of its golden files.
fn open(preset: Preset, gold: &str) -> (TempDir, Checkpoint, Gold) {
    let dir = TempDir::new().unwrap();
    write(preset, dir.path(), &[]).unwrap();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let gold = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("../tests/fixtures/gold/{gold}.safetensors"));
    (dir, checkpoint, Gold::open(gold))
}

struct Gold(Vec<u8>);

impl Gold {
    fn open(path: PathBuf) -> Self {
        Self(fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display())))
    }

    fn words(&self, key: &str) -> Vec<[u8; 4]> {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        let tensor = file.tensor(key).unwrap_or_else(|e| panic!("{key}: {e}"));
        tensor.data().chunks_exact(4).map(|c| c.try_into().unwrap()).collect()
    }

    fn floats(&self, key: &str) -> Vec<f32> {
        self.words(key).into_iter().map(f32::from_le_bytes).collect()
    }

    fn ids(&self, key: &str) -> Vec<i32> {
        self.words(key).into_iter().map(i32::from_le_bytes).collect()
    }

    fn tokens(&self, key: &str) -> Vec<u32> {
        self.ids(key).into_iter().map(|t| t as u32).collect()
    }
}

fn worst(got: &[f32], want: &[f32]) -> f32 {
    assert_eq!(got.len(), want.len());
    got.iter().zip(want).map(|(g, w)| (g - w).abs()).fold(0.0, |m, d| if d <= m { m } else { d })
}

fn check_relative(what: &str, got: &[f32], want: &[f32]) {
    let largest = want.iter().fold(0.0f32, |m, v| m.max(v.abs()));
    let error = worst(got, want) / largest;
    assert!(error <= STREAMS_REL_TOL, "{what}: relative error {error:e}");
}

fn check_layers(trace: &Trace, gold: &Gold) {
    assert_eq!(trace.embed, gold.floats("embed"));
    for (i, layer) in trace.layers.iter().enumerate() {
        check_relative(&format!("layer{i}.attn_out"), &layer.attn_out, &gold.floats(&format!("layer{i}.attn_out")));
        check_relative(&format!("layer{i}.ffn_out"), &layer.ffn_out, &gold.floats(&format!("layer{i}.ffn_out")));
        check_relative(&format!("layer{i}.streams"), &layer.streams, &gold.floats(&format!("layer{i}.streams")));
        if !layer.selected.is_empty() {
            assert_eq!(layer.selected, gold.ids(&format!("layer{i}.dsa_topk")), "layer{i}.dsa_topk");
        }
        if !layer.experts.is_empty() {
            let sorted = layer.experts.iter().flat_map(|row| {
                let mut row = row.clone();
                row.sort_by_key(|e| e.0);
                row
            });
            let (ids, weights): (Vec<i32>, Vec<f32>) = sorted.unzip();
            assert_eq!(ids, gold.ids(&format!("layer{i}.router_ids")), "layer{i}.router_ids");
            let error = worst(&weights, &gold.floats(&format!("layer{i}.router_weights")));
            assert!(error <= ROUTER_WEIGHT_ABS_TOL, "layer{i}.router_weights: {error:e}");
        }
    }
    let error = worst(&trace.logits, &gold.floats("logits"));
    assert!(error <= LOGITS_ABS_TOL, "logits: {error:e}");
}

/// A 29-token prompt, in one prefill.
fn every_layer_matches<B: Backend>(backend: B, preset: Preset, name: &str) {
    let (_dir, checkpoint, gold) = open(preset, &format!("{name}-debug"));
    check_layers(&Model::load(backend, &checkpoint, 64).forward(&gold.tokens("input_ids"), 0), &gold);
}

/// Prompts in chunks, then the greedy continuation token by token.
fn prompts_and_continuations_match<B: Backend>(backend: B, preset: Preset, name: &str, lengths: &[usize], chunk: usize) {
    let (_dir, checkpoint, gold) = open(preset, name);
    let vocab = checkpoint.geometry().vocab;
    let mut model = Model::load(backend, &checkpoint, 256);
    for n in lengths {
        let tokens = gold.tokens(&format!("p{n}.input_ids"));
        model.reset();
        let mut logits = Vec::new();
        for (i, part) in tokens.chunks(chunk).enumerate() {
            logits.extend(model.forward(part, i * chunk).logits);
        }
        let error = worst(&logits, &gold.floats(&format!("p{n}.logits")));
        assert!(error <= LOGITS_ABS_TOL, "{name} p{n} in chunks of {chunk}: {error:e}");

        let (greedy, rows) = (gold.tokens(&format!("p{n}.greedy")), gold.floats(&format!("p{n}.greedy_logits")));
        let mut last = logits[logits.len() - vocab..].to_vec();
        for (i, (&token, want)) in greedy.iter().zip(rows.chunks(vocab)).enumerate() {
            let error = worst(&last, want);
            assert!(error <= LOGITS_ABS_TOL, "{name} p{n} step {i}: {error:e}");
            let best = (0..vocab).rev().max_by(|&a, &b| last[a].total_cmp(&last[b])).unwrap();
            assert_eq!(best as u32, token, "{name} p{n} step {i}");
            last = model.forward(&[token], tokens.len() + i).logits;
        }
    }
}

/// The goldens on one backend: both checkpoints, whole layers, and continuations after prompts in chunks of different sizes.
macro_rules! goldens {
    ($name:ident, $backend:expr) => {
        mod $name {
            use super::*;

            #[test]
            fn every_layer_of_tiny_matches() {
                every_layer_matches($backend, Preset::Tiny, "tiny");
            }

            #[test]
            fn every_layer_of_tiny_b_matches() {
                every_layer_matches($backend, Preset::TinyB, "tiny-b");
            }

            #[test]
            fn tiny_continues() {
                prompts_and_continuations_match($backend, Preset::Tiny, "tiny", &[1, 17, 70], 64);
                prompts_and_continuations_match($backend, Preset::Tiny, "tiny", &[3, 4], 1);
            }

            #[test]
            fn tiny_b_continues() {
                prompts_and_continuations_match($backend, Preset::TinyB, "tiny-b", &[1, 3, 4, 17, 70, 200], 7);
            }
        }
    };
}

goldens!(reference, ReferenceBackend::<f32>::new(Precision::F32));
goldens!(cpu, CpuBackend::new(CpuOptions::new(Precision::F32)).unwrap());

/// Device 0 (or `TANDEM_TEST_CUDA`), where there is one.
fn cuda(precision: Precision) -> Option<CudaBackend> {
    let wanted = std::env::var("TANDEM_TEST_CUDA").ok();
    match CudaBackend::new(CudaOptions::new(wanted.as_deref().map_or(0, |w| w.parse().unwrap()), precision)) {
        Ok(backend) => Some(backend),
        Err(e) if wanted.is_none() => {
            println!("SKIPPED, no CUDA device: {e}");
            None
        }
        Err(e) => panic!("{e}"),
    }
}

/// The goldens on a GPU.
#[test]
fn cuda_matches() {
    let Some(backend) = cuda(Precision::F32) else { return };
    every_layer_matches(backend, Preset::Tiny, "tiny");
    every_layer_matches(cuda(Precision::F32).unwrap(), Preset::TinyB, "tiny-b");
    prompts_and_continuations_match(cuda(Precision::F32).unwrap(), Preset::Tiny, "tiny", &[1, 17, 70], 64);
    prompts_and_continuations_match(cuda(Precision::F32).unwrap(), Preset::Tiny, "tiny", &[3, 4], 1);
    prompts_and_continuations_match(cuda(Precision::F32).unwrap(), Preset::TinyB, "tiny-b", &[1, 3, 4, 17, 70, 200], 7);
}

/// The oracle must be nearer to the goldens than the tolerance by far: what is left is the goldens' own f32 noise.
#[test]
fn the_oracle_matches() {
    every_layer_matches(ReferenceBackend::<f64>::new(Precision::F32), Preset::Tiny, "tiny");
    every_layer_matches(ReferenceBackend::<f64>::new(Precision::F32), Preset::TinyB, "tiny-b");
}
