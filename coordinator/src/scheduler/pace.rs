//! How fast requests end, to tell a refused client when to come back.

use std::time::Duration;

/// Weight of the newest interval: a change of load shows after a handful of requests.
const NEWEST: f64 = 0.2;
const SHORTEST: Duration = Duration::from_secs(1);
const LONGEST: Duration = Duration::from_secs(30);

/// A running mean of the time between two ends.
#[derive(Debug, Default)]
pub(super) struct Pace {
    last: Option<Duration>,
    mean_seconds: Option<f64>,
}

impl Pace {
    /// A request ended.
    pub(super) fn ended(&mut self, now: Duration) {
        if let Some(last) = self.last.replace(now) {
            let interval = now.saturating_sub(last).as_secs_f64();
            self.mean_seconds = Some(self.mean_seconds.map_or(interval, |mean| mean + NEWEST * (interval - mean)));
        }
    }

    /// When the next place in the queue is likely to be free: whole seconds, since that is what `Retry-After` can say.
    pub(super) fn retry_after(&self) -> Duration {
        Duration::from_secs_f64(self.mean_seconds.unwrap_or(0.0).min(LONGEST.as_secs_f64()).ceil()).clamp(SHORTEST, LONGEST)
    }
}
