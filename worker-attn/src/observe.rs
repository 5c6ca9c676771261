//! A look into the layers of a step, for parity tests and diagnosis. Off ([`Silent`]) it compiles to nothing.
//!
//! Neighbours: `step.rs` calls it; `tests/` compare what it sees with the goldens.

use tandem_kernels::Backend;

use crate::layers::Cx;

/// Hears of a step's intermediate results. Buffers are valid for the call only; reading them waits for the device.
pub trait Observer<B: Backend> {
    /// The streams after the embedding.
    fn embedded(&mut self, _cx: &Cx<'_, B>) {}
    /// `y` after a layer's mixer, before it is spread over the streams; on an MLA layer `selected` is that layer's selection.
    fn mixer(&mut self, _cx: &Cx<'_, B>, _layer: usize) {}
    /// `topk_ids` and `topk_weights` of a MoE layer.
    fn routed(&mut self, _cx: &Cx<'_, B>, _layer: usize) {}
    /// `y` after a layer's FFN, before it is spread over the streams.
    fn ffn(&mut self, _cx: &Cx<'_, B>, _layer: usize) {}
    /// The streams after a layer.
    fn layer(&mut self, _cx: &Cx<'_, B>, _layer: usize) {}
    /// `last` and `logits` of a group of rows.
    fn head(&mut self, _cx: &Cx<'_, B>, _rows: &[u32]) {}
}

/// Looks at nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl<B: Backend> Observer<B> for Silent {}
