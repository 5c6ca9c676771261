//! Checkpoints and goldens for the parity tests.

#![allow(dead_code)]

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use parking_lot::Mutex;
use safetensors::SafeTensors;
use tandem_kernels::{
    Backend, Precision,
    cpu::{CpuBackend, CpuOptions},
    reference::ReferenceBackend,
};
use tandem_model::{
    Checkpoint,
    synthetic::{self, Preset},
};
use tandem_worker_attn::{Model, Runner, RunnerLimits, hop::LocalOnly};

/// f32 parity of logits (fixtures/gold/README.md: noise 4.6e-5, smallest wrong effect 1.2e-4).
pub const LOGIT_TOLERANCE: f32 = 1e-4;

/// A golden file.
pub struct Gold(Vec<u8>);

impl Gold {
    pub fn open(name: &str) -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/gold").join(name);
        Self(std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display())))
    }

    fn bytes(&self, key: &str) -> Option<Vec<[u8; 4]>> {
        let tensors = SafeTensors::deserialize(&self.0).unwrap();
        let data = tensors.tensor(key).ok()?.data().to_vec();
        Some(data.as_chunks::<4>().0.to_vec())
    }

    pub fn has(&self, key: &str) -> bool {
        self.bytes(key).is_some()
    }

    pub fn f32s(&self, key: &str) -> Vec<f32> {
        self.bytes(key).unwrap_or_else(|| panic!("no {key}")).into_iter().map(f32::from_le_bytes).collect()
    }

    pub fn i32s(&self, key: &str) -> Vec<i32> {
        self.bytes(key).unwrap_or_else(|| panic!("no {key}")).into_iter().map(i32::from_le_bytes).collect()
    }

    pub fn ids(&self, key: &str) -> Vec<u32> {
        self.i32s(key).into_iter().map(|id| id as u32).collect()
    }
}

/// The largest absolute difference.
pub fn max_diff(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter()
        .zip(b)
        .map(|(a, b)| if a == b { 0.0 } else { (a - b).abs() })
        .fold(0.0, |m, d| if d.is_nan() { f32::INFINITY } else { m.max(d) })
}

/// The lowest id of the largest logit.
pub fn argmax(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (i, v) in logits.iter().enumerate() {
        if *v > logits[best] {
            best = i;
        }
    }
    best as u32
}

/// A checkpoint made once per machine and kept beside the build.
fn made(name: &str, write: impl FnOnce(&Path)) -> PathBuf {
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock();
    let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("worker-attn").join(name);
    if !dir.exists() {
        let parent = dir.parent().unwrap();
        std::fs::create_dir_all(parent).unwrap();
        let temp = tempfile::tempdir_in(parent).unwrap();
        write(temp.path());
        // Another test process may have been faster.
        let _ = std::fs::rename(temp.keep(), &dir);
    }
    dir
}

/// A reference checkpoint.
pub fn preset(preset: Preset) -> Checkpoint {
    let dir = made(&format!("{preset:?}"), |dir| synthetic::write(preset, dir, &[]).unwrap());
    Checkpoint::open(&dir).unwrap()
}

/// The embedded demo checkpoint.
pub fn demo() -> Checkpoint {
    let cache = Path::new(env!("CARGO_TARGET_TMPDIR")).join("worker-attn-demo");
    Checkpoint::open(&tandem_model::demo::unpack(&cache).unwrap()).unwrap()
}

/// The CPU backend in f32.
pub fn cpu() -> CpuBackend {
    CpuBackend::new(CpuOptions::new(Precision::F32)).unwrap()
}

/// The reference backend in f32.
pub fn reference() -> ReferenceBackend<f32> {
    ReferenceBackend::new(Precision::F32)
}

pub fn limits() -> RunnerLimits {
    RunnerLimits { max_rows: 256, max_batch: 8, max_seq_len: 512, kv_tokens: 2048, overlap_rows: 0 }
}

pub fn model<B: Backend>(backend: B, checkpoint: &Checkpoint) -> Arc<Model<B>> {
    Arc::new(Model::load_whole(Arc::new(backend), checkpoint).unwrap())
}

pub fn runner<B: Backend>(model: &Arc<Model<B>>) -> Runner<B, LocalOnly> {
    Runner::local(Arc::clone(model), limits()).unwrap()
}
