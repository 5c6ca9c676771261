//! Readiness as latches, liveness as pulses.
//!
//! Each subsystem that must be up before a process can serve holds a [`Latch`]; the process is ready when all of them are open,
//! and each closed one gives its reason. Each loop that must keep turning holds a [`Pulse`]; the process is live while every
//! pulse beat within its limit. `admin.rs` and the coordinator's API read both through [`Health::report`].

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use serde::Serialize;

/// What a process says about itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Report {
    /// Every watched loop made progress within its limit. Never false because of another process.
    pub live: bool,
    /// The process can do its work now.
    pub ready: bool,
    /// Why not live or not ready, one entry per latch or pulse; empty when all is well.
    pub reasons: Vec<String>,
    /// How far the work of a closed latch is, where it says so (`tandem up` draws it).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub progress: Option<Progress>,
}

/// How far some long work is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Progress {
    /// Bytes done.
    pub done: u64,
    /// Bytes in all.
    pub total: u64,
}

/// Sets the progress of a latch's work, from any thread.
#[derive(Clone, Debug)]
pub struct ProgressSetter {
    state: Arc<LatchState>,
}

impl ProgressSetter {
    /// `done` of `total` bytes; shown while the latch is closed.
    pub fn set(&self, done: u64, total: u64) {
        *self.state.progress.lock() = Some(Progress { done, total });
    }
}

/// Shared health of one process. Cloning is cheap; all clones see the same state.
#[derive(Clone, Debug)]
pub struct Health {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    started: Instant,
    latches: Mutex<Vec<Arc<LatchState>>>,
    pulses: Mutex<Vec<Arc<PulseState>>>,
}

#[derive(Debug)]
struct LatchState {
    name: String,
    /// `None` = open; else why not.
    closed: Mutex<Option<String>>,
    progress: Mutex<Option<Progress>>,
}

#[derive(Debug)]
struct PulseState {
    name: String,
    limit: Duration,
    /// Milliseconds since `Inner::started` of the last beat.
    last: AtomicU64,
}

impl Default for Health {
    fn default() -> Self {
        Self::new()
    }
}

impl Health {
    /// No latches and no pulses: live and ready.
    pub fn new() -> Self {
        Self { inner: Arc::new(Inner { started: Instant::now(), latches: Mutex::default(), pulses: Mutex::default() }) }
    }

    /// Adds a condition of readiness, closed with the reason "starting" until its holder opens it.
    pub fn latch(&self, name: impl Into<String>) -> Latch {
        let state = Arc::new(LatchState { name: name.into(), closed: Mutex::new(Some("starting".into())), progress: Mutex::default() });
        self.inner.latches.lock().push(Arc::clone(&state));
        Latch { state }
    }

    /// Adds a loop that must beat at least once per `limit`, counted from now.
    pub fn pulse(&self, name: impl Into<String>, limit: Duration) -> Pulse {
        let state = Arc::new(PulseState { name: name.into(), limit, last: AtomicU64::new(self.now_ms()) });
        self.inner.pulses.lock().push(Arc::clone(&state));
        Pulse { inner: Arc::clone(&self.inner), state }
    }

    /// The state at this moment.
    pub fn report(&self) -> Report {
        let now = self.now_ms();
        let mut reasons = Vec::new();
        for pulse in self.inner.pulses.lock().iter() {
            let age = Duration::from_millis(now.saturating_sub(pulse.last.load(Ordering::Relaxed)));
            if age > pulse.limit {
                reasons.push(format!(
                    "{} made no progress for {:.1} s (limit {:.1} s)",
                    pulse.name,
                    age.as_secs_f64(),
                    pulse.limit.as_secs_f64()
                ));
            }
        }
        let live = reasons.is_empty();
        let mut progress: Option<Progress> = None;
        for latch in self.inner.latches.lock().iter() {
            if let Some(reason) = latch.closed.lock().as_deref() {
                reasons.push(format!("{}: {reason}", latch.name));
                if let Some(part) = *latch.progress.lock() {
                    let sum = progress.get_or_insert_default();
                    sum.done += part.done;
                    sum.total += part.total;
                }
            }
        }
        Report { live, ready: reasons.is_empty(), reasons, progress }
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.inner.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}

/// One condition of readiness. Dropping it closes it for good: a subsystem that ended is not ready.
#[derive(Debug)]
pub struct Latch {
    state: Arc<LatchState>,
}

impl Latch {
    /// The condition holds.
    pub fn open(&self) {
        *self.state.closed.lock() = None;
    }

    /// The condition does not hold, because of `reason`.
    pub fn close(&self, reason: impl Into<String>) {
        *self.state.closed.lock() = Some(reason.into());
    }

    /// A handle through which the work that the latch waits for can say how far it is.
    pub fn progress(&self) -> ProgressSetter {
        ProgressSetter { state: Arc::clone(&self.state) }
    }

    /// Whether the condition holds.
    pub fn is_open(&self) -> bool {
        self.state.closed.lock().is_none()
    }
}

impl Drop for Latch {
    fn drop(&mut self) {
        self.close("ended");
    }
}

/// One loop that must keep turning. Dropping it ends the watch (the loop ended on purpose).
#[derive(Debug)]
pub struct Pulse {
    inner: Arc<Inner>,
    state: Arc<PulseState>,
}

impl Pulse {
    /// The loop turned once more. Cheap: one relaxed store.
    pub fn beat(&self) {
        let now = u64::try_from(self.inner.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.state.last.store(now, Ordering::Relaxed);
    }
}

impl Drop for Pulse {
    fn drop(&mut self) {
        self.inner.pulses.lock().retain(|other| !Arc::ptr_eq(other, &self.state));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ready_only_when_every_latch_is_open() {
        let health = Health::new();
        assert!(health.report().ready);
        let weights = health.latch("weights");
        let peers = health.latch("peers");
        assert_eq!(health.report().reasons, ["weights: starting", "peers: starting"]);
        weights.open();
        peers.close("experts-0 silent for 3 s");
        let report = health.report();
        assert!(report.live && !report.ready);
        assert_eq!(report.reasons, ["peers: experts-0 silent for 3 s"]);
        let loading = peers.progress();
        loading.set(3, 10);
        assert_eq!(health.report().progress, Some(Progress { done: 3, total: 10 }));
        peers.open();
        assert!(health.report().ready && weights.is_open());
        assert_eq!(health.report().progress, None, "done");
    }

    #[test]
    fn a_dropped_latch_is_not_ready_again() {
        let health = Health::new();
        let latch = health.latch("step loop");
        latch.open();
        drop(latch);
        assert_eq!(health.report().reasons, ["step loop: ended"]);
    }

    #[test]
    fn a_late_pulse_is_not_live_and_a_dropped_one_is_forgotten() {
        let health = Health::new();
        let pulse = health.pulse("step loop", Duration::ZERO);
        std::thread::sleep(Duration::from_millis(5));
        let report = health.report();
        assert!(!report.live && !report.ready);
        assert!(report.reasons[0].starts_with("step loop made no progress"), "{:?}", report.reasons);
        drop(pulse);
        assert!(health.report().live);
        let alive = health.pulse("other", Duration::from_secs(3600));
        alive.beat();
        assert!(health.report().live);
    }
}
