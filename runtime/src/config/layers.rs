//! The two layers beneath the flags: the environment and the TOML file.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use clap::Command;
use toml::{Table, Value};

use super::{ConfigError, Origin, Overrides};

const PREFIX: &str = "TANDEM_";
/// Variables of the test harness, which the processes under test inherit, and of where GPU kernels are found: no settings.
const HARNESS: [&str; 3] = ["TANDEM_TEST_", "TANDEM_BIN", "TANDEM_KERNEL_"];

/// The keys of every layered command.
pub(super) struct KnownKeys {
    by_command: BTreeMap<String, BTreeSet<String>>,
}

impl KnownKeys {
    pub(super) fn of(root: &Command) -> Self {
        let mut by_command = BTreeMap::new();
        for sub in root.get_subcommands() {
            let keys: BTreeSet<String> =
                sub.get_arguments().filter(|arg| !arg.is_hide_set()).filter_map(|arg| arg.get_long()).map(str::to_owned).collect();
            if keys.contains("config") {
                by_command.insert(sub.get_name().to_owned(), keys);
            }
        }
        Self { by_command }
    }

    fn in_any(&self, key: &str) -> bool {
        self.by_command.values().any(|keys| keys.contains(key))
    }

    fn in_command(&self, command: &str, key: &str) -> bool {
        self.by_command.get(command).is_some_and(|keys| keys.contains(key))
    }

    fn unknown(&self, origin: Origin, key: &str, command: Option<&str>) -> ConfigError {
        let candidates = self.by_command.iter().filter(|(name, _)| command.is_none_or(|wanted| wanted == *name)).flat_map(|(_, keys)| keys);
        let spelled = key.replace('_', "-").to_lowercase();
        let nearest = candidates.map(|known| (distance(&spelled, known), known)).min().filter(|(far, _)| *far <= 1 + spelled.len() / 4);
        let hint = match nearest {
            Some((_, known)) => format!("; did you mean {known:?}?"),
            None => "; `tandem config show` lists the keys".into(),
        };
        ConfigError::UnknownKey { origin, key: key.into(), hint }
    }
}

/// `TANDEM_KEY` and `TANDEM_COMMAND__KEY`; the second wins.
pub(super) fn read_env(known: &KnownKeys, command: &str, env: &[(String, String)]) -> Result<Overrides, ConfigError> {
    let mut general = Overrides::new();
    let mut specific = Overrides::new();
    for (name, value) in env {
        let Some(rest) = name.strip_prefix(PREFIX) else { continue };
        if is_service_link(name, value) || HARNESS.iter().any(|prefix| name.starts_with(prefix)) {
            continue;
        }
        let origin = Origin::Env(name.clone());
        let spelled = |text: &str| text.to_lowercase().replace('_', "-");
        let entry = (vec![value.clone()], origin.clone());
        match rest.split_once("__") {
            Some((section, key)) => {
                let (section, key) = (spelled(section), spelled(key));
                if !known.in_command(&section, &key) {
                    let scope = known.by_command.contains_key(&section).then_some(section.as_str());
                    return Err(known.unknown(origin, &key, scope));
                }
                if section == command {
                    specific.insert(key, entry);
                }
            }
            None => {
                let key = spelled(rest);
                if !known.in_any(&key) {
                    return Err(known.unknown(origin, &key, None));
                }
                if known.in_command(command, &key) {
                    general.insert(key, entry);
                }
            }
        }
    }
    general.extend(specific);
    Ok(general)
}

/// Kubernetes puts `TANDEM_PORT=tcp://…`, `TANDEM_SERVICE_HOST` and the like into each pod beside a service named `tandem`.
fn is_service_link(name: &str, value: &str) -> bool {
    let numbered = name.split("_PORT_").nth(1).is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()));
    let link = name.ends_with("_PORT") && (value.starts_with("tcp://") || value.starts_with("udp://"));
    numbered || link || name.ends_with("_SERVICE_HOST") || name.contains("_SERVICE_PORT")
}

/// Top-level keys and the command's own section; the second wins.
pub(super) fn read_file(known: &KnownKeys, command: &str, path: &Path) -> Result<Overrides, ConfigError> {
    let failed = |reason: String| ConfigError::File { path: path.to_owned(), reason };
    let text = fs::read_to_string(path).map_err(|error| failed(error.to_string()))?;
    let table: Table = text.parse().map_err(|error: toml::de::Error| failed(error.to_string().trim().to_owned()))?;
    let mut general = Overrides::new();
    let mut specific = Overrides::new();
    for (key, value) in table {
        match value {
            Value::Table(section) => {
                if !known.by_command.contains_key(&key) {
                    let sections: Vec<_> = known.by_command.keys().map(|name| format!("[{name}]")).collect();
                    return Err(failed(format!("unknown section [{key}]; the sections are {}", sections.join(" "))));
                }
                let origin = Origin::File { path: path.to_owned(), section: Some(key.clone()) };
                for (inner, value) in section {
                    if !known.in_command(&key, &inner) || inner == "config" {
                        return Err(known.unknown(origin, &inner, Some(&key)));
                    }
                    let values = scalars(&inner, &value, &origin)?;
                    if key == command {
                        specific.insert(inner, (values, origin.clone()));
                    }
                }
            }
            value => {
                let origin = Origin::File { path: path.to_owned(), section: None };
                if !known.in_any(&key) || key == "config" {
                    return Err(known.unknown(origin, &key, None));
                }
                let values = scalars(&key, &value, &origin)?;
                if known.in_command(command, &key) {
                    general.insert(key, (values, origin));
                }
            }
        }
    }
    general.extend(specific);
    Ok(general)
}

/// A TOML value as flag values: one for a scalar, one per element of an array.
fn scalars(key: &str, value: &Value, origin: &Origin) -> Result<Vec<String>, ConfigError> {
    let scalar = |value: &Value| match value {
        Value::String(text) => Ok(text.clone()),
        Value::Integer(number) => Ok(number.to_string()),
        Value::Float(number) => Ok(number.to_string()),
        Value::Boolean(flag) => Ok(flag.to_string()),
        other => Err(ConfigError::Value {
            origin: origin.clone(),
            key: key.into(),
            reason: format!("a {} is no value here; write a string, a number, true, false or a list of these", other.type_str()),
        }),
    };
    match value {
        Value::Array(items) => items.iter().map(scalar).collect(),
        single => Ok(vec![scalar(single)?]),
    }
}

/// Levenshtein distance, for "did you mean".
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let substituted = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = substituted.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}
