//! Standard output of commands that print and end: what cannot be written is a failure, a reader that went away is none.

use std::io;

use tandem_runtime::{exit, process};

use crate::failure::Failure;

/// Prints text.
///
/// # Errors
/// When it cannot be written, but for a closed pipe.
pub fn print(text: &str) -> Result<(), Failure> {
    process::print(text).map_err(|error| unwritten(&error))
}

/// Prints one line.
///
/// # Errors
/// As [`print()`].
pub fn line(text: &str) -> Result<(), Failure> {
    print(&format!("{text}\n"))
}

/// The failure for output that could not be written.
pub fn unwritten(error: &io::Error) -> Failure {
    Failure::new(exit::OUTPUT, format!("standard output: {error}"))
}
