//! A step's description on the device, and on the host for what only the host decides (which rows need scores).

use super::{CudaBackend, driver::Memory, memory::bytes_of};
use crate::BatchDesc;

/// A step's description.
pub struct CudaBatch {
    pub(super) desc: BatchDesc,
    pub(super) memory: Memory,
    /// Ids: tokens, segment of each row, segments, pages.
    words: Vec<i32>,
    /// Scratch of the check.
    slots: Vec<u32>,
}

impl std::fmt::Debug for CudaBatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CudaBatch").field("desc", &self.desc).finish_non_exhaustive()
    }
}

/// `Step` of step.cuh.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    row_segment: u64,
    segments: u64,
    pages: u64,
    rows: i32,
    unused: i32,
}

/// Ids of one segment: slot, row0, rows, pos0, page0, pages.
const SEGMENT: usize = 6;

impl CudaBatch {
    pub(super) fn words(rows: usize, segments: usize, pages: usize) -> usize {
        2 * rows + SEGMENT * segments + pages
    }

    pub(super) fn new(memory: Memory) -> Self {
        Self { desc: BatchDesc::default(), memory, words: Vec::new(), slots: Vec::new() }
    }

    /// Takes a description over.
    pub(super) fn set(&mut self, b: &CudaBackend, desc: &BatchDesc) -> Result<(), String> {
        desc.validate(&mut self.slots)?;
        self.words.clear();
        self.words.extend(desc.tokens.iter().map(|&t| t as i32));
        for (i, s) in desc.segments.iter().enumerate() {
            self.words.extend(std::iter::repeat_n(i as i32, s.rows as usize));
        }
        for s in &desc.segments {
            let pages = s.pages.end - s.pages.start;
            self.words.extend([s.slot, s.row0, s.rows, s.pos0, s.pages.start, pages].map(|v| v as i32));
        }
        self.words.extend(desc.pages.iter().map(|&p| p as i32));
        if self.words.len() * 4 > self.memory.bytes() {
            return Err(format!("a step of {} rows in {} segments does not fit its batch", desc.tokens.len(), desc.segments.len()));
        }
        // SAFETY: it fits, as was just seen.
        unsafe { b.staging.lock().upload(bytes_of(&self.words), self.memory.at())? };
        self.desc.clone_from(desc);
        Ok(())
    }

    pub(super) fn rows(&self) -> usize {
        self.desc.tokens.len()
    }

    pub(super) fn tokens(&self) -> u64 {
        self.memory.at()
    }

    pub(super) fn step(&self) -> Step {
        let (rows, at) = (self.rows(), self.memory.at());
        let segments = at + 8 * rows as u64;
        let pages = segments + (4 * SEGMENT * self.desc.segments.len()) as u64;
        Step { row_segment: at + 4 * rows as u64, segments, pages, rows: rows as i32, unused: 0 }
    }

    /// Refuses steps whose rows lie past their sequences' pages, or in slots and pages that the state has not.
    pub(super) fn fits(&self, spec: &crate::StateSpec, paged: bool) -> Result<(), String> {
        for s in &self.desc.segments {
            if s.slot as usize >= spec.slots {
                return Err(format!("slot {} of {}", s.slot, spec.slots));
            }
            let end = (s.pos0 + s.rows) as usize;
            let pages = s.pages.len();
            if paged && end > pages * spec.page_tokens {
                return Err(format!("position {} of slot {} lies past its {pages} pages of {} tokens", end - 1, s.slot, spec.page_tokens));
            }
        }
        match self.desc.pages.iter().find(|&&p| paged && p as usize >= spec.pages) {
            Some(page) => Err(format!("page {page} of {}", spec.pages)),
            None => Ok(()),
        }
    }
}
