//! The embedded demo checkpoint: 8.5 M trained parameters in the layout of the real model (`assets/demo/README.md`).
//!
//! It is unpacked into a cache folder whose name carries a hash of the content, so that versions never mix and a second start writes
//! nothing. Loaders need files (they map them), and several processes of one machine then share the pages.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use sha2::{Digest, Sha256};

use crate::ModelError;

macro_rules! embedded {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_bytes!(concat!("../assets/demo/", $name)).as_slice())),*]
    };
}

/// Name and content of each file of the checkpoint. A static, since each use of a constant may copy the bytes into the binary once more.
pub static FILES: &[(&str, &[u8])] = embedded![
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
];

/// Name of the model, for APIs.
pub const NAME: &str = "tandem-demo";

/// Unpacks the checkpoint below `cache` and returns its folder. Files that are there already are compared byte by byte, and written again
/// where they differ. Any number of processes may do this at once: each file appears whole, by renaming.
///
/// # Errors
/// The folder cannot be made, or a file cannot be written.
pub fn unpack(cache: &Path) -> Result<PathBuf, ModelError> {
    let dir = cache.join(format!("demo-{}", content_hash()));
    let io_error = |path: &Path| {
        let path = path.to_owned();
        move |source| ModelError::Io { path, source }
    };
    fs::create_dir_all(&dir).map_err(io_error(&dir))?;
    for (name, content) in FILES {
        let path = dir.join(name);
        // A file that is not there, too short or changed is replaced; maps of the old one stay as they were.
        if fs::read(&path).is_ok_and(|there| there == *content) {
            continue;
        }
        write_whole(&path, content).map_err(io_error(&path))?;
    }
    Ok(dir)
}

fn write_whole(path: &Path, content: &[u8]) -> io::Result<()> {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let unique = format!("partial-{}-{}", std::process::id(), COUNTER.fetch_add(1, Ordering::Relaxed));
    let partial = path.with_extension(unique);
    let written = fs::write(&partial, content).and_then(|()| fs::rename(&partial, path));
    if written.is_err() {
        // The first error is the one to report.
        let _ = fs::remove_file(&partial);
    }
    written
}

/// 16 hexadecimal digits of a SHA-256 over all names and contents.
fn content_hash() -> String {
    let mut hash = Sha256::new();
    for (name, content) in FILES {
        hash.update(format!("{name} {}\n", content.len()).as_bytes());
        hash.update(content);
    }
    hash.finalize()[..8].iter().map(|b| format!("{b:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Checkpoint;

    #[test]
    fn it_opens_and_says_what_it_skips() {
        let cache = tempfile::tempdir().unwrap();
        let checkpoint = Checkpoint::open(&unpack(cache.path()).unwrap()).unwrap();
        assert_eq!(checkpoint.geometry().experts, 16);
        assert_eq!(checkpoint.generation().eos_token_ids, [1490, 1497, 1499]);
        assert_eq!(checkpoint.warnings().len(), 1);
        assert!(checkpoint.warnings()[0].contains("MTP"), "{:?}", checkpoint.warnings());
    }

    #[test]
    fn many_unpack_at_once() {
        let cache = tempfile::tempdir().unwrap();
        let dirs: Vec<PathBuf> = std::thread::scope(|s| {
            let threads: Vec<_> = (0..4).map(|_| s.spawn(|| unpack(cache.path()).unwrap())).collect();
            threads.into_iter().map(|t| t.join().unwrap()).collect()
        });
        assert!(dirs.iter().all(|d| *d == dirs[0]));
        assert_eq!(fs::read_dir(&dirs[0]).unwrap().count(), FILES.len(), "no partial file is left");
    }

    #[test]
    fn damaged_and_missing_files_are_written_again() {
        let cache = tempfile::tempdir().unwrap();
        let dir = unpack(cache.path()).unwrap();
        fs::write(dir.join("config.json"), "{}").unwrap();
        fs::remove_file(dir.join("tokenizer.json")).unwrap();
        assert_eq!(unpack(cache.path()).unwrap(), dir);
        for (name, content) in FILES {
            assert_eq!(fs::read(dir.join(name)).unwrap(), *content, "{name}");
        }
    }
}
