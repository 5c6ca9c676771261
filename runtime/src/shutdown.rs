//! One shutdown signal for a process: drain first, then stop.

use tokio_util::sync::CancellationToken;

/// Cloneable handle: `drain` asks for a graceful end (stop admitting, finish what runs), `now` ends at once. Cancelling `now`
/// alone is enough for code that has nothing to drain.
#[derive(Clone, Debug, Default)]
pub struct Shutdown {
    drain: CancellationToken,
    now: CancellationToken,
}

impl Shutdown {
    /// A handle that nothing has triggered.
    pub fn new() -> Self {
        Self::default()
    }

    /// Starts draining (first SIGTERM or Ctrl-C, or a Drain from the coordinator).
    pub fn start_drain(&self) {
        self.drain.cancel();
    }

    /// Ends at once (second signal, drain timeout, or drain finished).
    pub fn stop_now(&self) {
        self.drain.cancel();
        self.now.cancel();
    }

    /// Resolves when draining starts.
    pub async fn draining(&self) {
        self.drain.cancelled().await;
    }

    /// Resolves when everything must end.
    pub async fn stopping(&self) {
        self.now.cancelled().await;
    }

    /// Whether draining has started.
    pub fn is_draining(&self) -> bool {
        self.drain.is_cancelled()
    }

    /// Whether everything must end.
    pub fn is_stopping(&self) -> bool {
        self.now.is_cancelled()
    }
}
