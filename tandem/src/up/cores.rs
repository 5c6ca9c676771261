//! Shares a machine's cores out among the processes of one `tandem up`.

use crate::cli::values::Split;

/// What a worker process gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Compute threads.
    pub threads: u32,
    /// Microseconds to poll before sleeping.
    pub spin_us: u64,
}

/// Fewest cores at which polling pays: below that the poller takes the core that the other side computes on.
const SPIN_CORES: usize = 4;
/// Long enough to cover one layer's expert work of a small model, and far beyond the cost of a wake-up (20–25 µs).
const SPIN_US: u64 = 200;

/// The attention worker's share. It may use every core: while it computes, the expert workers mostly wait for it.
pub fn attention(cores: usize) -> Share {
    Share { threads: to_u32(cores), spin_us: spin(cores) }
}

/// One expert worker's share. Workers that hold layer ranges run one after the other, so each may use every core; workers that
/// hold parts of the same layer run at once and share them.
pub fn experts(cores: usize, split: Split, workers: usize) -> Share {
    let at_once = match split {
        Split::Layers => 1,
        Split::Experts | Split::Ffn => workers.max(1),
    };
    Share { threads: to_u32(cores / at_once), spin_us: spin(cores) }
}

fn spin(cores: usize) -> u64 {
    if cores >= SPIN_CORES { SPIN_US } else { 0 }
}

fn to_u32(threads: usize) -> u32 {
    u32::try_from(threads.max(1)).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_is_left_without_a_thread_and_small_machines_do_not_spin() {
        for cores in [1, 2, 3, 4, 64] {
            for workers in [0, 1, 2, 5, 100] {
                for split in [Split::Layers, Split::Experts, Split::Ffn] {
                    let share = experts(cores, split, workers);
                    assert!(share.threads >= 1 && share.threads as usize <= cores);
                    assert_eq!(share.spin_us == 0, cores < SPIN_CORES);
                }
            }
            assert_eq!(attention(cores).threads as usize, cores);
        }
        assert_eq!(experts(64, Split::Ffn, 4).threads, 16);
        assert_eq!(experts(64, Split::Layers, 4).threads, 64);
    }
}
