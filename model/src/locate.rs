//! What kind of checkpoint lies at a path: a folder as published, or GGUF files.
//!
//! Neighbours: `checkpoint.rs` opens what is found here, `tandem check` searches folders with it.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use crate::{
    ModelError,
    storage::{
        gguf::is_gguf,
        safetensors::{INDEX, is_safetensors},
    },
};

/// The kind of a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// config.json beside safetensors.
    Safetensors,
    /// A GGUF file or set, named or alone in its folder.
    Gguf,
}

/// What a folder holds of checkpoints.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Contents {
    /// config.json.
    pub config: bool,
    /// Safetensors files, and their index.
    pub safetensors: Vec<PathBuf>,
    /// GGUF files, in the order of names; folders of such a name are none.
    pub gguf: Vec<PathBuf>,
    /// Folders, in the order of names.
    pub folders: Vec<PathBuf>,
}

impl Contents {
    /// Looks into a folder.
    ///
    /// # Errors
    /// It cannot be listed.
    pub fn of(dir: &Path) -> Result<Self, ModelError> {
        let io = |source| ModelError::Io { path: dir.to_owned(), source };
        let entries = fs::read_dir(dir).map_err(io)?.collect::<io::Result<Vec<_>>>().map_err(io)?;
        let mut paths: Vec<PathBuf> = entries.iter().map(fs::DirEntry::path).collect();
        paths.sort();
        let mut contents = Self::default();
        for path in paths {
            match () {
                () if path.is_dir() => contents.folders.push(path),
                () if path.ends_with("config.json") => contents.config = true,
                () if is_gguf(&path) => contents.gguf.push(path),
                () if is_safetensors(&path) || path.ends_with(INDEX) => contents.safetensors.push(path),
                () => {}
            }
        }
        Ok(contents)
    }

    /// The kind of checkpoint that a folder with these contents is: safetensors where config.json and weights are there, else GGUF where such
    /// files are; GGUF publishers put a config.json beside them, too.
    ///
    /// # Errors
    /// Neither.
    pub fn format(&self, dir: &Path) -> Result<Format, ModelError> {
        let refuse = |reason: String| Err(ModelError::Folder { path: dir.to_owned(), reason });
        match (self.config, self.safetensors.as_slice(), self.gguf.is_empty()) {
            (true, [_, ..], _) | (true, [], true) => Ok(Format::Safetensors),
            (_, _, false) => Ok(Format::Gguf),
            (false, [_, ..], true) => {
                refuse(format!("no config.json here, beside {} files of safetensors: download it, too", self.safetensors.len()))
            }
            (false, [], true) => refuse(format!("no config.json here: {NEEDED}")),
        }
    }
}

const NEEDED: &str = "needed a checkpoint folder as published (config.json beside *.safetensors), or a .gguf file";

/// The kind of checkpoint at a path.
///
/// # Errors
/// Nothing is there, it cannot be looked at, or it is no checkpoint.
pub fn format_at(path: &Path) -> Result<Format, ModelError> {
    let refuse = |reason: String| Err(ModelError::Folder { path: path.to_owned(), reason });
    match fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => match fs::read_link(path) {
            Ok(target) => refuse(format!("a link to {}, where no such file or folder is", target.display())),
            Err(_) => refuse("no such file or folder".to_owned()),
        },
        Err(source) => Err(ModelError::Io { path: path.to_owned(), source }),
        Ok(found) if found.is_dir() => Contents::of(path)?.format(path),
        Ok(_) if is_gguf(path) => Ok(Format::Gguf),
        Ok(_) if is_safetensors(path) => refuse("one file of a checkpoint: give the folder, with config.json in it".to_owned()),
        Ok(_) => refuse(format!("a file that is no .gguf: {NEEDED}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_there_decides() {
        let root = tempfile::tempdir().expect("writable");
        let at = |name: &str| root.path().join(name);
        let put = |names: &[&str]| {
            for name in names {
                let path = at(name);
                fs::create_dir_all(path.parent().expect("has one")).expect("writable");
                fs::write(path, "").expect("writable");
            }
        };
        put(&["hf/config.json", "hf/model.safetensors", "hf/also.gguf", "quants/config.json", "quants/m.GGUF"]);
        put(&["bare/config.json", "lost/a.safetensors", "lost/b.safetensors", "none/readme.md", "m.gguf/x"]);
        for (name, format) in [
            ("hf", Format::Safetensors),
            ("bare", Format::Safetensors),
            ("quants", Format::Gguf),
            ("quants/m.GGUF", Format::Gguf),
            ("hf/also.gguf", Format::Gguf),
        ] {
            assert_eq!(format_at(&at(name)).expect(name), format, "{name}");
        }
        for (name, words) in [
            ("lost", "no config.json here, beside 2 files of safetensors"),
            ("none", "no config.json here: needed"),
            ("m.gguf", "no config.json here: needed"),
            ("hf/model.safetensors", "give the folder"),
            ("none/readme.md", "a file that is no .gguf"),
            ("gone", "no such file or folder"),
            // A component that is a file: not absent, but not to be looked at.
            ("none/readme.md/x", "Not a directory"),
        ] {
            let error = format_at(&at(name)).expect_err(name).to_string();
            assert!(error.starts_with(&format!("{}: ", at(name).display())) && error.contains(words), "{error}");
        }
    }

    #[cfg(unix)]
    #[test]
    fn a_link_to_nothing_says_where_it_leads() {
        let root = tempfile::tempdir().expect("writable");
        let link = root.path().join("m.gguf");
        std::os::unix::fs::symlink("../blobs/abc", &link).expect("writable");
        let error = format_at(&link).expect_err("nothing there").to_string();
        assert!(error.contains("m.gguf: a link to ../blobs/abc, where no such file"), "{error}");
        assert_eq!(Contents::of(root.path()).expect("a folder").gguf, [link]);
    }
}
