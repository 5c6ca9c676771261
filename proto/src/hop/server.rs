//! Expert side of the hop: bound sockets, then a thread that reads links and runs the engine, both on one `current_thread` runtime, so
//! that no other thread has to wake between a frame and its rows. `server/serve.rs` is that thread, `gather.rs` its memory.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::{ExpertEngine, SharedMemory};
use crate::experts::v1::Hello;
use crate::frame::{MAX_PAYLOAD, VERSION};
use crate::link::{LinkKind, inproc, tcp};
use crate::payload::{Precision, RowShape};
use crate::route_table::Address;

mod serve;

/// What an expert worker serves, and what it demands of the other side.
#[derive(Clone, Debug)]
pub struct ServerOptions {
    /// Name of this worker (control.v1).
    pub name: String,
    /// Epoch of this process.
    pub epoch: u64,
    /// Host identity.
    pub host: String,
    /// Fingerprint of the checkpoint.
    pub fingerprint: String,
    /// Name of the engine's arithmetic.
    pub arithmetic: String,
    /// Precision of the payload.
    pub precision: Precision,
    /// Elements of an activation row.
    pub hidden: usize,
    /// Routed experts per row.
    pub topk: usize,
    /// Shards held.
    pub shards: Vec<u32>,
    /// Largest submission, in rows; also the largest joined batch.
    pub max_rows: u32,
    /// How long a wait spins before it parks.
    pub spin: Duration,
    /// Memory to share with attention workers of this machine.
    pub memory: Option<Arc<dyn SharedMemory>>,
}

/// Counters for heartbeats and metrics; all since start.
#[derive(Debug, Default)]
pub struct ServerStats {
    rows: AtomicU64,
    busy_nanos: AtomicU64,
    connections: AtomicU64,
    #[cfg(test)]
    killed: AtomicU64,
}

impl ServerStats {
    /// Rows computed.
    pub fn rows(&self) -> u64 {
        self.rows.load(Ordering::Relaxed)
    }

    /// Time inside the engine.
    pub fn busy(&self) -> Duration {
        Duration::from_nanos(self.busy_nanos.load(Ordering::Relaxed))
    }

    /// Attention workers connected now.
    pub fn connections(&self) -> u64 {
        self.connections.load(Ordering::Relaxed)
    }
}

impl ServerOptions {
    fn shape(&self) -> RowShape {
        RowShape { hidden: self.hidden, topk: self.topk, precision: self.precision }
    }

    fn welcome(&self) -> Hello {
        Hello {
            protocol_version: u32::from(VERSION),
            name: self.name.clone(),
            epoch: self.epoch,
            peer_epoch: 0,
            fingerprint: self.fingerprint.clone(),
            precision: self.precision.to_string(),
            hidden: self.hidden as u32,
            topk: self.topk as u32,
            shards: self.shards.clone(),
            max_rows: self.max_rows,
            max_payload: MAX_PAYLOAD as u32,
            credits: super::CREDITS,
            arithmetic: self.arithmetic.clone(),
            host: self.host.clone(),
            shared: Vec::new(),
            shared_rows: 0,
        }
    }
}

/// Bound sockets, not yet served: a worker tells the coordinator its addresses before it knows its shards.
#[derive(Debug)]
pub struct ExpertListener {
    addresses: Vec<Address>,
    sockets: Vec<Socket>,
}

#[derive(Debug)]
enum Socket {
    Tcp(std::net::TcpListener),
    Grpc(std::net::TcpListener),
    Inproc(inproc::InprocListener),
}

impl ExpertListener {
    /// Binds the links to serve; port 0 takes a free one.
    ///
    /// # Errors
    /// The address is taken or not of this host.
    pub fn bind(tcp: Option<SocketAddr>, grpc: Option<SocketAddr>) -> io::Result<Self> {
        let mut listener = Self { addresses: Vec::new(), sockets: Vec::new() };
        for (kind, addr) in [(LinkKind::Tcp, tcp), (LinkKind::Grpc, grpc)] {
            let Some(addr) = addr else { continue };
            let named = |e: io::Error| io::Error::new(e.kind(), format!("cannot listen on {addr} for {kind} links: {e}"));
            let socket = tcp::bind(addr).map_err(named)?;
            listener.addresses.push(Address { link: kind, addr: socket.local_addr()?.to_string() });
            listener.sockets.push(if kind == LinkKind::Tcp { Socket::Tcp(socket) } else { Socket::Grpc(socket) });
        }
        Ok(listener)
    }

    /// Listens under a name for links of the same process, besides what is bound already.
    ///
    /// # Errors
    /// The name is taken.
    pub fn with_inproc(mut self, name: &str) -> io::Result<Self> {
        self.sockets.push(Socket::Inproc(inproc::InprocListener::bind(name)?));
        self.addresses.push(Address { link: LinkKind::Inproc, addr: name.to_owned() });
        Ok(self)
    }

    /// Where it listens, for control.v1's Hello. An unspecified host (0.0.0.0) stands as bound; the worker replaces it by the
    /// address that others reach it at.
    pub fn addresses(&self) -> &[Address] {
        &self.addresses
    }

    /// Starts to serve `engine` on a thread of its own, links and all.
    ///
    /// # Errors
    /// The thread or its runtime cannot start.
    pub fn serve(self, options: ServerOptions, engine: Box<dyn ExpertEngine>) -> io::Result<ExpertServer> {
        let runtime = super::runtime()?;
        let stop = CancellationToken::new();
        let stats = Arc::new(ServerStats::default());
        let thread = {
            let (stop, stats, sockets) = (stop.clone(), Arc::clone(&stats), self.sockets);
            let run = move || runtime.block_on(serve::run(sockets, options, engine, stats, stop));
            std::thread::Builder::new().name("tandem-hop".into()).spawn(run)?
        };
        Ok(ExpertServer { addresses: self.addresses, stats, stop, thread: Some(thread) })
    }
}

/// A serving expert worker. Dropping it stops it.
#[derive(Debug)]
pub struct ExpertServer {
    addresses: Vec<Address>,
    stats: Arc<ServerStats>,
    stop: CancellationToken,
    thread: Option<JoinHandle<io::Result<()>>>,
}

impl ExpertServer {
    /// Where it listens.
    pub fn addresses(&self) -> &[Address] {
        &self.addresses
    }

    /// Its counters.
    pub fn stats(&self) -> Arc<ServerStats> {
        Arc::clone(&self.stats)
    }

    /// Whether the thread still runs; it ends by itself only when its sockets fail.
    pub fn is_running(&self) -> bool {
        self.thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }

    /// Stops: no new connection, running batch finished and answered, links closed, thread joined.
    ///
    /// # Errors
    /// What ended the server before it was told to.
    pub fn stop(mut self) -> io::Result<()> {
        self.end()
    }

    /// As `kill -9` would: from now on nothing more is sent; links break once the engine has returned.
    #[cfg(test)]
    pub(crate) fn condemn(&self) {
        self.stats.killed.store(1, Ordering::Relaxed);
        self.stop.cancel();
    }

    fn end(&mut self) -> io::Result<()> {
        self.stop.cancel();
        let Some(thread) = self.thread.take() else { return Ok(()) };
        thread.join().unwrap_or_else(|_| Err(io::Error::other("the thread of the expert server panicked")))
    }
}

impl Drop for ExpertServer {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            tracing::error!(%error, "the expert server ended badly");
        }
    }
}
