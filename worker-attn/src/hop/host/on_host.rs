//! The sum of a layer's partials on the host, in pieces, where they come in frames.
//!
//! Neighbours: `dispatch.rs` waits for them; `on_device.rs` sums what lies in shared memory.

use std::ops::Range;

use tandem_kernels::Backend;

use super::{
    super::{HopError, LocalPartials},
    HostRows, Transport,
    dispatch::Pending,
    pieces,
};

impl<T: Transport, B: Backend> HostRows<T, B> {
    /// Sums a micro-batch's partials, those of this worker's own shards in their place, and uploads the sums piece by piece.
    pub(super) fn sum_pieces(&mut self, b: &B, micro: usize, local: LocalPartials<'_, B>, out: &mut B::Buf) -> Result<(), HopError> {
        let (hidden, rows) = (self.shape.hidden, self.away[micro].rows);
        self.away[micro].sum.clear();
        self.away[micro].sum.resize(rows * hidden, 0.0);
        for piece in pieces(rows, self.piece_rows) {
            let mut here = local.shards.iter().zip(local.partials.iter()).peekable();
            while let Some(pending) = self.away[micro].pending.pop_front_if(|pending| pending.piece == piece.start) {
                while let Some((id, partial)) = here.next_if(|(id, _)| **id < pending.shard.id) {
                    self.add_local(b, micro, *id, partial, &piece)?;
                }
                self.receive(micro, pending)?;
            }
            for (id, partial) in here {
                self.add_local(b, micro, *id, partial, &piece)?;
            }
            b.upload(&self.away[micro].sum[piece.start * hidden..piece.end * hidden], out, piece.start * hidden);
        }
        Ok(())
    }

    /// Waits for one dispatch and adds its partials to the sum on the host.
    fn receive(&mut self, micro: usize, pending: Pending<T::Ticket>) -> Result<(), HopError> {
        match self.wait(micro, pending)? {
            Some((shard, rows, _)) => self.add_rows(micro, shard, &rows),
            None => Ok(()),
        }
    }

    /// Adds the first `rows.len()` rows of `partial`; a row that is not finite is left out and ends its sequence.
    fn add_rows(&mut self, micro: usize, shard: u32, rows: &[u32]) -> Result<(), HopError> {
        let (d, away) = (self.shape.hidden, &mut self.away[micro]);
        let mut bad = Vec::new();
        for (&row, partial) in rows.iter().zip(self.partial.chunks_exact(d)) {
            if partial.iter().all(|v| v.is_finite()) {
                let sum = &mut away.sum[(row as usize - away.first) * d..][..d];
                sum.iter_mut().zip(partial).for_each(|(s, p)| *s += p);
            } else {
                bad.push(row);
            }
        }
        self.end_non_finite(micro, shard, &bad)
    }

    /// Adds a piece of what a local shard computed.
    fn add_local(&mut self, b: &B, micro: usize, shard: u32, partial: &B::Buf, piece: &Range<usize>) -> Result<(), HopError> {
        let (hidden, first) = (self.shape.hidden, self.away[micro].first);
        let len = piece.len() * hidden;
        self.partial.resize(self.partial.len().max(len), 0.0);
        b.download(partial, piece.start * hidden, &mut self.partial[..len])?;
        let rows: Vec<u32> = ((first + piece.start) as u32..(first + piece.end) as u32).collect();
        self.add_rows(micro, shard, &rows)
    }
}
