//! A link inside one process: a pair of bounded channels. Frames pass as they are, checked but not encoded. Listeners have names.

use std::collections::HashMap;
use std::io;

use parking_lot::Mutex;
use tokio::sync::mpsc;

use super::{FrameSink, FrameSource, Link, LinkError, LinkKind};
use crate::frame::Frame;

/// Frames in flight per direction: a sender ahead of that waits.
const QUEUE: usize = 8;

/// Listeners of this process by name.
static LISTENERS: Mutex<Option<HashMap<String, mpsc::Sender<InprocLink>>>> = Mutex::new(None);

/// One end of an in-process link.
#[derive(Debug)]
pub struct InprocLink {
    outbox: mpsc::Sender<Frame>,
    inbox: mpsc::Receiver<Frame>,
    peer: String,
}

/// Two connected ends.
pub fn pair() -> (InprocLink, InprocLink) {
    let (to_b, from_a) = mpsc::channel(QUEUE);
    let (to_a, from_b) = mpsc::channel(QUEUE);
    let end = |outbox, inbox| InprocLink { outbox, inbox, peer: "inproc".to_owned() };
    (end(to_b, from_b), end(to_a, from_a))
}

impl InprocLink {
    /// Connects to the listener of that name.
    ///
    /// # Errors
    /// [`LinkError::Connect`] when nobody listens.
    pub async fn connect(name: &str) -> Result<Self, LinkError> {
        let fail = || LinkError::Connect { kind: LinkKind::Inproc, addr: name.to_owned(), reason: "nobody listens".to_owned() };
        let listener = LISTENERS.lock().as_ref().and_then(|names| names.get(name)).cloned().ok_or_else(fail)?;
        let (mut ours, mut theirs) = pair();
        ours.peer = name.to_owned();
        theirs.peer = format!("{name} (client)");
        listener.send(theirs).await.map_err(|_| fail())?;
        Ok(ours)
    }
}

impl Link for InprocLink {
    type Sink = InprocSink;
    type Source = InprocSource;

    fn split(self) -> (InprocSink, InprocSource) {
        (InprocSink { outbox: Some(self.outbox), peer: self.peer }, InprocSource { inbox: self.inbox })
    }

    fn kind(&self) -> LinkKind {
        LinkKind::Inproc
    }

    fn peer(&self) -> &str {
        &self.peer
    }
}

/// Sending half.
#[derive(Debug)]
pub struct InprocSink {
    outbox: Option<mpsc::Sender<Frame>>,
    peer: String,
}

impl FrameSink for InprocSink {
    async fn send(&mut self, frame: Frame) -> Result<(), LinkError> {
        frame.validate()?;
        let closed = || LinkError::Closed { peer: self.peer.clone() };
        self.outbox.as_ref().ok_or_else(closed)?.send(frame).await.map_err(|_| closed())
    }

    async fn close(&mut self) {
        self.outbox = None;
    }
}

/// Receiving half.
#[derive(Debug)]
pub struct InprocSource {
    inbox: mpsc::Receiver<Frame>,
}

impl FrameSource for InprocSource {
    async fn recv(&mut self) -> Result<Option<Frame>, LinkError> {
        Ok(self.inbox.recv().await)
    }
}

/// Accepts in-process links under a name.
#[derive(Debug)]
pub struct InprocListener {
    name: String,
    links: mpsc::Receiver<InprocLink>,
}

impl InprocListener {
    /// Takes the name.
    ///
    /// # Errors
    /// The name is taken.
    pub fn bind(name: &str) -> io::Result<Self> {
        let mut guard = LISTENERS.lock();
        let names = guard.get_or_insert_default();
        if names.contains_key(name) {
            return Err(io::Error::new(io::ErrorKind::AddrInUse, format!("an in-process listener is called {name:?} already")));
        }
        let (sender, links) = mpsc::channel(QUEUE);
        names.insert(name.to_owned(), sender);
        Ok(Self { name: name.to_owned(), links })
    }

    /// The name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The next link. Cancel-safe.
    ///
    /// # Errors
    /// The listener has ended.
    pub async fn accept(&mut self) -> io::Result<InprocLink> {
        self.links.recv().await.ok_or_else(|| io::Error::new(io::ErrorKind::ConnectionAborted, "the listener has ended"))
    }
}

impl Drop for InprocListener {
    fn drop(&mut self) {
        if let Some(names) = LISTENERS.lock().as_mut() {
            names.remove(&self.name);
        }
    }
}
