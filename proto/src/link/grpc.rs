//! Frames in a bidirectional gRPC stream, for networks where only HTTP/2 passes. Header and payload are opaque `bytes` fields.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use futures::StreamExt;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::transport::{Endpoint, Server};
use tonic::{Request, Response, Status, Streaming};

use super::{FrameSink, FrameSource, Link, LinkError, LinkKind, tcp};
use crate::experts::v1 as wire;
use crate::experts::v1::experts_client::ExpertsClient;
use crate::experts::v1::experts_server::{Experts, ExpertsServer};
use crate::frame::{Frame, FrameError, HEADER_LEN, MAX_PAYLOAD, RawHeader};

/// Frames handed to HTTP/2 and not yet taken by it: enough to keep it busy, few enough that a small frame overtakes in our own queue.
const QUEUE: usize = 2;
/// Flow-control window of a stream: several wire pieces.
const STREAM_WINDOW: u32 = 16 << 20;
/// Flow-control window of a connection.
const CONNECTION_WINDOW: u32 = 32 << 20;
/// Largest HTTP/2 frame: fewer of them for a piece than with the default of 16 KiB.
const HTTP2_FRAME: u32 = 1 << 20;
/// Largest gRPC message: a piece, its header and field tags.
const MAX_MESSAGE: usize = MAX_PAYLOAD + 4 * HEADER_LEN;

/// What a side sends: requests are plain frames, responses are results.
#[derive(Debug)]
enum Outbox {
    Client(mpsc::Sender<wire::Frame>),
    Server(mpsc::Sender<Result<wire::Frame, Status>>),
    Closed,
}

/// An open gRPC link.
#[derive(Debug)]
pub struct GrpcLink {
    outbox: Outbox,
    inbox: Streaming<wire::Frame>,
    peer: String,
}

impl GrpcLink {
    /// Connects to `host:port` and opens the stream.
    ///
    /// # Errors
    /// [`LinkError::Connect`].
    pub async fn connect(addr: &str) -> Result<Self, LinkError> {
        let fail = |reason: String| LinkError::Connect { kind: LinkKind::Grpc, addr: addr.to_owned(), reason };
        let endpoint = Endpoint::from_shared(format!("http://{addr}")).map_err(|e| fail(e.to_string()))?;
        let endpoint = endpoint
            .tcp_nodelay(true)
            .tcp_keepalive(Some(Duration::from_secs(5)))
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW);
        let channel = endpoint.connect().await.map_err(|e| fail(cause(&e)))?;
        let mut client = ExpertsClient::new(channel).max_decoding_message_size(MAX_MESSAGE).max_encoding_message_size(MAX_MESSAGE);
        let (outbox, requests) = mpsc::channel(QUEUE);
        let response = client.frames(ReceiverStream::new(requests)).await.map_err(|s| fail(s.to_string()))?;
        Ok(Self { outbox: Outbox::Client(outbox), inbox: response.into_inner(), peer: addr.to_owned() })
    }
}

/// The innermost cause: tonic's own text is only "transport error".
fn cause(error: &dyn std::error::Error) -> String {
    let mut last = error;
    while let Some(source) = last.source() {
        last = source;
    }
    last.to_string()
}

impl Link for GrpcLink {
    type Sink = GrpcSink;
    type Source = GrpcSource;

    fn split(self) -> (GrpcSink, GrpcSource) {
        (GrpcSink { outbox: self.outbox, peer: self.peer.clone() }, GrpcSource { inbox: self.inbox, peer: self.peer })
    }

    fn kind(&self) -> LinkKind {
        LinkKind::Grpc
    }

    fn peer(&self) -> &str {
        &self.peer
    }
}

/// Sending half.
#[derive(Debug)]
pub struct GrpcSink {
    outbox: Outbox,
    peer: String,
}

impl FrameSink for GrpcSink {
    async fn send(&mut self, frame: Frame) -> Result<(), LinkError> {
        frame.validate()?;
        let header = Bytes::copy_from_slice(&frame.header.encode(&frame.payload));
        let message = wire::Frame { header, payload: frame.payload };
        let taken = match &self.outbox {
            Outbox::Client(outbox) => outbox.send(message).await.is_ok(),
            Outbox::Server(outbox) => outbox.send(Ok(message)).await.is_ok(),
            Outbox::Closed => false,
        };
        if taken { Ok(()) } else { Err(LinkError::Closed { peer: self.peer.clone() }) }
    }

    async fn close(&mut self) {
        self.outbox = Outbox::Closed;
    }
}

/// Receiving half.
#[derive(Debug)]
pub struct GrpcSource {
    inbox: Streaming<wire::Frame>,
    peer: String,
}

impl FrameSource for GrpcSource {
    async fn recv(&mut self) -> Result<Option<Frame>, LinkError> {
        let message = match self.inbox.message().await {
            Ok(Some(message)) => message,
            Ok(None) => return Ok(None),
            Err(status) => return Err(LinkError::Grpc { peer: self.peer.clone(), status: Box::new(status) }),
        };
        if message.header.len() != HEADER_LEN {
            return Err(FrameError::Truncated { what: "header", needed: HEADER_LEN, got: message.header.len() }.into());
        }
        Ok(Some(RawHeader::decode(&message.header)?.with_payload(message.payload)?))
    }
}

/// A gRPC server that turns each `Frames` call into a link.
#[derive(Debug)]
pub struct GrpcListener {
    addr: SocketAddr,
    links: mpsc::Receiver<GrpcLink>,
    server: JoinHandle<()>,
}

impl GrpcListener {
    /// Serves a bound, non-blocking socket on the current runtime until dropped.
    ///
    /// # Errors
    /// The runtime refuses it.
    pub fn from_std(listener: std::net::TcpListener) -> io::Result<Self> {
        let listener = TcpListener::from_std(listener)?;
        let addr = listener.local_addr()?;
        let (links, accepted) = mpsc::channel(8);
        let service = ExpertsServer::new(Acceptor { links }).max_decoding_message_size(MAX_MESSAGE).max_encoding_message_size(MAX_MESSAGE);
        // `tcp_nodelay` of the builder does not reach sockets that are passed in, so each one is configured here. One that died at
        // once is left to HTTP/2 to find out.
        let incoming = TcpListenerStream::new(listener).map(|stream| {
            stream.inspect(|stream| {
                if let Err(error) = tcp::configure(stream) {
                    tracing::debug!(%error, "cannot configure an accepted gRPC socket");
                }
            })
        });
        let router = Server::builder()
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .max_frame_size(HTTP2_FRAME)
            .add_service(service);
        let server = tokio::spawn(async move {
            if let Err(error) = router.serve_with_incoming(incoming).await {
                tracing::error!(%addr, error = %cause(&error), "the gRPC server of the expert hop ended");
            }
        });
        Ok(Self { addr, links: accepted, server })
    }

    /// The bound address.
    pub fn local_addr(&self) -> SocketAddr {
        self.addr
    }

    /// The next link. Cancel-safe.
    ///
    /// # Errors
    /// The server has ended.
    pub async fn accept(&mut self) -> io::Result<GrpcLink> {
        self.links.recv().await.ok_or_else(|| io::Error::new(io::ErrorKind::ConnectionAborted, "the gRPC server has ended"))
    }
}

impl Drop for GrpcListener {
    fn drop(&mut self) {
        self.server.abort();
    }
}

/// The service: hands each stream to the listener.
#[derive(Debug)]
struct Acceptor {
    links: mpsc::Sender<GrpcLink>,
}

#[tonic::async_trait]
impl Experts for Acceptor {
    type FramesStream = ReceiverStream<Result<wire::Frame, Status>>;

    async fn frames(&self, request: Request<Streaming<wire::Frame>>) -> Result<Response<Self::FramesStream>, Status> {
        let peer = request.remote_addr().map_or_else(|| "gRPC peer".to_owned(), |addr| addr.to_string());
        let (outbox, responses) = mpsc::channel(QUEUE);
        let link = GrpcLink { outbox: Outbox::Server(outbox), inbox: request.into_inner(), peer };
        self.links.send(link).await.map_err(|_| Status::unavailable("the expert worker is stopping"))?;
        Ok(Response::new(ReceiverStream::new(responses)))
    }
}
