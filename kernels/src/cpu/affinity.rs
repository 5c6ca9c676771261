//! Which core each compute thread runs on.
//!
//! Two pools that share a machine's cores and wait for each other in turns want their threads pinned: left alone, the scheduler keeps
//! two busy threads of one pool on one core for milliseconds while the other core idles, which costs more than the hop between them.

use nix::{
    sched::{CpuSet, sched_getaffinity, sched_setaffinity},
    unistd::Pid,
};

/// Cores in the order of a pool's threads; none: the system places them.
#[derive(Clone, Debug, Default)]
pub(super) struct Affinity {
    cpus: Vec<usize>,
}

impl Affinity {
    /// # Errors
    /// A core that this process may not run on.
    pub(super) fn new(cpus: Vec<usize>) -> Result<Self, String> {
        if cpus.is_empty() {
            return Ok(Self::default());
        }
        let allowed = sched_getaffinity(Pid::from_raw(0)).map_err(|e| format!("cannot read the cores this process may run on: {e}"))?;
        let may = |cpu: usize| allowed.is_set(cpu).unwrap_or(false);
        match cpus.iter().find(|cpu| !may(**cpu)) {
            None => Ok(Self { cpus }),
            Some(cpu) => {
                let these: Vec<String> = (0..CpuSet::count()).filter(|cpu| may(*cpu)).map(|cpu| cpu.to_string()).collect();
                Err(format!("--cpus: core {cpu} is not one that this process may run on; these are: {}", these.join(",")))
            }
        }
    }

    /// As many threads as there are cores; `None` where the system places them.
    pub(super) fn threads(&self) -> Option<usize> {
        (!self.cpus.is_empty()).then_some(self.cpus.len())
    }

    /// Puts the calling thread on the core of the pool's thread `worker`; more threads than cores share them in turn.
    pub(super) fn bind(&self, worker: usize) {
        let Some(cpu) = self.cpus.get(worker % self.cpus.len().max(1)) else { return };
        let mut set = CpuSet::new();
        if let Err(error) = set.set(*cpu).and_then(|()| sched_setaffinity(Pid::from_raw(0), &set)) {
            tracing::warn!(cpu, %error, "cannot bind a compute thread to its core; going on without");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn now() -> Vec<usize> {
        let set = sched_getaffinity(Pid::from_raw(0)).expect("the kernel says");
        (0..CpuSet::count()).filter(|cpu| set.is_set(*cpu).expect("in range")).collect()
    }

    #[test]
    fn threads_sit_on_their_cores_in_turn() {
        std::thread::spawn(|| {
            let all = now();
            let mut turned = all.clone();
            turned.rotate_left(1);
            let affinity = Affinity::new(turned.clone()).expect("allowed cores");
            assert_eq!(affinity.threads(), Some(all.len()));
            for worker in 0..2 * all.len() {
                affinity.bind(worker);
                assert_eq!(now(), [turned[worker % all.len()]]);
            }
        })
        .join()
        .expect("no panic");
    }

    #[test]
    fn without_cores_nothing_is_bound() {
        let before = now();
        Affinity::new(Vec::new()).expect("nothing to refuse").bind(0);
        assert_eq!(now(), before);
    }

    #[test]
    fn a_core_that_is_not_there_is_named() {
        let error = Affinity::new(vec![0, CpuSet::count() + 5]).expect_err("no such core");
        assert!(error.contains(&format!("core {} is not one", CpuSet::count() + 5)), "{error}");
    }
}
