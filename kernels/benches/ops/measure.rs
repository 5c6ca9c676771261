//! What the table is measured against, and how: read bandwidth and FMA rate of the same threads in the same run.

use std::{
    hint::black_box,
    time::{Duration, Instant},
};

/// Rounds per entry; the median counts.
pub const ROUNDS: usize = 9;

/// Time to measure by: the wall's, or what this thread spent on a core (with one thread, on a machine that is busy with other things).
#[derive(Clone, Copy)]
pub enum Clock {
    Wall,
    OnCore,
}

impl Clock {
    fn now(self, start: Instant) -> f64 {
        match self {
            Self::Wall => start.elapsed().as_secs_f64(),
            Self::OnCore => on_core(),
        }
    }
}

/// Seconds that this thread spent on a core.
#[cfg(target_os = "linux")]
fn on_core() -> f64 {
    #[repr(C)]
    struct Timespec {
        seconds: i64,
        nanos: i64,
    }
    unsafe extern "C" {
        fn clock_gettime(clock: i32, time: *mut Timespec) -> i32;
    }
    const THREAD_CPUTIME: i32 = 3;
    let mut time = Timespec { seconds: 0, nanos: 0 };
    // SAFETY: the libc call of 64-bit Linux, with a place to write to.
    let ok = unsafe { clock_gettime(THREAD_CPUTIME, &mut time) } == 0;
    if ok { time.seconds as f64 + time.nanos as f64 / 1e9 } else { f64::NAN }
}

#[cfg(not(target_os = "linux"))]
fn on_core() -> f64 {
    f64::NAN
}

/// Middle value.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Runs `f` on as many threads, and returns the time from the common start to the last end.
fn together(clock: Clock, threads: usize, f: impl Fn(usize) + Sync) -> Duration {
    if threads == 1 {
        let epoch = Instant::now();
        let begin = clock.now(epoch);
        f(0);
        return Duration::from_secs_f64(clock.now(epoch) - begin);
    }
    let start = std::sync::Barrier::new(threads + 1);
    std::thread::scope(|s| {
        let handles: Vec<_> = (0..threads)
            .map(|t| {
                let (f, start) = (&f, &start);
                s.spawn(move || {
                    start.wait();
                    let begin = Instant::now();
                    f(t);
                    (begin, Instant::now())
                })
            })
            .collect();
        start.wait();
        let spans: Vec<_> = handles.into_iter().filter_map(|h| h.join().ok()).collect();
        let first = spans.iter().map(|s| s.0).min();
        let last = spans.iter().map(|s| s.1).max();
        first.zip(last).map_or(Duration::ZERO, |(a, b)| b - a)
    })
}

/// GB/s of reading `bytes` once with all threads.
pub fn read_bandwidth(clock: Clock, bytes: &[u8], threads: usize) -> f64 {
    let part = bytes.len() / threads / (64 << 10) * (64 << 10);
    let took = together(clock, threads, |t| {
        let mut acc = [0u64; 16];
        // Four streams at a time, which reads faster than one.
        for block in bytes[t * part..(t + 1) * part].chunks_exact(64 << 10) {
            let (a, rest) = block.split_at(16 << 10);
            let (b, rest) = rest.split_at(16 << 10);
            let (c, d) = rest.split_at(16 << 10);
            let lines = [a, b, c, d].map(|s| s.as_chunks::<128>().0);
            for (((a, b), c), d) in lines[0].iter().zip(lines[1]).zip(lines[2]).zip(lines[3]) {
                for line in [a, b, c, d] {
                    for (a, v) in acc.iter_mut().zip(line.as_chunks::<8>().0) {
                        *a = a.wrapping_add(u64::from_ne_bytes(*v));
                    }
                }
            }
        }
        black_box(acc);
    });
    (part * threads) as f64 / took.as_secs_f64() / 1e9
}

/// GFLOP/s of independent fused multiply-adds in registers with all threads.
pub fn fma_peak(clock: Clock, threads: usize, lanes: usize) -> f64 {
    const STEPS: usize = 1_000_000;
    let took = together(clock, threads, |_| fma_loop(lanes, STEPS));
    (threads * STEPS * CHAINS * lanes * 2) as f64 / took.as_secs_f64() / 1e9
}

const CHAINS: usize = 12;

#[cfg(target_arch = "x86_64")]
fn fma_loop(lanes: usize, steps: usize) {
    use std::arch::x86_64::*;

    #[target_feature(enable = "avx2,fma")]
    fn avx2(steps: usize) {
        let (a, b) = (_mm256_set1_ps(black_box(0.999)), _mm256_set1_ps(black_box(1e-3)));
        let mut acc = [_mm256_setzero_ps(); CHAINS];
        for _ in 0..steps {
            for x in &mut acc {
                *x = _mm256_fmadd_ps(*x, a, b);
            }
        }
        black_box(acc);
    }

    #[target_feature(enable = "avx512f")]
    fn avx512(steps: usize) {
        let (a, b) = (_mm512_set1_ps(black_box(0.999)), _mm512_set1_ps(black_box(1e-3)));
        let mut acc = [_mm512_setzero_ps(); CHAINS];
        for _ in 0..steps {
            for x in &mut acc {
                *x = _mm512_fmadd_ps(*x, a, b);
            }
        }
        black_box(acc);
    }

    if lanes == 16 && is_x86_feature_detected!("avx512f") {
        // SAFETY: the feature was just seen.
        unsafe { avx512(steps) }
    } else if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
        // SAFETY: the features were just seen.
        unsafe { avx2(steps) }
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn fma_loop(lanes: usize, steps: usize) {
    let (a, b) = (black_box(0.999f32), black_box(1e-3f32));
    let mut acc = [0.0f32; CHAINS * 16];
    for _ in 0..steps {
        for x in &mut acc[..CHAINS * lanes] {
            *x = *x * a + b;
        }
    }
    black_box(acc);
}

/// One row of the table.
struct Entry {
    /// Op and shape.
    name: String,
    /// Median µs per call.
    micros: f64,
    /// GB/s of weights and state that one call must move; 0: not counted.
    gbs: f64,
    /// Share of the read bandwidth measured in the same rounds.
    share: f64,
    /// GFLOP/s; 0: not counted.
    gflops: f64,
    /// Share of the FMA rate measured in the same rounds.
    peak: f64,
}

/// Calls `op(i)` for i in `0..calls` per round and takes the median over the rounds. Between the rounds it reads `memory` and
/// multiplies in registers, for the shares.
pub fn entry(
    clock: Clock,
    name: impl Into<String>,
    memory: &[u8],
    (threads, lanes): (usize, usize),
    calls: usize,
    bytes: usize,
    flops: usize,
    mut op: impl FnMut(usize),
) {
    op(0);
    let (mut times, mut shares, mut peaks) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        let read = if bytes > 0 { read_bandwidth(clock, memory, threads) } else { f64::NAN };
        let peak = if flops > 0 { fma_peak(clock, threads, lanes) } else { f64::NAN };
        let epoch = Instant::now();
        let begin = clock.now(epoch);
        for i in 0..calls {
            op(i);
        }
        let seconds = (clock.now(epoch) - begin) / calls as f64;
        times.push(seconds);
        shares.push(bytes as f64 / seconds / 1e9 / read);
        peaks.push(flops as f64 / seconds / 1e9 / peak);
    }
    let seconds = median(times);
    let entry = Entry {
        name: name.into(),
        micros: seconds * 1e6,
        gbs: bytes as f64 / seconds / 1e9,
        share: if bytes > 0 { median(shares) } else { 0.0 },
        gflops: flops as f64 / seconds / 1e9,
        peak: if flops > 0 { median(peaks) } else { 0.0 },
    };
    let number = |v: f64, digits: usize| if v > 0.0 { format!("{v:.digits$}") } else { "–".to_owned() };
    let percent = |v: f64| if v > 0.0 { format!("{:.0} %", v * 100.0) } else { "–".to_owned() };
    println!(
        "| {:<44} | {:>10.1} | {:>6} | {:>6} | {:>8} | {:>6} |",
        entry.name,
        entry.micros,
        number(entry.gbs, 1),
        percent(entry.share),
        number(entry.gflops, 1),
        percent(entry.peak),
    );
}
