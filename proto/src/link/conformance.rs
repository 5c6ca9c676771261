//! The Link suite: what every transport promises, as one set of scenarios over pairs of connected links.

use std::time::Duration;

use bytes::Bytes;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Endpoint;

use super::grpc::GrpcListener;
use super::inproc::InprocListener;
use super::tcp::{self, TcpLinkListener};
use super::*;
use crate::experts::v1 as wire;
use crate::experts::v1::experts_client::ExpertsClient;
use crate::frame::{Dtype, HEADER_LEN, Header, Kind, MAX_CONTROL_PAYLOAD, MAX_PAYLOAD};

/// Long enough for a loaded machine; no test waits for it to pass.
const PATIENCE: Duration = Duration::from_secs(60);

/// Two ends of one link, and whatever keeps the accepting end alive.
struct Pair {
    dialled: AnyLink,
    accepted: AnyLink,
    _listener: AnyListener,
}

async fn listen(kind: LinkKind) -> (AnyListener, String) {
    let socket = || tcp::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    match kind {
        LinkKind::Inproc => {
            let name = format!("suite-{}", rand::random::<u64>());
            (AnyListener::Inproc(InprocListener::bind(&name).unwrap()), name)
        }
        LinkKind::Tcp => {
            let listener = TcpLinkListener::from_std(socket()).unwrap();
            let addr = listener.local_addr().unwrap().to_string();
            (AnyListener::Tcp(listener), addr)
        }
        LinkKind::Grpc => {
            let listener = GrpcListener::from_std(socket()).unwrap();
            let addr = listener.local_addr().to_string();
            (AnyListener::Grpc(listener), addr)
        }
    }
}

async fn pair(kind: LinkKind) -> Pair {
    let (mut listener, addr) = listen(kind).await;
    let (dialled, accepted) = tokio::join!(connect(kind, &addr, PATIENCE), listener.accept());
    Pair { dialled: dialled.unwrap(), accepted: accepted.unwrap(), _listener: listener }
}

fn frame(step_id: u64, payload: impl Into<Bytes>) -> Frame {
    let header = Header { dtype: Dtype::F32, step_id, rows: 1, rows_total: 1, ..Header::new(Kind::Dispatch) };
    Frame { header, payload: payload.into() }
}

fn bytes(len: usize, seed: u64) -> Bytes {
    (0..len as u64).map(|i| (i.wrapping_mul(seed | 1) >> 3) as u8).collect()
}

async fn soon<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future).await.expect("nothing came")
}

/// Sends in a task, so that both ends move.
fn sending(mut sink: AnySink, frames: Vec<Frame>) -> JoinHandle<Result<AnySink, LinkError>> {
    tokio::spawn(async move {
        for frame in frames {
            sink.send(frame).await?;
        }
        Ok(sink)
    })
}

async fn frames_arrive_whole_and_in_order(kind: LinkKind) {
    let Pair { dialled, accepted, _listener } = pair(kind).await;
    let sizes = [0, 1, 63, 64, 65, 8192, 65_472, 65_536, 65_537, 200_000, 3, 0];
    let frames: Vec<Frame> = (0u64..).zip(sizes).map(|(i, len)| frame(i, bytes(len, i))).collect();
    let (sink, _keep) = dialled.split();
    let sent = sending(sink, frames.clone());
    let (_sink, mut source) = accepted.split();
    for expected in frames {
        assert!(soon(source.recv()).await.unwrap() == Some(expected));
    }
    sent.await.unwrap().unwrap();
}

async fn large_frames_cross_in_both_directions_at_once(kind: LinkKind) {
    let Pair { dialled, accepted, _listener } = pair(kind).await;
    let frames: Vec<Frame> = (0..6).map(|i| frame(i, bytes(MAX_PAYLOAD - i as usize, i + 7))).collect();
    let ((a_sink, mut a_source), (b_sink, mut b_source)) = (dialled.split(), accepted.split());
    let sent = (sending(a_sink, frames.clone()), sending(b_sink, frames.clone()));
    for expected in frames {
        let (a, b) = soon(async { tokio::join!(a_source.recv(), b_source.recv()) }).await;
        assert!(a.unwrap().as_ref() == Some(&expected) && b.unwrap() == Some(expected));
    }
    sent.0.await.unwrap().unwrap();
    sent.1.await.unwrap().unwrap();
}

async fn a_frame_over_the_limit_is_refused_where_it_is_sent(kind: LinkKind) {
    let Pair { dialled, accepted, _listener } = pair(kind).await;
    let ((mut sink, _keep), (_sink, mut source)) = (dialled.split(), accepted.split());
    for (kind, len) in [(Kind::Dispatch, MAX_PAYLOAD + 1), (Kind::Ping, MAX_CONTROL_PAYLOAD + 1)] {
        let mut long = frame(1, bytes(len, 1));
        long.header.kind = kind;
        let error = soon(sink.send(long)).await.unwrap_err();
        assert!(matches!(error, LinkError::Frame(FrameError::TooLong { .. })), "{error}");
    }
    // The link is as good as before.
    soon(sink.send(frame(2, "after"))).await.unwrap();
    assert_eq!(soon(source.recv()).await.unwrap(), Some(frame(2, "after")));
}

async fn recv_can_be_dropped_at_any_point(kind: LinkKind) {
    let Pair { dialled, accepted, _listener } = pair(kind).await;
    let frames: Vec<Frame> = (0..40).map(|i| frame(i, bytes(100_000, i))).collect();
    let (sink, _keep) = dialled.split();
    let sent = sending(sink, frames.clone());
    let (_sink, mut source) = accepted.split();
    for expected in frames {
        let got = loop {
            // Polled a few times, then dropped wherever it is.
            tokio::select! {
                biased;
                got = source.recv() => break got,
                () = tokio::task::yield_now() => {}
            }
            tokio::time::sleep(Duration::from_micros(50)).await;
        };
        assert!(got.unwrap() == Some(expected));
    }
    sent.await.unwrap().unwrap();
}

async fn send_can_be_dropped_and_leaves_the_stream_whole(kind: LinkKind) {
    let Pair { dialled, accepted, _listener } = pair(kind).await;
    let ((mut sink, _keep), (_sink, mut source)) = (dialled.split(), accepted.split());
    // Nobody reads: sends come to wait, and are dropped there.
    for i in 0..24 {
        let _ = tokio::time::timeout(Duration::from_millis(2), sink.send(frame(i, bytes(1 << 20, i)))).await;
    }
    let last = sending(sink, vec![frame(1000, "last")]);
    let mut before = None;
    loop {
        let got = soon(source.recv()).await.unwrap().unwrap();
        if got.header.step_id == 1000 {
            break;
        }
        assert!(before.is_none_or(|before| before < got.header.step_id) && got.payload == bytes(1 << 20, got.header.step_id));
        before = Some(got.header.step_id);
    }
    last.await.unwrap().unwrap();
}

async fn one_direction_closes_and_the_other_goes_on(kind: LinkKind) {
    let Pair { dialled, accepted, _listener } = pair(kind).await;
    let ((mut a_sink, mut a_source), (mut b_sink, mut b_source)) = (dialled.split(), accepted.split());
    a_sink.send(frame(1, "last words")).await.unwrap();
    a_sink.close().await;
    assert_eq!(soon(b_source.recv()).await.unwrap(), Some(frame(1, "last words")));
    assert_eq!(soon(b_source.recv()).await.unwrap(), None);
    b_sink.send(frame(2, "still here")).await.unwrap();
    assert_eq!(soon(a_source.recv()).await.unwrap(), Some(frame(2, "still here")));
    b_sink.close().await;
    assert_eq!(soon(a_source.recv()).await.unwrap(), None);
    assert!(soon(b_sink.send(frame(3, "too late"))).await.is_err());
}

async fn a_dead_peer_ends_both_halves(kind: LinkKind) {
    let Pair { dialled, accepted, _listener } = pair(kind).await;
    let (mut sink, mut source) = accepted.split();
    drop(dialled);
    let ended = soon(source.recv()).await;
    assert!(matches!(ended, Ok(None) | Err(_)), "{ended:?}");
    // Whatever the transport had room for; then the end.
    let failed = soon(async {
        loop {
            if let Err(error) = sink.send(frame(1, bytes(1 << 16, 1))).await {
                return error;
            }
        }
    });
    assert!(!failed.await.to_string().is_empty());
}

async fn a_reader_that_sleeps_holds_the_sender_back(kind: LinkKind) {
    let Pair { dialled, accepted, _listener } = pair(kind).await;
    let ((mut sink, _keep), (_sink, mut source)) = (dialled.split(), accepted.split());
    // 256 MiB in all: no transport may take that from a sender while nobody reads.
    let (frames, payload) = (64, bytes(MAX_PAYLOAD, 3));
    let sent = std::sync::Arc::new(std::sync::atomic::AtomicU64::new(0));
    let task = tokio::spawn({
        let (sent, payload) = (std::sync::Arc::clone(&sent), payload.clone());
        async move {
            for i in 0..frames {
                sink.send(frame(i, payload.clone())).await.unwrap();
                sent.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            }
            sink
        }
    });
    let settled = async {
        let mut before = u64::MAX;
        loop {
            tokio::time::sleep(Duration::from_millis(200)).await;
            let now = sent.load(std::sync::atomic::Ordering::SeqCst);
            if now == before {
                return now;
            }
            before = now;
        }
    };
    assert!(soon(settled).await < frames / 2);
    for i in 0..frames {
        let got = soon(source.recv()).await.unwrap().unwrap();
        assert!(got.header.step_id == i && got.payload.len() == payload.len());
    }
    task.await.unwrap();
}

macro_rules! link_suite {
    ($($scenario:ident),* $(,)?) => {
        mod inproc_suite { $(#[tokio::test] async fn $scenario() { super::$scenario(super::LinkKind::Inproc).await; })* }
        mod tcp_suite { $(#[tokio::test] async fn $scenario() { super::$scenario(super::LinkKind::Tcp).await; })* }
        mod grpc_suite { $(#[tokio::test] async fn $scenario() { super::$scenario(super::LinkKind::Grpc).await; })* }
    };
}

link_suite! {
    frames_arrive_whole_and_in_order,
    large_frames_cross_in_both_directions_at_once,
    a_frame_over_the_limit_is_refused_where_it_is_sent,
    recv_can_be_dropped_at_any_point,
    send_can_be_dropped_and_leaves_the_stream_whole,
    one_direction_closes_and_the_other_goes_on,
    a_dead_peer_ends_both_halves,
    a_reader_that_sleeps_holds_the_sender_back,
}

/// What bytes the peer wrote, and what the receiver says.
fn garbage() -> Vec<(Vec<u8>, &'static str)> {
    let good = frame(1, "payload");
    let header = good.header.encode(&good.payload).to_vec();
    let with = |at: usize, value: &[u8]| {
        let mut bytes = [&header[..], &good.payload[..]].concat();
        bytes[at..at + value.len()].copy_from_slice(value);
        bytes
    };
    vec![
        (b"GET / HTTP/1.1\r\nHost: somebody who took this for a web server\r\nAccept: */*\r\n\r\n".to_vec(), "frame magic"),
        (with(4, &[7]), "frame version is 7; needed 1"),
        (with(6, &[99]), "frame kind is 99"),
        (with(56, &[255; 4]), "at most 4194304 allowed"),
        (with(70, b"!"), "frame checksum"),
        (with(40, &[9]), "lie outside"),
    ]
}

#[tokio::test]
async fn tcp_names_garbage() {
    let cut = |len: usize| (frame(1, "payload").header.encode(b"payload")[..len].to_vec(), "needed");
    for (bytes, text) in garbage().into_iter().chain([cut(5), cut(HEADER_LEN)]) {
        let (mut listener, addr) = listen(LinkKind::Tcp).await;
        let mut stream = TcpStream::connect(&addr).await.unwrap();
        stream.write_all(&bytes).await.unwrap();
        stream.shutdown().await.unwrap();
        let (_sink, mut source) = listener.accept().await.unwrap().split();
        let error = soon(source.recv()).await.unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    }
}

#[tokio::test]
async fn grpc_names_garbage() {
    let (mut listener, addr) = listen(LinkKind::Grpc).await;
    let short = (vec![1, 2, 3], "frame header is 3 bytes long; needed 64");
    for (mut header, text) in garbage().into_iter().chain([short]) {
        let payload = header.split_off(header.len().min(HEADER_LEN));
        let (sender, messages) = tokio::sync::mpsc::channel(1);
        sender.send(wire::Frame { header: header.into(), payload: payload.into() }).await.unwrap();
        let channel = Endpoint::from_shared(format!("http://{addr}")).unwrap().connect().await.unwrap();
        let mut client = ExpertsClient::new(channel);
        let (response, link) = tokio::join!(client.frames(ReceiverStream::new(messages)), listener.accept());
        response.unwrap();
        let (_sink, mut source) = link.unwrap().split();
        let error = soon(source.recv()).await.unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    }
}

#[tokio::test]
async fn a_tcp_peer_that_dies_inside_a_frame_is_no_orderly_end() {
    let (mut listener, addr) = listen(LinkKind::Tcp).await;
    let mut stream = TcpStream::connect(&addr).await.unwrap();
    let half = frame(1, bytes(100_000, 1));
    stream.write_all(&half.header.encode(&half.payload)).await.unwrap();
    stream.write_all(&half.payload[..50_000]).await.unwrap();
    drop(stream);
    let (_sink, mut source) = listener.accept().await.unwrap().split();
    let error = soon(source.recv()).await.unwrap_err();
    assert!(matches!(error, LinkError::Frame(FrameError::Truncated { what: "payload", .. }) | LinkError::Io { .. }), "{error}");
}

#[tokio::test]
async fn both_ends_of_tcp_have_no_delay() {
    let (mut listener, addr) = listen(LinkKind::Tcp).await;
    let (dialled, accepted) = tokio::join!(TcpStream::connect(&addr), listener.accept());
    tcp::configure(&dialled.unwrap()).unwrap();
    drop(accepted.unwrap());
    let stream = TcpStream::connect(&addr).await.unwrap();
    assert!(!stream.nodelay().unwrap(), "the system's default: this test would prove nothing");
    tcp::configure(&stream).unwrap();
    assert!(stream.nodelay().unwrap());
}

#[tokio::test]
async fn nobody_listening_is_named() {
    for kind in [LinkKind::Inproc, LinkKind::Tcp, LinkKind::Grpc] {
        let (listener, addr) = listen(kind).await;
        drop(listener);
        // The gRPC listener's task ends a moment after it is dropped.
        let error = loop {
            match connect(kind, &addr, PATIENCE).await {
                Ok(_) => tokio::task::yield_now().await,
                Err(error) => break error.to_string(),
            }
        };
        assert!(error.starts_with(&format!("cannot connect to {addr} over {kind}: ")), "{error}");
    }
}

#[tokio::test]
async fn dial_follows_the_choice() {
    use crate::route_table::Address;
    let (mut tcp, tcp_addr) = listen(LinkKind::Tcp).await;
    let (mut grpc, grpc_addr) = listen(LinkKind::Grpc).await;
    tokio::spawn(async move { while tcp.accept().await.is_ok() {} });
    tokio::spawn(async move { while grpc.accept().await.is_ok() {} });
    let (closed, closed_addr) = listen(LinkKind::Tcp).await;
    drop(closed);
    let at = |link, addr: &String| Address { link, addr: addr.clone() };
    let both = [at(LinkKind::Grpc, &grpc_addr), at(LinkKind::Tcp, &tcp_addr)];
    let only_grpc_works = [at(LinkKind::Grpc, &grpc_addr), at(LinkKind::Tcp, &closed_addr)];
    for (choice, addresses, kind, reason) in [
        (LinkChoice::Auto, &both, LinkKind::Tcp, "auto: first offered"),
        (LinkChoice::Tcp, &both, LinkKind::Tcp, "tcp: first offered"),
        (LinkChoice::Grpc, &both, LinkKind::Grpc, "grpc: first offered"),
        (LinkChoice::Auto, &only_grpc_works, LinkKind::Grpc, "auto: cannot connect to"),
    ] {
        let dialled = dial(choice, addresses, PATIENCE).await.unwrap();
        assert_eq!(dialled.link.kind(), kind);
        assert!(dialled.reason.starts_with(reason), "{}", dialled.reason);
    }
    assert!(dial(LinkChoice::Tcp, &only_grpc_works, PATIENCE).await.is_err());
    let error = dial(LinkChoice::Tcp, &both[..1], PATIENCE).await.unwrap_err().to_string();
    assert_eq!(error, "the worker offers no address for --link tcp; it offers grpc");
}
