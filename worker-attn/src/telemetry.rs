//! The worker's metrics: names, units and meaning.
//!
//! | name | kind | meaning |
//! |---|---|---|
//! | `tandem_step_seconds{phase}` | histogram | `plan`, `layers`, `sample`, `emit` of one step |
//! | `tandem_step_rows{kind}` | histogram | rows of one step: `decode`, `prefill` |
//! | `tandem_layer_wait_seconds{side}` | histogram | `attention`: what a MoE layer waits for remote partials after its own work |
//! | `tandem_sequences{state}` | gauge | `running`, `waiting` |
//! | `tandem_kv_tokens{state}` | gauge | token places in pages: `used`, `total` |
//! | `tandem_prompt_tokens_total`, `tandem_generation_tokens_total` | counter | tokens prefilled, tokens sampled |
//! | `tandem_preemptions_total` | counter | sequences sent back to be computed anew |
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
    describe_counter!("tandem_preemptions_total", "Sequences sent back to be computed anew because pages ran out.");
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

/// Rows with a value that is not finite.
pub fn nan_rows(count: usize) {
    counter!("tandem_nan_rows_total").increment(count as u64);
}

/// A sequence ended.
pub fn finished(reason: &'static str) {
    counter!("tandem_sequences_finished_total", "reason" => reason).increment(1);
}
