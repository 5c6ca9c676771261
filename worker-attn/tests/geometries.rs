//! Random small geometries through the whole worker: the CPU backend agrees with the reference, and on one backend neither neighbours nor
//! chunk partners change a bit.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says so")]

mod common;
#[path = "common/requests.rs"]
mod requests;

use std::sync::Arc;

use common::{cpu, max_diff, reference};
use proptest::prelude::*;
use requests::{Harness, request};
use tandem_kernels::Backend;
use tandem_model::{
    Checkpoint, Geometry,
    synthetic::{Options, TextConfig, write_with},
};
use tandem_worker_attn::{
    Model, RunnerLimits,
    engine::sequence::Request,
    layers::Cx,
    observe::{Observer, Silent},
    sampler::SamplingParams,
};

/// Random weights amplify f32 noise: relative to the largest logit.
const LOGITS_REL_TOLERANCE: f32 = 5e-4;

/// A checkpoint of a random geometry; the folder lives as long as the maps of its files.
fn random(seed: u64) -> Checkpoint {
    let dir = tempfile::tempdir().unwrap();
    write_with(&TextConfig::random(seed), &Options { seed, ..Options::default() }, dir.path()).unwrap();
    Checkpoint::open(dir.path()).unwrap()
}

fn tokens(g: &Geometry, n: usize, salt: usize) -> Vec<u32> {
    (0..n).map(|t| ((t * t * 31 + t * 7 + salt * 13) % g.vocab) as u32).collect()
}

fn limits() -> RunnerLimits {
    RunnerLimits { max_rows: 48, max_batch: 4, max_seq_len: 128, kv_tokens: 512, overlap_rows: 0 }
}

/// What each row chose, layer by layer: a near tie may fall either way, and all that follows then differs for good.
#[derive(Default)]
struct Choices {
    rows: Vec<Vec<i32>>,
    /// First row of the chunk that runs.
    base: usize,
    /// Layers that select.
    mla: Vec<usize>,
}

impl Choices {
    fn add<B: Backend>(&mut self, cx: &Cx<'_, B>, buf: &B::Buf, width: usize) {
        let mut ids = vec![0; cx.rows * width];
        cx.b.download_i32(buf, 0, &mut ids).unwrap();
        for (row, ids) in self.rows[self.base..].iter_mut().zip(ids.chunks_mut(width)) {
            ids.sort_unstable();
            row.extend_from_slice(ids);
        }
    }
}

impl<B: Backend> Observer<B> for Choices {
    fn embedded(&mut self, cx: &Cx<'_, B>) {
        self.base = self.rows.len();
        self.rows.resize(self.base + cx.rows, Vec::new());
    }

    fn mixer(&mut self, cx: &Cx<'_, B>, layer: usize) {
        if self.mla.contains(&layer) {
            self.add(cx, &cx.buf.selected, cx.d.indexer.width());
        }
    }

    fn routed(&mut self, cx: &Cx<'_, B>, _layer: usize) {
        self.add(cx, &cx.buf.topk_ids, cx.d.router.topk);
    }
}

/// Compares the logits of each row up to the first that chose otherwise.
fn near(got: &(Vec<f32>, Choices), want: &(Vec<f32>, Choices), vocab: usize) -> Result<(), TestCaseError> {
    let largest = want.0.iter().fold(0.0f32, |m, v| m.max(v.abs()));
    prop_assert_eq!(got.1.rows.len(), want.1.rows.len());
    let alike = got.1.rows.iter().zip(&want.1.rows).take_while(|(a, b)| a == b).count();
    let error = max_diff(&got.0[..alike * vocab], &want.0[..alike * vocab]);
    prop_assert!(error <= LOGITS_REL_TOLERANCE * largest, "{error:e} where the largest is {largest}");
    Ok(())
}

fn forward<B: Backend>(model: &Arc<Model<B>>, tokens: &[u32], chunk: usize) -> (Vec<f32>, Choices) {
    let mut runner = tandem_worker_attn::Runner::local(Arc::clone(model), limits()).unwrap();
    let mut state = runner.pool().create().unwrap();
    let mut choices = Choices { mla: model.geometry().mla_layers(), ..Choices::default() };
    let logits = runner.forward(&mut state, tokens, chunk, &mut choices).unwrap();
    (logits, choices)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn cpu_agrees_with_the_reference(seed: u64, n in 1usize..40, chunk in 1usize..24) {
        let checkpoint = random(seed);
        let ids = tokens(checkpoint.geometry(), n, 0);
        let (fast, slow) = (common::model(cpu(), &checkpoint), common::model(reference(), &checkpoint));
        near(&forward(&fast, &ids, chunk), &forward(&slow, &ids, chunk), checkpoint.geometry().vocab)?;
    }

    #[test]
    fn neighbours_change_no_bit(seed: u64, lengths in prop::collection::vec((1usize..50, 1usize..12), 1..5), chunk in 1usize..24) {
        let checkpoint = random(seed);
        let model = common::model(cpu(), &checkpoint);
        let make = |i: usize| {
            let (n, max) = lengths[i];
            let sampling = SamplingParams { temperature: i as f32 * 0.5, seed, choice: i as u32, ..SamplingParams::default() };
            Request { sampling, logprobs: Some(2), ..request(i as u64, &tokens(checkpoint.geometry(), n, i), max) }
        };
        let mut together = Harness::local(&model, limits(), chunk);
        for i in 0..lengths.len() {
            together.submit(make(i));
            if i % 2 == 0 {
                together.step();
            }
        }
        let together = together.finish();
        for i in 0..lengths.len() {
            let mut alone = Harness::local(&model, limits(), chunk);
            alone.submit(make(i));
            prop_assert_eq!(&alone.finish()[&(i as u64)], &together[&(i as u64)]);
        }
    }

    #[test]
    fn chunks_agree_with_the_whole(seed: u64, n in 2usize..48, chunk in 1usize..24) {
        let checkpoint = random(seed);
        let ids = tokens(checkpoint.geometry(), n, 1);
        let model = common::model(cpu(), &checkpoint);
        near(&forward(&model, &ids, chunk), &forward(&model, &ids, 48), checkpoint.geometry().vocab)?;
    }
}

#[test]
fn a_model_of_kda_alone_and_one_of_mla_alone_run() {
    let mut seen = (false, false);
    for seed in 0..200 {
        let config = TextConfig::random(seed);
        let dir = tempfile::tempdir().unwrap();
        write_with(&config, &Options { seed, ..Options::default() }, dir.path()).unwrap();
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        let g = checkpoint.geometry();
        let kinds = (g.mla_layers().is_empty(), g.kda_layers().is_empty());
        if (kinds.0 && !seen.0) || (kinds.1 && !seen.1) {
            seen = (seen.0 || kinds.0, seen.1 || kinds.1);
            let model = common::model(cpu(), &checkpoint);
            let mut h = Harness::local(&model, limits(), 16);
            h.submit(request(1, &tokens(g, 20, 0), 5));
            assert_eq!(h.finish()[&1].tokens.len(), 5);
            h.assert_empty();
            let mut runner = tandem_worker_attn::Runner::local(model, limits()).unwrap();
            let mut state = runner.pool().create().unwrap();
            runner.forward(&mut state, &tokens(g, 20, 0), 7, &mut Silent).unwrap();
        }
        if seen == (true, true) {
            return;
        }
    }
    panic!("no such geometry in 200");
}
