//! Compiles every unit of kernels for the CPU (`kernels/emulator`) and keeps them in DIR as a pack, which a worker takes for that of a chip:
//!
//! `cargo run -p tandem-kernels --example emulated_pack -- DIR CHIP`
//!
//! A unit's source goes through the C++ compiler's preprocessor; then each `asm("name ..." : outputs : inputs)` becomes a call of `ptx::name`, which
//! `ptx.h` has, and each kernel gets an entry that takes its arguments from an array of pointers.
#![allow(clippy::print_stderr, reason = "a command")]

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, ExitCode, Stdio},
    sync::atomic::{AtomicUsize, Ordering},
};

use tandem_kernels::cuda::compile::{UNITS, Unit, file_name};

/// The chips that the emulator plays, and what their compilers define: the first with matrix units for bf16, and Hopper.
const CHIPS: [(&str, &[&str]); 2] =
    [("sm_80", &["-D__CUDA_ARCH__=800"]), ("sm_90a", &["-D__CUDA_ARCH__=900", "-D__CUDA_ARCH_FEAT_SM90_ALL"])];

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let (Some(dir), Some(arch)) = (args.next().map(PathBuf::from), args.next()) else {
        eprintln!("needed: the folder of the pack, and a chip");
        return ExitCode::from(2);
    };
    let Some((_, defines)) = CHIPS.iter().find(|chip| chip.0 == arch) else {
        eprintln!("no chip {arch}: {} are played", CHIPS.map(|c| c.0).join(" and "));
        return ExitCode::from(2);
    };
    let next = AtomicUsize::new(0);
    let failed = AtomicUsize::new(0);
    let work = || {
        while let Some(unit) = UNITS.get(next.fetch_add(1, Ordering::Relaxed)) {
            if let Err(reason) = compile(*unit, &arch, defines, &dir) {
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
    if let Err(e) = forget_others(&dir, &arch) {
        eprintln!("{}: {e}", dir.display());
        return ExitCode::FAILURE;
    }
    if failed.into_inner() == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Removes the code of other sources.
fn forget_others(dir: &Path, arch: &str) -> std::io::Result<()> {
    let wanted: Vec<_> = UNITS.iter().map(|unit| file_name(*unit, arch)).collect();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_name().to_str().is_none_or(|name| !wanted.iter().any(|w| w == name)) {
            fs::remove_file(entry.path())?;
        }
    }
    Ok(())
}

/// Whether a file is there and younger than what every unit is made with, this program among it.
fn is_current(done: &Path, headers: &[PathBuf]) -> bool {
    let age = |path: &Path| fs::metadata(path).and_then(|m| m.modified()).ok();
    let made = age(done);
    let program = std::env::current_exe().ok();
    made.is_some() && headers.iter().chain(&program).all(|with| age(with) <= made)
}

fn compile(unit: Unit, arch: &str, defines: &[&str], dir: &Path) -> Result<(), String> {
    let kernels = Path::new(env!("CARGO_MANIFEST_DIR"));
    let done = dir.join(file_name(unit, arch));
    let headers = ["fibers.h", "device.h", "ptx.h"].map(|name| kernels.join("emulator").join(name));
    if is_current(&done, &headers) {
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
    preprocess.args(["-E", "-P", "-D__global__=EMU_GLOBAL", "-include"]).arg(&headers[2]);
    preprocess.args(defines).args(unit.define).args(["-x", "c++"]).arg(kernels.join("cuda").join(unit.file)).arg("-o").arg(&plain);
    run(preprocess)?;
    let text = fs::read_to_string(&plain).map_err(|e| e.to_string())?;
    fs::write(&changed, emulated(&text)?).map_err(|e| e.to_string())?;
    let mut build = cxx();
    build.args(["-shared", "-fpreprocessed", "-x", "c++-cpp-output"]).arg(&changed).arg("-o").arg(&library).arg("-pthread");
    run(build)?;
    fs::rename(&library, &done).map_err(|e| e.to_string())?;
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
            let head;
            (head, rest) = after.split_at(after.find('(').ok_or("a kernel without parameters")?);
            let mut cluster = "1";
            for word in head.split_whitespace() {
                match word.strip_prefix("EMU_CLUSTER_") {
                    Some(size) => cluster = size.strip_suffix("_1_1").ok_or(format!("a cluster of {size}: only along x"))?,
                    None => out.push_str(&format!(" {word}")),
                }
            }
            kernels.push((head.split_whitespace().next_back().ok_or("a kernel without a name")?, cluster));
        } else {
            let (call, after) = call_of(&rest["asm".len()..])?;
            out.push_str(&call);
            rest = after;
        }
    }
    out.push_str(rest);
    let mut out = dynamic_shared(&out);
    for (name, cluster) in kernels {
        out.push_str(&format!("\nextern \"C\" void emu_entry_{name}(void** args) {{ emu::call(&{name}, args); }}"));
        out.push_str(&format!("\nextern \"C\" const unsigned emu_cluster_{name} = {cluster};"));
    }
    out.push('\n');
    Ok(out)
}

/// `extern thread_local u8 room[];`: however a kernel calls its dynamic shared memory, it is `shared`.
fn dynamic_shared(text: &str) -> String {
    const WORDS: &str = "extern thread_local ";
    let mut parts = text.split(WORDS);
    let mut out = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let end = part.find("[]").unwrap_or(0);
        let (kind, name) = part[..end].rsplit_once(' ').unwrap_or(("", ""));
        out.push_str(&format!("{kind}* {name} = ({kind}*)::shared{}", &part[(end + 2).min(part.len())..]));
    }
    out
}

/// Where a word stands that is no part of a longer one.
fn find_word(text: &str, word: &str) -> Option<usize> {
    let part = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
    let whole = |at: usize| !part(text[..at].chars().next_back()) && !part(text[at + word.len()..].chars().next());
    text.match_indices(word).map(|(at, _)| at).find(|at| whole(*at))
}

/// What `volatile("name ...;" : "=r"(a) : "r"(b) : "memory")` becomes, and what follows it: a call of each instruction with its operands in the order in
/// which the template has them.
fn call_of(text: &str) -> Result<(String, &str), String> {
    let text = text.trim_start();
    let text = text.strip_prefix("volatile").unwrap_or(text).trim_start();
    let (inside, after) = in_parentheses(text)?;
    let sections = sections(inside);
    let template: String = literals(sections[0]);
    let mut operands = Vec::new();
    for section in sections.iter().skip(1) {
        let mut rest = *section;
        while let Some(at) = rest.find('(') {
            let (value, behind) = in_parentheses(&rest[at..])?;
            operands.push(value.trim());
            rest = behind;
        }
    }
    let operand = |token: &str| -> Result<String, String> {
        let Some(number) = token.strip_prefix('%') else { return Ok(token.to_owned()) };
        let place: usize = number.parse().map_err(|_| format!("operand {token} of {template}"))?;
        operands.get(place).map(|o| (*o).to_owned()).ok_or(format!("operand {token} of {template}"))
    };
    let (mut condition, mut calls) = (None, String::new());
    for statement in template.split([';', '\n']).map(|s| s.trim_matches(|c: char| c.is_whitespace() || c == '{' || c == '}')) {
        let (guarded, statement) = statement.strip_prefix("@p ").map_or((false, statement), |rest| (true, rest));
        let mut tokens = statement.split([' ', ',', '[', ']', '{', '}']).filter(|t| !t.is_empty() && *t != "_");
        let Some(name) = tokens.next().filter(|n| !n.starts_with(['.', '@']) && !n.ends_with(':')) else { continue };
        if let Some(compare) = name.strip_prefix("setp.") {
            let values = tokens.skip(1).map(operand).collect::<Result<Vec<_>, _>>()?;
            let sign = if compare.starts_with("ne") { "!=" } else { "<" };
            condition = Some(format!("({} {sign} {})", values[0], values[1]));
            continue;
        }
        // A predicate that no comparison has set is a result: of a wait, which goes on until it holds.
        let arguments = tokens.filter_map(|t| if t == "p" { condition.clone().map(Ok) } else { Some(operand(t)) });
        let arguments = arguments.collect::<Result<Vec<_>, _>>()?.join(", ");
        let guard = condition.as_ref().filter(|_| guarded).map_or(String::new(), |c| format!("if {c} "));
        calls.push_str(&format!("{guard}ptx::{}({arguments}); ", name.replace(['.', ':'], "_")));
    }
    // A statement as before: what follows is its semicolon.
    Ok((format!("do {{ {calls}}} while (0)"), after))
}

/// The parts of an `asm`, which colons separate.
fn sections(text: &str) -> Vec<&str> {
    let (mut depth, mut quoted, mut from, mut out) = (0, false, 0, Vec::new());
    for (at, c) in text.char_indices() {
        match c {
            '"' => quoted = !quoted,
            '(' if !quoted => depth += 1,
            ')' if !quoted => depth -= 1,
            ':' if !quoted && depth == 0 => {
                out.push(&text[from..at]);
                from = at + 1;
            }
            _ => {}
        }
    }
    out.push(&text[from..]);
    out
}

/// Literals that follow each other, as one text.
fn literals(text: &str) -> String {
    text.split('"').skip(1).step_by(2).map(|part| part.replace("\\n", "\n")).collect()
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
