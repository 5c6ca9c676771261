//! The expert worker as a process: joins an instance, loads the shards that it is given, serves them, drains.
//!
//! ```text
//! bind links → join (Hello with addresses) → Accept.shards → load → serve → … → another Accept: load again → drain → leave
//! ```
//! Sockets are bound before the worker joins, because its Hello carries their addresses; they are served once the weights are there. The
//! loss of the coordinator ends nothing: experts are stateless, and attention workers go on with the route table that they have.
//!
//! Neighbours: `batcher.rs` computes behind the server, `tandem_proto::membership` keeps the coordinator informed.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use parking_lot::Mutex;
use tandem_kernels::{
    Backend, DeviceKind, Precision,
    cpu::{CpuBackend, CpuOptions},
    cuda::{self, CudaBackend},
    reference::ReferenceBackend,
};
use tandem_model::{Checkpoint, Shard};
use tandem_proto::{
    control::v1::{self as wire, Accept, Hello, Role},
    hop::{ExpertListener, ExpertServer, ServerOptions, SharedMemory},
    membership::{MemberState, Membership, MembershipHandle},
    payload,
    route_table::ShardDesc,
};
use tandem_runtime::{Health, Latch, Shutdown, admin, metrics as recorder};

use crate::{Config, Error, Lending, LoadProgress, ShardEngine, batcher::Batcher, identity, memory, status::Status, telemetry};

/// Version of control.v1, attn.v1 and experts.v1 taken together.
const PROTOCOL_VERSION: u32 = 1;
/// Rows computed together at most; longer dispatches go through in parts. More rows would only cost buffers: at this many, every expert has
/// work enough that reading its weights does not count.
const BATCH_ROWS: usize = 2048;
/// The same on a GPU, whose tiles of an expert's rows are the fuller the more come together.
const GPU_BATCH_ROWS: usize = 8192;

/// Rows that a worker on a kind of device computes together at most.
pub fn batch_rows(kind: DeviceKind) -> usize {
    if kind == DeviceKind::Cuda { GPU_BATCH_ROWS } else { BATCH_ROWS }
}
/// A worker that drains goes once no row came for this long.
const IDLE: Duration = Duration::from_millis(500);
/// How often the server's thread is looked at.
const WATCH: Duration = Duration::from_secs(1);

/// Runs an expert worker until it is told to stop.
///
/// # Errors
/// The checkpoint, the device or a shard does not fit, a port is taken, or the coordinator refuses the worker.
pub async fn run(config: Config, shutdown: Shutdown) -> Result<(), Error> {
    let handle = recorder::install(telemetry::BUCKETS)?;
    telemetry::describe();
    let health = Health::new();
    let latch = health.latch("experts");
    latch.close("opening the checkpoint");
    if let Some(addr) = config.admin {
        admin::serve(addr, health.clone(), handle).await.map_err(|source| Error::Bind { what: "admin", source })?;
    }
    let (dir, format) = (config.model.clone(), config.load_format);
    let checkpoint = blocking(move || Ok(Checkpoint::open_as(&dir, format)?)).await?;
    for warning in checkpoint.warnings() {
        tracing::warn!(model = %checkpoint.dir().display(), "{warning}");
    }
    let checkpoint = Arc::new(checkpoint);
    match config.device.as_str() {
        "cpu" => {
            let (threads, cpus) = (config.threads, config.cpus.clone());
            let options = CpuOptions { threads, cpus, ..CpuOptions::new(config.precision) };
            let backend = Arc::new(CpuBackend::new(options)?);
            Worker::new(config, checkpoint, backend, latch).run(shutdown).await
        }
        "reference" => {
            let backend = Arc::new(ReferenceBackend::<f32>::new(config.precision));
            Worker::new(config, checkpoint, backend, latch).run(shutdown).await
        }
        other => match cuda::ordinal(other) {
            Some(ordinal) => {
                latch.close("opening the GPU and checking its kernels");
                let precision = config.precision;
                let backend = blocking(move || Ok(CudaBackend::checked(ordinal, precision)?)).await?;
                Worker::new(config, checkpoint, Arc::new(backend), latch).run(shutdown).await
            }
            None => Err(Error::Device { got: other.to_owned() }),
        },
    }
}

/// Runs blocking work (disk, device) off the runtime's threads.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T, Error> + Send + 'static) -> Result<T, Error> {
    tokio::task::spawn_blocking(work).await.map_err(|e| Error::Task(e.to_string()))?
}

struct Worker<B: Backend> {
    config: Config,
    checkpoint: Arc<Checkpoint>,
    backend: Arc<B>,
    latch: Latch,
    status: Arc<Mutex<Status>>,
    epoch: u64,
    host: String,
}

/// Why a served set of shards comes to its end.
enum Next {
    /// The coordinator gave other shards.
    Other(Accept),
    /// The worker is to stop, after dispatches that still come within this time.
    Drain(Duration),
}

impl<B: Backend> Worker<B> {
    fn new(config: Config, checkpoint: Arc<Checkpoint>, backend: Arc<B>, latch: Latch) -> Self {
        let (epoch, host) = (identity::new_epoch(), identity::host());
        Self { config, checkpoint, backend, latch, status: Arc::default(), epoch, host }
    }

    async fn run(self, shutdown: Shutdown) -> Result<(), Error> {
        let at = |port: Option<u16>| port.map(|port| SocketAddr::new(self.config.listen, port));
        let mut listener = self.bind(at(self.config.tcp_port), at(self.config.grpc_port))?;
        let bound: Vec<_> = listener.addresses().to_vec();
        let hello = self.hello(&listener);
        self.latch.close(format!("joining the coordinator at {}", self.config.coordinator));
        tracing::info!(name = self.config.name, coordinator = self.config.coordinator, addresses = ?bound, "joining");
        let status = Arc::clone(&self.status);
        let stop = shutdown.clone();
        let heartbeat = move || status.lock().heartbeat();
        let mut member = Membership::join(self.config.coordinator.clone(), hello, heartbeat, async move { stop.stopping().await }).await?;
        let mut accept = member.accepted.borrow_and_update().clone();
        loop {
            let shards = self.shards(&accept)?;
            let server = match self.load_and_serve(listener, shards, &shutdown).await? {
                Some(server) => server,
                None => return self.leave(member).await,
            };
            match self.serve(&server, &mut member, &accept, &shutdown).await? {
                Next::Other(other) => {
                    tracing::info!("the coordinator gave other shards: loading them");
                    self.retire(server).await?;
                    accept = other;
                    let port =
                        |kind: &str| bound.iter().find(|a| a.link.to_string() == kind).and_then(|a| a.addr.parse::<SocketAddr>().ok());
                    listener = self.bind(port("tcp"), port("grpc"))?;
                }
                Next::Drain(timeout) => {
                    self.drain(&shutdown, timeout).await;
                    self.retire(server).await?;
                    return self.leave(member).await;
                }
            }
        }
    }

    fn bind(&self, tcp: Option<SocketAddr>, grpc: Option<SocketAddr>) -> Result<ExpertListener, Error> {
        ExpertListener::bind(tcp, grpc).map_err(|source| Error::Bind { what: "expert links", source })
    }

    fn hello(&self, listener: &ExpertListener) -> Hello {
        let outward = self.config.listen.is_unspecified().then(|| identity::address_towards(&self.config.coordinator)).flatten();
        let host = self.config.advertise.clone().or_else(|| outward.map(|ip| ip.to_string()));
        let device = self.backend.device();
        Hello {
            protocol_version: PROTOCOL_VERSION,
            role: Role::Experts.into(),
            name: self.config.name.clone(),
            epoch: self.epoch,
            fingerprint: self.checkpoint.fingerprint().to_owned(),
            precision: self.config.precision.to_string(),
            arithmetic: device.arithmetic.clone(),
            device: device.description.clone(),
            host: self.host.clone(),
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            limits: Some(wire::Limits { max_rows: self.config.max_rows, ..wire::Limits::default() }),
            local_shards: Vec::new(),
            requested_shards: self.config.shard.iter().map(|s| desc(s).to_wire()).collect(),
            addresses: listener
                .addresses()
                .iter()
                .map(|a| wire::Address { link: a.link.to_string(), addr: identity::dialled(&a.addr, host.as_deref()) })
                .collect(),
        }
    }

    /// What to hold, checked against the model.
    fn shards(&self, accept: &Accept) -> Result<Vec<Shard>, Error> {
        let shards: Vec<Shard> = accept.shards.iter().map(|s| shard(ShardDesc::from_wire(s))).collect();
        for shard in &shards {
            tandem_model::plan::validate_inside(self.checkpoint.geometry(), shard)?;
        }
        Ok(shards)
    }

    /// Loads and starts to serve; `None` where the process is told to stop meanwhile.
    async fn load_and_serve(
        &self,
        listener: ExpertListener,
        shards: Vec<Shard>,
        shutdown: &Shutdown,
    ) -> Result<Option<ExpertServer>, Error> {
        let (checkpoint, backend) = (Arc::clone(&self.checkpoint), Arc::clone(&self.backend));
        let total = shards.iter().map(|s| checkpoint.shard_bytes(s)).sum();
        let max_rows = (self.config.max_rows as usize).min(batch_rows(memory::kind_of(&self.config.device)));
        let needs = memory::needs(&checkpoint, &shards, max_rows, &self.config.device);
        memory::check(&self.config.name, &self.config.device, needs, self.config.allow_paging)?;
        self.status.lock().load(total);
        self.latch.close(format!("loading {:.2} GiB of experts", total as f64 / f64::from(1 << 30)));
        let shown = self.latch.progress();
        let status = Arc::clone(&self.status);
        let fault = self.config.fault.clone().filter(|f| f.worker.as_ref().is_none_or(|w| *w == self.config.name));
        let ids: Vec<u32> = shards.iter().map(|s| s.id).collect();
        let hidden = self.checkpoint.geometry().hidden;
        let lending = Arc::new(Lending::new(Arc::clone(&self.backend), hidden, max_rows));
        let memory: Option<Arc<dyn SharedMemory>> = Some(Arc::clone(&lending) as _);
        let loading = blocking(move || {
            let mut engines = Vec::with_capacity(shards.len());
            for shard in &shards {
                tracing::info!(id = shard.id, %shard, gib = checkpoint.shard_bytes(shard) as f64 / f64::from(1 << 30), "loading shard");
                let before = status.lock().progress.loaded_bytes;
                let progress = |p: LoadProgress| {
                    status.lock().progress.loaded_bytes = before + p.loaded_bytes;
                    shown.set(before + p.loaded_bytes, total);
                };
                engines.push(ShardEngine::load(&backend, &checkpoint, shard, progress)?);
            }
            let g = checkpoint.geometry();
            Batcher::new(&backend, engines, g.hidden, g.topk, max_rows, lending, fault)
        });
        let batcher = tokio::select! {
            batcher = loading => batcher?,
            () = shutdown.draining() => return Ok(None),
        };
        let options = ServerOptions {
            name: self.config.name.clone(),
            epoch: self.epoch,
            host: self.host.clone(),
            fingerprint: self.checkpoint.fingerprint().to_owned(),
            arithmetic: self.backend.device().arithmetic.clone(),
            precision: match self.config.precision {
                Precision::F32 => payload::Precision::F32,
                Precision::Bf16 => payload::Precision::Bf16,
            },
            hidden: self.checkpoint.geometry().hidden,
            topk: self.checkpoint.geometry().topk,
            shards: ids.clone(),
            max_rows: self.config.max_rows,
            spin: self.config.spin,
            memory,
        };
        let server = listener.serve(options, Box::new(batcher)).map_err(|source| Error::Bind { what: "expert server", source })?;
        tracing::info!(shards = ?ids, "experts ready");
        if ids.is_empty() {
            self.latch.close("no shard given: standing by");
        } else {
            self.latch.open();
        }
        self.status.lock().ready(ids, server.stats());
        Ok(Some(server))
    }

    /// Waits while the server works.
    async fn serve(
        &self,
        server: &ExpertServer,
        member: &mut MembershipHandle,
        accept: &Accept,
        shutdown: &Shutdown,
    ) -> Result<Next, Error> {
        let mut watch = tokio::time::interval(WATCH);
        loop {
            tokio::select! {
                _ = watch.tick() => {
                    // Its thread only ends by itself when its sockets fail; stopping it then tells why.
                    if !server.is_running() {
                        return Ok(Next::Drain(Duration::ZERO));
                    }
                }
                () = shutdown.draining() => return Ok(Next::Drain(self.config.drain_timeout)),
                changed = member.accepted.changed() => {
                    let other = member.accepted.borrow_and_update().clone();
                    if changed.is_ok() && other.shards != accept.shards {
                        return Ok(Next::Other(other));
                    }
                    if changed.is_err() {
                        // The membership task ended: it only does so when it stops for good, which its state explains.
                        return self.ended(member);
                    }
                }
                changed = member.drain.changed() => {
                    let drain = member.drain.borrow_and_update().clone();
                    if let Some(drain) = drain {
                        tracing::info!(reason = drain.reason, "the coordinator asks to drain");
                        shutdown.start_drain();
                        return Ok(Next::Drain(Duration::from_millis(drain.timeout_ms)));
                    }
                    if changed.is_err() {
                        return self.ended(member);
                    }
                }
                changed = member.state.changed() => {
                    let state = member.state.borrow_and_update().clone();
                    match state {
                        MemberState::Refused(error) => return Err(error.into()),
                        MemberState::Lost { reason, expired } => tracing::warn!(reason, expired, "lost the coordinator; serving goes on"),
                        MemberState::Joined { coordinator_epoch } => tracing::info!(coordinator_epoch, "joined"),
                        MemberState::Left => return Ok(Next::Drain(Duration::ZERO)),
                    }
                    if changed.is_err() {
                        return self.ended(member);
                    }
                }
            }
        }
    }

    fn ended(&self, member: &MembershipHandle) -> Result<Next, Error> {
        match &*member.state.borrow() {
            MemberState::Refused(error) => Err(error.clone().into()),
            _ => Ok(Next::Drain(Duration::ZERO)),
        }
    }

    /// Says so, and goes on serving while rows still come: sequences in flight end before their experts do.
    async fn drain(&self, shutdown: &Shutdown, timeout: Duration) {
        self.status.lock().drain();
        self.latch.close("draining");
        if timeout.is_zero() {
            return;
        }
        let rows = || self.status.lock().rows();
        let idle = async {
            let mut seen = rows();
            loop {
                tokio::time::sleep(IDLE).await;
                let now = rows();
                if now == seen {
                    return;
                }
                seen = now;
            }
        };
        tokio::select! {
            () = idle => {}
            () = tokio::time::sleep(timeout) => tracing::warn!(?timeout, "rows still come at the end of the drain time"),
            () = shutdown.stopping() => {}
        }
    }

    /// Stops a server after its running batch.
    async fn retire(&self, server: ExpertServer) -> Result<(), Error> {
        blocking(move || server.stop().map_err(|source| Error::Bind { what: "expert server", source })).await?;
        self.status.lock().retire();
        Ok(())
    }

    async fn leave(&self, member: MembershipHandle) -> Result<(), Error> {
        member.leave("draining").await;
        tracing::info!("left");
        Ok(())
    }
}

fn desc(shard: &Shard) -> ShardDesc {
    ShardDesc { id: shard.id, layers: shard.layers.clone(), experts: shard.experts.clone(), ffn: shard.ffn.clone() }
}

fn shard(desc: ShardDesc) -> Shard {
    Shard { id: desc.id, layers: desc.layers, experts: desc.experts, ffn: desc.ffn }
}
