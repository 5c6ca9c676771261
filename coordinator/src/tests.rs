//! The kernel-free half as a whole: scheduler, journal, membership and both services, with scripted workers over real gRPC on loopback.

mod ends;
mod fakes;
mod members;
mod resume;
mod serve;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tandem_model::{Shard, ShardPlan};
use tandem_proto::attn::v1 as attn;
use tandem_proto::control::v1 as control;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use crate::cluster::Cluster;
use crate::core::{Clock, Core};
use crate::engine::{Engine, GenerateRequest, Generation, GenerationEvent};
use crate::instance::Instance;
use crate::membership::Terms;
use crate::services;
use crate::telemetry::Telemetry;

/// Longer than anything here takes on a busy machine; only a hang meets it.
const PATIENCE: Duration = Duration::from_secs(60);

/// What a rig is made with.
struct Setup {
    max_queue: usize,
    request_timeout: Duration,
    lease: Duration,
    expert_workers: u32,
}

impl Default for Setup {
    fn default() -> Self {
        Self { max_queue: 8, request_timeout: PATIENCE, lease: Duration::from_secs(5), expert_workers: 1 }
    }
}

/// A coordinator without HTTP and checkpoint.
struct Rig {
    instance: Arc<Instance>,
    cluster: Arc<Cluster>,
    engine: Engine,
    addr: SocketAddr,
    tasks: Vec<JoinHandle<()>>,
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

impl Rig {
    async fn start(setup: Setup) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
        let addr = listener.local_addr().expect("addr");
        let (core, mut departures) = Core::new(Clock::new(), setup.max_queue, setup.request_timeout, Telemetry::new(None));
        let instance = Arc::new(Instance::new(Arc::new(core), None));
        let shard = |id: u32| Shard { id, layers: std::iter::once(3 + id..4 + id).collect(), experts: 0..8, ffn: 0..16 };
        let count = setup.expert_workers;
        let plan = ShardPlan { shards: (0..count).map(shard).collect(), local: vec![], workers: (0..count).map(|id| vec![id]).collect() };
        let terms = Terms {
            coordinator_epoch: 7,
            fingerprint: "f00d".into(),
            precision: "f32".into(),
            plan,
            heartbeat: Duration::from_millis(50),
            lease: setup.lease,
        };
        let cluster = Arc::new(Cluster::new(Arc::clone(instance.core()), terms, attn::Vocabulary::default()));
        instance.open(Arc::clone(&cluster));
        let server = services::serve(listener, instance.cluster(), tandem_runtime::Shutdown::new());
        let (core, ticked) = (Arc::clone(instance.core()), Arc::clone(&instance));
        let tasks = vec![
            tokio::spawn(async move {
                let _ = server.await;
            }),
            tokio::spawn(async move {
                while let Some(departure) = departures.recv().await {
                    core.departed(departure);
                }
            }),
            tokio::spawn(async move {
                loop {
                    ticked.tick();
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            }),
        ];
        Self { engine: Engine::new(instance.clone()), instance, cluster, addr, tasks }
    }

    /// Waits for the workers and the warm-up.
    async fn ready(&self) {
        within("warm-up", self.instance.warm_up(&self.cluster, PATIENCE)).await.expect("tokens can be made");
        within("readiness", async {
            while !self.engine.readiness().ready {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
        .await;
    }

    fn submit(&self, request: GenerateRequest) -> Generation {
        self.engine.submit(vec![request]).expect("admitted").remove(0)
    }

    /// Waits until nothing is left in the scheduler.
    async fn idle(&self) {
        within("idle", async {
            while !self.instance.core().is_idle() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
        .await;
    }
}

async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future).await.unwrap_or_else(|_| panic!("{what}: nothing for {PATIENCE:?}"))
}

/// A request whose prompt says who it is, so that the scripted model gives each its own tokens.
fn request(who: u32, max_tokens: u32) -> GenerateRequest {
    GenerateRequest { prompt_ids: vec![who, 1, 2], max_tokens, request_id: format!("r{who}"), ..GenerateRequest::default() }
}

/// The tokens of a generation and its last event.
async fn collect(generation: &mut Generation) -> (Vec<u32>, GenerationEvent) {
    let mut tokens = Vec::new();
    loop {
        match within("an event", generation.next()).await.expect("an end event") {
            GenerationEvent::Tokens(new) => {
                for token in new {
                    assert_eq!(token.index as usize, tokens.len(), "no token twice, none lost");
                    tokens.push(token.id);
                }
            }
            event if event.is_end() => return (tokens, event),
            _ => {}
        }
    }
}

fn hello(name: &str, epoch: u64) -> control::Hello {
    let attn = name.starts_with("attn");
    control::Hello {
        protocol_version: crate::membership::PROTOCOL_VERSION,
        role: if attn { control::Role::Attn } else { control::Role::Experts }.into(),
        name: name.into(),
        epoch,
        fingerprint: "f00d".into(),
        precision: "f32".into(),
        limits: Some(control::Limits { max_batch: 3, max_seq_len: 1000, kv_tokens: 5000, max_rows: 64 }),
        addresses: vec![control::Address { link: "tcp".into(), addr: "127.0.0.1:1".into() }],
        ..control::Hello::default()
    }
}
