//! The pools of sequence state in CPU memory, and their copies and snapshots.
//!
//! | pool | layout |
//! |---|---|
//! | conv taps | f32 `[kda layer][slot][conv−1 (oldest first)][3·H·Dh]` |
//! | KDA state | f32 `[kda layer][slot][H][Dh keys][Dh values]` |
//! | raw indexer tail | f32 `[mla layer][slot][kpool−1][key, gate][dim]` |
//! | latents | f32, bf16 or fp8 `[mla layer][page][token][latent]` (`latents.rs`) |
//! | pooled keys | f32 `[mla layer][page][dim][pool, padded to 16]`: lanes along the pools, so that scores need no horizontal sums |

use super::{
    aligned::Aligned,
    latents::{LatentType, Latents},
};
use crate::{StateSpec, support::StateBytes};

/// Pools of a page are padded to this many lanes.
pub(super) const POOL_LANES: usize = 16;

/// All sequence state.
#[derive(Debug)]
pub struct CpuState {
    pub(super) spec: StateSpec,
    pub(super) conv: Aligned,
    pub(super) kda: Aligned,
    pub(super) tail: Aligned,
    pub(super) latents: Latents,
    pub(super) pooled: Aligned,
}

impl CpuState {
    /// Zeroed pools; latents are stored as `kind`.
    pub(super) fn new(spec: &StateSpec, kind: LatentType) -> Self {
        let s = Sizes::of(spec);
        Self {
            conv: Aligned::zeroed(spec.kda_layers * spec.slots * s.conv),
            kda: Aligned::zeroed(spec.kda_layers * spec.slots * s.kda),
            tail: Aligned::zeroed(spec.mla_layers * spec.slots * s.tail),
            latents: Latents::zeroed(kind, spec.mla_layers * spec.pages * spec.page_tokens, spec.latent),
            pooled: Aligned::zeroed(spec.mla_layers * spec.pages * s.pooled_page),
            spec: spec.clone(),
        }
    }

    /// Bytes that [`CpuState::new`] takes.
    pub(super) fn bytes(spec: &StateSpec, kind: LatentType) -> u64 {
        let StateBytes { slots, pages } = Self::pools(spec, kind);
        slots.saturating_add(pages)
    }

    /// The same, of slots and pages apart.
    pub(crate) fn pools(spec: &StateSpec, kind: LatentType) -> StateBytes {
        let s = Sizes::of(spec);
        let slot = spec.kda_layers * (s.conv + s.kda) + spec.mla_layers * s.tail;
        let page = spec.mla_layers * (spec.page_tokens * kind.row_bytes(spec.latent) + 4 * s.pooled_page);
        let of = |count: usize, each: usize| (count as u64).saturating_mul(each as u64);
        StateBytes { slots: of(spec.slots, slot * 4), pages: of(spec.pages, page) }
    }

    pub(super) fn sizes(&self) -> Sizes {
        Sizes::of(&self.spec)
    }

    /// Where a slot's part of a per-slot pool lies.
    pub(super) fn slot_at(&self, layer: usize, slot: u32, size: usize) -> usize {
        (layer * self.spec.slots + slot as usize) * size
    }

    /// Clears a slot.
    pub(super) fn reset(&mut self, slot: u32) {
        let s = self.sizes();
        self.slot_pools(s, |pool, layers, slots, size| {
            for layer in 0..layers {
                let at = (layer * slots + slot as usize) * size;
                pool[at..at + size].fill(0.0);
            }
        });
    }

    /// Copies a slot.
    pub(super) fn copy_slot(&mut self, from: u32, to: u32) {
        let s = self.sizes();
        self.slot_pools(s, |pool, layers, slots, size| {
            for layer in 0..layers {
                let from = (layer * slots + from as usize) * size;
                let to = (layer * slots + to as usize) * size;
                pool.copy_within(from..from + size, to);
            }
        });
    }

    /// Copies a page.
    pub(super) fn copy_page(&mut self, from: u32, to: u32) {
        let s = self.sizes();
        for layer in 0..self.spec.mla_layers {
            let at = |page: u32, size: usize| (layer * self.spec.pages + page as usize) * size;
            let rows = self.spec.page_tokens;
            self.latents.copy(at(from, rows), at(to, rows), rows);
            let (a, b) = (at(from, s.pooled_page), at(to, s.pooled_page));
            self.pooled.copy_within(a..a + s.pooled_page, b);
        }
    }

    fn slot_pools(&mut self, s: Sizes, mut f: impl FnMut(&mut [f32], usize, usize, usize)) {
        let spec = &self.spec;
        f(&mut self.conv, spec.kda_layers, spec.slots, s.conv);
        f(&mut self.kda, spec.kda_layers, spec.slots, s.kda);
        f(&mut self.tail, spec.mla_layers, spec.slots, s.tail);
    }

    /// Serialises a slot and pages: a header of the sizes, then each pool in the order of the module's table, layer by layer.
    pub(super) fn export(&self, slot: u32, pages: &[u32]) -> Vec<u8> {
        let s = self.sizes();
        let mut out = Vec::with_capacity(self.snapshot_bytes(pages.len()));
        for v in self.header(pages.len()) {
            out.extend_from_slice(&v.to_le_bytes());
        }
        for (pool, layers, size) in [
            (&self.conv, self.spec.kda_layers, s.conv),
            (&self.kda, self.spec.kda_layers, s.kda),
            (&self.tail, self.spec.mla_layers, s.tail),
        ] {
            for layer in 0..layers {
                let at = self.slot_at(layer, slot, size);
                put_f32(&mut out, &pool[at..at + size]);
            }
        }
        for layer in 0..self.spec.mla_layers {
            for &page in pages {
                let rows = self.spec.page_tokens;
                self.latents.export((layer * self.spec.pages + page as usize) * rows, rows, &mut out);
                let at = (layer * self.spec.pages + page as usize) * s.pooled_page;
                put_f32(&mut out, &self.pooled[at..at + s.pooled_page]);
            }
        }
        out
    }

    /// Restores what [`CpuState::export`] wrote.
    pub(super) fn import(&mut self, slot: u32, pages: &[u32], snapshot: &[u8]) -> Result<(), String> {
        let want = self.header(pages.len());
        let need = self.snapshot_bytes(pages.len());
        let mut r = Reader(snapshot);
        let got: Option<Vec<u32>> = (0..want.len()).map(|_| r.take(4).map(|b| u32::from_le_bytes([b[0], b[1], b[2], b[3]]))).collect();
        if got.as_deref() != Some(&want[..]) || snapshot.len() != need {
            return Err(format!(
                "a snapshot of {} bytes does not fit: {need} bytes of this state's sizes are needed for {} pages; restore on a worker with \
                 the same model, precision and page size",
                snapshot.len(),
                pages.len()
            ));
        }
        let s = self.sizes();
        self.slot_pools(s, |pool, layers, slots, size| {
            for layer in 0..layers {
                let at = (layer * slots + slot as usize) * size;
                r.f32s(&mut pool[at..at + size]);
            }
        });
        for layer in 0..self.spec.mla_layers {
            for &page in pages {
                let rows = self.spec.page_tokens;
                self.latents.import((layer * self.spec.pages + page as usize) * rows, rows, &mut r);
                let at = (layer * self.spec.pages + page as usize) * s.pooled_page;
                r.f32s(&mut self.pooled[at..at + s.pooled_page]);
            }
        }
        Ok(())
    }

    fn header(&self, pages: usize) -> [u32; 12] {
        let spec = &self.spec;
        [
            0x7464_7331, // "1sdt": snapshot layout 1
            self.latents.kind() as u32,
            spec.kda_layers as u32,
            spec.mla_layers as u32,
            spec.kda.heads as u32,
            spec.kda.head_dim as u32,
            spec.kda.conv as u32,
            spec.latent as u32,
            spec.index_dim as u32,
            spec.kpool as u32,
            spec.page_tokens as u32,
            pages as u32,
        ]
    }

    fn snapshot_bytes(&self, pages: usize) -> usize {
        let one = StateSpec { slots: 1, pages, ..self.spec.clone() };
        4 * self.header(pages).len() + Self::bytes(&one, self.latents.kind()) as usize
    }
}

/// Appends values as little-endian bytes.
pub(super) fn put_f32(out: &mut Vec<u8>, values: &[f32]) {
    values.iter().for_each(|v| out.extend_from_slice(&v.to_le_bytes()));
}

/// Reads a snapshot.
pub(super) struct Reader<'a>(pub(super) &'a [u8]);

impl<'a> Reader<'a> {
    pub(super) fn take(&mut self, n: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(n)?;
        self.0 = rest;
        Some(head)
    }

    pub(super) fn f32s(&mut self, out: &mut [f32]) {
        for o in out {
            *o = self.take(4).map_or(0.0, |b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        }
    }
}

/// Elements per unit of each pool.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sizes {
    /// Of a slot, per KDA layer.
    pub(super) conv: usize,
    /// Of a slot, per KDA layer.
    pub(super) kda: usize,
    /// Of a slot, per MLA layer.
    pub(super) tail: usize,
    /// Of a page, per MLA layer.
    pub(super) pooled_page: usize,
    /// Pools per page.
    pub(super) pools: usize,
    /// Pools per page, padded to whole lanes.
    pub(super) padded: usize,
}

impl Sizes {
    fn of(spec: &StateSpec) -> Self {
        let k = &spec.kda;
        let pools = spec.page_tokens / spec.kpool.max(1);
        let padded = pools.next_multiple_of(POOL_LANES);
        Self {
            conv: k.conv.saturating_sub(1) * 3 * k.heads * k.head_dim,
            kda: k.heads * k.head_dim * k.head_dim,
            tail: spec.kpool.saturating_sub(1) * 2 * spec.index_dim,
            pooled_page: padded * spec.index_dim,
            pools,
            padded,
        }
    }
}
