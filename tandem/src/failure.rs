//! Why the binary ends with a code other than 0: one line for people, one code for scripts.

use std::fmt;

use tandem_runtime::exit;

/// An exit code and its reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Exit code (`tandem_runtime::exit`).
    pub code: u8,
    /// One line: what was needed, what was there, what would work. Empty = nothing to say.
    pub reason: String,
}

impl Failure {
    /// Any code.
    pub fn new(code: u8, reason: impl Into<String>) -> Self {
        Self { code, reason: reason.into() }
    }

    /// A flag or setting is wrong.
    pub fn usage(reason: impl Into<String>) -> Self {
        Self::new(exit::USAGE, reason)
    }

    /// The checkpoint or the plan cannot be served.
    pub fn config(reason: impl Into<String>) -> Self {
        Self::new(exit::CONFIG, reason)
    }

    /// A port, a file or a peer is not to be had.
    pub fn unavailable(reason: impl Into<String>) -> Self {
        Self::new(exit::UNAVAILABLE, reason)
    }

    /// Tandem's own fault.
    pub fn internal(reason: impl Into<String>) -> Self {
        Self::new(exit::INTERNAL, reason)
    }

    /// A second signal ended it before the drain was over (128 + SIGINT, as shells have it).
    pub fn stopped() -> Self {
        Self::new(130, "stopped before the drain was over")
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.reason)
    }
}

impl std::error::Error for Failure {}
