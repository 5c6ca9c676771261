//! Every kernel compiles for every architecture of a release, with NVRTC and without a GPU. Skipped aloud where NVRTC is not there;
//! with `TANDEM_REQUIRE_NVRTC` set (`.ci/kernels` does) that fails. `TANDEM_KERNEL_PACK_OUT` keeps the results as a pack.

#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "tests")]

use std::{
    path::PathBuf,
    sync::atomic::{AtomicUsize, Ordering},
};

use tandem_kernels::cuda::{
    compile::{ARCHITECTURES, Compiler, Places, UNITS, compile},
    probe,
};

#[test]
fn every_unit_compiles_for_every_architecture() {
    if !probe::has_nvrtc() {
        assert!(std::env::var_os("TANDEM_REQUIRE_NVRTC").is_none(), "NVRTC is required and not there");
        eprintln!("SKIPPED, no NVRTC: no kernel was compiled (.ci/kernels installs it)");
        return;
    }
    let pack = std::env::var_os("TANDEM_KERNEL_PACK_OUT").filter(|p| !p.is_empty()).map(PathBuf::from);
    let only = std::env::var("TANDEM_KERNEL_PACK_ARCH").ok();
    let archs = ARCHITECTURES.iter().filter(|arch| only.as_deref().is_none_or(|only| only == **arch));
    let jobs: Vec<_> = archs.flat_map(|arch| UNITS.iter().map(move |unit| (*arch, *unit))).collect();
    let next = AtomicUsize::new(0);
    let work = || {
        while let Some((arch, unit)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
            let code = match &pack {
                Some(folder) => Compiler::for_arch(arch, Places { pack: None, cache: Some(folder.clone()) }).code(*unit),
                None => compile(*unit, arch),
            };
            let code = code.unwrap_or_else(|e| panic!("{e}"));
            assert!(code.starts_with(b"\x7fELF"), "{} for {arch} is no machine code", unit.name);
            println!("{arch:>8} {:<8} {:>8} bytes", unit.name, code.len());
        }
    };
    std::thread::scope(|s| {
        let workers = std::thread::available_parallelism().map_or(1, |n| n.get());
        let handles: Vec<_> = (0..workers).map(|_| s.spawn(work)).collect();
        handles.into_iter().for_each(|h| h.join().unwrap());
    });
    println!("{} units for {} architectures", UNITS.len(), ARCHITECTURES.len());
}

#[test]
fn an_unknown_architecture_is_named() {
    if probe::has_nvrtc() {
        let e = compile(UNITS[0], "sm_199").unwrap_err().to_string();
        assert!(e.contains("sm_199") && e.contains("sm_90"), "{e}");
    }
}
