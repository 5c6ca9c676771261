//! Random small geometries: the CPU backend against the oracle, chunk by chunk, and the reference in f32 beside it.
//!
//! Where rounding lets a backend choose another expert or another row than the oracle (a near tie), what follows differs for good; the
//! comparison of that case ends there.

use proptest::prelude::*;
use tandem_kernels::{
    Backend, Precision,
    cpu::{CpuBackend, CpuOptions},
    reference::ReferenceBackend,
};
use tandem_model::{
    Checkpoint,
    synthetic::{Options, TextConfig, write_with},
};
use tempfile::TempDir;

use super::forward::{LayerTrace, Model, Trace};

/// Layers of random weights amplify what the ops' own tolerances leave.
const STREAMS_REL_TOL: f32 = 2e-4;

fn near(what: &str, got: &[f32], want: &[f32]) -> Result<(), TestCaseError> {
    let largest = want.iter().fold(0.0f32, |m, v| m.max(v.abs()));
    let error = got.iter().zip(want).map(|(g, w)| (g - w).abs()).fold(0.0f32, |m, d| if d <= m { m } else { d });
    prop_assert!(got.len() == want.len() && error <= STREAMS_REL_TOL * largest, "{what}: {error:e} where the largest is {largest:e}");
    Ok(())
}

fn choices(layer: &LayerTrace) -> (Vec<i32>, Vec<Vec<i32>>) {
    let experts = layer.experts.iter().map(|row| row.iter().map(|e| e.0).collect()).collect();
    (layer.selected.clone(), experts)
}

/// Compares up to the first difference in what was chosen; false where there was one.
fn compare(got: &Trace, want: &Trace) -> Result<bool, TestCaseError> {
    for (i, (got, want)) in got.layers.iter().zip(&want.layers).enumerate() {
        if choices(got) != choices(want) {
            return Ok(false);
        }
        near(&format!("layer{i}.attn_out"), &got.attn_out, &want.attn_out)?;
        near(&format!("layer{i}.ffn_out"), &got.ffn_out, &want.ffn_out)?;
        near(&format!("layer{i}.streams"), &got.streams, &want.streams)?;
    }
    near("logits", &got.logits, &want.logits)?;
    Ok(true)
}

fn agrees<B: Backend>(backend: B, checkpoint: &Checkpoint, chunks: &[usize]) -> Result<(), TestCaseError> {
    let context = chunks.iter().sum();
    let mut oracle = Model::load(ReferenceBackend::<f64>::new(Precision::F32), checkpoint, context);
    let mut model = Model::load(backend, checkpoint, context);
    let mut pos = 0;
    for &rows in chunks {
        let tokens: Vec<u32> = (pos..pos + rows).map(|t| (t * t * 31 + t * 7) as u32 % checkpoint.geometry().vocab as u32).collect();
        if !compare(&model.forward(&tokens, pos), &oracle.forward(&tokens, pos))? {
            return Ok(());
        }
        pos += rows;
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_geometry_works(seed: u64, chunks in prop::collection::vec(prop_oneof![Just(1usize), 1..40usize], 1..5)) {
        let dir = TempDir::new()?;
        let config = TextConfig::random(seed);
        write_with(&config, &Options { seed, ..Options::default() }, dir.path()).map_err(|e| TestCaseError::fail(e.to_string()))?;
        let checkpoint = Checkpoint::open(dir.path()).map_err(|e| TestCaseError::fail(e.to_string()))?;
        agrees(CpuBackend::new(CpuOptions::new(Precision::F32)).unwrap(), &checkpoint, &chunks)?;
        agrees(ReferenceBackend::<f32>::new(Precision::F32), &checkpoint, &chunks)?;
    }
}
