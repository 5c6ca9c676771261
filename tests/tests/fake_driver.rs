//! What a start on a GPU says where something is missing or unfit, told by real processes over a CUDA driver that is none
//! (`kernels/emulator`): it answers as the environment says, so that this needs no GPU and breaks nothing where there is one.
#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "tests")]

use std::{
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
    time::Duration,
};

use tandem_tests::{Launch, checkpoints};
use tempfile::TempDir;

/// A folder with the driver, one with NVRTC, and an empty one.
struct Fakes {
    dir: TempDir,
}

impl Fakes {
    /// Compiled once per process.
    fn get() -> &'static Self {
        static FAKES: OnceLock<Fakes> = OnceLock::new();
        FAKES.get_or_init(|| {
            let fakes = Self { dir: tempfile::tempdir().unwrap() };
            fakes.compile("driver", "libcuda.so", "libcuda.so.1");
            fakes.compile("nvrtc", "libnvrtc.so", "libnvrtc.so.13");
            std::fs::create_dir(fakes.path("empty")).unwrap();
            fakes
        })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn compile(&self, name: &str, plain: &str, numbered: &str) {
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../kernels/emulator/{name}.c"));
        let folder = self.path(name);
        std::fs::create_dir(&folder).unwrap();
        let mut cc = Command::new("cc");
        cc.args(["-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-O1", "-o"]).arg(folder.join(plain)).arg(&source);
        let status = cc.status().unwrap_or_else(|e| panic!("cc, which links Rust programs, too: {e}"));
        assert!(status.success(), "{} does not compile", source.display());
        std::os::unix::fs::symlink(plain, folder.join(numbered)).unwrap();
    }

    /// A start that sees these libraries alone, with no kernels kept from earlier ones.
    fn start(&self, launch: Launch, libraries: &[&str], settings: &[(&str, &str)]) -> Launch {
        let folders: Vec<String> = libraries.iter().map(|name| self.path(name).display().to_string()).collect();
        let empty = self.path("empty").display().to_string();
        let fixed = [("LD_LIBRARY_PATH", folders.join(":")), ("TANDEM_KERNEL_PACK", empty.clone()), ("XDG_CACHE_HOME", empty)];
        let launch = fixed.iter().fold(launch, |l, (key, value)| l.env(key, value));
        // A cache that cannot be written to is none.
        let launch = launch.env("TANDEM_KERNEL_CACHE", "/proc/none");
        settings.iter().fold(launch, |l, (key, value)| l.env(key, value))
    }
}

/// Runs to its end, which must be a failure, and returns what it said.
fn fails(launch: Launch) -> String {
    let mut cluster = launch.spawn();
    let code = cluster.wait_exit(Duration::from_secs(60));
    std::thread::sleep(Duration::from_millis(100)); // the reader thread drains the pipe
    let log = cluster.stderr();
    assert!(code.is_some_and(|code| code != 0 && code != 101), "exit {code:?}:\n{log}");
    assert!(!log.contains("panicked"), "{log}");
    assert!(cluster.descendants().is_empty(), "children left");
    log
}

/// The last line, which tells the reason, has all the words.
fn says(log: &str, words: &[&str]) {
    let last = log.lines().rev().find(|l| !l.trim().is_empty()).unwrap_or_default();
    for word in words {
        assert!(last.contains(word), "no {word:?} in the last line of:\n{log}");
    }
}

fn up(libraries: &[&str], settings: &[(&str, &str)], args: &[&str]) -> String {
    let launch = Launch::up().model(checkpoints::tiny()).args(["--attn", "cuda:0"]).args(args.iter().copied());
    fails(Fakes::get().start(launch, libraries, settings))
}

const BOTH: &[&str] = &["driver", "nvrtc"];

#[test]
fn a_driver_that_is_too_old_is_told_from_the_one_that_is_needed() {
    says(
        &up(BOTH, &[("FAKE_CUDA_VERSION", "12040")], &[]),
        &["supports CUDA 12.4", "needed is 13.0", "driver 580 or newer", "--device cpu"],
    );
}

#[test]
fn a_driver_that_does_not_start_says_why_and_what_helps() {
    for (code, words) in [
        ("34", ["CUDA_ERROR_STUB_LIBRARY", "stub library", "LD_LIBRARY_PATH"]),
        ("802", ["CUDA_ERROR_SYSTEM_NOT_READY", "system not yet initialized", "nvidia-fabricmanager"]),
        ("803", ["CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "unsupported display driver", "restart the machine"]),
        ("804", ["CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE", "forward-compatibility", "driver 580"]),
        ("999", ["CUDA_ERROR_UNKNOWN", "unknown error", "nvidia-smi"]),
    ] {
        let log = up(BOTH, &[("FAKE_CUDA_INIT", code)], &[]);
        says(&log, &["the CUDA driver does not start"]);
        says(&log, &words);
    }
}

#[test]
fn devices_that_are_not_there_are_told_with_those_that_are() {
    says(&up(BOTH, &[("FAKE_CUDA_INIT", "100")], &[]), &["there is no cuda:0", "no CUDA device"]);
    says(&up(BOTH, &[], &["--experts", "cuda:3"]), &["there is no cuda:3", "cuda:0 Fake GPU 0 (16.0 GiB, 8 SMs, sm_90a)"]);
    let attn = Launch::role("attn").model(checkpoints::tiny()).args(["--coordinator", "http://127.0.0.1:1", "--device", "cuda:1"]);
    says(&fails(Fakes::get().start(attn, BOTH, &[])), &["there is no cuda:1", "cuda:0 Fake GPU 0"]);
}

#[test]
fn a_chip_that_is_too_old_is_named() {
    says(&up(BOTH, &[("FAKE_CUDA_CAPABILITY", "75")], &[]), &["Fake GPU 0", "capability 7.5", "needed is 8.0", "--device cpu"]);
}

#[test]
fn a_chip_that_the_compiler_does_not_know_is_named_with_those_it_knows() {
    let log = up(BOTH, &[("FAKE_CUDA_CAPABILITY", "150"), ("FAKE_NVRTC_KNOWS", "80 90 120")], &[]);
    says(&log, &["cuda:0", "NVRTC 13.0 does not know sm_150a", "sm_80, sm_90, sm_120", "newer NVRTC"]);
}

#[test]
fn without_a_compiler_the_package_is_named() {
    if Command::new("sh").args(["-c", "ldconfig -p | grep -q libnvrtc"]).status().is_ok_and(|s| s.success()) {
        eprintln!("SKIPPED: this machine has an NVRTC of its own, which a start would find (scripts/gpu-bench errors hides it)");
        return;
    }
    let log = up(&["driver"], &[], &[]);
    says(&log, &["cuda:0", "no compiled kernels for sm_90a", "libnvrtc.so.13 cannot be opened", "cuda-nvrtc-13-0", "nvidia-cuda-nvrtc"]);
}

#[test]
fn a_kernel_that_does_not_compile_is_named_with_the_compilers_words() {
    says(
        &up(BOTH, &[("FAKE_NVRTC_LOG", "portable.cuh(7): error: made up")], &[]),
        &["does not compile for sm_90a", "portable.cuh(7): error: made up"],
    );
}

#[test]
fn memory_that_does_not_suffice_is_told_in_numbers() {
    // The plan, before anything starts: what the GPU has in all.
    let log = up(BOTH, &[("FAKE_CUDA_TOTAL", "1100")], &["--kv-tokens", "4000000", "--max-seq-len", "4096"]);
    says(&log, &["cuda:0: needed", "GiB, got", "of 1.1 GiB on Fake GPU 0", "attn caches", "would fit"]);
    // Other processes hold what is needed for the context, the kernels' first buffer, the self-test's.
    says(
        &up(BOTH, &[("FAKE_CUDA_CONTEXT", "400"), ("FAKE_CUDA_FREE", "300")], &[]),
        &["out of memory", "context", "16.0 GiB of Fake GPU 0", "nvidia-smi"],
    );
    let log = up(BOTH, &[("FAKE_CUDA_FREE", "0")], &[]);
    says(&log, &["out of memory for", "bytes needed, 0 available on cuda:0"]);
    assert!(!log.contains("computes wrongly"), "{log}");
}

#[test]
fn a_device_that_computes_wrongly_does_not_serve() {
    let log = up(BOTH, &[], &[]);
    assert!(log.contains("self-test failed on cuda:0"), "{log}");
    says(&log, &["attn: cuda:0 computes wrongly: it must not serve"]);
}
