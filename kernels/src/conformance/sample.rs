//! The sampler against the reference in f64: draws, cuts, penalties, log-probabilities, ranks, refusal of non-finite rows.

use super::{
    noise::Noise,
    rig::{Rig, text},
    tolerance::LOGPROB_TOL,
};
use crate::{Backend, SampleRow, Sampled, reference::sample::sample};

/// How far a draw or a cut may be from its edge before rounding can change the token.
const EDGE: f64 = 2e-5;

/// Checks some rows with random settings.
///
/// # Errors
/// The first disagreement.
pub fn judge<B: Backend>(backend: &B, seed: u64) -> Result<(), String> {
    let mut n = Noise::new(seed);
    // small vocabularies, so that penalties and biases meet tokens that matter
    let most = n.pick(&[12, 700]);
    let (vocab, count) = (n.between(2, most), n.between(1, 9));
    let coarse = n.coin();
    let mut logits = n.values(count * vocab, 0.0, 3.0);
    let shift = n.pick(&[0.0, -8.0]);
    logits.iter_mut().for_each(|v| *v += shift);
    if coarse {
        logits.iter_mut().for_each(|v| *v = (*v * 2.0).round() / 2.0); // many exact ties
    }
    match n.between(0, 5) {
        0 => logits[0] = f32::NAN,
        1 => logits[vocab - 1] = f32::INFINITY,
        2 => logits[0] = f32::NEG_INFINITY,
        _ => {}
    }
    let rows: Vec<SampleRow> = (0..count * 3).map(|_| settings(&mut n, count, vocab)).collect();
    let buffer = Rig(backend).floats(&logits)?;
    let got = backend.sample(&buffer, vocab, &rows).map_err(text)?;
    if got.len() != rows.len() {
        return Err(format!("{} rows sampled of {}", got.len(), rows.len()));
    }
    for (row, got) in rows.iter().zip(&got) {
        let at = row.row as usize * vocab;
        let wide: Vec<f64> = logits[at..at + vocab].iter().map(|&v| f64::from(v)).collect();
        agree(&wide, row, got).map_err(|e| format!("{e}\n  row: {row:?}\n  vocabulary of {vocab}, seed {seed}"))?;
    }
    Ok(())
}

fn settings(n: &mut Noise, count: usize, vocab: usize) -> SampleRow {
    let penalised = n.coin();
    let distinct = n.between(0, vocab.min(20));
    let seen = n.shuffled(vocab).into_iter().take(distinct).map(|id| (id, n.between(0, 3) as u32)).collect();
    let biased = n.between(0, vocab.min(5));
    let bias = n.shuffled(vocab).into_iter().take(biased).map(|id| (id, n.pick(&[f32::NEG_INFINITY, -2.0, 1.0, 4.0]))).collect();
    // words with few and with many tokens; one token at least
    let mut allowed: Vec<u32> = (0..vocab.div_ceil(32)).map(|_| n.pick(&[0, u32::MAX, 0x8421_0842])).collect();
    let sure = n.between(0, vocab - 1);
    allowed[sure / 32] |= 1 << (sure % 32);
    SampleRow {
        row: n.between(0, count - 1) as u32,
        temperature: n.pick(&[0.0, 0.0, 0.3, 1.0, 1.7]),
        top_k: n.pick(&[0, 0, 1, 5, 50, 100_000]),
        top_p: n.pick(&[1.0, 1.0, 0.9, 0.5, 0.01]),
        min_p: n.pick(&[0.0, 0.0, 0.02, 0.3]),
        repetition_penalty: if penalised { n.pick(&[1.0, 1.2, 2.0, 0.7]) } else { 1.0 },
        frequency_penalty: if penalised { n.pick(&[0.0, 0.4]) } else { 0.0 },
        presence_penalty: if penalised { n.pick(&[0.0, -0.7]) } else { 0.0 },
        seen: if penalised { seen } else { Vec::new() },
        bias: if n.coin() { bias } else { Vec::new() },
        allowed: (n.between(0, 2) == 0).then_some(allowed),
        uniform: n.unit(),
        forced: (n.between(0, 4) == 0).then(|| n.between(0, vocab - 1) as u32),
        logprobs: n.pick(&[None, Some(0), Some(1), Some(20), Some(100_000)]),
    }
}

fn agree(logits: &[f64], row: &SampleRow, got: &Sampled) -> Result<(), String> {
    let want = sample(logits, row);
    if got.finite != want.finite {
        return Err(format!("finite is {}, oracle {}", got.finite, want.finite));
    }
    if !want.finite {
        return Ok(());
    }
    // where nothing that is allowed has a finite logit left, there is no right answer
    let possible = |id: usize| row.allows(id) && logits[id] > f64::NEG_INFINITY && !row.bias.contains(&(id as u32, f32::NEG_INFINITY));
    if row.forced.is_none() && row.allowed.is_some() {
        if !(0..logits.len()).any(possible) {
            return Ok(());
        }
        if !possible(got.token as usize) {
            return Err(format!("token {} is not among those allowed", got.token));
        }
    }
    // where a nudge to a setting or to all logits changes the oracle's token, either answer is right
    let settled = nudged(row).iter().all(|r| sample(logits, r).token == want.token);
    let ranked_clearly = row.temperature > 0.0 || row.forced.is_some() || clear_winner(logits, row);
    if settled && ranked_clearly && got.token != want.token {
        return Err(format!("token {}, oracle {}", got.token, want.token));
    }
    if row.logprobs.is_none() {
        return Ok(());
    }
    let judged = sample(logits, &SampleRow { forced: Some(got.token), ..row.clone() });
    if got.rank != judged.rank {
        return Err(format!("rank {} of token {}, oracle {}", got.rank, got.token, judged.rank));
    }
    let near = |a: f32, b: f32| a == b || f64::from((a - b).abs()) <= LOGPROB_TOL.relative * (1.0 + f64::from(b.abs()));
    if !near(got.logprob, judged.logprob) {
        return Err(format!("logprob {:e}, oracle {:e}", got.logprob, judged.logprob));
    }
    let ids = |s: &Sampled| s.top.iter().map(|t| t.0).collect::<Vec<_>>();
    if ids(got) != ids(&judged) {
        return Err(format!("top {:?}, oracle {:?}", ids(got), ids(&judged)));
    }
    match got.top.iter().zip(&judged.top).find(|(a, b)| !near(a.1, b.1)) {
        Some((a, b)) => Err(format!("top logprob {a:?}, oracle {b:?}")),
        None => Ok(()),
    }
}

/// The settings with every edge moved a little.
fn nudged(row: &SampleRow) -> Vec<SampleRow> {
    let mut all = Vec::new();
    for side in [-EDGE, EDGE] {
        all.push(SampleRow { uniform: (row.uniform + side).clamp(0.0, 1.0 - f64::EPSILON), ..row.clone() });
        if row.top_p < 1.0 {
            let top_p = (f64::from(row.top_p) + side) as f32;
            all.push(SampleRow { top_p, ..row.clone() });
        }
        if row.min_p > 0.0 {
            let min_p = (f64::from(row.min_p) * (1.0 + side)) as f32;
            all.push(SampleRow { min_p, ..row.clone() });
        }
        // a token at the edge of top-k or of the greedy choice: logits that penalties made nearly equal
        let bias = |v: &(u32, f32)| (v.0, v.1 + side as f32);
        all.push(SampleRow { bias: row.bias.iter().map(bias).collect(), ..row.clone() });
        let repetition_penalty = (f64::from(row.repetition_penalty) * (1.0 + side)) as f32;
        all.push(SampleRow { repetition_penalty, ..row.clone() });
    }
    all
}

/// Whether greedy has a winner by more than rounding, or by exact equality of untouched logits.
fn clear_winner(logits: &[f64], row: &SampleRow) -> bool {
    let touched = !row.bias.is_empty() || !row.seen.is_empty() || row.allowed.is_some();
    let best = sample(logits, row).token;
    let second = sample(logits, &SampleRow { bias: [row.bias.clone(), vec![(best, f32::NEG_INFINITY)]].concat(), ..row.clone() }).token;
    !touched || second == best || (logits[best as usize] - logits[second as usize]).abs() > EDGE
}
