//! Configuration layers: flags > `TANDEM_*` environment > TOML file > defaults.
//!
//! The flags are the one definition: the key of a setting is its flag's long name, in every layer. A lower layer's value becomes
//! the flag's default before the command line is parsed, so that each layer passes the same checks and a value's origin is
//! always known. `layers.rs` reads the two lower layers, `show.rs` prints the result.
//!
//! * File (`--config FILE` or `TANDEM_CONFIG`; none is looked for by itself): `kv-tokens = 4096` holds for every command that
//!   has the flag, the same line under `[attn]` for `tandem attn` alone.
//! * Environment: `TANDEM_KV_TOKENS` for every command that has the flag, `TANDEM_ATTN__KV_TOKENS` for `tandem attn` alone.
//! * An unknown key is an error in both. A key that only another command has is fine: one file serves all roles.

mod layers;
mod show;

use std::{collections::BTreeMap, ffi::OsString, fmt, path::PathBuf};

use clap::{ArgMatches, Command, error::ContextKind, parser::ValueSource};

pub use show::render;

/// Where a setting's value came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The command line.
    Flag,
    /// The environment variable of this name.
    Env(String),
    /// A TOML file; the section is the command's, or none at top level.
    File {
        /// The file.
        path: PathBuf,
        /// `[section]`, if any.
        section: Option<String>,
    },
    /// The built-in default, or no value at all.
    Default,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flag => f.write_str("flag"),
            Self::Env(name) => write!(f, "environment {name}"),
            Self::File { path, section: None } => write!(f, "file {}", path.display()),
            Self::File { path, section: Some(section) } => write!(f, "file {} [{section}]", path.display()),
            Self::Default => f.write_str("default"),
        }
    }
}

/// One setting of the command that runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    /// Long flag name.
    pub key: String,
    /// Values in force, as written; empty = not set.
    pub values: Vec<String>,
    /// Whether the flag takes a list.
    pub list: bool,
    /// Which layer won.
    pub origin: Origin,
}

/// The merged configuration.
#[derive(Debug)]
pub struct Resolved {
    /// The parsed command line with all layers in it: hand it to clap's `from_arg_matches`.
    pub matches: ArgMatches,
    /// The settings of the chosen command in the order of its flags; empty for a command without layers.
    pub settings: Vec<Setting>,
}

/// A configuration that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The command line is wrong, or asks for help or the version (see `clap::Error::exit_code`).
    #[error("{0}")]
    CommandLine(Box<clap::Error>),
    /// The config file cannot be read.
    #[error("config file {}: {reason}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// No command has such a setting.
    #[error("{origin}: unknown key {key:?}{hint}")]
    UnknownKey {
        /// Where it was met.
        origin: Origin,
        /// The key as written.
        key: String,
        /// The nearest known key, as a clause.
        hint: String,
    },
    /// A value from the environment or the file does not fit its setting.
    #[error("{origin}: {key}: {reason}")]
    Value {
        /// Where it was met.
        origin: Origin,
        /// The setting.
        key: String,
        /// What is wrong with it.
        reason: String,
    },
}

/// Value and origin of the lower layers, by key.
type Overrides = BTreeMap<String, (Vec<String>, Origin)>;

/// Parses `argv` (program name first) by `root` with `env` and the config file beneath it. Layers apply to every direct
/// subcommand that has a `--config` flag.
///
/// # Errors
/// [`ConfigError`]; help and version requests come back as [`ConfigError::CommandLine`].
pub fn resolve(root: &Command, argv: &[OsString], env: &[(String, String)]) -> Result<Resolved, ConfigError> {
    let command_line = |error: clap::Error| ConfigError::CommandLine(Box::new(error));
    // First pass: which command, which file. Nothing is required yet, since a lower layer may still give it.
    let relaxed = root.clone().mut_subcommands(|sub| sub.mut_args(|arg| arg.required(false)));
    let first = relaxed.try_get_matches_from(argv).map_err(command_line)?;
    let layered = first
        .subcommand()
        .filter(|(name, _)| root.find_subcommand(name).is_some_and(|sub| sub.get_arguments().any(|arg| arg.get_id() == "config")));
    let Some((name, sub_matches)) = layered else {
        let matches = root.clone().try_get_matches_from(argv).map_err(command_line)?;
        return Ok(Resolved { matches, settings: Vec::new() });
    };
    let name = name.to_owned();

    let known = layers::KnownKeys::of(root);
    let mut overrides = Overrides::new();
    let from_env = layers::read_env(&known, &name, env)?;
    let file = sub_matches.get_one::<PathBuf>("config").cloned();
    let file = file.or_else(|| from_env.get("config").and_then(|(values, _)| values.first()).map(PathBuf::from));
    if let Some(path) = file {
        overrides.extend(layers::read_file(&known, &name, &path)?);
    }
    overrides.extend(from_env);

    let second = root.clone().mut_subcommand(&name, |sub| {
        sub.mut_args(|arg| match arg.get_long().and_then(|long| overrides.get(long)) {
            Some((values, _)) => {
                arg.required(false).default_values(values.iter().map(|value| clap::builder::OsStr::from(value.as_str().to_owned())))
            }
            None => arg,
        })
    });
    let matches = second.try_get_matches_from(argv).map_err(|error| blame(error, &overrides))?;
    let settings = match (root.find_subcommand(&name), matches.subcommand_matches(&name)) {
        (Some(sub), Some(values)) => settings_of(sub, values, &overrides),
        _ => Vec::new(),
    };
    Ok(Resolved { matches, settings })
}

/// Finds the layer that an error of the second pass comes from. The first pass accepted the command line itself.
fn blame(error: clap::Error, overrides: &Overrides) -> ConfigError {
    let flag = error.get(ContextKind::InvalidArg).map(ToString::to_string).unwrap_or_default();
    let key = flag.trim_start_matches("--").split([' ', '=']).next().unwrap_or_default();
    match overrides.get(key) {
        Some((_, origin)) => {
            let text = error.render().to_string();
            let reason = text.trim_start_matches("error: ").lines().take_while(|line| !line.is_empty()).collect::<Vec<_>>().join(" ");
            ConfigError::Value { origin: origin.clone(), key: key.into(), reason }
        }
        None => ConfigError::CommandLine(Box::new(error)),
    }
}

fn settings_of(command: &Command, matches: &ArgMatches, overrides: &Overrides) -> Vec<Setting> {
    let mut settings = Vec::new();
    for arg in command.get_arguments() {
        let Some(key) = arg.get_long().filter(|long| !matches!(*long, "help" | "version")) else { continue };
        if arg.is_hide_set() {
            continue;
        }
        let id = arg.get_id().as_str();
        let values = matches.get_raw(id).into_iter().flatten().map(|value| value.to_string_lossy().into_owned()).collect();
        let origin = match (matches.value_source(id), overrides.get(key)) {
            (Some(ValueSource::CommandLine), _) => Origin::Flag,
            (_, Some((_, origin))) => origin.clone(),
            _ => Origin::Default,
        };
        let list = arg.get_value_delimiter().is_some() || matches!(arg.get_action(), clap::ArgAction::Append);
        settings.push(Setting { key: key.into(), values, list, origin });
    }
    settings
}

#[cfg(test)]
mod tests;
