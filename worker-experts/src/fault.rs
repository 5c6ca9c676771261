//! Deliberate faults, for tests of the failure model alone. Off unless [`crate::Config::fault`] is set (the binary reads the hidden
//! environment variable `TANDEM_TEST_FAULT`).
//!
//! In text: a kind and its conditions, e.g. `nan:row=1,rows=2`, `stall:ms=3000,step=4`, `fail:step=2,times=3`; before them, where only one
//! worker of several is meant, its name: `experts-1/exit:step=5,mark=/tmp/once`.
//!
//! | kind | what happens to a dispatch that meets the conditions |
//! |---|---|
//! | `nan` | row `row` of its partial (0 unless given) becomes NaN |
//! | `stall` | the worker sleeps `ms` milliseconds before it computes |
//! | `fail` | it is answered with an error |
//! | `exit` | the process ends at once, as after a kill |
//!
//! Conditions: `rows` = the dispatch has exactly that many rows; `step` = at least that many steps have begun since the start (1 = the
//! first); `layer` = that layer. A fault fires `times` times (1 unless given) per process; with `mark`, it fires only if it can make that file
//! anew, so that a worker that was started again does not end again.

use std::{fs::OpenOptions, path::PathBuf, str::FromStr, time::Duration};

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A row becomes NaN.
    NonFinite {
        /// Its place in the dispatch.
        row: usize,
    },
    /// The worker sleeps.
    Stall(Duration),
    /// The dispatch is answered with an error.
    Fail,
    /// The process ends.
    Exit,
}

/// A fault and when it fires.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Name of the worker that is meant; `None`: every one.
    pub worker: Option<String>,
    /// What goes wrong.
    pub kind: Kind,
    /// Exact number of rows of the dispatch.
    pub rows: Option<usize>,
    /// Number of steps that must have begun.
    pub step: u64,
    /// Layer.
    pub layer: Option<u16>,
    /// How often it fires.
    pub times: u32,
    /// A file that must not be there yet, and is made.
    pub mark: Option<PathBuf>,
}

impl Fault {
    /// Whether it fires for a dispatch; counts down [`Fault::times`] if so.
    pub fn fires(&mut self, steps: u64, layer: u16, rows: usize) -> Option<Kind> {
        let meets = self.times > 0
            && steps >= self.step
            && self.rows.is_none_or(|r| r == rows)
            && self.layer.is_none_or(|l| l == layer)
            && !matches!(self.kind, Kind::NonFinite { row } if row >= rows);
        let fresh = |mark: &PathBuf| OpenOptions::new().write(true).create_new(true).open(mark).is_ok();
        if !(meets && self.mark.as_ref().is_none_or(fresh)) {
            return None;
        }
        self.times -= 1;
        Some(self.kind)
    }
}

impl FromStr for Fault {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, conditions) = text.split_once(':').unwrap_or((text, ""));
        let (worker, name) = name.split_once('/').map_or((None, name), |(worker, name)| (Some(worker.to_owned()), name));
        let mut fault = Self { worker, kind: Kind::Fail, rows: None, step: 0, layer: None, times: 1, mark: None };
        let (mut row, mut ms) = (0, 1000);
        for part in conditions.split(',').filter(|p| !p.is_empty()) {
            let (key, value) = part.split_once('=').ok_or_else(|| format!("fault {text:?}: {part:?} needed key=value"))?;
            if key == "mark" {
                fault.mark = Some(value.into());
                continue;
            }
            let number: u32 = value.parse().map_err(|_| format!("fault {text:?}: {key} needed a number, got {value:?}"))?;
            match key {
                "row" => row = number as usize,
                "rows" => fault.rows = Some(number as usize),
                "step" => fault.step = u64::from(number),
                "layer" => fault.layer = Some(u16::try_from(number).map_err(|_| format!("fault {text:?}: layer {number} is too large"))?),
                "times" => fault.times = number,
                "ms" => ms = u64::from(number),
                _ => return Err(format!("fault {text:?}: needed row, rows, step, layer, times, ms or mark, got {key:?}")),
            }
        }
        fault.kind = match name {
            "nan" => Kind::NonFinite { row },
            "stall" => Kind::Stall(Duration::from_millis(ms)),
            "fail" => Kind::Fail,
            "exit" => Kind::Exit,
            _ => return Err(format!("fault {text:?}: needed nan, stall, fail or exit, got {name:?}")),
        };
        Ok(fault)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_parse_and_fire_as_often_as_told() {
        let mut fault: Fault = "nan:row=1,rows=2,step=3".parse().unwrap();
        assert_eq!(fault.fires(2, 5, 2), None, "too early");
        assert_eq!(fault.fires(3, 5, 1), None, "other rows");
        assert_eq!(fault.fires(3, 5, 2), Some(Kind::NonFinite { row: 1 }));
        assert_eq!(fault.fires(3, 5, 2), None, "once");
        assert_eq!("stall:ms=50".parse::<Fault>().unwrap().kind, Kind::Stall(Duration::from_millis(50)));
        let dir = tempfile::tempdir().unwrap();
        let text = format!("experts-1/fail:times=9,mark={}", dir.path().join("once").display());
        let mut once: Fault = text.parse().unwrap();
        assert_eq!(once.worker.as_deref(), Some("experts-1"));
        assert_eq!((once.fires(1, 3, 1), once.fires(1, 3, 1)), (Some(Kind::Fail), None), "the mark is there");
        assert!("melt".parse::<Fault>().unwrap_err().contains("needed nan, stall, fail or exit"));
        assert!("nan:row".parse::<Fault>().unwrap_err().contains("key=value"));
    }
}
