//! Where the device's time goes, op by op, while a worker serves: off unless `TANDEM_KERNEL_TIMES` says every how many seconds to tell.
//!
//! Marks around an op keep it from beginning before the one ahead has ended, so small steps are slower while this is on; steps of many rows are not.
//! Neighbours: `backend.rs` (every op goes through one place there), `timing.rs` (the marks).

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use super::{driver::Device, timing::Marks};

/// Marks that wait for the device at a time: a step of the released model has about a thousand ops.
const MOST: usize = 4096;

/// Sums of the ops since they were last told.
pub(super) struct Times {
    every: Duration,
    told: Instant,
    free: Vec<Marks>,
    open: Vec<(&'static str, Marks)>,
    sums: BTreeMap<&'static str, (u32, f64)>,
}

impl Times {
    /// As the environment has it; `None`: off.
    ///
    /// # Errors
    /// What it has is no number of seconds.
    pub(super) fn wanted() -> Result<Option<Self>, String> {
        let Some(text) = std::env::var_os("TANDEM_KERNEL_TIMES").filter(|text| !text.is_empty()) else { return Ok(None) };
        let seconds = text.to_str().and_then(|text| text.parse::<f64>().ok()).and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        let every = seconds.ok_or_else(|| format!("TANDEM_KERNEL_TIMES is {}: needed a number of seconds, such as 10", text.display()))?;
        Ok(Some(Self { every, told: Instant::now(), free: Vec::new(), open: Vec::new(), sums: BTreeMap::new() }))
    }

    /// Runs an op between two marks.
    pub(super) fn around(&mut self, op: &'static str, device: &Device, run: impl FnOnce() -> Result<(), String>) -> Result<(), String> {
        device.bind()?;
        if self.open.len() >= MOST {
            device.sync()?;
            self.settle()?;
        }
        let marks = self.free.pop().map_or_else(Marks::new, Ok)?;
        marks.set(0, device)?;
        let done = run();
        marks.set(1, device)?;
        self.open.push((op, marks));
        done
    }

    /// The stream was waited for: sums up what it has passed, and tells when it is time.
    pub(super) fn passed(&mut self, device: &str) -> Result<(), String> {
        if self.told.elapsed() < self.every {
            return Ok(());
        }
        self.settle()?;
        self.told = Instant::now();
        for (op, (count, ms)) in std::mem::take(&mut self.sums) {
            tracing::info!(device, op, count, ms = (ms * 1e3).round() / 1e3, "device time");
        }
        Ok(())
    }

    fn settle(&mut self) -> Result<(), String> {
        for (op, marks) in self.open.drain(..) {
            let (count, ms) = self.sums.entry(op).or_default();
            *count += 1;
            *ms += f64::from(marks.between()?);
            self.free.push(marks);
        }
        Ok(())
    }
}
