//! Shares a machine's cores out among the processes of one `tandem up`.

use nix::{
    sched::{CpuSet, sched_getaffinity},
    unistd::Pid,
};

use crate::cli::{
    args::ComputeArgs,
    values::{Cpus, Split},
};

/// What a worker process gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Share {
    /// Compute threads.
    pub threads: u32,
    /// Cores that they are pinned to.
    pub cpus: Cpus,
    /// Microseconds to poll before sleeping.
    pub spin_us: u64,
}

/// Fewest cores at which polling pays: below that the poller takes the core that the other side computes on.
const SPIN_CORES: usize = 4;
/// Long enough to cover one layer's expert work of a small model, and far beyond the cost of a wake-up (20–25 µs).
const SPIN_US: u64 = 200;

/// Microseconds to poll before sleeping, on a machine of so many cores.
pub fn spin_us(cores: usize) -> u64 {
    if cores >= SPIN_CORES { SPIN_US } else { 0 }
}

/// The shares of the attention worker and of each of `workers` expert workers.
///
/// The attention worker may use every core: while it computes, the expert workers mostly wait for it. Expert workers that hold layer
/// ranges run one after the other, so each may use every core too; those that hold parts of the same layer run at once and share them.
///
/// Processes that wait for each other in turns are pinned (`--cpus auto`): left alone, the scheduler runs two threads of one worker
/// on one core for a while when the other worker goes to sleep. Where a side polls, the threads that poll get cores of their own.
pub fn shares(args: &ComputeArgs, split: Split, workers: usize) -> (Share, Vec<Share>) {
    let cores = match &args.cpus {
        Cpus::List(cpus) => cpus.clone(),
        Cpus::Auto | Cpus::None => allowed(),
    };
    // Instances that run beside each other begin at different cores.
    let first = if matches!(args.cpus, Cpus::Auto) { std::process::id() as usize % cores.len().max(1) } else { 0 };
    share_out(args, &turned(&cores, first, cores.len()), split, workers)
}

fn share_out(args: &ComputeArgs, cores: &[usize], split: Split, workers: usize) -> (Share, Vec<Share>) {
    let at_once = match split {
        Split::Layers => 1,
        Split::Experts | Split::Ffn => workers.max(1),
    };
    let of = |parts: usize| args.threads.unwrap_or_else(|| u32::try_from((cores.len() / parts).max(1)).unwrap_or(u32::MAX));
    let spin_us = args.spin_us.unwrap_or_else(|| spin_us(cores.len()));
    let share = |threads: u32, first: usize| {
        let cpus = match args.cpus {
            Cpus::None => Cpus::None,
            Cpus::Auto if workers == 0 => Cpus::None,
            Cpus::Auto | Cpus::List(_) => Cpus::List(turned(cores, first, threads as usize)),
        };
        Share { threads, cpus, spin_us }
    };
    let (attention, experts) = (of(1), of(at_once));
    let after = match attention as usize {
        few if few < cores.len() => few,
        _ => usize::from(spin_us > 0),
    };
    let expert = |worker: usize| share(experts, after + worker % at_once * experts as usize);
    (share(attention, 0), (0..workers).map(expert).collect())
}

/// At most `count` of the cores, from `first` on, around the end.
fn turned(cores: &[usize], first: usize, count: usize) -> Vec<usize> {
    cores.iter().cycle().skip(first % cores.len().max(1)).take(count.min(cores.len())).copied().collect()
}

/// The cores that this process may run on; as many as the system reports where it does not say which.
fn allowed() -> Vec<usize> {
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZeroUsize::get);
    // A CPU quota allows less time than there are cores: no more threads than that.
    sched_getaffinity(Pid::from_raw(0)).map_or_else(
        |_| (0..cores).collect(),
        |set| (0..CpuSet::count()).filter(|cpu| set.is_set(*cpu).unwrap_or(false)).take(cores).collect(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPLITS: [Split; 3] = [Split::Layers, Split::Experts, Split::Ffn];

    fn args(threads: Option<u32>, cpus: Cpus) -> ComputeArgs {
        ComputeArgs { threads, cpus, allow_paging: false, spin_us: None }
    }

    fn list(share: &Share) -> &[usize] {
        match &share.cpus {
            Cpus::List(cpus) => cpus,
            other => panic!("not pinned: {other}"),
        }
    }

    #[test]
    fn nobody_is_left_without_a_thread_and_small_machines_do_not_spin() {
        for n in [1usize, 2, 3, 4, 64] {
            let cores: Vec<usize> = (10..10 + n).collect();
            for workers in [0, 1, 2, 5, 100] {
                for split in SPLITS {
                    let (attention, experts) = share_out(&args(None, Cpus::Auto), &cores, split, workers);
                    assert_eq!((attention.threads as usize, experts.len()), (n, workers));
                    for share in experts.iter().chain([&attention]) {
                        assert!(share.threads >= 1 && share.threads as usize <= n);
                        assert_eq!(share.spin_us == 0, n < SPIN_CORES);
                        if workers == 0 {
                            assert_eq!(share.cpus, Cpus::None);
                        } else {
                            let mut cpus = list(share).to_vec();
                            assert_eq!(cpus.len(), share.threads as usize);
                            cpus.sort_unstable();
                            cpus.dedup();
                            assert_eq!(cpus.len(), share.threads as usize, "a core twice");
                            assert!(cpus.iter().all(|cpu| cores.contains(cpu)));
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn workers_of_one_layer_get_cores_of_their_own_and_pollers_do_not_meet() {
        let eight: Vec<usize> = (0..8).collect();
        let (attention, experts) = share_out(&args(None, Cpus::Auto), &eight, Split::Ffn, 2);
        assert_eq!(list(&attention), eight);
        assert_eq!((list(&experts[0]), list(&experts[1])), (&[1, 2, 3, 4][..], &[5, 6, 7, 0][..]));
        let (attention, experts) = share_out(&args(None, Cpus::Auto), &[0, 1], Split::Layers, 2);
        assert_eq!((list(&attention), list(&experts[0]), list(&experts[1])), (&[0, 1][..], &[0, 1][..], &[0, 1][..]));
    }

    #[test]
    fn fewer_threads_than_cores_stay_apart() {
        let (attention, experts) = share_out(&args(Some(1), Cpus::Auto), &[0, 1], Split::Layers, 1);
        assert_eq!((list(&attention), list(&experts[0])), (&[0][..], &[1][..]));
    }

    #[test]
    fn none_pins_nothing_and_a_list_is_kept_to() {
        let (attention, experts) = shares(&args(None, Cpus::None), Split::Layers, 1);
        assert_eq!((&attention.cpus, &experts[0].cpus), (&Cpus::None, &Cpus::None));
        let (attention, experts) = shares(&args(None, Cpus::List(vec![7, 3])), Split::Layers, 1);
        assert_eq!((attention.threads, list(&attention), list(&experts[0])), (2, &[7, 3][..], &[7, 3][..]));
    }
}
