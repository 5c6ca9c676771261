//! Random geometries at op level: a fast backend against the oracle, where the sizes shrink to the smallest case that fails.
//!
//! The conformance suite draws sizes from its seed; here proptest draws them, wider than the suite does.

#![expect(clippy::unwrap_used, reason = "in a test an error is a failure")]

use proptest::prelude::*;
use tandem_kernels::{
    Precision,
    conformance::{kda::Kda, mhc::Mhc, mla, noise::Noise, rig, router::Router, rows, sample, sequences},
    cpu::{CpuBackend, CpuOptions},
};

fn precision() -> impl Strategy<Value = Precision> {
    prop_oneof![Just(Precision::F32), Just(Precision::Bf16)]
}

fn cpu(precision: Precision, threads: usize) -> CpuBackend {
    let backend = CpuBackend::new(CpuOptions { threads: Some(threads), ..CpuOptions::new(precision) }).unwrap();
    tandem_kernels::Backend::reserve(&backend, 512, 512).unwrap();
    backend
}

fn holds(result: Result<(), String>) -> Result<(), TestCaseError> {
    result.map_err(TestCaseError::fail)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn linear(p in precision(), threads in 1..4usize, seed: u64, rows in 1..70usize, cols in 1..700usize, out in 1..200usize, parts in 1..4usize) {
        holds(rows::Linear::new(seed, rows, cols, out, parts).and_then(|c| rig::judge(&cpu(p, threads), &c)))?;
    }

    #[test]
    fn norm(p in precision(), threads in 1..4usize, seed: u64, rows in 1..40usize, width in 1..700usize) {
        holds(rig::judge(&cpu(p, threads), &rows::Norm::new(seed, rows, width)))?;
    }

    #[test]
    fn mhc(p in precision(), threads in 1..4usize, seed: u64, rows in 1..40usize, streams in 1..6usize, hidden in 1..300usize) {
        holds(Mhc::new(seed, rows, streams, hidden).and_then(|c| rig::judge(&cpu(p, threads), &c)))?;
    }

    #[test]
    fn mlp(p in precision(), threads in 1..4usize, seed: u64, rows in 1..40usize, hidden in 1..300usize, width in 1..200usize) {
        holds(rows::Mlp::new(seed, rows, hidden, width).and_then(|c| rig::judge(&cpu(p, threads), &c)))?;
    }

    #[test]
    fn experts(p in precision(), threads in 1..4usize, seed: u64, rows in 1..40usize, hidden in 1..150usize, width in 1..90usize, held in 1..12usize, k in 1..9usize) {
        holds(rows::Experts::new(seed, rows, hidden, width, held, k).and_then(|c| rig::judge(&cpu(p, threads), &c)))?;
    }

    #[test]
    fn router(threads in 1..4usize, seed: u64, rows in 1..40usize) {
        holds(Router::new(seed, rows).and_then(|c| rig::judge(&cpu(Precision::F32, threads), &c)))?;
    }

    #[test]
    fn sampler(threads in 1..4usize, seed: u64) {
        holds(sample::judge(&cpu(Precision::F32, threads), seed))?;
    }

    #[test]
    fn sequences_of_any_plan(p in precision(), threads in 1..4usize, seed: u64, most in 1..6usize, longest in 1..200usize) {
        let backend = cpu(p, threads);
        let mut n = Noise::new(seed);
        let plan = sequences::Plan::random(&mut n, most, longest);
        holds(sequences::judge(&backend, &Kda::new(seed), &plan, seed >> 1))?;
        holds(mla::Attend::new(seed).and_then(|c| sequences::judge(&backend, &c, &plan, seed >> 1)))?;
        holds(sequences::judge(&backend, &mla::Select::new(seed), &plan, seed >> 1))?;
    }

    #[test]
    fn state_of_any_sequence(p in precision(), threads in 1..4usize, seed: u64) {
        let (backend, mut n) = (cpu(p, threads), Noise::new(seed));
        holds(sequences::judge_state(&backend, &Kda::new(seed), &mut n))?;
        holds(mla::Attend::new(seed).and_then(|c| sequences::judge_state(&backend, &c, &mut n)))?;
        holds(sequences::judge_state(&backend, &mla::Select::new(seed), &mut n))?;
    }
}
