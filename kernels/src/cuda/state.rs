//! All sequence state on the device: pools of units, a unit being all layers of one slot or one page, so that a fork or a snapshot is a few
//! copies.
//!
//! | pool | unit | of a layer |
//! |---|---|---|
//! | `kda` | slot | `[H, Dh keys, Dh values]` f32 |
//! | `conv` | slot | `[taps − 1, 3·H·Dh]` f32, oldest first |
//! | `tail` | slot | `[kpool, 2, dim]` f32: raw index keys and gates of the pool that is being filled |
//! | `latent` | page | `[page_tokens, latent]` f32 or bf16 |
//! | `pooled` | page | `[page_tokens / kpool, dim]` f32 |

use super::{CudaBackend, driver::Memory};
use crate::{BackendError, StateSpec};

pub(super) struct Pool {
    memory: Memory,
    units: usize,
    /// Bytes of a unit.
    each: usize,
}

impl Pool {
    fn new(b: &CudaBackend, what: &str, units: usize, each: usize) -> Result<Self, BackendError> {
        Ok(Self { memory: b.device.alloc(what, units * each)?, units, each })
    }

    pub(super) fn at(&self) -> u64 {
        self.memory.at()
    }

    fn unit(&self, unit: u32) -> Result<u64, String> {
        if unit as usize >= self.units {
            return Err(format!("slot or page {unit} of {}", self.units));
        }
        Ok(self.memory.at() + (unit as usize * self.each) as u64)
    }
}

/// All sequence state.
pub struct CudaState {
    pub(super) spec: StateSpec,
    pub(super) kda: Pool,
    pub(super) conv: Pool,
    pub(super) tail: Pool,
    pub(super) latent: Pool,
    pub(super) pooled: Pool,
}

impl std::fmt::Debug for CudaState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CudaState").field("spec", &self.spec).finish_non_exhaustive()
    }
}

impl CudaState {
    pub(super) fn new(b: &CudaBackend, spec: &StateSpec, bf16: bool) -> Result<Self, BackendError> {
        let (h, d, kpool) = (spec.kda.heads, spec.kda.head_dim, spec.kpool.max(1));
        let latent = spec.page_tokens * spec.latent * if bf16 { 2 } else { 4 };
        let pool = |what: &str, units, layers, each| Pool::new(b, what, units, layers * each);
        Ok(Self {
            kda: pool("KDA state", spec.slots, spec.kda_layers, h * d * d * 4)?,
            conv: pool("convolution taps", spec.slots, spec.kda_layers, spec.kda.conv.saturating_sub(1) * 3 * h * d * 4)?,
            tail: pool("index tails", spec.slots, spec.mla_layers, kpool * 2 * spec.index_dim * 4)?,
            latent: pool("latent pages", spec.pages, spec.mla_layers, latent)?,
            pooled: pool("index key pages", spec.pages, spec.mla_layers, spec.page_tokens / kpool * spec.index_dim * 4)?,
            spec: spec.clone(),
        })
    }

    fn slots(&self) -> [&Pool; 3] {
        [&self.kda, &self.conv, &self.tail]
    }

    fn pages(&self) -> [&Pool; 2] {
        [&self.latent, &self.pooled]
    }

    pub(super) fn reset(&self, slot: u32) -> Result<(), String> {
        for pool in self.slots() {
            pool.unit(slot)?;
            pool.memory.clear(slot as usize * pool.each, pool.each)?;
        }
        Ok(())
    }

    fn copy(b: &CudaBackend, pools: &[&Pool], from: u32, to: u32) -> Result<(), String> {
        for pool in pools.iter().filter(|p| p.each > 0 && from != to) {
            let (from, to) = (pool.unit(from)?, pool.unit(to)?);
            // SAFETY: both are whole units of the pool, and differ.
            unsafe { b.device.copy_within(from, to, pool.each)? };
        }
        Ok(())
    }

    pub(super) fn copy_slot(&self, b: &CudaBackend, from: u32, to: u32) -> Result<(), String> {
        Self::copy(b, &self.slots(), from, to)
    }

    pub(super) fn copy_page(&self, b: &CudaBackend, from: u32, to: u32) -> Result<(), String> {
        Self::copy(b, &self.pages(), from, to)
    }

    /// The units of a slot and of pages in snapshot order: (address, bytes).
    fn units(&self, slot: u32, pages: &[u32]) -> Result<Vec<(u64, usize)>, String> {
        let slots = self.slots().map(|p| (p, slot));
        let pages = pages.iter().flat_map(|&page| self.pages().map(|p| (p, page)));
        slots.into_iter().chain(pages).map(|(pool, unit)| Ok((pool.unit(unit)?, pool.each))).collect()
    }

    /// Everything of a slot and its pages, one unit after the other.
    pub(super) fn export(&self, b: &CudaBackend, slot: u32, pages: &[u32]) -> Result<Vec<u8>, String> {
        let units = self.units(slot, pages)?;
        let mut out = vec![0; units.iter().map(|u| u.1).sum()];
        let (mut rest, mut staging) = (&mut out[..], b.staging.lock());
        for (at, bytes) in units {
            let (part, behind) = rest.split_at_mut(bytes);
            // SAFETY: a whole unit.
            unsafe { staging.download(at, part)? };
            rest = behind;
        }
        Ok(out)
    }

    /// Restores what [`CudaState::export`] made.
    pub(super) fn import(&self, b: &CudaBackend, slot: u32, pages: &[u32], snapshot: &[u8]) -> Result<(), String> {
        let units = self.units(slot, pages)?;
        let needed: usize = units.iter().map(|u| u.1).sum();
        if snapshot.len() != needed {
            return Err(format!(
                "a snapshot of {} bytes does not fit: {needed} bytes of this state's sizes are needed for {} pages; restore on a worker with \
                 the same model, precision and page size",
                snapshot.len(),
                pages.len()
            ));
        }
        let (mut rest, mut staging) = (snapshot, b.staging.lock());
        for (at, bytes) in units {
            let (part, behind) = rest.split_at(bytes);
            // SAFETY: a whole unit.
            unsafe { staging.upload(part, at)? };
            rest = behind;
        }
        Ok(())
    }
}
