//! Gated MLPs on the attention side: the shared expert of a MoE layer and the FFN of a dense one.
//!
//! Neighbours: `step.rs` runs the shared expert while the routed rows are away.

use tandem_kernels::{Backend, BackendError};
use tandem_model::DenseTensors;

use super::Cx;

/// Weights of one gated MLP: gate stacked over up, and down.
pub struct Mlp<B: Backend> {
    gate_up: B::Weight,
    down: B::Weight,
}

impl<B: Backend> Mlp<B> {
    /// Loads an MLP.
    ///
    /// # Errors
    /// The device cannot hold a tensor.
    pub fn load(b: &B, t: &DenseTensors) -> Result<Self, BackendError> {
        Ok(Self { gate_up: b.weight(&[t.gate.clone(), t.up.clone()])?, down: b.weight(std::slice::from_ref(&t.down))? })
    }

    /// x → `shared` (added, unscaled, to the routed experts' sum).
    pub fn forward_shared(&self, cx: &mut Cx<'_, B>) {
        let buf = &mut *cx.buf;
        cx.b.mlp(cx.rows, &buf.x, &self.gate_up, &self.down, cx.d.swiglu_limit, &mut buf.gate_up, &mut buf.shared);
    }

    /// x → y.
    pub fn forward_dense(&self, cx: &mut Cx<'_, B>) {
        let buf = &mut *cx.buf;
        cx.b.mlp(cx.rows, &buf.x, &self.gate_up, &self.down, cx.d.swiglu_limit, &mut buf.gate_up, &mut buf.y);
    }
}
