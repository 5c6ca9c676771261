//! Bringing mapped weights into memory before they are used: several readers, each file front to back, at the disk's speed.
//!
//! The files stay mapped: what is read lies in the page cache, so that several workers of one machine read a file once, and a restart finds
//! it there. A reader takes a stretch of a file, asks for all of it at once (the kernel then reads far ahead, whatever its window for single
//! faults is), and waits until its pages are there. A failing disk is an error here, where the first use of a page would end the process.
//!
//! Neighbours: workers call [`Checkpoint::read_in`] with what they are about to load; `storage/` holds the maps.

use std::{
    io,
    ops::Range,
    path::Path,
    sync::{
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread,
};

use memmap2::{Advice, Mmap};
use tandem_quant::MatrixSource;

use crate::{Checkpoint, ModelError, Shard};

/// Threads that read. They wait for the disk; a few keep its queue filled.
const READERS: usize = 4;
/// Bytes of a stretch: long enough to be read in one go, short enough to show progress.
const STRETCH: usize = 16 << 20;
/// Stretches that lie nearer than this are read as one: a gap costs less than another request.
const GAP: usize = 64 << 10;
/// Pages are at least this large.
const PAGE: usize = 4096;

/// A part of a file.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Stretch {
    file: usize,
    range: (usize, usize),
}

impl Checkpoint {
    /// Reads parts of the mapped files into memory; returns the bytes read (whole pages). `progress` hears how many of how many bytes
    /// are there. Parts that lie elsewhere (values made at load) are there already, and passed over.
    ///
    /// # Errors
    /// The disk's, naming the file.
    pub fn read_in<'a>(&self, parts: impl IntoIterator<Item = &'a [u8]>, mut progress: impl FnMut(u64, u64)) -> Result<u64, ModelError> {
        let maps: Vec<(&Path, &Mmap)> = self.storage().maps().collect();
        let stretches = stretches(&maps.iter().map(|(_, map)| addresses(map)).collect::<Vec<_>>(), parts);
        let total = stretches.iter().map(|s| (s.range.1 - s.range.0) as u64).sum();
        let next = AtomicUsize::new(0);
        let (done, finished) = mpsc::channel();
        let mut read = 0;
        progress(read, total);
        thread::scope(|scope| {
            for _ in 0..READERS.min(stretches.len()) {
                let done = done.clone();
                scope.spawn(|| {
                    let done = done;
                    while let Some(stretch) = stretches.get(next.fetch_add(1, Ordering::Relaxed)) {
                        let (path, map) = maps[stretch.file];
                        let bytes = stretch.range.1 - stretch.range.0;
                        let result = fetch(map, stretch.range.0, bytes).map_err(|source| ModelError::Io { path: path.to_owned(), source });
                        if done.send(result.map(|()| bytes as u64)).is_err() {
                            return;
                        }
                    }
                });
            }
            drop(done);
            for result in finished {
                match result {
                    Ok(bytes) => read += bytes,
                    Err(error) => {
                        next.store(stretches.len(), Ordering::Relaxed);
                        return Err(error);
                    }
                }
                progress(read, total);
            }
            Ok(read)
        })
    }

    /// Reads in everything but the routed experts.
    ///
    /// # Errors
    /// As [`Checkpoint::read_in`]; a tensor without bytes.
    pub fn read_in_trunk(&self, progress: impl FnMut(u64, u64)) -> Result<u64, ModelError> {
        let mut parts = Vec::new();
        for need in self.needs().iter().filter(|need| !need.routed) {
            for entry in self.layout(&need.name)?.entries() {
                parts.push(self.entry_bytes(entry)?);
            }
        }
        self.read_in(parts.iter().map(|bytes| &**bytes), progress)
    }

    /// Reads in a shard's slices of the routed experts.
    ///
    /// # Errors
    /// As [`Checkpoint::read_in`]; a shard outside of the model, or a cut that does not fall on a block.
    pub fn read_in_shard(&self, shard: &Shard, progress: impl FnMut(u64, u64)) -> Result<u64, ModelError> {
        let mut matrices: Vec<MatrixSource> = Vec::new();
        for layer in shard.layer_ids() {
            for expert in shard.experts.clone() {
                matrices.extend(self.expert_slice(layer as usize, expert as usize, &shard.ffn)?.into_matrices());
            }
        }
        self.read_in(matrices.iter().flat_map(MatrixSource::stored_parts), progress)
    }
}

/// Where a map lies.
fn addresses(map: &Mmap) -> Range<usize> {
    let start = map.as_ptr().addr();
    start..start + map.len()
}

/// The parts as stretches of files: whole pages, in the order of the files, near ones joined, long ones cut.
fn stretches<'a>(files: &[Range<usize>], parts: impl IntoIterator<Item = &'a [u8]>) -> Vec<Stretch> {
    let place = |bytes: &[u8]| {
        let start = bytes.as_ptr().addr();
        let file = files.iter().position(|map| map.contains(&start) && start + bytes.len() <= map.end)?;
        let from = start - files[file].start;
        let end = (from + bytes.len()).next_multiple_of(PAGE).min(files[file].len());
        Some(Stretch { file, range: (from / PAGE * PAGE, end) })
    };
    let mut all: Vec<Stretch> = parts.into_iter().filter(|bytes| !bytes.is_empty()).filter_map(place).collect();
    all.sort_unstable();
    let mut joined: Vec<Stretch> = Vec::new();
    for stretch in all {
        match joined.last_mut() {
            Some(last) if last.file == stretch.file && stretch.range.0 <= last.range.1 + GAP => {
                last.range.1 = last.range.1.max(stretch.range.1);
            }
            _ => joined.push(stretch),
        }
    }
    let cut = |s: Stretch| {
        let Stretch { file, range: (from, to) } = s;
        (from..to).step_by(STRETCH).map(move |start| Stretch { file, range: (start, to.min(start + STRETCH)) })
    };
    joined.into_iter().flat_map(cut).collect()
}

/// Waits until a range of a map is in memory.
fn fetch(map: &Mmap, offset: usize, len: usize) -> io::Result<()> {
    // Starts reading all of it; where that is not possible, the next call reads it piece by piece.
    let _only_advice = map.advise_range(Advice::WillNeed, offset, len);
    #[cfg(target_os = "linux")]
    match map.advise_range(Advice::PopulateRead, offset, len) {
        // Linux before 5.14 does not know it.
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => {}
        other => return other,
    }
    let sum = map[offset..offset + len].iter().step_by(PAGE).fold(0u8, |a, b| a.wrapping_add(*b));
    std::hint::black_box(sum);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_become_whole_pages_in_file_order() {
        let memory = vec![0u8; 40 << 20];
        let base = memory.as_ptr().addr().next_multiple_of(PAGE);
        let skip = base - memory.as_ptr().addr();
        let at = |from: usize, len: usize| &memory[skip + from..skip + from + len];
        let (a, b) = (base..base + (4 << 20) + 100, base + (8 << 20)..base + (39 << 20));
        let elsewhere = [1u8; 10];
        let parts = [at((8 << 20) + 5, 20 << 20), at((3 << 20) + 1, 10), at(0, 1), at(5000, 1), at(4 << 20, 100), &elsewhere, at(9, 0)];
        let got: Vec<(usize, usize, usize)> = stretches(&[a, b], parts).into_iter().map(|s| (s.file, s.range.0, s.range.1)).collect();
        let end = (20 << 20) + PAGE;
        let first = [(0, 0, 2 * PAGE), (0, 3 << 20, (3 << 20) + PAGE), (0, 4 << 20, (4 << 20) + 100)];
        assert_eq!(got, [first.as_slice(), &[(1, 0, STRETCH), (1, STRETCH, end)]].concat());
    }
}
