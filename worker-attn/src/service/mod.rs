//! The attention worker as a process: joins an instance, loads, steps, talks to the coordinator, drains.
//!
//! ```text
//! open checkpoint → join (Hello) → Accept.shards → load trunk and local shards → step thread → attach (attn.v1) → … → drain → leave
//! ```
//!
//! | file | idea |
//! |---|---|
//! | this file | life of the process |
//! | [`attach`] | the attn.v1 stream: requests in, events out, again after a loss |
//! | [`ledger`] | no request of a stream outlives its deadline |
//! | [`status`] | what heartbeats say |
//!
//! Neighbours: `engine/thread.rs` does the work; `tandem_proto::membership` keeps the coordinator informed.
//!
//! **Loss of the coordinator.** Events cannot be delivered without a stream, and the coordinator submits a request anew (prompt and the
//! tokens that it has) once a stream is there again. So the sequences of a stream end with it, at the latest when the lease ends.

pub mod attach;
pub mod ledger;
pub mod status;

use std::{sync::Arc, thread::JoinHandle, time::Duration};

use tandem_kernels::{
    Backend, Precision,
    cpu::{CpuBackend, CpuOptions},
    cuda::{self, CudaBackend},
    reference::ReferenceBackend,
};
use tandem_model::{Checkpoint, Shard};
use tandem_proto::{
    attn::v1::StepEvents,
    control::v1::{Hello, Limits, Role, WorkerState},
    hop::{HopOptions, HostHop, MAX_ROWS},
    membership::{MemberState, Membership, MembershipHandle},
    payload,
    route_table::ShardDesc,
};
use tandem_runtime::{Health, Latch, Shutdown, admin, metrics as recorder};
use tandem_worker_experts::identity;
use tokio::sync::{
    mpsc::{self, UnboundedReceiver},
    oneshot,
};

use self::status::Status;
use crate::{
    Config, Error, Model, Runner, RunnerLimits,
    engine::{
        Engine, Pace, Sink,
        thread::{self, Load, Mailbox},
    },
    guide::Guides,
    hop::{
        host::{HostRows, Shape},
        lent::LentRows,
    },
    memory,
    model::StepError,
    telemetry,
};

/// Version of control.v1, attn.v1 and experts.v1 taken together.
const PROTOCOL_VERSION: u32 = 1;
/// A worker that drains goes once it has been without a sequence for this long.
const IDLE: Duration = Duration::from_secs(1);

/// Runs an attention worker until it is told to stop.
///
/// # Errors
/// The checkpoint, the device or a limit does not fit, the coordinator refuses the worker, or the device fails for good.
pub async fn run(config: Config, shutdown: Shutdown) -> Result<(), Error> {
    let handle = recorder::install(telemetry::BUCKETS)?;
    telemetry::describe();
    let health = Health::new();
    let latch = health.latch("attention");
    latch.close("opening the checkpoint");
    if let Some(addr) = config.admin {
        admin::serve(addr, health.clone(), handle).await.map_err(|source| Error::Bind { what: "--admin", source })?;
    }
    let (dir, format) = (config.model.clone(), config.load_format);
    let checkpoint = blocking(move || Ok(Checkpoint::open_as(&dir, format)?)).await?.with_fp8(config.fp8);
    for warning in checkpoint.warnings() {
        tracing::warn!(model = %checkpoint.dir().display(), "{warning}");
    }
    if !config.fp8.is_empty() {
        tracing::info!(groups = %config.fp8, "narrowing float weights to FP8 as they are loaded");
    }
    let limits = config.limits(checkpoint.geometry())?;
    let checkpoint = Arc::new(checkpoint);
    if config.kv_cache.is_some() && config.device != "cpu" {
        return Err(Error::CacheType { device: config.device });
    }
    match config.device.as_str() {
        "cpu" => {
            let (threads, cpus) = (config.threads, config.cpus.clone());
            let options = CpuOptions { threads, cpus, latents: config.kv_cache, ..CpuOptions::new(config.precision) };
            let backend = Arc::new(CpuBackend::new(options)?);
            Worker::new(config, limits, checkpoint, backend, latch).run(shutdown).await
        }
        "reference" => {
            let backend = Arc::new(ReferenceBackend::<f32>::new(config.precision));
            Worker::new(config, limits, checkpoint, backend, latch).run(shutdown).await
        }
        other => match cuda::ordinal(other) {
            Some(ordinal) => {
                latch.close("opening the GPU and checking its kernels");
                let precision = config.precision;
                let backend = blocking(move || Ok(CudaBackend::checked(ordinal, precision)?)).await?;
                Worker::new(config, limits, checkpoint, Arc::new(backend), latch).run(shutdown).await
            }
            None => Err(Error::Device { got: other.to_owned() }),
        },
    }
}

/// Runs blocking work (disk, device) off the runtime's threads.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T, Error> + Send + 'static) -> Result<T, Error> {
    tokio::task::spawn_blocking(work).await.map_err(|e| Error::Thread(format!("loading failed: {e}")))?
}

struct Worker<B: Backend> {
    config: Config,
    limits: RunnerLimits,
    checkpoint: Arc<Checkpoint>,
    backend: Arc<B>,
    latch: Latch,
    status: Arc<Status>,
    load: Arc<Load>,
    epoch: u64,
    host: String,
}

/// The step thread as the service sees it.
struct Steps {
    mailbox: Mailbox,
    events: UnboundedReceiver<StepEvents>,
    thread: JoinHandle<Result<(), StepError>>,
    guides: Guides,
}

impl<B: Backend> Worker<B> {
    fn new(config: Config, limits: RunnerLimits, checkpoint: Arc<Checkpoint>, backend: Arc<B>, latch: Latch) -> Self {
        let load = Arc::new(Load::default());
        let status = Arc::new(Status::new(Arc::clone(&load)));
        Self { config, limits, checkpoint, backend, latch, status, load, epoch: identity::new_epoch(), host: identity::host() }
    }

    async fn run(self, shutdown: Shutdown) -> Result<(), Error> {
        self.latch.close(format!("joining the coordinator at {}", self.config.coordinator));
        tracing::info!(name = self.config.name, coordinator = self.config.coordinator, "joining");
        let (status, stop) = (Arc::clone(&self.status), shutdown.clone());
        let heartbeat = move || status.heartbeat();
        let member =
            Membership::join(self.config.coordinator.clone(), self.hello(), heartbeat, async move { stop.stopping().await }).await?;
        let local: Vec<Shard> = member.accept.shards.iter().map(|s| shard(ShardDesc::from_wire(s))).collect();
        for shard in &local {
            tandem_model::plan::validate_inside(self.checkpoint.geometry(), shard)?;
        }
        let (rows, most) = (self.limits.max_rows, MAX_ROWS as usize);
        if rows > most && tandem_model::plan::validate_cover(self.checkpoint.geometry(), &local).is_err() {
            let needed = format!("at most {most}, which is what expert workers take of a step");
            return Err(Error::Limit { flag: "--max-num-batched-tokens", needed, got: rows });
        }
        let model = tokio::select! {
            model = self.load_model(local.clone()) => model?,
            () = shutdown.stopping() => return Ok(()),
        };
        let steps = self.start(model, &member, &local)?;
        self.latch.close("waiting for the route table");
        let mut routes = member.routes.clone();
        tokio::select! {
            // A membership that ended explains itself below.
            _ = routes.wait_for(|table| table.version > 0) => {}
            () = shutdown.stopping() => return Ok(()),
        }
        self.status.set(WorkerState::Ready, "ready");
        self.latch.open();
        tracing::info!("ready");
        self.serve(member, steps, &local, &shutdown).await
    }

    fn hello(&self) -> Hello {
        let device = self.backend.device();
        let limits = Limits {
            max_batch: self.limits.max_batch as u32,
            max_seq_len: self.limits.max_seq_len as u32,
            kv_tokens: self.limits.kv_tokens as u64,
            max_rows: self.limits.max_rows as u32,
        };
        Hello {
            protocol_version: PROTOCOL_VERSION,
            role: Role::Attn.into(),
            name: self.config.name.clone(),
            epoch: self.epoch,
            fingerprint: self.checkpoint.fingerprint().to_owned(),
            precision: self.config.precision.to_string(),
            arithmetic: device.arithmetic.clone(),
            device: device.description.clone(),
            host: self.host.clone(),
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            limits: Some(limits),
            ..Hello::default()
        }
    }

    async fn load_model(&self, local: Vec<Shard>) -> Result<Model<B>, Error> {
        let threads = self.config.threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get));
        let (g, limits, latents) = (self.checkpoint.geometry(), self.limits, self.config.latents());
        let host = memory::prefixes(g, limits, latents, self.config.prefix_cache).saturating_add(memory::parked(
            g,
            limits,
            latents,
            self.config.parking,
        ));
        let kind = tandem_worker_experts::memory::kind_of(&self.config.device);
        let needs = memory::needs(&self.checkpoint, limits, latents, &local, threads, kind, host);
        tandem_worker_experts::memory::check(&self.config.name, &self.config.device, needs, self.config.allow_paging)?;
        self.latch.close("loading weights");
        let (backend, checkpoint, status) = (Arc::clone(&self.backend), Arc::clone(&self.checkpoint), Arc::clone(&self.status));
        let shown = self.latch.progress();
        blocking(move || {
            let mut progress = |phase: &'static str, done, all| {
                status.loading(phase, done, all);
                shown.set(done, all);
            };
            Ok(Model::load(backend, &checkpoint, &local, &mut progress)?)
        })
        .await
    }

    /// Starts the step thread.
    fn start(&self, model: Model<B>, member: &MembershipHandle, local: &[Shard]) -> Result<Steps, Error> {
        let d = model.dims();
        let shape = Shape { layers: d.layers, hidden: d.hidden, topk: d.router.topk };
        let precision = match self.config.precision {
            Precision::F32 => payload::Precision::F32,
            Precision::Bf16 => payload::Precision::Bf16,
        };
        let mut options =
            HopOptions::new(self.config.name.as_str(), self.epoch, self.checkpoint.fingerprint(), precision, shape.hidden, shape.topk);
        options.host.clone_from(&self.host);
        options.link = self.config.link;
        options.spin = self.config.spin;
        options.max_rows = self.limits.max_rows as u32;
        options.allow_mixed_experts = self.config.allow_mixed_experts;
        let lent = if self.config.shares_rows() { LentRows::new(model.backend(), shape.hidden, self.limits.max_rows) } else { None };
        let (lent, lender) = lent.unzip();
        options.lender = lender;
        let hop = HostHop::new(options, member.routes.clone())?;
        let ids: Vec<u32> = local.iter().map(|s| s.id).collect();
        let (mailbox, inbox, cancelled) = thread::mailbox();
        let hop = HostRows::new(hop, member.routes.clone(), shape, &ids, cancelled).with_lent(lent);
        let (sender, events) = mpsc::unbounded_channel();
        // A receiver that is gone means that the process ends.
        let sink: Sink = Arc::new(move |events| drop(sender.send(events)));
        let (limits, pace) = (self.limits, self.pace());
        let guides = Guides::default();
        let held = guides.clone();
        let make = move || {
            model.backend().bind_thread();
            Ok(Engine::new(Runner::new(Arc::new(model), hop, limits)?, pace, sink).guided(held))
        };
        let thread =
            thread::spawn(inbox, Arc::clone(&self.load), make).map_err(|e| Error::Thread(format!("the step thread cannot start: {e}")))?;
        Ok(Steps { mailbox, events, thread, guides })
    }

    fn pace(&self) -> Pace {
        Pace {
            prefill_chunk: self.config.prefill_chunk.unwrap_or(self.limits.max_rows),
            cache: self.config.prefix_cache,
            parking: self.config.parking,
        }
    }

    /// Serves until the worker is told to go, or cannot go on.
    async fn serve(self, mut member: MembershipHandle, steps: Steps, local: &[Shard], shutdown: &Shutdown) -> Result<(), Error> {
        let Steps { mailbox, events, thread, guides } = steps;
        let stream = attach::Attachment {
            coordinator: self.config.coordinator.clone(),
            name: self.config.name.clone(),
            epoch: self.epoch,
            request_timeout: self.config.request_timeout,
            mailbox: mailbox.clone(),
            guides,
        };
        let stream = tokio::spawn(stream.run(events));
        let outcome = tokio::select! {
            ended = ended(thread) => Err(ended),
            outcome = self.follow(&mut member, &mailbox, local, shutdown) => outcome,
        };
        self.latch.close("ended");
        mailbox.stop();
        stream.abort();
        if outcome.is_ok() {
            member.leave("draining").await;
            tracing::info!("left");
        }
        outcome
    }

    /// Follows the membership until it is time to go.
    async fn follow(&self, member: &mut MembershipHandle, mailbox: &Mailbox, local: &[Shard], shutdown: &Shutdown) -> Result<(), Error> {
        loop {
            tokio::select! {
                () = shutdown.stopping() => return Ok(()),
                () = shutdown.draining() => return self.drain(shutdown, self.config.drain_timeout, true).await,
                Ok(()) = member.drain.changed() => {
                    let drain = member.drain.borrow_and_update().clone();
                    if let Some(drain) = drain {
                        tracing::info!(reason = drain.reason, "the coordinator asks to drain");
                        return self.drain(shutdown, Duration::from_millis(drain.timeout_ms), false).await;
                    }
                }
                Ok(()) = member.accepted.changed() => {
                    let now: Vec<Shard> = member.accepted.borrow_and_update().shards.iter().map(|s| shard(ShardDesc::from_wire(s))).collect();
                    if now != local {
                        return Err(Error::LocalShards { loaded: text(local), now: text(&now) });
                    }
                }
                Ok(()) = member.state.changed() => {
                    let state = member.state.borrow_and_update().clone();
                    match state {
                        MemberState::Joined { coordinator_epoch } => tracing::info!(coordinator_epoch, "joined"),
                        MemberState::Lost { reason, expired } => {
                            tracing::warn!(reason, expired, "lost the coordinator");
                            if expired {
                                mailbox.clear();
                            }
                        }
                        MemberState::Refused(error) => return Err(error.into()),
                        MemberState::Left => return Ok(()),
                    }
                }
                // All watches are closed: the membership ended for good, which its state explains.
                else => return match &*member.state.borrow() {
                    MemberState::Refused(error) => Err(error.clone().into()),
                    _ => Ok(()),
                },
            }
        }
    }

    /// Waits until no sequence is left. On the worker's own account (`alone`) it says that it takes no new ones; when the whole instance
    /// drains, requests that the coordinator still has in its queue are served.
    async fn drain(&self, shutdown: &Shutdown, timeout: Duration, alone: bool) -> Result<(), Error> {
        if alone {
            self.status.set(WorkerState::Draining, "draining");
        }
        self.latch.close("draining");
        let idle = async {
            let mut quiet = Duration::ZERO;
            const LOOK: Duration = Duration::from_millis(50);
            while quiet < IDLE {
                tokio::time::sleep(LOOK).await;
                quiet = if self.load.sequences() == (0, 0) { quiet + LOOK } else { Duration::ZERO };
            }
        };
        tokio::select! {
            () = idle => {}
            () = tokio::time::sleep(timeout) => tracing::warn!(?timeout, "sequences still run at the end of the drain time"),
            () = shutdown.stopping() => {}
        }
        Ok(())
    }
}

/// Resolves when the step thread ends, with the reason. A thread waits for it: tasks that block would hold up the end of the process.
async fn ended(thread: JoinHandle<Result<(), StepError>>) -> Error {
    let (sender, receiver) = oneshot::channel();
    let watch = std::thread::Builder::new().name("step-watch".into()).spawn(move || drop(sender.send(thread.join())));
    match (watch, receiver.await) {
        (Ok(_), Ok(Ok(Err(e)))) => e.into(),
        (Ok(_), Ok(Ok(Ok(())))) => Error::Thread("the step thread ended without being told to".to_owned()),
        (Ok(_), _) => Error::Thread("the step thread panicked: its message is in the log above".to_owned()),
        (Err(e), _) => Error::Thread(format!("the step thread cannot be watched: {e}")),
    }
}

fn shard(desc: ShardDesc) -> Shard {
    Shard { id: desc.id, layers: desc.layers, experts: desc.experts, ffn: desc.ffn }
}

fn text(shards: &[Shard]) -> String {
    if shards.is_empty() { "none".to_owned() } else { shards.iter().map(ToString::to_string).collect::<Vec<_>>().join(" and ") }
}
