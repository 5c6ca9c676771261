//! The sum of a layer's partials on the device, where remote ones lie in memory that it sees.
//!
//! Neighbours: `dispatch.rs` waits for them; `on_host.rs` sums where they come in frames; `lent.rs` is the memory.

use tandem_kernels::Backend;
use tandem_proto::hop::Arrived;

use super::{
    super::{HopError, LocalPartials},
    HostRows, Transport,
};

impl<B: Backend, T: Transport> HostRows<T, B> {
    /// Sums the layer's partials on the device, where remote ones lie in memory that it sees; those that came in frames after all are
    /// uploaded. Rows with a NaN or an infinity end their sequences.
    pub(super) fn sum_lent(&mut self, b: &B, micro: usize, local: LocalPartials<'_, B>, out: &mut B::Buf) -> Result<(), HopError> {
        let (d, rows, first) = (self.shape.hidden, self.away[micro].rows, self.away[micro].first);
        let layer = self.away[micro].layer;
        let mut here = local.shards.iter().zip(local.partials.iter_mut()).peekable();
        let mut any = false;
        while let Some(pending) = self.away[micro].pending.pop_front() {
            while let Some((id, partial)) = here.next_if(|(id, _)| **id < pending.shard.id) {
                self.sum_local(b, micro, *id, partial, out, &mut any)?;
            }
            let Some((shard, _, arrived)) = self.wait(micro, pending)? else { continue };
            let bad = match arrived {
                Arrived::Shared { window, row, non_finite } => {
                    let lent = self.lent.as_ref().ok_or(HopError::Uncovered { layer })?;
                    lent.sum(b, rows * d, window, row * d, out, any)?;
                    non_finite
                }
                Arrived::Host => {
                    let partial = &self.partial[..rows * d];
                    let lent = self.lent.as_mut().ok_or(HopError::Uncovered { layer })?;
                    lent.sum_host(b, partial, rows, d, out, any)?
                }
            };
            any = true;
            let bad: Vec<u32> = bad.into_iter().map(|row| row + first as u32).collect();
            self.end_non_finite(micro, shard, &bad)?;
        }
        for (id, partial) in here {
            self.sum_local(b, micro, *id, partial, out, &mut any)?;
        }
        if !any {
            let sum = &mut self.away[micro].sum;
            sum.clear();
            sum.resize(rows * d, 0.0);
            b.upload(sum, out, 0);
        }
        Ok(())
    }

    /// Adds what a local shard computed, on the device; the first one's buffer becomes `out`.
    fn sum_local(
        &mut self,
        b: &B,
        micro: usize,
        shard: u32,
        partial: &mut B::Buf,
        out: &mut B::Buf,
        any: &mut bool,
    ) -> Result<(), HopError> {
        let (rows, first) = (self.away[micro].rows, self.away[micro].first as u32);
        let bad = b.non_finite(rows, self.shape.hidden, partial)?;
        if std::mem::replace(any, true) {
            b.add(rows, self.shape.hidden, partial, out);
        } else {
            std::mem::swap(partial, out);
        }
        let bad: Vec<u32> = bad.into_iter().map(|row| row + first).collect();
        self.end_non_finite(micro, shard, &bad)
    }
}
