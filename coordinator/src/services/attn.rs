//! attn.v1: one task per attention worker, between its stream and `core.rs`; and the conversions between wire and [`crate::engine`] types.
//! Row 4 of the life of a token.

use tandem_grammar::TokenTable;
use tandem_proto::attn::v1 as wire;
use tandem_proto::attn::v1::attn_server::Attn;
use tokio::sync::mpsc;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use super::{ClusterWatch, wait_for_cluster};
use crate::engine::{ErrorCode, Finish, PromptPosition, TokenEvent, TokenLogprob};
use crate::scheduler::{AttemptId, Submission, WorkerEvent};

/// The service.
pub(crate) struct AttnService {
    cluster: ClusterWatch,
}

impl AttnService {
    pub(crate) fn new(cluster: ClusterWatch) -> Self {
        Self { cluster }
    }
}

#[tonic::async_trait]
impl Attn for AttnService {
    type ServeStream = std::pin::Pin<Box<dyn tokio_stream::Stream<Item = Result<wire::ToWorker, Status>> + Send>>;

    async fn serve(&self, request: Request<Streaming<wire::FromWorker>>) -> Result<Response<Self::ServeStream>, Status> {
        let (outlet, outbound) = mpsc::unbounded_channel();
        let (fault, faults) = mpsc::unbounded_channel();
        let cluster = self.cluster.clone();
        let inbound = request.into_inner();
        tokio::spawn(async move {
            if let Err(status) = converse(inbound, cluster, outlet).await {
                let _ = fault.send(Err(status));
            }
        });
        // Requests as they come, then, when the task is over, its fault if it had one.
        let stream = UnboundedReceiverStream::new(outbound).map(Ok).chain(UnboundedReceiverStream::new(faults));
        Ok(Response::new(Box::pin(stream)))
    }
}

async fn converse(
    mut inbound: Streaming<wire::FromWorker>,
    mut cluster: ClusterWatch,
    outlet: mpsc::UnboundedSender<wire::ToWorker>,
) -> Result<(), Status> {
    let Some(wire::FromWorker { message: Some(wire::from_worker::Message::Attach(attach)) }) = inbound.message().await? else {
        return Err(Status::invalid_argument("the first message must be Attach"));
    };
    let cluster = wait_for_cluster(&mut cluster).await?;
    // Before the attachment, which may submit at once.
    let _ = outlet.send(wire::ToWorker { message: Some(wire::to_worker::Message::Vocabulary(cluster.vocabulary().clone())) });
    let attachment = cluster.attach(&attach.name, attach.epoch, outlet).map_err(Status::failed_precondition)?;
    let ended = loop {
        tokio::select! {
            () = attachment.closed.cancelled() => break Err(Status::aborted("the coordinator gave this worker's requests to another stream")),
            message = inbound.message() => match message {
                Ok(Some(message)) => {
                    if let Some(wire::from_worker::Message::Events(step)) = &message.message {
                        cluster.core().telemetry().stepped(step.rows);
                    }
                    cluster.core().events(attachment.worker, events(message));
                }
                Ok(None) => break Ok(()),
                Err(status) => break Err(status),
            },
        }
    };
    cluster.detach(&attachment);
    ended
}

fn events(message: wire::FromWorker) -> Vec<(AttemptId, WorkerEvent)> {
    let list = match message.message {
        Some(wire::from_worker::Message::Event(event)) => vec![event],
        Some(wire::from_worker::Message::Events(step)) => step.events,
        _ => Vec::new(),
    };
    list.into_iter().filter_map(|event| Some((AttemptId(event.request_id), event_from_wire(event.kind?)))).collect()
}

fn event_from_wire(kind: wire::event::Kind) -> WorkerEvent {
    match kind {
        wire::event::Kind::Started(started) => WorkerEvent::Started { cached_tokens: started.cached_tokens },
        wire::event::Kind::Token(token) => WorkerEvent::Token(TokenEvent {
            id: token.id,
            index: token.index,
            logprob: token.logprob.as_ref().map(logprob_from_wire),
            top: token.top.iter().map(logprob_from_wire).collect(),
        }),
        wire::event::Kind::PromptLogprobs(piece) => WorkerEvent::PromptLogprobs {
            first: piece.first_position,
            positions: piece
                .positions
                .iter()
                .map(|position| PromptPosition {
                    actual: position.actual.as_ref().map_or(TokenLogprob { id: 0, logprob: 0.0, rank: 0 }, logprob_from_wire),
                    top: position.top.iter().map(logprob_from_wire).collect(),
                })
                .collect(),
        },
        wire::event::Kind::Finish(finish) => match finish.reason() {
            wire::FinishReason::Stop => WorkerEvent::Finished(Finish::Stop { id: finish.stop_id.unwrap_or_default() }),
            wire::FinishReason::Length => WorkerEvent::Finished(Finish::Length),
            wire::FinishReason::Cancelled => WorkerEvent::Cancelled,
            wire::FinishReason::Unspecified => {
                WorkerEvent::Failed { code: ErrorCode::Internal, message: "the attention worker gave no reason for the end".into() }
            }
        },
        wire::event::Kind::Error(error) => {
            let code = match error.code() {
                wire::ErrorCode::Invalid => ErrorCode::Invalid,
                wire::ErrorCode::NonFinite => ErrorCode::NonFinite,
                wire::ErrorCode::Deadline => ErrorCode::Deadline,
                wire::ErrorCode::ExpertsUnavailable => ErrorCode::ExpertsUnavailable,
                wire::ErrorCode::Internal | wire::ErrorCode::Unspecified => ErrorCode::Internal,
            };
            WorkerEvent::Failed { code, message: error.message }
        }
    }
}

fn logprob_from_wire(logprob: &wire::TokenLogprob) -> TokenLogprob {
    TokenLogprob { id: logprob.id, logprob: logprob.logprob, rank: logprob.rank }
}

/// The wire form of a model's vocabulary.
pub(crate) fn vocabulary_to_wire(table: TokenTable) -> wire::Vocabulary {
    wire::Vocabulary { bytes: table.bytes, ends: table.ends, special: table.special, stops: table.stops }
}

/// The wire form of a submission.
pub(crate) fn submit_to_wire(submission: &Submission) -> wire::Submit {
    let request = &submission.what;
    let sampling = &request.sampling;
    wire::Submit {
        request_id: submission.attempt.0,
        prompt_ids: request.prompt_ids.clone(),
        emitted_ids: submission.emitted.clone(),
        sampling: Some(wire::Sampling {
            temperature: sampling.temperature,
            top_k: sampling.top_k,
            top_p: sampling.top_p,
            min_p: sampling.min_p,
            repetition_penalty: sampling.repetition_penalty,
            frequency_penalty: sampling.frequency_penalty,
            presence_penalty: sampling.presence_penalty,
            seed: sampling.seed,
            choice: request.choice,
            logit_bias: sampling.logit_bias.iter().map(|&(token, bias)| wire::LogitBias { token, bias }).collect(),
        }),
        stop_ids: request.stop_ids.clone(),
        max_tokens: request.max_tokens,
        min_tokens: request.min_tokens,
        logprobs: request.logprobs,
        prompt_logprobs: request.prompt_logprobs.filter(|_| submission.prompt_logprobs),
        guide: request.guide.as_ref().map(|guide| wire::Guide { grammar: guide.grammar.to_string(), after: guide.after.clone().into() }),
        thought: request.thought.as_ref().map(|thought| wire::ThoughtLimit { tokens: thought.tokens, close_ids: thought.close.to_vec() }),
        // 0 means none on the wire, so the last millisecond is rounded up.
        deadline_ms: submission.left.map_or(0, |left| u64::try_from(left.as_millis()).unwrap_or(u64::MAX).max(1)),
        warmup: submission.warmup,
    }
}
