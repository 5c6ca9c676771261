//! The CUDA backend on device 0 (or `TANDEM_TEST_CUDA`): the conformance suite, stored types, and sizes near the release's. Without a device
//! each test says that it is skipped; with `TANDEM_TEST_CUDA` set it fails instead.

#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "tests")]

use std::sync::OnceLock;

use tandem_kernels::{
    Backend, Elem, IndexerParams, KdaDims, MlaParams, Precision,
    conformance::{self, kda::Kda, mhc::Mhc, mla, noise::Noise, rig, router::Router, rows, sample, sequences},
    cuda::{CudaBackend, CudaOptions, selftest},
};

fn open(precision: Precision) -> Option<CudaBackend> {
    let wanted = std::env::var("TANDEM_TEST_CUDA").ok();
    let ordinal = wanted.as_deref().map_or(0, |w| w.parse().expect("TANDEM_TEST_CUDA is a device number"));
    match CudaBackend::new(CudaOptions::new(ordinal, precision)) {
        Ok(backend) => Some(backend),
        Err(e) if wanted.is_none() => {
            eprintln!("SKIPPED, no CUDA device: {e}");
            None
        }
        Err(e) => panic!("{e}"),
    }
}

/// The device, once per precision and process.
fn device(precision: Precision) -> Option<&'static CudaBackend> {
    static F32: OnceLock<Option<CudaBackend>> = OnceLock::new();
    static BF16: OnceLock<Option<CudaBackend>> = OnceLock::new();
    match precision {
        Precision::F32 => F32.get_or_init(|| open(precision)).as_ref(),
        Precision::Bf16 => BF16.get_or_init(|| open(precision)).as_ref(),
    }
}

macro_rules! checks {
    ($($name:ident)*) => {
        const NAMES: &[&str] = &[$(stringify!($name)),*];

        mod f32 {
            use super::*;
            $(#[test] fn $name() { check(Precision::F32, stringify!($name)); })*
        }
        mod bf16 {
            use super::*;
            $(#[test] fn $name() { check(Precision::Bf16, stringify!($name)); })*
        }
    };
}

fn check(precision: Precision, name: &'static str) {
    if let Some(b) = device(precision)
        && let Err(failure) = conformance::run(b, name, conformance::SEEDS)
    {
        panic!("{failure}");
    }
}

checks!(memory embed linear norm mhc mlp router experts kda mla_attend index_select kda_state mla_state index_state sample coded);

#[test]
fn no_check_is_forgotten() {
    assert_eq!(conformance::checks::<CudaBackend>().into_iter().map(|c| c.0).collect::<Vec<_>>(), NAMES);
}

#[test]
fn stored_types() {
    for b in [Precision::F32, Precision::Bf16].into_iter().filter_map(device) {
        for kind in selftest::TYPES {
            for (seed, rows) in [1, 2, 3, 8, 9, 16, 17, 64, 65, 100, 150].into_iter().enumerate() {
                selftest::stored_type(b, kind, seed as u64, rows).unwrap_or_else(|e| panic!("{} {kind}, {rows} rows: {e}", b.precision()));
            }
        }
    }
}

/// Wider than the suite draws: up to the release's widths, where a row fills many blocks.
#[test]
fn wide_rows() {
    for b in [Precision::F32, Precision::Bf16].into_iter().filter_map(device) {
        let say = |what: &str, r: Result<(), String>| r.unwrap_or_else(|e| panic!("{} {what}: {}", b.precision(), &e[..e.len().min(400)]));
        for (seed, rows) in [1usize, 2, 5, 20].into_iter().enumerate() {
            let seed = seed as u64;
            say("mhc", Mhc::new(seed, rows, 4, 4096).and_then(|c| rig::judge(b, &c)));
            say("router", Router::new(seed, rows).and_then(|c| rig::judge(b, &c)));
            say("norm", rig::judge(b, &rows::Norm::new(seed, rows, 4096)));
            say("mlp", rows::Mlp::new(seed, rows, 512, 300).and_then(|c| rig::judge(b, &c)));
            say("experts", rows::Experts::new(seed, rows, 256, 128, 20, 8).and_then(|c| rig::judge(b, &c)));
        }
        for seed in 0..6 {
            let mut n = Noise::new(seed);
            let plan = sequences::Plan::random(&mut n, 3, 700);
            say("kda", sequences::judge(b, &Kda::new(seed), &plan, seed));
            say("attend", mla::Attend::new(seed).and_then(|c| sequences::judge(b, &c, &plan, seed)));
            say("select", sequences::judge(b, &mla::Select::new(seed), &plan, seed));
            say("sample", sample::judge(b, seed + 100));
        }
    }
}

/// The release's widths of heads, latent and index keys, and sequences longer than what is chosen.
#[test]
fn release_widths() {
    let plan = |lengths: &[usize]| sequences::Plan {
        sequences: lengths.len(),
        steps: (0..lengths.len())
            .map(|q| vec![(q, lengths[q] - 2)])
            .chain([(0..lengths.len()).map(|q| (q, 1)).collect(), (0..lengths.len()).map(|q| (q, 1)).collect()])
            .collect(),
    };
    for b in [Precision::F32, Precision::Bf16].into_iter().filter_map(device) {
        let say = |what: &str, r: Result<(), String>| r.unwrap_or_else(|e| panic!("{} {what}: {}", b.precision(), &e[..e.len().min(400)]));
        let kda = KdaDims { heads: 3, head_dim: 128, conv: 4 };
        say("kda", sequences::judge(b, &Kda::sized(1, kda), &plan(&[40, 21]), 1));
        let mla = MlaParams { heads: 20, qk_dim: 96, v_dim: 64, latent: 512 };
        say("attend", mla::Attend::sized(2, mla, 150).and_then(|c| sequences::judge(b, &c, &plan(&[220, 30]), 2)));
        let indexer = IndexerParams { heads: 32, dim: 128, kpool: 4, topk: 64, always_tail: true };
        say("select", sequences::judge(b, &mla::Select::sized(3, indexer), &plan(&[300, 67]), 3));
    }
}

#[test]
fn a_buffer_that_does_not_fit_is_refused_with_numbers() {
    let Some(b) = device(Precision::F32) else { return };
    let e = b.alloc("a large buffer", Elem::F32, 1 << 44).unwrap_err().to_string();
    assert!(e.contains("a large buffer") && e.contains(&(4u64 << 44).to_string()) && e.contains("available on cuda:"), "{e}");
    b.alloc("a small one after it", Elem::F32, 100).unwrap();
    b.sync().unwrap();
}

#[test]
fn the_self_test_passes() {
    for b in [Precision::F32, Precision::Bf16].into_iter().filter_map(device) {
        let began = std::time::Instant::now();
        b.self_test().unwrap();
        println!("self-test in {}: {:.2?}", b.precision(), began.elapsed());
    }
}

#[test]
fn a_device_that_is_not_there_is_named() {
    let e = CudaBackend::new(CudaOptions::new(99, Precision::F32)).unwrap_err().to_string();
    assert!(e.contains("cuda:99"), "{e}");
    println!("{e}");
}
