//! Cases of the router: groups, exact ties, weights.

use std::ops::Range;

use tandem_quant::MatrixSource;

use super::{
    noise::Noise,
    rig::{Output, Rig, RowCase, near, text},
    tolerance::{ROUTER_TOL, SCORE_TIE_TOL, Tolerance},
};
use crate::{
    Backend, RouterParams,
    reference::{linear::linear, norm::sigmoid, router},
};

/// `router`.
#[derive(Clone, Debug)]
pub struct Router {
    rows: usize,
    params: RouterParams,
    w: MatrixSource,
    bias: Vec<f32>,
    x: Vec<f32>,
}

impl Router {
    /// Random sizes and groups; in a third of the cases experts come in identical pairs, which tie exactly.
    ///
    /// # Errors
    /// Sizes that no matrix has.
    pub fn new(seed: u64, rows: usize) -> Result<Self, String> {
        let mut n = Noise::new(seed);
        let (groups, size, hidden) = (n.between(1, 4), n.between(2, 9), n.between(3, 130));
        let (experts, topk_group) = (groups * size, n.between(1, groups));
        let topk = n.between(1, (topk_group * size).min(8));
        let params = RouterParams { experts, topk, groups, topk_group, norm_topk: n.coin(), scale: n.pick(&[1.0, 2.5, 0.6]) };
        let w = n.matrix(experts, hidden)?;
        let (mut values, mut bias) = (w.to_f32(), n.values(experts, 0.0, 0.2));
        if n.between(0, 2) == 0 {
            for pair in 0..experts / 2 {
                values.copy_within(2 * pair * hidden..(2 * pair + 1) * hidden, (2 * pair + 1) * hidden);
                bias[2 * pair + 1] = bias[2 * pair];
            }
        }
        let w = MatrixSource::from_f32("router", experts, hidden, &values).map_err(|e| e.to_string())?;
        Ok(Self { rows, params, w, bias, x: n.values(rows * hidden, 0.0, 2.0) })
    }

    fn routing(&self, topk: usize) -> router::Routing<f64> {
        let RouterParams { groups, topk_group, norm_topk, scale, .. } = self.params;
        router::Routing { topk, groups, topk_group, norm_topk, scale: f64::from(scale) }
    }

    /// Scores of a row, plain and biased, in f64.
    fn scores(&self, row: usize) -> (Vec<f64>, Vec<f64>) {
        let wide = |v: &[f32]| v.iter().map(|&v| f64::from(v)).collect::<Vec<_>>();
        let d = self.w.cols();
        let logits = linear(&wide(&self.x[row * d..(row + 1) * d]), &wide(&self.w.to_f32()));
        let biased = logits.iter().zip(&self.bias).map(|(&l, &b)| sigmoid(l) + f64::from(b)).collect();
        (logits, biased)
    }

    /// Whether rounding may change what is chosen: scores or group sums that are near each other without being equal.
    fn is_ambiguous(&self, row: usize) -> bool {
        let (logits, biased) = self.scores(row);
        let bias: Vec<f64> = self.bias.iter().map(|&b| f64::from(b)).collect();
        let ranked = router::route(&logits, &bias, &self.routing((self.params.topk + 1).min(self.params.experts)));
        let near = |a: f64, b: f64| a != b && (a - b).abs() <= SCORE_TIE_TOL.relative;
        let mut sums: Vec<f64> = biased.chunks(self.params.experts / self.params.groups).map(best_two).collect();
        sums.sort_by(|a, b| b.total_cmp(a));
        ranked.windows(2).any(|w| near(biased[w[0].0], biased[w[1].0])) || sums.windows(2).any(|w| near(w[0], w[1]))
    }
}

fn best_two(group: &[f64]) -> f64 {
    let mut sorted = group.to_vec();
    sorted.sort_by(|a, b| b.total_cmp(a));
    sorted.iter().take(2).sum()
}

impl RowCase for Router {
    const TOLERANCE: Tolerance = ROUTER_TOL;

    fn rows(&self) -> usize {
        self.rows
    }

    fn poison(&mut self, row: usize) {
        let d = self.w.cols();
        self.x[row * d..(row + 1) * d].fill(f32::NAN);
    }

    fn run<B: Backend>(&self, rig: &Rig<'_, B>, rows: Range<usize>) -> Result<Vec<Output>, String> {
        let (d, k, count) = (self.w.cols(), self.params.topk, rows.len());
        let w = rig.0.weight(std::slice::from_ref(&self.w)).map_err(text)?;
        let bias = rig.0.vector("bias", &self.bias).map_err(text)?;
        let x = rig.floats(&self.x[rows.start * d..rows.end * d])?;
        let (mut ids, mut weights) = (rig.out_ids(count * k)?, rig.out(count * k)?);
        rig.0.router(count, &x, &w, &bias, &self.params, &mut ids, &mut weights);
        let ids = rig.read_ids(&ids, count * k)?.into_iter().map(|e| e as f32).collect();
        Ok(vec![Output::new("topk_ids", k, ids), Output::new("topk_weights", k, rig.read(&weights, count * k)?)])
    }

    fn agree(&self, got: &[Output], want: &[Output], extra: &[f64]) -> Result<(), String> {
        let k = self.params.topk;
        for row in (0..self.rows).filter(|&r| !self.is_ambiguous(r)) {
            let part = |o: &Output| Output::new(o.name, k, o.values[row * k..(row + 1) * k].to_vec());
            let (got_ids, want_ids) = (part(&got[0]).values, part(&want[0]).values);
            if got_ids != want_ids {
                return Err(format!("row {row} goes to {got_ids:?}, oracle {want_ids:?}"));
            }
            near(&part(&got[1]), &part(&want[1]), &Self::TOLERANCE, extra[1]).map_err(|e| format!("row {row}: {e}"))?;
        }
        Ok(())
    }
}
