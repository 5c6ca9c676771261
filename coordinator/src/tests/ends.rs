//! Every other way to end: cancel in each phase, a full queue, deadlines, drain.

use super::fakes::{Attn, Beating, oracle_stream};
use super::*;
use crate::engine::{AdmissionError, ErrorCode};

async fn rig(setup: Setup) -> (Rig, Beating, Attn) {
    let rig = Rig::start(setup).await;
    let experts = Beating::join(rig.addr, "experts-0", 1).await;
    let attn = Attn::join(rig.addr, "attn-0", 1, u32::MAX).await;
    rig.ready().await;
    (rig, experts, attn)
}

#[tokio::test]
async fn a_client_that_leaves_frees_its_place_in_every_phase() {
    let (rig, _experts, attn) = rig(Setup::default()).await;
    attn.pause(true);
    // Three places, so the fourth is queued; none has begun.
    let mut generations: Vec<Generation> = (0..4).map(|who| rig.submit(request(who, 500))).collect();
    let queued = generations.pop().expect("four");
    drop(queued);
    let before_start = generations.pop().expect("three");
    drop(before_start);
    attn.pause(false);
    let mut decoding = generations.pop().expect("two");
    loop {
        if let Some(GenerationEvent::Tokens(_)) = within("a token", decoding.next()).await {
            break;
        }
    }
    drop(decoding);
    // A stop string ends the last one; the worker hears a cancel all the same.
    let stopped = generations.pop().expect("one");
    stopped.complete(1);
    rig.idle().await;
    within("cancels", async {
        while attn.seen.lock().cancels.len() < 3 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    assert_eq!(attn.seen.lock().submits.iter().filter(|submit| !submit.warmup).count(), 3, "the queued one was never submitted");
    let mut next = rig.submit(request(7, 5));
    assert_eq!(collect(&mut next).await.0, oracle_stream(&request(7, 0).prompt_ids, 5));
}

#[tokio::test]
async fn a_full_queue_refuses_and_the_rest_is_served() {
    let (rig, _experts, attn) = rig(Setup { max_queue: 2, ..Setup::default() }).await;
    attn.pause(true);
    let mut generations: Vec<Generation> = (0..5).map(|who| rig.submit(request(who, 3))).collect();
    match rig.engine.submit(vec![request(9, 3)]) {
        Err(AdmissionError::QueueFull { limit: 2, retry_after }) => assert!(retry_after >= Duration::from_secs(1)),
        other => panic!("{other:?}"),
    }
    match rig.engine.submit(vec![request(9, 1000)]) {
        Err(AdmissionError::TooLong { prompt: 3, max_tokens: 1000, limit: 1000 }) => {}
        other => panic!("{other:?}"),
    }
    attn.pause(false);
    for (who, generation) in (0..).zip(&mut generations) {
        assert_eq!(collect(generation).await.0, oracle_stream(&request(who, 0).prompt_ids, 3));
    }
}

#[tokio::test]
async fn a_deadline_ends_a_request_whatever_its_worker_does() {
    let (rig, _experts, attn) = rig(Setup { request_timeout: Duration::from_millis(300), ..Setup::default() }).await;
    attn.pause(true);
    let mut held = rig.submit(request(1, 3));
    let end = collect(&mut held).await;
    assert!(matches!(&end, (tokens, GenerationEvent::Error(error)) if tokens.is_empty() && error.code == ErrorCode::Deadline), "{end:?}");
    assert!(held.next().await.is_none());
    let left = attn.seen.lock().submits.last().map_or(0, |submit| submit.deadline_ms);
    assert!((1..=300).contains(&left), "the worker knows the time left: {left}");
    drop(attn);
    rig.idle().await;
}

#[tokio::test]
async fn without_any_attention_worker_a_request_waits_until_its_deadline() {
    let (rig, _experts, attn) = rig(Setup::default()).await;
    attn.pause(true);
    let mut generation = rig.submit(GenerateRequest { deadline: Some(Duration::from_millis(500)), ..request(1, 3) });
    drop(attn);
    let (_, end) = collect(&mut generation).await;
    assert!(
        matches!(&end, GenerationEvent::Error(error) if error.code == ErrorCode::Deadline && error.message.contains("waiting")),
        "{end:?}"
    );
}

#[tokio::test]
async fn draining_refuses_new_requests_and_finishes_the_running_ones() {
    let (rig, _experts, attn) = rig(Setup::default()).await;
    let mut generation = rig.submit(request(1, 200));
    rig.instance.drain();
    assert_eq!(rig.engine.submit(vec![request(2, 1)]).err(), Some(AdmissionError::Draining));
    assert!(!rig.engine.readiness().ready);
    assert_eq!(collect(&mut generation).await.0.len(), 200);
    attn.pause(true);
    rig.idle().await;
}

#[tokio::test]
async fn what_is_left_at_the_shutdown_timeout_gets_an_error_event() {
    let (rig, _experts, attn) = rig(Setup::default()).await;
    attn.pause(true);
    let mut generation = rig.submit(request(1, 200));
    rig.instance.drain();
    rig.instance.core().abort_all("the server shut down");
    let (_, end) = collect(&mut generation).await;
    assert!(matches!(&end, GenerationEvent::Error(error) if error.code == ErrorCode::Draining), "{end:?}");
    rig.idle().await;
}
