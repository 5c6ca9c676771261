//! Rows in memory that both ends see: two processes of one machine need not send activations through a socket.
//!
//! Each side *lends* a region of its own memory and *opens* a window onto the other's; nobody writes into memory that is not its own, so what a
//! dying process does late can only spoil its own partial, which nobody takes any more; one that lives on forgets what a link gave up (`gather.rs`). The
//! attention side puts a step's rows
//! into its region (row `i` of the step is row `i` of the region); the expert side reads them through its window, and puts the partial of row `i`
//! into row `i` of the region that it lends to this link. Frames still carry ids, weights, keys and timings, and say where the rows are. What cannot
//! be opened (another machine, another container, another kind of device) travels in the frames, as ever.
//!
//! A row of a region lies there as it would in a frame: rounded to the payload's precision.

use std::fmt;
use std::sync::Arc;

/// A region of this process, as a peer needs to know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lent {
    /// Its number here.
    pub region: u64,
    /// What a peer opens it with; opaque.
    pub handle: Vec<u8>,
    /// Rows that it holds.
    pub rows: u32,
}

/// The memory of a worker's device, as far as it can be lent and opened.
pub trait SharedMemory: Send + Sync + fmt::Debug {
    /// A region for one peer (expert side) or for all (attention side); `None` where this device has nothing to lend, or no more.
    fn lend(&self) -> Option<Lent>;
    /// The peer is gone.
    fn take_back(&self, region: u64);
    /// Opens a peer's region; its number here.
    ///
    /// # Errors
    /// Why it cannot be seen from here.
    fn open(&self, handle: &[u8]) -> Result<u64, String>;
    /// Done with a window.
    fn close(&self, window: u64);
    /// Copies rows of an own region to the host, from row `row` on: for a retry with a worker that cannot see them.
    ///
    /// # Errors
    /// The device.
    fn read(&self, region: u64, row: usize, out: &mut [f32]) -> Result<(), String>;
}

/// What the attention side lends to every worker.
#[derive(Clone, Debug)]
pub struct Lender {
    /// The device's memory.
    pub memory: Arc<dyn SharedMemory>,
    /// The region that holds a step's rows.
    pub lent: Lent,
}

/// Both ways of one link, as the expert side sees them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lease {
    /// Window onto the attention worker's rows.
    pub window: u64,
    /// Own region for the partials.
    pub region: u64,
    /// Rows of the smaller of the two.
    pub rows: u32,
}

/// Rows in shared memory: their place in both regions of the link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedRows {
    /// The link's regions.
    pub lease: Lease,
    /// First row.
    pub row: usize,
}

/// A window of the attention side; closed when dropped.
#[derive(Debug)]
pub(super) struct OpenWindow {
    memory: Arc<dyn SharedMemory>,
    pub window: u64,
    pub rows: u32,
}

impl OpenWindow {
    /// Opens the region that a Welcome offers.
    pub fn open(lender: &Lender, handle: &[u8], rows: u32) -> Result<Self, String> {
        let window = lender.memory.open(handle)?;
        Ok(Self { memory: Arc::clone(&lender.memory), window, rows: rows.min(lender.lent.rows) })
    }
}

impl Drop for OpenWindow {
    fn drop(&mut self) {
        self.memory.close(self.window);
    }
}

/// The expert side's lease; given back when dropped.
#[derive(Debug)]
pub(super) struct HeldLease {
    memory: Arc<dyn SharedMemory>,
    pub lease: Lease,
    pub handle: Vec<u8>,
}

impl HeldLease {
    /// Opens what an attention worker lends, and lends it as much.
    pub fn new(memory: &Arc<dyn SharedMemory>, handle: &[u8], rows: u32) -> Result<Self, String> {
        let window = memory.open(handle)?;
        let Some(lent) = memory.lend() else {
            memory.close(window);
            return Err("no memory left to lend".to_owned());
        };
        let lease = Lease { window, region: lent.region, rows: rows.min(lent.rows) };
        Ok(Self { memory: Arc::clone(memory), lease, handle: lent.handle })
    }
}

impl Drop for HeldLease {
    fn drop(&mut self) {
        self.memory.close(self.lease.window);
        self.memory.take_back(self.lease.region);
    }
}
