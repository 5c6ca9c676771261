//! The `tandem` binary: one command line over all roles and tools.
//!
//! `cli/` defines the commands, `roles.rs` turns their arguments into the role crates' configurations and runs them, `up/`
//! supervises a whole instance, `check/`, `plan/`, `bench/`, `doctor.rs` and `generate.rs` are tools.

#![forbid(unsafe_code)]

mod bench;
mod bytes;
mod chat;
mod check;
mod cli;
mod client;
mod ctl;
mod doctor;
mod failure;
mod generate;
mod model;
mod output;
mod plan;
mod probe;
mod roles;
mod up;

use std::{ffi::OsString, process::ExitCode};

use clap::{CommandFactory, FromArgMatches};
use tandem_runtime::{
    config::{self, ConfigError, Resolved},
    exit, logs, process,
};

use cli::{Cli, Command, ConfigAction, Layered, args::CommonArgs, values};
use failure::Failure;

fn main() -> ExitCode {
    let argv: Vec<OsString> = std::env::args_os().collect();
    match run(&argv) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            if !failure.reason.is_empty() {
                process::complain(&format!("tandem: error: {failure}"));
            }
            ExitCode::from(failure.code)
        }
    }
}

fn run(argv: &[OsString]) -> Result<(), Failure> {
    let resolved = resolve(&Cli::command(), argv)?;
    let cli = Cli::from_arg_matches(&resolved.matches).map_err(|error| Failure::usage(error.to_string()))?;
    match cli.command {
        Command::Up(args) => {
            start_logs("up", &args.common)?;
            // One thread is enough: the supervisor only relays lines and waits.
            block_on(1, up::run(args, &resolved.settings))
        }
        Command::Serve(args) => roles::serve(args),
        Command::Attn(args) => roles::attn(args),
        Command::Experts(args) => roles::experts(args),
        Command::Bench(args) => bench::run(args),
        Command::Chat(args) => block_on(1, chat::run(args)),
        Command::Ctl(args) => block_on(1, ctl::run(args)),
        Command::Config { action: ConfigAction::Show { command, flags } } => output::print(&shown_settings(command, flags)?),
        Command::Check(args) => check::run(&args),
        Command::Plan(args) => plan::run(&args),
        Command::Doctor(args) => doctor::run(args),
        Command::Generate(args) => generate::run(&args.what),
    }
}

/// What `tandem config show COMMAND FLAGS` prints. Nothing is required: who asks what is set need not set all of it.
fn shown_settings(command: Layered, flags: Vec<OsString>) -> Result<String, Failure> {
    let argv: Vec<OsString> = ["tandem", command.name()].iter().map(OsString::from).chain(flags).collect();
    let relaxed = Cli::command().mut_subcommands(|sub| sub.mut_args(|arg| arg.required(false)));
    Ok(config::render(command.name(), &resolve(&relaxed, &argv)?.settings))
}

/// Merges flags, environment and file under the command line `root`. Help and version requests are answered here.
fn resolve(root: &clap::Command, argv: &[OsString]) -> Result<Resolved, Failure> {
    let env: Vec<(String, String)> =
        std::env::vars_os().map(|(name, value)| (name.to_string_lossy().into_owned(), value.to_string_lossy().into_owned())).collect();
    config::resolve(root, argv, &env).map_err(|error| match error {
        ConfigError::CommandLine(error) => {
            let code = if error.use_stderr() { exit::USAGE } else { exit::OK };
            match process::unless_closed(error.print()) {
                Err(unwritten) if !error.use_stderr() => output::unwritten(&unwritten),
                _ => Failure::new(code, ""),
            }
        }
        other => Failure::usage(other.to_string()),
    })
}

/// Starts logging under `role`.
fn start_logs(role: &str, common: &CommonArgs) -> Result<(), Failure> {
    let format = match common.log_format {
        values::LogFormat::Text => logs::LogFormat::Text,
        values::LogFormat::Json => logs::LogFormat::Json,
    };
    logs::init(role, format, common.log.as_deref()).map_err(|error| Failure::usage(format!("--log: {error}")))
}

/// Runs a future on a tokio runtime of `threads` threads.
fn block_on<T>(threads: usize, future: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    let mut builder =
        if threads == 1 { tokio::runtime::Builder::new_current_thread() } else { tokio::runtime::Builder::new_multi_thread() };
    if threads > 1 {
        builder.worker_threads(threads);
    }
    let runtime = builder.enable_all().build().map_err(|error| Failure::internal(format!("cannot start the runtime: {error}")))?;
    let result = runtime.block_on(future);
    // A thread that is stuck in blocking work must not keep the process.
    runtime.shutdown_timeout(std::time::Duration::from_secs(1));
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_shown_without_the_flags_that_a_start_needs() {
        let shown = shown_settings(Layered::Attn, vec!["--max-batch".into(), "4".into()]).expect("nothing is required");
        assert!(shown.contains("max-batch = 4"), "{shown}");
        assert!(shown.contains("# coordinator is not set"), "{shown}");
        assert!(shown_settings(Layered::Attn, vec!["--max-batch".into(), "0".into()]).is_err());
    }
}
