//! One coordinator from start to exit: bind, announce, open the checkpoint, let workers in, warm up, serve, drain.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tandem_model::{Checkpoint, ShardPlan};
use tandem_runtime::{Health, Shutdown, process};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::api::{self, ApiParts};
use crate::cluster::Cluster;
use crate::config::Config;
use crate::core::{Clock, Core};
use crate::engine::Engine;
use crate::instance::Instance;
use crate::loading;
use crate::membership::Terms;
use crate::telemetry::{self, Telemetry};
use crate::{parts, services};

mod bind;
mod error;

use bind::{bind, local_addr, resolve};
pub use error::Error;

/// How often leases and deadlines are looked at.
const TICK: Duration = Duration::from_millis(50);
/// How long the tick may stand still before `/livez` says so.
const TICK_LIMIT: Duration = Duration::from_secs(10);
/// How long workers may take to take note of a Drain, and HTTP answers to be written out, after the last request has ended.
const FAREWELL: Duration = Duration::from_secs(2);

/// Runs a coordinator until `shutdown` ends it. Prints `CONTROL http://…` as soon as workers can dial in, and `READY http://…` once a
/// token has passed through all of them.
///
/// # Errors
/// [`Error`]; a drain that ends in time or is cut short is none.
pub async fn run(config: Config, shutdown: Shutdown) -> Result<(), Error> {
    Coordinator::bind(config).await?.run(shutdown).await
}

/// A coordinator that has its ports and does nothing with them yet.
pub struct Coordinator {
    config: Config,
    control: TcpListener,
    control_addr: SocketAddr,
    http: TcpListener,
    http_addr: SocketAddr,
}

impl Coordinator {
    /// Checks the settings and takes both ports.
    ///
    /// # Errors
    /// [`Error::Config`] or [`Error::Bind`].
    pub async fn bind(config: Config) -> Result<Self, Error> {
        config.validate().map_err(Error::Config)?;
        let control = bind("--control-addr", config.control_addr).await?;
        let http = bind("--host and --port", resolve(&config.host, config.port).await?).await?;
        let control_addr = local_addr("--control-addr", &control)?;
        let http_addr = local_addr("--port", &http)?;
        Ok(Self { config, control, control_addr, http, http_addr })
    }

    /// Where workers dial in.
    pub fn control_addr(&self) -> SocketAddr {
        self.control_addr
    }

    /// Where the HTTP API is.
    pub fn http_addr(&self) -> SocketAddr {
        self.http_addr
    }

    /// As [`run()`].
    ///
    /// # Errors
    /// [`Error`]; a drain that ends in time or is cut short is none.
    pub async fn run(self, shutdown: Shutdown) -> Result<(), Error> {
        let Self { config, control, control_addr, http, http_addr } = self;
        tandem_runtime::metrics::install(telemetry::buckets())?;
        telemetry::describe(config.metrics_compat_vllm);
        process::announce(&format!("CONTROL http://{control_addr}"));

        let name = served_name(&config);
        let telemetry = Telemetry::new(config.metrics_compat_vllm.then_some(name.as_str()));
        let (core, mut departures) = Core::new(Clock::new(), config.max_queue, config.request_timeout, telemetry);
        let instance = Arc::new(Instance::new(Arc::new(core), Some(control_addr)));
        let health = Health::new();
        let (routes, http_routes) = watch::channel(None);
        let (stop_http, http_stop) = watch::channel(false);

        let mut background = Background::default();
        background.spawn({
            let instance = Arc::clone(&instance);
            let pulse = health.pulse("coordinator tick", TICK_LIMIT);
            async move {
                let mut ticks = tokio::time::interval(TICK);
                loop {
                    ticks.tick().await;
                    instance.tick();
                    pulse.beat();
                }
            }
        });
        background.spawn({
            let core = Arc::clone(instance.core());
            async move {
                while let Some(departure) = departures.recv().await {
                    core.departed(departure);
                }
            }
        });
        let mut control_server = tokio::spawn(services::serve(control, instance.cluster(), shutdown.clone()));
        let mut http_server = {
            let engine = Engine::new(instance.clone());
            let mut stop = http_stop;
            tokio::spawn(api::serve(http, loading::router(http_routes, engine), async move {
                let _ = stop.wait_for(|stop| *stop).await;
            }))
        };

        let serving = async {
            let (cluster, parts) = open(&config, &name, &instance, &health).await?;
            routes.send_replace(Some(api::router(parts)));
            instance.open(Arc::clone(&cluster));
            instance.warm_up(&cluster, config.request_timeout).await.map_err(|error| Error::WarmUp(error.message))?;
            process::announce(&format!("READY http://{http_addr}"));
            tracing::info!(%http_addr, %control_addr, model = name, "ready");
            std::future::pending::<Result<(), Error>>().await
        };
        let result = tokio::select! {
            result = serving => result,
            ended = &mut control_server => Err(Error::Server { server: "control", why: reason(ended) }),
            ended = &mut http_server => Err(Error::Server { server: "HTTP", why: reason(ended) }),
            () = shutdown.draining() => Ok(()),
        };
        if result.is_ok() {
            tokio::select! {
                () = drain(&instance, config.shutdown_timeout, &stop_http, &mut http_server) => {}
                () = shutdown.stopping() => tracing::warn!("stopping at once"),
            }
        }
        control_server.abort();
        http_server.abort();
        result
    }
}

/// Opens the checkpoint, makes the plan and loads the text side, off the async threads.
async fn open(config: &Config, name: &str, instance: &Arc<Instance>, health: &Health) -> Result<(Arc<Cluster>, ApiParts), Error> {
    let opened = {
        let (config, name) = (config.clone(), name.to_owned());
        tokio::task::spawn_blocking(move || -> Result<_, Error> {
            let checkpoint = Checkpoint::open_as(&config.model, config.load_format)?;
            for warning in checkpoint.warnings() {
                tracing::warn!("{warning}");
            }
            let inputs = &config.plan;
            let plan = ShardPlan::with_block(
                checkpoint.geometry(),
                inputs.split,
                inputs.expert_workers,
                &inputs.resident,
                checkpoint.ffn_block(),
            )?;
            let model = parts::model(&checkpoint, &name)?;
            Ok((checkpoint.fingerprint().to_owned(), plan, model))
        })
        .await
    };
    let (fingerprint, plan, model) = opened.map_err(|error| Error::Config(format!("opening the checkpoint failed: {error}")))??;
    for shard in &plan.shards {
        tracing::info!(id = shard.id, %shard, local = plan.local.contains(&shard.id), "shard");
    }
    let terms = Terms {
        coordinator_epoch: epoch(),
        fingerprint,
        precision: config.precision.clone(),
        plan,
        heartbeat: config.heartbeat,
        lease: config.lease,
    };
    let vocabulary = services::attn::vocabulary_to_wire(model.tokenizer.table(model.vocab, &model.eos_ids));
    let cluster = Arc::new(Cluster::new(Arc::clone(instance.core()), terms, vocabulary));
    let parts = parts::api(config, Engine::new(instance.clone()), model, health.clone()).map_err(Error::Config)?;
    Ok((cluster, parts))
}

/// Stops admitting, lets running requests finish, lets their answers be written, tells the workers.
async fn drain(instance: &Arc<Instance>, timeout: Duration, stop_http: &watch::Sender<bool>, http_server: &mut JoinHandle<io::Result<()>>) {
    let deadline = Instant::now() + timeout;
    instance.drain();
    tracing::info!(?timeout, waiting = instance.core().counts().waiting, running = instance.core().counts().running, "draining");
    while !instance.core().is_idle() && Instant::now() < deadline {
        tokio::time::sleep(TICK).await;
    }
    if !instance.core().is_idle() {
        instance.core().abort_all(&format!("the server shut down before the request ended (shutdown timeout {timeout:?})"));
    }
    let _ = stop_http.send(true);
    let cluster = instance.cluster().borrow().clone();
    if let Some(cluster) = &cluster {
        cluster.drain("the coordinator shuts down", deadline.saturating_duration_since(Instant::now()));
    }
    let workers_gone = async {
        while cluster.as_ref().is_some_and(|cluster| !cluster.is_empty()) {
            tokio::time::sleep(TICK).await;
        }
    };
    // A client that reads slowly, or a worker that does not answer, does not hold up the exit for long.
    let farewell = tokio::time::timeout(FAREWELL, async { tokio::join!(workers_gone, &mut *http_server) }).await;
    tracing::info!(complete = farewell.is_ok(), "drained");
}

/// Tasks that end with the coordinator.
#[derive(Default)]
struct Background(Vec<JoinHandle<()>>);

impl Background {
    fn spawn(&mut self, task: impl Future<Output = ()> + Send + 'static) {
        self.0.push(tokio::spawn(task));
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        self.0.iter().for_each(JoinHandle::abort);
    }
}

/// The name asked for, or the folder's.
fn served_name(config: &Config) -> String {
    let folder = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned());
    let canonical: Option<PathBuf> = config.model.canonicalize().ok();
    config.served_model_name.clone().or_else(|| folder(&config.model)).or_else(|| folder(&canonical?)).unwrap_or_else(|| "model".into())
}

/// New per process start, and never 0.
fn epoch() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX).max(1)
}

fn reason<E: std::fmt::Display>(ended: Result<Result<(), E>, tokio::task::JoinError>) -> String {
    match ended {
        Ok(Ok(())) => "it was closed".into(),
        Ok(Err(error)) => error.to_string(),
        Err(error) => error.to_string(),
    }
}
