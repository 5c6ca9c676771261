//! One worker's link as the attention side sees it: dialling with the handshake, a reader and a writer task, and the queue of events
//! through which every task of the hop's runtime speaks to the step thread.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use metrics::{Counter, Histogram};
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::task::AbortHandle;

use crate::experts::v1::Hello;
use crate::frame::{Frame, Header, Kind};
use crate::hop::handshake;
use crate::hop::outbox::{Outbox, is_bulk};
use crate::hop::shared::OpenWindow;
use crate::link::{AnySink, AnySource, FrameSource, Link, LinkChoice, LinkKind, dial};
use crate::route_table::Holder;
use crate::telemetry::DISPATCH_SECONDS;

/// A session, unique within the hop's life.
pub(super) type SessionId = u64;

/// What happened on the links.
#[derive(Debug)]
pub(super) enum Event {
    /// A dial ended.
    Dialled { worker: String, session: SessionId, result: Result<Box<Established>, String> },
    /// A Combine or Error arrived.
    Frame { session: SessionId, frame: Frame, at: Instant },
    /// The last piece of a ticket was handed to the transport.
    Sent { ticket: u64, session: SessionId, at: Instant },
    /// The link ended.
    Closed { session: SessionId, reason: String },
}

/// Where tasks put events and the step thread finds them.
#[derive(Debug, Default)]
pub(super) struct Events {
    queue: Mutex<VecDeque<Event>>,
    pub arrived: Notify,
}

impl Events {
    fn push(&self, event: Event) {
        self.queue.lock().push_back(event);
        self.arrived.notify_one();
    }

    pub fn pop(&self) -> Option<Event> {
        self.queue.lock().pop_front()
    }
}

/// An open link after its handshake, not yet running.
#[derive(Debug)]
pub(super) struct Established {
    pub welcome: Hello,
    pub kind: LinkKind,
    pub reason: String,
    pub peer: String,
    sink: AnySink,
    source: AnySource,
}

/// Connects to `holder` and shakes hands, on the current runtime; the result arrives as [`Event::Dialled`].
pub(super) fn spawn_dial(
    events: &Arc<Events>,
    holder: &Holder,
    hello: Hello,
    session: SessionId,
    choice: LinkChoice,
    timeout: Duration,
) -> AbortHandle {
    let (events, worker, addresses) = (Arc::clone(events), holder.worker.clone(), holder.addresses.clone());
    let task = tokio::spawn(async move {
        let attempt = async {
            let dialled = dial(choice, &addresses, timeout).await.map_err(|e| e.to_string())?;
            let kind = dialled.link.kind();
            let peer = dialled.link.peer().to_owned();
            let (mut sink, mut source) = dialled.link.split();
            let shake = tokio::time::timeout(timeout, handshake::offer(&mut sink, &mut source, &hello));
            let welcome = match shake.await {
                Ok(welcome) => welcome.map_err(|e| e.to_string())?,
                Err(_) => return Err(format!("{peer} ({kind}): no Welcome within {timeout:?}")),
            };
            Ok(Box::new(Established { welcome, kind, reason: dialled.reason, peer, sink, source }))
        };
        let result = attempt.await;
        events.push(Event::Dialled { worker, session, result });
    });
    task.abort_handle()
}

/// A running session. Dropping it ends its tasks and closes the link.
#[derive(Debug)]
pub(super) struct Session {
    pub id: SessionId,
    pub kind: LinkKind,
    /// The worker's address on that link.
    pub peer: String,
    /// The worker sees rows in lent memory, and this side its partials.
    pub window: Option<OpenWindow>,
    pub shards: Vec<u32>,
    pub outbox: Arc<Outbox>,
    /// When the worker last answered, or the transport last took something.
    pub heard: Instant,
    taken: u64,
    pub metrics: SessionMetrics,
    tasks: [AbortHandle; 2],
}

/// Metric handles of one worker.
#[derive(Debug)]
pub(super) struct SessionMetrics {
    pub send: Histogram,
    pub queue: Histogram,
    pub compute: Histogram,
    pub ret: Histogram,
    pub rows: Counter,
}

impl SessionMetrics {
    fn new(worker: &str) -> Self {
        let phase = |phase: &'static str| metrics::histogram!(DISPATCH_SECONDS, "phase" => phase, "worker" => worker.to_owned());
        Self {
            send: phase("send"),
            queue: phase("queue"),
            compute: phase("compute"),
            ret: phase("return"),
            rows: metrics::counter!("tandem_hop_rows_total", "worker" => worker.to_owned()),
        }
    }
}

impl Session {
    /// Starts the reader and the writer on the current runtime.
    pub fn start(events: &Arc<Events>, id: SessionId, established: Established, worker: &str, window: Option<OpenWindow>) -> Self {
        let Established { welcome, kind, peer, mut sink, source, .. } = established;
        let outbox = Arc::new(Outbox::new(welcome.credits));
        let writer = {
            let (outbox, events) = (Arc::clone(&outbox), Arc::clone(events));
            let bytes_sent = metrics::counter!("tandem_link_bytes_total", "dir" => "sent", "link" => kind.name());
            tokio::spawn(async move {
                let sent = |bytes, ticket: Option<u64>| {
                    bytes_sent.increment(bytes as u64);
                    if let Some(ticket) = ticket {
                        events.push(Event::Sent { ticket, session: id, at: Instant::now() });
                    }
                };
                if let Err(error) = outbox.drain(&mut sink, sent).await {
                    events.push(Event::Closed { session: id, reason: error.to_string() });
                }
            })
        };
        let reader = tokio::spawn(read(Arc::clone(events), id, source, Arc::clone(&outbox), kind));
        Self {
            id,
            kind,
            peer,
            window,
            shards: welcome.shards,
            outbox,
            heard: Instant::now(),
            taken: 0,
            metrics: SessionMetrics::new(worker),
            tasks: [writer.abort_handle(), reader.abort_handle()],
        }
    }
}

impl Session {
    /// Counts frames that the transport took since the last look as a sign of life: a long submission over a slow network is no silence.
    pub fn look(&mut self, now: Instant) -> Instant {
        let taken = self.outbox.sent();
        if taken != self.taken {
            (self.taken, self.heard) = (taken, now);
        }
        self.heard
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

async fn read(events: Arc<Events>, session: SessionId, mut source: AnySource, outbox: Arc<Outbox>, kind: LinkKind) {
    let received = metrics::counter!("tandem_link_bytes_total", "dir" => "received", "link" => kind.name());
    let reason = loop {
        let frame = match source.recv().await {
            Ok(Some(frame)) => frame,
            Ok(None) => break "the worker closed the link".to_owned(),
            Err(error) => break error.to_string(),
        };
        received.increment(frame.wire_len() as u64);
        match frame.header.kind {
            Kind::Combine | Kind::Error => {
                if is_bulk(&frame) {
                    outbox.post(Frame::bare(Header { aux: 1, ..Header::new(Kind::Credit) }));
                }
                events.push(Event::Frame { session, frame, at: Instant::now() });
            }
            Kind::Credit => outbox.grant(frame.header.aux),
            Kind::Ping => outbox.post(Frame { header: Header { kind: Kind::Pong, ..frame.header }, payload: frame.payload }),
            Kind::Pong => {}
            other => break format!("the worker sent a {other:?} frame after the handshake"),
        }
    };
    events.push(Event::Closed { session, reason });
}
