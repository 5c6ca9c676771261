//! control.v1: one task per worker, between its stream and `cluster.rs`.

use std::sync::Arc;
use std::time::Duration;

use tandem_proto::control::v1 as wire;
use tandem_proto::control::v1::control_server::Control;
use tandem_runtime::{Shutdown, process};
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use super::{ClusterWatch, wait_for_cluster};
use crate::cluster::{Cluster, Session};

/// How long a peer may keep silent before its Hello. Whatever dials in and says nothing is no worker.
const HELLO_WITHIN: Duration = Duration::from_secs(10);

type Outbound = mpsc::UnboundedSender<Result<wire::CoordinatorMessage, Status>>;

/// The service.
pub(crate) struct ControlService {
    cluster: ClusterWatch,
    shutdown: Shutdown,
}

impl ControlService {
    pub(crate) fn new(cluster: ClusterWatch, shutdown: Shutdown) -> Self {
        Self { cluster, shutdown }
    }
}

#[tonic::async_trait]
impl Control for ControlService {
    type JoinStream = UnboundedReceiverStream<Result<wire::CoordinatorMessage, Status>>;

    async fn join(&self, request: Request<Streaming<wire::WorkerMessage>>) -> Result<Response<Self::JoinStream>, Status> {
        let (outbound, stream) = mpsc::unbounded_channel();
        let cluster = self.cluster.clone();
        tokio::spawn(async move {
            if let Err(status) = converse(request.into_inner(), cluster, &outbound).await {
                let _ = outbound.send(Err(status));
            }
        });
        Ok(Response::new(UnboundedReceiverStream::new(stream)))
    }

    async fn request_drain(&self, request: Request<wire::DrainRequest>) -> Result<Response<wire::DrainReply>, Status> {
        let peer = request.remote_addr().map_or_else(|| "an unknown address".to_owned(), |addr| addr.to_string());
        let wire::DrainRequest { worker, timeout_ms } = request.into_inner();
        let cluster = wait_for_cluster(&mut self.cluster.clone()).await?;
        let counts = cluster.core().counts();
        if worker.is_empty() {
            tracing::info!(%peer, "an operator asks the instance to drain");
            // For a supervisor: what ends from now on has ended in order.
            process::announce("DRAINING");
            self.shutdown.start_drain();
        } else {
            tracing::info!(%peer, worker, "an operator asks a worker to drain");
            cluster.drain_worker(&worker, Duration::from_millis(timeout_ms)).map_err(Status::not_found)?;
        }
        let number = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        Ok(Response::new(wire::DrainReply { running: number(counts.running), waiting: number(counts.waiting) }))
    }
}

async fn converse(mut inbound: Streaming<wire::WorkerMessage>, mut cluster: ClusterWatch, outbound: &Outbound) -> Result<(), Status> {
    let first = tokio::time::timeout(HELLO_WITHIN, inbound.message()).await;
    let first = first.map_err(|_| Status::deadline_exceeded(format!("no Hello within {HELLO_WITHIN:?}")))??;
    let Some(wire::WorkerMessage { message: Some(wire::worker_message::Message::Hello(hello)) }) = first else {
        return Err(Status::invalid_argument("the first message must be Hello"));
    };
    let cluster = wait_for_cluster(&mut cluster).await?;
    match cluster.join(hello) {
        Err(refuse) => {
            push(outbound, wire::coordinator_message::Message::Refuse(refuse));
            Ok(())
        }
        Ok((accept, session)) => {
            push(outbound, wire::coordinator_message::Message::Accept(accept));
            let why = member(&mut inbound, &cluster, session, outbound).await;
            tracing::debug!(%why, "control stream over");
            Ok(())
        }
    }
}

/// The life of a member's stream; returns why it ended.
async fn member(inbound: &mut Streaming<wire::WorkerMessage>, cluster: &Arc<Cluster>, mut session: Session, outbound: &Outbound) -> String {
    push(outbound, wire::coordinator_message::Message::Routes(session.routes.borrow_and_update().clone()));
    loop {
        let why = tokio::select! {
            () = session.closed.cancelled() => return "closed by the coordinator".into(),
            message = inbound.message() => match message {
                Ok(Some(wire::WorkerMessage { message: Some(wire::worker_message::Message::Heartbeat(beat)) })) => {
                    cluster.heartbeat(session.id, beat);
                    continue;
                }
                Ok(Some(wire::WorkerMessage { message: Some(wire::worker_message::Message::Goodbye(goodbye)) })) => {
                    format!("it left: {}", goodbye.reason)
                }
                Ok(Some(_)) => "a message that is neither Heartbeat nor Goodbye".into(),
                Ok(None) => "its control stream ended".into(),
                Err(status) => format!("its control stream broke: {}", status.message()),
            },
            Ok(()) = session.routes.changed() => {
                push(outbound, wire::coordinator_message::Message::Routes(session.routes.borrow_and_update().clone()));
                continue;
            }
            Ok(()) = session.drain.changed() => {
                if let Some(drain) = session.drain.borrow_and_update().clone() {
                    push(outbound, wire::coordinator_message::Message::Drain(drain));
                }
                continue;
            }
        };
        cluster.leave(session.id, &why);
        return why;
    }
}

/// A peer that is gone is noticed on the inbound side.
fn push(outbound: &Outbound, message: wire::coordinator_message::Message) {
    let _ = outbound.send(Ok(wire::CoordinatorMessage { message: Some(message) }));
}
