//! Joining, refusing, route tables, leases, rejoining, readiness.

use super::fakes::{Attn, Beating, Control};
use super::*;

#[tokio::test]
async fn a_worker_of_another_checkpoint_is_refused_by_field() {
    let rig = Rig::start(Setup::default()).await;
    let mut control = Control::dial(rig.addr, control::Hello { fingerprint: "beef".into(), ..hello("experts-0", 1) }).await;
    match control.next().await {
        Some(control::coordinator_message::Message::Refuse(refuse)) => {
            assert_eq!((refuse.field.as_str(), refuse.needed.as_str(), refuse.got.as_str()), ("fingerprint", "f00d", "beef"));
        }
        other => panic!("{other:?}"),
    }
    assert!(control.next().await.is_none(), "a refusal ends the stream");
    assert!(rig.cluster.is_empty());
}

#[tokio::test]
async fn a_stream_that_does_not_begin_with_hello_is_ended() {
    let rig = Rig::start(Setup::default()).await;
    let mut control = Control::dial(rig.addr, control::Hello::default()).await;
    match control.next().await {
        Some(control::coordinator_message::Message::Refuse(refuse)) => assert_eq!(refuse.field, "protocol_version"),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn every_member_gets_each_new_route_table() {
    let rig = Rig::start(Setup { expert_workers: 2, ..Setup::default() }).await;
    let mut attn = Control::dial(rig.addr, hello("attn-0", 1)).await;
    let nobody = attn.routes(|_| true).await;
    assert!(nobody.routes.len() == 2 && nobody.routes.iter().all(|route| route.holders.is_empty()));
    let mut experts = Control::dial(rig.addr, hello("experts-1", 2)).await;
    let holds =
        |table: &control::RouteTable, ready: bool| table.routes[1].holders.iter().any(|h| h.worker == "experts-1" && h.ready == ready);
    let joined = attn.routes(|table| holds(table, false)).await;
    experts.beat(control::WorkerState::Ready, vec![1]);
    let ready = attn.routes(|table| holds(table, true)).await;
    assert!(nobody.version < joined.version && joined.version < ready.version);
    assert_eq!(experts.routes(|table| holds(table, true)).await, ready);
    let addresses = &ready.routes[1].holders[0].addresses;
    assert_eq!((addresses[0].link.as_str(), addresses[0].addr.as_str()), ("tcp", "127.0.0.1:1"));
    drop(experts);
    let gone = attn.routes(|table| table.routes[1].holders.is_empty()).await;
    assert!(gone.version > ready.version);
}

#[tokio::test]
async fn a_silent_member_loses_its_lease_and_may_come_back() {
    let rig = Rig::start(Setup { lease: Duration::from_millis(300), ..Setup::default() }).await;
    let mut silent = Control::dial(rig.addr, hello("experts-0", 1)).await;
    let mut watcher = Control::dial(rig.addr, hello("attn-0", 1)).await;
    watcher.routes(|table| !table.routes[0].holders.is_empty()).await;
    let keep_alive = tokio::spawn({
        let send = watcher.send.clone();
        async move {
            loop {
                let beat = control::worker_message::Message::Heartbeat(control::Heartbeat::default());
                let _ = send.send(control::WorkerMessage { message: Some(beat) });
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    });
    watcher.routes(|table| table.routes[0].holders.is_empty()).await;
    within("the silent one's stream to end", async { while silent.next().await.is_some() {} }).await;
    let _again = Control::dial(rig.addr, hello("experts-0", 1)).await;
    watcher.routes(|table| table.routes[0].holders.iter().any(|holder| holder.epoch == 1)).await;
    keep_alive.abort();
}

#[tokio::test]
async fn a_new_process_takes_over_a_name_and_the_old_one_stays_out() {
    let rig = Rig::start(Setup::default()).await;
    let mut old = Control::dial(rig.addr, hello("experts-0", 1)).await;
    old.routes(|table| table.routes[0].holders.iter().any(|holder| holder.epoch == 1)).await;
    let mut new = Control::dial(rig.addr, hello("experts-0", 2)).await;
    new.routes(|table| table.routes[0].holders.iter().any(|holder| holder.epoch == 2)).await;
    within("the old one's stream to end", async { while old.next().await.is_some() {} }).await;
    let mut back = Control::dial(rig.addr, hello("experts-0", 1)).await;
    match back.next().await {
        Some(control::coordinator_message::Message::Refuse(refuse)) => assert_eq!(refuse.field, "epoch"),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn ready_only_after_a_warm_up_and_not_without_a_needed_worker() {
    let rig = Rig::start(Setup::default()).await;
    assert!(rig.engine.readiness().reasons.iter().any(|reason| reason.contains("no attention worker")));
    assert_eq!(rig.engine.limits().max_seq_len, 0);
    let attn = Attn::join(rig.addr, "attn-0", 1, u32::MAX).await;
    let experts = Beating::join(rig.addr, "experts-0", 1).await;
    rig.ready().await;
    assert_eq!(rig.engine.limits().max_batch, 3);
    assert!(attn.seen.lock().submits.iter().all(|submit| submit.warmup), "nothing but the warm-up so far");
    assert_eq!(attn.seen.lock().submits.len(), 1);
    drop(experts);
    within("not ready", async {
        while rig.engine.readiness().ready {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    match rig.engine.submit(vec![request(1, 1)]) {
        Err(crate::engine::AdmissionError::NotReady { reasons }) => assert!(reasons[0].contains("no worker holds it"), "{reasons:?}"),
        other => panic!("{other:?}"),
    }
    let _again = Beating::join(rig.addr, "experts-0", 2).await;
    rig.ready().await;
}
