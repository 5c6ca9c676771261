//! Where points are worth their memory: a point of the published model takes 136 MiB, so there are few.
//!
//! Neighbours: `cache/mod.rs` asks once per admission; the scheduler ends prefill chunks at the answer.
//!
//! * Near the **end of the prompt**: the same prompt, or one that goes on from it, comes again (retries, samples, agents, chats). A few
//!   tokens before the end, since a chat template writes the last ones differently once the answer stands behind them.
//! * Where the prompt **leaves a remembered path**: two requests have shared what lies before, so a third may (system prompts, documents).
//! * Every so many tokens (`--prefix-cache-interval`), for a later request that leaves this one in the middle.

/// The tokens at a prompt's end that a chat template may write differently when the answer follows (`<|assistant|><think>` and the like).
pub const TEMPLATE_END: usize = 4;

/// What decides where points are made. All in tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Points lie at multiples of it: positions where cutting a prompt changes no bit.
    pub grid: usize,
    /// A point every so many tokens; 0 = none.
    pub interval: usize,
    /// Points are at least that far from each other and from the sequence's start.
    pub spacing: usize,
}

impl Policy {
    /// Positions, ascending, at which points are to be made while `tokens` tokens are prefilled: `computed` of them come from the cache,
    /// and `matched` of them lead along a remembered path.
    pub fn points(&self, tokens: usize, computed: usize, matched: usize) -> Vec<usize> {
        let down = |position: usize| position / self.grid.max(1) * self.grid.max(1);
        let end = tokens.saturating_sub(1 + TEMPLATE_END);
        let every = (1..).map_while(|i: usize| Some(self.interval.checked_mul(i)?).filter(|at| self.interval > 0 && *at < tokens));
        let mut chosen: Vec<usize> = Vec::new();
        // The most useful first: a later one that is too near is left out.
        for at in [down(end), down(matched.min(tokens.saturating_sub(1)))].into_iter().chain(every.map(down)) {
            let far = |other: usize| at.abs_diff(other) >= self.spacing.max(1);
            if at > computed && far(computed) && chosen.iter().all(|c| far(*c)) {
                chosen.push(at);
            }
        }
        chosen.sort_unstable();
        chosen
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLICY: Policy = Policy { grid: 16, interval: 1000, spacing: 64 };

    #[test]
    fn a_prompt_gets_its_end_where_it_branches_and_every_so_often() {
        assert_eq!(POLICY.points(200, 0, 0), [192]);
        assert_eq!(POLICY.points(197, 0, 0), [192]);
        assert_eq!(POLICY.points(196, 0, 0), [176], "the last tokens belong to the template");
        assert_eq!(POLICY.points(200, 0, 110), [96, 192]);
        assert_eq!(POLICY.points(2100, 0, 0), [992, 2000, 2080]);
    }

    #[test]
    fn near_points_are_left_out() {
        assert_eq!(POLICY.points(60, 0, 0), [] as [usize; 0], "too short to be worth one");
        assert_eq!(POLICY.points(200, 176, 180), [] as [usize; 0], "the cache has as good a point already");
        assert_eq!(POLICY.points(300, 176, 200), [288], "a branch right behind the point that was used");
        assert_eq!(POLICY.points(200, 0, 200), [192], "the same prompt again: one point serves both");
    }

    #[test]
    fn the_interval_can_be_off_and_positions_stay_inside() {
        let off = Policy { interval: 0, ..POLICY };
        assert_eq!(off.points(100_000, 0, 0), [99_984]);
        for tokens in 0..400 {
            for matched in [0, 63, 64, 65, tokens] {
                for at in (Policy { grid: 7, interval: 50, spacing: 1 }).points(tokens, 0, matched.min(tokens)) {
                    assert!(at % 7 == 0 && at > 0 && at < tokens, "{at} of {tokens}");
                }
            }
        }
    }
}
