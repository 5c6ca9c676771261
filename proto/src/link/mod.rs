//! Links carry frames between two processes, in order, in both directions. [`tcp`] for any network, [`grpc`] where only HTTP/2
//! passes, [`inproc`] for local shards and tests; one conformance suite holds over all of them (`link/conformance.rs`).

use std::fmt;
use std::future::Future;
use std::io;
use std::str::FromStr;

pub use any::{AnyLink, AnyListener, AnySink, AnySource};
pub use dial::{Dialled, connect, dial};

use crate::frame::{Frame, FrameError};

mod any;
mod dial;
pub mod grpc;
pub mod inproc;
pub mod tcp;

#[cfg(test)]
mod conformance;

/// The sending half of a link.
pub trait FrameSink: Send + 'static {
    /// Sends one frame; returns when the transport has taken it. A dropped future may or may not have sent the frame, but leaves
    /// the stream whole: the next call continues it.
    ///
    /// # Errors
    /// [`LinkError::Frame`] for a frame that the receiver would refuse (the link stays usable); anything else ends the link.
    fn send(&mut self, frame: Frame) -> impl Future<Output = Result<(), LinkError>> + Send;

    /// Ends this direction in order: the peer receives what was sent, then the end. The other direction goes on.
    fn close(&mut self) -> impl Future<Output = ()> + Send;
}

/// The receiving half of a link.
pub trait FrameSource: Send + 'static {
    /// The next frame, or `None` once the peer closed its direction in order. Cancel-safe.
    ///
    /// # Errors
    /// The link failed or the peer sent something that is no frame; nothing more will come.
    fn recv(&mut self) -> impl Future<Output = Result<Option<Frame>, LinkError>> + Send;
}

/// An open link: frames in order, both directions at once.
pub trait Link: Send + 'static {
    /// Sending half.
    type Sink: FrameSink;
    /// Receiving half.
    type Source: FrameSource;

    /// Takes the halves apart.
    fn split(self) -> (Self::Sink, Self::Source);

    /// The transport.
    fn kind(&self) -> LinkKind;

    /// The peer's address, for messages.
    fn peer(&self) -> &str;
}

/// A link that cannot be opened or has failed.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    /// The peer sent something that is not a frame, or the caller would.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The operating system's word.
    #[error("{peer}: {source}")]
    Io {
        /// The peer's address.
        peer: String,
        /// What it said.
        source: io::Error,
    },
    /// The gRPC layer's word.
    #[error("{peer}: gRPC {}: {}", .status.code(), .status.message())]
    Grpc {
        /// The peer's address.
        peer: String,
        /// What it said.
        status: Box<tonic::Status>,
    },
    /// The peer is gone.
    #[error("{peer}: the peer closed the link")]
    Closed {
        /// The peer's address.
        peer: String,
    },
    /// Nobody could be reached.
    #[error("cannot connect to {addr} over {kind}: {reason}")]
    Connect {
        /// Transport.
        kind: LinkKind,
        /// Address.
        addr: String,
        /// Why.
        reason: String,
    },
    /// A worker offers no address for the transport asked for.
    #[error("the worker offers no address for --link {choice}; it offers {offered}")]
    NoAddress {
        /// What was asked for.
        choice: LinkChoice,
        /// What there is.
        offered: String,
    },
}

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
