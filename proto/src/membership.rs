//! Worker side of control.v1: one stream to the coordinator for as long as the worker lives. Reconnects for ever with backoff,
//! sends heartbeats, and turns what the coordinator pushes into watches. `coordinator/src/membership` is the other end.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, oneshot, watch};
use tokio::task::JoinHandle;
use tonic::transport::Endpoint;

use crate::control::v1::{Accept, Drain, Heartbeat, Hello, Refuse};
use crate::route_table::RouteTable;

mod task;

#[cfg(test)]
mod tests;

/// How long [`MembershipHandle::leave`] waits for the Goodbye to go out.
const GOODBYE_TIMEOUT: Duration = Duration::from_secs(2);

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

/// A membership that keeps itself alive. Dropping it ends the stream without a Goodbye.
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
    beat: Arc<Notify>,
    leave: Option<oneshot::Sender<String>>,
    task: JoinHandle<()>,
}

impl Membership {
    /// Dials `coordinator` (`http://HOST:PORT` or `HOST:PORT`) until it answers, says `hello`, and returns with its first Accept.
    /// From then on a task sends `heartbeat()` as often as the Accept asks, and reconnects for ever with exponential backoff and
    /// jitter, until `shutdown` resolves: then it says Goodbye.
    ///
    /// # Errors
    /// [`JoinError`]; an unreachable coordinator is none.
    pub async fn join(
        coordinator: String,
        hello: Hello,
        heartbeat: impl Fn() -> Heartbeat + Send + Sync + 'static,
        shutdown: impl Future<Output = ()> + Send + 'static,
    ) -> Result<MembershipHandle, JoinError> {
        let endpoint = endpoint(&coordinator)?;
        let (mut task, mut watches) = task::Task::new(coordinator.clone(), endpoint, hello, Box::new(heartbeat));
        let mut shutdown = Box::pin(shutdown);
        let session = tokio::select! {
            biased;
            () = &mut shutdown => return Err(JoinError::Stopped { coordinator, last: task.last_failure }),
            session = task.connect() => session.map_err(|refuse| JoinError::Refused { coordinator, refuse })?,
        };
        let (leave, left) = oneshot::channel();
        let beat = Arc::clone(&task.beat);
        let accept = watches.accepted.borrow_and_update().clone();
        let task = tokio::spawn(task.run(session, shutdown, left));
        let task::Watches { accepted, routes, drain, state } = watches;
        Ok(MembershipHandle { accept, accepted, routes, drain, state, beat, leave: Some(leave), task })
    }
}

impl MembershipHandle {
    /// Sends a heartbeat now: something changed that others wait for (weights loaded, draining).
    pub fn beat_now(&self) {
        self.beat.notify_one();
    }

    /// Resolves when the membership has ended for good: [`MemberState::Refused`] or [`MemberState::Left`].
    pub async fn ended(&self) -> MemberState {
        let mut state = self.state.clone();
        let ended = state.wait_for(|state| matches!(state, MemberState::Refused(_) | MemberState::Left)).await;
        ended.map_or(MemberState::Left, |state| state.clone())
    }

    /// Says Goodbye with `reason` and ends the stream.
    pub async fn leave(mut self, reason: &str) {
        if let Some(leave) = self.leave.take()
            && leave.send(reason.to_owned()).is_ok()
            && tokio::time::timeout(GOODBYE_TIMEOUT, &mut self.task).await.is_err()
        {
            tracing::debug!("the Goodbye did not go out in time");
        }
    }
}

impl Drop for MembershipHandle {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Dead peers are noticed by HTTP/2 pings, since a healthy coordinator may have nothing to say for hours.
fn endpoint(coordinator: &str) -> Result<Endpoint, JoinError> {
    let fail = |reason: &str| JoinError::Address { got: coordinator.to_owned(), reason: reason.to_owned() };
    let url = match coordinator.split_once("://") {
        None => format!("http://{coordinator}"),
        Some(("http", _)) => coordinator.to_owned(),
        Some((scheme, _)) => return Err(fail(&format!("scheme {scheme} is not supported"))),
    };
    let endpoint = Endpoint::from_shared(url).map_err(|error| fail(&error.to_string()))?;
    if endpoint.uri().port().is_none() {
        return Err(fail("it names no port"));
    }
    Ok(endpoint
        .tcp_nodelay(true)
        .connect_timeout(Duration::from_secs(2))
        .http2_keep_alive_interval(Duration::from_secs(1))
        .keep_alive_timeout(Duration::from_secs(4))
        .keep_alive_while_idle(true))
}
