//! Buffers, scratch that ops share, and the pinned memory that small copies go through.

use std::{collections::HashMap, sync::Arc};

use super::driver::{Device, Memory, Pinned};
use crate::{BackendError, Elem};

/// A buffer of f32 values or ids on the device.
pub struct CudaBuf {
    memory: Memory,
    elem: Elem,
    len: usize,
}

impl std::fmt::Debug for CudaBuf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CudaBuf").field("elem", &self.elem).field("len", &self.len).finish_non_exhaustive()
    }
}

impl CudaBuf {
    pub(super) fn new(device: &Arc<Device>, what: &str, elem: Elem, len: usize) -> Result<Self, BackendError> {
        Ok(Self { memory: device.alloc(what, len * 4)?, elem, len })
    }

    /// The address of at least `len` elements of a type.
    pub(super) fn at(&self, elem: Elem, len: usize) -> Result<u64, String> {
        if self.elem != elem {
            return Err(format!("a buffer of {:?} where {elem:?} is needed", self.elem));
        }
        if len > self.len {
            return Err(format!("a buffer of {} elements where {len} are needed", self.len));
        }
        Ok(self.memory.at())
    }

    /// The address of at least `len` numbers.
    pub(super) fn f32s(&self, len: usize) -> Result<u64, String> {
        self.at(Elem::F32, len)
    }

    /// The address of at least `len` ids.
    pub(super) fn ids(&self, len: usize) -> Result<u64, String> {
        self.at(Elem::I32, len)
    }
}

/// What a piece of scratch is for. Each grows to the largest that was asked for and stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Use {
    /// Activations rounded to bf16 for a product.
    Rounded,
    /// Hidden rows of a gated MLP.
    Hidden,
    /// Pairs in order of experts, and tiles over them.
    Groups,
    /// Outputs of the experts, one row per pair.
    Pairs,
    /// Sums of shares of K.
    Shares,
    /// Partial sums of hyper-connections.
    Mhc,
    /// What chunks of KDA need beside the state.
    Chunks,
    /// Logits of the router.
    Router,
    /// Queries on the latent, and what attention made of it.
    Folded,
    /// The same after attention.
    Mixed,
    /// Sums of attention's parts.
    Parts,
    /// Scores of pools.
    Scores,
    /// Rows with a NaN or an infinity.
    Flags,
    /// What the sampler wants and answers.
    Sample,
}

/// Rows that go through the experts at a time: bounds the scratch.
pub(super) const EXPERT_ROWS: usize = 1024;
/// The same where products are wide: weights are read once for them all, and experts need rows enough to fill tiles of 128.
pub(super) const WIDE_EXPERT_ROWS: usize = 4096;

/// Scratch of the ops. One stream uses it in order, so ops need no scratch of their own.
#[derive(Default)]
pub(super) struct Scratch(HashMap<Use, Memory>);

impl Scratch {
    /// At least `bytes` for a use.
    pub(super) fn get(&mut self, device: &Arc<Device>, what: Use, bytes: usize) -> Result<u64, String> {
        if let Some(memory) = self.0.get(&what).filter(|m| m.bytes() >= bytes) {
            return Ok(memory.at());
        }
        // The old piece is freed first: freeing waits for the work that uses it.
        self.0.remove(&what);
        let memory = device.alloc(&format!("scratch {what:?}"), bytes.next_multiple_of(1 << 16)).map_err(|e| e.to_string())?;
        let at = memory.at();
        self.0.insert(what, memory);
        Ok(at)
    }
}

/// Bytes of pinned memory.
const STAGING: usize = 16 << 20;

/// Threads that share a large copy out of pinned memory: what it goes to are mostly pages that nobody has touched, whose faults take one thread
/// longer than the device takes to copy.
const COPIERS: usize = 4;

fn copy_apart(from: &[u8], to: &mut [u8]) {
    let each = from.len().div_ceil(COPIERS).max(1);
    std::thread::scope(|s| {
        for (from, to) in from.chunks(each).zip(to.chunks_mut(each)) {
            s.spawn(|| to.copy_from_slice(from));
        }
    });
}

/// A ring of pinned memory for copies to and from the device.
pub(super) struct Staging {
    device: Arc<Device>,
    pinned: Pinned,
    at: usize,
}

impl Staging {
    pub(super) fn new(device: &Arc<Device>) -> Result<Self, String> {
        Ok(Self { device: Arc::clone(device), pinned: device.pinned(STAGING)?, at: 0 })
    }

    /// Enqueues a copy to the device; the source is free at once.
    ///
    /// # Safety
    /// `to..to + bytes.len()` lies inside of one allocation that lives on.
    pub(super) unsafe fn upload(&mut self, bytes: &[u8], to: u64) -> Result<(), String> {
        self.device.bind()?;
        for (i, chunk) in bytes.chunks(STAGING).enumerate() {
            if self.at + chunk.len() > STAGING {
                // What lies at the front may still be on its way.
                self.device.sync()?;
                self.at = 0;
            }
            let place = &mut self.pinned.bytes_mut()[self.at..self.at + chunk.len()];
            place.copy_from_slice(chunk);
            // SAFETY: the caller's promise for the target; this part of the ring is not touched before the stream was waited for.
            unsafe { self.device.copy_in(place, to + (i * STAGING) as u64)? };
            self.at = (self.at + chunk.len()).next_multiple_of(64).min(STAGING);
        }
        Ok(())
    }

    /// Waits, and copies to the host.
    ///
    /// # Safety
    /// `from..from + bytes.len()` lies inside of one allocation that lives on.
    pub(super) unsafe fn download(&mut self, from: u64, bytes: &mut [u8]) -> Result<(), String> {
        // SAFETY: the caller's promise.
        unsafe { self.download_all(&mut [(from, bytes)]) }
    }

    /// Waits once, and copies several pieces to the host.
    ///
    /// # Safety
    /// Each `from..from + bytes.len()` lies inside of one allocation that lives on.
    pub(super) unsafe fn download_all(&mut self, pieces: &mut [(u64, &mut [u8])]) -> Result<(), String> {
        self.device.bind()?;
        let padded = |bytes: &[u8]| bytes.len().next_multiple_of(64);
        let all: usize = pieces.iter().map(|(_, bytes)| padded(bytes)).sum();
        if all > STAGING {
            self.device.sync()?;
            self.at = 0;
            for (from, bytes) in pieces {
                for (i, chunk) in bytes.chunks_mut(STAGING).enumerate() {
                    let place = &mut self.pinned.bytes_mut()[..chunk.len()];
                    // SAFETY: the caller's promise; nothing else uses the ring now.
                    unsafe { self.device.copy_out(*from + (i * STAGING) as u64, place)? };
                    self.device.sync()?;
                    copy_apart(place, chunk);
                }
            }
            return Ok(());
        }
        if self.at + all > STAGING {
            self.device.sync()?;
            self.at = 0;
        }
        let places = &mut self.pinned.bytes_mut()[self.at..self.at + all];
        let mut rest = &mut *places;
        for (from, bytes) in &*pieces {
            let (place, behind) = rest.split_at_mut(padded(bytes));
            // SAFETY: the caller's promise; nothing else uses this part of the ring.
            unsafe { self.device.copy_out(*from, &mut place[..bytes.len()])? };
            rest = behind;
        }
        self.device.sync()?;
        let mut rest = &*places;
        for (_, bytes) in pieces {
            let (place, behind) = rest.split_at(padded(bytes));
            bytes.copy_from_slice(&place[..bytes.len()]);
            rest = behind;
        }
        self.at = 0; // the stream is empty now
        Ok(())
    }
}

/// The bytes of plain numbers.
pub(super) fn bytes_of<T: Plain>(values: &[T]) -> &[u8] {
    // SAFETY: `Plain` types have no padding and any byte of them may be read.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

/// The bytes of plain numbers, to write to.
pub(super) fn bytes_of_mut<T: Plain>(values: &mut [T]) -> &mut [u8] {
    // SAFETY: as above, and any bytes make a value.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
}

/// Numbers without padding, valid for any bytes.
///
/// # Safety
/// That is what implementing it says.
pub(super) unsafe trait Plain: Copy {}
// SAFETY: numbers.
unsafe impl Plain for f32 {}
// SAFETY: numbers.
unsafe impl Plain for i32 {}
// SAFETY: numbers.
unsafe impl Plain for u16 {}
