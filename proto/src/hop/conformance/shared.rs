//! Rows in memory that both sides see, with plain vectors for memory.

use std::collections::HashMap;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::stage::{Fake, HIDDEN, Rows, Stage, soon};
use crate::hop::{Arrived, HopOptions, HostHop, Lender, Lent, ServerOptions, SharedMemory};

const ROWS: usize = 600;

/// The memory of all processes of a test. Regions are opened by their numbers as text.
#[derive(Debug, Default)]
pub(in crate::hop) struct Board {
    regions: Mutex<HashMap<u64, Vec<f32>>>,
    /// Open windows: the region behind each.
    windows: Mutex<HashMap<u64, u64>>,
    /// What engines say of rows that are not finite.
    pub bad: Mutex<Vec<u32>>,
}

impl Board {
    /// Rows behind a window.
    pub fn look(&self, window: u64, row: usize, rows: usize) -> Vec<f32> {
        let region = self.windows.lock()[&window];
        self.regions.lock()[&region][row * HIDDEN..(row + rows) * HIDDEN].to_vec()
    }

    /// Writes rows of a region.
    pub fn write(&self, region: u64, row: usize, x: &[f32]) {
        let mut regions = self.regions.lock();
        let region = regions.get_mut(&region).unwrap();
        region[row * HIDDEN..row * HIDDEN + x.len()].copy_from_slice(x);
    }

    fn open_windows(&self) -> usize {
        self.windows.lock().len()
    }
}

impl SharedMemory for Board {
    fn lend(&self) -> Option<Lent> {
        let mut regions = self.regions.lock();
        let region = regions.keys().max().map_or(1, |last| last + 1);
        regions.insert(region, vec![f32::NAN; ROWS * HIDDEN]);
        Some(Lent { region, handle: region.to_string().into_bytes(), rows: ROWS as u32 })
    }

    fn take_back(&self, region: u64) {
        self.regions.lock().remove(&region);
    }

    fn open(&self, handle: &[u8]) -> Result<u64, String> {
        let region = String::from_utf8_lossy(handle).parse().map_err(|_| "another kind of memory".to_owned())?;
        let mut windows = self.windows.lock();
        let window = windows.keys().max().map_or(1000, |last| last + 1);
        windows.insert(window, region);
        Ok(window)
    }

    fn close(&self, window: u64) {
        self.windows.lock().remove(&window);
    }

    fn read(&self, region: u64, row: usize, out: &mut [f32]) -> Result<(), String> {
        out.copy_from_slice(&self.regions.lock()[&region][row * HIDDEN..row * HIDDEN + out.len()]);
        Ok(())
    }
}

fn sharing(stage: &Stage, board: &Arc<Board>, name: &str, epoch: u64, shards: &[u32]) -> ServerOptions {
    ServerOptions { memory: Some(Arc::clone(board) as _), ..stage.server_options(name, epoch, shards) }
}

/// A hop that lends memory, and its region.
fn lending_hop(stage: &Stage, board: &Arc<Board>) -> (HostHop, u64) {
    let lent = board.lend().unwrap();
    let region = lent.region;
    let lender = Some(Lender { memory: Arc::clone(board) as _, lent });
    let mut hop = stage.hop(HopOptions { lender, ..stage.hop_options() });
    hop.tend(Duration::from_secs(30));
    (hop, region)
}

pub(super) fn partials_stay_where_they_were_computed(stage: &Stage) {
    let board = Arc::new(Board::default());
    let (_server, holder) = stage.worker(sharing(stage, &board, "experts-0", 1, &[0, 1]), Fake::new(&stage.log).sharing(&board));
    stage.route(&[(0, &[&holder]), (1, &[&holder])]);
    let (mut hop, region) = lending_hop(stage, &board);
    assert!(hop.sees_lent(0));
    board.bad.lock().push(0);
    for (step, count) in [(1, 1), (2, 64), (3, 599)] {
        hop.begin_step(step, count as u32);
        for layer in [3, 4] {
            let rows = Rows::new(count, u32::from(layer) + step as u32);
            board.write(region, 1, &rows.x);
            let mut ask = |shard| hop.submit_lent(layer, shard, 1..1 + count, &rows.ids, &rows.weights, soon()).unwrap();
            let (first, second) = (ask(0), ask(1));
            let mut out = vec![f32::NAN; rows.x.len()];
            let Arrived::Shared { window, row: 1, non_finite } = hop.collect(first, &mut out).unwrap() else { panic!("in a frame") };
            assert!(board.look(window, 1, count) == rows.partial(layer, 0) && non_finite == [0]);
            // A second partial of the same rows has no place of its own.
            assert_eq!(hop.collect(second, &mut out).unwrap(), Arrived::Host);
            assert!(out == rows.partial(layer, 1));
        }
    }
    let outside = hop.submit_lent(3, 0, 599..601, &[0; 6], &[0.0; 6], soon()).unwrap_err().to_string();
    assert_eq!(outside, "lent memory has 600 elements; needed 601");
    drop(hop);
    let until = Instant::now() + Duration::from_secs(30);
    while board.open_windows() > 0 || board.regions.lock().len() > 1 {
        assert!(Instant::now() < until, "the link ended; its memory is still there");
        thread::sleep(Duration::from_millis(5));
    }
}

pub(super) fn rows_go_in_frames_where_memory_is_not_seen(stage: &Stage) {
    let board = Arc::new(Board::default());
    let (_plain, without) = stage.plain("experts-0", 1, &[0]);
    stage.route(&[(0, &[&without])]);
    let (mut hop, region) = lending_hop(stage, &board);
    assert!(!hop.sees_lent(0));
    hop.begin_step(1, 300);
    let rows = Rows::new(300, 5);
    board.write(region, 0, &rows.x);
    let ticket = hop.submit_lent(3, 0, 0..300, &rows.ids, &rows.weights, soon()).unwrap();
    let mut out = vec![f32::NAN; rows.x.len()];
    assert_eq!(hop.collect(ticket, &mut out).unwrap(), Arrived::Host);
    assert!(out == rows.partial(3, 0));
}

pub(super) fn a_partial_that_dies_with_its_worker_is_computed_again(stage: &Stage) {
    let board = Arc::new(Board::default());
    let (doomed, first) = stage.worker(sharing(stage, &board, "experts-0", 1, &[0]), Fake::new(&stage.log).sharing(&board));
    let (_replica, second) = stage.plain("experts-1", 2, &[0]);
    stage.route(&[(0, &[&first, &second])]);
    let (mut hop, region) = lending_hop(stage, &board);
    hop.begin_step(1, 100);
    let rows = Rows::new(100, 5);
    board.write(region, 0, &rows.x);
    let ticket = hop.submit_lent(3, 0, 0..100, &rows.ids, &rows.weights, soon()).unwrap();
    let until = Instant::now() + Duration::from_secs(30);
    while stage.log.lock().is_empty() {
        assert!(Instant::now() < until, "never computed");
        hop.tend(Duration::from_millis(1));
    }
    // Answered, and the answer was read: but it lies in memory that goes with the link.
    hop.tend(Duration::from_millis(20));
    drop(doomed);
    let until = Instant::now() + Duration::from_secs(30);
    while hop.links().len() > 1 {
        assert!(Instant::now() < until, "the end of the link goes unnoticed");
        hop.tend(Duration::from_millis(1));
    }
    let mut out = vec![f32::NAN; rows.x.len()];
    assert_eq!(hop.collect(ticket, &mut out).unwrap(), Arrived::Host);
    assert!(out == rows.partial(3, 0));
    assert_eq!(*stage.log.lock(), [(3, vec![100]), (3, vec![100])]);
}
