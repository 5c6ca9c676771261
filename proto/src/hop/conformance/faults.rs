//! Workers that die, move, hang, fail or do not fit.

use std::thread;
use std::time::{Duration, Instant};

use super::stage::{Fake, HIDDEN, Rows, Stage, ask, holder};
use crate::hop::{ExpertListener, HopError, HopOptions, ServerOptions};
use crate::link::LinkKind;

pub(super) fn a_worker_killed_mid_collect_comes_back_elsewhere(stage: &Stage) {
    let (engine, gate) = Fake::gated(&stage.log);
    let (doomed, first) = stage.worker(stage.server_options("experts-0", 1, &[0]), engine);
    stage.route(&[(0, &[&first])]);
    let mut hop = stage.hop(stage.hop_options());
    hop.begin_step(1, 300);
    let (some, many) = (Rows::new(2, 7), Rows::new(300, 8));
    let reborn = thread::scope(|scope| {
        let reborn = scope.spawn(move || {
            gate.entered.recv().unwrap();
            // The engine is inside the dispatch; the answer never leaves. Then nobody holds the shard for a while.
            doomed.condemn();
            drop(gate.open);
            drop(doomed);
            stage.route(&[(0, &[])]);
            thread::sleep(Duration::from_millis(50));
            let (reborn, second) = stage.plain("experts-0", 2, &[0]);
            stage.route(&[(0, &[&second])]);
            reborn
        });
        assert!(ask(&mut hop, 9, 0, &some).unwrap() == some.partial(9, 0));
        reborn.join().unwrap()
    });
    assert!(ask(&mut hop, 9, 0, &many).unwrap() == many.partial(9, 0));
    drop(reborn);
    assert_eq!(*stage.log.lock(), [(9, vec![2]), (9, vec![2]), (9, vec![300])]);
}

pub(super) fn a_replica_takes_over(stage: &Stage) {
    let (engine, gate) = Fake::gated(&stage.log);
    let (doomed, first) = stage.worker(stage.server_options("experts-0", 1, &[0]), engine);
    let (_replica, second) = stage.plain("experts-1", 2, &[0]);
    stage.route(&[(0, &[&first, &second])]);
    let mut hop = stage.hop(stage.hop_options());
    hop.tend(Duration::from_secs(30));
    hop.begin_step(1, 100);
    let rows = Rows::new(100, 7);
    thread::scope(|scope| {
        scope.spawn(move || {
            gate.entered.recv().unwrap();
            doomed.condemn();
            drop(gate.open);
        });
        // The route table still names the dead worker: the broken link alone is enough.
        assert!(ask(&mut hop, 9, 0, &rows).unwrap() == rows.partial(9, 0));
    });
    assert_eq!(*stage.log.lock(), [(9, vec![100]), (9, vec![100])]);
}

pub(super) fn a_silent_worker_is_left_for_its_replica(stage: &Stage) {
    let (engine, gate) = Fake::gated(&stage.log);
    let (_silent, first) = stage.worker(stage.server_options("experts-0", 1, &[0]), engine);
    let (_replica, second) = stage.plain("experts-1", 2, &[0]);
    stage.route(&[(0, &[&first, &second])]);
    let mut hop = stage.hop(HopOptions { attempt_timeout: Duration::from_millis(100), ..stage.hop_options() });
    hop.tend(Duration::from_secs(30));
    hop.begin_step(1, 1);
    let rows = Rows::new(1, 7);
    assert!(ask(&mut hop, 9, 0, &rows).unwrap() == rows.partial(9, 0));
    drop(gate.open);
}

pub(super) fn another_arithmetic_is_refused_unless_allowed(stage: &Stage) {
    let (cpu, on_cpu) = stage.plain("experts-0", 1, &[0]);
    let other = ServerOptions { arithmetic: "fake-gpu".into(), ..stage.server_options("experts-1", 2, &[0]) };
    let (_gpu, on_gpu) = stage.worker(other, Fake::new(&stage.log));
    stage.route(&[(0, &[&on_cpu, &on_gpu])]);
    let mut strict = stage.hop(stage.hop_options());
    let mut lax = stage.hop(HopOptions { allow_mixed_experts: true, ..stage.hop_options() });
    let rows = Rows::new(2, 7);
    for hop in [&mut strict, &mut lax] {
        hop.tend(Duration::from_secs(30));
        hop.begin_step(1, 2);
        ask(hop, 9, 0, &rows).unwrap();
    }
    cpu.condemn();
    drop(cpu);
    assert!(ask(&mut lax, 10, 0, &rows).unwrap() == rows.partial(10, 0));
    let deadline = Instant::now() + Duration::from_millis(300);
    let ticket = strict.submit(10, 0, &rows.x, &rows.ids, &rows.weights, deadline).unwrap();
    let error = strict.collect(ticket, &mut [0.0; 2 * HIDDEN]).unwrap_err().to_string();
    assert!(error.contains("experts-1: arithmetic is fake-gpu; needed fake"), "{error}");
    assert!(error.contains("--allow-mixed-experts"), "{error}");
    // With no running sequence left, whoever is there may begin new ones.
    strict.release_arithmetic();
    assert!(ask(&mut strict, 11, 0, &rows).unwrap() == rows.partial(11, 0));
}

pub(super) fn the_deadline_names_the_shard_and_the_reasons(stage: &Stage) {
    let gone = stage.listen();
    let options = stage.server_options("experts-0", 1, &[3]);
    let gone_holder = holder(&options, gone.addresses());
    drop(gone);
    let loading = crate::route_table::Holder { ready: false, worker: "experts-1".into(), ..gone_holder.clone() };
    stage.route(&[(3, &[&gone_holder, &loading]), (4, &[])]);
    let mut hop = stage.hop(stage.hop_options());
    hop.begin_step(1, 1);
    let rows = Rows::new(1, 7);
    let mut fail = |shard| {
        let deadline = Instant::now() + Duration::from_millis(100);
        let ticket = hop.submit(9, shard, &rows.x, &rows.ids, &rows.weights, deadline).unwrap();
        let error = hop.collect(ticket, &mut [0.0; HIDDEN]).unwrap_err();
        assert!(matches!(&error, HopError::DeadlineNoHolder { layer: 9, shard: s, .. } if *s == shard), "{error}");
        error.to_string()
    };
    let error = fail(3);
    assert!(error.starts_with("layer 9: no worker computed shard 3 before the deadline"), "{error}");
    assert!(error.contains("experts-0: ") && error.contains("cannot connect to"), "{error}");
    assert!(error.contains("experts-1: not ready"), "{error}");
    assert!(fail(4).contains("route table 1 names no worker for it"));
    assert!(fail(5).contains("route table 1 does not name the shard"));
}

pub(super) fn a_refused_handshake_is_named(stage: &Stage) {
    let options = ServerOptions { fingerprint: "another".into(), ..stage.server_options("experts-0", 1, &[0]) };
    let (_server, holder) = stage.worker(options, Fake::new(&stage.log));
    stage.route(&[(0, &[&holder])]);
    let mut hop = stage.hop(stage.hop_options());
    hop.begin_step(1, 1);
    let rows = Rows::new(1, 7);
    let deadline = Instant::now() + Duration::from_millis(500);
    let ticket = hop.submit(9, 0, &rows.x, &rows.ids, &rows.weights, deadline).unwrap();
    let error = hop.collect(ticket, &mut [0.0; HIDDEN]).unwrap_err().to_string();
    assert!(error.contains("the peer refused this side: fingerprint is f00d; needed another"), "{error}");
    assert!(stage.log.lock().is_empty());
}

pub(super) fn a_failing_engine_is_named_and_its_replica_asked(stage: &Stage) {
    let (_bad, first) = stage.worker(stage.server_options("experts-0", 1, &[0, 1]), Fake::failing(&stage.log));
    let (_good, second) = stage.plain("experts-1", 2, &[0]);
    stage.route(&[(0, &[&first, &second]), (1, &[&first])]);
    let mut hop = stage.hop(stage.hop_options());
    hop.tend(Duration::from_secs(30));
    hop.begin_step(1, 2);
    let rows = Rows::new(2, 7);
    assert!(ask(&mut hop, 9, 0, &rows).unwrap() == rows.partial(9, 0));
    let error = ask(&mut hop, 9, 1, &rows).unwrap_err().to_string();
    assert_eq!(error, "layer 9: shard 1 failed on experts-0: the bank is on fire");
}

pub(super) fn a_route_that_moves_is_followed(stage: &Stage) {
    let (old, first) = stage.plain("experts-0", 1, &[0]);
    stage.route(&[(0, &[&first])]);
    let mut hop = stage.hop(stage.hop_options());
    let rows = Rows::new(2, 7);
    hop.begin_step(1, 2);
    ask(&mut hop, 9, 0, &rows).unwrap();
    let (_new, second) = stage.plain("experts-9", 5, &[0]);
    stage.route(&[(0, &[&second])]);
    hop.begin_step(2, 2);
    assert!(ask(&mut hop, 9, 0, &rows).unwrap() == rows.partial(9, 0));
    old.stop().unwrap();
    assert!(ask(&mut hop, 10, 0, &rows).unwrap() == rows.partial(10, 0));
    assert_eq!(hop.shards_reachable(), [0]);
}

pub(super) fn an_old_process_at_the_address_is_refused(stage: &Stage) {
    let (_server, mut holder) = stage.plain("experts-0", 1, &[0]);
    holder.epoch = 2;
    stage.route(&[(0, &[&holder])]);
    let mut hop = stage.hop(stage.hop_options());
    hop.begin_step(1, 1);
    let rows = Rows::new(1, 7);
    let deadline = Instant::now() + Duration::from_millis(500);
    let ticket = hop.submit(9, 0, &rows.x, &rows.ids, &rows.weights, deadline).unwrap();
    let error = hop.collect(ticket, &mut [0.0; HIDDEN]).unwrap_err().to_string();
    assert!(error.contains("peer_epoch is 2; needed 1"), "{error}");
}

#[test]
fn auto_falls_back_to_grpc_where_tcp_cannot_connect() {
    let stage = Stage::new(LinkKind::Grpc);
    let (_server, mut grpc) = stage.plain("experts-0", 1, &[0]);
    let closed = ExpertListener::bind(Some("127.0.0.1:0".parse().unwrap()), None).unwrap();
    grpc.addresses.insert(0, closed.addresses()[0].clone());
    drop(closed);
    stage.route(&[(0, &[&grpc])]);
    let rows = Rows::new(1, 7);
    let mut auto = stage.hop(stage.hop_options());
    auto.begin_step(1, 1);
    assert!(ask(&mut auto, 9, 0, &rows).unwrap() == rows.partial(9, 0));
    let mut tcp_only = stage.hop(HopOptions { link: crate::link::LinkChoice::Tcp, ..stage.hop_options() });
    tcp_only.begin_step(1, 1);
    let ticket = tcp_only.submit(9, 0, &rows.x, &rows.ids, &rows.weights, Instant::now() + Duration::from_millis(100)).unwrap();
    let error = tcp_only.collect(ticket, &mut [0.0; HIDDEN]).unwrap_err().to_string();
    assert!(error.contains("over tcp"), "{error}");
}

/// What operators see of a hop that lost its worker once: phases and rows by worker, bytes by direction, the retry and its reason.
#[test]
fn metrics_tell_what_happened() {
    use metrics_util::debugging::{DebugValue, DebuggingRecorder};
    let stage = Stage::new(LinkKind::Tcp);
    let (engine, gate) = Fake::gated(&stage.log);
    let (doomed, first) = stage.worker(stage.server_options("experts-0", 1, &[0]), engine);
    let (_replica, second) = stage.plain("experts-1", 2, &[0]);
    stage.route(&[(0, &[&first, &second])]);
    let recorder = DebuggingRecorder::new();
    let snapshots = recorder.snapshotter();
    metrics::with_local_recorder(&recorder, || {
        let mut hop = stage.hop(stage.hop_options());
        hop.tend(Duration::from_secs(30));
        hop.begin_step(1, 2);
        thread::scope(|scope| {
            scope.spawn(move || {
                gate.entered.recv().unwrap();
                doomed.condemn();
                drop(gate.open);
            });
            ask(&mut hop, 9, 0, &Rows::new(2, 7)).unwrap();
        });
        let total = hop.timings().total.as_secs_f64();
        let mut phases = Vec::new();
        let mut seen = std::collections::BTreeMap::new();
        for (key, _, _, value) in snapshots.snapshot().into_vec() {
            let labels: Vec<String> = key.key().labels().map(|l| format!("{}={}", l.key(), l.value())).collect();
            match value {
                DebugValue::Histogram(values) => phases.extend(values.iter().map(|v| (labels.join(","), v.into_inner()))),
                DebugValue::Counter(v) => drop(seen.insert(format!("{}{{{}}}", key.key().name(), labels.join(",")), v as f64)),
                DebugValue::Gauge(v) => drop(seen.insert(format!("{}{{{}}}", key.key().name(), labels.join(",")), v.into_inner())),
            }
        }
        phases.sort_by(|a, b| a.0.cmp(&b.0));
        let names: Vec<&str> = phases.iter().map(|(labels, _)| labels.as_str()).collect();
        let by = |phase| format!("phase={phase},worker=experts-1");
        assert_eq!(names, ["compute", "queue", "return", "send"].map(by));
        let sum: f64 = phases.iter().map(|(_, seconds)| seconds).sum();
        assert!((sum - total).abs() <= 0.05 * total, "{sum} {total}");
        assert_eq!(seen["tandem_hop_rows_total{worker=experts-1}"], 2.0);
        assert_eq!(seen["tandem_hop_retries_total{reason=link}"], 1.0);
        assert_eq!(seen["tandem_link_info{worker=experts-1,link=tcp,reason=first}"], 1.0);
        assert!(seen["tandem_link_bytes_total{dir=sent,link=tcp}"] > seen["tandem_link_bytes_total{dir=received,link=tcp}"]);
    });
}

/// A peer of another frame version is told so in frames of this one.
#[test]
fn another_frame_version_is_refused_by_name() {
    use std::io::{Read, Write};

    use prost::Message;

    use crate::frame::{Frame, Header, Kind};
    let stage = Stage::new(LinkKind::Tcp);
    let (_server, holder) = stage.plain("experts-0", 1, &[0]);
    let mut stream = std::net::TcpStream::connect(&holder.addresses[0].addr).unwrap();
    let mut hello = Header::new(Kind::Hello).encode(&[]);
    hello[4] = 2;
    stream.write_all(&hello).unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    let answer = Frame::decode(&answer.into()).unwrap();
    assert_eq!(answer.header.kind, Kind::Refuse);
    let refuse = crate::experts::v1::Refuse::decode(answer.payload).unwrap();
    assert_eq!((refuse.field.as_str(), refuse.needed.as_str(), refuse.got.as_str()), ("frame version", "1", "2"));
}
