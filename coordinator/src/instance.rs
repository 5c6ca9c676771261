//! The whole instance as the HTTP side sees it: what stands behind [`crate::engine::Engine`] in `tandem serve`.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::RwLock;
use tokio::sync::watch;

use crate::cluster::Cluster;
use crate::core::Core;
use crate::engine::{
    AdmissionError, ErrorCode, GenerateRequest, Generation, GenerationError, GenerationEvent, Inner, Limits, Readiness, SamplingParams,
};
use crate::membership::Strictness;
use crate::stats::Stats;

/// How far the coordinator itself is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Not serving yet, for this reason.
    Starting(String),
    /// A warm-up token has passed through every worker.
    Serving,
    /// Shutting down.
    Draining,
}

/// Core, cluster and phase.
pub(crate) struct Instance {
    core: Arc<Core>,
    cluster: watch::Sender<Option<Arc<Cluster>>>,
    phase: RwLock<Phase>,
    control_addr: Option<SocketAddr>,
}

/// How often the warm-up looks whether everybody is there.
const POLL: Duration = Duration::from_millis(20);
/// Warm-ups in a row that end in what the checkpoint must be the cause of, until the coordinator gives up.
const HOPELESS: u32 = 3;
/// Pause after a warm-up that failed.
const RETRY: Duration = Duration::from_secs(1);

impl Instance {
    /// `control_addr` is where workers dial in.
    pub(crate) fn new(core: Arc<Core>, control_addr: Option<SocketAddr>) -> Self {
        Self { control_addr, core, cluster: watch::Sender::new(None), phase: RwLock::new(Phase::Starting("opening the checkpoint".into())) }
    }

    pub(crate) fn core(&self) -> &Arc<Core> {
        &self.core
    }

    /// The cluster, once it is there.
    pub(crate) fn cluster(&self) -> watch::Receiver<Option<Arc<Cluster>>> {
        self.cluster.subscribe()
    }

    /// The plan is made: lets the workers in.
    pub(crate) fn open(&self, cluster: Arc<Cluster>) {
        *self.phase.write() = Phase::Starting("no token has passed through the workers yet".into());
        self.cluster.send_replace(Some(cluster));
    }

    /// Stops admitting.
    pub(crate) fn drain(&self) {
        *self.phase.write() = Phase::Draining;
        self.core.drain();
    }

    /// Lets time pass.
    pub(crate) fn tick(&self) {
        let cluster = self.cluster.borrow().clone();
        if let Some(cluster) = &cluster {
            cluster.tick();
        }
        self.core.tick();
        let usage = cluster.and_then(|cluster| cluster.kv_usage());
        self.core.telemetry().levels(self.core.counts(), usage, self.readiness().ready);
    }

    /// Waits for all workers, then makes tokens that pass through every attention worker and every shard; again until it works.
    ///
    /// # Errors
    /// The tokens were not finite, or not allowed, [`HOPELESS`] times in a row: the checkpoint does that, and no worker's restart will help.
    pub(crate) async fn warm_up(&self, cluster: &Cluster, timeout: Duration) -> Result<(), GenerationError> {
        let mut hopeless = 0;
        loop {
            while !cluster.reasons(Strictness::Fresh).is_empty() {
                tokio::time::sleep(POLL).await;
            }
            // One for each attention worker: the least loaded one takes the next.
            let mut generations: Vec<Generation> = (0..cluster.attached()).map(|_| self.core.warmup(warmup_request(timeout))).collect();
            let mut failure = None;
            for generation in &mut generations {
                failure = failure.or(end_of(generation).await);
            }
            match failure {
                None if !generations.is_empty() => {
                    let mut phase = self.phase.write();
                    if *phase != Phase::Draining {
                        *phase = Phase::Serving;
                    }
                    return Ok(());
                }
                None => {}
                Some(error) => {
                    hopeless = if matches!(error.code, ErrorCode::NonFinite | ErrorCode::Invalid) { hopeless + 1 } else { 0 };
                    if hopeless == HOPELESS {
                        return Err(error);
                    }
                    tracing::warn!(code = ?error.code, error = error.message, "warm-up failed; trying again");
                    let mut phase = self.phase.write();
                    if *phase != Phase::Draining {
                        *phase = Phase::Starting(format!("the warm-up failed: {error}"));
                    }
                }
            }
            tokio::time::sleep(RETRY).await;
        }
    }
}

/// Two greedy tokens, so that a prefill and a decode step run.
fn warmup_request(timeout: Duration) -> GenerateRequest {
    GenerateRequest {
        prompt_ids: vec![0],
        sampling: SamplingParams::default(),
        max_tokens: 2,
        deadline: Some(timeout),
        request_id: "warm-up".into(),
        ..GenerateRequest::default()
    }
}

async fn end_of(generation: &mut Generation) -> Option<GenerationError> {
    while let Some(event) = generation.next().await {
        if let GenerationEvent::Error(error) = event {
            return Some(error);
        }
    }
    None
}

impl Instance {
    /// Every reason why no token can be made now.
    fn reasons(&self, strictness: Strictness) -> Vec<String> {
        let mut reasons = match &*self.phase.read() {
            Phase::Starting(reason) => vec![reason.clone()],
            Phase::Serving => Vec::new(),
            Phase::Draining => vec!["shutting down".into()],
        };
        if let Some(cluster) = &*self.cluster.borrow() {
            reasons.extend(cluster.reasons(strictness));
        }
        reasons
    }
}

impl Inner for Instance {
    fn submit(&self, requests: Vec<GenerateRequest>) -> Result<Vec<Generation>, AdmissionError> {
        let reasons = self.reasons(Strictness::Leased);
        let result = if *self.phase.read() == Phase::Draining {
            Err(AdmissionError::Draining)
        } else if reasons.is_empty() {
            self.core.submit(requests)
        } else {
            Err(AdmissionError::NotReady { reasons })
        };
        result.inspect_err(|error| self.core.telemetry().rejected(error))
    }

    fn limits(&self) -> Limits {
        self.core.limits()
    }

    fn readiness(&self) -> Readiness {
        Readiness::from_reasons(self.reasons(Strictness::Fresh))
    }

    fn stats(&self) -> Stats {
        let (workers, shards) = self.cluster.borrow().as_ref().map(|cluster| cluster.stats()).unwrap_or_default();
        Stats {
            version: env!("CARGO_PKG_VERSION"),
            readiness: self.readiness(),
            uptime_seconds: self.core.clock().now().as_secs_f64(),
            control_addr: self.control_addr.map(|addr| format!("http://{addr}")),
            limits: self.limits(),
            requests: self.core.requests(),
            tokens: self.core.telemetry().tokens(),
            workers,
            shards,
        }
    }
}
