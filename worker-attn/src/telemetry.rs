//! The worker's metrics: names, units and meaning.
//!
//! | name | kind | meaning |
//! |---|---|---|
//! | `tandem_step_seconds{phase}` | histogram | `plan`, `layers`, `masks` (waiting for them), `sample`, `emit`, `keep` (copies for the prefix cache) of one step |
//! | `tandem_step_rows{kind}` | histogram | rows of one step: `decode`, `prefill` |
//! | `tandem_layer_wait_seconds{side}` | histogram | `attention`: what a MoE layer waits for remote partials after its own work |
//! | `tandem_sequences{state}` | gauge | `running`, `waiting` |
//! | `tandem_kv_tokens{state}` | gauge | token places in pages: `used`, `total` |
//! | `tandem_prompt_tokens_total`, `tandem_generation_tokens_total` | counter | tokens prefilled, tokens sampled |
//! | `tandem_preemptions_total` | counter | sequences that made room for earlier ones |
//! | `tandem_prefix_cache_queries_total`, `tandem_prefix_cache_hits_total` | counter | tokens looked up at admission, tokens found |
//! | `tandem_prefix_cache_evictions_total{reason}` | counter | points given up: for `budget`, for `pages` |
//! | `tandem_prefix_cache_points`, `tandem_prefix_cache_bytes` | gauge | points kept, host memory of their copies |
//! | `tandem_prefix_cache_tokens` | gauge | token places in pages that only the cache holds |
//! | `tandem_preemption_snapshots_total` | counter | of these, sequences whose state was copied to host memory |
//! | `tandem_preemption_bytes` | gauge | host memory of such copies |
//! | `tandem_nan_rows_total` | counter | rows with a NaN or an infinity |
//! | `tandem_sequences_finished_total{reason}` | counter | `stop`, `length`, `cancelled`, `error` |

use std::time::Duration;

use metrics::{Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram};
use tandem_runtime::metrics::{Buckets, HOP};

/// Buckets of this crate's histograms, for [`tandem_runtime::metrics::install`].
pub const BUCKETS: &[Buckets] =
    &[Buckets { name: "tandem_layer_wait_seconds", bounds: HOP }, Buckets { name: tandem_proto::telemetry::DISPATCH_SECONDS, bounds: HOP }];

/// Registers help texts and units; call once after the recorder is installed.
pub fn describe() {
    tandem_proto::telemetry::describe();
    describe_histogram!("tandem_step_seconds", Unit::Seconds, "Time of one step of the attention worker by phase.");
    describe_histogram!("tandem_step_rows", "Rows of one step by kind.");
    describe_histogram!("tandem_layer_wait_seconds", Unit::Seconds, "Time a MoE layer waits for the other side.");
    describe_gauge!("tandem_sequences", "Sequences on the attention worker by state.");
    describe_gauge!("tandem_kv_tokens", "Token places in pages by state.");
    describe_counter!("tandem_prompt_tokens_total", "Prompt tokens prefilled (recomputed ones included).");
    describe_counter!("tandem_generation_tokens_total", "Tokens sampled.");
    describe_counter!("tandem_preemptions_total", "Sequences that made room for earlier ones because pages ran out.");
    describe_counter!(
        "tandem_preemption_snapshots_total",
        "Of these, sequences whose state was copied to host memory, not computed again."
    );
    describe_gauge!("tandem_preemption_bytes", Unit::Bytes, "Host memory of such copies.");
    describe_counter!("tandem_prefix_cache_queries_total", "Tokens of admitted sequences that the prefix cache was asked for.");
    describe_counter!("tandem_prefix_cache_hits_total", "Tokens of admitted sequences whose state came from the prefix cache.");
    describe_counter!("tandem_prefix_cache_evictions_total", "Points that the prefix cache gave up, by what their room was needed for.");
    describe_gauge!("tandem_prefix_cache_points", "Points that the prefix cache keeps.");
    describe_gauge!("tandem_prefix_cache_bytes", Unit::Bytes, "Host memory that the points take.");
    describe_gauge!("tandem_prefix_cache_tokens", "Token places in pages that only the prefix cache holds.");
    describe_counter!("tandem_nan_rows_total", "Rows that held a NaN or an infinity.");
    describe_counter!("tandem_sequences_finished_total", "Sequences ended by reason.");
}

/// A phase of a step.
pub fn phase(name: &'static str, took: Duration) {
    histogram!("tandem_step_seconds", "phase" => name).record(took);
}

/// Rows of a step.
pub fn rows(decode: usize, prefill: usize) {
    histogram!("tandem_step_rows", "kind" => "decode").record(decode as f64);
    histogram!("tandem_step_rows", "kind" => "prefill").record(prefill as f64);
}

/// The wait of a MoE layer.
pub fn layer_wait(took: Duration) {
    histogram!("tandem_layer_wait_seconds", "side" => "attention").record(took);
}

/// Sequences and pages after a step.
pub fn load(running: usize, waiting: usize, kv_used: usize, kv_total: usize) {
    gauge!("tandem_sequences", "state" => "running").set(running as f64);
    gauge!("tandem_sequences", "state" => "waiting").set(waiting as f64);
    gauge!("tandem_kv_tokens", "state" => "used").set(kv_used as f64);
    gauge!("tandem_kv_tokens", "state" => "total").set(kv_total as f64);
}

/// Tokens of a step.
pub fn tokens(prefilled: usize, sampled: usize) {
    counter!("tandem_prompt_tokens_total").increment(prefilled as u64);
    counter!("tandem_generation_tokens_total").increment(sampled as u64);
}

/// Preempted sequences.
pub fn preempted(count: usize) {
    counter!("tandem_preemptions_total").increment(count as u64);
}

/// Preempted sequences whose state was copied.
pub fn snapshots(count: usize) {
    counter!("tandem_preemption_snapshots_total").increment(count as u64);
}

/// Bytes of the copies of preempted sequences.
pub fn parked(bytes: u64) {
    gauge!("tandem_preemption_bytes").set(bytes as f64);
}

/// A sequence was admitted: tokens that the prefix cache was asked for, tokens that it had.
pub fn looked_up(queried: usize, hit: usize) {
    counter!("tandem_prefix_cache_queries_total").increment(queried as u64);
    counter!("tandem_prefix_cache_hits_total").increment(hit as u64);
}

/// The prefix cache gave up a point.
pub fn evicted(reason: &'static str) {
    counter!("tandem_prefix_cache_evictions_total", "reason" => reason).increment(1);
}

/// What the prefix cache holds: points, their bytes, token places that only it holds.
pub fn cached(points: usize, bytes: u64, tokens: usize) {
    gauge!("tandem_prefix_cache_points").set(points as f64);
    gauge!("tandem_prefix_cache_bytes").set(bytes as f64);
    gauge!("tandem_prefix_cache_tokens").set(tokens as f64);
}

/// Rows with a value that is not finite.
pub fn nan_rows(count: usize) {
    counter!("tandem_nan_rows_total").increment(count as u64);
}

/// A sequence ended.
pub fn finished(reason: &'static str) {
    counter!("tandem_sequences_finished_total", "reason" => reason).increment(1);
}
