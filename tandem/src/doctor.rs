//! `tandem doctor`: what this machine is, and whether its loopback is fit for hops.

use std::{
    fmt,
    io::{self, Read, Write},
    net::{TcpListener, TcpStream},
    num::NonZeroUsize,
    thread,
    time::{Duration, Instant},
};

use serde::Serialize;

use tandem_runtime::memory;

use crate::{bytes::gib, cli::DoctorArgs, failure::Failure, output, probe};

/// Size of one hop's payload of a decode row: hidden 4096 in bf16.
const PAYLOAD: usize = 8192;
/// Frame header before it (`tandem-proto`).
const HEADER: usize = 64;
/// Above this a hop waits for a timer, not for data: delayed acknowledgements against Nagle's algorithm cost 40 ms.
const STALLED: Duration = Duration::from_millis(10);

#[derive(Serialize)]
struct Findings {
    version: &'static str,
    cores: usize,
    cpu: Option<String>,
    instruction_sets: Vec<&'static str>,
    memory_free_bytes: Option<u64>,
    /// All cores together, from memory.
    memory_read_gb_per_s: f64,
    /// NVIDIA GPUs, or why there are none to use.
    cuda: Vec<String>,
    /// 8 KiB each way, TCP_NODELAY on both sides.
    loopback_p50_us: f64,
    loopback_p99_us: f64,
    /// The same without TCP_NODELAY: what a forgotten option would cost here.
    loopback_nagle_p50_us: f64,
    problems: Vec<String>,
}

/// Looks and prints.
///
/// # Errors
/// When loopback cannot be used, or a problem was found.
pub fn run(args: DoctorArgs) -> Result<(), Failure> {
    let failed = |error: io::Error| Failure::unavailable(format!("cannot measure loopback: {error}"));
    let fast = round_trips(true, 400).map_err(failed)?;
    let slow = round_trips(false, 20).map_err(failed)?;
    let mut findings = Findings {
        version: env!("CARGO_PKG_VERSION"),
        cores: thread::available_parallelism().map_or(1, NonZeroUsize::get),
        cpu: cpu_model(),
        instruction_sets: instruction_sets(),
        memory_free_bytes: memory::free().map(|free| free.bytes),
        memory_read_gb_per_s: probe::read_bandwidth() / 1e9,
        cuda: cuda(),
        loopback_p50_us: micros(percentile(&fast, 50)),
        loopback_p99_us: micros(percentile(&fast, 99)),
        loopback_nagle_p50_us: micros(percentile(&slow, 50)),
        problems: Vec::new(),
    };
    if percentile(&fast, 50) > STALLED {
        findings.problems.push("a round trip with TCP_NODELAY takes over 10 ms: something on this machine delays loopback packets".into());
    }
    if cfg!(target_arch = "x86_64") && !findings.instruction_sets.contains(&"avx2") {
        findings.problems.push("no AVX2: the portable kernels run, several times slower".into());
    }
    if findings.cores < 2 {
        findings.problems.push("one core: attention and expert workers take turns on it".into());
    }
    if args.json {
        let json = serde_json::to_string(&findings).map_err(|error| Failure::internal(error.to_string()))?;
        output::print(&format!("{json}\n"))?;
    } else {
        output::print(&findings.to_string())?;
    }
    if findings.problems.is_empty() { Ok(()) } else { Err(Failure::unavailable(format!("{} problem(s) found", findings.problems.len()))) }
}

impl fmt::Display for Findings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "tandem        {}", self.version)?;
        writeln!(f, "cpu           {} ({} cores for this process)", self.cpu.as_deref().unwrap_or("unknown"), self.cores)?;
        writeln!(f, "instructions  {}", self.instruction_sets.join(" "))?;
        if let Some(bytes) = self.memory_free_bytes {
            writeln!(f, "memory        {} GiB free", gib(bytes))?;
        }
        writeln!(f, "              {:.1} GB/s read by all cores", self.memory_read_gb_per_s)?;
        for device in &self.cuda {
            writeln!(f, "gpu           {device}")?;
        }
        writeln!(f, "loopback      8 KiB round trip {:.0} us p50, {:.0} us p99", self.loopback_p50_us, self.loopback_p99_us)?;
        writeln!(f, "              {:.0} us p50 without TCP_NODELAY (Tandem sets it on both sides)", self.loopback_nagle_p50_us)?;
        for problem in &self.problems {
            writeln!(f, "problem       {problem}")?;
        }
        if self.problems.is_empty() { writeln!(f, "no problems found") } else { Ok(()) }
    }
}

/// The GPUs and whether kernels can be compiled; that there are none is no problem.
fn cuda() -> Vec<String> {
    use tandem_kernels::cuda::probe;
    match probe::devices() {
        Ok(found) if found.is_empty() => vec!["none (the CUDA driver sees no device)".to_owned()],
        Ok(found) => {
            let nvrtc =
                if probe::has_nvrtc() { "NVRTC compiles kernels" } else { "no NVRTC: only kernels of a pack or the cache can be used" };
            let driver = found[0].driver;
            found.iter().map(ToString::to_string).chain([format!("driver for CUDA {driver}; {nvrtc}")]).collect()
        }
        Err(error) => vec![format!("none to use: {error}")],
    }
}

fn cpu_model() -> Option<String> {
    let info = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = info.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

fn instruction_sets() -> Vec<&'static str> {
    #[cfg(target_arch = "x86_64")]
    {
        let mut found = vec!["x86-64"];
        macro_rules! look { ($($name:tt),*) => { $(if std::arch::is_x86_feature_detected!($name) { found.push($name); })* } }
        look!("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vnni", "avx512bf16", "avxvnni");
        found
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        vec![std::env::consts::ARCH]
    }
}

/// The median round trip of a decode row over this machine's loopback, TCP_NODELAY on both sides.
///
/// # Errors
/// No loopback.
pub fn loopback() -> io::Result<Duration> {
    round_trips(true, 200).map(|times| percentile(&times, 50))
}

/// Times `count` exchanges of a header and a payload, written separately as a careless sender would.
fn round_trips(nodelay: bool, count: usize) -> io::Result<Vec<Duration>> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let addr = listener.local_addr()?;
    let echo = thread::spawn(move || -> io::Result<()> {
        let (mut stream, _) = listener.accept()?;
        stream.set_nodelay(nodelay)?;
        let mut message = vec![0u8; HEADER + PAYLOAD];
        for _ in 0..count {
            stream.read_exact(&mut message)?;
            stream.write_all(&message[..HEADER])?;
            stream.write_all(&message[HEADER..])?;
        }
        Ok(())
    });
    let mut stream = TcpStream::connect(addr)?;
    stream.set_nodelay(nodelay)?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    let mut message = vec![0u8; HEADER + PAYLOAD];
    let mut times = Vec::with_capacity(count);
    for _ in 0..count {
        let start = Instant::now();
        stream.write_all(&message[..HEADER])?;
        stream.write_all(&message[HEADER..])?;
        stream.read_exact(&mut message)?;
        times.push(start.elapsed());
    }
    echo.join().map_err(|_| io::Error::other("the echo thread failed"))??;
    times.sort_unstable();
    Ok(times)
}

/// Nearest-rank percentile of ascending times.
fn percentile(times: &[Duration], percent: usize) -> Duration {
    let rank = (times.len() * percent).div_ceil(100).max(1);
    times.get(rank - 1).copied().unwrap_or_default()
}

fn micros(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_nearest_rank() {
        let times: Vec<Duration> = (1..=100).map(Duration::from_micros).collect();
        assert_eq!(percentile(&times, 50), Duration::from_micros(50));
        assert_eq!(percentile(&times, 99), Duration::from_micros(99));
        assert_eq!(percentile(&times[..1], 99), Duration::from_micros(1));
        assert_eq!(percentile(&[], 50), Duration::ZERO);
    }

    #[test]
    fn loopback_echoes() {
        assert_eq!(round_trips(true, 5).expect("loopback works").len(), 5);
    }
}
