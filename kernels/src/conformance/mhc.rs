//! Cases of the hyper-connections: a boundary (pre, post, pre) and the collapse that ends the trunk.

use std::ops::Range;

use tandem_quant::MatrixSource;

use super::{
    noise::Noise,
    rig::{Output, Rig, RowCase, text},
    tolerance::{MHC_TOL, Tolerance},
};
use crate::{Backend, MhcGates, MhcParams, MhcWeights};

#[derive(Clone, Debug)]
struct Site {
    fn_: MatrixSource,
    base: Vec<f32>,
    scale: Vec<f32>,
    norm: Vec<f32>,
}

impl Site {
    fn new(n: &mut Noise, hidden: usize, fn_: MatrixSource) -> Self {
        Self { base: n.values(fn_.rows(), 0.0, 1.0), scale: n.values(3, 1.0, 0.5), norm: n.values(hidden, 1.0, 0.3), fn_ }
    }

    fn load<B: Backend>(&self, rig: &Rig<'_, B>) -> Result<MhcWeights<B>, String> {
        let vector = |values: &[f32]| rig.0.vector("mhc", values).map_err(text);
        let fn_ = rig.0.weight(std::slice::from_ref(&self.fn_)).map_err(text)?;
        Ok(MhcWeights { fn_, base: vector(&self.base)?, scale: vector(&self.scale)?, norm: vector(&self.norm)? })
    }
}

/// `mhc_pre`, `mhc_boundary`, `mhc_post` and `collapse` in a row, as two sublayers at the end of the trunk use them.
#[derive(Clone, Debug)]
pub struct Mhc {
    rows: usize,
    params: MhcParams,
    sites: [Site; 2],
    streams: Vec<f32>,
    y: Vec<f32>,
}

impl Mhc {
    /// `streams` streams of width `hidden`.
    ///
    /// # Errors
    /// Sizes that no matrix has.
    pub fn new(seed: u64, rows: usize, streams: usize, hidden: usize) -> Result<Self, String> {
        let mut n = Noise::new(seed);
        let gates = streams * (streams + 2);
        let sites = [n.matrix(gates, streams * hidden)?, n.matrix(gates, streams * hidden)?];
        Ok(Self::of(&mut n, rows, streams, hidden, sites))
    }

    /// `streams` streams of width `hidden` with given `[N(N+2), N·D]` matrices of the two sites.
    pub fn of(n: &mut Noise, rows: usize, streams: usize, hidden: usize, sites: [MatrixSource; 2]) -> Self {
        let (rms_eps, hc_eps) = (n.pick(&[1e-5, 1e-6]), n.pick(&[1e-6, 1e-3]));
        let params = MhcParams { streams, hidden, rms_eps, hc_eps, iters: n.pick(&[1, 2, 5, 20]) };
        let sites = sites.map(|fn_| Site::new(n, hidden, fn_));
        let spread = n.pick(&[0.02, 1.0, 100.0]);
        Self { rows, params, sites, streams: n.values(rows * streams * hidden, 0.0, spread), y: n.values(rows * hidden, 0.0, 1.0) }
    }
}

impl RowCase for Mhc {
    const TOLERANCE: Tolerance = MHC_TOL;

    fn rows(&self) -> usize {
        self.rows
    }

    fn poison(&mut self, row: usize) {
        let wide = self.params.streams * self.params.hidden;
        self.streams[row * wide..(row + 1) * wide].fill(f32::NAN);
    }

    fn run<B: Backend>(&self, rig: &Rig<'_, B>, rows: Range<usize>) -> Result<Vec<Output>, String> {
        let (b, p) = (rig.0, &self.params);
        let (r, n, d) = (rows.len(), p.streams, p.hidden);
        let [first, second] = [self.sites[0].load(rig)?, self.sites[1].load(rig)?];
        let mut streams = rig.floats(&self.streams[rows.start * n * d..rows.end * n * d])?;
        let y = rig.floats(&self.y[rows.start * d..rows.end * d])?;
        let (mut x, mut gates) = (rig.out(r * d)?, MhcGates { post: rig.out(r * n)?, comb: rig.out(r * n * n)? });
        let mut outputs = Vec::new();

        b.mhc_pre(r, &streams, &first, p, &mut x, &mut gates);
        outputs.push(Output::new("pre.x", d, rig.read(&x, r * d)?));
        outputs.push(Output::new("pre.post", n, rig.read(&gates.post, r * n)?));
        outputs.push(Output::new("pre.comb", n * n, rig.read(&gates.comb, r * n * n)?));
        b.mhc_boundary(r, &y, &mut gates, &second, p, &mut streams, &mut x);
        outputs.push(Output::new("boundary.streams", n * d, rig.read(&streams, r * n * d)?));
        outputs.push(Output::new("boundary.x", d, rig.read(&x, r * d)?));
        outputs.push(Output::new("boundary.comb", n * n, rig.read(&gates.comb, r * n * n)?));
        b.mhc_post(r, &x, &gates, p, &mut streams);
        outputs.push(Output::new("post.streams", n * d, rig.read(&streams, r * n * d)?));

        let norm = b.vector("norm", &self.sites[0].norm).map_err(text)?;
        // rows in reverse, then put back, so that the selection matters
        let select: Vec<u32> = (0..r as u32).rev().collect();
        let mut out = rig.out(r * d)?;
        b.collapse(&select, &streams, &norm, p, &mut out);
        let collapsed = rig.read(&out, r * d)?.chunks(d).rev().flatten().copied().collect();
        outputs.push(Output::new("collapse", d, collapsed));
        Ok(outputs)
    }
}
