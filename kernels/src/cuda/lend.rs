//! Device memory that another process of this machine opens (CUDA IPC): over NVLink or PCIe where the devices are peers, or on one device.
//!
//! Neighbours: `backend.rs` puts and takes rows; docs/wire.md says what goes through it. What a process of another kind of backend, or on another
//! machine, says is no handle of this kind, or does not open; rows then travel in frames.

use std::sync::Arc;

use cudarc::driver::sys as cu;

use super::driver::{Device, Memory, check};
use crate::Precision;

/// Word that handles of this kind begin with.
const KIND: &str = "cuda-ipc";
/// Memory that is lent is an allocation of its own: a handle opens all of the allocation that it is of.
const WHOLE: usize = 2 << 20;

/// Where elements are: own memory or a peer's.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    at: u64,
    len: usize,
    width: usize,
}

impl Place {
    /// The address of `len` elements from element `from` on.
    pub(super) fn range(&self, from: usize, len: usize) -> Result<u64, String> {
        match from.checked_add(len) {
            Some(end) if end <= self.len => Ok(self.at + (from * self.width) as u64),
            _ => Err(format!("elements {from}+{len} of {} in shared memory", self.len)),
        }
    }

    /// Elements are bf16.
    pub(super) fn narrow(&self) -> bool {
        self.width == 2
    }
}

/// Own memory that others may open.
pub struct CudaRegion {
    memory: Memory,
    handle: String,
    pub(super) place: Place,
}

impl std::fmt::Debug for CudaRegion {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CudaRegion").field("bytes", &self.memory.bytes()).finish_non_exhaustive()
    }
}

impl CudaRegion {
    /// Room for `len` elements.
    pub(super) fn new(device: &Arc<Device>, precision: Precision, len: usize) -> Result<Self, crate::BackendError> {
        let width = precision.bytes();
        let memory = device.alloc("memory to share", (len * width).next_multiple_of(WHOLE))?;
        let mut handle = cu::CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: the context is current since the allocation, which is `memory`; the place is ours.
        let made = check("cuIpcGetMemHandle", unsafe { cu::cuIpcGetMemHandle(&raw mut handle, memory.at()) });
        made.map_err(|reason| crate::BackendError::Op { op: "lend", device: device.name().to_owned(), reason })?;
        let hex: String = handle.reserved.iter().map(|b| format!("{:02x}", *b as u8)).collect();
        let place = Place { at: memory.at(), len, width };
        Ok(Self { memory, handle: format!("{KIND} {hex} {len} {width}"), place })
    }

    /// What a peer opens it with.
    pub(super) fn handle(&self) -> &str {
        &self.handle
    }
}

/// A peer's memory, open here.
pub struct CudaWindow {
    device: Arc<Device>,
    at: u64,
    pub(super) place: Place,
}

impl std::fmt::Debug for CudaWindow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CudaWindow").field("len", &self.place.len).finish_non_exhaustive()
    }
}

impl CudaWindow {
    /// Opens what a peer lends.
    pub(super) fn open(device: &Arc<Device>, precision: Precision, handle: &[u8]) -> Result<Self, String> {
        let text = std::str::from_utf8(handle).map_err(|_| "the handle is no text".to_owned())?;
        let words: Vec<&str> = text.split(' ').collect();
        let [KIND, hex, len, width_] = words.as_slice() else { return Err(format!("the peer lends {text:.20}…; needed {KIND}")) };
        let (len, got): (usize, usize) = match (len.parse(), width_.parse()) {
            (Ok(len), Ok(width)) => (len, width),
            _ => return Err("the handle's sizes are no numbers".to_owned()),
        };
        if got != precision.bytes() {
            return Err(format!("the peer's elements have {got} bytes; needed {}", precision.bytes()));
        }
        let mut raw = cu::CUipcMemHandle { reserved: [0; 64] };
        if !hex.is_ascii() || hex.len() != 2 * raw.reserved.len() {
            return Err("the handle has another length".to_owned());
        }
        for (byte, digits) in raw.reserved.iter_mut().zip(hex.as_bytes().chunks(2)) {
            let digits = std::str::from_utf8(digits).unwrap_or_default();
            *byte = u8::from_str_radix(digits, 16).map_err(|e| format!("the handle is damaged: {e}"))? as std::ffi::c_char;
        }
        device.bind()?;
        let flags = cu::CUipcMem_flags_enum::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let mut at = 0;
        // SAFETY: the context is current and the place is ours; the driver checks the handle.
        check("cuIpcOpenMemHandle", unsafe { cu::cuIpcOpenMemHandle_v2(&raw mut at, raw, flags) })?;
        let window = Self { device: Arc::clone(device), at, place: Place { at, len, width: got } };
        let (mut base, mut bytes) = (0, 0);
        // SAFETY: as above.
        let known = check("cuMemGetAddressRange", unsafe { cu::cuMemGetAddressRange_v2(&raw mut base, &raw mut bytes, at) });
        match known {
            Ok(()) if len.checked_mul(got).is_some_and(|needed| at.saturating_sub(base).saturating_add(needed as u64) <= bytes as u64) => {
                Ok(window)
            }
            Ok(()) => Err(format!("the peer's memory holds {bytes} bytes; it says {len} elements of {got}")),
            // A driver that tells nothing of others' memory: the handshake said that the peer is of our kind.
            Err(_) => Ok(window),
        }
    }
}

impl Drop for CudaWindow {
    fn drop(&mut self) {
        // Reads of it may be on their way.
        let _ = self.device.sync();
        // SAFETY: opened here, and nothing uses it after this.
        let _ = unsafe { cu::cuIpcCloseMemHandle(self.at) };
    }
}
