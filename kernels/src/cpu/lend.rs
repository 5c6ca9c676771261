//! Host memory that another process of this machine opens: an anonymous file (`memfd`) that it finds under `/proc`.
//!
//! Nothing is left behind when a process dies. The first page holds a number that the handle holds too: in another container the same path may
//! lead to another file, or to none.

use std::{
    fs::File,
    os::fd::AsRawFd,
    sync::atomic::{AtomicU64, Ordering},
};

use memmap2::{MmapOptions, MmapRaw};
use nix::{
    fcntl::{FcntlArg, SealFlag, fcntl},
    sys::memfd::{MFdFlags, memfd_create},
};

use crate::Precision;

/// Word that handles of this kind begin with.
const KIND: &str = "memfd";
/// Bytes before the elements.
const PAGE: usize = 4096;

/// Elements in memory that several processes map.
#[derive(Debug)]
struct Mapped {
    map: MmapRaw,
    len: usize,
    precision: Precision,
}

impl Mapped {
    fn range(&self, from: usize, len: usize) -> Result<*mut u8, String> {
        if from.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(format!("elements {from}+{len} of {} in shared memory", self.len));
        }
        // SAFETY: the mapping has a page and `self.len` elements, as was checked when it was made.
        Ok(unsafe { self.map.as_mut_ptr().add(PAGE + from * self.precision.bytes()) })
    }

    /// Hands each of `out`'s elements and what lies at its place to `take`.
    fn read(&self, from: usize, out: &mut [f32], take: impl Fn(&mut f32, f32)) -> Result<(), String> {
        let at = self.range(from, out.len())?;
        for (i, out) in out.iter_mut().enumerate() {
            // SAFETY: inside of the mapping, as was just seen, and aligned (a page, then whole elements). The writer is another process, which is done
            // before it says so.
            let value = unsafe {
                match self.precision {
                    Precision::F32 => at.cast::<f32>().add(i).read_volatile(),
                    Precision::Bf16 => half::bf16::from_bits(at.cast::<u16>().add(i).read_volatile()).to_f32(),
                }
            };
            take(out, value);
        }
        Ok(())
    }
}

/// Own memory that others may open.
#[derive(Debug)]
pub struct CpuRegion {
    mapped: Mapped,
    handle: String,
    _file: File,
}

impl CpuRegion {
    /// Room for `len` elements.
    pub(super) fn new(precision: Precision, len: usize) -> std::io::Result<Self> {
        let file = File::from(memfd_create(c"tandem-rows", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?);
        file.set_len((PAGE + len * precision.bytes()) as u64)?;
        // A file that became shorter would kill whoever reads it.
        fcntl(&file, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL))?;
        let map = MmapRaw::map_raw(&file)?;
        let nonce = nonce();
        // SAFETY: the first page is mapped, writable and nobody else's yet.
        unsafe { map.as_mut_ptr().cast::<u64>().write(nonce) };
        let handle = format!("{KIND} {} {} {nonce} {len} {}", std::process::id(), file.as_raw_fd(), precision.bytes());
        Ok(Self { mapped: Mapped { map, len, precision }, handle, _file: file })
    }

    /// What a peer opens it with.
    pub(super) fn handle(&self) -> &str {
        &self.handle
    }

    /// Rounds elements into it.
    pub(super) fn write(&self, at: usize, x: &[f32]) -> Result<(), String> {
        let to = self.mapped.range(at, x.len())?;
        for (i, v) in x.iter().enumerate() {
            // SAFETY: inside of the mapping, as was just seen, and aligned; readers wait until they are told.
            unsafe {
                match self.mapped.precision {
                    Precision::F32 => to.cast::<f32>().add(i).write_volatile(*v),
                    Precision::Bf16 => to.cast::<u16>().add(i).write_volatile(half::bf16::from_f32(*v).to_bits()),
                }
            }
        }
        Ok(())
    }

    /// Reads elements back.
    pub(super) fn read(&self, at: usize, out: &mut [f32]) -> Result<(), String> {
        self.mapped.read(at, out, |out, v| *out = v)
    }
}

/// A peer's memory, open here.
#[derive(Debug)]
pub struct CpuWindow(Mapped);

impl CpuWindow {
    /// Opens what a peer lends.
    pub(super) fn open(precision: Precision, handle: &[u8]) -> Result<Self, String> {
        let text = std::str::from_utf8(handle).map_err(|_| "the handle is no text".to_owned())?;
        let words: Vec<&str> = text.split(' ').collect();
        let [KIND, numbers @ ..] = words.as_slice() else { return Err(format!("the peer lends {text:.20}…; needed {KIND}")) };
        let numbers: Vec<u64> = numbers.iter().filter_map(|n| n.parse().ok()).collect();
        let [pid, fd, nonce, len, got] = numbers[..] else { return Err("the handle is damaged".to_owned()) };
        if got != precision.bytes() as u64 {
            return Err(format!("the peer's elements have {got} bytes; needed {}", precision.bytes()));
        }
        let path = format!("/proc/{pid}/fd/{fd}");
        let failed = |e: std::io::Error| format!("{path}: {e}");
        // Not one of another kind: opening a pipe would wait.
        let about = std::fs::metadata(&path).map_err(failed)?;
        let needed = len.checked_mul(got).and_then(|bytes| bytes.checked_add(PAGE as u64));
        if !about.is_file() || needed != Some(about.len()) {
            return Err(format!("{path} is not the memory that was lent"));
        }
        let file = File::open(&path).map_err(failed)?;
        let seals = fcntl(&file, FcntlArg::F_GET_SEALS).map_err(|e| format!("{path}: {e}"))?;
        if !SealFlag::from_bits_truncate(seals).contains(SealFlag::F_SEAL_SHRINK) {
            return Err(format!("{path} may become shorter: not the memory that was lent"));
        }
        // To read alone: a stray write ends this process, and spoils nothing of the peer's.
        let map = MmapOptions::new().map_raw_read_only(&file).map_err(failed)?;
        // SAFETY: the first page is mapped: the file's length was looked at, and cannot shrink.
        if unsafe { map.as_ptr().cast::<u64>().read() } != nonce {
            return Err(format!("{path} is not the memory that was lent"));
        }
        Ok(Self(Mapped { map, len: len as usize, precision }))
    }

    /// Hands each of `out`'s elements and what lies at its place to `take`.
    pub(super) fn read(&self, at: usize, out: &mut [f32], take: impl Fn(&mut f32, f32)) -> Result<(), String> {
        self.0.read(at, out, take)
    }
}

/// A number that no other region has.
fn nonce() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_nanos() as u64);
    now.rotate_left(8) ^ u64::from(std::process::id()) << 32 ^ NEXT.fetch_add(1, Ordering::Relaxed)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    #[test]
    fn what_one_writes_another_reads_rounded() {
        for (precision, third) in [(Precision::F32, 1.0 / 3.0), (Precision::Bf16, 0.333_984_38)] {
            let region = CpuRegion::new(precision, 10).unwrap();
            let window = CpuWindow::open(precision, region.handle().as_bytes()).unwrap();
            region.write(4, &[1.0, 1.0 / 3.0]).unwrap();
            let mut out = [7.0; 3];
            window.read(4, &mut out, |out, v| *out = v).unwrap();
            assert_eq!(out, [1.0, third, 0.0]);
            window.read(4, &mut out, |out, v| *out += v).unwrap();
            assert_eq!(out, [2.0, third + third, 0.0]);
            region.read(5, &mut out[..1]).unwrap();
            assert_eq!(out[0], third);
            assert!(region.write(9, &[0.0; 2]).is_err() && window.read(10, &mut out, |_, _| ()).is_err());
        }
    }

    #[test]
    fn what_was_not_lent_is_not_opened() {
        let region = CpuRegion::new(Precision::F32, 10).unwrap();
        let open = |handle: &str| CpuWindow::open(Precision::F32, handle.as_bytes()).unwrap_err();
        let words: Vec<&str> = region.handle().split(' ').collect();
        let with = |at: usize, word: &str| {
            let mut words = words.clone();
            words[at] = word;
            open(&words.join(" "))
        };
        assert!(open("cuda-ipc 00 1 2").contains("needed memfd"));
        assert!(open("memfd 1 2").contains("damaged"));
        assert!(with(3, "12").contains("not the memory that was lent"));
        assert!(with(4, "11").contains("not the memory that was lent"));
        assert!(with(4, "18446744073709551615").contains("not the memory that was lent"));
        assert!(with(2, "99999").contains("/proc/"));
        assert!(with(5, "2").contains("needed 4"));
    }
}
