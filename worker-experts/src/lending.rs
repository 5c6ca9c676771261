//! [`Lending`]: a device's memory as the hop shares it between two processes of one machine.
//!
//! Both kinds of worker use it: attention lends one region to all, an expert worker one to each attention worker.
//! Neighbours: `tandem_proto::hop::SharedMemory` is what the hop asks for; `batcher.rs` takes rows from windows and puts partials into regions.

use std::{collections::HashMap, fmt, sync::Arc};

use parking_lot::Mutex;
use tandem_kernels::Backend;
use tandem_proto::hop::{Lent, SharedMemory};

/// Regions lent at a time; further peers send their rows in frames.
pub const REGIONS: usize = 2;

/// Memory for rows of one width.
pub struct Lending<B: Backend> {
    backend: Arc<B>,
    hidden: usize,
    rows: usize,
    open: Mutex<Open<B>>,
}

/// What is lent and opened now, by number.
struct Open<B: Backend> {
    regions: HashMap<u64, Arc<B::Region>>,
    windows: HashMap<u64, Arc<B::Window>>,
    next: u64,
}

impl<B: Backend> fmt::Debug for Lending<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lending").field("hidden", &self.hidden).field("rows", &self.rows).finish_non_exhaustive()
    }
}

impl<B: Backend> Lending<B> {
    /// Lends regions of `rows` rows of `hidden` elements.
    pub fn new(backend: Arc<B>, hidden: usize, rows: usize) -> Self {
        let open = Open { regions: HashMap::new(), windows: HashMap::new(), next: 1 };
        Self { backend, hidden, rows, open: Mutex::new(open) }
    }

    /// A region that is lent.
    pub fn region(&self, id: u64) -> Option<Arc<B::Region>> {
        self.open.lock().regions.get(&id).cloned()
    }

    /// A window that is open.
    pub fn window(&self, id: u64) -> Option<Arc<B::Window>> {
        self.open.lock().windows.get(&id).cloned()
    }
}

/// Bytes of one region of `rows` rows, each element of 4 bytes at most.
pub fn region_bytes(hidden: usize, rows: usize) -> u64 {
    (rows as u64).saturating_mul(hidden as u64).saturating_mul(4)
}

impl<B: Backend> SharedMemory for Lending<B> {
    fn lend(&self) -> Option<Lent> {
        let mut open = self.open.lock();
        if open.regions.len() >= REGIONS {
            return None;
        }
        match self.backend.lend(self.rows * self.hidden) {
            Ok(Some(region)) => {
                let (id, handle) = (open.next, self.backend.handle(&region));
                open.next += 1;
                open.regions.insert(id, Arc::new(region));
                Some(Lent { region: id, handle, rows: u32::try_from(self.rows).unwrap_or(u32::MAX) })
            }
            Ok(None) => None,
            Err(error) => {
                tracing::warn!(%error, "no memory to share: rows go over the link");
                None
            }
        }
    }

    fn take_back(&self, region: u64) {
        let region = self.open.lock().regions.remove(&region);
        drop(region);
    }

    fn open(&self, handle: &[u8]) -> Result<u64, String> {
        let window = self.backend.open(handle)?;
        let mut open = self.open.lock();
        let id = open.next;
        open.next += 1;
        open.windows.insert(id, Arc::new(window));
        Ok(id)
    }

    fn close(&self, window: u64) {
        let window = self.open.lock().windows.remove(&window);
        drop(window);
    }

    fn read(&self, region: u64, row: usize, out: &mut [f32]) -> Result<(), String> {
        let region = self.region(region).ok_or("the memory is not lent any more")?;
        self.backend.read_back(&region, row * self.hidden, out).map_err(|e| e.to_string())
    }
}
