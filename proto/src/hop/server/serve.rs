//! The expert server's thread: one task per listener, a reader and a writer per connection, and the main loop, which waits for complete
//! submissions and runs the engine between two polls of the links.

use std::collections::HashMap;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::{ServerOptions, ServerStats, Socket};
use crate::experts::v1::Hello;
use crate::frame::{ErrorCode, Frame, Header, Kind};
use crate::hop::engine::{Dispatch, ExpertEngine};
use crate::hop::gather::{Accepted, Batch, ConnId, Gather, GatherLimits, error_frame};
use crate::hop::outbox::{Outbox, is_bulk};
use crate::hop::shared::{HeldLease, SharedMemory};
use crate::hop::{HandshakeError, handshake, turn};
use crate::link::grpc::GrpcListener;
use crate::link::tcp::TcpLinkListener;
use crate::link::{AnyLink, AnyListener, AnySource, FrameSource, Link, LinkError, LinkKind};
use crate::payload::ExpertTimings;

/// Limit of a handshake: a peer that connects and says nothing does not stay.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a stopping server goes on writing answers.
const FLUSH_TIMEOUT: Duration = Duration::from_millis(500);

/// What the tasks of the thread share.
struct Core {
    welcome: Hello,
    memory: Option<Arc<dyn SharedMemory>>,
    spin: Duration,
    gather: Mutex<Gather>,
    connections: Mutex<HashMap<ConnId, Arc<Outbox>>>,
    /// Steps that began and that the engine has not been told of: (step, rows).
    begun: Mutex<Vec<(u64, u32)>>,
    /// Receivers spin until then.
    spin_until: Mutex<Instant>,
    work: Notify,
    stats: Arc<ServerStats>,
}

impl Core {
    /// A step is in flight: spin from now.
    fn touch(&self, now: Instant) {
        *self.spin_until.lock() = now + self.spin;
        self.work.notify_one();
    }
}

/// Serves until `stop`.
pub(super) async fn run(
    sockets: Vec<Socket>,
    options: ServerOptions,
    mut engine: Box<dyn ExpertEngine>,
    stats: Arc<ServerStats>,
    stop: CancellationToken,
) -> io::Result<()> {
    let limits = GatherLimits { shape: options.shape(), shards: options.shards.clone(), max_rows: options.max_rows };
    let core = Arc::new(Core {
        welcome: options.welcome(),
        memory: options.memory.clone(),
        spin: options.spin,
        gather: Mutex::new(Gather::new(limits)),
        connections: Mutex::default(),
        begun: Mutex::default(),
        spin_until: Mutex::new(Instant::now()),
        work: Notify::new(),
        stats,
    });
    engine.bind_thread();
    for socket in sockets {
        let listener = match socket {
            Socket::Tcp(socket) => AnyListener::Tcp(TcpLinkListener::from_std(socket)?),
            Socket::Grpc(socket) => AnyListener::Grpc(GrpcListener::from_std(socket)?),
            Socket::Inproc(listener) => AnyListener::Inproc(listener),
        };
        tokio::spawn(accept(Arc::clone(&core), listener, stop.clone()));
    }
    loop {
        tokio::select! {
            biased;
            () = stop.cancelled() => break,
            () = wait_for_work(&core) => {}
        }
        for (step_id, rows) in std::mem::take(&mut *core.begun.lock()) {
            engine.begin_step(step_id, rows);
        }
        // Once to look at the sockets, once for their readers: what has arrived on other links by now joins the batch.
        tokio::task::yield_now().await;
        tokio::task::yield_now().await;
        let batch = core.gather.lock().take_batch();
        if let Some(batch) = batch {
            compute(&core, engine.as_mut(), batch);
        }
    }
    #[cfg(test)]
    if core.stats.killed.load(Ordering::Relaxed) == 1 {
        return Ok(());
    }
    flush(&core).await;
    Ok(())
}

/// Spins while a step is in flight, then parks.
async fn wait_for_work(core: &Core) {
    loop {
        if core.gather.lock().has_work() || !core.begun.lock().is_empty() {
            return;
        }
        if Instant::now() < *core.spin_until.lock() {
            turn().await;
        } else {
            core.work.notified().await;
        }
    }
}

/// Runs the engine on one batch and queues the answers.
fn compute(core: &Core, engine: &mut dyn ExpertEngine, batch: Batch) {
    let start = Instant::now();
    let dispatches: Vec<Dispatch<'_>> = batch.groups.iter().map(|group| group.dispatch()).collect();
    let computed = catch_unwind(AssertUnwindSafe(|| engine.execute(batch.layer, &dispatches)));
    let compute = start.elapsed();
    let results = match computed {
        Ok(results) if results.len() == dispatches.len() => results,
        Ok(results) => {
            let message = format!("the engine returned {} results for {} dispatches", results.len(), dispatches.len());
            vec![Err(message); dispatches.len()]
        }
        Err(_) => vec![Err("the engine panicked".to_owned()); dispatches.len()],
    };
    drop(dispatches);
    let rows: usize = batch.groups.iter().map(|group| group.rows).sum();
    core.stats.rows.fetch_add(rows as u64, Ordering::Relaxed);
    core.stats.busy_nanos.fetch_add(compute.as_nanos() as u64, Ordering::Relaxed);
    let connections = core.connections.lock();
    let mut gather = core.gather.lock();
    for (group, result) in batch.groups.into_iter().zip(results) {
        if let Err(message) = &result {
            tracing::error!(layer = batch.layer, shard = group.key.shard_id, rows = group.rows, %message, "a dispatch failed");
        }
        let timings = ExpertTimings { queue: start.saturating_duration_since(group.complete_at), compute };
        let outbox = connections.get(&group.owner);
        for frame in gather.answer(group, result, timings) {
            if let Some(outbox) = outbox {
                outbox.post(frame);
            }
        }
    }
    drop((gather, connections));
    // The next layer of the same step is due soon.
    core.touch(Instant::now());
}

/// Lets the writers finish what was computed, then closes.
async fn flush(core: &Core) {
    let outboxes: Vec<Arc<Outbox>> = core.connections.lock().values().cloned().collect();
    for outbox in &outboxes {
        outbox.close();
    }
    let idle = async {
        while !outboxes.iter().all(|outbox| outbox.is_idle()) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    if tokio::time::timeout(FLUSH_TIMEOUT, idle).await.is_err() {
        tracing::warn!("stopped with answers that could not be sent");
    }
}

async fn accept(core: Arc<Core>, mut listener: AnyListener, stop: CancellationToken) {
    let mut next: ConnId = match &listener {
        AnyListener::Inproc(_) => 0,
        AnyListener::Tcp(_) => 1,
        AnyListener::Grpc(_) => 2,
    };
    loop {
        match listener.accept().await {
            Ok(link) => {
                // Ids of the three listeners are apart modulo 3.
                next += 3;
                tokio::spawn(connection(Arc::clone(&core), link, next));
            }
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted && !matches!(listener, AnyListener::Tcp(_)) => {
                tracing::error!(%error, "a listener of the expert hop ended");
                stop.cancel();
                return;
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a link");
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

/// One attention worker's link, from handshake to end.
async fn connection(core: Arc<Core>, link: AnyLink, id: ConnId) {
    let (kind, peer) = (link.kind(), link.peer().to_owned());
    let (mut sink, mut source) = link.split();
    let mut lease = None;
    let welcome = |hello: &Hello| {
        lease = lease_for(&core, hello);
        let (shared, shared_rows) = lease.as_ref().map_or((Vec::new(), 0), |held| (held.handle.clone(), held.lease.rows));
        Hello { shared, shared_rows, ..core.welcome.clone() }
    };
    let shake = handshake::answer(&mut sink, &mut source, &core.welcome, welcome);
    let hello = match tokio::time::timeout(HANDSHAKE_TIMEOUT, shake).await {
        Ok(Ok(hello)) => hello,
        Ok(Err(error @ HandshakeError::Mismatch { .. })) => return tracing::error!(%peer, %kind, %error, "refused an attention worker"),
        Ok(Err(error)) => return tracing::warn!(%peer, %kind, %error, "a data link did not come up"),
        Err(_) => return tracing::warn!(%peer, %kind, "a data link said nothing for {HANDSHAKE_TIMEOUT:?}"),
    };
    tracing::info!(attention = %hello.name, epoch = hello.epoch, %peer, %kind, shared = lease.is_some(), "attention worker connected");
    if let Some(held) = &lease {
        core.gather.lock().lend(id, held.lease);
    }
    let outbox = Arc::new(Outbox::new(hello.credits));
    core.connections.lock().insert(id, Arc::clone(&outbox));
    core.stats.connections.fetch_add(1, Ordering::Relaxed);
    let sent_bytes = metrics::counter!("tandem_link_bytes_total", "dir" => "sent", "link" => kind.name());
    let writing = outbox.drain(&mut sink, |bytes, _| sent_bytes.increment(bytes as u64));
    // Whichever direction ends first ends the connection: without answers, or without questions, it has no use.
    let ended = tokio::select! {
        read = read(&core, &mut source, &outbox, id, &hello, kind) => read,
        written = writing => written,
    };
    core.connections.lock().remove(&id);
    core.gather.lock().disconnect(id);
    drop(lease);
    core.stats.connections.fetch_sub(1, Ordering::Relaxed);
    match ended {
        Ok(()) => tracing::info!(attention = %hello.name, %peer, "attention worker disconnected"),
        Err(error) => tracing::warn!(attention = %hello.name, %peer, %error, "lost an attention worker"),
    }
}

/// Memory for the rows of an attention worker that lends its own, where each side can open the other's.
fn lease_for(core: &Core, hello: &Hello) -> Option<HeldLease> {
    let memory = core.memory.as_ref().filter(|_| !hello.shared.is_empty())?;
    let opened = HeldLease::new(memory, &hello.shared, hello.shared_rows);
    opened.inspect_err(|reason| tracing::info!(attention = %hello.name, %reason, "its memory cannot be shared: rows go over the link")).ok()
}

/// Reads frames into the gathering memory until the link ends.
async fn read(core: &Core, source: &mut AnySource, outbox: &Outbox, id: ConnId, hello: &Hello, kind: LinkKind) -> Result<(), LinkError> {
    let received_bytes = metrics::counter!("tandem_link_bytes_total", "dir" => "received", "link" => kind.name());
    let duplicates = metrics::counter!("tandem_expert_duplicate_dispatches_total");
    while let Some(frame) = source.recv().await? {
        received_bytes.increment(frame.wire_len() as u64);
        let now = Instant::now();
        match frame.header.kind {
            Kind::Dispatch => {
                let (bulk, header) = (is_bulk(&frame), frame.header);
                let accepted = if header.epoch == hello.epoch {
                    core.gather.lock().accept(id, &header, &frame.payload, now)
                } else {
                    Err(format!("epoch is {:#x}; the handshake said {:#x}", header.epoch, hello.epoch))
                };
                drop(frame);
                if bulk {
                    outbox.post(Frame::bare(Header { aux: 1, ..Header::new(Kind::Credit) }));
                }
                match accepted {
                    Ok(Accepted::Gathered | Accepted::Ready) => {}
                    Ok(Accepted::Duplicate) => duplicates.increment(1),
                    Ok(Accepted::Replay(frame)) => {
                        duplicates.increment(1);
                        outbox.post(frame);
                    }
                    Err(message) => {
                        tracing::warn!(attention = %hello.name, layer = header.layer, %message, "refused a dispatch");
                        outbox.post(error_frame(header, ErrorCode::Invalid, &message));
                    }
                }
                core.touch(now);
            }
            Kind::BeginStep => {
                core.gather.lock().begin_step(frame.header.epoch, frame.header.step_id);
                core.begun.lock().push((frame.header.step_id, frame.header.rows));
                core.touch(now);
            }
            Kind::Credit => outbox.grant(frame.header.aux),
            Kind::Ping => outbox.post(Frame { header: Header { kind: Kind::Pong, ..frame.header }, payload: frame.payload }),
            Kind::Pong => {}
            other => tracing::warn!(attention = %hello.name, kind = ?other, "ignored a frame that an attention worker does not send"),
        }
    }
    Ok(())
}
