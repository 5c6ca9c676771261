//! Manifold-constrained hyper-connections: the site in front of each sublayer (two per layer).
//!
//! Neighbours: `step.rs` strings sites together with the backend's fused boundary op.

use tandem_kernels::{Backend, BackendError, MhcWeights};
use tandem_model::HcTensors;

use super::Cx;

/// Loads a site together with the norm that follows it.
///
/// # Errors
/// The device cannot hold it.
pub fn load<B: Backend>(b: &B, hc: &HcTensors, norm: &[f32]) -> Result<MhcWeights<B>, BackendError> {
    Ok(MhcWeights {
        fn_: b.weight(std::slice::from_ref(&hc.fn_))?,
        base: b.vector("hc base", &hc.base)?,
        scale: b.vector("hc scale", &hc.scale)?,
        norm: b.vector("layer norm", norm)?,
    })
}

impl<B: Backend> Cx<'_, B> {
    /// The first site: streams → x.
    pub fn mhc_open(&mut self, site: &MhcWeights<B>) {
        self.b.mhc_pre(self.rows, &self.buf.streams, site, &self.d.mhc, &mut self.buf.x, &mut self.buf.gates);
    }

    /// Between two sublayers: y → streams → x.
    pub fn mhc_boundary(&mut self, next: &MhcWeights<B>) {
        let buf = &mut *self.buf;
        self.b.mhc_boundary(self.rows, &buf.y, &mut buf.gates, next, &self.d.mhc, &mut buf.streams, &mut buf.x);
    }

    /// After the last sublayer: y → streams.
    pub fn mhc_close(&mut self) {
        self.b.mhc_post(self.rows, &self.buf.y, &self.buf.gates, &self.d.mhc, &mut self.buf.streams);
    }
}
