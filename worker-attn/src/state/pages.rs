//! Reference-counted ids out of a fixed pool: pages (shared by forks) and slots (never shared).
//!
//! Neighbours: `state/mod.rs` holds one pool of each; the memory itself belongs to the backend's `State`.

/// A pool of `len` ids with a count of owners each. Freed ids are reused last-in first-out, so that a small load touches little memory.
#[derive(Debug)]
pub struct IdPool {
    free: Vec<u32>,
    owners: Vec<u32>,
}

impl IdPool {
    /// A pool of the ids `0..len`, all free.
    pub fn new(len: usize) -> Self {
        let len = u32::try_from(len).unwrap_or(u32::MAX);
        Self { free: (0..len).rev().collect(), owners: vec![0; len as usize] }
    }

    /// Ids in all.
    pub fn len(&self) -> usize {
        self.owners.len()
    }

    /// Whether the pool has no ids at all.
    pub fn is_empty(&self) -> bool {
        self.owners.is_empty()
    }

    /// Ids nobody owns.
    pub fn free(&self) -> usize {
        self.free.len()
    }

    /// Ids somebody owns.
    pub fn used(&self) -> usize {
        self.owners.len() - self.free.len()
    }

    /// Takes a free id; `None` where there is none.
    pub fn take(&mut self) -> Option<u32> {
        let id = self.free.pop()?;
        self.owners[id as usize] = 1;
        Some(id)
    }

    /// Adds an owner to an id in use.
    pub fn share(&mut self, id: u32) {
        debug_assert!(self.owners[id as usize] > 0, "id {id} is free");
        self.owners[id as usize] += 1;
    }

    /// Removes an owner; the id is free when the last one is gone.
    pub fn release(&mut self, id: u32) {
        let owners = &mut self.owners[id as usize];
        debug_assert!(*owners > 0, "id {id} is free already");
        *owners = owners.saturating_sub(1);
        if *owners == 0 {
            self.free.push(id);
        }
    }

    /// Owners of an id.
    pub fn owners(&self, id: u32) -> u32 {
        self.owners[id as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_free_when_its_last_owner_is_gone() {
        let mut pool = IdPool::new(2);
        let a = pool.take().unwrap();
        pool.share(a);
        let b = pool.take().unwrap();
        assert_eq!((pool.take(), pool.used(), a, b), (None, 2, 0, 1));
        pool.release(a);
        assert_eq!((pool.free(), pool.owners(a)), (0, 1));
        pool.release(a);
        assert_eq!(pool.take(), Some(a));
    }
}
