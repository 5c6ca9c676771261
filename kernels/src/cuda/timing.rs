//! The device's own time: between two marks, and of work that was recorded once and is replayed, so that the host's rate of launching does not
//! show. Neighbours: `driver.rs` (the stream); `benches/cuda` (what is timed).

use cudarc::driver::sys as cu;

use super::{
    CudaBackend,
    driver::{Device, check},
};
use crate::BackendError;

/// Two marks on a stream.
pub(super) struct Marks([cu::CUevent; 2]);

// SAFETY: handles that any thread may use once the context is current to it.
unsafe impl Send for Marks {}

impl Marks {
    /// The device's context must be current.
    pub(super) fn new() -> Result<Self, String> {
        let mut marks = Self([std::ptr::null_mut(); 2]);
        for mark in &mut marks.0 {
            // SAFETY: the place is ours.
            check("cuEventCreate", unsafe { cu::cuEventCreate(mark, 0) })?;
        }
        Ok(marks)
    }

    /// Sets one of the two on the stream.
    pub(super) fn set(&self, which: usize, device: &Device) -> Result<(), String> {
        // SAFETY: both live.
        check("cuEventRecord", unsafe { cu::cuEventRecord(self.0[which], device.stream) })
    }

    /// Milliseconds between the marks, both of which the stream has passed.
    pub(super) fn between(&self) -> Result<f32, String> {
        let mut ms = 0.0;
        // SAFETY: both were recorded.
        check("cuEventElapsedTime", unsafe { cu::cuEventElapsedTime_v2(&raw mut ms, self.0[0], self.0[1]) })?;
        Ok(ms)
    }
}

impl Drop for Marks {
    fn drop(&mut self) {
        for mark in self.0.into_iter().filter(|m| !m.is_null()) {
            // SAFETY: made here, and not used after this; a failure leaves nothing to do.
            let _ = unsafe { cu::cuEventDestroy_v2(mark) };
        }
    }
}

/// Recorded work.
struct Recorded(cu::CUgraphExec);

impl Recorded {
    fn new(device: &Device, work: impl FnOnce()) -> Result<Self, String> {
        let (mut graph, mut exec) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the context is current, the places are ours; what `work` enqueues on this stream is recorded, and nothing else uses it meanwhile.
        unsafe {
            let mode = cu::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_RELAXED;
            check("cuStreamBeginCapture", cu::cuStreamBeginCapture_v2(device.stream, mode))?;
            work();
            check("cuStreamEndCapture", cu::cuStreamEndCapture(device.stream, &raw mut graph))?;
            let made = check("cuGraphInstantiate", cu::cuGraphInstantiateWithFlags(&raw mut exec, graph, 0));
            check("cuGraphDestroy", cu::cuGraphDestroy(graph))?;
            made?;
        }
        Ok(Self(exec))
    }

    fn play(&self, device: &Device) -> Result<(), String> {
        // SAFETY: both live.
        check("cuGraphLaunch", unsafe { cu::cuGraphLaunch(self.0, device.stream) })
    }
}

impl Drop for Recorded {
    fn drop(&mut self) {
        // SAFETY: made here, and not used after this; a failure leaves nothing to do.
        let _ = unsafe { cu::cuGraphExecDestroy(self.0) };
    }
}

impl Device {
    fn timed(&self, work: impl FnOnce()) -> Result<f32, String> {
        self.bind()?;
        let marks = Marks::new()?;
        marks.set(0, self)?;
        work();
        marks.set(1, self)?;
        self.sync()?;
        marks.between()
    }

    fn replayed(&self, rounds: usize, work: impl FnOnce()) -> Result<Vec<f32>, String> {
        self.bind()?;
        let (recorded, marks) = (Recorded::new(self, work)?, Marks::new()?);
        recorded.play(self)?;
        let round = || {
            marks.set(0, self)?;
            recorded.play(self)?;
            marks.set(1, self)?;
            self.sync()?;
            marks.between()
        };
        (0..rounds).map(|_| round()).collect()
    }
}

impl CudaBackend {
    /// Milliseconds that the device spends on what `work` enqueues.
    ///
    /// # Errors
    /// The device failed.
    pub fn timed(&self, work: impl FnOnce()) -> Result<f32, BackendError> {
        self.device.timed(work).map_err(|e| self.failed("timing", e))
    }

    /// Milliseconds that the device spends on what `work` enqueues, in each of some rounds: recorded once and replayed. `work` may not wait for the
    /// device or copy from the host, and its scratch must be there from an earlier call.
    ///
    /// # Errors
    /// The device failed, or the work cannot be recorded.
    pub fn replayed(&self, rounds: usize, work: impl FnOnce()) -> Result<Vec<f32>, BackendError> {
        self.device.replayed(rounds, work).map_err(|e| self.failed("timing", e))
    }
}
