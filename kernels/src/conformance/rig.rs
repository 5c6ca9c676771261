//! A backend under test: buffers in and out, comparison with the oracle, and the rules that hold for every op on rows.

use std::{fmt::Debug, ops::Range};

use super::tolerance::{BF16_MARGIN, Tolerance};
use crate::{Backend, BackendError, BatchDesc, Elem, Precision, reference::ReferenceBackend};

/// A backend with shorthand for the memory calls.
pub struct Rig<'a, B: Backend>(pub &'a B);

/// Text of a backend's error.
pub fn text(error: BackendError) -> String {
    error.to_string()
}

impl<B: Backend> Rig<'_, B> {
    /// A buffer with these values and some room behind them.
    pub fn floats(&self, values: &[f32]) -> Result<B::Buf, String> {
        let mut buf = self.0.alloc("input", Elem::F32, values.len() + 3).map_err(text)?;
        self.0.upload(values, &mut buf, 0);
        Ok(buf)
    }

    /// A buffer with these ids.
    pub fn ids(&self, values: &[i32]) -> Result<B::Buf, String> {
        let mut buf = self.0.alloc("ids", Elem::I32, values.len() + 3).map_err(text)?;
        self.0.upload_i32(values, &mut buf, 0);
        Ok(buf)
    }

    /// An output buffer, full of NaN so that what an op leaves unwritten shows.
    pub fn out(&self, len: usize) -> Result<B::Buf, String> {
        self.floats(&vec![f32::NAN; len])
    }

    /// An output buffer of ids, full of an id that nothing has.
    pub fn out_ids(&self, len: usize) -> Result<B::Buf, String> {
        self.ids(&vec![i32::MIN; len])
    }

    /// Reads numbers.
    pub fn read(&self, buf: &B::Buf, len: usize) -> Result<Vec<f32>, String> {
        let mut out = vec![0.0; len];
        self.0.download(buf, 0, &mut out).map_err(text)?;
        Ok(out)
    }

    /// Reads ids.
    pub fn read_ids(&self, buf: &B::Buf, len: usize) -> Result<Vec<i32>, String> {
        let mut out = vec![0; len];
        self.0.download_i32(buf, 0, &mut out).map_err(text)?;
        Ok(out)
    }

    /// A described step on the device.
    pub fn batch(&self, desc: &BatchDesc) -> Result<B::Batch, String> {
        let mut batch = self.0.batch(desc.tokens.len(), desc.segments.len(), desc.pages.len()).map_err(text)?;
        self.0.set_batch(desc, &mut batch);
        Ok(batch)
    }
}

/// One result of an op, `[rows, width]`.
#[derive(Clone, Debug)]
pub struct Output {
    /// Name, for messages.
    pub name: &'static str,
    /// Elements per row.
    pub width: usize,
    /// The values.
    pub values: Vec<f32>,
    /// What an element's error is judged against; empty: the largest value of its row, or of all rows where they are narrower than `NARROW`.
    pub scale: Vec<f32>,
}

impl Output {
    /// An output that is judged by its rows' largest values.
    pub fn new(name: &'static str, width: usize, values: Vec<f32>) -> Self {
        Self { name, width, values, scale: Vec::new() }
    }
}

/// The oracle: the reference ops in f64.
pub fn oracle() -> ReferenceBackend<f64> {
    ReferenceBackend::new(Precision::F32)
}

/// The oracle with the roundings that bf16 precision prescribes.
pub fn rounded_oracle() -> ReferenceBackend<f64> {
    ReferenceBackend::new(Precision::Bf16)
}

/// An op applied to rows that know nothing of each other.
pub trait RowCase: Debug + Clone {
    /// The bound in f32 arithmetic.
    const TOLERANCE: Tolerance;
    /// Rows of the case.
    fn rows(&self) -> usize;
    /// Makes the input of a row NaN.
    fn poison(&mut self, row: usize);
    /// Runs the op on some of the rows.
    ///
    /// # Errors
    /// What the backend said.
    fn run<B: Backend>(&self, rig: &Rig<'_, B>, rows: Range<usize>) -> Result<Vec<Output>, String>;
    /// Whether the outputs of all rows agree with the oracle's; `extra[i]` is allowed for output `i` on top of the tolerance.
    ///
    /// # Errors
    /// The worst element.
    fn agree(&self, got: &[Output], want: &[Output], extra: &[f64]) -> Result<(), String> {
        got.iter().zip(want).zip(extra).try_for_each(|((g, w), &e)| near(g, w, &Self::TOLERANCE, e))
    }
}

/// Most rows of a case that are run alone, each.
const SINGLES: usize = 33;

/// Checks a case: near the oracle; each row alone (of many, some) and any split gives the same bits; a NaN row leaves its neighbours alone.
///
/// # Errors
/// The first rule broken, with the case.
pub fn judge<B: Backend, C: RowCase>(backend: &B, case: &C) -> Result<(), String> {
    let rows = case.rows();
    let got = case.run(&Rig(backend), 0..rows)?;
    let want = case.run(&Rig(&oracle()), 0..rows)?;
    let extra: Vec<f64> = match backend.precision() {
        Precision::F32 => vec![0.0; want.len()],
        Precision::Bf16 => {
            let rounded = case.run(&Rig(&rounded_oracle()), 0..rows)?;
            rounded.iter().zip(&want).map(|(r, w)| BF16_MARGIN * largest_difference(&r.values, &w.values)).collect()
        }
    };
    case.agree(&got, &want, &extra).map_err(|e| format!("{e}\n  case: {case:?}"))?;

    // Of many rows some alone: each is a whole run of the op, with its weights.
    let mut parts: Vec<Range<usize>> = (0..rows).step_by(rows.div_ceil(SINGLES).max(1)).map(|r| r..r + 1).collect();
    parts.extend([0..rows / 2, rows / 2..rows]);
    for part in parts.into_iter().filter(|p| !p.is_empty()) {
        let alone = case.run(&Rig(backend), part.clone())?;
        same_bits(&got, &alone, &part, 0).map_err(|e| format!("rows {part:?} alone differ from {rows} together: {e}\n  case: {case:?}"))?;
    }

    if rows > 1 {
        let mut poisoned = case.clone();
        let row = rows / 2;
        poisoned.poison(row);
        let result = poisoned.run(&Rig(backend), 0..rows)?;
        for part in [0..row, row + 1..rows] {
            same_bits(&got, &result, &part, part.start)
                .map_err(|e| format!("a NaN in row {row} changed rows {part:?}: {e}\n  case: {case:?}"))?;
        }
    }
    Ok(())
}

/// Whether rows `part` of `whole` have the same bits as the rows of `other` from `first` on.
fn same_bits(whole: &[Output], other: &[Output], part: &Range<usize>, first: usize) -> Result<(), String> {
    for (w, o) in whole.iter().zip(other) {
        let wanted = &w.values[part.start * w.width..part.end * w.width];
        let got = &o.values[first * w.width..first * w.width + wanted.len()];
        if let Some(i) = wanted.iter().zip(got).position(|(a, b)| a.to_bits() != b.to_bits()) {
            return Err(format!("{}[{}]: {:e} and {:e}", w.name, part.start * w.width + i, wanted[i], got[i]));
        }
    }
    Ok(())
}

/// Rows of fewer columns may cancel to almost nothing as a whole: one sum of many terms is then all that there is, and its own size says nothing about
/// how well it was computed.
const NARROW: usize = 8;

/// Whether `got` is near `want`; `extra` is allowed on top of the tolerance, in absolute terms.
///
/// # Errors
/// The worst element.
pub fn near(got: &Output, want: &Output, tolerance: &Tolerance, extra: f64) -> Result<(), String> {
    if got.values.len() != want.values.len() {
        return Err(format!("{}: {} values, but {} are wanted", got.name, got.values.len(), want.values.len()));
    }
    let most = |values: &[f32]| f64::from(values.iter().fold(0.0f32, |m, v| m.max(v.abs())));
    let of_all = if want.width < NARROW { most(&want.values) } else { 0.0 };
    let mut worst = (0.0, String::new());
    for (row, (g, w)) in got.values.chunks(got.width).zip(want.values.chunks(want.width)).enumerate() {
        let largest = most(w).max(of_all);
        for (i, (&g, &w)) in g.iter().zip(w).enumerate() {
            let scale = want.scale.get(row * want.width + i).map_or(largest, |&s| f64::from(s));
            let allowed = tolerance.relative * scale + extra + f64::from(f32::MIN_POSITIVE);
            let share = (f64::from(g) - f64::from(w)).abs() / allowed;
            let share = if share.is_nan() { f64::INFINITY } else { share };
            if share > worst.0 {
                worst = (share, format!("{}[{row}, {i}] is {g:e}, oracle {w:e}, scale {scale:e}", got.name));
            }
        }
    }
    if worst.0 > 1.0 {
        return Err(format!("{}: {:.2} times {} ({:e})", worst.1, worst.0, tolerance.name, tolerance.relative));
    }
    Ok(())
}

/// max |a − b|.
pub fn largest_difference(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| (f64::from(a) - f64::from(b)).abs()).fold(0.0, f64::max)
}
