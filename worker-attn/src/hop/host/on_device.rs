//! The sum of a layer's partials on the device, where remote ones lie in memory that it sees.
//!
//! Neighbours: `host.rs` waits for them and sums on the host where they came in frames; `lent.rs` is the memory.

use tandem_kernels::Backend;
use tandem_proto::hop::Arrived;

use super::{
    super::{HopError, LocalPartials},
    HostRows, Transport,
};

impl<B: Backend, T: Transport> HostRows<T, B> {
    /// Sums the layer's partials on the device, where remote ones lie in memory that it sees; those that came in frames after all are
    /// uploaded. Rows with a NaN or an infinity end their sequences.
    pub(super) fn sum_lent(&mut self, b: &B, rows: usize, local: LocalPartials<'_, B>, out: &mut B::Buf) -> Result<(), HopError> {
        let d = self.shape.hidden;
        let mut here = local.shards.iter().zip(local.partials.iter_mut()).peekable();
        let mut any = false;
        while let Some(pending) = self.pending.pop_front() {
            while let Some((id, partial)) = here.next_if(|(id, _)| **id < pending.shard.id) {
                self.sum_local(b, *id, rows, partial, out, &mut any)?;
            }
            let Some((shard, _, arrived)) = self.wait(pending)? else { continue };
            let bad = match arrived {
                Arrived::Shared { window, row, non_finite } => {
                    let lent = self.lent.as_ref().ok_or(HopError::Uncovered { layer: self.layer })?;
                    lent.sum(b, rows * d, window, row * d, out, any)?;
                    non_finite
                }
                Arrived::Host => {
                    let partial = &self.partial[..rows * d];
                    let lent = self.lent.as_mut().ok_or(HopError::Uncovered { layer: self.layer })?;
                    lent.sum_host(b, partial, rows, d, out, any)?
                }
            };
            any = true;
            self.end_non_finite(shard, &bad)?;
        }
        for (id, partial) in here {
            self.sum_local(b, *id, rows, partial, out, &mut any)?;
        }
        if !any {
            self.sum.clear();
            self.sum.resize(rows * d, 0.0);
            b.upload(&self.sum, out, 0);
        }
        Ok(())
    }

    /// Adds what a local shard computed, on the device; the first one's buffer becomes `out`.
    fn sum_local(
        &mut self,
        b: &B,
        shard: u32,
        rows: usize,
        partial: &mut B::Buf,
        out: &mut B::Buf,
        any: &mut bool,
    ) -> Result<(), HopError> {
        let bad = b.non_finite(rows, self.shape.hidden, partial)?;
        if std::mem::replace(any, true) {
            b.add(rows, self.shape.hidden, partial, out);
        } else {
            std::mem::swap(partial, out);
        }
        self.end_non_finite(shard, &bad)
    }
}
