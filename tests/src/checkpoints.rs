//! The small checkpoints: written once per machine from their hash generator, shared by all tests.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::OnceLock,
};

use tandem_model::synthetic::{self, Preset};

use crate::golden::fixtures;

/// `tiny`: 9 layers, 16 experts, hidden 256 (golden README).
pub fn tiny() -> &'static Path {
    static DIR: OnceLock<PathBuf> = OnceLock::new();
    DIR.get_or_init(|| written(Preset::Tiny, "tiny"))
}

/// `tiny-b`: other shapes (kpool 3, three router groups, no renormalisation, two shared experts).
pub fn tiny_b() -> &'static Path {
    static DIR: OnceLock<PathBuf> = OnceLock::new();
    DIR.get_or_init(|| written(Preset::TinyB, "tiny-b"))
}

/// Writes a preset into a folder that other test processes may want at the same time: made aside, then renamed.
fn written(preset: Preset, name: &str) -> PathBuf {
    let root = std::env::temp_dir().join(format!("tandem-test-checkpoints-{}", env!("CARGO_PKG_VERSION")));
    let dir = root.join(name);
    if dir.join("complete").exists() {
        return dir;
    }
    fs::create_dir_all(&root).unwrap();
    let aside = tempfile::Builder::new().prefix(name).tempdir_in(&root).unwrap();
    let tokenizer_files: Vec<PathBuf> = fs::read_dir(fixtures().join(name)).unwrap().map(|entry| entry.unwrap().path()).collect();
    synthetic::write(preset, aside.path(), &tokenizer_files).unwrap();
    fs::write(aside.path().join("complete"), "").unwrap();
    if fs::rename(aside.path(), &dir).is_err() {
        assert!(dir.join("complete").exists(), "{} is incomplete: remove it", dir.display());
    }
    dir
}
