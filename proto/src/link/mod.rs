//! Links carry frames between two processes, in order, in both directions. [`tcp`] for any network, [`grpc`] where only HTTP/2
//! passes, [`inproc`] for local shards and tests; one conformance suite holds over all of them (`link/conformance.rs`).

use std::fmt;
use std::str::FromStr;

/// A transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LinkKind {
    /// A channel inside one process.
    Inproc,
    /// Frames over TCP.
    Tcp,
    /// Frames in a gRPC stream.
    Grpc,
}

impl LinkKind {
    /// The name on the wire and in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Inproc => "inproc",
            Self::Tcp => "tcp",
            Self::Grpc => "grpc",
        }
    }
}

impl fmt::Display for LinkKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A link name that this version does not know.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown link {got:?}; needed one of {needed}")]
pub struct UnknownLink {
    /// What was given.
    pub got: String,
    /// What would work.
    pub needed: &'static str,
}

impl FromStr for LinkKind {
    type Err = UnknownLink;

    fn from_str(s: &str) -> Result<Self, UnknownLink> {
        match s {
            "inproc" => Ok(Self::Inproc),
            "tcp" => Ok(Self::Tcp),
            "grpc" => Ok(Self::Grpc),
            _ => Err(UnknownLink { got: s.to_owned(), needed: "tcp, grpc, inproc" }),
        }
    }
}

/// `--link`: which transport the attention side uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LinkChoice {
    /// tcp, or grpc when tcp cannot connect.
    #[default]
    Auto,
    /// tcp only.
    Tcp,
    /// grpc only.
    Grpc,
}

impl FromStr for LinkChoice {
    type Err = UnknownLink;

    fn from_str(s: &str) -> Result<Self, UnknownLink> {
        match s {
            "auto" => Ok(Self::Auto),
            "tcp" => Ok(Self::Tcp),
            "grpc" => Ok(Self::Grpc),
            _ => Err(UnknownLink { got: s.to_owned(), needed: "auto, tcp, grpc" }),
        }
    }
}

impl fmt::Display for LinkChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Auto => "auto",
            Self::Tcp => "tcp",
            Self::Grpc => "grpc",
        })
    }
}
