//! Reading the small files of a checkpoint: only what is a file, and only what is there.
//!
//! Neighbours: `json.rs` parses configs, the coordinator reads tokenizer and template; weights are mapped in `storage/`.

use std::{fs, io, path::Path};

/// Reads a file whole.
///
/// # Errors
/// The system's; no file: opening a pipe would wait for its writer, for ever.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    regular(path)?;
    fs::read(path)
}

/// Reads a text file that a checkpoint may leave out. A link to nothing is no file left out: something was lost.
///
/// # Errors
/// As [`read`]; not UTF-8.
pub fn read_if_there(path: &Path) -> io::Result<Option<String>> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
        Ok(_) => text(path).map(Some),
    }
}

/// Reads a text file whole.
///
/// # Errors
/// As [`read`]; not UTF-8.
pub fn text(path: &Path) -> io::Result<String> {
    regular(path)?;
    fs::read_to_string(path)
}

/// Refuses what is no file.
pub(crate) fn regular(path: &Path) -> io::Result<()> {
    if fs::metadata(path)?.is_file() {
        return Ok(());
    }
    Err(io::Error::new(io::ErrorKind::InvalidInput, "a file was needed; this is a folder, pipe or device"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_files_are_read_and_only_what_is_lost_is_missed() {
        let dir = tempfile::tempdir().expect("writable");
        let at = |name: &str| dir.path().join(name);
        fs::write(at("a"), "text").expect("writable");
        assert_eq!(read_if_there(&at("a")).expect("there").as_deref(), Some("text"));
        assert_eq!(read_if_there(&at("b")).expect("may be absent"), None);
        assert_eq!(read(&at("b")).expect_err("absent").kind(), io::ErrorKind::NotFound);
        assert!(read(dir.path()).expect_err("a folder").to_string().contains("a file was needed"));
        assert!(read_if_there(dir.path()).is_err());
        #[cfg(unix)]
        {
            std::os::unix::fs::symlink("nowhere", at("link")).expect("writable");
            assert_eq!(read_if_there(&at("link")).expect_err("lost").kind(), io::ErrorKind::NotFound);
            let listener = std::os::unix::net::UnixListener::bind(at("socket")).expect("a socket");
            assert!(read_if_there(&at("socket")).expect_err("a socket").to_string().contains("a file was needed"));
            drop(listener);
        }
    }
}
