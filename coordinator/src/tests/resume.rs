//! An attention worker that dies, stalls or comes back shows nowhere in a client's stream.

use super::fakes::{Attn, Beating, oracle_stream};
use super::*;
use crate::engine::Finish;

/// Kills the worker after `lives` tokens, again and again, and starts a new process each time, until all requests have ended.
async fn run_with_deaths(deaths: &[u32]) {
    let rig = Rig::start(Setup::default()).await;
    let _experts = Beating::join(rig.addr, "experts-0", 1).await;
    let mut attn = Attn::join(rig.addr, "attn-0", 1, u32::MAX).await;
    rig.ready().await;
    // The next one begins with the requests in hand.
    attn.pause(true);
    let mut generations: Vec<Generation> = (0..5).map(|who| rig.submit(request(who, 12 + 3 * who))).collect();
    let clients = tokio::spawn(async move {
        for (who, generation) in (0..).zip(&mut generations) {
            let (tokens, end) = collect(generation).await;
            assert_eq!(tokens, oracle_stream(&request(who, 0).prompt_ids, 12 + 3 * who), "request {who}");
            assert_eq!(end, GenerationEvent::Finished { reason: Finish::Length });
        }
    });
    for (epoch, lives) in (2..).zip(deaths) {
        drop(attn);
        attn = Attn::join(rig.addr, "attn-0", epoch, *lives).await;
        within("a death or the end", async {
            while !attn.is_dead() && !clients.is_finished() {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        })
        .await;
    }
    drop(attn);
    let _last = Attn::join(rig.addr, "attn-0", 1000, u32::MAX).await;
    within("all clients", clients).await.expect("all streams are whole");
    rig.idle().await;
}

#[tokio::test]
async fn streams_are_whole_wherever_the_attention_worker_dies() {
    // 1: in the first step; 2 and 4: between two sequences of a step; 13: near the end of one; 50: late.
    for deaths in [&[1][..], &[2, 4], &[3, 1, 7, 13], &[50, 1], &[5, 5, 5, 5, 5, 5]] {
        run_with_deaths(deaths).await;
    }
}

#[tokio::test]
async fn a_stalled_attention_worker_loses_its_requests_to_another_one() {
    let rig = Rig::start(Setup { lease: Duration::from_millis(400), ..Setup::default() }).await;
    let _experts = Beating::join(rig.addr, "experts-0", 1).await;
    let first = Attn::join(rig.addr, "attn-0", 1, u32::MAX).await;
    rig.ready().await;
    let mut generation = rig.submit(request(9, 400));
    assert_eq!(within("start", generation.next()).await, Some(GenerationEvent::Started { cached_tokens: None }));
    first.stall(true);
    let second = Attn::join(rig.addr, "attn-1", 1, u32::MAX).await;
    let whole = oracle_stream(&request(9, 0).prompt_ids, 400);
    let (tokens, _) = collect(&mut generation).await;
    assert_eq!(tokens, whole);
    assert!(second.seen.lock().submits.iter().any(|submit| submit.max_tokens == 400), "it went on elsewhere");
    // The first one wakes up, finds its streams closed, comes back, and is told nothing of the old request.
    first.stall(false);
    rig.idle().await;
}

#[tokio::test]
async fn a_second_stream_of_one_worker_replaces_the_first() {
    let rig = Rig::start(Setup::default()).await;
    let _experts = Beating::join(rig.addr, "experts-0", 1).await;
    let attn = Attn::join(rig.addr, "attn-0", 1, u32::MAX).await;
    rig.ready().await;
    let mut generation = rig.submit(request(4, 300));
    assert_eq!(within("start", generation.next()).await, Some(GenerationEvent::Started { cached_tokens: None }));
    let (outlet, _requests) = tokio::sync::mpsc::unbounded_channel();
    let other = rig.cluster.attach("attn-0", 1, outlet).expect("the same process may attach again");
    // The fake's stream ends, and it attaches again itself.
    let (tokens, _) = collect(&mut generation).await;
    assert_eq!(tokens, oracle_stream(&request(4, 0).prompt_ids, 300));
    assert!(other.closed.is_cancelled());
    assert_eq!(rig.cluster.attached(), 1);
    drop(attn);
}
