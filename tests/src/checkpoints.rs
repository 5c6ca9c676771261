//! The small checkpoints: written once per machine from their hash generator, shared by all tests.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::OnceLock,
};

use tandem_model::synthetic::{self, Preset, Quantised};

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

/// `tiny` or `tiny-b` as a quantised release stores it.
pub fn twin(of: &Path, format: Quantised) -> PathBuf {
    let name = format!("{}-{format:?}", of.file_name().unwrap().to_string_lossy());
    made(&name, |dir| synthetic::write_twin(of, format, dir).unwrap())
}

/// A GGUF file of the reference data: kept in the repository, or (loudly skipped where it is not there) in `../shared/golden`.
pub fn gguf(name: &str) -> Option<PathBuf> {
    let file = format!("{name}.gguf");
    let own = fixtures().join("gguf").join(&file);
    let shared = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/golden/gguf").join(&file);
    let found = [own, shared].into_iter().find(|path| path.exists());
    if found.is_none() {
        eprintln!("SKIPPED: no {file} in tests/fixtures/gguf or ../shared/golden/gguf");
    }
    found
}

fn written(preset: Preset, name: &str) -> PathBuf {
    made(name, |dir| {
        let tokenizer_files: Vec<PathBuf> = fs::read_dir(fixtures().join(name)).unwrap().map(|entry| entry.unwrap().path()).collect();
        synthetic::write(preset, dir, &tokenizer_files).unwrap();
    })
}

/// Makes a folder that other test processes may want at the same time: written aside, then renamed.
fn made(name: &str, write: impl FnOnce(&Path)) -> PathBuf {
    let root = std::env::temp_dir().join(format!("tandem-test-checkpoints-{}", env!("CARGO_PKG_VERSION")));
    let dir = root.join(name);
    if dir.join("complete").exists() {
        return dir;
    }
    fs::create_dir_all(&root).unwrap();
    let aside = tempfile::Builder::new().prefix(name).tempdir_in(&root).unwrap();
    write(aside.path());
    fs::write(aside.path().join("complete"), "").unwrap();
    if fs::rename(aside.path(), &dir).is_err() {
        assert!(dir.join("complete").exists(), "{} is incomplete: remove it", dir.display());
    }
    dir
}
