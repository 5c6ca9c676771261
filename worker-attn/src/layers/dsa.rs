//! The indexer of sparse attention: stores pooled index keys and selects the positions each row attends to.
//!
//! Neighbours: `mla.rs` runs the projections (fused with its own) and attends over `selected`; a *shared* layer has no indexer and
//! uses the selection that its predecessor left in `selected`.

use tandem_kernels::{Backend, BackendError, IndexKeyWeights};
use tandem_model::IndexerTensors;

use super::Cx;

/// Weights of one indexer, but for those fused into the layer's input projection.
pub struct Dsa<B: Backend> {
    wq_b: B::Weight,
    keys: IndexKeyWeights<B>,
    columns: Columns,
}

/// Where the indexer's parts of the fused projection start, and its whole width.
#[derive(Clone, Copy, Debug)]
pub struct Columns {
    /// Raw keys.
    pub key: usize,
    /// Pooling gates.
    pub gate: usize,
    /// Head weights.
    pub weights: usize,
    /// Width of the fused projection.
    pub stride: usize,
}

impl<B: Backend> Dsa<B> {
    /// Loads the indexer whose columns of the fused projection are `columns`.
    ///
    /// # Errors
    /// The device cannot hold a tensor.
    pub fn load(b: &B, t: &IndexerTensors, columns: Columns) -> Result<Self, BackendError> {
        Ok(Self {
            wq_b: b.weight(std::slice::from_ref(&t.wq_b))?,
            keys: IndexKeyWeights {
                norm_weight: b.vector("indexer k_norm weight", &t.k_norm_w)?,
                norm_bias: b.vector("indexer k_norm bias", &t.k_norm_b)?,
                ape: b.vector("index_kpool_compress_ape", &t.ape)?,
            },
            columns,
        })
    }

    /// `proj` and `cq` → index keys in `layer`'s pages (dense MLA number), `selected`.
    pub fn forward(&self, cx: &mut Cx<'_, B>, layer: usize) {
        let (b, p, c, buf) = (cx.b, &cx.d.indexer, self.columns, &mut *cx.buf);
        b.index_append(cx.batch, layer, &buf.proj, c.stride, c.key, c.gate, &self.keys, p, cx.state);
        // While every row sees no more tokens than it may select, the selection is everything and no query is scored.
        if cx.context > p.width() {
            b.linear(cx.rows, &buf.cq, &self.wq_b, &mut buf.iq);
        }
        b.index_select(cx.batch, layer, &buf.iq, &buf.proj, c.stride, c.weights, p, cx.state, &mut buf.selected);
    }
}
