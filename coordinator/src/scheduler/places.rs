//! The places in the attention workers' batches: who is attached, ready, and how full.

use std::collections::BTreeMap;

use super::WorkerId;
use crate::engine::Limits;

#[derive(Debug)]
struct Slot {
    limits: Limits,
    taken: usize,
    ready: bool,
}

/// Attached attention workers and their places.
#[derive(Debug, Default)]
pub(super) struct Places {
    slots: BTreeMap<WorkerId, Slot>,
}

impl Places {
    pub(super) fn add(&mut self, worker: WorkerId, limits: Limits) {
        self.slots.insert(worker, Slot { limits, taken: 0, ready: false });
    }

    /// Whether the worker was there.
    pub(super) fn remove(&mut self, worker: WorkerId) -> bool {
        self.slots.remove(&worker).is_some()
    }

    /// Whether the worker has become ready now.
    pub(super) fn set_ready(&mut self, worker: WorkerId, ready: bool) -> bool {
        self.slots.get_mut(&worker).is_some_and(|slot| !std::mem::replace(&mut slot.ready, ready) && ready)
    }

    /// What fits on every attached worker; `None` if there is none.
    pub(super) fn limits(&self) -> Option<Limits> {
        let each = || self.slots.values().map(|slot| slot.limits);
        Some(Limits {
            max_seq_len: each().map(|limits| limits.max_seq_len).min()?,
            max_batch: each().map(|limits| limits.max_batch).fold(0, u32::saturating_add),
            kv_tokens: each().map(|limits| limits.kv_tokens).min()?,
        })
    }

    /// Places of all ready workers.
    pub(super) fn total(&self) -> usize {
        self.slots.values().filter(|slot| slot.ready).map(|slot| slot.limits.max_batch as usize).sum()
    }

    /// Free places of all ready workers.
    pub(super) fn free(&self) -> usize {
        self.slots.values().filter(|slot| slot.ready).map(|slot| (slot.limits.max_batch as usize).saturating_sub(slot.taken)).sum()
    }

    /// The ready worker with a free place whose share of taken places is lowest; the first attached among equals.
    pub(super) fn least_loaded(&self) -> Option<WorkerId> {
        let load = |slot: &Slot| slot.taken as f64 / f64::from(slot.limits.max_batch);
        self.slots
            .iter()
            .filter(|(_, slot)| slot.ready && slot.taken < slot.limits.max_batch as usize)
            .min_by(|(_, a), (_, b)| load(a).total_cmp(&load(b)))
            .map(|(worker, _)| *worker)
    }

    pub(super) fn take(&mut self, worker: WorkerId) {
        if let Some(slot) = self.slots.get_mut(&worker) {
            slot.taken += 1;
        }
    }

    /// Whether the worker is still there to be told.
    pub(super) fn give_back(&mut self, worker: WorkerId) -> bool {
        self.slots.get_mut(&worker).map(|slot| slot.taken = slot.taken.saturating_sub(1)).is_some()
    }
}
