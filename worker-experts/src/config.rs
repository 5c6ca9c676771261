//! [`Config`]: how an expert worker is set up. The binary fills it from flags, environment and file.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::PathBuf,
    time::Duration,
};

use tandem_kernels::Precision;
use tandem_model::{LoadFormat, Shard};
use tandem_proto::hop::MAX_ROWS;

use crate::fault::Fault;

/// How an expert worker is set up.
#[derive(Clone, Debug)]
pub struct Config {
    /// Coordinator's control address, `http://HOST:PORT` or `HOST:PORT`.
    pub coordinator: String,
    /// Name within the instance; a worker that comes back under its name takes its old place.
    pub name: String,
    /// Address to listen on for attention workers.
    pub listen: IpAddr,
    /// Port of the tcp link; 0 = a free one, `None` = do not serve it.
    pub tcp_port: Option<u16>,
    /// Port of the grpc link; 0 = a free one, `None` = do not serve it.
    pub grpc_port: Option<u16>,
    /// Host that others dial instead of [`Config::listen`] (NAT, containers).
    pub advertise: Option<String>,
    /// Checkpoint folder.
    pub model: PathBuf,
    /// Rounding mode; the same on every process of an instance.
    pub precision: Precision,
    /// Where weights come from; the same on every process of an instance.
    pub load_format: LoadFormat,
    /// `cpu` or `reference`.
    pub device: String,
    /// Shards to hold; empty = those that the coordinator gives. Ids are the coordinator's.
    pub shard: Vec<Shard>,
    /// Weights may be larger than the memory that is free: they are then read from disk as they are needed.
    pub allow_paging: bool,
    /// Threads of the CPU backend; `None` = one for each of `cpus`, or all cores it may use.
    pub threads: Option<usize>,
    /// Cores for these threads, one each, in this order; empty = the system places them.
    pub cpus: Vec<usize>,
    /// How long a wait for frames spins before it parks.
    pub spin: Duration,
    /// Largest dispatch and largest joined batch, in rows.
    pub max_rows: u32,
    /// Where `/livez /readyz /metrics /version` are served.
    pub admin: Option<SocketAddr>,
    /// After a first signal: how long to go on for dispatches that still come (the coordinator's Drain may say otherwise).
    pub drain_timeout: Duration,
    /// A deliberate fault, for tests alone.
    pub fault: Option<Fault>,
}

impl Config {
    /// Defaults for everything but the coordinator and the checkpoint.
    pub fn new(coordinator: impl Into<String>, model: impl Into<PathBuf>) -> Self {
        Self {
            coordinator: coordinator.into(),
            name: "experts-0".to_owned(),
            listen: IpAddr::V4(Ipv4Addr::LOCALHOST),
            tcp_port: Some(0),
            grpc_port: Some(0),
            advertise: None,
            model: model.into(),
            precision: Precision::Bf16,
            load_format: LoadFormat::Auto,
            device: "cpu".to_owned(),
            shard: Vec::new(),
            allow_paging: false,
            threads: None,
            cpus: Vec::new(),
            spin: Duration::from_micros(100),
            max_rows: MAX_ROWS,
            admin: None,
            drain_timeout: Duration::from_secs(30),
            fault: None,
        }
    }
}
