//! Everything that `tandem serve` can be told, as one typed value. The library never reads the environment: the binary does.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use tandem_model::{LoadFormat, Resident, Split};

/// Settings of one coordinator.
#[derive(Clone, Debug)]
pub struct Config {
    /// Address or name that the HTTP API binds to.
    pub host: String,
    /// Port of the HTTP API; 0 = a free one, named in the `READY` line.
    pub port: u16,
    /// Where workers dial in (control.v1 and attn.v1); port 0 = a free one, named in the `CONTROL` line.
    pub control_addr: SocketAddr,
    /// Checkpoint folder: config, tokenizer and template are read; of the weights only samples for the fingerprint.
    pub model: PathBuf,
    /// Name of the model in the API; `None` = the folder's name.
    pub served_model_name: Option<String>,
    /// What the workers must compute in: `f32` or `bf16`. A worker that says otherwise is refused.
    pub precision: String,
    /// Where weights come from; the same on every process of an instance.
    pub load_format: LoadFormat,
    /// How the routed experts are cut over workers.
    pub plan: PlanInputs,
    /// Requests that may wait for a free place in the batch before new ones get 429.
    pub max_queue: usize,
    /// Most `logprobs`/`prompt_logprobs` per token; -1 = the whole vocabulary.
    pub max_logprobs: i64,
    /// Time from admission until a request ends with a deadline error, unless the request says less.
    pub request_timeout: Duration,
    /// How long running requests may take to finish after the first SIGTERM.
    pub shutdown_timeout: Duration,
    /// What a worker is told to send heartbeats at.
    pub heartbeat: Duration,
    /// Silence that counts as a worker's death. MUST be longer than two heartbeats.
    pub lease: Duration,
    /// Also export the `vllm:*` names.
    pub metrics_compat_vllm: bool,
    /// Names under which reasoning text is sent: `reasoning_content`, `reasoning`, or both.
    pub reasoning_fields: Vec<String>,
    /// Keys of which requests need one; with none here and no file, everybody may ask.
    pub api_keys: Vec<String>,
    /// File with further keys, one per line.
    pub api_key_file: Option<PathBuf>,
    /// Origins of web pages that may ask; `*` = any.
    pub cors_origins: Vec<String>,
    /// Longest silence on a stream.
    pub sse_keep_alive: Duration,
    /// Most bytes of a request body.
    pub max_body_bytes: usize,
}

/// What a shard plan is made from (`tandem_model::ShardPlan::new`), besides the checkpoint's geometry.
#[derive(Clone, Debug)]
pub struct PlanInputs {
    /// Along which dimension the experts are cut.
    pub split: Split,
    /// Into how many parts: the number of expert workers that are needed before the instance is ready.
    pub expert_workers: usize,
    /// What the attention worker holds itself.
    pub resident: Resident,
}

impl Config {
    /// The defaults of every setting, for the checkpoint at `model`: one expert worker that holds all routed experts.
    pub fn new(model: PathBuf) -> Self {
        Self {
            host: "127.0.0.1".into(),
            port: 8000,
            control_addr: SocketAddr::from(([127, 0, 0, 1], 0)),
            model,
            served_model_name: None,
            precision: "bf16".into(),
            load_format: LoadFormat::Auto,
            plan: PlanInputs { split: Split::Layers, expert_workers: 1, resident: Resident::default() },
            max_queue: 256,
            max_logprobs: 20,
            request_timeout: Duration::from_secs(600),
            shutdown_timeout: Duration::from_secs(60),
            heartbeat: Duration::from_millis(250),
            lease: Duration::from_secs(3),
            metrics_compat_vllm: true,
            reasoning_fields: vec!["reasoning_content".into()],
            api_keys: Vec::new(),
            api_key_file: None,
            cors_origins: Vec::new(),
            sse_keep_alive: Duration::from_secs(5),
            max_body_bytes: 64 << 20,
        }
    }

    /// Refuses settings that cannot work together.
    ///
    /// # Errors
    /// One line that names the setting, what was needed and what was there.
    pub fn validate(&self) -> Result<(), String> {
        if self.lease < self.heartbeat * 2 {
            return Err(format!(
                "lease {:?} is too short for a heartbeat every {:?}: at least twice that is needed",
                self.lease, self.heartbeat
            ));
        }
        if self.heartbeat.is_zero() {
            return Err("heartbeat is 0; at least 1 ms is needed".into());
        }
        if !matches!(self.precision.as_str(), "f32" | "bf16") {
            return Err(format!("precision is `{}`; `f32` or `bf16` is needed", self.precision));
        }
        if self.sse_keep_alive.is_zero() {
            return Err("sse_keep_alive is 0; at least 1 ms is needed".into());
        }
        if self.max_logprobs < -1 {
            return Err(format!("max_logprobs is {}; -1 (the whole vocabulary) or more is needed", self.max_logprobs));
        }
        Ok(())
    }
}
