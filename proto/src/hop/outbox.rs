//! What waits to go out on one link, in two classes. Small frames (decode, control) overtake bulk pieces (prefill), and bulk pieces go
//! only as credits of the other side allow: whatever a small frame meets ahead of it on the wire is at most those credits.

use std::collections::VecDeque;

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::LATENCY_ROWS;
use crate::frame::{Frame, Kind};
use crate::link::{FrameSink, LinkError};

/// A frame and the ticket that wants to know when it is gone.
#[derive(Debug)]
pub(super) struct Outgoing {
    pub frame: Frame,
    pub ticket: Option<u64>,
}

/// Whether a frame counts as bulk: it uses a credit, and small frames overtake it.
pub(super) fn is_bulk(frame: &Frame) -> bool {
    matches!(frame.header.kind, Kind::Dispatch | Kind::Combine) && frame.header.rows_total > LATENCY_ROWS
}

/// The queues of one link; shared by whoever sends and the link's writer task.
#[derive(Debug)]
pub(super) struct Outbox {
    state: Mutex<State>,
    work: Notify,
}

#[derive(Debug)]
struct State {
    small: VecDeque<Outgoing>,
    bulk: VecDeque<Outgoing>,
    credits: u32,
    /// Frames handed to the transport since the start.
    sent: u64,
    /// The writer is inside a send.
    busy: bool,
    closed: bool,
}

impl Outbox {
    /// An empty outbox; the other side takes `credits` bulk pieces to begin with.
    pub fn new(credits: u32) -> Self {
        let state = State { small: VecDeque::new(), bulk: VecDeque::new(), credits: credits.max(1), sent: 0, busy: false, closed: false };
        Self { state: Mutex::new(state), work: Notify::new() }
    }

    /// Queues a frame.
    pub fn push(&self, outgoing: Outgoing) {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let queue = if is_bulk(&outgoing.frame) { &mut state.bulk } else { &mut state.small };
        queue.push_back(outgoing);
        drop(guard);
        self.work.notify_one();
    }

    /// Queues a frame that nobody waits for.
    pub fn post(&self, frame: Frame) {
        self.push(Outgoing { frame, ticket: None });
    }

    /// The other side took `credits` pieces.
    pub fn grant(&self, credits: u32) {
        let mut state = self.state.lock();
        state.credits = state.credits.saturating_add(credits);
        drop(state);
        self.work.notify_one();
    }

    /// Forgets bulk pieces that have not left: their submission was given up.
    pub fn clear_bulk(&self) {
        self.state.lock().bulk.clear();
    }

    /// Ends the writer once it has sent what can be sent.
    pub fn close(&self) {
        self.state.lock().closed = true;
        self.work.notify_one();
    }

    /// Frames handed to the transport so far.
    pub fn sent(&self) -> u64 {
        self.state.lock().sent
    }

    /// Nothing waits and nothing is being written.
    pub fn is_idle(&self) -> bool {
        let state = self.state.lock();
        state.small.is_empty() && state.bulk.is_empty() && !state.busy
    }

    /// The frame whose turn it is.
    fn next(&self) -> Next {
        let mut state = self.state.lock();
        let next = match state.small.pop_front() {
            Some(small) => Some(small),
            None if state.credits > 0 => state.bulk.pop_front().inspect(|_| state.credits -= 1),
            None => None,
        };
        state.busy = next.is_some();
        match next {
            Some(outgoing) => Next::Send(outgoing),
            None if state.closed => Next::End,
            None => Next::Wait,
        }
    }

    /// The writer task of a link: sends until the outbox is closed or the link fails. `sent` is told of each frame that is gone: its
    /// bytes on the wire and its ticket.
    pub async fn drain(&self, sink: &mut impl FrameSink, mut sent: impl FnMut(usize, Option<u64>)) -> Result<(), LinkError> {
        loop {
            match self.next() {
                Next::Send(Outgoing { frame, ticket }) => {
                    let bytes = frame.wire_len();
                    sink.send(frame).await?;
                    let mut state = self.state.lock();
                    state.sent += 1;
                    state.busy = false;
                    drop(state);
                    sent(bytes, ticket);
                }
                Next::Wait => self.work.notified().await,
                Next::End => {
                    sink.close().await;
                    return Ok(());
                }
            }
        }
    }
}

enum Next {
    Send(Outgoing),
    Wait,
    End,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::Header;

    fn dispatch(step_id: u64, rows_total: u32) -> Frame {
        Frame::bare(Header { step_id, rows: 1, rows_total, ..Header::new(Kind::Dispatch) })
    }

    fn next(outbox: &Outbox) -> Option<u64> {
        match outbox.next() {
            Next::Send(outgoing) => Some(outgoing.frame.header.step_id),
            Next::Wait | Next::End => None,
        }
    }

    #[test]
    fn small_frames_overtake_bulk_pieces() {
        let outbox = Outbox::new(4);
        outbox.post(dispatch(1, LATENCY_ROWS + 1));
        outbox.post(dispatch(2, LATENCY_ROWS + 1));
        outbox.post(dispatch(3, LATENCY_ROWS));
        assert_eq!([next(&outbox), next(&outbox), next(&outbox), next(&outbox)], [Some(3), Some(1), Some(2), None]);
    }

    #[test]
    fn bulk_waits_for_credits_and_small_does_not() {
        let outbox = Outbox::new(2);
        for step in 1..=4 {
            outbox.post(dispatch(step, 1000));
        }
        assert_eq!([next(&outbox), next(&outbox), next(&outbox)], [Some(1), Some(2), None]);
        outbox.post(dispatch(9, 1));
        outbox.grant(1);
        assert_eq!([next(&outbox), next(&outbox), next(&outbox)], [Some(9), Some(3), None]);
        outbox.clear_bulk();
        outbox.grant(1);
        assert_eq!(next(&outbox), None);
        assert!(outbox.is_idle());
    }
}
