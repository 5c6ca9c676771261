//! The driver API behind handles that free themselves: the device's context and stream, memory, launches.
//!
//! Every call here comes after [`super::probe`] has seen the driver. Handles may be used from any thread: each call makes the context
//! current first. One stream carries everything, so what was enqueued earlier is done earlier.

use std::{ffi::c_void, sync::Arc};

use cudarc::driver::sys as cu;
use parking_lot::Mutex;

use super::probe::{Found, words};
use crate::BackendError;

/// Turns a result of the driver into its words.
pub(super) fn check(what: &str, result: cu::CUresult) -> Result<(), String> {
    if result == cu::CUresult::CUDA_SUCCESS { Ok(()) } else { Err(format!("{what}: {}", words(result))) }
}

/// Why a context finds no room, before which the driver does not say how much is free.
fn no_room_for_context(found: &Found) -> String {
    let gib = found.memory as f64 / f64::from(1 << 30);
    format!(
        "out of memory: a process needs some hundred MiB for its context alone, and other processes hold the {gib:.1} GiB of {}; nvidia-smi \
         shows which",
        found.name
    )
}

/// An allocation that found no room.
#[derive(Clone, Debug)]
struct Short {
    what: String,
    needed: u64,
    available: u64,
}

/// An opened device.
pub(super) struct Device {
    name: String,
    /// An allocation that found no room: failures after it may be due to it.
    short: Mutex<Option<Short>>,
    device: cu::CUdevice,
    context: cu::CUcontext,
    pub(super) stream: cu::CUstream,
    /// Whether a kernel may begin before the one ahead has ended (portable.cuh, `await_ahead`).
    early: bool,
    /// Whether it has wide products (kernels/cuda/wide.cuh).
    pub(super) wide: bool,
    /// Multiprocessors.
    pub(super) sms: usize,
    /// Most shared memory that a block may ask for, in bytes.
    pub(super) shared: usize,
}

// SAFETY: the driver's handles are plain pointers that any thread may use once the context is current to it, which every call here sees to.
unsafe impl Send for Device {}
// SAFETY: as above; the driver locks where calls of several threads meet.
unsafe impl Sync for Device {}

impl Device {
    /// Retains the device's primary context and makes a stream.
    pub(super) fn open(found: &Found) -> Result<Arc<Self>, String> {
        let (mut device, mut context, mut stream, mut shared) = (0, std::ptr::null_mut(), std::ptr::null_mut(), 0);
        // SAFETY: `found` was seen by the probe, so the driver is there and initialised; the places are ours.
        unsafe {
            check("cuDeviceGet", cu::cuDeviceGet(&raw mut device, found.ordinal as i32))?;
            match cu::cuDevicePrimaryCtxRetain(&raw mut context, device) {
                cu::CUresult::CUDA_ERROR_OUT_OF_MEMORY => return Err(no_room_for_context(found)),
                other => check("cuDevicePrimaryCtxRetain", other)?,
            }
            check("cuCtxSetCurrent", cu::cuCtxSetCurrent(context))?;
            let flags = cu::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
            check("cuStreamCreate", cu::cuStreamCreate(&raw mut stream, flags))?;
            let most = cu::CUdevice_attribute_enum::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN;
            check("cuDeviceGetAttribute", cu::cuDeviceGetAttribute(&raw mut shared, most, device))?;
        }
        Ok(Arc::new(Self {
            name: format!("cuda:{}", found.ordinal),
            short: Mutex::default(),
            device,
            context,
            stream,
            early: found.major >= 9,
            wide: found.arch() == "sm_90a",
            sms: found.sms.max(1) as usize,
            shared: usize::try_from(shared).unwrap_or(0),
        }))
    }

    /// Whether eight blocks may run together and read each other's shared memory (portable.cuh, `CLUSTERS`).
    pub(super) fn clusters(&self) -> bool {
        self.early
    }

    /// Makes the context current to this thread.
    pub(super) fn bind(&self) -> Result<(), String> {
        // SAFETY: the context lives as long as this handle.
        check("cuCtxSetCurrent", unsafe { cu::cuCtxSetCurrent(self.context) })
    }

    /// `cuda:N`.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Waits for the stream.
    pub(super) fn sync(&self) -> Result<(), String> {
        self.bind()?;
        // SAFETY: the stream lives as long as this handle.
        check("the device failed", unsafe { cu::cuStreamSynchronize(self.stream) })
    }

    /// Zeroed memory.
    pub(super) fn alloc(self: &Arc<Self>, what: &str, bytes: usize) -> Result<Memory, BackendError> {
        let failed = |reason| BackendError::Op { op: "alloc", device: self.name.clone(), reason };
        self.bind().map_err(failed)?;
        let bytes = bytes.max(16);
        let mut at = 0;
        // SAFETY: the context is current, the place is ours.
        match unsafe { cu::cuMemAlloc_v2(&raw mut at, bytes) } {
            cu::CUresult::CUDA_SUCCESS => {}
            cu::CUresult::CUDA_ERROR_OUT_OF_MEMORY => return Err(self.no_room(what, bytes as u64)),
            error => return Err(failed(format!("cuMemAlloc: {}", words(error)))),
        }
        let memory = Memory { device: Arc::clone(self), at, bytes };
        memory.clear(0, bytes).map_err(failed)?;
        Ok(memory)
    }

    /// The error of an allocation that found no room, which is kept ([`Device::out_of_memory`]).
    pub(super) fn no_room(&self, what: &str, needed: u64) -> BackendError {
        let short = Short { what: what.to_owned(), needed, available: self.free() };
        let error = self.shortage(&short);
        self.short.lock().get_or_insert(short);
        error
    }

    /// Bytes that nobody holds; the context must be current.
    fn free(&self) -> u64 {
        let (mut free, mut total) = (0, 0);
        // SAFETY: the places are ours; a failure leaves zeros.
        let _ = unsafe { cu::cuMemGetInfo_v2(&raw mut free, &raw mut total) };
        free as u64
    }

    fn shortage(&self, short: &Short) -> BackendError {
        let Short { what, needed, available } = short.clone();
        BackendError::OutOfMemory { what, needed, available, device: self.name.clone() }
    }

    /// That an allocation found no room, if one did since this was last asked: what failed after it may have failed for that.
    pub(super) fn out_of_memory(&self) -> Option<BackendError> {
        self.short.lock().take().map(|short| self.shortage(&short))
    }

    /// Copies to the device. Returns when the source may be used again, not when the copy is done.
    ///
    /// # Safety
    /// `to..to + bytes.len()` lies inside of one allocation of this device that lives on. Where `bytes` is pinned, it stays untouched until
    /// the stream has passed this point.
    pub(super) unsafe fn copy_in(&self, bytes: &[u8], to: u64) -> Result<(), String> {
        // SAFETY: the caller's promise; pageable memory is staged before the call returns.
        check("copy to the device", unsafe { cu::cuMemcpyHtoDAsync_v2(to, bytes.as_ptr().cast(), bytes.len(), self.stream) })
    }

    /// Enqueues a copy from the device.
    ///
    /// # Safety
    /// `from..from + bytes.len()` lies inside of one allocation of this device that lives on; `bytes` live, and are not touched, until the stream
    /// was waited for.
    pub(super) unsafe fn copy_out(&self, from: u64, bytes: &mut [u8]) -> Result<(), String> {
        // SAFETY: the caller's promise.
        check("copy from the device", unsafe { cu::cuMemcpyDtoHAsync_v2(bytes.as_mut_ptr().cast(), from, bytes.len(), self.stream) })
    }

    /// Copies inside of the device.
    ///
    /// # Safety
    /// Both ranges lie inside of allocations of this device that live on, and do not overlap.
    pub(super) unsafe fn copy_within(&self, from: u64, to: u64, bytes: usize) -> Result<(), String> {
        // SAFETY: the caller's promise.
        check("copy on the device", unsafe { cu::cuMemcpyDtoDAsync_v2(to, from, bytes, self.stream) })
    }

    /// Pinned host memory, which copies at full speed.
    pub(super) fn pinned(self: &Arc<Self>, bytes: usize) -> Result<Pinned, String> {
        self.bind()?;
        let mut at = std::ptr::null_mut();
        // SAFETY: the context is current, the place is ours.
        check("pinned memory", unsafe { cu::cuMemAllocHost_v2(&raw mut at, bytes) })?;
        Ok(Pinned { device: Arc::clone(self), at: at.cast(), bytes })
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        // SAFETY: nothing uses the stream or the context after this; failures at the end of a process leave nothing to do.
        unsafe {
            let _ = cu::cuCtxSetCurrent(self.context);
            let _ = cu::cuStreamDestroy_v2(self.stream);
            let _ = cu::cuDevicePrimaryCtxRelease_v2(self.device);
        }
    }
}

/// Device memory.
pub(super) struct Memory {
    device: Arc<Device>,
    at: u64,
    bytes: usize,
}

impl Memory {
    /// Where it begins.
    pub(super) fn at(&self) -> u64 {
        self.at
    }

    /// Its length.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Zeroes a part.
    pub(super) fn clear(&self, from: usize, bytes: usize) -> Result<(), String> {
        if from + bytes > self.bytes {
            return Err(format!("bytes {from}..{} of {}", from + bytes, self.bytes));
        }
        self.device.bind()?;
        // SAFETY: the range is inside, as was just seen.
        check("clear", unsafe { cu::cuMemsetD8Async(self.at + from as u64, 0, bytes, self.device.stream) })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated by this driver, and nothing here uses it after this; freeing waits for work that is enqueued.
        unsafe {
            let _ = cu::cuCtxSetCurrent(self.device.context);
            let _ = cu::cuMemFree_v2(self.at);
        }
    }
}

/// Pinned host memory.
pub(super) struct Pinned {
    device: Arc<Device>,
    at: *mut u8,
    bytes: usize,
}

// SAFETY: plain memory that is reached through this owner alone.
unsafe impl Send for Pinned {}

impl Pinned {
    /// The bytes.
    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: allocated with this length, initialised by the driver, and borrowed through its only owner.
        unsafe { std::slice::from_raw_parts_mut(self.at, self.bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let _ = self.device.sync();
        // SAFETY: allocated by this driver; the stream has passed all copies.
        let _ = unsafe { cu::cuMemFreeHost(self.at.cast()) };
    }
}

/// A loaded kernel.
#[derive(Clone, Copy)]
pub(super) struct Kernel(pub(super) cu::CUfunction);

// SAFETY: a handle that any thread may use (see [`Device`]).
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

/// Blocks, threads of a block, and bytes of dynamic shared memory of a launch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Grid {
    pub(super) blocks: [usize; 3],
    pub(super) threads: usize,
    pub(super) shared: usize,
}

impl Grid {
    pub(super) fn new(blocks: [usize; 3], threads: usize) -> Self {
        Self { blocks, threads, shared: 0 }
    }
}

impl Device {
    /// Enqueues a kernel.
    ///
    /// # Safety
    /// `arguments` point to values of the types and in the order of the kernel's parameters; memory that they name is there until the kernel
    /// is done, and as large as the kernel reaches.
    pub(super) unsafe fn launch(&self, kernel: Kernel, grid: Grid, arguments: &mut [*mut c_void]) -> Result<(), String> {
        let [x, y, z] = grid.blocks;
        if x == 0 || y == 0 || z == 0 {
            return Ok(());
        }
        let mut early = cu::CUlaunchAttribute {
            id: cu::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: cu::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = cu::CUlaunchConfig {
            gridDimX: x as u32,
            gridDimY: y as u32,
            gridDimZ: z as u32,
            blockDimX: grid.threads as u32,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: grid.shared as u32,
            hStream: self.stream,
            attrs: &raw mut early,
            numAttrs: u32::from(self.early),
        };
        // SAFETY: the caller's promise; the driver copies the arguments and the attribute before it returns. Every kernel awaits the one ahead
        // before it touches what another one writes.
        let result = unsafe { cu::cuLaunchKernelEx(&raw const config, kernel.0, arguments.as_mut_ptr(), std::ptr::null_mut()) };
        check("launch", result)
    }
}

/// Enqueues a kernel with arguments by value: `launch!(backend, UNIT, "name", grid; a, b, c)`. Returns a `Result<(), String>`.
macro_rules! launch {
    ($backend:expr, $unit:expr, $name:expr, $grid:expr; $($arg:expr),* $(,)?) => {{
        let grid: $crate::cuda::driver::Grid = $grid;
        match $backend.kernels.get($unit, $name) {
            Ok(kernel) => {
                // Each argument gets a place of its own that outlives the call.
                let mut places = ($($crate::cuda::driver::Place($arg),)*);
                let mut arguments = $crate::cuda::driver::Places::pointers(&mut places);
                // SAFETY: every launch lists its kernel's parameters in order and in their C types; callers check sizes before.
                unsafe { $backend.device.launch(kernel, grid, &mut arguments) }.map_err(|e| format!("{}: {e}", $name))
            }
            Err(e) => Err(e),
        }
    }};
}
pub(super) use launch;

/// A kernel argument.
pub(super) struct Place<T: Copy>(pub(super) T);

/// Tuples of places.
pub(super) trait Places {
    /// Their addresses in order.
    fn pointers(&mut self) -> Vec<*mut c_void>;
}

macro_rules! places {
    ($($t:ident)*) => {
        impl<$($t: Copy),*> Places for ($(Place<$t>,)*) {
            fn pointers(&mut self) -> Vec<*mut c_void> {
                #[allow(non_snake_case, reason = "one name for a type and its value")]
                let ($($t,)*) = self;
                vec![$((&raw mut $t.0).cast()),*]
            }
        }
    };
}
macro_rules! places_up_to {
    ($first:ident $($rest:ident)*) => {
        places!($first $($rest)*);
        places_up_to!($($rest)*);
    };
    () => {};
}
places_up_to!(A B C D E F G H I J K L M N O P Q R S T);
