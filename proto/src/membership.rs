//! Worker side of control.v1: one stream to the coordinator for as long as the worker lives. Reconnects for ever with backoff,
//! sends heartbeats, and turns what the coordinator pushes into watches. `coordinator/src/membership` is the other end.

use std::future::Future;
use std::time::Duration;

use tokio::sync::watch;

use crate::control::v1::{Accept, Drain, Heartbeat, Hello, Refuse};
use crate::route_table::RouteTable;

/// Joins an instance.
#[derive(Debug)]
pub struct Membership;

/// Why a worker is not a member.
#[derive(Clone, Debug, thiserror::Error)]
pub enum JoinError {
    /// The coordinator refused the Hello.
    #[error("the coordinator at {coordinator} refused this worker: {} is {}; needed {}{}", .refuse.field, .refuse.got, .refuse.needed, hint(.refuse))]
    Refused {
        /// Address dialled.
        coordinator: String,
        /// Its words.
        refuse: Refuse,
    },
    /// The coordinator's address cannot be dialled at all.
    #[error("coordinator address {got:?} is not valid: {reason}; needed http://HOST:PORT or HOST:PORT")]
    Address {
        /// What was given.
        got: String,
        /// What is wrong.
        reason: String,
    },
    /// The worker was told to stop before it was accepted.
    #[error("stopped before the coordinator at {coordinator} accepted this worker ({last})")]
    Stopped {
        /// Address dialled.
        coordinator: String,
        /// Last failure.
        last: String,
    },
}

fn hint(refuse: &Refuse) -> String {
    if refuse.hint.is_empty() { String::new() } else { format!(" ({})", refuse.hint) }
}

/// Whether the worker is a member now.
#[derive(Clone, Debug)]
pub enum MemberState {
    /// Accepted by the coordinator of this epoch.
    Joined {
        /// Epoch of the coordinator's process.
        coordinator_epoch: u64,
    },
    /// The stream broke; reconnecting. `expired` = longer ago than the lease: the coordinator has given this worker's work away.
    Lost {
        /// Why.
        reason: String,
        /// The lease has ended.
        expired: bool,
    },
    /// Refused when it tried to come back; final.
    Refused(JoinError),
    /// Left on purpose; final.
    Left,
}

/// A membership that keeps itself alive. Dropping it leaves.
#[derive(Debug)]
pub struct MembershipHandle {
    /// The first Accept.
    pub accept: Accept,
    /// The newest Accept: another one after each reconnect, perhaps with other shards or of another coordinator.
    pub accepted: watch::Receiver<Accept>,
    /// The newest valid route table. Kept while the coordinator is away.
    pub routes: watch::Receiver<RouteTable>,
    /// Set once the coordinator asks to drain.
    pub drain: watch::Receiver<Option<Drain>>,
    /// Whether the worker is a member now.
    pub state: watch::Receiver<MemberState>,
}

impl Membership {
    /// Dials `coordinator` (`http://HOST:PORT` or `HOST:PORT`) until it answers, says `hello`, and returns with its first Accept.
    /// From then on a task sends `heartbeat()` as often as the Accept asks, and reconnects for ever with exponential backoff and
    /// jitter, until `shutdown` resolves.
    ///
    /// # Errors
    /// [`JoinError`]; an unreachable coordinator is none.
    pub async fn join(
        coordinator: String,
        hello: Hello,
        heartbeat: impl Fn() -> Heartbeat + Send + Sync + 'static,
        shutdown: impl Future<Output = ()> + Send + 'static,
    ) -> Result<MembershipHandle, JoinError> {
        let _ = (hello, heartbeat, shutdown);
        tokio::time::sleep(Duration::ZERO).await;
        Err(JoinError::Stopped { coordinator, last: "not written yet".into() })
    }
}

impl MembershipHandle {
    /// Says Goodbye with `reason` and ends the stream.
    pub async fn leave(self, reason: &str) {
        let _ = reason;
    }
}
