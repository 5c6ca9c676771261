//! The task behind a membership: connect, say Hello, beat and listen until the stream breaks, begin again.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use tonic::transport::Endpoint;

use super::{JoinError, MemberState};
use crate::backoff;
use crate::control::v1::control_client::ControlClient;
use crate::control::v1::coordinator_message::Message as FromCoordinator;
use crate::control::v1::worker_message::Message as ToCoordinator;
use crate::control::v1::{Accept, CoordinatorMessage, Drain, Goodbye, Heartbeat, Hello, Refuse, WorkerMessage};
use crate::route_table::RouteTable;

const FIRST_RETRY: Duration = Duration::from_millis(50);
const LAST_RETRY: Duration = Duration::from_secs(2);
/// Limit from dialling to Accept.
const ACCEPT_TIMEOUT: Duration = Duration::from_secs(10);
/// Heartbeats that may wait for a coordinator which does not read.
const QUEUE: usize = 8;

/// Receivers of everything the task learns.
pub(super) struct Watches {
    pub accepted: watch::Receiver<Accept>,
    pub routes: watch::Receiver<RouteTable>,
    pub drain: watch::Receiver<Option<Drain>>,
    pub state: watch::Receiver<MemberState>,
}

/// See the module.
pub(super) struct Task {
    coordinator: String,
    endpoint: Endpoint,
    hello: Hello,
    heartbeat: Box<dyn Fn() -> Heartbeat + Send + Sync>,
    pub beat: Arc<Notify>,
    pub last_failure: String,
    accepted: watch::Sender<Accept>,
    routes: watch::Sender<RouteTable>,
    drain: watch::Sender<Option<Drain>>,
    state: watch::Sender<MemberState>,
}

/// An accepted stream.
pub(super) struct Session {
    to: mpsc::Sender<WorkerMessage>,
    from: Streaming<CoordinatorMessage>,
}

/// Why a session ended.
enum End {
    Lost(String),
    Refused(Refuse),
    Leave(String),
}

impl Task {
    pub fn new(
        coordinator: String,
        endpoint: Endpoint,
        hello: Hello,
        heartbeat: Box<dyn Fn() -> Heartbeat + Send + Sync>,
    ) -> (Self, Watches) {
        let (accepted, accepted_rx) = watch::channel(Accept::default());
        let (routes, routes_rx) = watch::channel(RouteTable::default());
        let (drain, drain_rx) = watch::channel(None);
        let (state, state_rx) = watch::channel(MemberState::Lost { reason: "not joined yet".into(), expired: true });
        let last_failure = "not dialled yet".to_owned();
        let beat = Arc::default();
        let task = Self { coordinator, endpoint, hello, heartbeat, beat, last_failure, accepted, routes, drain, state };
        (task, Watches { accepted: accepted_rx, routes: routes_rx, drain: drain_rx, state: state_rx })
    }

    /// Tries until the coordinator accepts or refuses.
    pub async fn connect(&mut self) -> Result<Session, Refuse> {
        for failures in 0u32.. {
            match timeout(ACCEPT_TIMEOUT, self.attempt()).await {
                Ok(Ok(session)) => return Ok(session),
                Ok(Err(End::Refused(refuse))) => return Err(refuse),
                Ok(Err(End::Lost(reason) | End::Leave(reason))) => self.last_failure = reason,
                Err(_) => self.last_failure = format!("no Accept within {ACCEPT_TIMEOUT:?}"),
            }
            if failures == 0 {
                tracing::warn!(coordinator = %self.coordinator, reason = %self.last_failure, "cannot join yet; trying on");
            }
            tokio::time::sleep(backoff::wait(failures, FIRST_RETRY, LAST_RETRY)).await;
        }
        Err(Refuse { field: "coordinator".into(), needed: "an answer".into(), got: self.last_failure.clone(), hint: String::new() })
    }

    async fn attempt(&mut self) -> Result<Session, End> {
        let channel = self.endpoint.connect().await.map_err(|error| End::Lost(cause(&error)))?;
        let (to, messages) = mpsc::channel(QUEUE);
        // The queue is empty, so the Hello never waits.
        let _ = to.send(message(ToCoordinator::Hello(self.hello.clone()))).await;
        let response = ControlClient::new(channel).join(ReceiverStream::new(messages)).await;
        let mut from = response.map_err(|status| End::Lost(status.to_string()))?.into_inner();
        let accept = match next(&mut from).await? {
            FromCoordinator::Accept(accept) => accept,
            FromCoordinator::Refuse(refuse) => return Err(End::Refused(refuse)),
            _ => return Err(End::Lost("the coordinator's first message is neither Accept nor Refuse".into())),
        };
        if accept.heartbeat_ms == 0 || accept.coordinator_epoch == 0 {
            return Err(End::Lost("the Accept lacks heartbeat_ms or coordinator_epoch".into()));
        }
        tracing::info!(coordinator = %self.coordinator, epoch = accept.coordinator_epoch, shards = accept.shards.len(), "joined");
        let coordinator_epoch = accept.coordinator_epoch;
        self.accepted.send_replace(accept);
        self.state.send_replace(MemberState::Joined { coordinator_epoch });
        Ok(Session { to, from })
    }

    /// Lives through sessions until told to end or refused.
    pub async fn run(
        mut self,
        mut session: Session,
        mut shutdown: Pin<Box<dyn Future<Output = ()> + Send>>,
        mut left: oneshot::Receiver<String>,
    ) {
        loop {
            let end = self.serve(&mut session, &mut shutdown, &mut left).await;
            let reason = match end {
                End::Leave(reason) => {
                    self.goodbye(session, reason).await;
                    self.state.send_replace(MemberState::Left);
                    return;
                }
                End::Refused(refuse) => return self.refused(refuse),
                End::Lost(reason) => reason,
            };
            drop(session);
            tracing::warn!(coordinator = %self.coordinator, %reason, "lost the coordinator; reconnecting");
            self.state.send_replace(MemberState::Lost { reason: reason.clone(), expired: false });
            let expires = Instant::now() + Duration::from_millis(u64::from(self.accepted.borrow().lease_ms));
            let state = self.state.clone();
            let expiry = async {
                sleep_until(expires).await;
                state.send_replace(MemberState::Lost { reason, expired: true });
                std::future::pending::<()>().await;
            };
            session = tokio::select! {
                () = expiry => return,
                () = &mut shutdown => return drop(state.send_replace(MemberState::Left)),
                // A dropped handle aborts this task, so an answer here is a wish to leave.
                _ = &mut left => return drop(state.send_replace(MemberState::Left)),
                connected = self.connect() => match connected {
                    Ok(session) => session,
                    Err(refuse) => return self.refused(refuse),
                },
            };
        }
    }

    fn refused(&self, refuse: Refuse) {
        let error = JoinError::Refused { coordinator: self.coordinator.clone(), refuse };
        tracing::error!(%error, "refused");
        self.state.send_replace(MemberState::Refused(error));
    }

    /// One session: heartbeats out, tables and drain in.
    async fn serve(
        &mut self,
        session: &mut Session,
        shutdown: &mut Pin<Box<dyn Future<Output = ()> + Send>>,
        left: &mut oneshot::Receiver<String>,
    ) -> End {
        let period = Duration::from_millis(u64::from(self.accepted.borrow().heartbeat_ms));
        let mut ticks = interval(period);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let beat = Arc::clone(&self.beat);
        loop {
            tokio::select! {
                () = &mut *shutdown => return End::Leave("shutting down".into()),
                reason = &mut *left => return End::Leave(reason.unwrap_or_default()),
                received = next(&mut session.from) => match received {
                    Ok(message) => if let Err(end) = self.take(message) { return end },
                    Err(end) => return end,
                },
                () = async { tokio::select! { _ = ticks.tick() => {}, () = beat.notified() => {} } } => {
                    // A full queue means that the coordinator does not read: the next beat says it all anyway.
                    let beat = message(ToCoordinator::Heartbeat((self.heartbeat)()));
                    if let Err(mpsc::error::TrySendError::Closed(_)) = session.to.try_send(beat) {
                        return End::Lost("the stream to the coordinator is closed".into());
                    }
                }
            }
        }
    }

    fn take(&self, message: FromCoordinator) -> Result<(), End> {
        match message {
            FromCoordinator::Routes(table) => {
                let epoch = self.accepted.borrow().coordinator_epoch;
                let checked = RouteTable::from_wire(epoch, &table)
                    .and_then(|next| self.routes.borrow().accepts(&next).map(|newer| newer.then_some(next)));
                match checked {
                    Ok(Some(next)) => {
                        tracing::debug!(version = next.version, shards = next.routes.len(), "new route table");
                        self.routes.send_replace(next);
                    }
                    Ok(None) => {}
                    Err(error) => tracing::error!(%error, "ignored a route table"),
                }
            }
            FromCoordinator::Drain(drain) => {
                tracing::info!(reason = %drain.reason, "the coordinator asks to drain");
                self.drain.send_replace(Some(drain));
            }
            FromCoordinator::Refuse(refuse) => return Err(End::Refused(refuse)),
            FromCoordinator::Accept(_) => tracing::warn!("ignored a second Accept on one stream"),
        }
        Ok(())
    }

    /// Says why, and waits until the coordinator has closed the stream (it has read everything by then).
    async fn goodbye(&self, session: Session, reason: String) {
        let Session { to, mut from } = session;
        let _ = to.try_send(message(ToCoordinator::Goodbye(Goodbye { reason })));
        drop(to);
        let closed = async { while matches!(from.message().await, Ok(Some(_))) {} };
        let _ = timeout(super::GOODBYE_TIMEOUT / 2, closed).await;
    }
}

fn message(message: ToCoordinator) -> WorkerMessage {
    WorkerMessage { message: Some(message) }
}

/// The next message; unknown ones of a later version are skipped.
async fn next(from: &mut Streaming<CoordinatorMessage>) -> Result<FromCoordinator, End> {
    loop {
        match from.message().await {
            Ok(Some(CoordinatorMessage { message: Some(message) })) => return Ok(message),
            Ok(Some(CoordinatorMessage { message: None })) => {}
            Ok(None) => return Err(End::Lost("the coordinator closed the stream".into())),
            Err(status) => return Err(End::Lost(status.to_string())),
        }
    }
}

/// The innermost cause: tonic's own text is only "transport error".
fn cause(error: &dyn std::error::Error) -> String {
    let mut last = error;
    while let Some(source) = last.source() {
        last = source;
    }
    last.to_string()
}
