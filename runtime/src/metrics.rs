//! The process's Prometheus recorder.
//!
//! Names follow the Prometheus rules by themselves (`tandem_<what>_<unit>[_total]`); nothing is renamed here, so the name in the
//! code is the name in `/metrics`. Every histogram has explicit buckets: those registered by the role, else [`SECONDS`] for
//! names that end in `_seconds`, else [`COUNTS`]. Without that the exporter would render summaries.

use std::{sync::OnceLock, time::Duration};

use metrics::{Unit, describe_gauge, gauge};
use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};

/// Upper bounds of one histogram's buckets.
#[derive(Clone, Copy, Debug)]
pub struct Buckets {
    /// Exact metric name.
    pub name: &'static str,
    /// Ascending upper bounds in the metric's unit.
    pub bounds: &'static [f64],
}

/// Time to first token, as vLLM cuts it.
pub const TTFT: &[f64] =
    &[0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0];
/// Inter-token latency: vLLM's bounds, with finer ones below 10 ms.
pub const ITL: &[f64] = &[
    0.0005, 0.001, 0.002, 0.004, 0.006, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
];
/// Whole requests, queue and phase times, as vLLM cuts them.
pub const E2E: &[f64] =
    &[0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0];
/// One hop and its parts: 50 µs in steps of 1.5 to 0.1 s, with a few below for links that are faster than that.
pub const HOP: &[f64] = &[
    5e-6,
    1e-5,
    2e-5,
    3.5e-5,
    5e-5,
    7.5e-5,
    1.125e-4,
    1.6875e-4,
    2.53125e-4,
    3.796875e-4,
    5.695313e-4,
    8.542969e-4,
    1.2814453e-3,
    1.922168e-3,
    2.883252e-3,
    4.324878e-3,
    6.487317e-3,
    9.730976e-3,
    1.4596463e-2,
    2.1894695e-2,
    3.2842043e-2,
    4.9263064e-2,
    7.3894596e-2,
    0.1,
    1.0,
    10.0,
];
/// Any other duration.
pub const SECONDS: &[f64] =
    &[1e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0];
/// Rows, tokens and other counts: the 1-2-5 series.
pub const COUNTS: &[f64] = &[1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6];

/// Gives what `/metrics` shows. Cheap to clone.
#[derive(Clone)]
pub struct MetricsHandle {
    handle: PrometheusHandle,
}

impl std::fmt::Debug for MetricsHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("MetricsHandle")
    }
}

impl MetricsHandle {
    /// The text exposition format, with fresh process metrics.
    pub fn render(&self) -> String {
        crate::process::record_metrics();
        self.handle.render()
    }
}

/// The recorder could not be made.
#[derive(Debug, thiserror::Error)]
pub enum MetricsError {
    /// A bucket list is empty, or the process has another recorder already.
    #[error("cannot install the metrics recorder: {0}")]
    Install(#[from] BuildError),
}

static HANDLE: OnceLock<MetricsHandle> = OnceLock::new();

/// Installs the process-wide recorder with `buckets`. A second call returns the recorder that is there (its buckets stay), so a
/// role may call it at the start of its `run` whether or not another role of the same process did.
///
/// # Errors
/// When a bucket list is empty or another recorder is installed.
pub fn install(buckets: &[Buckets]) -> Result<MetricsHandle, MetricsError> {
    static INSTALLING: parking_lot::Mutex<()> = parking_lot::Mutex::new(());
    let _one = INSTALLING.lock();
    if let Some(handle) = HANDLE.get() {
        return Ok(handle.clone());
    }
    let mut builder = PrometheusBuilder::new().set_buckets(COUNTS)?.set_buckets_for_metric(Matcher::Suffix("_seconds".into()), SECONDS)?;
    for Buckets { name, bounds } in buckets {
        builder = builder.set_buckets_for_metric(Matcher::Full((*name).into()), bounds)?;
    }
    let handle = MetricsHandle { handle: builder.install_recorder()? };
    describe_gauge!("tandem_build_info", Unit::Count, "Always 1; the version of this process is in the label.");
    gauge!("tandem_build_info", "version" => env!("CARGO_PKG_VERSION")).set(1.0);
    crate::process::describe_metrics();
    let upkeep = handle.handle.clone();
    // Histogram samples wait in memory until somebody drains them: without a scraper that would be for ever.
    let _ = std::thread::Builder::new().name("metrics-upkeep".into()).spawn(move || {
        loop {
            std::thread::sleep(Duration::from_secs(5));
            upkeep.run_upkeep();
        }
    });
    Ok(HANDLE.get_or_init(|| handle).clone())
}

/// What `/metrics` shows now; empty before [`install`].
pub fn render() -> String {
    HANDLE.get().map(MetricsHandle::render).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use metrics::{counter, describe_counter, describe_histogram, histogram};

    use super::*;

    #[test]
    fn every_histogram_has_buckets_and_names_stay_as_written() {
        let handle = install(&[Buckets { name: "tandem_test_hop_seconds", bounds: HOP }]).expect("first install");
        describe_histogram!("tandem_test_hop_seconds", Unit::Seconds, "Test.");
        describe_counter!("tandem_test_rows_total", Unit::Count, "Test.");
        histogram!("tandem_test_hop_seconds").record(6e-6);
        histogram!("tandem_test_other_seconds").record(0.2);
        histogram!("tandem_test_rows").record(3.0);
        counter!("tandem_test_rows_total").increment(3);
        counter!("vllm:test_total").increment(1);
        let text = handle.render();
        assert!(text.contains("tandem_test_hop_seconds_bucket{le=\"0.00001\"} 1"), "{text}");
        assert!(text.contains("tandem_test_other_seconds_bucket{le=\"0.25\"} 1"), "{text}");
        assert!(text.contains("tandem_test_rows_bucket{le=\"5\"} 1"), "{text}");
        assert!(text.contains("\ntandem_test_rows_total 3"), "{text}");
        assert!(text.contains("\nvllm:test_total 1"), "{text}");
        assert!(text.contains("process_resident_memory_bytes"), "{text}");
        assert!(text.contains("tandem_build_info{version="), "{text}");
        install(&[]).expect("a second install gives the first recorder");
        assert!(render().contains("tandem_test_rows_total 3"));
    }
}
