//! The CPU backend: every op of [`crate::Backend`] over vectors and a thread pool.
//!
//! | file | idea |
//! |---|---|
//! | `backend`, `checks` | the trait's methods: check shapes, borrow scratch, call the op |
//! | `isa`, `simd`, `simd_avx2`, `simd_avx512` | run-time detection; the vector operations kernels are written over |
//! | `pool`, `affinity`, `disjoint` | threads and their cores; one slice written by many, each in its own places |
//! | `buf`, `aligned`, `state` | what the opaque handles hold |
//! | `decode`, `gemm`, `linear` | stored types → products of 1 … thousands of rows in one summation order |
//! | `nn`, `rows` | activations by activations; loops over one row |
//! | `mhc`, `kda`, `kda_chunk`, `mla`, `indexer`, `router`, `experts`, `sampler` | the ops of docs/model.md |
//!
//! Decode is bound by memory: weights are read in their stored type straight from where the loader left them (a memory map), once per
//! step for all rows; a head's KDA state passes the cache once. Sums run in one order per instruction set, whatever the rows, threads and
//! blocks, so [`DeviceInfo::arithmetic`] names the instruction set and two CPU workers of one set are interchangeable.

mod affinity;
mod aligned;
mod backend;
mod buf;
mod checks;
mod decode;
mod disjoint;
mod experts;
mod gemm;
mod indexer;
mod isa;
mod kda;
mod kda_chunk;
mod latents;
mod lend;
mod linear;
mod mhc;
mod mla;
mod nn;
mod pool;
mod router;
mod rows;
mod sampler;
mod simd;
#[cfg(target_arch = "x86_64")]
mod simd_avx2;
#[cfg(target_arch = "x86_64")]
mod simd_avx512;
mod state;

use parking_lot::Mutex;

pub(crate) use backend::scratch_bytes;
pub use buf::{CpuBank, CpuBatch, CpuBuf, CpuWeight};
pub use isa::Isa;
pub use latents::LatentType;
pub use lend::{CpuRegion, CpuWindow};
pub use state::CpuState;

use crate::{BackendError, DeviceInfo, Precision};

/// How to make a [`CpuBackend`].
#[derive(Clone, Debug)]
pub struct CpuOptions {
    /// Threads that share an op, the caller's included; `None`: as many as the process may run on.
    pub threads: Option<usize>,
    /// Cores for these threads, one each and in this order, the caller's first (see [`Backend::bind_thread`](crate::Backend::bind_thread));
    /// empty: the system places them.
    pub cpus: Vec<usize>,
    /// The rounding mode.
    pub precision: Precision,
    /// The instruction set; `None`: the best that this CPU has.
    pub isa: Option<Isa>,
    /// What latent rows are stored as; `None`: as the rounding mode says.
    pub latents: Option<LatentType>,
}

impl CpuOptions {
    /// All threads, the best instruction set.
    pub fn new(precision: Precision) -> Self {
        Self { threads: None, cpus: Vec::new(), precision, isa: None, latents: None }
    }
}

/// What ops run with.
struct Engine {
    isa: isa::CheckedIsa,
    pool: pool::Pool,
    locals: buf::Locals,
    precision: Precision,
    latents: LatentType,
}

/// The backend over this machine's cores and memory.
pub struct CpuBackend {
    engine: Engine,
    info: DeviceInfo,
    scratch: Mutex<buf::Scratch>,
    samplers: Vec<Mutex<sampler::SampleScratch>>,
    first_error: Mutex<Option<BackendError>>,
}

impl std::fmt::Debug for CpuBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CpuBackend").field("info", &self.info).field("precision", &self.engine.precision).finish_non_exhaustive()
    }
}

impl CpuBackend {
    /// Starts the threads.
    ///
    /// # Errors
    /// The instruction set asked for is not there; a core that this process may not run on.
    pub fn new(options: CpuOptions) -> Result<Self, BackendError> {
        let wanted = options.isa.unwrap_or_else(Isa::detect);
        let isa = isa::CheckedIsa::new(wanted).ok_or_else(|| BackendError::Op {
            op: "start",
            device: format!("cpu-{wanted}"),
            reason: format!("this CPU has {}", Isa::available().iter().map(|i| format!("cpu-{i}")).collect::<Vec<_>>().join(", ")),
        })?;
        let affinity = affinity::Affinity::new(options.cpus).map_err(|reason| BackendError::Op {
            op: "start",
            device: format!("cpu-{wanted}"),
            reason,
        })?;
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        let pool = pool::Pool::new(options.threads.unwrap_or_else(|| affinity.threads().unwrap_or(cores)).max(1), affinity);
        let threads = pool.threads();
        let latents = options.latents.unwrap_or(LatentType::of(options.precision));
        Ok(Self {
            info: DeviceInfo {
                arithmetic: format!("cpu-{wanted}"),
                description: format!("{}, {threads} of {cores} threads, {wanted}", cpu_name()),
                memory_bytes: memory_bytes(),
            },
            engine: Engine { isa, locals: buf::Locals::new(threads), pool, precision: options.precision, latents },
            scratch: Mutex::default(),
            samplers: (0..threads).map(|_| Mutex::default()).collect(),
            first_error: Mutex::default(),
        })
    }

    /// Threads that share an op.
    pub fn threads(&self) -> usize {
        self.engine.pool.threads()
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.engine.isa.isa()
    }
}

/// Samples rows of logits that lie in host memory, for devices that leave it to the host.
#[derive(Default)]
pub(crate) struct RowSampler {
    scratch: sampler::SampleScratch,
}

impl RowSampler {
    /// With empty scratch.
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// Samples (or, with `forced`, judges) a row.
    pub(crate) fn sample(&mut self, logits: &[f32], row: &crate::SampleRow) -> crate::Sampled {
        sampler::sample(isa::CheckedIsa::best(), logits, row, &mut self.scratch)
    }
}

/// The processor's name, for people.
fn cpu_name() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find(|l| l.starts_with("model name")).and_then(|l| l.split_once(':')).map(|(_, n)| n.trim().to_owned());
    name.unwrap_or_else(|| std::env::consts::ARCH.to_owned())
}

/// Memory that this process may use: the machine's, or less where a control group says so.
fn memory_bytes() -> Option<u64> {
    let machine = meminfo("MemTotal:");
    let group = std::fs::read_to_string("/sys/fs/cgroup/memory.max").ok().and_then(|s| s.trim().parse::<u64>().ok());
    match (machine, group) {
        (Some(m), Some(g)) => Some(m.min(g)),
        (m, g) => m.or(g),
    }
}

/// A line of /proc/meminfo in bytes.
fn meminfo(key: &str) -> Option<u64> {
    let info = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = info.lines().find(|l| l.starts_with(key))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib << 10)
}
