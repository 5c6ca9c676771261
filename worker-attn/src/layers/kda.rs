//! Kimi delta attention: fused q|k|v|f_a|g_a|b projection, f_b and g_b, the recurrent mixer, output projection.
//!
//! Neighbours: `step.rs`; the state lives in the sequence's slot (`state/`).

use tandem_kernels::{Backend, BackendError, KdaWeights};
use tandem_model::KdaTensors;

use super::Cx;
use crate::dims::Dims;

/// Weights of one KDA mixer.
pub struct Kda<B: Backend> {
    /// Dense number among the KDA layers.
    index: usize,
    proj: B::Weight,
    f_b: B::Weight,
    g_b: B::Weight,
    o: B::Weight,
    mixer: KdaWeights<B>,
    columns: Columns,
}

/// Where the parts of the fused projection start.
#[derive(Clone, Copy, Debug)]
struct Columns {
    f_a: usize,
    g_a: usize,
    beta: usize,
    stride: usize,
}

impl Columns {
    fn new(d: &Dims) -> Self {
        let f_a = 3 * d.kda_width();
        let g_a = f_a + d.kda.dims.head_dim;
        let beta = g_a + d.kda.dims.head_dim;
        Self { f_a, g_a, beta, stride: beta + d.kda.dims.heads }
    }
}

/// Width of the fused projection.
pub fn stride(d: &Dims) -> usize {
    Columns::new(d).stride
}

impl<B: Backend> Kda<B> {
    /// Loads the `index`-th KDA layer.
    ///
    /// # Errors
    /// The device cannot hold a tensor.
    pub fn load(b: &B, d: &Dims, index: usize, t: &KdaTensors) -> Result<Self, BackendError> {
        let parts = [&t.q, &t.k, &t.v, &t.f_a, &t.g_a, &t.b].map(Clone::clone);
        Ok(Self {
            index,
            proj: b.weight(&parts)?,
            f_b: b.weight(std::slice::from_ref(&t.f_b))?,
            g_b: b.weight(std::slice::from_ref(&t.g_b))?,
            o: b.weight(std::slice::from_ref(&t.o))?,
            mixer: KdaWeights {
                conv: b.vector("KDA conv", &t.conv)?,
                a_log: b.vector("A_log", &t.a_log)?,
                dt_bias: b.vector("dt_bias", &t.dt_bias)?,
                o_norm: b.vector("o_norm", &t.o_norm)?,
            },
            columns: Columns::new(d),
        })
    }

    /// x → y.
    pub fn forward(&self, cx: &mut Cx<'_, B>) {
        let (b, rows, c, buf) = (cx.b, cx.rows, self.columns, &mut *cx.buf);
        b.linear(rows, &buf.x, &self.proj, &mut buf.proj);
        b.linear_strided(rows, &buf.proj, c.stride, c.f_a, &self.f_b, &mut buf.f);
        b.linear_strided(rows, &buf.proj, c.stride, c.g_a, &self.g_b, &mut buf.g);
        b.kda(cx.batch, self.index, &buf.proj, c.stride, c.beta, &buf.f, &buf.g, &self.mixer, &cx.d.kda, cx.state, &mut buf.mixed);
        b.linear(rows, &buf.mixed, &self.o, &mut buf.y);
    }
}
