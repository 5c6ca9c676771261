//! Compiles every unit of kernels for the CPU (`kernels/emulator`) and keeps them in DIR as a pack, which a worker takes for that of a chip:
//!
//! `cargo run -p tandem-kernels --example emulated_pack -- DIR`
//!
//! A unit's source goes through the C++ compiler's preprocessor; then each `asm("name ..." : outputs : inputs)` becomes a call of `ptx::name`, which
//! `device.h` has, and each kernel gets an entry that takes its arguments from an array of pointers.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a command")]

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, ExitCode, Stdio},
    sync::atomic::{AtomicUsize, Ordering},
};

use tandem_kernels::cuda::compile::{UNITS, Unit, file_name};

/// The chip that the emulator plays: the first with matrix units for bf16. Later ones have instructions that nothing here knows.
const ARCH: &str = "sm_80";

fn main() -> ExitCode {
    let Some(dir) = std::env::args_os().nth(1).map(PathBuf::from) else {
        eprintln!("needed: the folder of the pack");
        return ExitCode::from(2);
    };
    let next = AtomicUsize::new(0);
    let failed = AtomicUsize::new(0);
    let work = || {
        while let Some(unit) = UNITS.get(next.fetch_add(1, Ordering::Relaxed)) {
            if let Err(reason) = compile(*unit, &dir) {
                eprintln!("{}: {reason}", unit.name);
                failed.fetch_add(1, Ordering::Relaxed);
            }
        }
    };
    std::thread::scope(|s| {
        for _ in 0..std::thread::available_parallelism().map_or(1, |n| n.get()) {
            s.spawn(work);
        }
    });
    if let Err(e) = forget_others(&dir) {
        eprintln!("{}: {e}", dir.display());
        return ExitCode::FAILURE;
    }
    if failed.into_inner() == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Removes the code of other sources.
fn forget_others(dir: &Path) -> std::io::Result<()> {
    let wanted: Vec<_> = UNITS.iter().map(|unit| file_name(*unit, ARCH)).collect();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_name().to_str().is_none_or(|name| !wanted.iter().any(|w| w == name)) {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// Whether a file is there and younger than what every unit is made with, this program among it.
fn is_current(done: &Path, device: &Path) -> bool {
    let age = |path: &Path| fs::metadata(path).and_then(|m| m.modified()).ok();
    let made = age(done);
    let program = std::env::current_exe().ok();
    made.is_some() && [Some(device.to_owned()), program].into_iter().flatten().all(|with| age(&with) <= made)
}

fn compile(unit: Unit, dir: &Path) -> Result<(), String> {
    let kernels = Path::new(env!("CARGO_MANIFEST_DIR"));
    let done = dir.join(file_name(unit, ARCH));
    let device = kernels.join("emulator/device.h");
    if is_current(&done, &device) {
        return Ok(());
    }
    fs::create_dir_all(dir).map_err(|e| format!("{}: {e}", dir.display()))?;
    let aside = |ending: &str| dir.join(format!(".{}.{ending}", unit.name));
    let (plain, changed, library) = (aside("ii"), aside("emulated.ii"), aside("so"));
    let flags = [
        "-std=c++17",
        "-fPIC",
        "-march=native",
        "-O2",
        "-fno-strict-aliasing",
        "-fno-aggressive-loop-optimizations",
        "-ffp-contract=off",
        "-w",
    ];
    let cxx = || {
        let mut command = Command::new(std::env::var_os("CXX").unwrap_or_else(|| "c++".into()));
        command.args(flags).stdin(Stdio::null());
        command
    };
    let mut preprocess = cxx();
    preprocess.args(["-E", "-P", "-D__global__=EMU_GLOBAL", "-include"]).arg(&device);
    preprocess.args(unit.define).args(["-x", "c++"]).arg(kernels.join("cuda").join(unit.file)).arg("-o").arg(&plain);
    run(preprocess)?;
    let text = fs::read_to_string(&plain).map_err(|e| e.to_string())?;
    fs::write(&changed, emulated(&text)?).map_err(|e| e.to_string())?;
    let mut build = cxx();
    build.args(["-shared", "-fpreprocessed", "-x", "c++-cpp-output"]).arg(&changed).arg("-o").arg(&library).arg("-pthread");
    run(build)?;
    fs::rename(&library, &done).map_err(|e| e.to_string())?;
    println!("{}", done.display());
    Ok(())
}

fn run(mut command: Command) -> Result<(), String> {
    let output = command.output().map_err(|e| format!("{:?}: {e}", command.get_program()))?;
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).into_owned()) }
}

/// The preprocessed source with PTX as calls, and an entry for each kernel.
fn emulated(text: &str) -> Result<String, String> {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    let mut kernels = Vec::new();
    while let Some(at) = ["asm", "EMU_GLOBAL"].iter().filter_map(|word| find_word(rest, word)).min() {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        if let Some(after) = rest.strip_prefix("EMU_GLOBAL") {
            let head = &after[..after.find('(').ok_or("a kernel without parameters")?];
            kernels.push(head.split_whitespace().next_back().ok_or("a kernel without a name")?.to_owned());
            rest = after;
        } else {
            let (call, after) = call_of(&rest["asm".len()..])?;
            out.push_str(&call);
            rest = after;
        }
    }
    out.push_str(rest);
    for name in kernels {
        out.push_str(&format!("\nextern \"C\" void emu_entry_{name}(void** args) {{ emu::call(&{name}, args); }}"));
    }
    out.push('\n');
    Ok(out)
}

/// Where a word stands that is no part of a longer one.
fn find_word(text: &str, word: &str) -> Option<usize> {
    let part = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
    let whole = |at: usize| !part(text[..at].chars().next_back()) && !part(text[at + word.len()..].chars().next());
    text.match_indices(word).map(|(at, _)| at).find(|at| whole(*at))
}

/// What `volatile("name ..." "..." : "=r"(a) : "r"(b) : "memory")` becomes, and what follows it.
fn call_of(text: &str) -> Result<(String, &str), String> {
    let text = text.trim_start();
    let text = text.strip_prefix("volatile").unwrap_or(text).trim_start();
    let (inside, after) = in_parentheses(text)?;
    let name: String =
        inside.trim_start().trim_start_matches('"').chars().take_while(|c| c.is_alphanumeric() || ".:_".contains(*c)).collect();
    let name: String = name.chars().map(|c| if c == '.' || c == ':' { '_' } else { c }).collect();
    // Behind the template: outputs and inputs, each `"constraint"(value)`; clobbers have no value.
    let mut operands = Vec::new();
    let mut rest = inside;
    while let Some(quote) = rest.find('"') {
        let close = quote + 1 + rest[quote + 1..].find('"').ok_or("a text without an end")?;
        rest = rest[close + 1..].trim_start();
        if rest.starts_with('(') {
            let (value, behind) = in_parentheses(rest)?;
            operands.push(value.trim().to_owned());
            rest = behind;
        }
    }
    Ok((format!("ptx::{name}({})", operands.join(", ")), after))
}

/// What stands between a parenthesis that opens here and its end, and what follows.
fn in_parentheses(text: &str) -> Result<(&str, &str), String> {
    let (mut depth, mut quoted) = (0, false);
    for (at, c) in text.char_indices() {
        match c {
            '"' => quoted = !quoted,
            '(' if !quoted => depth += 1,
            ')' if !quoted => {
                depth -= 1;
                if depth == 0 {
                    return Ok((&text[1..at], &text[at + 1..]));
                }
            }
            _ => {}
        }
    }
    Err(format!("a parenthesis without an end: {}", &text[..text.len().min(60)]))
}
