//! Norms and histograms of a matrix's values.

/// Bins of a histogram.
pub const BINS: usize = 12;

/// What a matrix's values look like.
#[derive(Clone, Debug)]
pub struct Stats {
    /// Root of the mean square of the finite values.
    pub rms: f64,
    /// Largest magnitude of the finite values.
    pub max: f64,
    /// Share of exact zeros, 0 to 1.
    pub zeros: f64,
    /// Values that are NaN or infinite.
    pub non_finite: usize,
    /// Shares of the values by |w| / RMS: bins of a quarter from 0 on; the last holds all above.
    pub histogram: [f64; BINS],
}

impl Stats {
    /// Of a matrix's values.
    pub fn of(values: &[f32]) -> Self {
        let finite = || values.iter().filter(|v| v.is_finite()).map(|v| f64::from(*v));
        let count = finite().count().max(1) as f64;
        let rms = (finite().map(|v| v * v).sum::<f64>() / count).sqrt();
        let mut histogram = [0.0; BINS];
        for v in finite() {
            let bin = (v.abs() / rms.max(f64::MIN_POSITIVE) * 4.0) as usize;
            histogram[bin.min(BINS - 1)] += 1.0 / count;
        }
        Self {
            rms,
            max: finite().fold(0.0, |max, v| max.max(v.abs())),
            zeros: values.iter().filter(|v| **v == 0.0).count() as f64 / values.len().max(1) as f64,
            non_finite: values.iter().filter(|v| !v.is_finite()).count(),
            histogram,
        }
    }

    /// Half the sum of the differences to another histogram: 0 for equal ones, 1 for disjoint ones.
    pub fn distance(&self, other: &[f64; BINS]) -> f64 {
        self.histogram.iter().zip(other).map(|(a, b)| (a - b).abs()).sum::<f64>() / 2.0
    }
}

/// ln of the square sum of each column of a row-major matrix.
pub(super) fn columns(values: &[f32], cols: usize) -> Vec<f64> {
    let mut sums = vec![0.0; cols];
    for row in values.chunks_exact(cols.max(1)) {
        sums.iter_mut().zip(row).for_each(|(s, v)| *s += f64::from(*v) * f64::from(*v));
    }
    sums.into_iter().map(log).collect()
}

/// ln of the square sum of each row.
pub(super) fn rows(values: &[f32], cols: usize) -> Vec<f64> {
    values.chunks_exact(cols.max(1)).map(|row| log(row.iter().map(|v| f64::from(*v) * f64::from(*v)).sum())).collect()
}

/// Finite for any sum: one bad value must not hide the rest.
fn log(sum: f64) -> f64 {
    sum.clamp(1e-30, 1e30).ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_what_is_there() {
        let s = Stats::of(&[0.0, 0.0, 3.0, -3.0, f32::NAN]);
        assert_eq!((s.non_finite, s.zeros, s.max), (1, 0.4, 3.0));
        assert!((s.rms - (18.0f64 / 4.0).sqrt()).abs() < 1e-12);
        assert!((s.histogram.iter().sum::<f64>() - 1.0).abs() < 1e-12);
        assert!((s.histogram[0] - 0.5).abs() < 1e-12 && (s.histogram[5] - 0.5).abs() < 1e-12, "{:?}", s.histogram);
        let far = Stats::of(&[1.0; 4]);
        assert!((s.distance(&far.histogram) - 1.0).abs() < 1e-12);
        let empty = Stats::of(&[]);
        assert_eq!((empty.rms, empty.zeros), (0.0, 0.0));
    }
}
