//! Cases of the plain row ops: embed, linear, rms_norm, add, mlp, experts.

use std::ops::Range;

use tandem_quant::MatrixSource;

use super::{
    noise::Noise,
    rig::{Output, Rig, RowCase, text},
    tolerance::{EXACT_TOL, GEMV_TOL, MLP_TOL, NORM_TOL, Tolerance},
};
use crate::{Backend, BatchDesc, ExpertSource, MhcParams, Segment};

/// Row counts that hit every kernel variant and its edges.
pub const ROWS: [usize; 18] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 33];

fn slice<'a>(values: &'a [f32], rows: &Range<usize>, width: usize) -> &'a [f32] {
    &values[rows.start * width..rows.end * width]
}

/// `linear_strided` over a matrix stacked of parts (`linear` where the row is just its input).
#[derive(Clone, Debug)]
pub struct Linear {
    parts: Vec<MatrixSource>,
    stride: usize,
    col0: usize,
    rows: usize,
    x: Vec<f32>,
}

impl Linear {
    /// A product of `rows` rows with `parts` matrices of up to `out` rows and `cols` columns.
    ///
    /// # Errors
    /// Sizes that no matrix has.
    pub fn new(seed: u64, rows: usize, cols: usize, out: usize, parts: usize) -> Result<Self, String> {
        let mut n = Noise::new(seed);
        let parts = (0..parts).map(|_| (n.between(1, out), cols)).collect::<Vec<_>>();
        let parts = parts.into_iter().map(|(out, cols)| n.matrix(out, cols)).collect::<Result<Vec<_>, _>>()?;
        Ok(Self::of(&mut n, rows, parts))
    }

    /// A product of `rows` rows with given matrices of equal columns.
    pub fn of(n: &mut Noise, rows: usize, parts: Vec<MatrixSource>) -> Self {
        let (col0, behind) = if n.coin() { (n.between(0, 9), n.between(0, 9)) } else { (0, 0) };
        let stride = col0 + parts.first().map_or(0, MatrixSource::cols) + behind;
        Self { parts, stride, col0, rows, x: n.values(rows * stride, 0.1, 1.0) }
    }
}

impl RowCase for Linear {
    const TOLERANCE: Tolerance = GEMV_TOL;

    fn rows(&self) -> usize {
        self.rows
    }

    fn poison(&mut self, row: usize) {
        self.x[row * self.stride..(row + 1) * self.stride].fill(f32::NAN);
    }

    fn run<B: Backend>(&self, rig: &Rig<'_, B>, rows: Range<usize>) -> Result<Vec<Output>, String> {
        let cols = self.parts[0].cols();
        let width: usize = self.parts.iter().map(MatrixSource::rows).sum();
        let x = slice(&self.x, &rows, self.stride);
        let w = rig.0.weight(&self.parts).map_err(text)?;
        let (input, mut out) = (rig.floats(x)?, rig.out(rows.len() * width)?);
        if self.stride == cols {
            rig.0.linear(rows.len(), &input, &w, &mut out);
        } else {
            rig.0.linear_strided(rows.len(), &input, self.stride, self.col0, &w, &mut out);
        }
        let matrix: Vec<f32> = self.parts.iter().flat_map(MatrixSource::to_f32).collect();
        let sizes = |x: &[f32], w: &[f32]| x.iter().zip(w).map(|(x, w)| (x * w).abs()).sum::<f32>();
        let scale =
            x.chunks(self.stride).flat_map(|x| matrix.chunks(cols).map(|w| sizes(&x[self.col0..], w)).collect::<Vec<_>>()).collect();
        Ok(vec![Output { scale, ..Output::new("out", width, rig.read(&out, rows.len() * width)?) }])
    }
}

/// `rms_norm` of columns, and `add`.
#[derive(Clone, Debug)]
pub struct Norm {
    rows: usize,
    stride: usize,
    col0: usize,
    weight: Vec<f32>,
    eps: f32,
    x: Vec<f32>,
}

impl Norm {
    /// Norms of `width` columns.
    pub fn new(seed: u64, rows: usize, width: usize) -> Self {
        let mut n = Noise::new(seed);
        let col0 = n.between(0, 5);
        let stride = col0 + width + n.between(0, 5);
        let spread = n.pick(&[1e-3, 1.0, 300.0]);
        Self {
            rows,
            stride,
            col0,
            weight: n.values(width, 1.0, 0.3),
            eps: n.pick(&[1e-5, 1e-6, 1e-3]),
            x: n.values(rows * stride, 0.0, spread),
        }
    }
}

impl RowCase for Norm {
    const TOLERANCE: Tolerance = NORM_TOL;

    fn rows(&self) -> usize {
        self.rows
    }

    fn poison(&mut self, row: usize) {
        self.x[row * self.stride..(row + 1) * self.stride].fill(f32::NAN);
    }

    fn run<B: Backend>(&self, rig: &Rig<'_, B>, rows: Range<usize>) -> Result<Vec<Output>, String> {
        let width = self.weight.len();
        let weight = rig.0.vector("weight", &self.weight).map_err(text)?;
        let x = rig.floats(slice(&self.x, &rows, self.stride))?;
        let mut normed = rig.out(rows.len() * width)?;
        rig.0.rms_norm(rows.len(), &x, self.stride, self.col0, width, &weight, self.eps, &mut normed);
        let mut sum = rig.floats(slice(&self.x, &rows, self.stride))?;
        rig.0.add(rows.len(), self.stride, &x, &mut sum);
        Ok(vec![
            Output::new("out", width, rig.read(&normed, rows.len() * width)?),
            Output::new("sum", self.stride, rig.read(&sum, rows.len() * self.stride)?),
        ])
    }
}

/// `embed`.
#[derive(Clone, Debug)]
pub struct Embed {
    table: MatrixSource,
    tokens: Vec<u32>,
    streams: usize,
}

impl Embed {
    /// `rows` tokens of a vocabulary into `streams` streams of width `hidden`.
    ///
    /// # Errors
    /// Sizes that no matrix has.
    pub fn new(seed: u64, rows: usize, vocab: usize, hidden: usize, streams: usize) -> Result<Self, String> {
        let mut n = Noise::new(seed);
        let table = n.matrix(vocab, hidden)?;
        Ok(Self::of(&mut n, rows, table, streams))
    }

    /// `rows` tokens of a given table.
    pub fn of(n: &mut Noise, rows: usize, table: MatrixSource, streams: usize) -> Self {
        let tokens = (0..rows).map(|_| n.between(0, table.rows() - 1) as u32).collect();
        Self { table, tokens, streams }
    }
}

impl RowCase for Embed {
    const TOLERANCE: Tolerance = EXACT_TOL;

    fn rows(&self) -> usize {
        self.tokens.len()
    }

    fn poison(&mut self, _row: usize) {}

    fn run<B: Backend>(&self, rig: &Rig<'_, B>, rows: Range<usize>) -> Result<Vec<Output>, String> {
        let tokens = self.tokens[rows].to_vec();
        let (count, hidden) = (tokens.len(), self.table.cols());
        let width = self.streams * hidden;
        let segments = (0..count as u32).map(|r| Segment { slot: r, row0: r, rows: 1, pos0: 0, pages: 0..1 }).collect();
        let batch = rig.batch(&BatchDesc { tokens, segments, pages: vec![0] })?;
        let table = rig.0.weight(std::slice::from_ref(&self.table)).map_err(text)?;
        let params = MhcParams { streams: self.streams, hidden, rms_eps: 1e-5, hc_eps: 1e-6, iters: 20 };
        let mut streams = rig.out(count * width)?;
        rig.0.embed(&batch, &table, &params, &mut streams);
        Ok(vec![Output::new("streams", width, rig.read(&streams, count * width)?)])
    }
}

/// `mlp`.
#[derive(Clone, Debug)]
pub struct Mlp {
    rows: usize,
    source: ExpertSource,
    limit: Option<f32>,
    x: Vec<f32>,
}

fn expert(n: &mut Noise, hidden: usize, width: usize) -> Result<ExpertSource, String> {
    Ok(ExpertSource { gate: n.matrix(width, hidden)?, up: n.matrix(width, hidden)?, down: n.matrix(hidden, width)? })
}

impl Mlp {
    /// A gated MLP of `width`.
    ///
    /// # Errors
    /// Sizes that no matrix has.
    pub fn new(seed: u64, rows: usize, hidden: usize, width: usize) -> Result<Self, String> {
        let mut n = Noise::new(seed);
        Ok(Self {
            rows,
            source: expert(&mut n, hidden, width)?,
            limit: n.pick(&[None, Some(0.5), Some(10.0)]),
            x: n.values(rows * hidden, 0.0, 1.5),
        })
    }
}

impl Mlp {
    /// A gated MLP of given matrices.
    pub fn of(n: &mut Noise, rows: usize, source: ExpertSource) -> Self {
        Self { rows, limit: n.pick(&[None, Some(0.5), Some(10.0)]), x: n.values(rows * source.gate.cols(), 0.0, 1.5), source }
    }
}

impl RowCase for Mlp {
    const TOLERANCE: Tolerance = MLP_TOL;

    fn rows(&self) -> usize {
        self.rows
    }

    fn poison(&mut self, row: usize) {
        let d = self.source.gate.cols();
        self.x[row * d..(row + 1) * d].fill(f32::NAN);
    }

    fn run<B: Backend>(&self, rig: &Rig<'_, B>, rows: Range<usize>) -> Result<Vec<Output>, String> {
        let ExpertSource { gate, up, down } = &self.source;
        let (d, width) = (gate.cols(), gate.rows());
        let gate_up = rig.0.weight(&[gate.clone(), up.clone()]).map_err(text)?;
        let down = rig.0.weight(std::slice::from_ref(down)).map_err(text)?;
        let x = rig.floats(slice(&self.x, &rows, d))?;
        let (mut hidden, mut out) = (rig.out(rows.len() * 2 * width)?, rig.out(rows.len() * d)?);
        rig.0.mlp(rows.len(), &x, &gate_up, &down, self.limit, &mut hidden, &mut out);
        Ok(vec![Output::new("out", d, rig.read(&out, rows.len() * d)?)])
    }
}

/// `experts`: a shard that holds only some of the experts that rows choose.
#[derive(Clone, Debug)]
pub struct Experts {
    rows: usize,
    first: u32,
    experts: Vec<ExpertSource>,
    limit: Option<f32>,
    x: Vec<f32>,
    k: usize,
    ids: Vec<i32>,
    weights: Vec<f32>,
}

impl Experts {
    /// `held` experts of `width`; rows choose `k` of some more.
    ///
    /// # Errors
    /// Sizes that no matrix has.
    pub fn new(seed: u64, rows: usize, hidden: usize, width: usize, held: usize, k: usize) -> Result<Self, String> {
        let mut n = Noise::new(seed);
        let experts = (0..held).map(|_| expert(&mut n, hidden, width)).collect::<Result<_, _>>()?;
        Ok(Self::of(&mut n, rows, experts, k))
    }

    /// Given experts; rows choose `k` of some more.
    pub fn of(n: &mut Noise, rows: usize, experts: Vec<ExpertSource>, k: usize) -> Self {
        let (held, hidden) = (experts.len(), experts.first().map_or(0, |e| e.gate.cols()));
        let first = n.between(0, 5);
        let all = (first + held + n.between(0, 3)).max(k);
        let mut ids: Vec<i32> = (0..rows).flat_map(|_| n.shuffled(all).into_iter().take(k).map(|e| e as i32).collect::<Vec<_>>()).collect();
        // one row that this shard has nothing for, and one unused place
        ids[(rows - 1) * k..].fill(-1);
        let limit = n.pick(&[None, Some(1.0)]);
        let (x, weights) = (n.values(rows * hidden, 0.0, 1.5), n.values(rows * k, 0.6, 0.2));
        Self { rows, first: first as u32, experts, limit, x, k, ids, weights }
    }
}

impl RowCase for Experts {
    const TOLERANCE: Tolerance = MLP_TOL;

    fn rows(&self) -> usize {
        self.rows
    }

    fn poison(&mut self, row: usize) {
        let d = self.experts[0].gate.cols();
        self.x[row * d..(row + 1) * d].fill(f32::NAN);
    }

    fn run<B: Backend>(&self, rig: &Rig<'_, B>, rows: Range<usize>) -> Result<Vec<Output>, String> {
        let d = self.experts[0].gate.cols();
        let bank = rig.0.bank(self.first, self.experts.clone()).map_err(text)?;
        let x = rig.floats(slice(&self.x, &rows, d))?;
        let ids = rig.ids(&self.ids[rows.start * self.k..rows.end * self.k])?;
        let weights = rig.floats(slice(&self.weights, &rows, self.k))?;
        let mut out = rig.out(rows.len() * d)?;
        rig.0.experts(rows.len(), &x, self.k, &ids, &weights, &bank, self.limit, &mut out);
        Ok(vec![Output::new("partial", d, rig.read(&out, rows.len() * d)?)])
    }
}
