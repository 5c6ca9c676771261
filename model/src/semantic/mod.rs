//! Whether the values of routed experts look like weights of this model: a wrong scale, a wrong nibble order or a damaged file shows in
//! norms, histograms and in how the matrices of one expert fit each other, long before anybody reads a bad answer.
//!
//! | compared | with | catches |
//! |---|---|---|
//! | each value | finite numbers | NaN scales, broken floats |
//! | a matrix's share of zeros | nine tenths | blocks that were never written |
//! | a matrix's RMS | the median of its kind (gate, up, down) over the file | a scale of one matrix or expert |
//! | the median RMS of a kind | the shared experts' of the same kind, and the other kinds' | a scale of the whole format (a reciprocal …) |
//! | a matrix's histogram of w / RMS | the mean of its kind and stored type | scales applied to the wrong blocks |
//! | column norms of down | row norms of gate and up of the same expert | another order of elements in down (`order.rs`) |
//! | column norms of gate and up | column norms of the router | another order of elements in gate and up |
//!
//! Three experts of each layer are looked at: the first, the middle and the last. Limits are wide: they are for faults of encoding,
//! not for the quality of a quantisation.

mod order;
mod stats;

use std::{collections::BTreeMap, num::NonZeroUsize, thread};

use tandem_quant::DType;

pub use self::{
    order::Order,
    stats::{BINS, Stats},
};
use crate::{Checkpoint, DenseTensors, ModelError};

/// Names of an expert's matrices, in the order of all arrays here.
pub const KINDS: [&str; 3] = ["gate", "up", "down"];

/// Largest share of exact zeros.
const MOST_ZEROS: f64 = 0.9;
/// Largest factor between a matrix's RMS and the median of its kind. Layers of trained models differ by two or three.
const MOST_SPREAD: f64 = 8.0;
/// Largest factor between kinds, and between routed and shared experts.
const MOST_BETWEEN: f64 = 32.0;
/// Largest distance between histograms (half the sum of differences, 0 to 1).
const MOST_DISTANCE: f64 = 0.35;

/// What one expert's matrices look like.
#[derive(Clone, Debug)]
pub struct ExpertStats {
    /// Layer.
    pub layer: usize,
    /// Expert.
    pub expert: usize,
    /// Stored types of gate, up, down.
    pub types: [DType; 3],
    /// Their values.
    pub stats: [Stats; 3],
}

/// What was seen.
#[derive(Clone, Debug)]
pub struct Semantic {
    /// The experts looked at, by layer.
    pub experts: Vec<ExpertStats>,
    /// RMS of the shared experts' gate, up and down, by layer.
    pub shared: BTreeMap<usize, [f64; 3]>,
    /// How the columns of down, and of gate and up, fit.
    pub orders: Vec<Order>,
    /// What cannot be right, one sentence each; empty for a sound checkpoint.
    pub problems: Vec<String>,
    /// What could not be judged.
    pub notes: Vec<String>,
}

/// One layer's share of the work.
struct Layer {
    experts: Vec<ExpertStats>,
    shared: [f64; 3],
    down: order::Sums,
    gate_up: order::Sums,
}

impl Semantic {
    /// Looks at three experts of each MoE layer, layers in parallel.
    ///
    /// # Errors
    /// Bytes that are not there (a stub).
    pub fn of(checkpoint: &Checkpoint) -> Result<Self, ModelError> {
        let layers = checkpoint.geometry().moe_layers();
        let threads = thread::available_parallelism().map_or(1, NonZeroUsize::get).clamp(1, layers.len().max(1));
        let parts: Vec<Result<Vec<(usize, Layer)>, ModelError>> = thread::scope(|scope| {
            let work = |first: usize| {
                let mine = layers.iter().skip(first).step_by(threads);
                mine.map(|layer| Ok((*layer, look(checkpoint, *layer)?))).collect()
            };
            let running: Vec<_> = (0..threads).map(|first| scope.spawn(move || work(first))).collect();
            running.into_iter().map(|t| t.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
        });
        let mut found = BTreeMap::new();
        for part in parts {
            found.extend(part?);
        }
        let mut all = Self { experts: Vec::new(), shared: BTreeMap::new(), orders: Vec::new(), problems: Vec::new(), notes: Vec::new() };
        let (mut down, mut gate_up) = (order::Sums::default(), order::Sums::default());
        for (layer, part) in found {
            all.experts.extend(part.experts);
            all.shared.insert(layer, part.shared);
            down.add(&part.down);
            gate_up.add(&part.gate_up);
        }
        all.orders = vec![down.judge("down_proj"), gate_up.judge("gate_proj and up_proj")];
        all.judge();
        Ok(all)
    }

    fn judge(&mut self) {
        let mut problems = Vec::new();
        let medians: [f64; 3] = std::array::from_fn(|k| median(self.experts.iter().map(|e| e.stats[k].rms)));
        let histograms = self.mean_histograms();
        for e in &self.experts {
            for (k, s) in e.stats.iter().enumerate() {
                let at = format!("layer {}, expert {}, {}_proj ({})", e.layer, e.expert, KINDS[k], e.types[k]);
                if s.non_finite > 0 {
                    problems.push(format!("{at}: {} values are not finite", s.non_finite));
                } else if s.zeros > MOST_ZEROS {
                    problems.push(format!("{at}: {:.0} % of the values are 0", 100.0 * s.zeros));
                } else if apart(s.rms, medians[k]) > MOST_SPREAD {
                    problems.push(format!("{at}: RMS {:.3e}, where the median of all {}_proj is {:.3e}", s.rms, KINDS[k], medians[k]));
                } else if let Some(mean) = histograms.get(&(k, e.types[k]))
                    && s.distance(mean) > MOST_DISTANCE
                {
                    let d = s.distance(mean);
                    problems.push(format!("{at}: its histogram is {d:.2} away from the mean of its kind (at most {MOST_DISTANCE})"));
                }
            }
        }
        let shared: [f64; 3] = std::array::from_fn(|k| median(self.shared.values().map(|s| s[k])));
        for (k, kind) in KINDS.iter().enumerate() {
            if apart(medians[k], shared[k]) > MOST_BETWEEN {
                let (routed, shared) = (medians[k], shared[k]);
                problems.push(format!("{kind}_proj: median RMS {routed:.3e} of routed experts against {shared:.3e} of shared experts"));
            }
        }
        if apart(medians[0], medians[1]) > MOST_BETWEEN {
            problems.push(format!("median RMS of gate_proj {:.3e} against up_proj {:.3e}", medians[0], medians[1]));
        }
        for order in &self.orders {
            match order.verdict() {
                order::Verdict::Sound => {}
                order::Verdict::Wrong(text) => problems.push(text),
                order::Verdict::Unknown(text) => self.notes.push(text),
            }
        }
        self.problems = problems;
    }

    /// The mean histogram of each kind and type of which at least four matrices were seen.
    fn mean_histograms(&self) -> BTreeMap<(usize, DType), [f64; BINS]> {
        let mut sums: BTreeMap<(usize, DType), (usize, [f64; BINS])> = BTreeMap::new();
        for e in &self.experts {
            for k in 0..3 {
                let (count, sum) = sums.entry((k, e.types[k])).or_insert((0, [0.0; BINS]));
                *count += 1;
                sum.iter_mut().zip(&e.stats[k].histogram).for_each(|(s, h)| *s += h);
            }
        }
        let enough = sums.into_iter().filter(|(_, (count, _))| *count >= 4);
        enough.map(|(key, (count, sum))| (key, sum.map(|s| s / count as f64))).collect()
    }
}

fn look(checkpoint: &Checkpoint, layer: usize) -> Result<Layer, ModelError> {
    let count = checkpoint.geometry().experts;
    let mut chosen = vec![0, count / 2, count - 1];
    chosen.dedup();
    let router = checkpoint.matrix(&format!("layers.{layer}.mlp.gate.weight"))?;
    let router = stats::columns(&router.to_f32(), router.cols());
    let (mut down, mut gate_up) = (order::Sums::default(), order::Sums::default());
    let mut experts = Vec::new();
    for expert in chosen {
        let DenseTensors { gate, up, down: last } = checkpoint.expert(layer, expert)?;
        let matrices = [&gate, &up, &last];
        let values = matrices.map(|m| m.to_f32());
        let rows: Vec<f64> =
            stats::rows(&values[0], gate.cols()).iter().zip(stats::rows(&values[1], up.cols())).map(|(a, b)| a + b).collect();
        down.observe(&stats::columns(&values[2], last.cols()), &rows);
        let both: Vec<f64> =
            stats::columns(&values[0], gate.cols()).iter().zip(stats::columns(&values[1], up.cols())).map(|(a, b)| a + b).collect();
        gate_up.observe(&both, &router);
        let stats = [0, 1, 2].map(|k| Stats::of(&values[k]));
        experts.push(ExpertStats { layer, expert, types: matrices.map(|m| m.dtype()), stats });
    }
    let shared = checkpoint.mlp(&format!("layers.{layer}.mlp.shared_experts."))?;
    let shared = [&shared.gate, &shared.up, &shared.down].map(|m| Stats::of(&m.to_f32()).rms);
    Ok(Layer { experts, shared, down, gate_up })
}

/// The factor between two numbers, at least 1; infinite where one is 0 or not finite.
fn apart(a: f64, b: f64) -> f64 {
    let factor = (a / b).max(b / a);
    if factor.is_finite() { factor } else { f64::INFINITY }
}

/// The median of the finite numbers; 1 of none.
fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut sorted: Vec<f64> = values.filter(|v| v.is_finite()).collect();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(1.0)
}
