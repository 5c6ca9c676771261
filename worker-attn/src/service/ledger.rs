//! Which requests of a stream still owe a closing event, and until when: the last line of defence of every deadline.
//!
//! Neighbours: `attach.rs` asks. The engine ends overdue sequences between steps and the hop those of a step that waits for expert
//! workers; but a sequence that waits for its place while such a step waits is nobody's. Here it ends all the same, and so does any other
//! if the step thread is held up by whatever it may be.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use tandem_proto::attn::v1::{ErrorCode, Event, event::Kind};

use crate::engine::events;

/// How long the step thread has to end an overdue sequence itself, with the better reason.
const GRACE: Duration = Duration::from_millis(500);

/// Requests of one stream that have not ended.
#[derive(Debug, Default)]
pub struct Ledger {
    deadlines: HashMap<u64, Instant>,
}

impl Ledger {
    /// A request was submitted.
    pub fn submitted(&mut self, id: u64, deadline: Instant) {
        self.deadlines.insert(id, deadline);
    }

    /// Passes on the events of requests that have not ended; a closing one ends its request.
    pub fn pass(&mut self, events: Vec<Event>) -> Vec<Event> {
        let mut passed = Vec::with_capacity(events.len());
        for event in events {
            let closing = matches!(event.kind, Some(Kind::Finish(_) | Kind::Error(_)));
            let live =
                if closing { self.deadlines.remove(&event.request_id).is_some() } else { self.deadlines.contains_key(&event.request_id) };
            if live {
                passed.push(event);
            }
        }
        passed
    }

    /// When [`Ledger::overdue`] is to be asked next.
    pub fn next(&self) -> Option<Instant> {
        self.deadlines.values().min().map(|deadline| *deadline + GRACE)
    }

    /// Ends the requests that are overdue at `now`: their closing events.
    pub fn overdue(&mut self, now: Instant) -> Vec<Event> {
        let over: Vec<u64> = self.deadlines.iter().filter(|(_, deadline)| **deadline + GRACE <= now).map(|(id, _)| *id).collect();
        for id in &over {
            self.deadlines.remove(id);
        }
        let message = "the request's deadline passed while the attention worker waited for something else";
        over.into_iter().map(|id| events::error(id, ErrorCode::Deadline, message)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_overdue_request_ends_once_and_nothing_follows() {
        let (now, mut ledger) = (Instant::now(), Ledger::default());
        ledger.submitted(1, now + Duration::from_secs(1));
        ledger.submitted(2, now + Duration::from_secs(9));
        assert_eq!(ledger.next(), Some(now + Duration::from_secs(1) + GRACE));
        assert_eq!(ledger.overdue(now + Duration::from_secs(1)), []);
        let over = ledger.overdue(now + Duration::from_secs(2));
        assert_eq!(over.iter().map(|e| e.request_id).collect::<Vec<_>>(), [1]);
        assert_eq!(ledger.overdue(now + Duration::from_secs(3)), []);
        let passed = ledger.pass(vec![events::cancelled(1), events::started(2, None), events::length(2), events::started(2, None)]);
        assert_eq!(passed, [events::started(2, None), events::length(2)]);
        assert_eq!(ledger.next(), None);
    }
}
