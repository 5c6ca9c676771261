//! The prefix cache: a sequence whose first tokens were computed before goes on from there.
//!
//! | file | idea |
//! |---|---|
//! | [`tree`] | which prefixes are remembered, and which pages they need |
//! | [`policy`] | at which positions a point is made |
//! | this file | [`PrefixCache`]: points and pages under their budgets, looked up and stored by the engine |
//!
//! Neighbours: `engine/` looks up at admission and stores at chunk ends; `state/` owns slots and pages; `scheduler.rs` cuts chunks at the
//! points to come.
//!
//! All four kinds of state are covered. Latent rows and pooled index keys lie in pages, which the cache shares by reference count with
//! whoever runs over them. The KDA matrices, the convolution taps and the raw tail of the indexer exist for the newest token only, so a
//! *point* keeps a copy of them in host memory (with the last page, where it is partly filled). A sequence restores the deepest point that
//! its tokens pass and computes the rest.
//!
//! **The answer is the same bit for bit.** Points are made during prefill alone, at positions where a prompt can be cut without changing
//! a bit ([`Policy::grid`]), so what a point holds is a function of the tokens before it, whoever computed it, in whatever company. Nothing
//! enters before its rows were seen to be finite. A request that wants its prompt's logprobs needs every row, and reads nothing here.
//!
//! **Budgets.** Copies in host memory have one of their own ([`CacheOptions::bytes`]). Pages have none: they are those that no sequence
//! needs now, and are given up as soon as one does ([`PrefixCache::make_room`]). The point that was used longest ago goes first.

pub mod policy;
pub mod tree;

use std::sync::Arc;

use tandem_kernels::Backend;

use self::{
    policy::Policy,
    tree::{PointId, Tree},
};
use crate::{
    state::{SeqState, Snapshot, StateError, StatePool},
    telemetry,
};

/// How much is kept, and at which spacing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheOptions {
    /// Host memory for the copies of points, in bytes.
    pub bytes: u64,
    /// A point every so many tokens of a prompt, beside those at its end and where it branches; 0 = none.
    pub interval: usize,
    /// Tokens between points, and before the first: shorter prefixes are computed again.
    pub spacing: usize,
}

impl Default for CacheOptions {
    fn default() -> Self {
        Self { bytes: 2 << 30, interval: 4096, spacing: 64 }
    }
}

/// What a lookup gave: the state to go on from, held until it is taken or given back.
#[derive(Debug)]
pub struct Lease {
    snapshot: Arc<Snapshot>,
    /// Full pages, of which the lease is an owner.
    pages: Vec<u32>,
    point: PointId,
}

impl Lease {
    /// Tokens whose state it is.
    pub fn tokens(&self) -> usize {
        self.snapshot.tokens()
    }
}

/// The answer to a lookup.
#[derive(Debug, Default)]
pub struct LookUp {
    /// The state to go on from, if there is one.
    pub lease: Option<Lease>,
    /// Where points are to be made, ascending, behind it.
    pub points: Vec<usize>,
}

/// Remembered prefixes of one worker's model.
#[derive(Debug)]
pub struct PrefixCache {
    bytes: u64,
    used: u64,
    policy: Policy,
    tree: Tree<Arc<Snapshot>>,
    /// A point alone is larger than the budget: said once, and not tried again.
    too_small: bool,
}

impl PrefixCache {
    /// An empty cache over pages of `page_tokens` tokens; `grid`: where prompts can be cut without changing a bit.
    pub fn new(options: CacheOptions, page_tokens: usize, grid: usize) -> Self {
        let policy = Policy { grid, interval: options.interval, spacing: options.spacing };
        Self { bytes: options.bytes, used: 0, policy, tree: Tree::new(page_tokens), too_small: false }
    }

    /// Points kept, bytes of host memory that they take.
    pub fn size(&self) -> (usize, u64) {
        (self.tree.len(), self.used)
    }

    /// Pages that only the cache holds: free as soon as a sequence needs them.
    pub fn spare_pages<B: Backend>(&self, pool: &StatePool<B>) -> usize {
        self.tree.pages().filter(|page| !pool.is_shared(*page)).count()
    }

    /// What `tokens` can go on from; at least one of them is left to compute, whose logits somebody wants.
    pub fn look_up<B: Backend>(&self, pool: &mut StatePool<B>, tokens: &[u32]) -> LookUp {
        let found = self.tree.find(tokens, tokens.len().saturating_sub(1));
        let lease = found.point.and_then(|(point, _)| {
            let snapshot = Arc::clone(self.tree.saved(point)?);
            pool.share_pages(&found.pages);
            Some(Lease { snapshot, pages: found.pages, point })
        });
        let computed = lease.as_ref().map_or(0, Lease::tokens);
        let points = if self.too_small { Vec::new() } else { self.policy.points(tokens.len(), computed, found.matched) };
        LookUp { lease, points }
    }

    /// Whether there is a point behind `tokens`.
    pub fn knows(&self, tokens: &[u32]) -> bool {
        self.tree.find(tokens, tokens.len()).point.is_some_and(|(_, position)| position == tokens.len())
    }

    /// A lease that is not taken.
    pub fn give_back<B: Backend>(pool: &mut StatePool<B>, lease: Lease) {
        pool.release_pages(&lease.pages);
    }

    /// Makes a sequence's state out of a lease.
    ///
    /// # Errors
    /// No slot, no page for a partly filled one, or the device failed. The lease is given back either way.
    pub fn take<B: Backend>(&mut self, pool: &mut StatePool<B>, lease: Lease) -> Result<SeqState, StateError> {
        self.tree.touch(lease.point);
        self.make_room(pool, lease.snapshot.pages());
        let state = pool.resume(&lease.snapshot, &lease.pages);
        Self::give_back(pool, lease);
        state
    }

    /// Makes a point of `state`, which holds `tokens`, all of them prefilled and finite.
    ///
    /// # Errors
    /// The device failed to copy.
    pub fn store<B: Backend>(&mut self, pool: &mut StatePool<B>, tokens: &[u32], state: &SeqState) -> Result<(), StateError> {
        if let Some((point, _)) = self.tree.find(tokens, tokens.len()).point.filter(|(_, position)| *position == tokens.len()) {
            // Somebody with the same prompt was faster.
            self.tree.touch(point);
            return Ok(());
        }
        let snapshot = pool.save_end(state)?;
        let bytes = snapshot.len() as u64;
        if bytes > self.bytes {
            if !std::mem::replace(&mut self.too_small, true) {
                tracing::warn!(
                    point_bytes = bytes,
                    budget = self.bytes,
                    "the prefix cache keeps nothing: one point takes more than its budget (--prefix-cache-bytes)"
                );
            }
            return Ok(());
        }
        while self.used + bytes > self.bytes {
            let Some(oldest) = self.tree.oldest().next() else { break };
            self.evict(pool, oldest, "budget");
        }
        let full = pool.full_pages(tokens.len()).min(state.pages().len());
        let taken = self.tree.insert(tokens, &state.pages()[..full], Arc::new(snapshot));
        pool.share_pages(&taken);
        self.used += bytes;
        Ok(())
    }

    /// Gives up points until `pages` pages are free, or nothing is left to give up.
    pub fn make_room<B: Backend>(&mut self, pool: &mut StatePool<B>, pages: usize) {
        while pool.free_pages() < pages {
            // The oldest one that frees a page at once; where points share their pages only with each other, the oldest of all.
            let frees = |point: &PointId| self.tree.only_for(*point).into_iter().any(|page| !pool.is_shared(page));
            let Some(point) = self.tree.oldest().find(frees).or_else(|| self.tree.oldest().next()) else { return };
            self.evict(pool, point, "pages");
        }
    }

    fn evict<B: Backend>(&mut self, pool: &mut StatePool<B>, point: PointId, reason: &'static str) {
        if let Some((snapshot, pages)) = self.tree.remove(point) {
            self.used -= snapshot.len() as u64;
            pool.release_pages(&pages);
            telemetry::evicted(reason);
        }
    }
}
