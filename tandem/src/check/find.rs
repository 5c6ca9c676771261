//! Which checkpoints the paths of a command line stand for: each itself, or all that a folder holds. Nothing is left out without a word.

use std::{
    collections::HashSet,
    fs,
    path::{Path, PathBuf},
};

use tandem_model::{
    locate::Contents,
    storage::gguf::{is_gguf, set_name, set_of},
};

/// How deep folders are searched.
const DEPTH: usize = 8;

/// What a search came upon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// A folder, a GGUF file, or the first shard of a set; or a path that was named and is none of these, so that it is refused by name.
    Checkpoint(PathBuf),
    /// A place that cannot be looked at, or that holds part of a checkpoint.
    Unseen {
        /// The place.
        path: PathBuf,
        /// Why.
        reason: String,
    },
}

/// The checkpoints of some paths, each once: a folder with config.json and weights, a GGUF file or set, or whatever of these lies below a
/// folder. A path that holds none stands for itself.
pub fn checkpoints(paths: &[PathBuf]) -> Vec<Found> {
    let mut search = Search::default();
    for path in paths {
        // A path that was seen before has its lines already.
        let (seen, new) = (search.seen.len(), search.found.len());
        search.look(path, DEPTH);
        if search.found.len() == new && search.seen.len() > seen && !search.holds_some(path) {
            search.found.push(Found::Checkpoint(path.clone()));
        }
    }
    search.found
}

#[derive(Default)]
struct Search {
    found: Vec<Found>,
    /// Folders, files and sets that were met, by their real place: links may lead to one of them twice, or round in a circle.
    seen: HashSet<PathBuf>,
}

impl Search {
    fn look(&mut self, path: &Path, depth: usize) {
        if path.is_dir() {
            self.folder(path, depth);
        } else if is_gguf(path) {
            self.file(path);
        } else if self.is_new(path) {
            self.found.push(Found::Checkpoint(path.to_owned()));
        }
    }

    fn folder(&mut self, dir: &Path, depth: usize) {
        let Ok(real) = dir.canonicalize() else {
            return self.found.push(Found::Checkpoint(dir.to_owned()));
        };
        if !self.seen.insert(real) {
            return;
        }
        let contents = match Contents::of(dir) {
            Ok(contents) => contents,
            Err(error) => return self.found.push(Found::Unseen { path: dir.to_owned(), reason: error.to_string() }),
        };
        let before = self.found.len();
        match (contents.config, contents.safetensors.len()) {
            (_, 0) => {}
            (true, _) => self.found.push(Found::Checkpoint(dir.to_owned())),
            (false, n) => {
                let reason = format!("no config.json here, beside {n} files of safetensors: download it, too");
                self.found.push(Found::Unseen { path: dir.to_owned(), reason });
            }
        }
        contents.gguf.iter().for_each(|file| self.file(file));
        for folder in &contents.folders {
            if depth > 0 {
                self.folder(folder, depth - 1);
            } else {
                let reason = format!("more than {DEPTH} folders below the one that was named: not looked at, name it itself");
                self.found.push(Found::Unseen { path: folder.clone(), reason });
            }
        }
        // A config alone is a checkpoint without weights, unless they lie in folders below it.
        if contents.config && self.found.len() == before {
            self.found.push(Found::Checkpoint(dir.to_owned()));
        }
    }

    /// A file stands for its set, under the name of the first shard; where that is not there, of the one that was met.
    fn file(&mut self, path: &Path) {
        if self.is_new(&set_name(path)) {
            let first = set_of(path).ok().and_then(|set| set.into_iter().next());
            self.found.push(Found::Checkpoint(first.unwrap_or_else(|| path.to_owned())));
        }
    }

    /// Marks a path that is no folder as met. Its own name stays: two names of one file are two things to look at.
    fn is_new(&mut self, path: &Path) -> bool {
        let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let real = fs::canonicalize(folder).unwrap_or_else(|_| folder.to_owned());
        self.seen.insert(path.file_name().map_or_else(|| real.clone(), |name| real.join(name)))
    }

    /// Whether something below a path has been found, under whatever spelling.
    fn holds_some(&self, path: &Path) -> bool {
        let Ok(real) = path.canonicalize() else { return false };
        self.found.iter().any(|found| {
            let (Found::Checkpoint(path) | Found::Unseen { path, .. }) = found;
            path.canonicalize().is_ok_and(|found| found.starts_with(&real))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Root(tempfile::TempDir);

    impl Root {
        fn new(files: &[&str]) -> Self {
            let root = Self(tempfile::tempdir().expect("writable"));
            for file in files {
                let path = root.at(file);
                fs::create_dir_all(path.parent().expect("has one")).expect("writable");
                fs::write(path, "").expect("writable");
            }
            root
        }

        fn at(&self, name: &str) -> PathBuf {
            self.0.path().join(name)
        }

        /// What is found below some paths: names relative to the root, with the reason where a place was not looked at.
        fn found(&self, paths: &[&str]) -> Vec<String> {
            let paths: Vec<PathBuf> = paths.iter().map(|path| self.at(path)).collect();
            let relative = |path: PathBuf| path.strip_prefix(self.0.path()).expect("below it").display().to_string();
            let text = |found| match found {
                Found::Checkpoint(path) => relative(path),
                Found::Unseen { path, reason } => format!("{}: {}", relative(path), &reason[..reason.len().min(24)]),
            };
            checkpoints(&paths).into_iter().map(text).collect()
        }
    }

    #[test]
    fn folders_are_searched_and_sets_count_once() {
        let root = Root::new(&[
            "hf/config.json",
            "hf/model.safetensors",
            "sub/set/m-00001-of-00002.gguf",
            "sub/set/m-00002-of-00002.gguf",
            "sub/set/other.gguf",
            "sub/half/n-00002-of-00003.gguf",
            "sub/half/n-00003-of-00003.gguf",
            "sub/none/readme.md",
        ]);
        let all = ["hf", "sub/half/n-00002-of-00003.gguf", "sub/set/m-00001-of-00002.gguf", "sub/set/other.gguf"];
        assert_eq!(root.found(&[""]), all);
        assert_eq!(root.found(&["sub/set/m-00002-of-00002.gguf"]), ["sub/set/m-00001-of-00002.gguf"]);
        let shards = ["sub/set/m-00001-of-00002.gguf", "sub/set/m-00002-of-00002.gguf", "sub/set/../set/m-00001-of-00002.gguf"];
        assert_eq!(root.found(&shards), ["sub/set/m-00001-of-00002.gguf"], "each shard of a set, and the set again");
        assert_eq!(root.found(&["", "sub", "hf", ""]), all, "nothing twice");
        assert_eq!(root.found(&["sub/none"]), ["sub/none"]);
        assert_eq!(root.found(&["sub/none", "sub/none/readme.md", "gone"]), ["sub/none", "sub/none/readme.md", "gone"]);
    }

    #[test]
    fn nothing_is_left_out_without_a_word() {
        let root = Root::new(&[
            "both/config.json",
            "both/model.safetensors",
            "both/quant.gguf",
            "both/more/UPPER.GGUF",
            "config-only/config.json",
            "lost/model.safetensors",
            "repo/config.json",
            "repo/Q4/m.gguf",
            "very/d1/d2/d3/d4/d5/d6/d7/d8/m.gguf",
        ]);
        assert_eq!(
            root.found(&[""]),
            [
                "both",
                "both/quant.gguf",
                "both/more/UPPER.GGUF",
                "config-only",
                "lost: no config.json here, bes",
                "repo/Q4/m.gguf",
                "very/d1/d2/d3/d4/d5/d6/d7/d8: more than 8 folders belo",
            ]
        );
        assert_eq!(root.found(&["very"]), ["very/d1/d2/d3/d4/d5/d6/d7/d8/m.gguf"]);
    }

    #[cfg(unix)]
    #[test]
    fn links_are_followed_once_and_dangling_ones_are_found() {
        let root = Root::new(&["a/m.gguf"]);
        let link = |to: &str, name: &str| std::os::unix::fs::symlink(to, root.at(name)).expect("writable");
        link("../a", "a/again");
        link("nothing", "a/gone.gguf");
        link("a", "b");
        link("m.gguf", "a/n.gguf");
        assert_eq!(root.found(&[""]), ["a/gone.gguf", "a/m.gguf", "a/n.gguf"]);
    }
}
