//! The KDA case: both decay forms, odd head counts and widths, any number of taps.

use super::{
    noise::Noise,
    rig::{Rig, text},
    sequences::{Place, SequenceCase, put, scatter},
    tolerance::{KDA_TOL, Tolerance},
};
use crate::{Backend, KdaDims, KdaParams, KdaWeights, StateSpec};

/// `kda`.
#[derive(Clone, Debug)]
pub struct Kda {
    seed: u64,
    params: KdaParams,
    conv: Vec<f32>,
    a_log: Vec<f32>,
    dt_bias: Vec<f32>,
    o_norm: Vec<f32>,
    beta0: usize,
    stride: usize,
}

impl Kda {
    /// Random sizes.
    pub fn new(seed: u64) -> Self {
        let mut n = Noise::new(seed);
        let dims = KdaDims { heads: n.between(1, 5), head_dim: n.pick(&[3, 5, 8, 16, 24, 32]), conv: n.between(1, 5) };
        Self::sized(n.seed(), dims)
    }

    /// Given sizes.
    pub fn sized(seed: u64, dims: KdaDims) -> Self {
        let mut n = Noise::new(seed);
        let hd = dims.heads * dims.head_dim;
        let params = KdaParams { dims, lower_bound: n.pick(&[None, Some(-5.0), Some(-3.0)]), eps: n.pick(&[1e-5, 1e-3]) };
        let ([beta0], stride) = scatter(&mut n, 3 * hd, [dims.heads]);
        Self {
            seed,
            params,
            conv: n.values(3 * hd * dims.conv, 0.2, 0.5),
            a_log: n.values(dims.heads, 0.5, 0.7),
            dt_bias: n.values(hd, -1.0, 1.5),
            o_norm: n.values(dims.head_dim, 1.0, 0.3),
            beta0,
            stride,
        }
    }

    /// The same with a lower bound of the log decay, and `more` on top of its bias: from some 8 on, every channel decays at about the bound.
    #[must_use]
    pub fn decaying(mut self, bound: f32, more: f32) -> Self {
        self.params.lower_bound = Some(bound);
        self.dt_bias.iter_mut().for_each(|b| *b += more);
        self
    }
}

impl SequenceCase for Kda {
    const TOLERANCE: Tolerance = KDA_TOL;

    fn spec(&self) -> StateSpec {
        let kda = self.params.dims;
        StateSpec { slots: 0, pages: 0, page_tokens: 12, kda_layers: 2, mla_layers: 1, kda, latent: 3, index_dim: 2, kpool: 3 }
    }

    fn layers(&self) -> usize {
        2
    }

    fn width(&self) -> usize {
        self.params.dims.heads * self.params.dims.head_dim
    }

    fn step<B: Backend>(&self, rig: &Rig<'_, B>, batch: &B::Batch, places: &[Place], state: &mut B::State) -> Result<Vec<f32>, String> {
        let (heads, hd, rows) = (self.params.dims.heads, self.width(), places.len());
        let (mut proj, mut f, mut g) = (Vec::new(), Vec::new(), Vec::new());
        for place in places {
            let mut n = Noise::at(self.seed, &[place.content, place.pos, place.layer]);
            let mut row = n.values(self.stride, 0.0, 1.0);
            put(&mut row, self.beta0, &n.values(heads, 0.5, 2.0));
            proj.extend(row);
            f.extend(n.values(hd, 0.0, 1.5));
            g.extend(n.values(hd, 0.0, 1.5));
        }
        let vector = |values: &[f32]| rig.0.vector("kda", values).map_err(text);
        let w = KdaWeights {
            conv: vector(&self.conv)?,
            a_log: vector(&self.a_log)?,
            dt_bias: vector(&self.dt_bias)?,
            o_norm: vector(&self.o_norm)?,
        };
        let (proj, f, g) = (rig.floats(&proj)?, rig.floats(&f)?, rig.floats(&g)?);
        let mut out = rig.out(rows * hd)?;
        rig.0.kda(batch, places[0].layer, &proj, self.stride, self.beta0, &f, &g, &w, &self.params, state, &mut out);
        rig.read(&out, rows * hd)
    }
}
