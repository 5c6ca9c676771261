//! The CUDA backend: every op of [`crate::Backend`] as kernels on one stream of one device.
//!
//! | file | idea |
//! |---|---|
//! | [`probe`] | which libraries and devices there are, without touching what is missing |
//! | `driver`, `loaded` | the driver API behind handles that free themselves; kernels that are loaded |
//! | [`compile`] | sources → machine code: prebuilt pack, cache on disk, NVRTC |
//! | `memory`, `batch`, `state` | buffers and scratch; a step on the device; sequence state |
//! | `pack`, `coded`, `weight` | stored matrices in the layout that kernels read |
//! | `backend`, `ops`, `mixers`, `mla` | the trait; products, experts and hyper-connections; KDA and indexer; latent attention |
//! | `timing`, `times` | the device's own time, of single calls and of recorded ones; op by op while a worker serves |
//! | `sample` | sampling: greedy and judged rows on the device, others on the host |
//! | [`selftest`] | every kernel once against the reference before a worker serves |
//!
//! The kernels are CUDA C++ in `kernels/cuda`, embedded here. The driver, NVRTC and their symbols are opened at run time: a binary with this
//! backend runs where none of them is, and says what is missing when it is asked for a device.

pub mod compile;
pub mod probe;
pub mod selftest;

pub(crate) mod coded;

mod backend;
mod batch;
mod driver;
mod few;
mod lend;
mod loaded;
mod memory;
mod mixers;
mod mla;
mod ops;
mod pack;
mod sample;
mod state;
mod times;
mod timing;
mod weight;
mod wide;

use std::sync::Arc;

use parking_lot::Mutex;

pub use batch::CudaBatch;
pub use lend::{CudaRegion, CudaWindow};
pub use loaded::Counted;
pub use memory::CudaBuf;
pub use state::CudaState;
pub use weight::{CudaBank, CudaWeight};
pub(crate) use wide::expert_scratch;

use crate::{BackendError, DeviceInfo, Precision};

/// How to make a [`CudaBackend`].
#[derive(Clone, Debug)]
pub struct CudaOptions {
    /// Which of the machine's devices, from 0.
    pub ordinal: usize,
    /// The rounding mode.
    pub precision: Precision,
    /// Where compiled kernels are looked for and kept.
    pub places: compile::Places,
}

impl CudaOptions {
    /// Device `ordinal`, with the user's usual folders.
    pub fn new(ordinal: usize, precision: Precision) -> Self {
        Self { ordinal, precision, places: compile::Places::usual() }
    }
}

/// The number in `cuda:N`; nothing for another device's name.
pub fn ordinal(device: &str) -> Option<usize> {
    device.strip_prefix("cuda:")?.parse().ok()
}

/// The backend over one CUDA device.
pub struct CudaBackend {
    info: DeviceInfo,
    precision: Precision,
    device: Arc<driver::Device>,
    kernels: loaded::Kernels,
    scratch: Mutex<memory::Scratch>,
    staging: Mutex<memory::Staging>,
    first_error: Mutex<Option<BackendError>>,
    times: Option<Mutex<times::Times>>,
}

impl std::fmt::Debug for CudaBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CudaBackend").field("info", &self.info).field("precision", &self.precision).finish_non_exhaustive()
    }
}

impl CudaBackend {
    /// Opens the device and loads the kernels that every model needs; those of a stored type come with its first weight.
    ///
    /// # Errors
    /// No driver, one that is too old, no such device, a device that is too old, no kernels for it and no way to compile them, a bad `TANDEM_KERNEL_TIMES`.
    pub fn new(options: CudaOptions) -> Result<Self, BackendError> {
        let name = format!("cuda:{}", options.ordinal);
        let start = |reason: String| BackendError::Op { op: "start", device: name.clone(), reason };
        let times = times::Times::wanted().map_err(start)?;
        let found = probe::device(options.ordinal).map_err(|e| start(e.to_string()))?;
        let device = driver::Device::open(&found).map_err(start)?;
        let kernels = loaded::Kernels::new(Arc::clone(&device), compile::Compiler::new(&found, options.places));
        kernels.load_common().map_err(start)?;
        let staging = memory::Staging::new(&device).map_err(start)?;
        tracing::info!(device = name, model = found.name, arch = found.arch(), sms = found.sms, gib = found.memory >> 30, "CUDA device");
        Ok(Self {
            info: DeviceInfo {
                // The kernels' sums depend on their source alone, but for the chip's own matrix units.
                arithmetic: format!("cuda-sm{}{}-{}", found.major, found.minor, compile::source_mark()),
                description: format!("{name} {}, {} SMs, {}, CUDA {}", found.name, found.sms, found.arch(), found.driver),
                memory_bytes: Some(found.memory),
            },
            precision: options.precision,
            device,
            kernels,
            scratch: Mutex::default(),
            staging: Mutex::new(staging),
            first_error: Mutex::default(),
            times: times.map(Mutex::new),
        })
    }

    /// A backend that has passed its self-test: what a worker serves with.
    ///
    /// # Errors
    /// As [`CudaBackend::new`] and [`CudaBackend::self_test`].
    pub fn checked(ordinal: usize, precision: Precision) -> Result<Self, BackendError> {
        let backend = Self::new(CudaOptions::new(ordinal, precision))?;
        backend.self_test()?;
        Ok(backend)
    }

    /// Loads every unit, and says of each kernel whether it was launched.
    ///
    /// # Errors
    /// Code that cannot be had.
    pub fn census(&self) -> Result<Vec<Counted>, BackendError> {
        let failed = |e| self.failed("census", e);
        self.kernels.load_all(compile::UNITS).map_err(failed)?;
        self.kernels.census().map_err(failed)
    }

    /// Bytes a second that a kernel reads which does nothing else, over `bytes` of memory: the best of some rounds.
    ///
    /// # Errors
    /// No room, or the device failed.
    pub fn read_bandwidth(&self, bytes: usize) -> Result<f64, BackendError> {
        // Whole passes of the kernel's grid: 1056 blocks of 512 threads that read 8 x 16 bytes each.
        const PASS: usize = 1056 * 512 * 8 * 16;
        let bytes = (bytes / PASS).max(1) * PASS;
        let memory = self.device.alloc("bandwidth", bytes)?;
        let mut best = f64::INFINITY;
        for _ in 0..8 {
            let grid = driver::Grid::new([1056, 1, 1], 512);
            let ms = self.timed(|| {
                let done = driver::launch!(self, compile::ROWS, "read_all", grid; memory.at(), (bytes / 16) as i64, memory.at());
                if let Err(reason) = done {
                    self.first_error.lock().get_or_insert(self.failed("bandwidth", reason));
                }
            })?;
            best = best.min(f64::from(ms));
        }
        crate::Backend::sync(self)?;
        Ok(bytes as f64 / best * 1e3)
    }
}
