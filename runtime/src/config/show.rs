//! Prints a merged configuration as TOML whose comments give each value's origin, so that the output is itself a config file.

use std::fmt::Write as _;

use super::Setting;

/// One `key = value  # origin` line per setting; settings without a value are comments.
pub fn render(command: &str, settings: &[Setting]) -> String {
    let mut text = format!("# tandem {command}: the merged configuration, with the origin of each value\n");
    let lines: Vec<(String, &Setting)> = settings.iter().map(|setting| (line(setting), setting)).collect();
    let width = lines.iter().map(|(line, _)| line.chars().count()).max().unwrap_or(0).min(48);
    for (line, setting) in lines {
        let _ = writeln!(text, "{line:width$}  # {}", setting.origin);
    }
    text
}

fn line(setting: &Setting) -> String {
    let key = &setting.key;
    let value = match (setting.values.as_slice(), setting.list) {
        ([], _) => return format!("# {key} is not set"),
        ([one], false) => literal(one),
        (many, _) => format!("[{}]", many.iter().map(|value| literal(value)).collect::<Vec<_>>().join(", ")),
    };
    // The file cannot name itself.
    if key == "config" { format!("# {key} = {value}") } else { format!("{key} = {value}") }
}

/// A TOML literal that reads back as the same flag value.
fn literal(value: &str) -> String {
    let bare = matches!(value, "true" | "false") || value.parse::<i64>().is_ok_and(|number| number.to_string() == value);
    if bare { value.into() } else { toml::Value::String(value.into()).to_string() }
}
