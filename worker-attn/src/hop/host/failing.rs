//! Ending the sequences of rows that cannot go on.
//!
//! Neighbours: `dispatch.rs` and the two sums notice; `super::super` says what a failure means.

use std::time::Instant;

use tandem_kernels::Backend;

use super::{
    super::{Failure, HopError},
    HostRows, Transport,
};
use crate::telemetry;

impl<T: Transport, B: Backend> HostRows<T, B> {
    /// Ends the sequences of rows whose partial is not finite.
    pub(super) fn end_non_finite(&mut self, micro: usize, shard: u32, bad: &[u32]) -> Result<(), HopError> {
        let bad: Vec<u32> = bad.iter().copied().filter(|row| self.failed[self.owner[*row as usize] as usize].is_none()).collect();
        if bad.is_empty() {
            return Ok(());
        }
        telemetry::nan_rows(bad.len());
        let failure = Failure::NonFinite { layer: self.away[micro].layer, shard, rows: bad.len() };
        self.fail_rows(&bad, &failure)
    }

    /// Ends the sequences among `rows` whose deadline has passed or that were cancelled.
    pub(super) fn end_overdue(&mut self, rows: &[u32], why: &str) -> Result<(), HopError> {
        let now = Instant::now();
        for &row in rows {
            let segment = &self.step.segments[self.owner[row as usize] as usize];
            if self.cancelled.contains(segment.request_id) {
                self.fail_rows(&[row], &Failure::Cancelled)?;
            } else if segment.deadline <= now {
                self.fail_rows(&[row], &Failure::Unavailable { message: why.to_owned() })?;
            }
        }
        Ok(())
    }

    /// Marks the sequences of `rows` failed.
    pub(super) fn fail_rows(&mut self, rows: &[u32], failure: &Failure) -> Result<(), HopError> {
        for &row in rows {
            let segment = self.owner[row as usize] as usize;
            if self.failed[segment].is_none() {
                self.failed[segment] = Some(failure.clone());
                self.step.notify.tell(self.step.segments[segment].request_id, failure);
            }
        }
        if self.failed.iter().all(Option::is_some) { Err(HopError::Abandoned) } else { Ok(()) }
    }
}
