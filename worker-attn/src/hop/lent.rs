//! Rows in memory that expert workers of the same machine see, and the partials in theirs.
//!
//! Neighbours: `host.rs` decides when; `tandem_worker_experts::Lending` keeps regions and windows; `tandem_proto::hop` says what the hop
//! promises about them.

use std::sync::Arc;

use tandem_kernels::{Backend, BackendError, Elem, non_finite_rows};
use tandem_proto::hop::{Lender, SharedMemory};
use tandem_worker_experts::Lending;

use super::HopError;

/// This worker's side of the shared memory.
pub struct LentRows<B: Backend> {
    lending: Arc<Lending<B>>,
    region: Arc<B::Region>,
    rows: usize,
    /// For a partial that came in frames after all; made when one does.
    upload: Option<B::Buf>,
}

impl<B: Backend> LentRows<B> {
    /// A region for steps of up to `rows` rows, and what the hop tells its peers of it; `None` where the device has none to lend.
    pub fn new(backend: &Arc<B>, hidden: usize, rows: usize) -> Option<(Self, Lender)> {
        let lending = Arc::new(Lending::new(Arc::clone(backend), hidden, rows));
        let lent = lending.lend()?;
        let region = lending.region(lent.region)?;
        let lender = Lender { memory: Arc::clone(&lending) as _, lent };
        Some((Self { lending, region, rows, upload: None }, lender))
    }

    /// Whether a step of so many rows has room.
    pub(super) fn holds(&self, rows: usize) -> bool {
        rows <= self.rows
    }

    /// Puts the first `len` elements of rows there, from element `at` on.
    pub(super) fn put(&self, b: &B, len: usize, x: &B::Buf, at: usize) {
        b.put(len, x, 0, &self.region, at);
    }

    /// `out = window`, or with `add` `out += window`, over `len` elements from `at` on.
    pub(super) fn sum(&self, b: &B, len: usize, window: u64, at: usize, out: &mut B::Buf, add: bool) -> Result<(), HopError> {
        let gone = || BackendError::Op { op: "take", device: b.device().arithmetic.clone(), reason: "the window is closed".to_owned() };
        let window = self.lending.window(window).ok_or_else(gone)?;
        if add {
            b.take_sum(len, &window, at, out, 0);
        } else {
            b.take(len, &window, at, out, 0);
        }
        Ok(())
    }

    /// The same with a partial on the host; returns its rows with a NaN or an infinity.
    pub(super) fn sum_host(
        &mut self,
        b: &B,
        partial: &[f32],
        rows: usize,
        hidden: usize,
        out: &mut B::Buf,
        add: bool,
    ) -> Result<Vec<u32>, HopError> {
        if add {
            let upload = match &mut self.upload {
                Some(upload) => upload,
                none => none.insert(b.alloc("partial from a link", Elem::F32, self.rows * hidden)?),
            };
            b.upload(partial, upload, 0);
            b.add(rows, hidden, upload, out);
        } else {
            b.upload(partial, out, 0);
        }
        Ok(non_finite_rows(partial, hidden))
    }
}
