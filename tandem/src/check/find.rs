//! Which checkpoints a path stands for: itself, or all that a folder holds.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use tandem_model::storage::gguf::set_of;

/// How deep folders are searched.
const DEPTH: usize = 4;

/// The checkpoints of a path: a folder with a config.json, a GGUF file or set, or whatever of these lies below a folder, in the order of
/// names. A path that holds none stands for itself, so that it is refused by name.
pub fn checkpoints(path: &Path) -> Vec<PathBuf> {
    let mut found = BTreeSet::new();
    search(path, DEPTH, &mut found);
    if found.is_empty() { vec![path.to_owned()] } else { found.into_iter().collect() }
}

fn search(path: &Path, depth: usize, found: &mut BTreeSet<PathBuf>) {
    if path.is_file() {
        if path.extension().is_some_and(|e| e == "gguf") {
            found.insert(first_of_set(path));
        }
        return;
    }
    if path.join("config.json").is_file() {
        found.insert(path.to_owned());
        return;
    }
    if depth == 0 {
        return;
    }
    for entry in fs::read_dir(path).into_iter().flatten().flatten() {
        search(&entry.path(), depth - 1, found);
    }
}

/// The first shard stands for a set; a set that is not whole is refused under the name of the file that was met.
fn first_of_set(path: &Path) -> PathBuf {
    set_of(path).ok().and_then(|set| set.into_iter().next()).unwrap_or_else(|| path.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_are_searched_and_sets_count_once() {
        let root = tempfile::tempdir().expect("writable");
        let at = |name: &str| root.path().join(name);
        for (dir, file) in [
            ("hf", "config.json"),
            ("hf", "model.safetensors"),
            ("sub/set", "m-00001-of-00002.gguf"),
            ("sub/set", "m-00002-of-00002.gguf"),
            ("sub/set", "other.gguf"),
            ("sub/half", "n-00002-of-00002.gguf"),
            ("sub/none", "readme.md"),
        ] {
            fs::create_dir_all(at(dir)).expect("writable");
            fs::write(at(dir).join(file), "").expect("writable");
        }
        let all = checkpoints(root.path());
        assert_eq!(all, ["hf", "sub/half/n-00002-of-00002.gguf", "sub/set/m-00001-of-00002.gguf", "sub/set/other.gguf"].map(at));
        assert_eq!(checkpoints(&at("sub/set/m-00002-of-00002.gguf")), [at("sub/set/m-00001-of-00002.gguf")]);
        assert_eq!(checkpoints(&at("sub/none")), [at("sub/none")]);
        assert_eq!(checkpoints(&at("gone")), [at("gone")]);
    }
}
