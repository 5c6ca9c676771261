//! The end of the trunk: mean of the streams, final norm, logits of the rows that somebody reads.
//!
//! Neighbours: `step.rs`, `sampler.rs`.

use tandem_kernels::{Backend, BackendError};
use tandem_quant::MatrixSource;

use super::Cx;

/// Final norm and head.
pub struct Head<B: Backend> {
    norm: B::Buf,
    lm_head: B::Weight,
}

impl<B: Backend> Head<B> {
    /// Loads the head.
    ///
    /// # Errors
    /// The device cannot hold a tensor.
    pub fn load(b: &B, norm: &[f32], lm_head: &MatrixSource) -> Result<Self, BackendError> {
        Ok(Self { norm: b.vector("final norm", norm)?, lm_head: b.weight(std::slice::from_ref(lm_head))? })
    }

    /// Rows `select` of the streams (at most [`logit_rows`](crate::buffers::Buffers::logit_rows) of them) → `logits`, in that order.
    pub fn forward(&self, cx: &mut Cx<'_, B>, select: &[u32]) {
        let buf = &mut *cx.buf;
        cx.b.collapse(select, &buf.streams, &self.norm, &cx.d.mhc, &mut buf.last);
        cx.b.linear(select.len(), &buf.last, &self.lm_head, &mut buf.logits);
    }
}
