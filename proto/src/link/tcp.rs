//! Frames over TCP: no delay on either side, one vectored write per frame, a receive buffer that is reused once frames are dropped.

use std::io::{self, IoSlice};
use std::net::SocketAddr;
use std::sync::OnceLock;
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};

use super::{FrameSink, FrameSource, Link, LinkError, LinkKind};
use crate::frame::{Frame, FrameError, HEADER_LEN, RawHeader};

/// Socket buffer asked for in each direction: a whole wire piece, so that a sender need not wait for a busy receiver.
const SOCKET_BUFFER: usize = 4 << 20;
/// Space offered to a read while the length of the next frame is unknown: a decode row with its header fits.
const READ_CHUNK: usize = 64 << 10;

/// An open TCP link.
#[derive(Debug)]
pub struct TcpLink {
    stream: TcpStream,
    peer: String,
}

impl TcpLink {
    /// Wraps a connected stream and sets its options.
    ///
    /// # Errors
    /// The socket is gone already.
    pub fn new(stream: TcpStream) -> io::Result<Self> {
        configure(&stream)?;
        let peer = stream.peer_addr()?.to_string();
        Ok(Self { stream, peer })
    }

    /// Connects to `host:port`.
    ///
    /// # Errors
    /// [`LinkError::Connect`].
    pub async fn connect(addr: &str) -> Result<Self, LinkError> {
        let fail = |e: io::Error| LinkError::Connect { kind: LinkKind::Tcp, addr: addr.to_owned(), reason: e.to_string() };
        let stream = TcpStream::connect(addr).await.map_err(fail)?;
        Self::new(stream).map_err(fail)
    }
}

impl Link for TcpLink {
    type Sink = TcpSink;
    type Source = TcpSource;

    fn split(self) -> (TcpSink, TcpSource) {
        let (read, write) = self.stream.into_split();
        let sink = TcpSink { write, peer: self.peer.clone(), header: Bytes::new(), payload: Bytes::new() };
        (sink, TcpSource { read, peer: self.peer, buffer: BytesMut::new() })
    }

    fn kind(&self) -> LinkKind {
        LinkKind::Tcp
    }

    fn peer(&self) -> &str {
        &self.peer
    }
}

/// No Nagle (40 ms per hop on one side), keepalive against vanished hosts, big buffers where the system allows them.
pub(super) fn configure(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let socket = SockRef::from(stream);
    let keepalive = TcpKeepalive::new().with_time(Duration::from_secs(5)).with_interval(Duration::from_secs(2)).with_retries(3);
    // Best effort from here: a kernel that refuses still carries the link.
    let _ = socket.set_tcp_keepalive(&keepalive);
    if buffers_allowed() {
        let _ = socket.set_send_buffer_size(SOCKET_BUFFER);
        let _ = socket.set_recv_buffer_size(SOCKET_BUFFER);
    }
    Ok(())
}

/// A size that is asked for turns the kernel's own tuning off, so it is asked for only where the whole of it is granted.
fn buffers_allowed() -> bool {
    static ALLOWED: OnceLock<bool> = OnceLock::new();
    *ALLOWED.get_or_init(|| {
        ["/proc/sys/net/core/rmem_max", "/proc/sys/net/core/wmem_max"].iter().all(|path| {
            let limit = std::fs::read_to_string(path).ok().and_then(|text| text.trim().parse::<usize>().ok());
            limit.is_some_and(|limit| limit >= SOCKET_BUFFER)
        })
    })
}

/// Sending half.
#[derive(Debug)]
pub struct TcpSink {
    write: OwnedWriteHalf,
    peer: String,
    /// What is left of the frame being written: kept here so that a dropped `send` does not tear it.
    header: Bytes,
    payload: Bytes,
}

impl TcpSink {
    async fn flush(&mut self) -> Result<(), LinkError> {
        while !self.header.is_empty() || !self.payload.is_empty() {
            let parts = [IoSlice::new(&self.header), IoSlice::new(&self.payload)];
            let parts = if self.header.is_empty() { &parts[1..] } else { &parts[..] };
            match self.write.write_vectored(parts).await {
                Ok(0) => return Err(LinkError::Closed { peer: self.peer.clone() }),
                Ok(written) => {
                    let of_header = written.min(self.header.len());
                    self.header.advance(of_header);
                    self.payload.advance(written - of_header);
                }
                Err(source) => return Err(LinkError::Io { peer: self.peer.clone(), source }),
            }
        }
        // Lets the owner of the payload reuse its buffer.
        self.payload = Bytes::new();
        Ok(())
    }
}

impl FrameSink for TcpSink {
    async fn send(&mut self, frame: Frame) -> Result<(), LinkError> {
        frame.validate()?;
        self.flush().await?;
        self.header = Bytes::copy_from_slice(&frame.header.encode(&frame.payload));
        self.payload = frame.payload;
        self.flush().await
    }

    async fn close(&mut self) {
        // A peer that is gone needs no farewell.
        if self.flush().await.is_ok() {
            let _ = self.write.shutdown().await;
        }
    }
}

/// Receiving half.
#[derive(Debug)]
pub struct TcpSource {
    read: OwnedReadHalf,
    peer: String,
    /// Bytes received and not yet handed out.
    buffer: BytesMut,
}

impl TcpSource {
    /// Takes a whole frame out of the buffer, or says how many bytes it lacks.
    fn parse(&mut self) -> Result<Result<Frame, usize>, FrameError> {
        if self.buffer.len() < HEADER_LEN {
            return Ok(Err(READ_CHUNK));
        }
        let raw = RawHeader::decode(&self.buffer)?;
        let needed = HEADER_LEN + raw.payload_len();
        if self.buffer.len() < needed {
            return Ok(Err(needed - self.buffer.len()));
        }
        self.buffer.advance(HEADER_LEN);
        let payload = self.buffer.split_to(raw.payload_len()).freeze();
        raw.with_payload(payload).map(Ok)
    }
}

impl FrameSource for TcpSource {
    async fn recv(&mut self) -> Result<Option<Frame>, LinkError> {
        loop {
            let lacking = match self.parse()? {
                Ok(frame) => return Ok(Some(frame)),
                Err(lacking) => lacking,
            };
            // Takes the old allocation back if all its frames are dropped.
            self.buffer.reserve(lacking.max(READ_CHUNK));
            match self.read.read_buf(&mut self.buffer).await {
                Ok(0) if self.buffer.is_empty() => return Ok(None),
                Ok(0) => {
                    let what = if self.buffer.len() < HEADER_LEN { "header" } else { "payload" };
                    let needed = self.buffer.len() + lacking;
                    return Err(FrameError::Truncated { what, needed, got: self.buffer.len() }.into());
                }
                Ok(_) => {}
                Err(source) => return Err(LinkError::Io { peer: self.peer.clone(), source }),
            }
        }
    }
}

/// A listening TCP socket.
#[derive(Debug)]
pub struct TcpLinkListener {
    listener: TcpListener,
}

impl TcpLinkListener {
    /// Takes a bound, non-blocking socket into the current runtime.
    ///
    /// # Errors
    /// The runtime refuses it.
    pub fn from_std(listener: std::net::TcpListener) -> io::Result<Self> {
        Ok(Self { listener: TcpListener::from_std(listener)? })
    }

    /// The bound address.
    ///
    /// # Errors
    /// The socket is gone.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// The next link. Cancel-safe.
    ///
    /// # Errors
    /// Accepting failed (a connection that died at once is skipped).
    pub async fn accept(&mut self) -> io::Result<TcpLink> {
        loop {
            let (stream, _) = self.listener.accept().await?;
            if let Ok(link) = TcpLink::new(stream) {
                return Ok(link);
            }
        }
    }
}

/// Binds a non-blocking socket that [`TcpLinkListener::from_std`] and [`super::grpc::GrpcListener::from_std`] take.
///
/// # Errors
/// The address is taken or not of this host.
pub fn bind(addr: SocketAddr) -> io::Result<std::net::TcpListener> {
    let listener = std::net::TcpListener::bind(addr)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}
