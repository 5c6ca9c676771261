//! [`Config`]: how an attention worker is set up. The binary fills it from flags, environment and file.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use tandem_kernels::{DeviceKind, Precision, cpu::LatentType};
use tandem_model::{Geometry, LoadFormat, narrow::Fp8Groups};
use tandem_proto::link::LinkChoice;
use tandem_worker_experts::memory::kind_of;

use crate::{Error, RunnerLimits, cache::CacheOptions, engine::parking::ParkingOptions, model::OVERLAP_ROWS};

/// How an attention worker is set up. Which shards of the routed experts it hosts itself is the coordinator's to say.
#[derive(Clone, Debug)]
pub struct Config {
    /// Coordinator's control address, `http://HOST:PORT` or `HOST:PORT`.
    pub coordinator: String,
    /// Name within the instance; a worker that comes back under its name takes its old place.
    pub name: String,
    /// Checkpoint folder.
    pub model: PathBuf,
    /// Rounding mode; the same on every process of an instance.
    pub precision: Precision,
    /// Where weights come from; the same on every process of an instance.
    pub load_format: LoadFormat,
    /// `cpu` or `reference`.
    pub device: String,
    /// Weights may be larger than the memory that is free: they are then read from disk as they are needed.
    pub allow_paging: bool,
    /// Threads of the CPU backend; `None` = one for each of `cpus`, or all cores it may use.
    pub threads: Option<usize>,
    /// Cores for these threads, one each, in this order; empty = the system places them.
    pub cpus: Vec<usize>,
    /// Sequences that hold state at a time.
    pub max_batch: usize,
    /// Tokens of one sequence, prompt and answer; `None` = what the checkpoint and `kv_tokens` allow. More than the checkpoint says works
    /// (the model has no positions) and is warned of.
    pub max_seq_len: Option<usize>,
    /// Tokens whose state all sequences hold together.
    pub kv_tokens: usize,
    /// What latent rows are stored as; `None` = as the precision says. Only the CPU has a choice.
    pub kv_cache: Option<LatentType>,
    /// Groups of weights that are narrowed to FP8 where they are stored as floats.
    pub fp8: Fp8Groups,
    /// Rows of one step, decode and prefill together (raised to `max_batch` where it is less).
    pub max_num_batched_tokens: usize,
    /// Rows of one prompt in one step; `None` = `max_num_batched_tokens`.
    pub prefill_chunk: Option<usize>,
    /// Rows from which a step runs as two micro-batches; 0: never.
    pub overlap_rows: usize,
    /// The prefix cache; `None` = every prompt is computed whole.
    pub prefix_cache: Option<CacheOptions>,
    /// How sequences make room when pages run out.
    pub parking: ParkingOptions,
    /// Transport to the expert workers.
    pub link: LinkChoice,
    /// Share rows with expert workers of this machine through memory; `None` = on a GPU, where the copies through a link would count.
    pub shared_rows: Option<bool>,
    /// How long a wait for partials spins before it parks.
    pub spin: Duration,
    /// Let a replica with other arithmetic take over a running sequence.
    pub allow_mixed_experts: bool,
    /// Deadline of a request that brings none: nothing waits for ever.
    pub request_timeout: Duration,
    /// Where `/livez /readyz /metrics /version` are served.
    pub admin: Option<SocketAddr>,
    /// After a first signal: how long running sequences may take to finish.
    pub drain_timeout: Duration,
}

impl Config {
    /// Whether rows are shared through memory.
    pub fn shares_rows(&self) -> bool {
        self.shared_rows.unwrap_or(kind_of(&self.device) == DeviceKind::Cuda)
    }

    /// What latent rows are stored as.
    pub fn latents(&self) -> LatentType {
        self.kv_cache.unwrap_or(LatentType::of(self.precision))
    }

    /// Defaults for everything but the coordinator and the checkpoint.
    pub fn new(coordinator: impl Into<String>, model: impl Into<PathBuf>) -> Self {
        Self {
            coordinator: coordinator.into(),
            name: "attn-0".to_owned(),
            model: model.into(),
            precision: Precision::Bf16,
            load_format: LoadFormat::Auto,
            device: "cpu".to_owned(),
            allow_paging: false,
            threads: None,
            cpus: Vec::new(),
            max_batch: 8,
            max_seq_len: None,
            kv_tokens: 32_768,
            kv_cache: None,
            fp8: Fp8Groups::default(),
            max_num_batched_tokens: 256,
            prefill_chunk: None,
            overlap_rows: OVERLAP_ROWS,
            prefix_cache: Some(CacheOptions::default()),
            parking: ParkingOptions::default(),
            link: LinkChoice::Auto,
            shared_rows: None,
            spin: Duration::from_micros(100),
            allow_mixed_experts: false,
            request_timeout: Duration::from_secs(30 * 60),
            admin: None,
            drain_timeout: Duration::from_secs(60),
        }
    }

    /// The limits for a checkpoint.
    ///
    /// # Errors
    /// [`Error::Limit`] where they cannot be met, naming the flag.
    pub fn limits(&self, g: &Geometry) -> Result<RunnerLimits, Error> {
        let limit = |flag: &'static str, needed: String, got: usize| Err(Error::Limit { flag, needed, got });
        let max_seq_len = self.max_seq_len.unwrap_or(self.kv_tokens.min(g.max_position));
        for (flag, value) in [
            ("--max-batch", self.max_batch),
            ("--kv-tokens", self.kv_tokens),
            ("--max-num-batched-tokens", self.max_num_batched_tokens),
            ("--prefill-chunk", self.prefill_chunk.unwrap_or(1)),
            ("--max-seq-len", max_seq_len),
        ] {
            if value == 0 {
                return limit(flag, "at least 1".to_owned(), value);
            }
        }
        if max_seq_len > self.kv_tokens {
            return limit("--max-seq-len", format!("at most {}, which is what --kv-tokens holds", self.kv_tokens), max_seq_len);
        }
        if max_seq_len > g.max_position {
            // Nothing in the model knows a position, so nothing breaks; but nobody has trained it there.
            tracing::warn!(
                max_seq_len,
                max_position_embeddings = g.max_position,
                "sequences may become longer than the model was made for"
            );
        }
        Ok(RunnerLimits {
            max_rows: self.max_num_batched_tokens.max(self.max_batch),
            max_batch: self.max_batch,
            max_seq_len,
            kv_tokens: self.kv_tokens,
            overlap_rows: self.overlap_rows,
        })
    }
}
