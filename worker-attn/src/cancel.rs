//! Cancellations that a running step can see: the step thread takes commands only between steps, and a step may wait long for an expert
//! worker.
//!
//! Neighbours: `engine/thread.rs` (the mailbox adds, the thread forgets), `hop/host.rs` (looks while it waits).

use std::{collections::HashSet, sync::Arc};

use parking_lot::Mutex;

/// Requests that nobody wants any more. Cloning shares.
#[derive(Clone, Debug, Default)]
pub struct Cancelled(Arc<Mutex<Ids>>);

#[derive(Debug, Default)]
struct Ids {
    some: HashSet<u64>,
    all: bool,
}

impl Cancelled {
    /// A request is not wanted any more.
    pub fn add(&self, id: u64) {
        self.0.lock().some.insert(id);
    }

    /// No request that is here is wanted any more.
    pub fn add_all(&self) {
        self.0.lock().all = true;
    }

    /// Whether a request is not wanted.
    pub fn contains(&self, id: u64) -> bool {
        let ids = self.0.lock();
        ids.all || ids.some.contains(&id)
    }

    /// The request was ended.
    pub fn forget(&self, id: u64) {
        self.0.lock().some.remove(&id);
    }

    /// All requests were ended.
    pub fn forget_all(&self) {
        *self.0.lock() = Ids::default();
    }
}
