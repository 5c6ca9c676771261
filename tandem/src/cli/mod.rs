//! The command line: the one definition from which parsing, help, config keys, man pages and completions come.
//!
//! `args.rs` holds the groups of flags that several commands share (a flag means the same everywhere), `values.rs` the types of
//! their values. `main.rs` dispatches; `roles.rs` turns arguments into the role crates' `Config`s.

pub mod args;
pub mod values;

use std::path::PathBuf;

use clap::{Parser, Subcommand, ValueEnum};

pub use args::{AttnArgs, ExpertsArgs, ServeArgs, UpArgs};

/// Serves GLM-5.3-Flash over two or more unlike devices: attention and state on one, routed experts on the others.
#[derive(Debug, Parser)]
#[command(
    name = "tandem",
    version,
    max_term_width = 120,
    propagate_version = true,
    subcommand_required = true,
    arg_required_else_help = true
)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Start everything on this machine: coordinator, attention worker and expert workers
    ///
    /// Prints the plan and the children's logs on stderr, and `READY http://HOST:PORT` on stdout once a token has passed through
    /// every worker. Without --model it serves the small demo model that is built into the binary. Ctrl-C or SIGTERM drains; a
    /// second signal stops at once.
    Up(UpArgs),
    /// Run the coordinator: the HTTP APIs, text, admission and membership
    ///
    /// Prints `CONTROL http://HOST:PORT` (where workers join) and later `READY http://HOST:PORT` on stdout.
    Serve(ServeArgs),
    /// Run an attention worker: the step loop and all sequence state
    Attn(AttnArgs),
    /// Run an expert worker: one or more shards of the routed experts
    Experts(ExpertsArgs),
    /// Talk to a running server's model on the terminal
    Chat(ChatArgs),
    /// Look at a running server, or drain it
    Ctl(CtlArgs),
    /// Measure a running server, or write a checkpoint to measure with
    Bench(BenchArgs),
    /// Show the merged configuration
    Config {
        /// What to do with it.
        #[command(subcommand)]
        action: ConfigAction,
    },
    /// Say whether checkpoints can be served, from their headers alone
    ///
    /// Prints PASS or REFUSED with the reason for each checkpoint: a folder, a GGUF file or set, or whatever of these lies below a folder.
    /// Files may be headers without data. The exit code is not 0 where one is refused.
    Check(CheckArgs),
    /// Print what goes where on given devices, whether it fits, and what a token would take, from headers alone
    ///
    /// Devices are this machine's CPUs, or whatever --device describes. Nothing is started and no weight is read. The exit code is not 0
    /// where a device is too small; the message says what would fit.
    Plan(PlanArgs),
    /// Look at this machine: cores, memory, instruction sets, loopback latency
    Doctor(DoctorArgs),
    /// Write man pages or shell completions
    Generate(GenerateArgs),
}

/// `tandem config`.
#[derive(Debug, Subcommand)]
pub enum ConfigAction {
    /// Print each setting of a command with the layer it comes from, as a TOML file that --config reads back
    Show {
        /// Whose settings.
        #[arg(value_enum, default_value = "up")]
        command: Layered,
        /// Further flags, as that command would get them.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "FLAGS")]
        flags: Vec<std::ffi::OsString>,
    },
}

/// The commands that read the environment and the config file.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Layered {
    /// `tandem up`
    Up,
    /// `tandem serve`
    Serve,
    /// `tandem attn`
    Attn,
    /// `tandem experts`
    Experts,
}

impl Layered {
    /// The subcommand's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Up => "up",
            Self::Serve => "serve",
            Self::Attn => "attn",
            Self::Experts => "experts",
        }
    }
}

/// `tandem bench`.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct BenchArgs {
    /// Something other than a measurement.
    #[command(subcommand)]
    pub action: Option<BenchAction>,
    /// The measurement.
    #[command(flatten)]
    pub load: LoadArgs,
}

/// `tandem bench ACTION`.
#[derive(Debug, Subcommand)]
pub enum BenchAction {
    /// Write a generated checkpoint (hash-based weights, the model's full structure)
    MakeCheckpoint {
        /// Which geometry.
        #[arg(long, value_enum, default_value = "small")]
        preset: Preset,
        /// Folder to make.
        #[arg(value_name = "DIR")]
        dir: PathBuf,
    },
}

/// Geometries of `make-checkpoint`.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Preset {
    /// 7.8M parameters, 9 layers: for tests
    Tiny,
    /// Another 4-layer shape with router groups and pools of 3 keys
    TinyB,
    /// 4 layers whose rows are all 256 wide
    Tinyk,
    /// 624M parameters, 1.25 GB: for benchmarks
    Small,
}

/// A running server.
#[derive(Clone, Debug, clap::Args)]
pub struct ServerArgs {
    /// The running server
    #[arg(long, global = true, value_name = "URL", default_value = "http://127.0.0.1:8000")]
    pub url: String,
    /// Key for it, where it asks for one
    #[arg(long, global = true, value_name = "KEY", env = "TANDEM_API_KEY", hide_env_values = true)]
    pub api_key: Option<String>,
}

/// `tandem chat`.
#[derive(Clone, Debug, clap::Args)]
pub struct ChatArgs {
    /// The server.
    #[command(flatten)]
    pub server: ServerArgs,
    /// Model name to ask for; the first one that the server lists if not given
    #[arg(long, value_name = "NAME")]
    pub model: Option<String>,
    /// First message of the conversation, as the system
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// How hard to think: low, high or max
    #[arg(long, value_name = "EFFORT")]
    pub reasoning_effort: Option<String>,
    /// Do not show the reasoning
    #[arg(long)]
    pub hide_reasoning: bool,
    /// Sampling temperature; the model's own if not given
    #[arg(long, value_name = "T")]
    pub temperature: Option<f32>,
    /// Most tokens of one answer
    #[arg(long, value_name = "N")]
    pub max_tokens: Option<u32>,
    /// Ask this and end; without it, a conversation on the terminal, or one question from a pipe
    #[arg(value_name = "MESSAGE")]
    pub message: Option<String>,
}

/// `tandem ctl`.
#[derive(Clone, Debug, clap::Args)]
pub struct CtlArgs {
    /// The server.
    #[command(flatten)]
    pub server: ServerArgs,
    /// Print JSON instead of tables
    #[arg(long, global = true)]
    pub json: bool,
    /// What to do.
    #[command(subcommand)]
    pub action: CtlAction,
}

/// `tandem ctl ACTION`.
#[derive(Clone, Debug, Subcommand)]
pub enum CtlAction {
    /// Whether the server lives and can make a token now; exit code 69 if not
    Health,
    /// Everything in one view: requests, tokens, workers
    Stats,
    /// Workers: device, state, load, links
    Workers,
    /// Requests that are not over
    Requests,
    /// Stop admitting, finish what runs, end; or restart one worker in order
    Drain {
        /// This worker alone: it finishes what it has and ends; its supervisor starts it again
        #[arg(long, value_name = "NAME")]
        worker: Option<String>,
        /// How long a worker may take to finish
        #[arg(long, value_name = "TIME", default_value = "30s")]
        timeout: values::Seconds,
        /// The coordinator's control address; asked from the server if not given
        #[arg(long, value_name = "URL")]
        control: Option<String>,
    },
}

/// Load of `tandem bench`.
#[derive(Clone, Debug, clap::Args)]
pub struct LoadArgs {
    /// The server to measure.
    #[command(flatten)]
    pub server: ServerArgs,
    /// Model name to ask for; the first one that the server lists if not given
    #[arg(long, value_name = "NAME")]
    pub model: Option<String>,
    /// Prompt length of each request, in tokens
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..))]
    pub prompt_tokens: u32,
    /// Tokens to generate for each request (ignore_eos is set)
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    pub output_tokens: u32,
    /// Requests in flight at once
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    pub concurrency: u32,
    /// Requests in all, warm-up not counted
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..))]
    pub requests: u32,
    /// Requests before the measurement
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub warmup: u32,
    /// Seed of the prompts' random token ids
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub seed: u64,
    /// Token ids are drawn below this number; it must not exceed the vocabulary
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    pub vocab: u32,
    /// Give up on a request after this long
    #[arg(long, value_name = "TIME", default_value = "10m")]
    pub timeout: values::Seconds,
    /// Print one JSON object instead of a table
    #[arg(long)]
    pub json: bool,
}

/// `tandem check`.
#[derive(Clone, Debug, clap::Args)]
pub struct CheckArgs {
    /// Checkpoints: folders or .gguf files, or folders to search for them
    #[arg(value_name = "PATH", required = true)]
    pub paths: Vec<PathBuf>,
    /// Kinds of device that must have kernels for every stored type, comma-separated
    #[arg(long, value_enum, value_delimiter = ',', value_name = "KINDS", default_value = "cpu")]
    pub device: Vec<values::Kind>,
    /// Print one JSON object a line; with --report, the page is its field `report`
    #[arg(long)]
    pub jsonl: bool,
    /// Print a page in Markdown for each: bytes by part and type, experts by layer, what was skipped or narrowed
    #[arg(long)]
    pub report: bool,
    /// Also read values: norms, histograms and element order of three experts of each layer
    #[arg(long)]
    pub semantic: bool,
}

/// `tandem plan`.
#[derive(Clone, Debug, clap::Args)]
pub struct PlanArgs {
    /// Model.
    #[command(flatten)]
    pub model: args::ModelArgs,
    /// Split.
    #[command(flatten)]
    pub split: args::SplitArgs,
    /// Limits.
    #[command(flatten)]
    pub limits: args::AttnLimits,
    /// A device: its memory and, for the time of a token, its read bandwidth, e.g. cuda:0=141GiB,4500GB/s or cpu=64GiB,20GB/s (repeatable)
    #[arg(long, value_name = "NAME=MEMORY[,BANDWIDTH]", help_heading = "Devices")]
    pub device: Vec<crate::plan::device::DeviceSpec>,
    /// Device of the attention worker: cpu (this machine, unless --device says otherwise), cpu:N or cuda:N
    #[arg(long, value_name = "NAME", default_value = "cpu", help_heading = "Devices")]
    pub attn: String,
    /// Devices of the expert workers, one worker each, comma-separated [default: cpu, or none with --resident-layers all]
    #[arg(long, value_name = "NAMES", value_delimiter = ',', help_heading = "Devices")]
    pub experts: Vec<String>,
    /// Compute threads of a CPU worker; as many as this machine has cores if not given
    #[arg(long, value_name = "N", help_heading = "Devices", value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub threads: Option<u32>,
    /// Weights on CPUs may be larger than free memory: they are then read from disk as they are needed
    #[arg(long, help_heading = "Devices")]
    pub allow_paging: bool,
    /// Microseconds of one hop to the expert workers and back; measured on this machine's loopback if not given
    #[arg(long, value_name = "US", help_heading = "Time", value_parser = hop_us)]
    pub hop_us: Option<f64>,
    /// Tokens that the sequence has already
    #[arg(long, value_name = "N", default_value_t = 8192, help_heading = "Time")]
    pub context: usize,
    /// Print one JSON object instead of text
    #[arg(long)]
    pub json: bool,
}

/// A hop of up to a minute; −0 is 0.
fn hop_us(text: &str) -> Result<f64, String> {
    const MOST: f64 = 60e6;
    let wrong = || format!("{text:?} is no number of microseconds from 0 to {MOST} (a minute); write one, e.g. 30");
    text.parse::<f64>().ok().filter(|n| (0.0..=MOST).contains(n)).map(f64::abs).ok_or_else(wrong)
}

/// `tandem doctor`.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct DoctorArgs {
    /// Print one JSON object instead of text
    #[arg(long)]
    pub json: bool,
}

/// `tandem generate`.
#[derive(Clone, Debug, clap::Args)]
pub struct GenerateArgs {
    /// What to write.
    #[command(subcommand)]
    pub what: Generate,
}

/// What `tandem generate` writes.
#[derive(Clone, Debug, Subcommand)]
pub enum Generate {
    /// Completions of one shell, to stdout
    Completions {
        /// The shell.
        #[arg(value_enum)]
        shell: clap_complete::Shell,
    },
    /// A published checkpoint as headers without data, a few MB, to try `tandem check` and `tandem plan` with
    #[command(hide = true)]
    Stub {
        /// A release (bf16, fp8, libertai-nvfp4 …) or a mix (unsloth/UD-IQ1_S …); `all` writes every one into folders of its own
        #[arg(value_name = "NAME")]
        name: String,
        /// The folder; made if it is not there.
        #[arg(value_name = "DIR")]
        dir: PathBuf,
    },
    /// One man page for tandem and one for each command, into a folder
    Man {
        /// The folder; made if it is not there.
        #[arg(value_name = "DIR")]
        dir: PathBuf,
    },
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_definition_is_sound() {
        Cli::command().debug_assert();
    }

    /// `tandem up` hands its settings down by name, and one config file serves all roles: so a name must mean one thing.
    #[test]
    fn a_flag_means_the_same_in_every_command() {
        let cli = Cli::command();
        let mut seen = std::collections::BTreeMap::new();
        for command in cli.get_subcommands().filter(|command| command.get_arguments().any(|arg| arg.get_id() == "config")) {
            for arg in command.get_arguments() {
                let Some(long) = arg.get_long() else { continue };
                let described = (arg.get_help().map(ToString::to_string), format!("{:?}", arg.get_default_values()));
                let first = seen.entry(long.to_owned()).or_insert_with(|| described.clone());
                assert_eq!(first, &described, "--{long} differs in {}", command.get_name());
            }
        }
    }

    /// Values that parse but could never serve a request or measure one.
    #[test]
    fn values_that_cannot_work_are_refused_by_flag() {
        for (command, flag, values) in [
            ("up", "--max-seq-len", ["0", "1"]),
            ("up", "--kv-tokens", ["0", "1"]),
            ("up", "--threads", ["0", "1025"]),
            ("up", "--max-batch", ["0", "65537"]),
            ("up", "--max-num-batched-tokens", ["0", "1048577"]),
            ("up", "--kv-tokens", ["1099511627777", "18446744073709551616"]),
            ("up", "--max-body-bytes", ["0", "64XiB"]),
            ("up", "--prefix-cache-bytes", ["2PiB", "-1"]),
            ("plan", "--hop-us", ["inf", "NaN"]),
            ("plan", "--hop-us", ["-1", "1e9"]),
            ("plan", "--threads", ["0", "4294967295"]),
            ("plan", "--device", ["cpu=64", "cpu=9000TiB"]),
            ("up", "--request-timeout", ["0", "0ms"]),
            ("up", "--served-model-name", ["", ""]),
            ("bench", "--requests", ["0", "-1"]),
            ("bench", "--concurrency", ["0", "-1"]),
            ("bench", "--prompt-tokens", ["0", "-1"]),
            ("bench", "--output-tokens", ["0", "-1"]),
            ("bench", "--vocab", ["0", "-1"]),
        ] {
            for value in values {
                let flag_and_value = format!("{flag}={value}");
                let error = Cli::try_parse_from(["tandem", command, &flag_and_value]).expect_err(&flag_and_value);
                assert!(error.to_string().contains(flag), "{flag_and_value}: {error}");
            }
        }
        for fine in [
            "--prefix-cache-bytes=1TiB",
            "--max-body-bytes=1048576",
            "--max-seq-len=2",
            "--kv-tokens=2",
            "--threads=1024",
            "--request-timeout=1ms",
            "--served-model-name=x",
        ] {
            Cli::try_parse_from(["tandem", "up", fine]).unwrap_or_else(|error| panic!("{fine}: {error}"));
        }
    }

    #[test]
    fn every_flag_is_described() {
        fn walk(command: &clap::Command) {
            assert!(command.get_about().is_some(), "{} has no description", command.get_name());
            for arg in command.get_arguments() {
                assert!(arg.get_help().is_some(), "{} of {} has no help", arg.get_id(), command.get_name());
            }
            command.get_subcommands().for_each(walk);
        }
        walk(&Cli::command());
    }
}
