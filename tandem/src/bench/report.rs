//! Sums up the times of a measurement.

use std::{fmt, time::Duration};

use serde::Serialize;

/// What one request did.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sample {
    /// Tokens of the prompt.
    pub prompt_tokens: u32,
    /// Tokens received.
    pub output_tokens: u32,
    /// From sending to the first token.
    pub ttft: Duration,
    /// From sending to the last token.
    pub total: Duration,
    /// Times between one token and the next.
    pub gaps: Vec<Duration>,
}

/// Percentiles of one quantity, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Percentiles {
    /// Median.
    pub p50_ms: f64,
    /// 99th percentile (nearest rank).
    pub p99_ms: f64,
    /// Mean.
    pub mean_ms: f64,
}

impl Percentiles {
    fn of(mut times: Vec<Duration>) -> Self {
        times.sort_unstable();
        let rank = |percent: usize| {
            let index = (times.len() * percent).div_ceil(100).max(1) - 1;
            times.get(index).map_or(0.0, millis)
        };
        let mean = if times.is_empty() { 0.0 } else { times.iter().map(millis).sum::<f64>() / times.len() as f64 };
        Self { p50_ms: rank(50), p99_ms: rank(99), mean_ms: mean }
    }
}

fn millis(time: &Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// The result of a measurement.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// Requests that ended well.
    pub requests: usize,
    /// In flight at once.
    pub concurrency: u32,
    /// Prompt tokens of each.
    pub prompt_tokens: u32,
    /// Output tokens of each.
    pub output_tokens: u32,
    /// Wall time of the measurement.
    pub seconds: f64,
    /// Time to first token.
    pub ttft: Percentiles,
    /// Inter-token latency.
    pub itl: Percentiles,
    /// Output tokens per second over all requests and the whole wall time.
    pub output_tokens_per_second: f64,
    /// Decode speed of one request: tokens after the first, by the time from the first to the last; mean over requests.
    pub decode_tokens_per_second: f64,
    /// Prefill speed of one request: prompt tokens by the time to the first token (queueing included); mean over requests.
    pub prefill_tokens_per_second: f64,
}

impl Report {
    /// Sums up `samples`, taken in `wall` time.
    pub fn new(samples: &[Sample], concurrency: u32, wall: Duration) -> Self {
        let mean = |values: Vec<f64>| if values.is_empty() { 0.0 } else { values.iter().sum::<f64>() / values.len() as f64 };
        let decode = samples.iter().filter(|sample| sample.output_tokens > 1 && sample.total > sample.ttft);
        let decode = decode.map(|sample| f64::from(sample.output_tokens - 1) / (sample.total - sample.ttft).as_secs_f64()).collect();
        let prefill = samples.iter().filter(|sample| !sample.ttft.is_zero());
        let prefill = prefill.map(|sample| f64::from(sample.prompt_tokens) / sample.ttft.as_secs_f64()).collect();
        let output: u64 = samples.iter().map(|sample| u64::from(sample.output_tokens)).sum();
        Self {
            requests: samples.len(),
            concurrency,
            prompt_tokens: samples.first().map_or(0, |sample| sample.prompt_tokens),
            output_tokens: samples.first().map_or(0, |sample| sample.output_tokens),
            seconds: wall.as_secs_f64(),
            ttft: Percentiles::of(samples.iter().map(|sample| sample.ttft).collect()),
            itl: Percentiles::of(samples.iter().flat_map(|sample| sample.gaps.iter().copied()).collect()),
            output_tokens_per_second: output as f64 / wall.as_secs_f64().max(f64::EPSILON),
            decode_tokens_per_second: mean(decode),
            prefill_tokens_per_second: mean(prefill),
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "{} requests, {} at once, {} prompt + {} output tokens each, {:.2} s",
            self.requests, self.concurrency, self.prompt_tokens, self.output_tokens, self.seconds
        )?;
        writeln!(f, "time to first token   p50 {:>9.2} ms   p99 {:>9.2} ms", self.ttft.p50_ms, self.ttft.p99_ms)?;
        writeln!(f, "inter-token latency   p50 {:>9.2} ms   p99 {:>9.2} ms", self.itl.p50_ms, self.itl.p99_ms)?;
        writeln!(f, "prefill               {:>13.1} tok/s per request", self.prefill_tokens_per_second)?;
        writeln!(f, "decode                {:>13.1} tok/s per request", self.decode_tokens_per_second)?;
        write!(f, "output                {:>13.1} tok/s in all", self.output_tokens_per_second)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_right() {
        let ms = Duration::from_millis;
        let sample = |ttft| Sample { prompt_tokens: 100, output_tokens: 5, ttft: ms(ttft), total: ms(ttft + 40), gaps: vec![ms(10); 4] };
        let report = Report::new(&[sample(50), sample(200)], 2, Duration::from_secs(1));
        assert_eq!((report.requests, report.prompt_tokens, report.output_tokens), (2, 100, 5));
        assert_eq!((report.ttft.p50_ms, report.ttft.p99_ms), (50.0, 200.0));
        assert_eq!(report.itl.mean_ms, 10.0);
        assert!((report.decode_tokens_per_second - 100.0).abs() < 1e-9);
        assert!((report.prefill_tokens_per_second - (2000.0 + 500.0) / 2.0).abs() < 1e-9);
        assert!((report.output_tokens_per_second - 10.0).abs() < 1e-9);
    }

    #[test]
    fn nothing_measured_is_no_panic() {
        let report = Report::new(&[], 1, Duration::ZERO);
        assert_eq!(report.itl.p99_ms, 0.0);
        assert!(!report.to_string().is_empty());
    }
}
