//! Sampling of rows of logits. The meaning is `reference/sample.rs`; here nothing is sorted that need not be.
//!
//! Greedy rows take one pass. A draw without cuts sums probabilities block by block and walks one block. Cuts look at the best 256
//! tokens and grow from there.

use super::{
    isa::{CheckedIsa, Kernel},
    simd::Simd,
};
use crate::{SampleRow, Sampled};

/// Tokens whose probabilities are summed together in a draw.
const BLOCK: usize = 1024;
/// Candidates that cuts look at first.
const CANDIDATES: usize = 256;

/// Scratch of a row in work.
#[derive(Default)]
pub(super) struct SampleScratch {
    adjusted: Vec<f32>,
    /// (descending logit, ascending id) as one integer.
    keys: Vec<u64>,
    ids: Vec<u32>,
}

/// Largest value, and whether all are finite or −∞.
struct Scan<'a>(&'a [f32]);

impl Kernel for Scan<'_> {
    type Out = (f32, bool);

    #[inline(always)]
    fn run<S: Simd>(self, _s: S) -> (f32, bool) {
        let mut top = [f32::NEG_INFINITY; 16];
        let mut fine = [true; 16];
        let (chunks, rest) = self.0.as_chunks::<16>();
        for c in chunks {
            for i in 0..16 {
                top[i] = if c[i] > top[i] { c[i] } else { top[i] };
                // False for NaN and +∞.
                fine[i] &= c[i] < f32::INFINITY;
            }
        }
        let mut best = top.into_iter().fold(f32::NEG_INFINITY, f32::max);
        let mut finite = fine.into_iter().all(|f| f);
        for &v in rest {
            best = best.max(v);
            finite &= v < f32::INFINITY;
        }
        (best, finite)
    }
}

/// Σ e^((x − top)·scale), f32 lanes in blocks, f64 between them.
struct ExpSum<'a> {
    x: &'a [f32],
    top: f32,
    scale: f32,
}

impl Kernel for ExpSum<'_> {
    type Out = f64;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> f64 {
        let (top, scale) = (s.splat(self.top), s.splat(self.scale));
        let mut total = 0.0f64;
        for block in self.x.chunks(BLOCK) {
            let mut acc = s.zero();
            let mut chunks = block.chunks_exact(S::LANES);
            for c in &mut chunks {
                acc = s.add(acc, s.exp(s.mul(s.sub(s.ld(c), top), scale)));
            }
            total += f64::from(s.sum(acc));
            for v in chunks.remainder() {
                total += f64::from(((v - self.top) * self.scale).exp());
            }
        }
        total
    }
}

/// How many are larger than `than`.
struct Larger<'a>(&'a [f32], f32);

impl Kernel for Larger<'_> {
    type Out = usize;

    #[inline(always)]
    fn run<S: Simd>(self, _s: S) -> usize {
        self.0.chunks(1 << 16).map(|c| c.iter().map(|&v| u32::from(v > self.1)).sum::<u32>() as usize).sum()
    }
}

/// Samples (or, with `forced`, judges) one row.
pub(super) fn sample(isa: CheckedIsa, logits: &[f32], row: &SampleRow, scratch: &mut SampleScratch) -> Sampled {
    let (top, finite) = isa.run(Scan(logits));
    let token = match row.forced {
        Some(token) => token as usize,
        None if !finite => 0,
        None => choose(isa, logits, top, row, scratch),
    };
    let log_sum = top + isa.run(ExpSum { x: logits, top, scale: 1.0 }).ln() as f32;
    let best = best_first(logits, row.logprobs.unwrap_or(0) as usize, &mut scratch.keys);
    Sampled {
        token: token as u32,
        logprob: logits[token] - log_sum,
        rank: 1 + isa.run(Larger(logits, logits[token])) as u32,
        top: best.iter().map(|&k| (k as u32, logits[k as u32 as usize] - log_sum)).collect(),
        finite,
    }
}

/// The token at which the row's rules arrive.
fn choose(isa: CheckedIsa, logits: &[f32], top: f32, row: &SampleRow, scratch: &mut SampleScratch) -> usize {
    let SampleScratch { adjusted, keys, ids } = scratch;
    let (logits, top) = if row.bias.is_empty() && row.seen.is_empty() && row.allowed.is_none() {
        (logits, top)
    } else {
        adjust(logits, row, adjusted);
        (&adjusted[..], isa.run(Scan(adjusted)).0)
    };
    let greedy = logits.iter().position(|&v| v == top).unwrap_or(0);
    if row.temperature <= 0.0 {
        return greedy;
    }
    let p = |id: usize| f64::from((logits[id] - top) / row.temperature).exp();
    let drawn = if row.top_k == 0 && row.top_p >= 1.0 && row.min_p <= 0.0 {
        draw_any(isa, logits, top, row, p)
    } else {
        keep(isa, logits, top, row, p, keys, ids);
        let target = row.uniform * ids.iter().map(|&id| p(id as usize)).sum::<f64>();
        walk(ids.iter().map(|&id| id as usize), 0.0, target, p)
    };
    drawn.unwrap_or(greedy)
}

/// Logits after mask, bias and penalties.
fn adjust(logits: &[f32], row: &SampleRow, out: &mut Vec<f32>) {
    out.clear();
    out.extend_from_slice(logits);
    if let Some(words) = &row.allowed {
        let bits = words.iter().flat_map(|word| (0..32).map(move |bit| word >> bit & 1)).chain(std::iter::repeat(0));
        for (v, bit) in out.iter_mut().zip(bits) {
            if bit == 0 {
                *v = f32::NEG_INFINITY;
            }
        }
    }
    for &(id, bias) in &row.bias {
        out[id as usize] += bias;
    }
    for &(id, count) in &row.seen {
        let v = &mut out[id as usize];
        *v = if *v > 0.0 { *v / row.repetition_penalty } else { *v * row.repetition_penalty };
        *v -= row.frequency_penalty * count as f32;
        *v -= row.presence_penalty * if count > 0 { 1.0 } else { 0.0 };
    }
}

/// The first id at which the running sum exceeds the target.
fn walk(ids: impl Iterator<Item = usize>, mut sum: f64, target: f64, p: impl Fn(usize) -> f64) -> Option<usize> {
    for id in ids {
        let p = p(id);
        sum += p;
        if p > 0.0 && sum > target {
            return Some(id);
        }
    }
    None
}

/// A draw from the whole vocabulary: block sums first, then a walk through the block that holds the target.
fn draw_any(isa: CheckedIsa, logits: &[f32], top: f32, row: &SampleRow, p: impl Fn(usize) -> f64 + Copy) -> Option<usize> {
    let scale = row.temperature.recip();
    let block_sum = |block: &[f32]| isa.run(ExpSum { x: block, top, scale });
    let target = row.uniform * logits.chunks(BLOCK).map(block_sum).sum::<f64>();
    let mut sum = 0.0;
    for (i, block) in logits.chunks(BLOCK).enumerate() {
        let more = block_sum(block);
        if sum + more > target
            && let Some(id) = walk(i * BLOCK..i * BLOCK + block.len(), sum, target, p)
        {
            return Some(id);
        }
        sum += more;
    }
    // Rounding put the target at the very end: the last token that can be drawn.
    (0..logits.len()).rev().find(|&id| p(id) > 0.0)
}

/// Leaves in `ids`, ascending, what top-k, top-p and min-p keep. The best token always stays.
fn keep(isa: CheckedIsa, logits: &[f32], top: f32, row: &SampleRow, p: impl Fn(usize) -> f64, keys: &mut Vec<u64>, ids: &mut Vec<u32>) {
    let n = logits.len();
    let k = if row.top_k == 0 { n } else { (row.top_k as usize).min(n) };
    let mut look = if row.top_k == 0 { CANDIDATES.min(n) } else { k };
    let mut mass = None;
    loop {
        let best = best_first(logits, look, keys);
        // With top-k, p runs over what it left; without, over everything.
        let mass = *mass.get_or_insert_with(|| {
            if row.top_p >= 1.0 {
                f64::INFINITY
            } else if row.top_k == 0 {
                isa.run(ExpSum { x: logits, top, scale: row.temperature.recip() })
            } else {
                best.iter().map(|&key| p(key as u32 as usize)).sum()
            }
        });
        ids.clear();
        let (mut before, mut cut) = (0.0, false);
        for &key in best {
            let id = key as u32;
            let p = p(id as usize);
            if !ids.is_empty() && ((row.top_p < 1.0 && before >= f64::from(row.top_p) * mass) || p < f64::from(row.min_p)) {
                cut = true;
                break;
            }
            ids.push(id);
            before += p;
        }
        if cut || look >= k {
            ids.sort_unstable();
            return;
        }
        look = (look * 8).min(k);
    }
}

/// Keys of the `n` best logits, best first, ties by lowest id: the id is the low half.
fn best_first<'a>(logits: &[f32], n: usize, keys: &'a mut Vec<u64>) -> &'a [u64] {
    let n = n.min(logits.len());
    keys.clear();
    if n == 0 {
        return keys;
    }
    keys.extend(logits.iter().enumerate().map(|(id, &v)| {
        let v = if v.is_nan() { f32::NEG_INFINITY } else { v + 0.0 };
        let bits = v.to_bits();
        let descending = if bits >> 31 == 1 { bits } else { !bits & 0x7fff_ffff };
        u64::from(descending) << 32 | id as u64
    }));
    if n < keys.len() {
        keys.select_nth_unstable(n - 1);
        keys.truncate(n);
    }
    keys.sort_unstable();
    keys
}
