//! What a child's death means: a pure policy, without clock and processes.

use std::{fmt, process::ExitStatus, time::Duration};

use nix::sys::signal::Signal;

/// First pause before a restart; doubled for each further quick death.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// Longest pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(10);
/// A life of this length wipes the count of quick deaths.
const GOOD_LIFE: Duration = Duration::from_secs(30);
/// Quick deaths before the instance was ever ready that are taken as "this will never start".
const START_ATTEMPTS: u32 = 3;

/// Why a child ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// It exited by itself.
    Exit(i32),
    /// A signal ended it.
    Signal(i32),
}

impl From<ExitStatus> for Cause {
    fn from(status: ExitStatus) -> Self {
        use std::os::unix::process::ExitStatusExt as _;
        match (status.code(), status.signal()) {
            (Some(code), _) => Self::Exit(code),
            (None, Some(signal)) => Self::Signal(signal),
            (None, None) => Self::Exit(-1),
        }
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Exit(code) => write!(f, "exited with code {code}"),
            Self::Signal(number) => match Signal::try_from(number) {
                Ok(Signal::SIGKILL) => f.write_str("was killed by SIGKILL (by hand, or by the kernel for want of memory: see dmesg)"),
                Ok(signal) => write!(f, "was killed by {signal}"),
                Err(_) => write!(f, "was killed by signal {number}"),
            },
        }
    }
}

/// What to do about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Start it again after a pause.
    Restart(Duration),
    /// It will not start: end the instance.
    GiveUp,
}

/// The history of one child.
#[derive(Clone, Copy, Debug, Default)]
pub struct History {
    quick_deaths: u32,
}

impl History {
    /// Judges a death after a life of `lived`. `was_ready` says whether the instance has ever been ready. A child that exits by
    /// itself before that has said why: nothing changes by trying again. One that was killed may come back.
    pub fn died(&mut self, cause: Cause, lived: Duration, was_ready: bool) -> Verdict {
        if lived >= GOOD_LIFE {
            self.quick_deaths = 0;
        }
        self.quick_deaths += 1;
        let hopeless = matches!(cause, Cause::Exit(_)) || self.quick_deaths >= START_ATTEMPTS;
        if !was_ready && hopeless {
            return Verdict::GiveUp;
        }
        let doublings = (self.quick_deaths - 1).min(16);
        Verdict::Restart((FIRST_PAUSE * 2u32.pow(doublings)).min(LONGEST_PAUSE))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUICK: Duration = Duration::from_millis(20);

    #[test]
    fn an_exit_before_ready_is_final() {
        assert_eq!(History::default().died(Cause::Exit(78), QUICK, false), Verdict::GiveUp);
    }

    #[test]
    fn a_kill_before_ready_is_tried_again_but_not_for_ever() {
        let mut history = History::default();
        assert_eq!(history.died(Cause::Signal(9), QUICK, false), Verdict::Restart(Duration::from_millis(100)));
        assert_eq!(history.died(Cause::Signal(9), QUICK, false), Verdict::Restart(Duration::from_millis(200)));
        assert_eq!(history.died(Cause::Signal(9), QUICK, false), Verdict::GiveUp);
    }

    #[test]
    fn after_ready_it_is_tried_for_ever_with_longer_pauses() {
        let mut history = History::default();
        let mut last = Duration::ZERO;
        for _ in 0..100 {
            let Verdict::Restart(pause) = history.died(Cause::Exit(1), QUICK, true) else { panic!("gave up") };
            assert!(pause >= last && pause <= LONGEST_PAUSE);
            last = pause;
        }
        assert_eq!(last, LONGEST_PAUSE);
        assert_eq!(history.died(Cause::Exit(1), GOOD_LIFE, true), Verdict::Restart(FIRST_PAUSE));
    }

    #[test]
    fn causes_read_well() {
        assert_eq!(Cause::Exit(3).to_string(), "exited with code 3");
        assert_eq!(Cause::Signal(11).to_string(), "was killed by SIGSEGV");
        assert!(Cause::Signal(9).to_string().starts_with("was killed by SIGKILL"));
    }
}
