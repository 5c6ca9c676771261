//! Several submissions at once, repeated ones, and answers that belong to none.

use std::thread;
use std::time::Duration;

use bytes::BytesMut;

use super::stage::{FINGERPRINT, Fake, HIDDEN, Rows, Stage, TOPK, ask, holder, partial, soon};
use crate::experts::v1::Hello;
use crate::frame::{Dtype, Frame, Header, Kind};
use crate::hop::{LATENCY_ROWS, handshake};
use crate::link::{AnyListener, FrameSink, FrameSource, Link, LinkKind, connect, grpc, inproc, tcp};
use crate::payload::{ExpertTimings, Precision, RowShape};
use crate::route_table::Address;

const SHAPE: RowShape = RowShape { hidden: HIDDEN, topk: TOPK, precision: Precision::F32 };

pub(super) fn two_attention_workers_share_a_batch(stage: &Stage) {
    let (engine, gate) = Fake::gated(&stage.log);
    let (server, holder) = stage.worker(stage.server_options("experts-0", 1, &[0]), engine);
    stage.route(&[(0, &[&holder])]);
    let run = |layer, count| {
        let mut hop = stage.hop(stage.hop_options());
        hop.begin_step(1, count);
        let rows = Rows::new(count as usize, count);
        assert!(ask(&mut hop, layer, 0, &rows).unwrap() == rows.partial(layer, 0));
    };
    thread::scope(|scope| {
        scope.spawn(|| run(3, 1));
        gate.entered.recv().unwrap();
        // While the engine is busy, two more arrive for one layer. They cannot shake hands before it lets go, so each gets a first
        // turn alone on layer 4 to come up.
        scope.spawn(|| run_twice(stage, 2));
        scope.spawn(|| run_twice(stage, 3));
        gate.open.send(()).unwrap();
        // Both are connected once both had their layer 4.
        while stage.log.lock().iter().filter(|(layer, _)| *layer == 4).map(|(_, rows)| rows.len()).sum::<usize>() < 2 {
            gate.entered.recv().unwrap();
            gate.open.send(()).unwrap();
        }
        drop(gate.open);
    });
    drop(server);
    let log = stage.log.lock();
    let rows: usize = log.iter().filter(|(layer, _)| *layer == 5).flat_map(|(_, rows)| rows).sum();
    assert_eq!(rows, 50 * (2 + 3), "{log:?}");
}

fn run_twice(stage: &Stage, count: u32) {
    let mut hop = stage.hop(stage.hop_options());
    let rows = Rows::new(count as usize, count);
    hop.begin_step(1, count);
    assert!(ask(&mut hop, 4, 0, &rows).unwrap() == rows.partial(4, 0));
    for step in 2..52 {
        hop.begin_step(step, count);
        assert!(ask(&mut hop, 5, 0, &rows).unwrap() == rows.partial(5, 0));
    }
}

pub(super) fn decode_overtakes_prefill(stage: &Stage) {
    let (engine, gate) = Fake::gated(&stage.log);
    let (_server, holder) = stage.worker(stage.server_options("experts-0", 1, &[0, 1]), engine);
    stage.route(&[(0, &[&holder]), (1, &[&holder])]);
    let mut hop = stage.hop(stage.hop_options());
    hop.tend(Duration::from_secs(30));
    hop.begin_step(1, 1000);
    let (first, prefill, decode) = (Rows::new(1, 1), Rows::new(3000, 2), Rows::new(2, 3));
    let submit =
        |hop: &mut crate::hop::HostHop, shard, rows: &Rows| hop.submit(9, shard, &rows.x, &rows.ids, &rows.weights, soon()).unwrap();
    let one = submit(&mut hop, 1, &first);
    gate.entered.recv().unwrap();
    // The engine is busy, so nothing is read: the prefill's pieces use up their credits and the decode rows pass the rest.
    let two = submit(&mut hop, 0, &prefill);
    let three = submit(&mut hop, 0, &decode);
    drop(gate.open);
    for (ticket, shard, rows) in [(three, 0, &decode), (one, 1, &first), (two, 0, &prefill)] {
        let mut out = vec![0.0; rows.x.len()];
        hop.collect(ticket, &mut out).unwrap();
        assert!(out == rows.partial(9, shard));
    }
    let order: Vec<usize> = stage.log.lock().iter().flat_map(|(_, rows)| rows.clone()).collect();
    assert_eq!(order, [1, 2, 3000]);
}

fn hello(epoch: u64) -> Hello {
    Hello {
        protocol_version: 1,
        name: "raw".into(),
        epoch,
        fingerprint: FINGERPRINT.into(),
        precision: "f32".into(),
        hidden: HIDDEN as u32,
        topk: TOPK as u32,
        max_rows: 16,
        max_payload: 1 << 20,
        credits: 4,
        ..Default::default()
    }
}

fn block_on<R>(future: impl Future<Output = R>) -> R {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

pub(super) fn a_dispatch_that_arrives_twice_is_computed_once(stage: &Stage) {
    let (_server, holder) = stage.plain("experts-0", 1, &[0]);
    let Address { link, addr } = &holder.addresses[0];
    let rows = Rows::new(2, 1);
    let mut payload = BytesMut::new();
    SHAPE.put_dispatch(&mut payload, &rows.ids, &rows.weights, &rows.x);
    let header = Header { dtype: Dtype::F32, epoch: 77, step_id: 1, layer: 3, rows: 2, rows_total: 2, ..Header::new(Kind::Dispatch) };
    let frame = Frame { header, payload: payload.freeze() };
    block_on(async {
        let mut answers = Vec::new();
        // Twice on one link, then again on its successor.
        for repeats in [2, 1] {
            let (mut sink, mut source) = connect(*link, addr, Duration::from_secs(30)).await.unwrap().split();
            handshake::offer(&mut sink, &mut source, &hello(77)).await.unwrap();
            for _ in 0..repeats {
                sink.send(frame.clone()).await.unwrap();
                answers.push(source.recv().await.unwrap().unwrap());
            }
        }
        for answer in &answers {
            assert_eq!((answer.header.kind, answer.header.key()), (Kind::Combine, header.key()));
            assert_eq!(answer, &answers[0]);
        }
        let mut out = vec![0.0; 2 * HIDDEN];
        SHAPE.get_partial(&answers[0].payload, &mut out);
        assert!(out == rows.partial(3, 0));
    });
    assert_eq!(*stage.log.lock(), [(3, vec![2])]);
}

/// A worker that answers each dispatch with wrong keys first: another epoch, step, layer, shard, row; then rightly, and once more with
/// other values.
pub(super) fn stale_answers_are_not_taken(stage: &Stage) {
    let std_listener = || tcp::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let name = format!("liar-{stage:p}");
    let socket = std_listener();
    let addr = if stage.kind == LinkKind::Inproc { name.clone() } else { socket.local_addr().unwrap().to_string() };
    let options = stage.server_options("experts-0", 1, &[0]);
    let entry = holder(&options, &[Address { link: stage.kind, addr }]);
    let (listening, listens) = std::sync::mpsc::channel();
    let kind = stage.kind;
    let lying = thread::spawn(move || {
        block_on(async move {
            let mut listener = match kind {
                LinkKind::Inproc => AnyListener::Inproc(inproc::InprocListener::bind(&name).unwrap()),
                LinkKind::Tcp => AnyListener::Tcp(tcp::TcpLinkListener::from_std(socket).unwrap()),
                LinkKind::Grpc => AnyListener::Grpc(grpc::GrpcListener::from_std(socket).unwrap()),
            };
            listening.send(()).unwrap();
            let (mut sink, mut source) = listener.accept().await.unwrap().split();
            let welcome = Hello { epoch: 1, shards: vec![0], max_rows: 4096, arithmetic: "fake".into(), ..hello(1) };
            handshake::answer(&mut sink, &mut source, &welcome, |_| welcome.clone()).await.unwrap();
            while let Ok(Some(frame)) = source.recv().await {
                if frame.header.kind == Kind::Dispatch {
                    for answer in lies(&frame) {
                        sink.send(answer).await.unwrap();
                    }
                }
            }
        });
    });
    listens.recv().unwrap();
    stage.route(&[(0, &[&entry])]);
    let mut hop = stage.hop(stage.hop_options());
    for step in 1..4 {
        hop.begin_step(step, 2);
        for layer in 3..6 {
            let rows = Rows::new(2, step as u32);
            assert!(ask(&mut hop, layer, 0, &rows).unwrap() == rows.partial(layer, 0), "step {step} layer {layer}");
        }
    }
    drop(hop);
    lying.join().unwrap();
}

fn lies(frame: &Frame) -> Vec<Frame> {
    let rows = frame.header.rows as usize;
    let (mut ids, mut weights, mut x) = (vec![0; rows * TOPK], vec![0.0; rows * TOPK], vec![0.0; rows * HIDDEN]);
    SHAPE.get_dispatch(Dtype::F32, &frame.payload, rows, &mut ids, &mut weights, &mut x).unwrap();
    let truth = partial(frame.header.layer, frame.header.shard_id, &x, &ids, &weights);
    let combine = |header: Header, values: &[f32]| {
        let mut payload = BytesMut::new();
        SHAPE.put_combine(&mut payload, ExpertTimings::default(), values);
        Frame { header: Header { kind: Kind::Combine, ..header }, payload: payload.freeze() }
    };
    let h = frame.header;
    let wrong = vec![6.66; truth.len()];
    vec![
        combine(Header { epoch: h.epoch + 1, ..h }, &wrong),
        combine(Header { step_id: h.step_id - 1, ..h }, &wrong),
        combine(Header { layer: h.layer + 1, ..h }, &wrong),
        combine(Header { shard_id: 1, ..h }, &wrong),
        combine(Header { row_offset: h.row_offset + 2, row_base: h.row_base + 2, ..h }, &wrong),
        combine(h, &truth),
        combine(h, &wrong),
    ]
}

#[test]
fn classes_meet_at_the_documented_size() {
    assert_eq!(LATENCY_ROWS, 64);
}
