//! [`Status`]: what an expert worker tells the coordinator with each heartbeat.
//!
//! Neighbours: `service.rs` keeps it up to date, membership sends it.

use std::{sync::Arc, time::Duration};

use tandem_proto::{
    control::v1::{Heartbeat, WorkerState},
    hop::ServerStats,
};

use crate::{LoadProgress, telemetry::Gauges};

/// The state of a worker, at any moment.
pub struct Status {
    /// Loading, ready or draining.
    pub state: WorkerState,
    /// What it is doing, in words.
    pub phase: String,
    /// How far loading is.
    pub progress: LoadProgress,
    /// Shards that are served.
    pub shards_ready: Vec<u32>,
    /// Counters of the running server.
    pub stats: Option<Arc<ServerStats>>,
    /// Rows and busy time of servers that were replaced.
    before: (u64, Duration),
    gauges: Gauges,
}

impl Default for Status {
    fn default() -> Self {
        Self {
            state: WorkerState::Loading,
            phase: "joining".to_owned(),
            progress: LoadProgress::default(),
            shards_ready: Vec::new(),
            stats: None,
            before: (0, Duration::ZERO),
            gauges: Gauges::new(),
        }
    }
}

impl Status {
    /// Loading of `total` bytes begins.
    pub fn load(&mut self, total: u64) {
        self.state = WorkerState::Loading;
        self.phase = "loading".to_owned();
        self.progress = LoadProgress { loaded_bytes: 0, total_bytes: total };
        self.shards_ready.clear();
    }

    /// Shards are served.
    pub fn ready(&mut self, shards: Vec<u32>, stats: Arc<ServerStats>) {
        self.state = WorkerState::Ready;
        self.phase = if shards.is_empty() { "standing by: no shard given".to_owned() } else { String::new() };
        self.shards_ready = shards;
        self.stats = Some(stats);
    }

    /// The worker is about to end.
    pub fn drain(&mut self) {
        self.state = WorkerState::Draining;
        self.phase = "draining".to_owned();
    }

    /// The server ended; its counters are kept.
    pub fn retire(&mut self) {
        if let Some(stats) = self.stats.take() {
            self.before = (self.before.0 + stats.rows(), self.before.1 + stats.busy());
        }
        self.shards_ready.clear();
    }

    /// Rows that the running server computed.
    pub fn rows(&self) -> u64 {
        self.stats.as_ref().map_or(0, |s| s.rows())
    }

    /// The message for the coordinator; also brings the gauges up to date.
    pub fn heartbeat(&self) -> Heartbeat {
        let busy = self.stats.as_ref().map_or(Duration::ZERO, |s| s.busy());
        self.gauges.loaded.set(self.progress.loaded_bytes as f64);
        self.gauges.total.set(self.progress.total_bytes as f64);
        self.gauges.connections.set(self.stats.as_ref().map_or(0, |s| s.connections()) as f64);
        Heartbeat {
            state: self.state.into(),
            phase: self.phase.clone(),
            loaded_bytes: self.progress.loaded_bytes,
            total_bytes: self.progress.total_bytes,
            busy_seconds: (busy + self.before.1).as_secs_f64(),
            rows: self.rows() + self.before.0,
            shards_ready: self.shards_ready.clone(),
            ..Heartbeat::default()
        }
    }
}
