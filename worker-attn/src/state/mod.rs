//! Sequence state: who owns which slot and which pages, with growth, fork, snapshot and restore.
//!
//! | file | idea |
//! |---|---|
//! | [`pages`] | counted ids |
//! | this file | [`SeqState`] (one per sequence) and [`StatePool`] (all of them over one backend `State`) |
//!
//! Neighbours: `scheduler/` grows and frees states, `step.rs` passes the backend's `State` to the mixers.
//!
//! A [`SeqState`] owns all four kinds of state through two handles: its *slot* holds the KDA matrices and convolution taps and the raw
//! indexer tail, its *pages* hold the latent rows and pooled index keys. A page that is full is never written again (a page is a whole
//! number of pools), so forks and the prefix cache (`cache/`) share full pages and copy the last one only where it is partly filled.

pub mod pages;

use std::sync::Arc;

use tandem_kernels::{Backend, BackendError, StateSpec};

use self::pages::IdPool;

/// Why a state operation was refused.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// No slot is free.
    #[error("all {slots} sequence slots are in use")]
    NoSlot {
        /// Slots of the pool.
        slots: usize,
    },
    /// Not enough pages are free.
    #[error("{needed} pages needed, {free} of {pages} free ({page_tokens} tokens each)")]
    NoPages {
        /// Pages needed now.
        needed: usize,
        /// Pages free.
        free: usize,
        /// Pages of the pool.
        pages: usize,
        /// Tokens per page.
        page_tokens: usize,
    },
    /// The device failed.
    #[error(transparent)]
    Backend(#[from] BackendError),
}

/// The state of one sequence: its slot, its pages, and how many of its tokens they hold.
///
/// It is freed through [`StatePool::free`]; dropping it elsewhere leaks its ids until the pool goes.
#[derive(Debug)]
pub struct SeqState {
    slot: u32,
    pages: Vec<u32>,
    tokens: usize,
}

impl SeqState {
    /// The slot.
    pub fn slot(&self) -> u32 {
        self.slot
    }

    /// The pages, in order of position.
    pub fn pages(&self) -> &[u32] {
        &self.pages
    }

    /// Tokens whose state is computed.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Counts the tokens of a finished step.
    pub fn advance(&mut self, rows: usize) {
        self.tokens += rows;
    }
}

/// A sequence's state in host memory.
#[derive(Clone, Debug)]
pub struct Snapshot {
    bytes: Vec<u8>,
    pages: usize,
    tokens: usize,
}

impl Snapshot {
    /// Bytes held.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Whether it holds nothing.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Tokens whose state it holds.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// Pages that it holds.
    pub fn pages(&self) -> usize {
        self.pages
    }
}

/// All sequence state of a worker.
pub struct StatePool<B: Backend> {
    backend: Arc<B>,
    spec: StateSpec,
    memory: B::State,
    slots: IdPool,
    pages: IdPool,
}

impl<B: Backend> StatePool<B> {
    /// Allocates the pools.
    ///
    /// # Errors
    /// Out of memory.
    pub fn new(backend: Arc<B>, spec: StateSpec) -> Result<Self, BackendError> {
        let memory = backend.state(&spec)?;
        let (slots, pages) = (IdPool::new(spec.slots), IdPool::new(spec.pages));
        Ok(Self { backend, spec, memory, slots, pages })
    }

    /// The sizes.
    pub fn spec(&self) -> &StateSpec {
        &self.spec
    }

    /// The backend's memory, for the mixers.
    pub fn memory(&mut self) -> &mut B::State {
        &mut self.memory
    }

    /// Slots nobody owns.
    pub fn free_slots(&self) -> usize {
        self.slots.free()
    }

    /// Pages nobody owns.
    pub fn free_pages(&self) -> usize {
        self.pages.free()
    }

    /// Tokens that the used pages can hold.
    pub fn used_tokens(&self) -> usize {
        self.pages.used() * self.spec.page_tokens
    }

    /// Tokens that all pages can hold.
    pub fn total_tokens(&self) -> usize {
        self.pages.len() * self.spec.page_tokens
    }

    /// Pages for `tokens` tokens. A model without MLA layers keeps no per-token state.
    pub fn pages_for(&self, tokens: usize) -> usize {
        if self.spec.mla_layers == 0 { 0 } else { tokens.div_ceil(self.spec.page_tokens) }
    }

    /// A fresh, cleared state of no tokens.
    ///
    /// # Errors
    /// [`StateError::NoSlot`].
    pub fn create(&mut self) -> Result<SeqState, StateError> {
        let slot = self.slots.take().ok_or(StateError::NoSlot { slots: self.spec.slots })?;
        self.backend.state_reset(&mut self.memory, slot);
        Ok(SeqState { slot, pages: Vec::new(), tokens: 0 })
    }

    /// Gives `state` the pages for `tokens` tokens in all; takes all that are needed or none.
    ///
    /// # Errors
    /// [`StateError::NoPages`].
    pub fn grow(&mut self, state: &mut SeqState, tokens: usize) -> Result<(), StateError> {
        let needed = self.pages_for(tokens).saturating_sub(state.pages.len());
        self.require_pages(needed)?;
        state.pages.extend((0..needed).filter_map(|_| self.pages.take()));
        Ok(())
    }

    /// Gives everything back.
    pub fn free(&mut self, state: SeqState) {
        for page in state.pages {
            self.pages.release(page);
        }
        self.slots.release(state.slot);
    }

    /// A second sequence with the same past. Full pages are shared, a partly filled one is copied.
    ///
    /// # Errors
    /// No slot, or no page for the copy.
    pub fn fork(&mut self, parent: &SeqState) -> Result<SeqState, StateError> {
        let full = (parent.tokens / self.spec.page_tokens).min(parent.pages.len());
        let held = self.pages_for(parent.tokens).min(parent.pages.len());
        self.require_pages(held - full)?;
        let slot = self.slots.take().ok_or(StateError::NoSlot { slots: self.spec.slots })?;
        self.backend.state_copy_slot(&mut self.memory, parent.slot, slot);
        let mut pages = Vec::with_capacity(held);
        for &page in &parent.pages[..full] {
            self.pages.share(page);
            pages.push(page);
        }
        for &page in &parent.pages[full..held] {
            if let Some(copy) = self.pages.take() {
                self.backend.state_copy_page(&mut self.memory, page, copy);
                pages.push(copy);
            }
        }
        Ok(SeqState { slot, pages, tokens: parent.tokens })
    }

    /// Copies a sequence's state to host memory.
    ///
    /// # Errors
    /// The device failed.
    pub fn snapshot(&self, state: &SeqState) -> Result<Snapshot, StateError> {
        let pages = self.pages_for(state.tokens).min(state.pages.len());
        let bytes = self.backend.state_export(&self.memory, state.slot, &state.pages[..pages])?;
        Ok(Snapshot { bytes, pages, tokens: state.tokens })
    }

    /// Makes a sequence out of a snapshot taken on the same kind of backend and the same sizes.
    ///
    /// # Errors
    /// No slot, not enough pages, or the snapshot does not fit.
    pub fn restore(&mut self, snapshot: &Snapshot) -> Result<SeqState, StateError> {
        self.resume(snapshot, &[])
    }

    /// Makes a sequence out of a snapshot and the full pages before what it holds ([`StatePool::save_end`]), which it shares from now on.
    ///
    /// # Errors
    /// As [`StatePool::restore`].
    pub fn resume(&mut self, snapshot: &Snapshot, full: &[u32]) -> Result<SeqState, StateError> {
        self.require_pages(snapshot.pages)?;
        let slot = self.slots.take().ok_or(StateError::NoSlot { slots: self.spec.slots })?;
        let own: Vec<u32> = (0..snapshot.pages).filter_map(|_| self.pages.take()).collect();
        let imported = self.backend.state_import(&mut self.memory, slot, &own, &snapshot.bytes);
        self.share_pages(full);
        let state = SeqState { slot, pages: [full, &own].concat(), tokens: snapshot.tokens };
        match imported {
            Ok(()) => Ok(state),
            Err(e) => {
                self.free(state);
                Err(e.into())
            }
        }
    }

    /// Copies what does not lie in full pages to host memory: the slot, and the last page where it is partly filled. With the full pages,
    /// which stay where they are, it is the whole state ([`StatePool::resume`]).
    ///
    /// # Errors
    /// The device failed.
    pub fn save_end(&self, state: &SeqState) -> Result<Snapshot, StateError> {
        let held = self.pages_for(state.tokens).min(state.pages.len());
        let full = self.full_pages(state.tokens).min(held);
        let bytes = self.backend.state_export(&self.memory, state.slot, &state.pages[full..held])?;
        Ok(Snapshot { bytes, pages: held - full, tokens: state.tokens })
    }

    /// Adds an owner to pages in use.
    pub fn share_pages(&mut self, pages: &[u32]) {
        pages.iter().for_each(|page| self.pages.share(*page));
    }

    /// Removes an owner of pages.
    pub fn release_pages(&mut self, pages: &[u32]) {
        pages.iter().for_each(|page| self.pages.release(*page));
    }

    /// Whether a page has more than one owner.
    pub fn is_shared(&self, page: u32) -> bool {
        self.pages.owners(page) > 1
    }

    /// Pages that `tokens` tokens fill.
    pub fn full_pages(&self, tokens: usize) -> usize {
        if self.spec.mla_layers == 0 { 0 } else { tokens / self.spec.page_tokens }
    }

    fn require_pages(&self, needed: usize) -> Result<(), StateError> {
        if needed > self.pages.free() {
            return Err(StateError::NoPages {
                needed,
                free: self.pages.free(),
                pages: self.pages.len(),
                page_tokens: self.spec.page_tokens,
            });
        }
        Ok(())
    }
}
