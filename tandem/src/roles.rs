//! Runs one role in this process: arguments → the role crate's `Config`, logs, signals, supervision.

use std::{
    net::{IpAddr, SocketAddr, ToSocketAddrs as _},
    num::NonZeroUsize,
    time::Duration,
};

use tandem_model::Shard;
use tandem_runtime::{Shutdown, exit, process, signals, supervised};

use crate::{
    block_on,
    cli::{
        AttnArgs, ExpertsArgs, ServeArgs,
        args::{CommonArgs, ComputeArgs, JoinArgs},
        values::MetricsCompat,
    },
    failure::Failure,
    model, start_logs, up,
};

/// Threads of a role's asynchronous runtime: control, admin and HTTP traffic. The maths has threads of its own.
const RUNTIME_THREADS: usize = 2;

/// `tandem serve`.
///
/// # Errors
/// When the coordinator cannot start or fails.
pub fn serve(args: ServeArgs) -> Result<(), Failure> {
    use tandem_coordinator as coordinator;
    start_logs("serve", &args.common)?;
    process::set_name("tandem-serve");
    plaintext_allowed("--control-addr", args.control_addr.ip(), args.plaintext.insecure)?;
    let located = model::locate(&args.model, args.http.served_model_name.as_deref())?;
    let config = coordinator::Config {
        host: args.http.host.clone(),
        port: args.http.port,
        control_addr: args.control_addr,
        served_model_name: Some(located.name),
        precision: args.model.dtype.name().into(),
        load_format: args.model.load_format.into(),
        plan: coordinator::PlanInputs {
            split: args.split.split.into(),
            expert_workers: args.expert_workers as usize,
            resident: args.split.resident()?,
        },
        max_queue: args.http.max_queue as usize,
        max_logprobs: args.http.max_logprobs,
        request_timeout: args.http.request_timeout.0,
        shutdown_timeout: args.common.shutdown_timeout.0,
        metrics_compat_vllm: args.http.metrics_compat == MetricsCompat::Vllm,
        reasoning_fields: args.http.reasoning_fields.names(),
        api_keys: args.http.api_key.clone(),
        api_key_file: args.http.api_key_file.clone(),
        cors_origins: args.http.cors_origins.clone(),
        sse_keep_alive: args.http.sse_keep_alive.0,
        max_body_bytes: usize::try_from(args.http.max_body_bytes.0).unwrap_or(usize::MAX),
        ..coordinator::Config::new(located.dir)
    };
    block_on(RUNTIME_THREADS, async {
        let shutdown = lifetime(&args.common)?;
        coordinator::run(config, shutdown).await.map_err(|error| {
            use coordinator::Error;
            let code = match &error {
                Error::Config(_) | Error::Model(_) | Error::Plan(_) | Error::Text(_) | Error::WarmUp(_) => exit::CONFIG,
                Error::Bind { .. } => exit::UNAVAILABLE,
                Error::Metrics(_) | Error::Server { .. } => exit::INTERNAL,
            };
            Failure::new(code, error.to_string())
        })
    })
}

/// `tandem attn`.
///
/// # Errors
/// When the worker cannot start or fails.
pub fn attn(args: AttnArgs) -> Result<(), Failure> {
    use tandem_worker_attn as worker;
    let name = worker_name(&args.join, "attn");
    start_logs(&name, &args.common)?;
    process::set_name("tandem-attn");
    coordinator_allowed(&args.join.coordinator, args.plaintext.insecure)?;
    let located = model::locate(&args.model, None)?;
    let cores = Cores::of(&args.compute);
    let limits = &args.limits;
    let config = worker::Config {
        name,
        precision: args.model.dtype.into(),
        load_format: args.model.load_format.into(),
        device: args.join.device.to_string(),
        threads: cores.threads,
        cpus: cores.cpus,
        allow_paging: args.compute.allow_paging,
        max_batch: limits.max_batch as usize,
        max_seq_len: limits.max_seq_len.map(|tokens| tokens as usize),
        kv_tokens: usize::try_from(limits.kv_tokens).unwrap_or(usize::MAX),
        max_num_batched_tokens: limits.max_num_batched_tokens as usize,
        prefill_chunk: limits.prefill_chunk.map(|tokens| tokens as usize),
        overlap_rows: limits.overlap_rows as usize,
        kv_cache: limits.kv_cache_dtype.latents(),
        fp8: limits.fp8.groups(),
        prefix_cache: limits.cache.options(),
        parking: limits.parking(),
        link: limits.link.into(),
        shared_rows: limits.shared_rows.into(),
        spin: cores.spin,
        allow_mixed_experts: limits.allow_mixed_experts,
        admin: Some(args.join.admin),
        drain_timeout: args.common.shutdown_timeout.0,
        ..worker::Config::new(args.join.coordinator, located.dir)
    };
    block_on(RUNTIME_THREADS, async {
        let shutdown = lifetime(&args.common)?;
        worker::run(config, shutdown).await.map_err(|error| {
            use worker::Error;
            let code = match &error {
                Error::Model(_)
                | Error::Plan(_)
                | Error::Device { .. }
                | Error::Limit { .. }
                | Error::CacheType { .. }
                | Error::Memory(_)
                | Error::Join(_) => exit::CONFIG,
                Error::Load(load) if matches!(**load, worker::weights::LoadError::Model(_)) => exit::CONFIG,
                Error::Bind { .. } => exit::UNAVAILABLE,
                _ => exit::INTERNAL,
            };
            Failure::new(code, error.to_string())
        })
    })
}

/// `tandem experts`.
///
/// # Errors
/// When the worker cannot start or fails.
pub fn experts(args: ExpertsArgs) -> Result<(), Failure> {
    use tandem_worker_experts as worker;
    let name = worker_name(&args.join, "experts");
    start_logs(&name, &args.common)?;
    process::set_name("tandem-experts");
    coordinator_allowed(&args.join.coordinator, args.plaintext.insecure)?;
    plaintext_allowed("--listen", args.listen, args.plaintext.insecure)?;
    let located = model::locate(&args.model, None)?;
    let mut shard = Vec::new();
    for text in &args.shard {
        shard.push(text.parse::<Shard>().map_err(|error| Failure::usage(format!("--shard {error}")))?);
    }
    let cores = Cores::of(&args.compute);
    let fault = match std::env::var("TANDEM_TEST_FAULT") {
        Ok(text) => Some(text.parse().map_err(|error: String| Failure::usage(format!("TANDEM_TEST_FAULT: {error}")))?),
        Err(_) => None,
    };
    let config = worker::Config {
        name,
        listen: args.listen,
        tcp_port: Some(args.tcp_port),
        grpc_port: Some(args.grpc_port),
        precision: args.model.dtype.into(),
        load_format: args.model.load_format.into(),
        device: args.join.device.to_string(),
        shard,
        threads: cores.threads,
        cpus: cores.cpus,
        allow_paging: args.compute.allow_paging,
        spin: cores.spin,
        admin: Some(args.join.admin),
        drain_timeout: args.common.shutdown_timeout.0,
        fault,
        ..worker::Config::new(args.join.coordinator, located.dir)
    };
    block_on(RUNTIME_THREADS, async {
        let shutdown = lifetime(&args.common)?;
        worker::run(config, shutdown).await.map_err(|error| {
            use worker::Error;
            let code = match &error {
                Error::Model(_) | Error::Plan(_) | Error::Device { .. } | Error::Memory(_) | Error::Join(_) => exit::CONFIG,
                Error::Bind { .. } => exit::UNAVAILABLE,
                _ => exit::INTERNAL,
            };
            Failure::new(code, error.to_string())
        })
    })
}

/// Compute threads and polling of one worker process.
struct Cores {
    threads: Option<usize>,
    cpus: Vec<usize>,
    spin: Duration,
}

impl Cores {
    /// What the flags say; else this machine's cores, as if the worker had it to itself.
    fn of(args: &ComputeArgs) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
        Self {
            threads: args.threads.map(|threads| threads as usize),
            cpus: args.cpus.clone().into_list(),
            spin: Duration::from_micros(args.spin_us.unwrap_or_else(|| up::spin_us(cores))),
        }
    }
}

/// The worker's name: as given, or made of its role and host, so that workers of several hosts differ.
fn worker_name(join: &JoinArgs, role: &str) -> String {
    let host = || nix::unistd::gethostname().ok().and_then(|name| name.into_string().ok()).unwrap_or_else(|| "host".into());
    join.name.clone().unwrap_or_else(|| format!("{role}-{}", host()))
}

/// A shutdown handle that this process's signals, and its supervisor's end, set off.
fn lifetime(common: &CommonArgs) -> Result<Shutdown, Failure> {
    let shutdown = Shutdown::new();
    signals::install(shutdown.clone()).map_err(|error| Failure::internal(format!("cannot handle signals: {error}")))?;
    if common.supervised {
        supervised::watch_parent(shutdown.clone()).map_err(|error| Failure::internal(format!("cannot watch the supervisor: {error}")))?;
    }
    Ok(shutdown)
}

/// Refuses to talk plaintext beyond this machine without consent.
fn plaintext_allowed(flag: &str, ip: IpAddr, insecure: bool) -> Result<(), Failure> {
    if insecure || ip.is_loopback() {
        return Ok(());
    }
    Err(Failure::usage(format!(
        "{flag} {ip}: traffic between processes is plaintext, which needs --insecure on an address other than loopback; give it on a network that you trust as a whole"
    )))
}

/// The same for an outgoing connection, by where the name leads.
fn coordinator_allowed(url: &str, insecure: bool) -> Result<(), Failure> {
    let wrong = |what: &str| {
        Failure::usage(format!("--coordinator {url}: {what}; give http://HOST:PORT as `tandem serve` prints it after CONTROL"))
    };
    let authority = url.strip_prefix("http://").ok_or_else(|| wrong("does not begin with http://"))?.trim_end_matches('/');
    if authority.rsplit_once(':').is_none_or(|(_, port)| port.parse::<u16>().is_err()) {
        return Err(wrong("has no port"));
    }
    if insecure {
        return Ok(());
    }
    // A name that does not resolve now may do so later (a coordinator that starts after its workers): then nothing is sent yet.
    for addr in authority.to_socket_addrs().into_iter().flatten() {
        plaintext_allowed("--coordinator", SocketAddr::ip(&addr), insecure)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plaintext_needs_consent_beyond_loopback() {
        assert!(coordinator_allowed("http://127.0.0.1:7000", false).is_ok());
        assert!(coordinator_allowed("http://[::1]:7000/", false).is_ok());
        assert!(coordinator_allowed("http://192.0.2.7:7000", true).is_ok());
        let refused = coordinator_allowed("http://192.0.2.7:7000", false).expect_err("plaintext");
        assert!(refused.reason.contains("--insecure") && refused.reason.contains("192.0.2.7"), "{refused}");
        assert!(plaintext_allowed("--listen", "0.0.0.0".parse().expect("ip"), false).is_err());
    }

    #[test]
    fn a_coordinator_is_a_url_with_a_port() {
        for (url, needle) in
            [("127.0.0.1:7000", "http://"), ("http://host", "no port"), ("https://host:1", "http://"), ("http://host:x", "no port")]
        {
            let refused = coordinator_allowed(url, true).expect_err(url);
            assert!(refused.reason.contains(needle) && refused.reason.contains(url), "{refused}");
        }
    }
}
