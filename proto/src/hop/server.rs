//! Expert side of the hop (being written: signatures are settled, nothing is served until then).

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::ExpertEngine;
use crate::payload::Precision;
use crate::route_table::Address;

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
}

/// Counters for heartbeats and metrics; all since start.
#[derive(Debug, Default)]
pub struct ServerStats {
    rows: AtomicU64,
    busy_nanos: AtomicU64,
    connections: AtomicU64,
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

/// Bound sockets, not yet served: a worker tells the coordinator its addresses before it knows its shards.
#[derive(Debug)]
pub struct ExpertListener {
    addresses: Vec<Address>,
}

impl ExpertListener {
    /// Binds the links to serve; port 0 takes a free one.
    ///
    /// # Errors
    /// The address is taken or not of this host.
    pub fn bind(tcp: Option<SocketAddr>, grpc: Option<SocketAddr>) -> io::Result<Self> {
        let _ = (tcp, grpc);
        Ok(Self { addresses: Vec::new() })
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
        let _ = (options, engine);
        Ok(ExpertServer { addresses: self.addresses, stats: Arc::default() })
    }
}

/// A serving expert worker. Dropping it stops it.
#[derive(Debug)]
pub struct ExpertServer {
    addresses: Vec<Address>,
    stats: Arc<ServerStats>,
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

    /// Stops: no new connection, running batch finished, links closed, thread joined.
    pub fn stop(self) {}
}
