//! Metrics of an expert worker, and the counters behind its heartbeats.

use std::time::Duration;

use metrics::{Counter, Gauge, Histogram, Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram};
use tandem_runtime::metrics::{Buckets, HOP};

/// Buckets of this crate's histograms, for [`tandem_runtime::metrics::install`].
pub const BUCKETS: &[Buckets] = &[Buckets { name: "tandem_expert_compute_seconds", bounds: HOP }];

/// Says what each metric means.
pub fn describe() {
    tandem_proto::telemetry::describe();
    describe_counter!("tandem_expert_rows_total", Unit::Count, "Rows whose partial was computed, each shard counted.");
    describe_counter!("tandem_expert_dispatches_total", Unit::Count, "Dispatches computed, whole or in parts.");
    describe_counter!("tandem_expert_failures_total", Unit::Count, "Dispatches answered with an error.");
    describe_histogram!(
        "tandem_expert_compute_seconds",
        Unit::Seconds,
        "Time in the grouped FFN per joined batch; its sum is the busy time."
    );
    describe_histogram!("tandem_expert_batch_rows", Unit::Count, "Rows per joined batch.");
    describe_histogram!("tandem_expert_batch_experts", Unit::Count, "Different experts per joined batch: what is read from memory.");
    describe_gauge!("tandem_expert_loaded_bytes", Unit::Bytes, "Bytes of expert weights in memory.");
    describe_gauge!("tandem_expert_weight_bytes", Unit::Bytes, "Bytes of expert weights that this worker is to hold.");
    describe_gauge!("tandem_expert_connections", Unit::Count, "Attention workers connected now.");
}

/// Handles of the metrics of the hot path: looked up once.
pub struct Telemetry {
    rows: Counter,
    dispatches: Counter,
    failures: Counter,
    compute: Histogram,
    batch_rows: Histogram,
    batch_experts: Histogram,
}

impl Telemetry {
    /// Looks the handles up in the process's recorder.
    pub fn new() -> Self {
        Self {
            rows: counter!("tandem_expert_rows_total"),
            dispatches: counter!("tandem_expert_dispatches_total"),
            failures: counter!("tandem_expert_failures_total"),
            compute: histogram!("tandem_expert_compute_seconds"),
            batch_rows: histogram!("tandem_expert_batch_rows"),
            batch_experts: histogram!("tandem_expert_batch_experts"),
        }
    }

    /// A joined batch of one shard was computed.
    pub fn batch(&self, rows: usize, dispatches: usize, experts: usize, took: Duration) {
        self.rows.increment(rows as u64);
        self.dispatches.increment(dispatches as u64);
        self.compute.record(took.as_secs_f64());
        self.batch_rows.record(rows as f64);
        self.batch_experts.record(experts as f64);
    }

    /// `failed` dispatches got an error.
    pub fn answered(&self, failed: usize) {
        if failed > 0 {
            self.failures.increment(failed as u64);
        }
    }
}

impl Default for Telemetry {
    fn default() -> Self {
        Self::new()
    }
}

/// Gauges that the service keeps up to date.
pub struct Gauges {
    /// Bytes in memory.
    pub loaded: Gauge,
    /// Bytes to hold.
    pub total: Gauge,
    /// Connected attention workers.
    pub connections: Gauge,
}

impl Gauges {
    /// Looks the handles up in the process's recorder.
    pub fn new() -> Self {
        Self {
            loaded: gauge!("tandem_expert_loaded_bytes"),
            total: gauge!("tandem_expert_weight_bytes"),
            connections: gauge!("tandem_expert_connections"),
        }
    }
}

impl Default for Gauges {
    fn default() -> Self {
        Self::new()
    }
}
