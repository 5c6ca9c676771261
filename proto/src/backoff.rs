//! When to try again: exponential with jitter, so that workers that lost one peer do not come back in step.

use std::time::Duration;

use rand::Rng;

/// The wait after `failures` earlier failures: `first` doubled each time up to `last`, times a random factor of 0.5 to 1.
pub(crate) fn wait(failures: u32, first: Duration, last: Duration) -> Duration {
    let doubled = first.saturating_mul(1u32.checked_shl(failures).unwrap_or(u32::MAX));
    doubled.min(last).mul_f64(rand::rng().random_range(0.5..1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grows_to_the_limit() {
        let (first, last) = (Duration::from_millis(10), Duration::from_millis(500));
        for (failures, ceiling) in [(0, 10), (1, 20), (3, 80), (9, 500), (31, 500), (32, 500), (u32::MAX, 500)] {
            let wait = wait(failures, first, last);
            let ceiling = Duration::from_millis(ceiling);
            assert!(wait >= ceiling / 2 && wait < ceiling, "{failures}: {wait:?}");
        }
    }
}
