//! Who gets state, where it comes from, and who gives it up: the part of the engine that knows pages, the prefix cache and parked copies.
//!
//! Neighbours: `engine/mod.rs` calls it around each plan, `scheduler.rs` decides, `cache/` and `parking.rs` remember.

use std::{collections::HashMap, time::Instant};

use tandem_kernels::{Backend, cpu::LatentType};
use tandem_proto::attn::v1::{ErrorCode, Event};

use super::{Engine, events, lessons::is_lesson, parking::copy_bytes};
use crate::{
    cache::{Lease, LookUp, PrefixCache},
    hop::Hop,
    model::Runner,
    scheduler::{Plan, Start},
    state::{SeqState, StateError},
    telemetry,
};

impl<B: Backend, H: Hop<B>> Engine<B, H> {
    /// Token places that sequences use, in all. Those that only the prefix cache holds are as good as free.
    pub fn kv_tokens(&mut self) -> (usize, usize) {
        let pool = self.runner.pool();
        let spare = self.cache.as_ref().map_or(0, |cache| cache.spare_pages(pool)) * pool.spec().page_tokens;
        (pool.used_tokens() - spare, pool.total_tokens())
    }

    /// Host memory of the copies of sequences that made room, in bytes.
    pub fn parked_bytes(&self) -> u64 {
        self.parking.used()
    }

    /// The prefix cache.
    pub fn cache(&self) -> Option<&PrefixCache> {
        self.cache.as_ref()
    }

    /// Tells the metrics what lies in host memory: remembered prefixes, copies of sequences that made room.
    pub fn publish_memory(&mut self) {
        if let Some(cache) = &self.cache {
            let (points, bytes) = cache.size();
            let pool = self.runner.pool();
            telemetry::cached(points, bytes, cache.spare_pages(pool) * pool.spec().page_tokens);
        }
        telemetry::parked(self.parking.used());
    }

    /// Decides the step. What the cache has for those that join is held from here on.
    pub(super) fn plan(&mut self) -> (Plan, HashMap<u64, Lease>) {
        let Self { runner, scheduler, sequences, cache, lessons, .. } = self;
        let mut leases = HashMap::new();
        let plan = scheduler.plan(|id| {
            let Some(s) = sequences.get(&id).filter(|s| s.may_use_cache()) else { return Start::default() };
            if let Some(copy) = &s.parked {
                return Start { computed: copy.tokens(), points: Vec::new() };
            }
            let Some(cache) = cache.as_ref() else { return Start::default() };
            // What it generated itself is computed as it was then, whatever else the cache knows of it.
            let LookUp { lease, mut points } = cache.look_up(runner.pool(), &s.tokens[..s.request.prompt.len()]);
            if is_lesson(id) {
                points = lessons.points(points, s.tokens.len());
            }
            let lease = if s.request.prompt_logprobs.is_none() { lease } else { give_back(runner, lease) };
            let computed = lease.as_ref().map_or(0, Lease::tokens);
            leases.extend(lease.map(|lease| (id, lease)));
            Start { computed, points }
        });
        for id in leases.keys().copied().filter(|id| !plan.admitted.contains(id)).collect::<Vec<_>>() {
            give_back(runner, leases.remove(&id));
        }
        (plan, leases)
    }

    /// Takes a sequence's state away; a copy is kept where that is the better way.
    pub(super) fn make_room(&mut self, id: u64) {
        let Self { runner, sequences, parking, .. } = self;
        let Some((s, state)) = sequences.get_mut(&id).and_then(|s| s.state.take().map(|state| (s, state))) else { return };
        // As the precision has it: a guess where the cache was told to store something else.
        let latents = LatentType::of(runner.model().backend().precision());
        let pool = runner.pool();
        let bytes = copy_bytes(pool.spec(), pool.pages_for(state.tokens()), latents);
        if state.tokens() > 0 && s.may_use_cache() && parking.prefers_copy(bytes, state.tokens()) {
            let timer = Instant::now();
            match pool.snapshot(&state) {
                Ok(copy) => {
                    parking.copied(timer.elapsed(), copy.len());
                    s.parked = parking.park(copy.len()).then_some(copy);
                    telemetry::snapshots(usize::from(s.parked.is_some()));
                }
                Err(e) => tracing::warn!(error = %e, request = id, "no copy of a sequence that makes room; it is computed again"),
            }
        }
        pool.free(state);
    }

    /// Gives a sequence that joins its state. One that follows another gets a copy of it later ([`Engine::fork`]).
    pub(super) fn admit(&mut self, id: u64, lease: Option<Lease>, out: &mut Vec<Event>) {
        if let Some(leader) = self.scheduler.leader_of(id) {
            let cached = self.sequences.get(&leader).and_then(|s| s.cached);
            if let Some(s) = self.sequences.get_mut(&id) {
                s.cached = cached;
                out.push(events::started(id, cached));
            }
            return;
        }
        let Some(s) = self.sequences.get_mut(&id) else { return };
        let cached = lease.as_ref().map_or(0, Lease::tokens);
        let parked = s.parked.take();
        let asked = self.cache.is_some() && s.may_use_cache() && s.request.prompt_logprobs.is_none() && parked.is_none();
        if asked && !is_lesson(id) {
            telemetry::looked_up(s.request.prompt.len(), cached);
        }
        s.cached = asked.then_some(cached);
        let pool = self.runner.pool();
        let state = match (parked, lease, &mut self.cache) {
            (Some(copy), _, cache) => {
                self.parking.unpark(copy.len());
                if let Some(cache) = cache {
                    cache.make_room(pool, copy.pages());
                }
                pool.restore(&copy)
            }
            (None, Some(lease), Some(cache)) => cache.take(pool, lease),
            _ => pool.create(),
        };
        match state {
            Ok(state) => {
                s.state = Some(state);
                // Said again after a preemption: the coordinator counts those.
                out.push(events::started(id, s.cached));
            }
            Err(e) => {
                out.push(events::error(id, ErrorCode::Internal, e.to_string()));
                self.end(id, "error");
            }
        }
    }

    /// Gives a follower a copy of its leader's state; `false` where it has to compute its prompt itself.
    pub(super) fn fork(&mut self, follower: u64, leader: u64) -> bool {
        let Self { runner, scheduler, sequences, cache, .. } = self;
        let pool = runner.pool();
        if let Some(cache) = cache {
            // A partly filled page is copied.
            cache.make_room(pool, 1);
        }
        let copy = sequences.get(&leader).and_then(|s| s.state.as_ref()).and_then(|state| pool.fork(state).ok());
        if !scheduler.fork(follower, copy.is_some()) {
            copy.into_iter().for_each(|copy| pool.free(copy));
            return false;
        }
        if let Some(s) = sequences.get_mut(&follower) {
            s.state = copy;
        }
        true
    }

    /// The state of a sequence that has rows: one that followed another, which is gone, begins with a fresh one.
    pub(super) fn begun(&mut self, id: u64) -> Result<(), StateError> {
        match self.sequences.get_mut(&id).filter(|s| s.state.is_none()) {
            Some(s) => self.runner.pool().create().map(|state| s.state = Some(state)),
            None => Ok(()),
        }
    }
}

/// Gives `state` the pages for `tokens` tokens; the cache gives up what is missing.
pub(super) fn grow<B: Backend, H: Hop<B>>(
    cache: &mut Option<PrefixCache>,
    runner: &mut Runner<B, H>,
    state: &mut SeqState,
    tokens: usize,
) -> Result<(), StateError> {
    let pool = runner.pool();
    if let Some(cache) = cache {
        let missing = pool.pages_for(tokens).saturating_sub(state.pages().len());
        cache.make_room(pool, missing);
    }
    pool.grow(state, tokens)
}

/// Gives a lease back that nobody takes.
fn give_back<B: Backend, H: Hop<B>>(runner: &mut Runner<B, H>, lease: Option<Lease>) -> Option<Lease> {
    if let Some(lease) = lease {
        PrefixCache::give_back(runner.pool(), lease);
    }
    None
}
