//! What the worker's heartbeats say.
//!
//! Neighbours: `engine/thread.rs` writes [`Load`], `service/mod.rs` the rest.

use std::sync::Arc;

use parking_lot::Mutex;
use tandem_proto::control::v1::{Heartbeat, LayerWait, WorkerState};

use crate::engine::thread::Load;

/// State of the process, with the load of its step thread.
#[derive(Debug)]
pub struct Status {
    load: Arc<Load>,
    phase: Mutex<Phase>,
}

#[derive(Debug)]
struct Phase {
    state: WorkerState,
    name: String,
    done: u64,
    all: u64,
}

impl Status {
    /// A worker that is about to load.
    pub fn new(load: Arc<Load>) -> Self {
        Self { load, phase: Mutex::new(Phase { state: WorkerState::Loading, name: "joining".to_owned(), done: 0, all: 0 }) }
    }

    /// Enters a state.
    pub fn set(&self, state: WorkerState, name: &str) {
        let mut phase = self.phase.lock();
        phase.state = state;
        name.clone_into(&mut phase.name);
    }

    /// Loading has come so far.
    pub fn loading(&self, what: &str, done: u64, all: u64) {
        let mut phase = self.phase.lock();
        phase.name = format!("loading {what}");
        (phase.done, phase.all) = (done, all);
    }

    /// A heartbeat of this moment.
    pub fn heartbeat(&self) -> Heartbeat {
        let phase = self.phase.lock();
        let ((running, waiting), (kv_tokens_used, kv_tokens_total)) = (self.load.sequences(), self.load.kv_tokens());
        let hop = self.load.hop();
        Heartbeat {
            state: phase.state.into(),
            phase: phase.name.clone(),
            loaded_bytes: phase.done,
            total_bytes: phase.all,
            running,
            waiting,
            kv_tokens_used,
            kv_tokens_total,
            busy_seconds: self.load.busy().as_secs_f64(),
            rows: self.load.rows(),
            shards_ready: self.load.reachable(),
            layer_waits: hop.waits.iter().map(|(layer, wait)| LayerWait { layer: *layer, seconds: wait.as_secs_f32() }).collect(),
            links: hop.links,
        }
    }
}
