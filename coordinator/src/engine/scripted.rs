//! An [`Engine`](super::Engine) whose other side is a script: lets `api/` be tested, and tried, with no worker at all.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use tokio::sync::{mpsc, watch};

use super::{AdmissionError, Departure, GenerateRequest, Generation, GenerationEvent, Inner, Limits, Readiness, check_request};
use crate::stats::Stats;

struct Shared {
    limits: Mutex<Limits>,
    readiness: Mutex<Readiness>,
    refusals: Mutex<VecDeque<AdmissionError>>,
    live: Mutex<Vec<(u64, watch::Sender<bool>)>>,
    next_id: AtomicU64,
    requests: mpsc::UnboundedSender<ScriptedGeneration>,
    cancel: mpsc::UnboundedSender<Departure>,
}

/// The far side of a scripted engine.
pub struct ScriptedWorker {
    shared: Arc<Shared>,
    requests: mpsc::UnboundedReceiver<ScriptedGeneration>,
}

/// One admitted request, waiting for the script's events.
#[derive(Debug)]
pub struct ScriptedGeneration {
    /// What the API asked for.
    pub request: GenerateRequest,
    events: mpsc::UnboundedSender<GenerationEvent>,
    cancelled: watch::Receiver<bool>,
}

pub(super) fn pair(limits: Limits) -> (Arc<dyn Inner>, ScriptedWorker) {
    let (requests, requests_rx) = mpsc::unbounded_channel();
    let (cancel, mut cancel_rx) = mpsc::unbounded_channel::<Departure>();
    let shared = Arc::new(Shared {
        limits: Mutex::new(limits),
        readiness: Mutex::new(Readiness { ready: true, reasons: Vec::new() }),
        refusals: Mutex::default(),
        live: Mutex::default(),
        next_id: AtomicU64::new(1),
        requests,
        cancel,
    });
    let weak = Arc::downgrade(&shared);
    tokio::spawn(async move {
        while let Some(Departure { id, .. }) = cancel_rx.recv().await {
            let Some(shared) = weak.upgrade() else { return };
            shared.live.lock().retain(|(live, flag)| *live != id || flag.send(true).is_err());
        }
    });
    (shared.clone(), ScriptedWorker { shared, requests: requests_rx })
}

impl Inner for Shared {
    fn submit(&self, requests: Vec<GenerateRequest>) -> Result<Vec<Generation>, AdmissionError> {
        if let Some(error) = self.refusals.lock().pop_front() {
            return Err(error);
        }
        let readiness = self.readiness();
        if !readiness.ready {
            return Err(AdmissionError::NotReady { reasons: readiness.reasons });
        }
        for request in &requests {
            check_request(request, self.limits())?;
        }
        let mut generations = Vec::with_capacity(requests.len());
        for request in requests {
            let id = self.next_id.fetch_add(1, Ordering::Relaxed);
            let (events, generation) = Generation::channel(id, self.cancel.clone());
            let (flag, cancelled) = watch::channel(false);
            self.live.lock().push((id, flag));
            // The script may be gone already: the generation then ends with an error, as with a dead engine.
            let _ = self.requests.send(ScriptedGeneration { request, events, cancelled });
            generations.push(generation);
        }
        Ok(generations)
    }

    fn limits(&self) -> Limits {
        *self.limits.lock()
    }

    fn readiness(&self) -> Readiness {
        self.readiness.lock().clone()
    }

    fn stats(&self) -> Stats {
        Stats { readiness: self.readiness(), limits: self.limits(), ..Stats::default() }
    }
}

impl ScriptedWorker {
    /// The next admitted request; `None` when the engine is gone.
    pub async fn next(&mut self) -> Option<ScriptedGeneration> {
        self.requests.recv().await
    }

    /// Makes the next `submit` fail with `error`.
    pub fn refuse_next(&self, error: AdmissionError) {
        self.shared.refusals.lock().push_back(error);
    }

    /// Makes the engine not ready for these reasons (ready if there are none).
    pub fn set_reasons(&self, reasons: Vec<String>) {
        *self.shared.readiness.lock() = Readiness::from_reasons(reasons);
    }
}

impl ScriptedGeneration {
    /// Sends an event to the API side; dropped silently if that side is gone.
    pub fn send(&self, event: GenerationEvent) {
        let _ = self.events.send(event);
    }

    /// Resolves when the API side drops its [`Generation`] before the end.
    pub async fn cancelled(&mut self) {
        let _ = self.cancelled.wait_for(|cancelled| *cancelled).await;
    }

    /// Whether the API side has dropped its [`Generation`] before the end.
    pub fn is_cancelled(&self) -> bool {
        *self.cancelled.borrow()
    }
}
