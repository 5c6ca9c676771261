//! `cargo bench -p tandem-kernels`: the ops of the CPU backend at the release's sizes, as a table.
//!
//! Weights rotate over more memory than any cache (1.25 GiB). Read bandwidth is measured by the same number of threads between the rounds
//! of each entry, so that a share compares like with like on a machine that others use too. Arguments: `--isa portable|avx2|avx512`,
//! `--threads N`, `--precision f32|bf16`, `--on-core` (count time on the core, not the wall's; for one thread), and words that an entry's group must
//! contain.

mod measure;
mod ops;

use tandem_kernels::{
    Backend, Precision,
    cpu::{CpuBackend, CpuOptions, Isa},
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1);
    let (mut isa, mut threads, mut precision, mut words) = (None, None, Precision::Bf16, Vec::new());
    let mut clock = measure::Clock::Wall;
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--bench" => {}
            "--on-core" => clock = measure::Clock::OnCore,
            "--isa" => {
                let name = args.next().unwrap_or_default();
                isa = Isa::available().iter().copied().find(|i| i.to_string() == name);
                isa.ok_or_else(|| format!("--isa {name}: this CPU has {:?}", Isa::available()))?;
            }
            "--threads" => threads = Some(args.next().unwrap_or_default().parse()?),
            "--precision" => precision = if args.next().as_deref() == Some("f32") { Precision::F32 } else { Precision::Bf16 },
            word => words.push(word.to_owned()),
        }
    }
    let backend = CpuBackend::new(CpuOptions { threads, isa, ..CpuOptions::new(precision) })?;
    let threads = backend.threads();
    let memory = ops::Memory::new(1280 << 20);
    let lanes = backend.isa().lanes();
    println!("{} ({precision})", backend.device().description);
    let read = measure::median((0..measure::ROUNDS).map(|_| measure::read_bandwidth(clock, memory.bytes(), threads)).collect());
    let peak = measure::median((0..measure::ROUNDS).map(|_| measure::fma_peak(clock, threads, lanes)).collect());
    println!("read bandwidth {read:.1} GB/s, FMA peak of {lanes} lanes {peak:.0} GFLOP/s, {threads} threads\n");
    println!("| {:<44} | {:>10} | {:>6} | {:>6} | {:>8} | {:>6} |", "op", "µs", "GB/s", "read", "GFLOP/s", "FMA");
    println!("|{:-<46}|{:->12}|{:->8}|{:->8}|{:->10}|{:->8}|", "", "", "", "", "", "");
    let wanted = |group: &str| words.is_empty() || words.iter().any(|w| group.contains(w.as_str()));
    for (group, run) in ops::GROUPS {
        if wanted(group) {
            run(&ops::Bench { backend: &backend, memory: &memory, clock })?;
        }
    }
    Ok(())
}
