//! Stories (`testdata/`) and a property test against an oracle.

mod oracle;
mod stories;

use super::*;
use crate::engine::TokenEvent;

/// A request for `max_tokens` tokens with a prompt of `prompt` tokens.
fn request(prompt: usize, max_tokens: u32) -> GenerateRequest {
    GenerateRequest { prompt_ids: vec![1; prompt], max_tokens, ..GenerateRequest::default() }
}

fn token(index: u32, id: u32) -> TokenEvent {
    TokenEvent { id, index, logprob: None, top: Vec::new() }
}

fn limits(max_batch: u32) -> Limits {
    Limits { max_seq_len: 100, max_batch, kv_tokens: 1000 }
}

#[test]
fn retry_after_follows_the_pace_of_ends() {
    let mut scheduler = Scheduler::new(0);
    scheduler.worker_up(WorkerId(1), limits(1));
    scheduler.set_ready(Duration::ZERO, WorkerId(1), true);
    let refused = |scheduler: &mut Scheduler, now| match scheduler.admit(now, vec![request(1, 1)]) {
        Err(AdmissionError::QueueFull { retry_after, .. }) => retry_after,
        other => panic!("{other:?}"),
    };
    for second in 0..20_u64 {
        let now = Duration::from_secs(7 * second);
        let id = scheduler.admit(now, vec![request(1, 1)]).expect("free")[0];
        scheduler.tick(now);
        let expected = if second < 2 { 1 } else { 7 };
        if second != 1 {
            assert_eq!(refused(&mut scheduler, now), Duration::from_secs(expected));
        }
        scheduler.finish(now, id, Finish::Length);
    }
}

#[test]
fn a_request_that_kills_its_workers_is_ended() {
    let mut scheduler = Scheduler::new(4);
    scheduler.worker_up(WorkerId(0), limits(1));
    let id = scheduler.admit(Duration::ZERO, vec![request(1, 5)]).expect("queued")[0];
    let mut ends = Vec::new();
    for life in 1..=u64::from(MAX_FRUITLESS_ATTEMPTS) {
        scheduler.worker_down(Duration::ZERO, WorkerId(life - 1));
        scheduler.worker_up(WorkerId(life), limits(1));
        scheduler.set_ready(Duration::ZERO, WorkerId(life), true);
        ends.extend(scheduler.take_actions().filter(|action| matches!(action, Action::Emit { .. })));
    }
    assert_eq!(ends, []);
    scheduler.worker_down(Duration::ZERO, WorkerId(u64::from(MAX_FRUITLESS_ATTEMPTS)));
    ends.extend(scheduler.take_actions());
    match &ends[..] {
        [Action::Emit { request, event: GenerationEvent::Error(error) }] => {
            assert_eq!((*request, error.code), (id, ErrorCode::Internal));
        }
        other => panic!("{other:?}"),
    }
    assert!(scheduler.is_idle());
}
