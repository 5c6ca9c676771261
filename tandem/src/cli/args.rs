//! The flags of the four commands that run roles, in groups that they share.
//!
//! Flags that take true or false are written `--flag` or `--flag=false`, so that a flag can switch off what a config file
//! switched on.

use std::{
    net::{IpAddr, SocketAddr},
    path::PathBuf,
};

use clap::{ArgAction, Args};
use tandem_model::{Geometry, Resident, narrow::Fp8Groups};
use tandem_worker_attn::{cache::CacheOptions, engine::parking::ParkingOptions};

use crate::failure::Failure;

use super::values::{
    self, Bytes, Cpus, Device, Dtype, ExpertDevice, KvCacheDtype, Link, LoadFormat, LogFormat, MetricsCompat, Preemption, ReasoningFields,
    Seconds, SharedRows, Split,
};

/// Flags of every role.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "General")]
pub struct CommonArgs {
    /// TOML file of settings; flags and TANDEM_* variables win over it
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// What to log: a level, or target=level pairs, comma-separated
    #[arg(long, value_name = "FILTER")]
    pub log: Option<String>,
    /// Shape of log lines on stderr
    #[arg(long, value_enum, default_value = "text")]
    pub log_format: LogFormat,
    /// Finish running requests for at most this long after SIGTERM or Ctrl-C
    #[arg(long, value_name = "TIME", default_value = "60s")]
    pub shutdown_timeout: Seconds,
    /// Set by `tandem up`: end when standard input closes
    #[arg(long, hide = true)]
    pub supervised: bool,
}

/// What is served.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Model")]
pub struct ModelArgs {
    /// Folder with config.json and *.safetensors, or a GGUF file (any shard of a set); the built-in demo model if not given
    #[arg(long, value_name = "DIR")]
    pub model: Option<PathBuf>,
    /// Where the demo model is unpacked [default: $XDG_CACHE_HOME/tandem or ~/.cache/tandem]
    #[arg(long, value_name = "DIR")]
    pub cache_dir: Option<PathBuf>,
    /// Where weights come from: the files, or made up from their headers alone, to measure speed and memory without them (every process of an
    /// instance must have the same)
    #[arg(long, value_enum, default_value = "auto")]
    pub load_format: LoadFormat,
    /// Precision of activations, caches and hop payload; every process of an instance must have the same
    #[arg(long, value_enum, default_value = "bf16")]
    pub dtype: Dtype,
}

/// How the routed experts are cut.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Split")]
pub struct SplitArgs {
    /// How the routed experts are cut over the expert workers
    #[arg(long, value_enum, default_value = "layers")]
    pub split: Split,
    /// Experts that the attention worker holds itself: layer ranges, each with an optional range of experts, e.g. 3-6,8-11 or
    /// 3-6:0-63; `all` or `none`
    #[arg(long, value_name = "RANGES", default_value = "none")]
    pub resident_layers: String,
}

/// The HTTP side.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "HTTP")]
pub struct HttpArgs {
    /// Address or name to serve the HTTP APIs on
    #[arg(long, value_name = "HOST", default_value = "127.0.0.1")]
    pub host: String,
    /// Port to serve the HTTP APIs on; 0 = a free one
    #[arg(long, value_name = "N", default_value_t = 8000)]
    pub port: u16,
    /// Model name in the APIs; the folder's name if not given
    #[arg(long, value_name = "NAME", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub served_model_name: Option<String>,
    /// Requests that may wait for a place in the batch; more are refused with 429
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub max_queue: u32,
    /// Largest `logprobs` or `prompt_logprobs` a request may ask for; -1 = the whole vocabulary
    #[arg(long, value_name = "N", default_value_t = 20, allow_negative_numbers = true, value_parser = clap::value_parser!(i64).range(-1..))]
    pub max_logprobs: i64,
    /// Deadline of a request, from arrival to its last token
    #[arg(long, value_name = "TIME", default_value = "30m", value_parser = values::above_zero)]
    pub request_timeout: Seconds,
    /// Aliases for dashboards of other servers
    #[arg(long, value_enum, default_value = "vllm")]
    pub metrics_compat: MetricsCompat,
    /// Answer fields that carry the reasoning
    #[arg(long, value_enum, default_value = "both")]
    pub reasoning_fields: ReasoningFields,
    /// Keys that requests need one of; comma-separated, better given as TANDEM_API_KEY or in a file: other users of the machine see flags
    #[arg(long, value_name = "KEYS", value_delimiter = ',', hide_env_values = true)]
    pub api_key: Vec<String>,
    /// File with such keys, one per line; read again when it changes
    #[arg(long, value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    /// Origins of web pages that may ask, comma-separated; * = any. None unless given
    #[arg(long, value_name = "ORIGINS", value_delimiter = ',')]
    pub cors_origins: Vec<String>,
    /// Longest silence on a stream before a sign of life is sent; the first one comes after a second
    #[arg(long, value_name = "TIME", default_value = "5s")]
    pub sse_keep_alive: Seconds,
    /// Largest request body
    #[arg(long, value_name = "SIZE", default_value = "64MiB", value_parser = values::some_bytes)]
    pub max_body_bytes: Bytes,
}

impl SplitArgs {
    /// `--resident-layers`, parsed.
    ///
    /// # Errors
    /// When the text is no list of ranges.
    pub fn resident(&self) -> Result<Resident, Failure> {
        self.resident_layers.parse().map_err(|error: tandem_model::PlanError| Failure::usage(format!("--resident-layers: {error}")))
    }
}

/// The attention worker's limits.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Attention worker")]
pub struct AttnLimits {
    /// Sequences in the batch at once
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub max_batch: u32,
    /// Longest sequence, prompt and answer together; what the checkpoint and --kv-tokens allow if not given. More than the checkpoint says
    /// is allowed, with a warning
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..))]
    pub max_seq_len: Option<u32>,
    /// Tokens that the latent cache holds over all sequences
    #[arg(long, value_name = "N", default_value_t = 32768, value_parser = clap::value_parser!(u64).range(2..=1 << 40))]
    pub kv_tokens: u64,
    /// What the latent cache stores: fp8 halves it against bf16 and rounds each latent to 3 bits of mantissa (cpu only)
    #[arg(long, value_enum, default_value = "auto")]
    pub kv_cache_dtype: KvCacheDtype,
    /// Weights narrowed to FP8.
    #[command(flatten)]
    pub fp8: Fp8Args,
    /// Tokens in one step, decode and prefill together; a longer prompt is taken in chunks
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub max_num_batched_tokens: u32,
    /// Largest chunk of one prompt in one step [default: --max-num-batched-tokens]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub prefill_chunk: Option<u32>,
    /// Rows from which a step runs as two micro-batches, so that the experts of one are computed beside the other's attention (0: never)
    #[arg(long, value_name = "N", default_value_t = tandem_worker_attn::model::OVERLAP_ROWS as u32)]
    pub overlap_rows: u32,
    /// Transport to the expert workers
    #[arg(long, value_enum, default_value = "auto")]
    pub link: Link,
    /// Rows to expert workers of this machine through memory that both see, instead of the link
    #[arg(long, value_enum, default_value = "auto")]
    pub shared_rows: SharedRows,
    /// Let a replica with other arithmetic take over a running sequence: its tokens may then differ
    #[arg(long, action = ArgAction::Set, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value_t = false, value_name = "BOOL")]
    pub allow_mixed_experts: bool,
    /// What becomes of a sequence's state when pages run out and it has to make room for earlier ones
    #[arg(long, value_enum, default_value = "auto")]
    pub preemption: Preemption,
    /// Host memory for the copies of sequences that make room
    #[arg(long, value_name = "SIZE", default_value = "1GiB")]
    pub preemption_bytes: Bytes,
    /// Prefix cache.
    #[command(flatten)]
    pub cache: CacheArgs,
}

/// Which of the attention worker's weights become FP8 (E4M3 under a factor for each 128×128 block) where the checkpoint has floats.
#[derive(Clone, Copy, Debug, Args)]
#[command(next_help_heading = "Weights")]
pub struct Fp8Args {
    /// Narrow the projections of MLA layers to FP8 when they are loaded: fewer bytes a token, other tokens
    #[arg(long, action = ArgAction::Set, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value_t = false, value_name = "BOOL")]
    pub attn_fp8: bool,
    /// The same for q, k, v and output projections of KDA layers
    #[arg(long, action = ArgAction::Set, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value_t = false, value_name = "BOOL")]
    pub kda_fp8: bool,
    /// The same for dense MLPs and shared experts
    #[arg(long, action = ArgAction::Set, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value_t = false, value_name = "BOOL")]
    pub mlp_fp8: bool,
}

impl Fp8Args {
    /// The groups.
    pub fn groups(self) -> Fp8Groups {
        Fp8Groups { attention: self.attn_fp8, kda: self.kda_fp8, mlp: self.mlp_fp8 }
    }
}

/// What the attention worker keeps of prompts that it has computed.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Prefix cache")]
pub struct CacheArgs {
    /// Compute every prompt whole, whatever was computed before
    #[arg(long, action = ArgAction::Set, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value_t = false, value_name = "BOOL")]
    pub no_prefix_cache: bool,
    /// Host memory for the state of remembered prefixes that does not lie in cache pages; one takes 136 MiB of the published model
    #[arg(long, value_name = "SIZE", default_value = "2GiB")]
    pub prefix_cache_bytes: Bytes,
    /// Remember a long prompt every so many tokens, beside its end and where prompts part; 0 = only there
    #[arg(long, value_name = "N", default_value_t = 4096)]
    pub prefix_cache_interval: u32,
}

impl CacheArgs {
    /// The worker's options; nothing where the cache is off.
    pub fn options(&self) -> Option<CacheOptions> {
        let on = !self.no_prefix_cache && self.prefix_cache_bytes.0 > 0;
        on.then(|| CacheOptions {
            bytes: self.prefix_cache_bytes.0,
            interval: self.prefix_cache_interval as usize,
            ..CacheOptions::default()
        })
    }
}

impl AttnLimits {
    /// How sequences make room, as the worker takes it.
    pub fn parking(&self) -> ParkingOptions {
        ParkingOptions { preemption: self.preemption.into(), bytes: self.preemption_bytes.0 }
    }

    /// The longest sequence: `--max-seq-len`, or what the model and the cache allow. More than the model was made for is allowed (it has no
    /// positions); the worker warns of it.
    ///
    /// # Errors
    /// When more is asked for than the cache holds.
    pub fn longest(&self, geometry: &Geometry) -> Result<u64, Failure> {
        match self.max_seq_len.map(u64::from) {
            None => Ok(self.kv_tokens.min(geometry.max_position as u64)),
            Some(asked) if asked <= self.kv_tokens => Ok(asked),
            Some(asked) => Err(Failure::config(format!(
                "--max-seq-len {asked} is too long: --kv-tokens holds {}; raise it, or ask for at most that many",
                self.kv_tokens
            ))),
        }
    }
}

/// How a worker uses its cores.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Cores")]
pub struct ComputeArgs {
    /// Compute threads of each worker process; chosen from the cores of the machine if not given
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub threads: Option<u32>,
    /// Cores for the compute threads, one each, in this order, e.g. 0-3,8; none: the system places them; auto: `tandem up` shares the
    /// cores out among CPU workers that wait for each other
    #[arg(long, value_name = "auto|none|LIST", default_value = "auto")]
    pub cpus: Cpus,
    /// Start even where weights are larger than the memory that is free: they are then read from disk as they are needed, which is slow
    #[arg(long, action = ArgAction::Set, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value_t = false, value_name = "BOOL")]
    pub allow_paging: bool,
    /// Microseconds that a receiver polls before it sleeps, while a step is in flight; chosen from the cores if not given
    #[arg(long, value_name = "N")]
    pub spin_us: Option<u64>,
}

/// How a worker joins.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Membership")]
pub struct JoinArgs {
    /// The coordinator's control address, as `tandem serve` prints it: http://HOST:PORT
    #[arg(long, value_name = "URL", required = true)]
    pub coordinator: String,
    /// Name of this worker, unique in the instance; a worker that joins under a known name replaces it [default: role and host]
    #[arg(long, value_name = "NAME")]
    pub name: Option<String>,
    /// Device to compute on: cpu, cuda:N, or reference (the slow, obvious formulas, for checking)
    #[arg(long, default_value = "cpu", value_name = "DEVICE")]
    pub device: Device,
    /// Serve /livez /readyz /metrics /version here
    #[arg(long, value_name = "IP:PORT", default_value = "127.0.0.1:0")]
    pub admin: SocketAddr,
}

/// Consent to plaintext between hosts.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Security")]
pub struct PlaintextArgs {
    /// Allow plaintext between processes on addresses other than loopback: for networks that you trust as a whole
    #[arg(long, action = ArgAction::Set, num_args = 0..=1, require_equals = true, default_missing_value = "true", default_value_t = false, value_name = "BOOL")]
    pub insecure: bool,
}

/// `tandem up`.
#[derive(Clone, Debug, Args)]
pub struct UpArgs {
    /// Model.
    #[command(flatten)]
    pub model: ModelArgs,
    /// HTTP.
    #[command(flatten)]
    pub http: HttpArgs,
    /// Split.
    #[command(flatten)]
    pub split: SplitArgs,
    /// Limits.
    #[command(flatten)]
    pub limits: AttnLimits,
    /// Device of the attention worker: cpu, cuda:N, or reference (the slow, obvious formulas, for checking)
    #[arg(long, default_value = "cpu", value_name = "DEVICE", help_heading = "Devices")]
    pub attn: Device,
    /// Devices of the expert workers, one worker each, comma-separated: cpu, cuda:N, reference, or none [default: cpu; none with
    /// --resident-layers all; with --attn cuda:N another GPU, or none and everything resident where there is but one]
    #[arg(long, value_delimiter = ',', value_name = "DEVICES", help_heading = "Devices")]
    pub experts: Vec<ExpertDevice>,
    /// Cores.
    #[command(flatten)]
    pub compute: ComputeArgs,
    /// Common.
    #[command(flatten)]
    pub common: CommonArgs,
}

/// `tandem serve`.
#[derive(Clone, Debug, Args)]
pub struct ServeArgs {
    /// Model.
    #[command(flatten)]
    pub model: ModelArgs,
    /// HTTP.
    #[command(flatten)]
    pub http: HttpArgs,
    /// Split.
    #[command(flatten)]
    pub split: SplitArgs,
    /// Expert workers that the plan cuts the experts for
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Split")]
    pub expert_workers: u32,
    /// Address where workers join; port 0 = a free one
    #[arg(long, value_name = "IP:PORT", default_value = "127.0.0.1:0", help_heading = "Membership")]
    pub control_addr: SocketAddr,
    /// Security.
    #[command(flatten)]
    pub plaintext: PlaintextArgs,
    /// Common.
    #[command(flatten)]
    pub common: CommonArgs,
}

/// `tandem attn`.
#[derive(Clone, Debug, Args)]
pub struct AttnArgs {
    /// Membership.
    #[command(flatten)]
    pub join: JoinArgs,
    /// Model.
    #[command(flatten)]
    pub model: ModelArgs,
    /// Limits.
    #[command(flatten)]
    pub limits: AttnLimits,
    /// Cores.
    #[command(flatten)]
    pub compute: ComputeArgs,
    /// Security.
    #[command(flatten)]
    pub plaintext: PlaintextArgs,
    /// Common.
    #[command(flatten)]
    pub common: CommonArgs,
}

/// `tandem experts`.
#[derive(Clone, Debug, Args)]
pub struct ExpertsArgs {
    /// Membership.
    #[command(flatten)]
    pub join: JoinArgs,
    /// Address on which attention workers reach this worker; they must be able to dial it
    #[arg(long, value_name = "IP", default_value = "127.0.0.1", help_heading = "Membership")]
    pub listen: IpAddr,
    /// Port of the tcp link; 0 = a free one
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Membership")]
    pub tcp_port: u16,
    /// Port of the grpc link; 0 = a free one
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Membership")]
    pub grpc_port: u16,
    /// Shard to hold instead of the one that the coordinator gives, e.g. layers=3-11,experts=0-287,ffn=0-2047 (repeatable)
    #[arg(long, value_name = "SHARD", action = ArgAction::Append, help_heading = "Membership")]
    pub shard: Vec<String>,
    /// Model.
    #[command(flatten)]
    pub model: ModelArgs,
    /// Cores.
    #[command(flatten)]
    pub compute: ComputeArgs,
    /// Security.
    #[command(flatten)]
    pub plaintext: PlaintextArgs,
    /// Common.
    #[command(flatten)]
    pub common: CommonArgs,
}
