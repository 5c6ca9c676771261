//! What the engine says about its sequences, as attn.v1 events.
//!
//! Neighbours: `engine/mod.rs` makes them, `service/` sends them.

use tandem_kernels::Sampled;
use tandem_proto::attn::v1::{
    Error, ErrorCode, Event, Finish, FinishReason, PromptLogprobs, PromptPosition, Started, Token, TokenLogprob, event::Kind,
};

use crate::hop::Failure;

/// The sequence left the waiting queue; `cached` tokens of its prompt need not be computed (`None`: the prefix cache was not asked).
pub fn started(id: u64, cached: Option<usize>) -> Event {
    event(id, Kind::Started(Started { cached_tokens: cached.map(|tokens| tokens as u32) }))
}

/// A generated token.
pub fn token(id: u64, index: usize, sampled: &Sampled, logprobs: Option<u32>) -> Event {
    let logprob = logprobs.map(|_| own(sampled));
    let top = if logprobs.is_some() { top(sampled) } else { Vec::new() };
    event(id, Kind::Token(Token { id: sampled.token, index: index as u32, logprob, top }))
}

/// Logprobs of prompt positions from `first` on.
pub fn prompt_logprobs(id: u64, first: usize, sampled: &[Sampled]) -> Event {
    let positions = sampled.iter().map(|s| PromptPosition { actual: Some(own(s)), top: top(s) }).collect();
    event(id, Kind::PromptLogprobs(PromptLogprobs { first_position: first as u32, positions }))
}

/// A stop id was chosen.
pub fn stopped(id: u64, stop_id: u32) -> Event {
    event(id, Kind::Finish(Finish { reason: FinishReason::Stop.into(), stop_id: Some(stop_id) }))
}

/// As many tokens as were asked for, or as fit.
pub fn length(id: u64) -> Event {
    event(id, Kind::Finish(Finish { reason: FinishReason::Length.into(), stop_id: None }))
}

/// Cancelled by whoever submitted it.
pub fn cancelled(id: u64) -> Event {
    event(id, Kind::Finish(Finish { reason: FinishReason::Cancelled.into(), stop_id: None }))
}

/// The sequence ends with an error.
pub fn error(id: u64, code: ErrorCode, message: impl Into<String>) -> Event {
    event(id, Kind::Error(Error { code: code.into(), message: message.into() }))
}

/// A failure of the hop.
pub fn failed(id: u64, failure: &Failure) -> Event {
    match failure {
        Failure::NonFinite { layer, shard, rows } => {
            error(id, ErrorCode::NonFinite, format!("layer {layer}: shard {shard} sent NaN or infinity in {rows} of the request's rows"))
        }
        Failure::Unavailable { message } => error(id, ErrorCode::ExpertsUnavailable, message),
        Failure::Internal { message } => error(id, ErrorCode::Internal, message),
        Failure::Cancelled => cancelled(id),
    }
}

/// The reason as a metric label.
pub fn failure_reason(failure: &Failure) -> &'static str {
    if *failure == Failure::Cancelled { "cancelled" } else { "error" }
}

fn event(request_id: u64, kind: Kind) -> Event {
    Event { request_id, kind: Some(kind) }
}

fn own(s: &Sampled) -> TokenLogprob {
    TokenLogprob { id: s.token, logprob: s.logprob, rank: s.rank }
}

fn top(s: &Sampled) -> Vec<TokenLogprob> {
    s.top.iter().enumerate().map(|(i, (id, logprob))| TokenLogprob { id: *id, logprob: *logprob, rank: i as u32 + 1 }).collect()
}
