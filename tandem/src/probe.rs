//! Quick measurements of this machine.

use std::{
    hint::black_box,
    thread,
    time::{Duration, Instant},
};

/// Bytes that each thread reads at a time: far more than caches hold.
const BYTES: usize = 64 << 20;
/// Passes; the fastest counts.
const PASSES: usize = 3;

/// How many bytes all cores together read from memory in a second; takes a fraction of a second.
pub fn read_bandwidth() -> f64 {
    let threads = crate::plan::cores();
    let buffers: Vec<Vec<u64>> = thread::scope(|scope| {
        // Each thread fills its own: pages are then placed where they are read.
        let made: Vec<_> = (0..threads).map(|i| scope.spawn(move || vec![i as u64 + 1; BYTES / 8])).collect();
        made.into_iter().filter_map(|t| t.join().ok()).collect()
    });
    let pass = || {
        let start = Instant::now();
        thread::scope(|scope| {
            for buffer in &buffers {
                scope.spawn(|| black_box(buffer.iter().fold(0u64, |sum, v| sum.wrapping_add(*v))));
            }
        });
        start.elapsed()
    };
    let best = (0..PASSES).map(|_| pass()).min().unwrap_or(Duration::from_secs(1));
    (buffers.len() * BYTES) as f64 / best.as_secs_f64().max(1e-9)
}
