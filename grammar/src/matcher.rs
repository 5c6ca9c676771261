//! One sequence: its tokens in, the mask of its next token out.
//!
//! A grammar may hold from the beginning, or only behind a tag that ends the reasoning. Before the tag every token is allowed but those
//! that would run on behind it: what follows the tag must begin with a token of its own.

use std::sync::Arc;

use crate::vocabulary::{TokenTable, bytes};
use crate::{GrammarError, short};

/// The tokens that may come next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mask {
    /// Bit i of word i / 32: token i.
    pub words: Vec<u32>,
    /// The answer may end here; the bits of the vocabulary's end tokens are not set all the same.
    pub may_end: bool,
    /// Nothing but the end is possible.
    pub must_end: bool,
}

impl Mask {
    /// Whether token `id` is allowed.
    pub fn allows(&self, id: u32) -> bool {
        self.words.get(id as usize / 32).is_some_and(|word| word >> (id % 32) & 1 == 1)
    }

    /// Allows or forbids token `id`.
    pub fn set(&mut self, id: u32, allowed: bool) {
        if let Some(word) = self.words.get_mut(id as usize / 32) {
            *word = *word & !(1 << (id % 32)) | u32::from(allowed) << (id % 32);
        }
    }
}

/// Where the answer is.
#[derive(Clone)]
enum Phase {
    /// Before the tag; the answer so far ends in the first `seen` bytes of it.
    Free {
        tag: Vec<u8>,
        seen: usize,
        /// Tokens that hold the whole tag and more.
        across: Vec<u32>,
    },
    /// The grammar is in force.
    Held,
}

/// The state of one sequence.
pub struct Matcher {
    inner: llguidance::Matcher,
    table: Arc<TokenTable>,
    sorted: Arc<[u32]>,
    phase: Phase,
}

impl std::fmt::Debug for Matcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Matcher").field("held", &matches!(self.phase, Phase::Held)).finish_non_exhaustive()
    }
}

impl Matcher {
    pub(crate) fn new(inner: llguidance::Matcher, table: Arc<TokenTable>, sorted: Arc<[u32]>, after: &[u8]) -> Self {
        let phase = if after.is_empty() {
            Phase::Held
        } else {
            let across = |id: &u32| {
                let text = bytes(&table, *id);
                text.len() > after.len() && text[..text.len() - 1].windows(after.len()).any(|part| part == after)
            };
            Phase::Free { tag: after.to_vec(), seen: 0, across: sorted.iter().copied().filter(across).collect() }
        };
        Self { inner, table, sorted, phase }
    }

    /// Takes the token that was chosen.
    ///
    /// # Errors
    /// [`GrammarError::Left`]: it does not continue the answer. The sequence cannot go on.
    pub fn accept(&mut self, token: u32) -> Result<(), GrammarError> {
        match &mut self.phase {
            Phase::Held => self.inner.consume_token(token).map_err(|e| GrammarError::Left(short(&e))),
            Phase::Free { tag, seen, .. } => {
                if self.table.special.binary_search(&token).is_err() {
                    for &byte in bytes(&self.table, token) {
                        *seen = advance(tag, *seen, byte);
                        if *seen == tag.len() {
                            // The mask let no token run on behind the tag.
                            self.phase = Phase::Held;
                            break;
                        }
                    }
                }
                Ok(())
            }
        }
    }

    /// The tokens that may come next; `None`: all.
    ///
    /// # Errors
    /// [`GrammarError::Left`]: the grammar became too large to follow.
    pub fn mask(&mut self) -> Result<Option<Mask>, GrammarError> {
        match &self.phase {
            Phase::Free { tag, seen, across } => Ok(self.guard(&tag[*seen..], across)),
            Phase::Held => {
                let allowed = self.inner.compute_mask_or_eos().map_err(|e| GrammarError::Left(short(&e)))?;
                let words = self.table.ends.len().div_ceil(32);
                let mut mask = Mask { words: allowed.as_slice().to_vec(), may_end: false, must_end: false };
                mask.words.resize(words, 0);
                for &stop in &self.table.stops {
                    mask.may_end |= mask.allows(stop);
                    mask.set(stop, false);
                }
                mask.must_end = mask.words.iter().all(|&word| word == 0);
                Ok(Some(mask))
            }
        }
    }

    /// Forbids tokens that run on behind the tag, of which `rest` is still to come.
    fn guard(&self, rest: &[u8], across: &[u32]) -> Option<Mask> {
        let mut forbidden = across.to_vec();
        let from = self.sorted.partition_point(|&id| bytes(&self.table, id) < rest);
        let begin_so = self.sorted[from..].iter().take_while(|&&id| bytes(&self.table, id).starts_with(rest));
        forbidden.extend(begin_so.filter(|&&id| bytes(&self.table, id).len() > rest.len()));
        if forbidden.is_empty() {
            return None;
        }
        let size = self.table.ends.len();
        let mut mask = Mask { words: vec![u32::MAX; size.div_ceil(32)], may_end: true, must_end: false };
        for id in forbidden {
            mask.set(id, false);
        }
        Some(mask)
    }
}

/// How much of `tag` a text ends in that ended in its first `seen` bytes before `byte`.
fn advance(tag: &[u8], seen: usize, byte: u8) -> usize {
    let text = [&tag[..seen], &[byte]].concat();
    (0..=text.len()).rev().find(|&n| n <= tag.len() && text.ends_with(&tag[..n])).unwrap_or(0)
}
