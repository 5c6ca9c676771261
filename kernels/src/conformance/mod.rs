//! One suite for every backend: each op against the reference in f64, on random shapes, with a named tolerance.
//!
//! | file | idea |
//! |---|---|
//! | [`tolerance`] | the named tolerances, each with its reason |
//! | [`noise`] | random numbers and weights from a seed |
//! | [`rig`] | a backend under test; rules of ops on rows: near the oracle, a batch of N is N singles bit for bit, NaN stays in its row |
//! | [`sequences`] | rules of ops with state: any grouping near the oracle, the same chunks the same bits, forks and snapshots |
//! | [`rows`], [`mhc`], [`router`], [`kda`], [`mla`], [`sample`], [`memory`] | the cases |
//! | [`coded`] | the same over every quantised type |
//!
//! A check is a function of a backend and a seed, so a failure is named by two words and a property test is a loop over seeds. In tests:
//! `conformance!(CpuBackend::new(..))` makes one test per check. At start, a device runs [`run_all`] over one seed before it serves.

pub mod coded;
pub mod kda;
pub mod memory;
pub mod mhc;
pub mod mla;
pub mod noise;
pub mod rig;
pub mod router;
pub mod rows;
pub mod sample;
pub mod sequences;
pub mod tolerance;

use std::ops::Range;

use crate::Backend;
use noise::Noise;
use sequences::Plan;

/// Seeds that the tests run: every row count twice.
pub const SEEDS: Range<u64> = 0..2 * rows::ROWS.len() as u64;

/// Most rows of a step, and most tokens of a sequence, that a check uses: what it reserves.
pub const MOST_ROWS: usize = 512;

/// A check: `Err` says what disagreed and in which case.
pub type Check<B> = fn(&B, u64) -> Result<(), String>;

/// A check that did not hold.
#[derive(Debug, thiserror::Error)]
#[error("{backend}: {check} with seed {seed}: {reason}")]
pub struct Failure {
    /// Arithmetic name of the backend.
    pub backend: String,
    /// Name of the check.
    pub check: &'static str,
    /// Seed of the case.
    pub seed: u64,
    /// What disagreed.
    pub reason: String,
}

/// All checks by name.
pub fn checks<B: Backend>() -> Vec<(&'static str, Check<B>)> {
    vec![
        ("memory", memory::judge),
        ("embed", |b, seed| {
            with_rows(seed, |n, rows| {
                rig::judge(b, &rows::Embed::new(n.seed(), rows, n.between(1, 50), n.between(1, 70), n.between(1, 4))?)
            })
        }),
        ("linear", |b, seed| {
            with_rows(seed, |n, rows| {
                rig::judge(b, &rows::Linear::new(n.seed(), rows, n.between(1, 600), n.between(1, 90), n.between(1, 4))?)
            })
        }),
        ("norm", |b, seed| with_rows(seed, |n, rows| rig::judge(b, &rows::Norm::new(n.seed(), rows, n.between(1, 300))))),
        ("mhc", |b, seed| with_rows(seed, |n, rows| rig::judge(b, &mhc::Mhc::new(n.seed(), rows, n.between(1, 4), n.between(1, 150))?))),
        ("mlp", |b, seed| with_rows(seed, |n, rows| rig::judge(b, &rows::Mlp::new(n.seed(), rows, n.between(1, 150), n.between(1, 100))?))),
        ("router", |b, seed| with_rows(seed, |n, rows| rig::judge(b, &router::Router::new(n.seed(), rows)?))),
        ("experts", |b, seed| {
            with_rows(seed, |n, rows| {
                let (held, k) = (n.between(1, 7), n.between(1, 5));
                rig::judge(b, &rows::Experts::new(n.seed(), rows, n.between(1, 100), n.between(1, 60), held, k)?)
            })
        }),
        ("kda", |b, seed| with_plan(seed, |n, plan| sequences::judge(b, &kda::Kda::new(n.seed()), plan, n.seed() >> 1))),
        ("mla_attend", |b, seed| with_plan(seed, |n, plan| sequences::judge(b, &mla::Attend::new(n.seed())?, plan, n.seed() >> 1))),
        ("index_select", |b, seed| with_plan(seed, |n, plan| sequences::judge(b, &mla::Select::new(n.seed()), plan, n.seed() >> 1))),
        ("kda_state", |b, seed| with_rows(seed, |n, _| sequences::judge_state(b, &kda::Kda::new(n.seed()), n))),
        ("mla_state", |b, seed| with_rows(seed, |n, _| sequences::judge_state(b, &mla::Attend::new(n.seed())?, n))),
        ("index_state", |b, seed| with_rows(seed, |n, _| sequences::judge_state(b, &mla::Select::new(n.seed()), n))),
        ("sample", sample::judge),
        ("coded", coded::judge),
    ]
}

/// Runs a check on a row count that goes with its seed.
fn with_rows(seed: u64, check: impl FnOnce(&mut Noise, usize) -> Result<(), String>) -> Result<(), String> {
    let rows = rows::ROWS[(seed % rows::ROWS.len() as u64) as usize];
    check(&mut Noise::new(seed), rows)
}

/// Runs a check on a plan of steps that goes with its seed.
fn with_plan(seed: u64, check: impl FnOnce(&mut Noise, &Plan) -> Result<(), String>) -> Result<(), String> {
    let mut n = Noise::new(seed);
    let plan = Plan::random(&mut n, 4, 130);
    check(&mut n, &plan)
}

/// Runs one check by name over some seeds.
///
/// # Errors
/// The first case that did not hold, or a name that no check has.
pub fn run<B: Backend>(backend: &B, name: &'static str, seeds: Range<u64>) -> Result<(), Failure> {
    let failure = |seed, reason| Failure { backend: backend.device().arithmetic.clone(), check: name, seed, reason };
    backend.reserve(MOST_ROWS, MOST_ROWS).map_err(|e| failure(0, e.to_string()))?;
    let Some((_, check)) = checks::<B>().into_iter().find(|c| c.0 == name) else {
        return Err(failure(0, "there is no check of this name".to_owned()));
    };
    for seed in seeds {
        check(backend, seed).map_err(|reason| failure(seed, reason))?;
    }
    Ok(())
}

/// Runs every check over some seeds.
///
/// # Errors
/// The first case of each check that did not hold.
pub fn run_all<B: Backend>(backend: &B, seeds: Range<u64>) -> Result<(), Vec<Failure>> {
    let failures: Vec<Failure> = checks::<B>().into_iter().filter_map(|(name, _)| run(backend, name, seeds.clone()).err()).collect();
    if failures.is_empty() { Ok(()) } else { Err(failures) }
}

/// One test per check, for a backend made by an expression: `conformance!(ReferenceBackend::<f32>::new(Precision::F32));`
#[macro_export]
macro_rules! conformance {
    ($backend:expr) => {
        $crate::conformance!(
            $backend,
            memory embed linear norm mhc mlp router experts kda mla_attend index_select kda_state mla_state index_state sample coded
        );

        #[test]
        fn no_check_is_forgotten() {
            let names = ["memory", "embed", "linear", "norm", "mhc", "mlp", "router", "experts", "kda", "mla_attend", "index_select",
                "kda_state", "mla_state", "index_state", "sample", "coded"];
            fn of<B: $crate::Backend>(_: &B) -> Vec<&'static str> {
                $crate::conformance::checks::<B>().into_iter().map(|c| c.0).collect()
            }
            assert_eq!(of(&$backend), names);
        }
    };
    ($backend:expr, $($name:ident)*) => {
        $(
            #[test]
            fn $name() {
                if let Err(failure) = $crate::conformance::run(&$backend, stringify!($name), $crate::conformance::SEEDS) {
                    panic!("{failure}");
                }
            }
        )*
    };
}
