//! The thread pool: the caller and its workers take numbered items of a job from one counter.
//!
//! Made for thousands of jobs of 5–500 µs per second: a worker spins for a short while after a job and then parks, the caller works
//! too and never waits for a worker that has not begun, and small jobs ([`Pool::run`]'s `work`) stay on the caller's thread. Which
//! thread runs an item never changes a result: items write disjoint places and each sums in its own fixed order.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use parking_lot::{Condvar, Mutex};

use super::affinity::Affinity;

/// Work below this (in multiply-adds, or what takes as long) is not worth waking anybody for: about 15 µs of one core.
const INLINE_WORK: usize = 150_000;
/// How long a worker without a job keeps looking before it sleeps.
const SPIN: Duration = Duration::from_micros(40);

/// What a job runs: (worker, item).
type Body<'a> = dyn Fn(usize, usize) + Sync + 'a;

/// A job that is being worked on. It lives on the caller's stack; see the safety note in [`Pool::run`].
#[derive(Clone, Copy)]
struct Job {
    body: *const Body<'static>,
    next: *const AtomicUsize,
    items: usize,
}

// SAFETY: the pointers are used only between registration and deregistration of a worker, during which `Pool::run` keeps them alive;
// what they point to is Sync.
unsafe impl Send for Job {}

#[derive(Default)]
struct Slot {
    job: Option<Job>,
    /// Workers inside the job.
    active: usize,
    /// Workers asleep.
    parked: usize,
    stop: bool,
}

struct Shared {
    slot: Mutex<Slot>,
    wake: Condvar,
    /// Changes with every job, for workers that spin.
    epoch: AtomicUsize,
    /// Workers inside the job, for the caller's wait without the lock.
    active: AtomicUsize,
    panicked: AtomicBool,
}

/// A fixed set of threads. Dropping it ends them.
pub(super) struct Pool {
    shared: Arc<Shared>,
    /// One job at a time.
    running: Mutex<()>,
    workers: Vec<JoinHandle<()>>,
    affinity: Affinity,
}

impl Pool {
    /// `threads` threads in all, the caller's included. Threads that cannot be started are done without.
    pub(super) fn new(threads: usize, affinity: Affinity) -> Self {
        let shared = Arc::new(Shared {
            slot: Mutex::new(Slot::default()),
            wake: Condvar::new(),
            epoch: AtomicUsize::new(0),
            active: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
        });
        let workers = (1..threads)
            .filter_map(|worker| {
                let shared = Arc::clone(&shared);
                let affinity = affinity.clone();
                let thread = std::thread::Builder::new().name(format!("cpu-{worker}")).spawn(move || {
                    affinity.bind(worker);
                    serve(&shared, worker);
                });
                thread.inspect_err(|e| tracing::warn!(worker, error = %e, "cannot start a compute thread; going on without it")).ok()
            })
            .collect();
        Self { shared, running: Mutex::new(()), workers, affinity }
    }

    /// Puts the calling thread, worker 0 of the jobs that it will run, on its core.
    pub(super) fn bind_caller(&self) {
        self.affinity.bind(0);
    }

    /// Threads that share a job, the caller included.
    pub(super) fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `body(worker, item)` once for each item below `items`, in any order, and returns when all are done. `worker` is below
    /// [`Pool::threads`] and belongs to one thread at a time. `work` is the whole job's size in multiply-adds.
    ///
    /// # Panics
    /// Where an item panicked.
    pub(super) fn run(&self, items: usize, work: usize, body: impl Fn(usize, usize) + Sync) {
        if items <= 1 || work < INLINE_WORK || self.workers.is_empty() {
            let _one = self.running.lock();
            for item in 0..items {
                body(0, item);
            }
            return;
        }
        let _one = self.running.lock();
        let next = AtomicUsize::new(0);
        let erased: &Body<'_> = &body;
        // SAFETY: only the lifetime is erased. Workers reach the job through `slot.job` alone and count themselves in `active` under
        // the lock; `Retire` takes the job out and waits until nobody is inside before `body` and `next` go out of scope, also when
        // this thread unwinds.
        let body_static = unsafe { std::mem::transmute::<*const Body<'_>, *const Body<'static>>(erased) };
        let parked = {
            let mut slot = self.shared.slot.lock();
            slot.job = Some(Job { body: body_static, next: &raw const next, items });
            slot.parked
        };
        self.shared.epoch.fetch_add(1, Ordering::Release);
        for _ in 0..parked.min(items - 1) {
            self.shared.wake.notify_one();
        }
        {
            let _retire = Retire(&self.shared);
            work_on(erased, &next, items, 0);
        }
        assert!(!self.shared.panicked.swap(false, Ordering::Relaxed), "a compute thread panicked");
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.slot.lock().stop = true;
        self.shared.epoch.fetch_add(1, Ordering::Release);
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            let _ = worker.join();
        }
    }
}

/// Ends a job: nobody may enter any more, and those inside are waited for.
struct Retire<'a>(&'a Shared);

impl Drop for Retire<'_> {
    fn drop(&mut self) {
        self.0.slot.lock().job = None;
        let mut spins = 0u32;
        while self.0.active.load(Ordering::Acquire) != 0 {
            spins += 1;
            if spins.is_multiple_of(2048) { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
    }
}

fn work_on(body: &Body<'_>, next: &AtomicUsize, items: usize, worker: usize) {
    loop {
        let item = next.fetch_add(1, Ordering::Relaxed);
        if item >= items {
            return;
        }
        body(worker, item);
    }
}

/// A worker's life.
fn serve(shared: &Shared, worker: usize) {
    let mut seen = 0;
    loop {
        spin_until_new(shared, seen);
        let job = {
            let mut slot = shared.slot.lock();
            loop {
                if slot.stop {
                    return;
                }
                let epoch = shared.epoch.load(Ordering::Acquire);
                match slot.job {
                    Some(job) => {
                        seen = epoch;
                        slot.active += 1;
                        shared.active.store(slot.active, Ordering::Release);
                        break job;
                    }
                    // A job came and went while nobody looked: spin again for the next.
                    None if epoch != seen => {
                        seen = epoch;
                        drop(slot);
                        spin_until_new(shared, seen);
                        slot = shared.slot.lock();
                    }
                    None => {
                        slot.parked += 1;
                        shared.wake.wait(&mut slot);
                        slot.parked -= 1;
                    }
                }
            }
        };
        let inside = Inside(shared);
        // SAFETY: this worker is counted in `active`, so `Pool::run` has not returned.
        let (body, next) = unsafe { (&*job.body, &*job.next) };
        if std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work_on(body, next, job.items, worker))).is_err() {
            shared.panicked.store(true, Ordering::Relaxed);
        }
        drop(inside);
    }
}

/// Leaves the job when dropped.
struct Inside<'a>(&'a Shared);

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        let mut slot = self.0.slot.lock();
        slot.active -= 1;
        self.0.active.store(slot.active, Ordering::Release);
    }
}

fn spin_until_new(shared: &Shared, seen: usize) {
    let end = Instant::now() + SPIN;
    loop {
        for _ in 0..64 {
            if shared.epoch.load(Ordering::Acquire) != seen {
                return;
            }
            std::hint::spin_loop();
        }
        if Instant::now() >= end {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_item_runs_once_whatever_the_threads() {
        for threads in [1, 2, 5] {
            let pool = Pool::new(threads, Affinity::default());
            for round in 0..200 {
                let counts: Vec<AtomicUsize> = (0..round % 37).map(|_| AtomicUsize::new(0)).collect();
                pool.run(counts.len(), usize::MAX, |worker, item| {
                    assert!(worker < threads);
                    counts[item].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn two_callers_take_turns() {
        let pool = Pool::new(3, Affinity::default());
        std::thread::scope(|s| {
            for _ in 0..2 {
                s.spawn(|| {
                    for _ in 0..100 {
                        let sum = AtomicUsize::new(0);
                        pool.run(10, usize::MAX, |_, i| {
                            sum.fetch_add(i, Ordering::Relaxed);
                        });
                        assert_eq!(sum.into_inner(), 45);
                    }
                });
            }
        });
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        let pool = Pool::new(2, Affinity::default());
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            pool.run(8, usize::MAX, |_, i| assert!(i != 3));
        }));
        assert!(caught.is_err());
        pool.run(4, usize::MAX, |_, _| {});
    }
}
