//! From a request's sampling parameters to the backend's [`SampleRow`]s.
//!
//! Neighbours: `rng.rs` (the random numbers), `engine/` (asks for one row per sequence and step), the backend's `sample` op (the maths).
//!
//! Everything here depends on the request and on the tokens so far alone: neither on the batch nor on earlier steps, so that a
//! preempted or resumed sequence draws the same tokens.

use tandem_kernels::SampleRow;

use crate::rng;

/// How a request wants its tokens chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplingParams {
    /// 0 = greedy.
    pub temperature: f32,
    /// 0 = off.
    pub top_k: u32,
    /// 1 = off.
    pub top_p: f32,
    /// 0 = off.
    pub min_p: f32,
    /// 1 = off.
    pub repetition_penalty: f32,
    /// 0 = off.
    pub frequency_penalty: f32,
    /// 0 = off.
    pub presence_penalty: f32,
    /// Seed of the request.
    pub seed: u64,
    /// Which of the request's n choices this is.
    pub choice: u32,
    /// Added to logits.
    pub logit_bias: Vec<(u32, f32)>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            seed: 0,
            choice: 0,
            logit_bias: Vec::new(),
        }
    }
}

impl SamplingParams {
    /// Whether every value is one that sampling can be done with.
    ///
    /// # Errors
    /// The first field that is not, with what would work.
    pub fn validate(&self, vocab: usize) -> Result<(), String> {
        let within = |name: &str, value: f32, ok: bool, needed: &str| {
            if ok && value.is_finite() { Ok(()) } else { Err(format!("{name}: needed {needed}, got {value}")) }
        };
        within("temperature", self.temperature, self.temperature >= 0.0, "a number of at least 0")?;
        within("top_p", self.top_p, self.top_p > 0.0 && self.top_p <= 1.0, "a number above 0 and up to 1")?;
        within("min_p", self.min_p, (0.0..=1.0).contains(&self.min_p), "a number from 0 to 1")?;
        within("repetition_penalty", self.repetition_penalty, self.repetition_penalty > 0.0, "a number above 0")?;
        within("frequency_penalty", self.frequency_penalty, true, "a finite number")?;
        within("presence_penalty", self.presence_penalty, true, "a finite number")?;
        for &(token, bias) in &self.logit_bias {
            if token as usize >= vocab {
                return Err(format!("logit_bias: needed token ids below {vocab}, got {token}"));
            }
            if bias.is_nan() || bias == f32::INFINITY {
                return Err(format!("logit_bias of token {token}: needed a number below infinity, got {bias}"));
            }
        }
        Ok(())
    }

    fn penalises(&self) -> bool {
        self.repetition_penalty != 1.0 || self.frequency_penalty != 0.0 || self.presence_penalty != 0.0
    }

    /// The row that samples the `index`-th generated token (0-based). Stop ids in `banned` cannot be chosen.
    pub fn row(&self, row: u32, index: u64, seen: &Seen, banned: &[u32], logprobs: Option<u32>) -> SampleRow {
        let mut bias = self.logit_bias.clone();
        bias.extend(banned.iter().map(|id| (*id, f32::NEG_INFINITY)));
        SampleRow {
            row,
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
            frequency_penalty: self.frequency_penalty,
            presence_penalty: self.presence_penalty,
            seen: seen.counts.clone(),
            bias,
            allowed: None,
            uniform: rng::uniform(self.seed, self.choice, index),
            forced: None,
            logprobs,
        }
    }
}

/// A row that reports the log-probability of a token that is already there (prompt logprobs, teacher forcing).
pub fn forced_row(row: u32, token: u32, top: u32) -> SampleRow {
    let plain = SamplingParams::default().row(row, 0, &Seen::default(), &[], Some(top));
    SampleRow { forced: Some(token), uniform: 0.0, ..plain }
}

/// The distinct tokens of a sequence, with their counts in the output: what penalties look at. Kept only where a penalty is on.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Seen {
    /// Ascending by id; count 0 = in the prompt only.
    counts: Vec<(u32, u32)>,
    on: bool,
}

impl Seen {
    /// The tokens of a prompt and of what was generated after it.
    pub fn new(params: &SamplingParams, prompt: &[u32], generated: &[u32]) -> Self {
        let mut seen = Self { counts: Vec::new(), on: params.penalises() };
        if seen.on {
            seen.counts = prompt.iter().map(|id| (*id, 0)).collect();
            seen.counts.sort_unstable();
            seen.counts.dedup();
            for &id in generated {
                seen.push(id);
            }
        }
        seen
    }

    /// Counts a generated token.
    pub fn push(&mut self, id: u32) {
        if self.on {
            match self.counts.binary_search_by_key(&id, |c| c.0) {
                Ok(at) => self.counts[at].1 += 1,
                Err(at) => self.counts.insert(at, (id, 1)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seen_counts_output_only_and_resuming_equals_going_on() {
        let params = SamplingParams { presence_penalty: 0.5, ..SamplingParams::default() };
        let mut seen = Seen::new(&params, &[5, 3, 5], &[]);
        assert_eq!(seen.counts, [(3, 0), (5, 0)]);
        for id in [5, 9, 9] {
            seen.push(id);
        }
        assert_eq!(seen.counts, [(3, 0), (5, 1), (9, 2)]);
        assert_eq!(seen, Seen::new(&params, &[5, 3, 5], &[5, 9, 9]));
    }

    #[test]
    fn nothing_is_counted_without_penalties() {
        let params = SamplingParams::default();
        let mut seen = Seen::new(&params, &[1, 2], &[3]);
        seen.push(4);
        assert!(params.row(0, 0, &seen, &[], None).seen.is_empty());
    }

    #[test]
    fn the_random_number_depends_on_seed_choice_and_index_alone() {
        let params = SamplingParams { temperature: 1.0, seed: 7, ..SamplingParams::default() };
        let other = SamplingParams { top_k: 3, ..params.clone() };
        let uniform = |p: &SamplingParams, row, index| p.row(row, index, &Seen::default(), &[], None).uniform;
        assert_eq!(uniform(&params, 0, 4), uniform(&other, 9, 4));
        assert_ne!(uniform(&params, 0, 4), uniform(&params, 0, 5));
    }

    #[test]
    fn banned_ids_and_forced_tokens_reach_the_row() {
        let params = SamplingParams { logit_bias: vec![(1, 2.0)], ..SamplingParams::default() };
        assert_eq!(params.row(0, 0, &Seen::default(), &[8], Some(0)).bias, [(1, 2.0), (8, f32::NEG_INFINITY)]);
        let forced = forced_row(3, 17, 5);
        assert_eq!((forced.row, forced.forced, forced.logprobs, forced.temperature), (3, Some(17), Some(5), 0.0));
    }

    #[test]
    fn impossible_values_are_named() {
        let bad = SamplingParams { top_p: 0.0, ..SamplingParams::default() };
        assert_eq!(bad.validate(10).unwrap_err(), "top_p: needed a number above 0 and up to 1, got 0");
        let bad = SamplingParams { logit_bias: vec![(10, 0.0)], ..SamplingParams::default() };
        assert!(bad.validate(10).unwrap_err().contains("below 10, got 10"));
        let bad = SamplingParams { temperature: f32::NAN, ..SamplingParams::default() };
        assert!(bad.validate(10).is_err());
        let ban = SamplingParams { logit_bias: vec![(3, f32::NEG_INFINITY)], ..SamplingParams::default() };
        assert!(ban.validate(10).is_ok());
    }
}
