//! A scripted coordinator on a real socket.

use std::net::SocketAddr;

use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::transport::Server;
use tonic::{Request, Response, Status, Streaming};

use super::*;
use crate::control::v1::control_server::{Control, ControlServer};
use crate::control::v1::coordinator_message::Message as FromCoordinator;
use crate::control::v1::worker_message::Message as ToCoordinator;
use crate::control::v1::{self as wire};
use crate::control::v1::{CoordinatorMessage, WorkerMessage, WorkerState};

/// One worker's stream as the test sees it.
struct Member {
    from: Streaming<WorkerMessage>,
    to: mpsc::Sender<Result<CoordinatorMessage, Status>>,
}

impl Member {
    async fn say(&self, message: FromCoordinator) {
        self.to.send(Ok(CoordinatorMessage { message: Some(message) })).await.unwrap();
    }

    async fn heard(&mut self) -> Option<ToCoordinator> {
        self.from.message().await.ok().flatten().and_then(|message| message.message)
    }

    async fn hello(&mut self) -> Hello {
        match self.heard().await {
            Some(ToCoordinator::Hello(hello)) => hello,
            other => panic!("{other:?}"),
        }
    }

    async fn accept(&mut self, coordinator_epoch: u64) {
        self.hello().await;
        let accept = Accept { coordinator_epoch, heartbeat_ms: 5, lease_ms: 50, shards: vec![shard(coordinator_epoch as u32)] };
        self.say(FromCoordinator::Accept(accept)).await;
    }
}

struct Door(mpsc::Sender<Member>);

#[tonic::async_trait]
impl Control for Door {
    type JoinStream = ReceiverStream<Result<CoordinatorMessage, Status>>;

    async fn join(&self, request: Request<Streaming<WorkerMessage>>) -> Result<Response<Self::JoinStream>, Status> {
        let (to, messages) = mpsc::channel(8);
        let _ = self.0.send(Member { from: request.into_inner(), to }).await;
        Ok(Response::new(ReceiverStream::new(messages)))
    }

    async fn request_drain(&self, _: Request<wire::DrainRequest>) -> Result<Response<wire::DrainReply>, Status> {
        Err(Status::unimplemented("a door for members alone"))
    }
}

struct Coordinator {
    addr: SocketAddr,
    members: mpsc::Receiver<Member>,
    task: JoinHandle<()>,
}

impl Coordinator {
    async fn start(addr: &str) -> Self {
        let listener = loop {
            match TcpListener::bind(addr).await {
                Ok(listener) => break listener,
                Err(_) => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        };
        let addr = listener.local_addr().unwrap();
        let (door, members) = mpsc::channel(8);
        let router = Server::builder().add_service(ControlServer::new(Door(door)));
        let task = tokio::spawn(async move {
            router.serve_with_incoming(TcpListenerStream::new(listener)).await.unwrap();
        });
        Self { addr, members, task }
    }

    async fn member(&mut self) -> Member {
        self.members.recv().await.unwrap()
    }
}

fn shard(id: u32) -> wire::Shard {
    let range = Some(wire::Range { start: 0, end: 1 });
    wire::Shard { id, layers: vec![wire::Range { start: 0, end: 1 }], experts: range, ffn: range }
}

fn table(version: u32, shards: u32) -> FromCoordinator {
    let routes = (0..shards).map(|id| wire::Route { shard: Some(shard(id)), holders: vec![] });
    FromCoordinator::Routes(wire::RouteTable { version, routes: routes.collect() })
}

fn hello() -> Hello {
    Hello { name: "experts-0".into(), epoch: 3, ..Default::default() }
}

fn beat() -> Heartbeat {
    Heartbeat { state: WorkerState::Ready as i32, rows: 42, ..Default::default() }
}

async fn join(coordinator: &mut Coordinator, epoch: u64) -> (MembershipHandle, Member) {
    let addr = coordinator.addr.to_string();
    let joining = tokio::spawn(Membership::join(addr, hello(), beat, std::future::pending()));
    let mut member = coordinator.member().await;
    member.accept(epoch).await;
    (joining.await.unwrap().unwrap(), member)
}

#[tokio::test]
async fn a_member_beats_and_follows_the_route_table() {
    let mut coordinator = Coordinator::start("127.0.0.1:0").await;
    let (mut handle, mut member) = join(&mut coordinator, 1).await;
    assert_eq!((handle.accept.coordinator_epoch, handle.accept.shards[0].id), (1, 1));
    assert!(matches!(*handle.state.borrow(), MemberState::Joined { coordinator_epoch: 1 }));
    for _ in 0..3 {
        assert!(matches!(member.heard().await, Some(ToCoordinator::Heartbeat(Heartbeat { rows: 42, .. }))));
    }
    member.say(table(2, 3)).await;
    let routes = handle.routes.wait_for(|table| table.version == 2).await.unwrap().clone();
    assert_eq!((routes.coordinator_epoch, routes.routes.len()), (1, 3));
    // Older, reused and broken tables change nothing; a newer one does.
    member.say(table(1, 1)).await;
    member.say(table(2, 1)).await;
    member.say(FromCoordinator::Routes(wire::RouteTable { version: 9, routes: vec![wire::Route::default()] })).await;
    member.say(table(3, 2)).await;
    let routes = handle.routes.wait_for(|table| table.version != 2).await.unwrap().clone();
    assert_eq!((routes.version, routes.routes.len()), (3, 2));
    member.say(FromCoordinator::Drain(Drain { reason: "upgrade".into(), timeout_ms: 7 })).await;
    let drain = handle.drain.wait_for(Option::is_some).await.unwrap().clone();
    assert_eq!(drain.unwrap().reason, "upgrade");
    let leaving = tokio::spawn(async move { handle.leave("drained").await });
    loop {
        match member.heard().await {
            Some(ToCoordinator::Heartbeat(_)) => {}
            Some(ToCoordinator::Goodbye(goodbye)) => break assert_eq!(goodbye.reason, "drained"),
            other => panic!("{other:?}"),
        }
    }
    drop(member);
    leaving.await.unwrap();
}

#[tokio::test]
async fn a_refusal_is_a_typed_error() {
    let mut coordinator = Coordinator::start("127.0.0.1:0").await;
    let addr = coordinator.addr.to_string();
    let joining = tokio::spawn(Membership::join(format!("http://{addr}"), hello(), beat, std::future::pending()));
    let mut member = coordinator.member().await;
    assert_eq!(member.hello().await, hello());
    let refuse = Refuse { field: "fingerprint".into(), needed: "a".into(), got: "b".into(), hint: "same checkpoint".into() };
    member.say(FromCoordinator::Refuse(refuse.clone())).await;
    let error = joining.await.unwrap().unwrap_err();
    let text = format!("the coordinator at http://{addr} refused this worker: fingerprint is b; needed a (same checkpoint)");
    assert_eq!(error.to_string(), text);
    assert!(matches!(error, JoinError::Refused { refuse: r, .. } if r == refuse));
}

#[tokio::test]
async fn a_restarted_coordinator_is_joined_again_and_counts_from_the_start() {
    let mut first = Coordinator::start("127.0.0.1:0").await;
    let addr = first.addr.to_string();
    let (mut handle, member) = join(&mut first, 1).await;
    member.say(table(9, 3)).await;
    handle.routes.wait_for(|table| table.version == 9).await.unwrap();
    first.task.abort();
    drop((member, first));
    let lost = |state: &MemberState| matches!(state, MemberState::Lost { expired: true, .. });
    handle.state.wait_for(lost).await.unwrap();
    assert_eq!(handle.routes.borrow().version, 9);
    let mut second = Coordinator::start(&addr).await;
    let mut member = second.member().await;
    member.accept(2).await;
    handle.state.wait_for(|state| matches!(state, MemberState::Joined { coordinator_epoch: 2 })).await.unwrap();
    assert_eq!(handle.accepted.borrow().shards[0].id, 2);
    member.say(table(1, 1)).await;
    let routes = handle.routes.wait_for(|table| table.coordinator_epoch == 2).await.unwrap().clone();
    assert_eq!((routes.version, routes.routes.len()), (1, 1));
    // Refused when it comes back the next time: final.
    drop(member);
    let mut member = second.member().await;
    member.hello().await;
    member.say(FromCoordinator::Refuse(Refuse { field: "epoch".into(), ..Default::default() })).await;
    assert!(matches!(handle.ended().await, MemberState::Refused(JoinError::Refused { .. })));
}

#[tokio::test]
async fn an_absent_coordinator_is_waited_for_until_told_to_stop() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap().to_string();
    drop(listener);
    let (stop, stopped) = oneshot::channel::<()>();
    let shutdown = async { drop(stopped.await) };
    let joining = tokio::spawn(Membership::join(addr.clone(), hello(), beat, shutdown));
    let mut coordinator = Coordinator::start(&addr).await;
    // Two attempts: the first stream ends without an answer.
    drop(coordinator.member().await);
    let mut member = coordinator.member().await;
    member.hello().await;
    stop.send(()).unwrap();
    assert!(matches!(joining.await.unwrap(), Err(JoinError::Stopped { .. })));
}

#[tokio::test]
async fn bad_addresses_are_named() {
    for (addr, reason) in [("https://h:1", "scheme https is not supported"), ("http://h", "no port"), ("", "")] {
        let error = Membership::join(addr.into(), hello(), beat, std::future::pending()).await.unwrap_err();
        assert!(matches!(error, JoinError::Address { .. }), "{error}");
        assert!(error.to_string().contains(reason), "{error}");
    }
}
