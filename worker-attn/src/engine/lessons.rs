//! What the prefix cache learns while nobody waits: the answers that were just given, which the next turn of their conversations has in its
//! prompt.
//!
//! Neighbours: `engine/mod.rs` brings an answer when a request is finished and runs a lesson when it has nothing else to do; `room.rs` looks
//! up where it begins; `cache/` keeps the point at its end.
//!
//! A sequence's own state behind its answer would not do: a token that was decoded leaves other bits than the same token in a prompt, and
//! what is answered must not depend on the cache by a single bit. So a lesson computes the answer once more as a prompt, in whole chunks, from
//! the point at the end of the request's prompt on. That costs what the next turn would pay, at a time when nobody pays it; under load nothing is
//! learned and nothing is lost. The first request that arrives ends a lesson.

use std::collections::VecDeque;

/// Most answers that wait; the latest are learned first, the oldest forgotten.
const MOST: usize = 32;
/// Ids of lessons' sequences have this bit; those of requests do not.
const LESSON: u64 = 1 << 63;

/// Whether a sequence is a lesson.
pub fn is_lesson(id: u64) -> bool {
    id & LESSON != 0
}

/// Answers to be learned.
#[derive(Debug)]
pub struct Lessons {
    /// The cache's spacing of points; `None` without a cache.
    spacing: Option<usize>,
    /// Positions where a prompt can be cut.
    grid: usize,
    /// Prompt and answer, the latest last.
    waiting: VecDeque<Vec<u32>>,
    running: Option<u64>,
    begun: u64,
}

impl Lessons {
    /// None yet.
    pub fn new(spacing: Option<usize>, grid: usize) -> Self {
        Self { spacing, grid: grid.max(1), waiting: VecDeque::new(), running: None, begun: 0 }
    }

    /// A request is finished: `prompt` tokens of `tokens` were its prompt, the others its answer.
    pub fn add(&mut self, tokens: &[u32], prompt: usize) {
        let end = tokens.len() / self.grid * self.grid;
        // A point nearer to the prompt's end than points lie from each other would be of little use.
        if self.spacing.is_some_and(|spacing| end >= prompt / self.grid * self.grid + spacing.max(1)) {
            self.again(tokens[..end].to_vec());
        }
    }

    /// A lesson that was ended before its end.
    pub fn again(&mut self, tokens: Vec<u32>) {
        if self.waiting.len() == MOST {
            self.waiting.pop_front();
        }
        self.waiting.push_back(tokens);
    }

    /// The next lesson: the id of its sequence, and its tokens, all of which are to be computed and remembered.
    pub fn begin(&mut self) -> Option<(u64, Vec<u32>)> {
        let tokens = self.waiting.pop_back()?;
        self.begun += 1;
        let id = LESSON | self.begun;
        self.running = Some(id);
        Some((id, tokens))
    }

    /// Where points are to be made in a lesson of `tokens` tokens: at its end, and at those of the policy's `points` that are far from it.
    pub fn points(&self, mut points: Vec<usize>, tokens: usize) -> Vec<usize> {
        points.retain(|at| at + self.spacing.unwrap_or(0).max(1) <= tokens);
        points.push(tokens);
        points
    }

    /// The lesson that runs.
    pub fn running(&self) -> Option<u64> {
        self.running
    }

    /// A sequence has ended.
    pub fn ended(&mut self, id: u64) {
        if self.running == Some(id) {
            self.running = None;
        }
    }

    /// Those that wait are not learned.
    pub fn forget(&mut self) {
        self.waiting.clear();
    }

    /// Whether none waits.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_comes_first_and_short_answers_are_not_worth_it() {
        let mut lessons = Lessons::new(Some(64), 16);
        lessons.add(&[1; 100], 40);
        assert_eq!(lessons.waiting.pop_back().unwrap().len(), 96, "64 behind the last point of the prompt");
        lessons.add(&[1; 95], 40);
        assert!(lessons.is_empty());
        lessons.add(&[1; 115], 40);
        lessons.add(&[2; 300], 40);
        let (id, tokens) = lessons.begin().unwrap();
        assert_eq!((tokens.len(), tokens[0], is_lesson(id), lessons.running()), (288, 2, true, Some(id)));
        lessons.ended(id);
        assert_eq!((lessons.running(), lessons.begin().unwrap().1), (None, vec![1; 112]));
        for i in 0..100 {
            lessons.add(&[i; 200], 1);
        }
        assert_eq!((lessons.waiting.len(), lessons.waiting[0][0]), (MOST, 68));
        let mut without = Lessons::new(None, 16);
        without.add(&[1; 500], 1);
        assert!(without.is_empty());
    }
}
