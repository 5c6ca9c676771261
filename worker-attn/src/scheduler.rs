//! Who runs in the next step: a pure state machine over counts, with no clock, no device and no I/O.
//!
//! Neighbours: `engine/` applies each [`Plan`] to real state and reports back what was done.
//!
//! Rules:
//! * Requests join and leave at step boundaries; order of arrival is order of service.
//! * Every running sequence that is one token behind (decode) gets its row in every step. What is left of the token budget goes to
//!   prefill chunks, in order of arrival, so that decode never waits for a whole prefill.
//! * A chunk is whole or waits: prompts are cut at multiples of the chunk size, whoever else is in the batch, so that what a request is
//!   answered does not depend on its neighbours by a single bit. The chunk size leaves room for a full batch of decode rows, so the
//!   first prefill always has its chunk. Where the prefix cache saves state or gives it, a chunk ends or begins in addition; it chooses
//!   positions at which a cut changes no bit.
//! * Pages are taken as they are needed. When none is free, the latest arrival gives up its state and waits (`engine/parking.rs` says what
//!   becomes of it). The earliest sequence is never preempted, so something always finishes; one that was preempted keeps its place in
//!   the order of arrival, and nobody who came later joins before it.
//! * Of sequences with the same prompt (a *group*, as the caller names it) that arrive together, one computes it and the others follow: they
//!   join, take no rows, and get a copy of its state when it has computed its last known token ([`Scheduler::followers`]). A leader that
//!   goes leaves its place to the first of them.
//! * A waiting sequence joins only when the pages of its known tokens are free *and* not already promised to a running prefill.

/// What there is to share out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// Sequences that hold state at a time.
    pub slots: usize,
    /// Pages.
    pub pages: usize,
    /// Tokens per page; 0 where sequences need no pages.
    pub page_tokens: usize,
    /// Rows of one step (the token budget); at least `slots`.
    pub max_rows: usize,
    /// Rows of one sequence in one step; [`Scheduler::new`] lowers it to what a full batch of decode rows leaves of `max_rows`.
    pub prefill_chunk: usize,
}

/// A chunk that had to be lowered is a whole number of these rows, where it can be: devices work through prompts in such blocks.
const CHUNK_BLOCK: usize = 16;

impl Capacity {
    /// Pages for `tokens` tokens.
    pub fn pages_for(&self, tokens: usize) -> usize {
        tokens.checked_div(self.page_tokens).map_or(0, |_| tokens.div_ceil(self.page_tokens))
    }
}

/// One sequence as the scheduler sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Entry {
    id: u64,
    arrival: u64,
    /// Tokens known: prompt and generated.
    tokens: usize,
    /// Those of them that came in chunks. What was generated is computed again as it was generated, a row at a time: a chunk would round
    /// elsewhere, and a near tie might fall to the other side.
    prompt: usize,
    /// Tokens whose state is computed.
    computed: usize,
    /// Pages held, shared ones included: what is shared is counted more than once, so that there are never fewer pages than planned.
    pages: usize,
    /// Where chunks have to end, ascending: positions at which the prefix cache saves state.
    points: Vec<usize>,
    /// It has made room before.
    returned: bool,
    /// Sequences of one group have the same prompt.
    group: Option<u64>,
    /// The running sequence whose state it is to get a copy of; until then it has none.
    follows: Option<u64>,
}

impl Entry {
    fn pending(&self) -> usize {
        self.tokens - self.computed
    }

    /// The next position at which a chunk has to end.
    fn next_point(&self) -> Option<usize> {
        self.points.iter().copied().find(|at| *at > self.computed)
    }

    /// Whether its next row is computed alone: the newest token, or one that was generated before.
    fn is_single(&self) -> bool {
        self.pending() == 1 || self.computed >= self.prompt
    }

    /// Rows of the next chunk, if there is room for them.
    fn chunk(&self, most: usize) -> usize {
        let upto = self.next_point().unwrap_or(self.prompt).min(self.prompt);
        if self.is_single() { self.pending().min(1) } else { (upto - self.computed).min(most) }
    }
}

/// Rows of one sequence in the next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Planned {
    /// The sequence.
    pub id: u64,
    /// Its next rows.
    pub rows: usize,
    /// Whether they reach its last known token, so that the next one can be sampled.
    pub last: bool,
    /// Whether they end at a position where its state is to be saved.
    pub point: bool,
    /// Whether its state is to be saved at the end of these rows or later, so that they must be known to be finite.
    pub kept: bool,
}

/// Where a sequence that joins begins.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Start {
    /// Tokens whose state is there already; fewer than it has.
    pub computed: usize,
    /// Where chunks have to end, ascending.
    pub points: Vec<usize>,
}

/// What to do before and in the next step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Free their state (they wait again).
    pub preempted: Vec<u64>,
    /// Give them state.
    pub admitted: Vec<u64>,
    /// Rows of the step: single rows first, then chunks.
    pub rows: Vec<Planned>,
}

/// Waiting and running sequences.
#[derive(Debug)]
pub struct Scheduler {
    capacity: Capacity,
    /// Ascending by arrival.
    waiting: Vec<Entry>,
    /// Ascending by arrival.
    running: Vec<Entry>,
    arrivals: u64,
}

impl Scheduler {
    /// An empty scheduler.
    pub fn new(mut capacity: Capacity) -> Self {
        let room = (capacity.max_rows + 1).saturating_sub(capacity.slots).max(1);
        if capacity.prefill_chunk > room {
            capacity.prefill_chunk = if room < CHUNK_BLOCK { room } else { room / CHUNK_BLOCK * CHUNK_BLOCK };
        }
        Self { capacity, waiting: Vec::new(), running: Vec::new(), arrivals: 0 }
    }

    /// What there is to share out.
    pub fn capacity(&self) -> &Capacity {
        &self.capacity
    }

    /// Sequences that hold state.
    pub fn running(&self) -> usize {
        self.running.len()
    }

    /// Sequences that do not.
    pub fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// A sequence of `tokens` known tokens arrives. The caller has checked that it can ever fit. Those of one `group` have the same
    /// tokens.
    pub fn submit(&mut self, id: u64, tokens: usize, group: Option<u64>) {
        self.resume(id, tokens, 0, group);
    }

    /// The same, where `generated` tokens follow those of the prompt: an earlier life of the sequence ended.
    pub fn resume(&mut self, id: u64, prompt: usize, generated: usize, group: Option<u64>) {
        self.arrivals += 1;
        self.waiting.push(Entry {
            id,
            arrival: self.arrivals,
            tokens: prompt + generated,
            prompt,
            computed: 0,
            pages: 0,
            points: Vec::new(),
            returned: false,
            group,
            follows: None,
        });
    }

    /// A sequence ends (finished, cancelled, failed); what it held is free.
    pub fn remove(&mut self, id: u64) {
        self.waiting.retain(|e| e.id != id);
        self.running.retain(|e| e.id != id);
        let mut heir = None;
        for e in self.running.iter_mut().filter(|e| e.follows == Some(id)) {
            e.follows = heir;
            heir.get_or_insert(e.id);
        }
    }

    /// Those that wait for a copy of this sequence's state, in order of arrival.
    pub fn followers(&self, id: u64) -> Vec<u64> {
        self.running.iter().filter(|e| e.follows == Some(id)).map(|e| e.id).collect()
    }

    /// The running sequence whose state another one waits to get a copy of.
    pub fn leader_of(&self, id: u64) -> Option<u64> {
        self.running.iter().find(|e| e.id == id)?.follows
    }

    /// The leader of a follower has computed all that the two have in common, and its state was `copied`. `true` if the pages suffice: it has
    /// all its known tokens computed then. Otherwise it computes them itself.
    pub fn fork(&mut self, id: u64, copied: bool) -> bool {
        let free = self.free_pages();
        let Some(e) = self.running.iter_mut().find(|e| e.id == id) else { return false };
        let pages = self.capacity.pages_for(e.tokens);
        if e.follows.take().is_none() || !copied || pages > free {
            return false;
        }
        (e.computed, e.pages) = (e.tokens, pages);
        true
    }

    /// Rows of a step were computed, and `sampled` further tokens are known.
    pub fn completed(&mut self, id: u64, rows: usize, sampled: usize) {
        if let Some(e) = self.running.iter_mut().find(|e| e.id == id) {
            e.computed += rows;
            e.tokens += sampled;
        }
    }

    /// Decides the next step. `start` is asked where a sequence that could join would begin; it joins unless its first chunk, its slot or
    /// its pages do not fit.
    pub fn plan(&mut self, start: impl FnMut(u64) -> Start) -> Plan {
        let mut plan = Plan::default();
        let mut budget = self.capacity.max_rows;
        let mut rows = self.share_budget(&mut budget);
        self.take_pages(&mut rows, &mut plan);
        if plan.preempted.is_empty() {
            self.admit(&mut budget, &mut rows, &mut plan, start);
        }
        for (e, rows) in self.running.iter().zip(rows).filter(|(_, rows)| *rows > 0) {
            let next = e.next_point();
            plan.rows.push(Planned {
                id: e.id,
                rows,
                last: rows == e.pending(),
                point: next == Some(e.computed + rows),
                kept: next.is_some(),
            });
        }
        plan.rows.sort_by_key(|p| p.rows > 1);
        plan
    }

    /// Rows of each running sequence: decode first, then prefill chunks out of what is left.
    fn share_budget(&self, budget: &mut usize) -> Vec<usize> {
        let mut rows = vec![0; self.running.len()];
        for decode in [true, false] {
            for (rows, e) in rows.iter_mut().zip(&self.running) {
                let chunk = e.chunk(self.capacity.prefill_chunk);
                if e.follows.is_none() && e.is_single() == decode && chunk <= *budget {
                    *rows = chunk;
                    *budget -= chunk;
                }
            }
        }
        rows
    }

    /// Takes the pages of the rows, in order of arrival; the latest arrivals make room.
    fn take_pages(&mut self, rows: &mut Vec<usize>, plan: &mut Plan) {
        let mut i = 0;
        while i < self.running.len() {
            let needed = self.capacity.pages_for(self.running[i].computed + rows[i]).saturating_sub(self.running[i].pages);
            if needed <= self.free_pages() {
                self.running[i].pages += needed;
                i += 1;
            } else if let Some(victim) = self.running.pop() {
                rows.pop();
                plan.preempted.push(victim.id);
                self.wait_again(victim);
            }
        }
    }

    /// Lets waiting sequences join while slots, rows and pages last.
    fn admit(&mut self, budget: &mut usize, rows: &mut Vec<usize>, plan: &mut Plan, mut start: impl FnMut(u64) -> Start) {
        while let Some(next) = self.waiting.first() {
            // One that made room comes back when the others can go on for a while, lest it make room again at once.
            let slack = if next.returned { self.running.len() } else { 0 };
            let whole = (self.capacity.pages_for(next.tokens + 1) + slack).min(self.capacity.pages);
            let leader = self.leader(next);
            if (*budget == 0 && leader.is_none()) || self.running.len() == self.capacity.slots || whole > self.unpromised_pages() {
                return;
            }
            if leader.is_some() {
                let follower = Entry { follows: leader, ..self.waiting.remove(0) };
                plan.admitted.push(follower.id);
                let at = self.running.partition_point(|r| r.arrival < follower.arrival);
                self.running.insert(at, follower);
                rows.insert(at, 0);
                continue;
            }
            let Start { computed, points } = start(next.id);
            let begun = Entry { computed: computed.min(next.tokens.saturating_sub(1)), points, ..next.clone() };
            let chunk = begun.chunk(self.capacity.prefill_chunk);
            if chunk > *budget {
                return;
            }
            self.waiting.remove(0);
            let mut e = begun;
            *budget -= chunk;
            e.pages = self.capacity.pages_for(e.computed + chunk);
            plan.admitted.push(e.id);
            // A preempted sequence may be older than one that ran on.
            let at = self.running.partition_point(|r| r.arrival < e.arrival);
            self.running.insert(at, e);
            rows.insert(at, chunk);
        }
    }

    /// A running sequence of the same group, before the waiting one in order of arrival, that has not computed its prompt yet.
    fn leader(&self, waiting: &Entry) -> Option<u64> {
        let group = waiting.group?;
        let leads = |e: &&Entry| {
            e.group == Some(group)
                && e.follows.is_none()
                && e.tokens == waiting.tokens
                && e.computed < e.tokens
                && e.arrival < waiting.arrival
        };
        self.running.iter().find(leads).map(|e| e.id)
    }

    fn wait_again(&mut self, mut e: Entry) {
        (e.computed, e.pages, e.returned, e.follows) = (0, 0, true, None);
        e.points.clear();
        let at = self.waiting.partition_point(|w| w.arrival < e.arrival);
        self.waiting.insert(at, e);
    }

    fn free_pages(&self) -> usize {
        self.capacity.pages - self.running.iter().map(|e| e.pages).sum::<usize>()
    }

    /// Free pages beyond those that running prefills will need for tokens that are known already.
    fn unpromised_pages(&self) -> usize {
        let promised: usize = self.running.iter().map(|e| self.capacity.pages_for(e.tokens + 1).max(e.pages)).sum();
        self.capacity.pages.saturating_sub(promised)
    }
}

#[cfg(test)]
mod tests;
