//! What becomes of the state of a sequence that has to make room: a copy in host memory, or nothing, and it is computed again.
//!
//! Neighbours: `scheduler.rs` chooses who makes room, `engine/mod.rs` carries it out, `state/` copies.
//!
//! Both give the state back bit for bit: what the sequence had generated is computed again as it was generated, a row a step.
//! [`Preemption::Auto`] takes the copy where it fits the budget and both ways through memory are expected to take less time than the rows; both
//! rates are measured while the worker runs. (Rows are counted as those of a prompt; generated ones take longer, so the copy is
//! taken less often than it would pay.)

use std::time::Duration;

use tandem_kernels::{StateSpec, cpu::LatentType, state_bytes};

/// How sequences make room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Preemption {
    /// Whatever is expected to be faster.
    #[default]
    Auto,
    /// A copy, where it fits the budget.
    Snapshot,
    /// Computed again.
    Recompute,
}

/// How sequences make room, and how much memory their copies may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ParkingOptions {
    /// How.
    pub preemption: Preemption,
    /// Host memory for copies, in bytes.
    pub bytes: u64,
}

impl Default for ParkingOptions {
    fn default() -> Self {
        Self { preemption: Preemption::Auto, bytes: 1 << 30 }
    }
}

/// The weight of the newest measurement in a rate.
const NEWEST: f64 = 0.2;

/// Seconds per unit, smoothed; `None` until something was measured.
#[derive(Clone, Copy, Debug, Default)]
struct Rate(Option<f64>);

impl Rate {
    fn measured(&mut self, took: Duration, units: usize) {
        if units > 0 {
            let now = took.as_secs_f64() / units as f64;
            self.0 = Some(self.0.map_or(now, |before| before + NEWEST * (now - before)));
        }
    }
}

/// Copies in use, and what the choice depends on.
#[derive(Debug)]
pub struct Parking {
    options: ParkingOptions,
    used: u64,
    /// Per byte, one way.
    copy: Rate,
    /// Per row of a step that prefills.
    row: Rate,
}

impl Parking {
    /// Nothing parked, nothing measured.
    pub fn new(options: ParkingOptions) -> Self {
        Self { options, used: 0, copy: Rate::default(), row: Rate::default() }
    }

    /// Bytes of all copies.
    pub fn used(&self) -> u64 {
        self.used
    }

    /// A step with a prefill chunk took that long for all of its rows.
    pub fn prefilled(&mut self, took: Duration, rows: usize) {
        self.row.measured(took, rows);
    }

    /// A copy took that long.
    pub fn copied(&mut self, took: Duration, bytes: usize) {
        self.copy.measured(took, bytes);
    }

    /// Whether to copy state of about `bytes` bytes rather than to compute `rows` rows again. Before anything was measured a copy is
    /// tried: its rate is then known.
    pub fn prefers_copy(&self, bytes: u64, rows: usize) -> bool {
        let fits = self.used.saturating_add(bytes) <= self.options.bytes;
        let faster = || match (self.copy.0, self.row.0) {
            (Some(copy), Some(row)) => 2.0 * copy * bytes as f64 <= row * rows as f64,
            _ => true,
        };
        fits && match self.options.preemption {
            Preemption::Auto => faster(),
            Preemption::Snapshot => true,
            Preemption::Recompute => false,
        }
    }

    /// Takes the budget for a copy of `bytes` bytes; false where it does not fit after all.
    pub fn park(&mut self, bytes: usize) -> bool {
        let fits = self.used + bytes as u64 <= self.options.bytes;
        self.used += if fits { bytes as u64 } else { 0 };
        fits
    }

    /// A copy is gone.
    pub fn unpark(&mut self, bytes: usize) {
        self.used = self.used.saturating_sub(bytes as u64);
    }
}

/// About how many bytes a copy of a slot and `pages` pages takes.
pub fn copy_bytes(spec: &StateSpec, pages: usize, latents: LatentType) -> u64 {
    let copy = state_bytes(&StateSpec { slots: 1, pages, ..spec.clone() }, latents);
    copy.slots + copy.pages
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(preemption: Preemption) -> Parking {
        let mut p = Parking::new(ParkingOptions { preemption, bytes: 1000 });
        // 1 ms per byte, 10 ms per row.
        p.copied(Duration::from_millis(100), 100);
        p.prefilled(Duration::from_millis(160), 16);
        p
    }

    #[test]
    fn the_faster_way_is_taken_within_the_budget() {
        let mut p = measured(Preemption::Auto);
        assert!(p.prefers_copy(100, 20), "200 ms there and back against 200 ms of rows");
        assert!(!p.prefers_copy(100, 19));
        assert!(!p.prefers_copy(1001, 100_000), "too large");
        assert!(p.park(900));
        assert!(!p.prefers_copy(101, 100_000) && !p.park(101), "the budget is taken");
        p.unpark(900);
        assert!(p.prefers_copy(1000, 100_000) && p.used() == 0);
    }

    #[test]
    fn the_way_can_be_prescribed_and_is_tried_when_nothing_is_known() {
        assert!(measured(Preemption::Snapshot).prefers_copy(1000, 1));
        assert!(!measured(Preemption::Snapshot).prefers_copy(1001, 1));
        assert!(!measured(Preemption::Recompute).prefers_copy(1, 100_000));
        assert!(Parking::new(ParkingOptions::default()).prefers_copy(1, 1));
    }

    #[test]
    fn rates_follow_what_is_measured() {
        let mut p = measured(Preemption::Auto);
        for _ in 0..50 {
            // The rows have become ten times as fast.
            p.prefilled(Duration::from_millis(16), 16);
        }
        assert!(!p.prefers_copy(100, 190) && p.prefers_copy(100, 210));
    }
}
