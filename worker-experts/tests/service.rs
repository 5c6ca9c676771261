//! The worker as others see it: a scripted coordinator on the one side, the attention side of the hop on the other.

#![allow(clippy::unwrap_used)] // Helpers of tests are tests.

use std::{
    net::SocketAddr,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use tandem_kernels::{Precision, reference::ReferenceBackend};
use tandem_model::{
    Checkpoint, Shard,
    synthetic::{self, Preset},
};
use tandem_proto::{
    control::v1::{
        Accept, CoordinatorMessage, Drain, DrainReply, DrainRequest, Goodbye, Heartbeat, Hello, Refuse, WorkerMessage, WorkerState,
        control_server::{Control, ControlServer},
        coordinator_message::Message as ToWorker,
        worker_message::Message as FromWorker,
    },
    hop::{Dispatch, ExpertEngine, HopOptions, HostHop},
    link::LinkChoice,
    payload,
    route_table::{Address, Holder, Route, RouteTable, ShardDesc},
};
use tandem_runtime::Shutdown;
use tandem_worker_experts::{Batcher, Config, Error, Lending, ShardEngine, run};
use tokio::{
    net::TcpListener,
    sync::{mpsc, watch},
    task::JoinHandle,
};
use tokio_stream::{
    StreamExt,
    wrappers::{TcpListenerStream, UnboundedReceiverStream},
};
use tonic::{Request, Response, Status, Streaming};

const WAIT: Duration = Duration::from_secs(60);

/// What the coordinator answers to the next Hello.
type Answer = Arc<Mutex<ToWorker>>;
type Session = mpsc::UnboundedSender<Result<CoordinatorMessage, Status>>;

/// A coordinator that says what a test tells it to.
struct Script {
    answer: Answer,
    heard: mpsc::UnboundedSender<FromWorker>,
    session: Arc<Mutex<Option<Session>>>,
}

#[tonic::async_trait]
impl Control for Script {
    type JoinStream = UnboundedReceiverStream<Result<CoordinatorMessage, Status>>;

    async fn join(&self, request: Request<Streaming<WorkerMessage>>) -> Result<Response<Self::JoinStream>, Status> {
        let (send, receive) = mpsc::unbounded_channel();
        let (answer, heard, session) = (Arc::clone(&self.answer), self.heard.clone(), Arc::clone(&self.session));
        let mut messages = request.into_inner();
        tokio::spawn(async move {
            while let Some(Ok(message)) = messages.next().await {
                let Some(message) = message.message else { continue };
                if matches!(message, FromWorker::Hello(_)) {
                    let first = answer.lock().clone();
                    let _ = send.send(Ok(CoordinatorMessage { message: Some(first) }));
                    *session.lock() = Some(send.clone());
                }
                let _ = heard.send(message);
            }
        });
        Ok(Response::new(UnboundedReceiverStream::new(receive)))
    }

    async fn request_drain(&self, _: Request<DrainRequest>) -> Result<Response<DrainReply>, Status> {
        Err(Status::unimplemented("a scripted coordinator drains by its own script"))
    }
}

/// One test: a coordinator, a checkpoint, a worker.
struct Stage {
    answer: Answer,
    session: Arc<Mutex<Option<Session>>>,
    heard: mpsc::UnboundedReceiver<FromWorker>,
    dir: tempfile::TempDir,
    shutdown: Shutdown,
    worker: JoinHandle<Result<(), Error>>,
}

fn shard(id: u32, text: &str) -> Shard {
    Shard { id, ..text.parse().unwrap() }
}

fn desc(s: &Shard) -> ShardDesc {
    ShardDesc { id: s.id, layers: s.layers.clone(), experts: s.experts.clone(), ffn: s.ffn.clone() }
}

fn accept(epoch: u64, shards: &[Shard]) -> ToWorker {
    let shards = shards.iter().map(|s| desc(s).to_wire()).collect();
    ToWorker::Accept(Accept { coordinator_epoch: epoch, heartbeat_ms: 20, lease_ms: 5000, shards })
}

impl Stage {
    async fn new(answer: ToWorker, change: impl FnOnce(&mut Config)) -> Self {
        let answer = Arc::new(Mutex::new(answer));
        let (tell, heard) = mpsc::unbounded_channel();
        let session = Arc::default();
        let script = Script { answer: Arc::clone(&answer), heard: tell, session: Arc::clone(&session) };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let coordinator: SocketAddr = listener.local_addr().unwrap();
        let server = tonic::transport::Server::builder().add_service(ControlServer::new(script));
        tokio::spawn(server.serve_with_incoming(TcpListenerStream::new(listener)));
        let dir = tempfile::tempdir().unwrap();
        synthetic::write(Preset::TinyB, dir.path(), &[]).unwrap();
        let mut config = Config {
            precision: Precision::F32,
            device: "reference".to_owned(),
            ..Config::new(format!("http://{coordinator}"), PathBuf::from(dir.path()))
        };
        change(&mut config);
        let shutdown = Shutdown::new();
        let worker = tokio::spawn(run(config, shutdown.clone()));
        Self { answer, session, heard, dir, shutdown, worker }
    }

    async fn hear<T>(&mut self, mut pick: impl FnMut(FromWorker) -> Option<T>) -> T {
        let wait = async {
            loop {
                let message = self.heard.recv().await.expect("the coordinator is there");
                if let Some(found) = pick(message) {
                    return found;
                }
            }
        };
        tokio::time::timeout(WAIT, wait).await.expect("heard in time")
    }

    async fn hello(&mut self) -> Hello {
        self.hear(|m| if let FromWorker::Hello(hello) = m { Some(hello) } else { None }).await
    }

    async fn heartbeat(&mut self, state: WorkerState, shards: &[u32]) -> Heartbeat {
        let fits = |h: &Heartbeat| h.state() == state && h.shards_ready == shards;
        self.hear(|m| if let FromWorker::Heartbeat(h) = m { fits(&h).then_some(h) } else { None }).await
    }

    async fn goodbye(&mut self) -> Goodbye {
        self.hear(|m| if let FromWorker::Goodbye(goodbye) = m { Some(goodbye) } else { None }).await
    }

    fn say(&self, message: ToWorker) {
        let session = self.session.lock();
        let sent = session.as_ref().expect("a session").send(Ok(CoordinatorMessage { message: Some(message) }));
        sent.expect("the session is open");
    }

    async fn end(self) -> Result<(), Error> {
        tokio::time::timeout(WAIT, self.worker).await.expect("ends in time").expect("no panic")
    }

    /// Dispatches rows through the hop, and computes them here; both as bits.
    async fn dispatch(&self, hello: &Hello, shard: &Shard, link: LinkChoice) -> (Vec<u32>, Vec<u32>) {
        let checkpoint = Checkpoint::open(self.dir.path()).unwrap();
        let g = checkpoint.geometry().clone();
        let holder = Holder {
            worker: hello.name.clone(),
            epoch: hello.epoch,
            arithmetic: hello.arithmetic.clone(),
            host: hello.host.clone(),
            addresses: hello.addresses.iter().filter_map(Address::from_wire).collect(),
            ready: true,
            local: false,
        };
        let routes = vec![Route { shard: desc(shard), holders: vec![holder] }];
        let (_keep, routes) = watch::channel(RouteTable { coordinator_epoch: 1, version: 1, routes });
        let mut options = HopOptions::new("attn-0", 7, checkpoint.fingerprint(), payload::Precision::F32, g.hidden, g.topk);
        options.link = link;
        let shard = shard.clone();
        let work = move || {
            const ROWS: usize = 3;
            let value = |i: usize| ((i * 37 % 101) as f32 - 50.0) / 25.0;
            let x: Vec<f32> = (0..ROWS * g.hidden).map(value).collect();
            let ids: Vec<i32> = (0..ROWS * g.topk).map(|i| (i * 5 % g.experts) as i32).collect();
            let weights: Vec<f32> = (0..ROWS * g.topk).map(|i| 0.1 + value(i).abs()).collect();
            let layer = shard.layers[0].start as u16;
            let mut hop = HostHop::new(options, routes).unwrap();
            hop.begin_step(1, ROWS as u32);
            let ticket = hop.submit(layer, shard.id, &x, &ids, &weights, Instant::now() + WAIT).unwrap();
            let mut far = vec![0.0; x.len()];
            hop.collect(ticket, &mut far).unwrap();
            let backend = Arc::new(ReferenceBackend::<f32>::new(Precision::F32));
            let engine = ShardEngine::load(&backend, &checkpoint, &shard, |_| {}).unwrap();
            let lending = Arc::new(Lending::new(Arc::clone(&backend), g.hidden, 8));
            let mut batcher = Batcher::new(&backend, vec![engine], g.hidden, g.topk, 8, lending, None).unwrap();
            let dispatch = Dispatch { shard: shard.id, rows: ROWS, x: &x, shared: None, ids: &ids, weights: &weights };
            let near = batcher.execute(layer, &[dispatch]).remove(0).unwrap().into_host();
            assert!(near.iter().any(|v| *v != 0.0));
            (far.iter().map(|v| v.to_bits()).collect(), near.iter().map(|v| v.to_bits()).collect())
        };
        tokio::task::spawn_blocking(work).await.unwrap()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_joins_loads_serves_both_links_and_drains() {
    let shards = [shard(4, "layers=1-2,experts=0-11,ffn=0-63"), shard(9, "layers=3,experts=3-7,ffn=10-40")];
    let mut stage = Stage::new(accept(1, &shards), |c| c.name = "experts-7".to_owned()).await;
    let hello = stage.hello().await;
    assert_eq!((hello.name.as_str(), hello.precision.as_str(), hello.addresses.len()), ("experts-7", "f32", 2));
    assert_eq!(hello.fingerprint, Checkpoint::open(stage.dir.path()).unwrap().fingerprint());
    let ready = stage.heartbeat(WorkerState::Ready, &[4, 9]).await;
    // (2 layers × 12 experts × 64 + 1 × 5 × 31) × 3 matrices × 128 × 2 bytes.
    assert_eq!((ready.loaded_bytes, ready.total_bytes), ((2 * 12 * 64 + 5 * 31) * 3 * 128 * 2, ready.loaded_bytes));
    for (shard, link) in [(&shards[0], LinkChoice::Tcp), (&shards[1], LinkChoice::Grpc)] {
        let (far, near) = stage.dispatch(&hello, shard, link).await;
        assert_eq!(far, near, "{shard}");
    }
    let worked = stage.hear(|m| if let FromWorker::Heartbeat(h) = m { (h.rows >= 6).then_some(h) } else { None }).await;
    assert!(worked.busy_seconds > 0.0);
    stage.say(ToWorker::Drain(Drain { reason: "test".to_owned(), timeout_ms: 10_000 }));
    stage.heartbeat(WorkerState::Draining, &[4, 9]).await;
    stage.goodbye().await;
    stage.end().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_signal_drains_too() {
    let shards = [shard(0, "layers=1-3,experts=0-11,ffn=0-63")];
    let mut stage = Stage::new(accept(1, &shards), |_| {}).await;
    stage.heartbeat(WorkerState::Ready, &[0]).await;
    stage.shutdown.start_drain();
    stage.goodbye().await;
    stage.end().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_coordinator_may_give_other_shards() {
    let (first, second) = (shard(0, "layers=1,experts=0-11,ffn=0-63"), shard(3, "layers=2-3,experts=0-11,ffn=0-63"));
    let mut stage = Stage::new(accept(1, &[first]), |_| {}).await;
    let hello = stage.hello().await;
    stage.heartbeat(WorkerState::Ready, &[0]).await;
    *stage.answer.lock() = accept(2, std::slice::from_ref(&second));
    // An error ends the stream, as the end of the coordinator's process does.
    let session = stage.session.lock().take().expect("a session");
    session.send(Err(Status::unavailable("restarted"))).expect("the session is open");
    let again = stage.hello().await;
    assert_eq!((again.epoch, &again.addresses), (hello.epoch, &hello.addresses), "the same process, at the same addresses");
    stage.heartbeat(WorkerState::Ready, &[3]).await;
    let (far, near) = stage.dispatch(&again, &second, LinkChoice::Auto).await;
    assert_eq!(far, near);
    stage.shutdown.start_drain();
    stage.end().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refusals_and_impossible_shards_end_it_with_words() {
    let refuse = Refuse { field: "precision".into(), needed: "bf16".into(), got: "f32".into(), hint: "--dtype".into() };
    let refused = Stage::new(ToWorker::Refuse(refuse), |_| {}).await.end().await.unwrap_err().to_string();
    assert!(refused.contains("refused this worker: precision is f32; needed bf16"), "{refused}");
    let outside = Stage::new(accept(1, &[shard(0, "layers=0,experts=0,ffn=0")]), |_| {}).await.end().await.unwrap_err().to_string();
    assert!(outside.contains("layer 0 has no routed experts; layers 1-3 have"), "{outside}");
    let device = Stage::new(accept(1, &[]), |c| c.device = "tpu".to_owned()).await.end().await.unwrap_err().to_string();
    assert_eq!(device, "device \"tpu\": needed cpu, cuda:N or reference");
    let model = Stage::new(accept(1, &[]), |c| c.model = "/nowhere".into()).await.end().await.unwrap_err().to_string();
    assert!(model.starts_with("/nowhere: "), "{model}");
}
