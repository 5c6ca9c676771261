//! One type over all transports, chosen at run time.

use std::io;

use super::grpc::{GrpcLink, GrpcListener, GrpcSink, GrpcSource};
use super::inproc::{InprocLink, InprocListener, InprocSink, InprocSource};
use super::tcp::{TcpLink, TcpLinkListener, TcpSink, TcpSource};
use super::{FrameSink, FrameSource, Link, LinkError, LinkKind};
use crate::frame::Frame;

/// An open link of any transport.
#[derive(Debug)]
pub enum AnyLink {
    /// In one process.
    Inproc(InprocLink),
    /// TCP.
    Tcp(TcpLink),
    /// gRPC.
    Grpc(GrpcLink),
}

impl Link for AnyLink {
    type Sink = AnySink;
    type Source = AnySource;

    fn split(self) -> (AnySink, AnySource) {
        match self {
            Self::Inproc(link) => {
                let (sink, source) = link.split();
                (AnySink::Inproc(sink), AnySource::Inproc(source))
            }
            Self::Tcp(link) => {
                let (sink, source) = link.split();
                (AnySink::Tcp(sink), AnySource::Tcp(source))
            }
            Self::Grpc(link) => {
                let (sink, source) = link.split();
                (AnySink::Grpc(sink), AnySource::Grpc(source))
            }
        }
    }

    fn kind(&self) -> LinkKind {
        match self {
            Self::Inproc(link) => link.kind(),
            Self::Tcp(link) => link.kind(),
            Self::Grpc(link) => link.kind(),
        }
    }

    fn peer(&self) -> &str {
        match self {
            Self::Inproc(link) => link.peer(),
            Self::Tcp(link) => link.peer(),
            Self::Grpc(link) => link.peer(),
        }
    }
}

/// Sending half.
#[derive(Debug)]
pub enum AnySink {
    /// In one process.
    Inproc(InprocSink),
    /// TCP.
    Tcp(TcpSink),
    /// gRPC.
    Grpc(GrpcSink),
}

impl FrameSink for AnySink {
    async fn send(&mut self, frame: Frame) -> Result<(), LinkError> {
        match self {
            Self::Inproc(sink) => sink.send(frame).await,
            Self::Tcp(sink) => sink.send(frame).await,
            Self::Grpc(sink) => sink.send(frame).await,
        }
    }

    async fn close(&mut self) {
        match self {
            Self::Inproc(sink) => sink.close().await,
            Self::Tcp(sink) => sink.close().await,
            Self::Grpc(sink) => sink.close().await,
        }
    }
}

/// Receiving half.
#[derive(Debug)]
pub enum AnySource {
    /// In one process.
    Inproc(InprocSource),
    /// TCP.
    Tcp(TcpSource),
    /// gRPC.
    Grpc(GrpcSource),
}

impl FrameSource for AnySource {
    async fn recv(&mut self) -> Result<Option<Frame>, LinkError> {
        match self {
            Self::Inproc(source) => source.recv().await,
            Self::Tcp(source) => source.recv().await,
            Self::Grpc(source) => source.recv().await,
        }
    }
}

/// A listener of any transport.
#[derive(Debug)]
pub enum AnyListener {
    /// In one process.
    Inproc(InprocListener),
    /// TCP.
    Tcp(TcpLinkListener),
    /// gRPC.
    Grpc(GrpcListener),
}

impl AnyListener {
    /// The next link. Cancel-safe.
    ///
    /// # Errors
    /// Accepting failed; the listener may work again later (out of file descriptors) or have ended.
    pub async fn accept(&mut self) -> io::Result<AnyLink> {
        match self {
            Self::Inproc(listener) => listener.accept().await.map(AnyLink::Inproc),
            Self::Tcp(listener) => listener.accept().await.map(AnyLink::Tcp),
            Self::Grpc(listener) => listener.accept().await.map(AnyLink::Grpc),
        }
    }
}
