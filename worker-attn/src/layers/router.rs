//! The router: which experts each row goes to, and with what weights.
//!
//! Neighbours: `hop/` sends the rows out; the ids are read on the host only by a hop that needs them there.

use tandem_kernels::{Backend, BackendError};
use tandem_quant::MatrixSource;

use super::Cx;

/// Weights of one router.
pub struct Router<B: Backend> {
    weight: B::Weight,
    bias: B::Buf,
}

impl<B: Backend> Router<B> {
    /// Loads a router.
    ///
    /// # Errors
    /// The device cannot hold a tensor.
    pub fn load(b: &B, weight: &MatrixSource, bias: &[f32]) -> Result<Self, BackendError> {
        Ok(Self { weight: b.weight(std::slice::from_ref(weight))?, bias: b.vector("e_score_correction_bias", bias)? })
    }

    /// x → `topk_ids`, `topk_weights`.
    pub fn forward(&self, cx: &mut Cx<'_, B>) {
        let buf = &mut *cx.buf;
        cx.b.router(cx.rows, &buf.x, &self.weight, &self.bias, &cx.d.router, &mut buf.topk_ids, &mut buf.topk_weights);
    }
}
