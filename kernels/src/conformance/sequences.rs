//! Ops with state: several sequences advance over many steps that mix decode rows and prefill chunks, and the rules that hold however the
//! rows are grouped.

use std::{fmt::Debug, ops::Range};

use super::{
    noise::Noise,
    rig::{Output, Rig, largest_difference, near, oracle, rounded_oracle, text},
    tolerance::{BF16_MARGIN, Tolerance},
};
use crate::{Backend, BatchDesc, Precision, Segment, StateSpec};

/// A token of a sequence at a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Which sequence's content this is (a fork has the content of what it was forked from).
    pub content: usize,
    /// Position in the sequence.
    pub pos: usize,
    /// Dense layer number.
    pub layer: usize,
}

/// An op (or a pair that belongs together) that reads or writes sequence state.
pub trait SequenceCase: Debug {
    /// The bound in f32 arithmetic, for any grouping of rows.
    const TOLERANCE: Tolerance;
    /// Sizes of the state; slots and pages are set by the driver.
    fn spec(&self) -> StateSpec;
    /// Layers to run.
    fn layers(&self) -> usize;
    /// Elements of an output row.
    fn width(&self) -> usize;
    /// Runs the op on the rows of a step.
    ///
    /// # Errors
    /// What the backend said.
    fn step<B: Backend>(&self, rig: &Rig<'_, B>, batch: &B::Batch, places: &[Place], state: &mut B::State) -> Result<Vec<f32>, String>;
    /// Whether the rows of a sequence (`[len, layers, width]`) agree with the oracle's. Rows are of one kind, so an error is judged against
    /// the largest value of them all: a single row may cancel to almost nothing.
    ///
    /// # Errors
    /// The worst element.
    fn agree(&self, _content: usize, got: &[f32], want: &[f32], extra: f64) -> Result<(), String> {
        let largest = want.iter().fold(0.0f32, |m, v| m.max(v.abs()));
        let output = |values: &[f32]| Output { scale: vec![largest; want.len()], ..Output::new("out", self.width(), values.to_vec()) };
        near(&output(got), &output(want), &Self::TOLERANCE, extra)
    }
}

/// Which rows of which sequences make up each step: (sequence, rows).
#[derive(Clone, Debug)]
pub struct Plan {
    /// Sequences.
    pub sequences: usize,
    /// The steps, decode rows first.
    pub steps: Vec<Vec<(usize, usize)>>,
}

impl Plan {
    /// Up to `most` sequences of up to `longest` tokens in steps of up to 33 rows each.
    pub fn random(n: &mut Noise, most: usize, longest: usize) -> Self {
        let mut left: Vec<usize> = (0..n.between(1, most)).map(|_| n.between(1, longest)).collect();
        let sequences = left.len();
        let mut steps = Vec::new();
        while left.iter().any(|&l| l > 0) {
            let mut step = Vec::new();
            for (sequence, left) in left.iter_mut().enumerate().filter(|(_, l)| **l > 0) {
                let rows = if n.coin() { 1 } else { n.between(1, 33) }.min(*left);
                if n.between(0, 3) > 0 {
                    step.push((sequence, rows));
                    *left -= rows;
                }
            }
            step.sort_by_key(|s| s.1 > 1);
            if !step.is_empty() {
                steps.push(step);
            }
        }
        Self { sequences, steps }
    }

    /// The same chunks, one per step.
    fn alone(&self) -> Self {
        Self { sequences: self.sequences, steps: self.steps.iter().flatten().map(|&s| vec![s]).collect() }
    }

    /// Each sequence whole, in one step.
    fn whole(&self) -> Self {
        let rows = |q: usize| self.steps.iter().flatten().filter(|s| s.0 == q).map(|s| s.1).sum();
        Self { sequences: self.sequences, steps: (0..self.sequences).map(|q| vec![(q, rows(q))]).collect() }
    }

    /// Each token in a step of its own.
    fn single(&self) -> Self {
        Self { sequences: self.sequences, steps: self.steps.iter().flatten().flat_map(|&(q, rows)| vec![vec![(q, 1)]; rows]).collect() }
    }

    fn longest(&self) -> usize {
        self.whole().steps.iter().map(|s| s[0].1).max().unwrap_or(1)
    }
}

/// A sequence as the state pools know it.
#[derive(Clone, Debug)]
struct Table {
    content: usize,
    slot: u32,
    pages: Vec<u32>,
    pos: usize,
    out: Vec<f32>,
}

/// Sequences that advance on one backend.
struct Session<'a, B: Backend, C: SequenceCase> {
    rig: Rig<'a, B>,
    case: &'a C,
    page_tokens: usize,
    state: B::State,
    tables: Vec<Table>,
}

impl<'a, B: Backend, C: SequenceCase> Session<'a, B, C> {
    /// Slots and pages for `sequences`, dealt in random order.
    fn new(backend: &'a B, case: &'a C, sequences: usize, longest: usize, seed: u64) -> Result<Self, String> {
        let mut n = Noise::new(seed);
        let spec = case.spec();
        let each = longest.div_ceil(spec.page_tokens);
        let spec = StateSpec { slots: sequences + 1, pages: sequences * each + 1, ..spec };
        let (slots, pages) = (n.shuffled(spec.slots), n.shuffled(spec.pages));
        let tables = (0..sequences)
            .map(|q| Table { content: q, slot: slots[q], pages: pages[q * each..(q + 1) * each].to_vec(), pos: 0, out: Vec::new() })
            .collect();
        let state = backend.state(&spec).map_err(text)?;
        let mut session = Self { rig: Rig(backend), case, page_tokens: spec.page_tokens, state, tables };
        for q in 0..sequences {
            session.rig.0.state_reset(&mut session.state, session.tables[q].slot);
        }
        Ok(session)
    }

    fn pages_of(&self, q: usize, tokens: usize) -> Vec<u32> {
        self.tables[q].pages[..tokens.div_ceil(self.page_tokens)].to_vec()
    }

    fn advance(&mut self, step: &[(usize, usize)]) -> Result<(), String> {
        let (mut desc, mut rows) = (BatchDesc::default(), Vec::new());
        for &(q, count) in step {
            let t = &self.tables[q];
            let pages = self.pages_of(q, t.pos + count);
            let first = desc.pages.len() as u32;
            desc.segments.push(Segment {
                slot: t.slot,
                row0: rows.len() as u32,
                rows: count as u32,
                pos0: t.pos as u32,
                pages: first..first + pages.len() as u32,
            });
            desc.pages.extend(pages);
            rows.extend((t.pos..t.pos + count).map(|pos| (q, pos)));
        }
        desc.tokens = vec![0; rows.len()];
        let batch = self.rig.batch(&desc)?;
        let mut by_layer = Vec::new();
        for layer in 0..self.case.layers() {
            let places: Vec<Place> = rows.iter().map(|&(q, pos)| Place { content: self.tables[q].content, pos, layer }).collect();
            by_layer.push(self.case.step(&self.rig, &batch, &places, &mut self.state)?);
        }
        let width = self.case.width();
        for (r, &(q, _)) in rows.iter().enumerate() {
            let t = &mut self.tables[q];
            t.pos += 1;
            t.out.resize(t.out.len().max((t.pos - 1) * width * by_layer.len()), f32::NAN);
            by_layer.iter().for_each(|out| t.out.extend_from_slice(&out[r * width..(r + 1) * width]));
        }
        Ok(())
    }

    fn outputs(self) -> Vec<Vec<f32>> {
        self.tables.into_iter().map(|t| t.out).collect()
    }
}

/// Runs a case by a plan, and returns each sequence's rows (`[len, layers, width]`).
///
/// # Errors
/// What the backend said.
pub fn run<B: Backend, C: SequenceCase>(backend: &B, case: &C, plan: &Plan, seed: u64) -> Result<Vec<Vec<f32>>, String> {
    let mut session = Session::new(backend, case, plan.sequences, plan.longest(), seed)?;
    plan.steps.iter().try_for_each(|step| session.advance(step))?;
    Ok(session.outputs())
}

/// Checks a case: any grouping of rows is near the oracle, and the same chunks give the same bits whoever shares their step.
///
/// # Errors
/// The first rule broken, with the case.
pub fn judge<B: Backend, C: SequenceCase>(backend: &B, case: &C, plan: &Plan, seed: u64) -> Result<(), String> {
    let named = |what: &str, e: String| format!("{what}: {e}\n  case: {case:?}\n  plan: {plan:?}");
    let want = run(&oracle(), case, plan, seed)?;
    let extra = match backend.precision() {
        Precision::F32 => 0.0,
        Precision::Bf16 => {
            let rounded = run(&rounded_oracle(), case, plan, seed)?;
            BF16_MARGIN * rounded.iter().zip(&want).map(|(r, w)| largest_difference(r, w)).fold(0.0, f64::max)
        }
    };
    let mixed = run(backend, case, plan, seed)?;
    let whole = run(backend, case, &plan.whole(), seed)?;
    let single = run(backend, case, &plan.single(), seed)?;
    for (what, got) in [("mixed steps", &mixed), ("whole sequences", &whole), ("token by token", &single)] {
        for (q, (got, want)) in got.iter().zip(&want).enumerate() {
            case.agree(q, got, want, extra).map_err(|e| named(&format!("{what}, sequence {q}"), e))?;
        }
    }
    let alone = run(backend, case, &plan.alone(), seed + 1)?;
    for (q, (a, b)) in alone.iter().zip(&mixed).enumerate() {
        same_bits(a, b).map_err(|e| named(&format!("sequence {q}, the same chunks alone and in company"), e))?;
    }
    Ok(())
}

/// Checks that rows have the same bits in chunks of any size, for an op whose rows share no sums: whole sequences, and token by token.
///
/// # Errors
/// The first row that differs.
pub fn judge_cuts<B: Backend, C: SequenceCase>(backend: &B, case: &C, plan: &Plan, seed: u64) -> Result<(), String> {
    let (whole, single) = (run(backend, case, &plan.whole(), seed)?, run(backend, case, &plan.single(), seed)?);
    whole
        .iter()
        .zip(&single)
        .enumerate()
        .try_for_each(|(q, (a, b))| same_bits(a, b).map_err(|e| format!("sequence {q}, whole and token by token: {e}\n  case: {case:?}")))
}

/// Checks forks, snapshots and reuse of a slot: all of them continue bit for bit.
///
/// # Errors
/// The first rule broken, with the case.
pub fn judge_state<B: Backend, C: SequenceCase>(backend: &B, case: &C, n: &mut Noise) -> Result<(), String> {
    let (before, after, seed) = (n.between(1, 70), n.between(1, 40), n.seed());
    let named = |what: &str, e: String| format!("{what}: {e}\n  case: {case:?}\n  {before} rows, then {after}");
    let original = run(backend, case, &Plan { sequences: 1, steps: vec![vec![(0, before)], vec![(0, after)], vec![(0, 1)]] }, seed)?;

    let mut s = Session::new(backend, case, 3, before + after + 1, seed)?;
    // sequences 1 and 2 leave dirt in their slots and pages
    s.advance(&[(0, before), (1, before + after), (2, after)])?;
    let snapshot = backend.state_export(&s.state, s.tables[0].slot, &s.pages_of(0, before)).map_err(text)?;

    // 1 becomes a fork of 0: full pages are shared, a partly filled one is copied
    let full = before / s.page_tokens;
    let (from, to) = (s.tables[0].clone(), s.tables[1].clone());
    backend.state_copy_slot(&mut s.state, from.slot, to.slot);
    let mut pages = [&from.pages[..full], &to.pages[full..]].concat();
    if before % s.page_tokens > 0 {
        backend.state_copy_page(&mut s.state, from.pages[full], to.pages[full]);
    }
    std::mem::swap(&mut pages, &mut s.tables[1].pages);
    s.tables[1] = Table { slot: to.slot, pages: s.tables[1].pages.clone(), ..from };

    // 2 is restored from the snapshot
    let (slot, pages) = (s.tables[2].slot, s.pages_of(2, before));
    backend.state_import(&mut s.state, slot, &pages, &snapshot).map_err(text)?;
    s.tables[2] = Table { slot, pages: s.tables[2].pages.clone(), ..s.tables[0].clone() };

    s.advance(&[(0, after), (1, after), (2, after)])?;
    s.advance(&[(2, 1), (0, 1), (1, 1)])?;
    for (q, what) in ["the original", "the fork", "the restored snapshot"].into_iter().enumerate() {
        same_bits(&original[0], &s.tables[q].out).map_err(|e| named(what, e))?;
    }

    // a slot that was used starts anew
    backend.state_reset(&mut s.state, s.tables[1].slot);
    s.tables[1] = Table { content: 0, slot: s.tables[1].slot, pages: to.pages, pos: 0, out: Vec::new() };
    for rows in [before, after, 1] {
        s.advance(&[(1, rows)])?;
    }
    same_bits(&original[0], &s.tables[1].out).map_err(|e| named("a reused slot", e))?;

    match backend.state_import(&mut s.state, slot, &pages, &snapshot[..snapshot.len() - 1]) {
        Err(_) => Ok(()),
        Ok(()) => Err(named("import", "a snapshot that is a byte short was taken".to_owned())),
    }
}

fn same_bits(a: &[f32], b: &[f32]) -> Result<(), String> {
    if a.len() != b.len() {
        return Err(format!("{} and {} values", a.len(), b.len()));
    }
    match a.iter().zip(b).position(|(a, b)| a.to_bits() != b.to_bits()) {
        Some(i) => Err(format!("element {i}: {:e} and {:e}", a[i], b[i])),
        None => Ok(()),
    }
}

/// Columns of a fused projection: parts at random places in rows with some padding. Returns the parts' first columns and the stride.
pub fn scatter<const N: usize>(n: &mut Noise, first: usize, widths: [usize; N]) -> ([usize; N], usize) {
    let mut at = first;
    let columns = widths.map(|w| {
        let column = at + n.between(0, 3);
        at = column + w;
        column
    });
    (columns, at + n.between(0, 3))
}

/// Copies `values` into a row at a column.
pub fn put(row: &mut [f32], column: usize, values: &[f32]) -> Range<usize> {
    let range = column..column + values.len();
    row[range.clone()].copy_from_slice(values);
    range
}
