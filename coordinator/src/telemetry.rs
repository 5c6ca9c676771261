//! The coordinator's metrics: `tandem_*`, and the same numbers under vLLM's names. `core.rs` and `cluster.rs` call it; `telemetry/names.rs`
//! holds names, help texts and buckets; `telemetry/timeline.rs` turns one request's events into durations.

use std::sync::atomic::{AtomicU64, Ordering};

use metrics::{Counter, Gauge, Histogram, counter, gauge, histogram};

mod names;
mod timeline;

pub use names::{buckets, describe};
pub(crate) use timeline::Timeline;

use crate::engine::{AdmissionError, Finish};
use crate::scheduler::Counts;
use crate::stats::Tokens;

/// A counter under its own name and its alias, and its value for `/v1/stats`.
struct Tally(Counter, Option<Counter>, AtomicU64);

impl Tally {
    fn add(&self, n: u64) {
        self.0.increment(n);
        if let Some(alias) = &self.1 {
            alias.increment(n);
        }
        self.2.fetch_add(n, Ordering::Relaxed);
    }
}

/// A gauge under its own name and its alias.
struct Level(Gauge, Option<Gauge>);

impl Level {
    fn set(&self, value: f64) {
        self.0.set(value);
        if let Some(alias) = &self.1 {
            alias.set(value);
        }
    }
}

/// A histogram under its own name and its aliases (vLLM renamed some).
struct Spread(Histogram, Vec<Histogram>);

impl Spread {
    fn record(&self, value: f64) {
        self.0.record(value);
        for alias in &self.1 {
            alias.record(value);
        }
    }
}

/// Why a request ended, as a label.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Stop,
    Length,
    Abort,
    Error,
}

impl From<Finish> for Outcome {
    fn from(finish: Finish) -> Self {
        match finish {
            Finish::Stop { .. } => Self::Stop,
            Finish::Length => Self::Length,
        }
    }
}

/// Tokens in a page of an attention worker's latent pool.
const PAGE_TOKENS: u64 = 64;

/// Handles of every request metric, made once.
pub(crate) struct Telemetry {
    alias: Option<String>,
    running: Level,
    waiting: Level,
    kv_usage: Level,
    ready: Gauge,
    prompt_tokens: Tally,
    generation_tokens: Tally,
    preemptions: Tally,
    prefix_queries: Tally,
    prefix_hits: Tally,
    resumes: Counter,
    /// By [`Outcome`].
    outcomes: [Tally; 4],
    ttft: Spread,
    inter_token: Spread,
    whole: Spread,
    queue: Spread,
    prefill: Spread,
    decode: Spread,
    inference: Vec<Histogram>,
    per_token: Vec<Histogram>,
    request_prompt_tokens: Spread,
    request_generation_tokens: Spread,
    iteration_tokens: Spread,
    max_tokens: Vec<Histogram>,
    choices: Vec<Histogram>,
}

impl Telemetry {
    /// Registers everything with the process's recorder; `alias` = the model's name, for the `vllm:*` names.
    pub(crate) fn new(alias: Option<&str>) -> Self {
        let labels = alias.map(|model| vec![("model_name", model.to_owned()), ("engine", "0".to_owned())]);
        let alias_gauge = |name: &'static str| labels.as_ref().map(|labels| gauge!(name, labels));
        let alias_counter = |name: &'static str| labels.as_ref().map(|labels| counter!(name, labels));
        let aliases = |names: &[&'static str]| -> Vec<Histogram> {
            labels.iter().flat_map(|labels| names.iter().map(move |name| histogram!(*name, labels))).collect()
        };
        let tally = |name: &'static str, alias: &'static str| Tally(counter!(name), alias_counter(alias), AtomicU64::new(0));
        let outcome = |reason: &'static str| {
            let own = counter!("tandem_requests_finished_total", "reason" => reason);
            let alias = labels.clone().map(|mut labels| {
                labels.push(("finished_reason", reason.to_owned()));
                counter!("vllm:request_success_total", &labels)
            });
            Tally(own, alias, AtomicU64::new(0))
        };
        let telemetry = Self {
            alias: alias.map(str::to_owned),
            running: Level(gauge!("tandem_requests_running"), alias_gauge("vllm:num_requests_running")),
            waiting: Level(gauge!("tandem_requests_waiting"), alias_gauge("vllm:num_requests_waiting")),
            kv_usage: Level(gauge!("tandem_kv_cache_usage_ratio"), alias_gauge("vllm:kv_cache_usage_perc")),
            ready: gauge!("tandem_ready"),
            prompt_tokens: tally("tandem_prompt_tokens_total", "vllm:prompt_tokens_total"),
            generation_tokens: tally("tandem_generation_tokens_total", "vllm:generation_tokens_total"),
            preemptions: tally("tandem_preemptions_total", "vllm:num_preemptions_total"),
            prefix_queries: tally("tandem_prefix_cache_queries_total", "vllm:prefix_cache_queries_total"),
            prefix_hits: tally("tandem_prefix_cache_hits_total", "vllm:prefix_cache_hits_total"),
            resumes: counter!("tandem_request_resumes_total"),
            outcomes: ["stop", "length", "abort", "error"].map(outcome),
            ttft: Spread(histogram!("tandem_time_to_first_token_seconds"), aliases(&["vllm:time_to_first_token_seconds"])),
            inter_token: Spread(
                histogram!("tandem_inter_token_latency_seconds"),
                aliases(&["vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"]),
            ),
            whole: Spread(histogram!("tandem_request_duration_seconds"), aliases(&["vllm:e2e_request_latency_seconds"])),
            queue: Spread(histogram!("tandem_request_queue_seconds"), aliases(&["vllm:request_queue_time_seconds"])),
            prefill: Spread(histogram!("tandem_request_prefill_seconds"), aliases(&["vllm:request_prefill_time_seconds"])),
            decode: Spread(histogram!("tandem_request_decode_seconds"), aliases(&["vllm:request_decode_time_seconds"])),
            inference: aliases(&["vllm:request_inference_time_seconds"]),
            per_token: aliases(&["vllm:request_time_per_output_token_seconds"]),
            request_prompt_tokens: Spread(histogram!("tandem_request_prompt_tokens"), aliases(&["vllm:request_prompt_tokens"])),
            request_generation_tokens: Spread(histogram!("tandem_request_generation_tokens"), aliases(&["vllm:request_generation_tokens"])),
            iteration_tokens: Spread(histogram!("tandem_iteration_tokens"), aliases(&["vllm:iteration_tokens_total"])),
            max_tokens: aliases(&["vllm:request_params_max_tokens"]),
            choices: aliases(&["vllm:request_params_n"]),
        };
        for outcome in &telemetry.outcomes {
            outcome.add(0);
        }
        telemetry.prompt_tokens.add(0);
        telemetry.generation_tokens.add(0);
        telemetry.preemptions.add(0);
        telemetry.prefix_queries.add(0);
        telemetry.prefix_hits.add(0);
        telemetry.resumes.increment(0);
        for reason in ["queue_full", "too_long", "draining", "not_ready", "invalid"] {
            counter!("tandem_admission_rejections_total", "reason" => reason).increment(0);
        }
        telemetry.levels(Counts::default(), None, false);
        telemetry
    }

    /// What holds now: requests by place, latent pool usage (0..=1), readiness.
    pub(crate) fn levels(&self, counts: Counts, kv_usage: Option<f64>, ready: bool) {
        self.running.set(counts.running as f64);
        self.waiting.set(counts.waiting as f64);
        self.ready.set(if ready { 1.0 } else { 0.0 });
        if let Some(usage) = kv_usage {
            self.kv_usage.set(usage);
        }
    }

    /// The choices of one API request were admitted, with these `max_tokens`.
    pub(crate) fn admitted(&self, max_tokens: &[u32]) {
        for histogram in &self.choices {
            histogram.record(max_tokens.len() as f64);
        }
        for histogram in &self.max_tokens {
            for max_tokens in max_tokens {
                histogram.record(f64::from(*max_tokens));
            }
        }
    }

    /// An API request was refused.
    pub(crate) fn rejected(&self, error: &AdmissionError) {
        let reason = match error {
            AdmissionError::QueueFull { .. } => "queue_full",
            AdmissionError::TooLong { .. } => "too_long",
            AdmissionError::Draining => "draining",
            AdmissionError::NotReady { .. } => "not_ready",
            AdmissionError::Invalid { .. } => "invalid",
        };
        counter!("tandem_admission_rejections_total", "reason" => reason).increment(1);
    }

    /// A worker computed a step of that many rows; 0 = it only said something.
    pub(crate) fn stepped(&self, rows: u32) {
        if rows > 0 {
            self.iteration_tokens.record(f64::from(rows));
        }
    }

    /// The latent pool of a worker that attached, as vLLM describes one.
    pub(crate) fn cache_config(&self, kv_tokens: u64) {
        if let Some(model) = &self.alias {
            let labels = [
                ("model_name", model.clone()),
                ("engine", "0".to_owned()),
                ("block_size", PAGE_TOKENS.to_string()),
                ("num_gpu_blocks", (kv_tokens / PAGE_TOKENS).to_string()),
            ];
            gauge!("vllm:cache_config_info", &labels).set(1.0);
        }
    }

    /// Tokens so far, as the counters have them.
    pub(crate) fn tokens(&self) -> Tokens {
        let value = |tally: &Tally| tally.2.load(Ordering::Relaxed);
        Tokens { prompt: value(&self.prompt_tokens), generated: value(&self.generation_tokens) }
    }

    /// A request went back into the queue with its journal.
    pub(crate) fn resumed(&self) {
        self.resumes.increment(1);
    }

    /// A worker took a request out of its batch for a while.
    pub(crate) fn preempted(&self) {
        self.preemptions.add(1);
    }
}

/// A worker is a member, or is no more.
pub(crate) fn worker_up(worker: &str, role: &'static str, up: bool, restart: bool) {
    gauge!("tandem_worker_up", "worker" => worker.to_owned(), "role" => role).set(if up { 1.0 } else { 0.0 });
    counter!("tandem_worker_restarts_total", "worker" => worker.to_owned()).increment(u64::from(restart));
    worker_busy(worker, 0.0);
}

/// The share of time that a worker's device was busy lately.
pub(crate) fn worker_busy(worker: &str, share: f64) {
    gauge!("tandem_worker_busy_ratio", "worker" => worker.to_owned()).set(share);
}

/// The version of the route table in force.
pub(crate) fn route_table(version: u32) {
    gauge!("tandem_route_table_version").set(f64::from(version));
}
