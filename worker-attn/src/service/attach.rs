//! The attn.v1 stream: dials the coordinator, attaches, takes requests in and sends events out; again and again after a loss.
//!
//! Neighbours: `engine/thread.rs` (the mailbox), `ledger.rs` (deadlines), `coordinator` (the other end).

use std::time::{Duration, Instant};

use tandem_grammar::TokenTable;
use tandem_proto::attn::v1::{Attach, FromWorker, StepEvents, ToWorker, attn_client::AttnClient, from_worker, to_worker};
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::transport::{Channel, Endpoint};

use super::ledger::Ledger;
use crate::{
    engine::{sequence::Request, thread::Mailbox},
    guide::Guides,
};

/// First and longest pause between attempts to attach.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));
/// Limit of one attempt to connect, and silence after which a connection is asked whether it still lives.
const CONNECT: Duration = Duration::from_secs(3);
/// Largest message taken: a prompt of a million tokens with room to spare.
const MAX_MESSAGE: usize = 64 << 20;

/// Who attaches, and where.
pub struct Attachment {
    /// Coordinator's control address.
    pub coordinator: String,
    /// Name of the Hello.
    pub name: String,
    /// Epoch of the Hello.
    pub epoch: u64,
    /// Deadline of a request that brings none.
    pub request_timeout: Duration,
    /// The step thread.
    pub mailbox: Mailbox,
    /// Is told the vocabulary.
    pub guides: Guides,
}

/// Why a stream ended.
type Loss = String;

impl Attachment {
    /// Keeps a stream for as long as the task lives.
    pub async fn run(self, mut events: UnboundedReceiver<StepEvents>) {
        let mut pause = BACKOFF.0;
        loop {
            let since = Instant::now();
            let loss = match self.attach().await {
                Ok((sender, requests)) => {
                    tracing::info!("attached");
                    let loss = self.carry(&mut events, &sender, requests).await;
                    // Nobody hears of these sequences any more; the coordinator submits their requests anew.
                    self.mailbox.clear();
                    loss
                }
                Err(loss) => loss,
            };
            if since.elapsed() > BACKOFF.1 {
                pause = BACKOFF.0;
            }
            tracing::warn!(reason = loss, ?pause, "no attn.v1 stream to the coordinator; attaching again");
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(BACKOFF.1);
        }
    }

    async fn attach(&self) -> Result<(UnboundedSender<FromWorker>, tonic::Streaming<ToWorker>), Loss> {
        let address = if self.coordinator.contains("://") { self.coordinator.clone() } else { format!("http://{}", self.coordinator) };
        let channel: Channel = Endpoint::from_shared(address)
            .map_err(|e| e.to_string())?
            .connect_timeout(CONNECT)
            .tcp_nodelay(true)
            .http2_keep_alive_interval(CONNECT)
            .keep_alive_timeout(CONNECT)
            .keep_alive_while_idle(true)
            .connect()
            .await
            .map_err(|e| causes(&e))?;
        let mut client = AttnClient::new(channel).max_decoding_message_size(MAX_MESSAGE).max_encoding_message_size(MAX_MESSAGE);
        let (sender, receiver) = mpsc::unbounded_channel();
        let attach = Attach { name: self.name.clone(), epoch: self.epoch };
        // The receiver is alive: it goes into the call below.
        let _ = sender.send(FromWorker { message: Some(from_worker::Message::Attach(attach)) });
        let answer = client.serve(UnboundedReceiverStream::new(receiver)).await.map_err(|e| e.message().to_owned())?;
        Ok((sender, answer.into_inner()))
    }

    /// Carries messages both ways until the stream ends.
    async fn carry(
        &self,
        events: &mut UnboundedReceiver<StepEvents>,
        sender: &UnboundedSender<FromWorker>,
        mut requests: tonic::Streaming<ToWorker>,
    ) -> Loss {
        let mut ledger = Ledger::default();
        loop {
            let overdue = ledger.next();
            let wake = async {
                match overdue {
                    Some(at) => tokio::time::sleep_until(at.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                message = requests.message() => match message {
                    Ok(Some(ToWorker { message: Some(message) })) => self.take(message, &mut ledger),
                    Ok(Some(ToWorker { message: None })) => tracing::debug!("a message of a later version was passed over"),
                    Ok(None) => return "the coordinator closed it".to_owned(),
                    Err(status) => return status.message().to_owned(),
                },
                Some(StepEvents { events, rows }) = events.recv() => {
                    if !send(sender, StepEvents { events: ledger.pass(events), rows }) {
                        return "it broke".to_owned();
                    }
                }
                () = wake => {
                    let over = ledger.overdue(Instant::now());
                    over.iter().for_each(|event| self.mailbox.cancel(event.request_id));
                    if !send(sender, StepEvents { events: over, rows: 0 }) {
                        return "it broke".to_owned();
                    }
                }
            }
        }
    }

    fn take(&self, message: to_worker::Message, ledger: &mut Ledger) {
        match message {
            to_worker::Message::Submit(submit) => {
                tracing::debug!(
                    request = submit.request_id,
                    prompt = submit.prompt_ids.len(),
                    emitted = submit.emitted_ids.len(),
                    "submit"
                );
                let request = Request::from_wire(submit, Instant::now(), self.request_timeout);
                ledger.submitted(request.id, request.deadline);
                self.mailbox.submit(request);
            }
            to_worker::Message::Vocabulary(vocabulary) => {
                tracing::debug!(tokens = vocabulary.ends.len(), "vocabulary");
                self.guides.set_vocabulary(TokenTable {
                    bytes: vocabulary.bytes,
                    ends: vocabulary.ends,
                    special: vocabulary.special,
                    stops: vocabulary.stops,
                });
            }
            to_worker::Message::Cancel(cancel) => {
                tracing::debug!(request = cancel.request_id, "cancel");
                self.mailbox.cancel(cancel.request_id);
            }
        }
    }
}

/// Sends what a step says, if it says anything; false where the stream is gone.
fn send(sender: &UnboundedSender<FromWorker>, step: StepEvents) -> bool {
    let empty = step.events.is_empty() && step.rows == 0;
    empty || sender.send(FromWorker { message: Some(from_worker::Message::Events(step)) }).is_ok()
}

/// An error with everything that caused it: tonic's own text is only "transport error".
fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}
