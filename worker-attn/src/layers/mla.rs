//! Multi-head latent attention over the rows that the indexer selects, in absorbed form.
//!
//! Neighbours: `dsa.rs` (the selection), `state/` (latent rows and index keys in pages).

use tandem_kernels::{Backend, BackendError};
use tandem_model::MlaTensors;

use super::{
    Cx,
    dsa::{Columns, Dsa},
};
use crate::dims::Dims;

/// Weights of one MLA mixer.
pub struct Mla<B: Backend> {
    /// Dense number among the MLA layers.
    index: usize,
    /// q_a | kv_a | indexer wk | gate | weights; the indexer's parts only where the layer has one.
    proj: B::Weight,
    q_a_norm: B::Buf,
    kv_a_norm: B::Buf,
    q_b: B::Weight,
    kv_b: B::Weight,
    o: B::Weight,
    dsa: Option<Dsa<B>>,
    columns: Columns,
}

/// The fused projection of a layer with or without an indexer.
fn columns(d: &Dims, indexer: bool) -> Columns {
    let key = d.q_lora + d.mla.latent;
    let gate = key + d.indexer.dim;
    let weights = gate + d.indexer.dim;
    Columns { key, gate, weights, stride: if indexer { weights + d.indexer.heads } else { key } }
}

/// Width of the widest fused projection.
pub fn stride(d: &Dims) -> usize {
    columns(d, true).stride
}

impl<B: Backend> Mla<B> {
    /// Loads the `index`-th MLA layer.
    ///
    /// # Errors
    /// The device cannot hold a tensor.
    pub fn load(b: &B, d: &Dims, index: usize, t: &MlaTensors) -> Result<Self, BackendError> {
        let columns = columns(d, t.indexer.is_some());
        let mut parts = vec![t.q_a.clone(), t.kv_a.clone()];
        if let Some(i) = &t.indexer {
            parts.extend([i.wk.clone(), i.gate.clone(), i.weights.clone()]);
        }
        Ok(Self {
            index,
            proj: b.weight(&parts)?,
            q_a_norm: b.vector("q_a_layernorm", &t.q_a_norm)?,
            kv_a_norm: b.vector("kv_a_layernorm", &t.kv_a_norm)?,
            q_b: b.weight(std::slice::from_ref(&t.q_b))?,
            kv_b: b.weight(std::slice::from_ref(&t.kv_b))?,
            o: b.weight(std::slice::from_ref(&t.o))?,
            dsa: t.indexer.as_ref().map(|i| Dsa::load(b, i, columns)).transpose()?,
            columns,
        })
    }

    /// x → y.
    pub fn forward(&self, cx: &mut Cx<'_, B>) {
        let (b, d, rows, stride) = (cx.b, cx.d, cx.rows, self.columns.stride);
        let buf = &mut *cx.buf;
        b.linear(rows, &buf.x, &self.proj, &mut buf.proj);
        b.rms_norm(rows, &buf.proj, stride, 0, d.q_lora, &self.q_a_norm, d.eps, &mut buf.cq);
        b.rms_norm(rows, &buf.proj, stride, d.q_lora, d.mla.latent, &self.kv_a_norm, d.eps, &mut buf.latent);
        b.mla_append(cx.batch, self.index, &buf.latent, cx.state);
        b.linear(rows, &buf.cq, &self.q_b, &mut buf.q);
        if let Some(dsa) = &self.dsa {
            dsa.forward(cx, self.index);
        }
        let buf = &mut *cx.buf;
        b.mla_attend(cx.batch, self.index, &buf.q, &self.kv_b, &buf.selected, d.indexer.width(), &d.mla, cx.state, &mut buf.mixed);
        b.linear(rows, &buf.mixed, &self.o, &mut buf.y);
    }
}
