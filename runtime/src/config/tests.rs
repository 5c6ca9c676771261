use std::{ffi::OsString, fs, path::PathBuf};

use clap::{Arg, ArgAction, Command, value_parser};
use proptest::prelude::*;

use super::*;

fn role(name: &'static str) -> Command {
    Command::new(name)
        .arg(Arg::new("config").long("config").value_parser(value_parser!(PathBuf)))
        .arg(Arg::new("port").long("port").default_value("8000").value_parser(value_parser!(u16)))
        .arg(Arg::new("served").long("served-model-name"))
        .arg(Arg::new("devices").long("devices").value_delimiter(',').action(ArgAction::Append))
        .arg(
            Arg::new("insecure").long("insecure").num_args(0..=1).require_equals(true).default_missing_value("true").default_value("false"),
        )
}

fn root() -> Command {
    Command::new("tandem")
        .subcommand(role("serve"))
        .subcommand(role("attn").arg(Arg::new("kv").long("kv-tokens").required(true).value_parser(value_parser!(u64))))
        .subcommand(Command::new("doctor"))
}

fn run(argv: &[&str], env: &[(&str, &str)]) -> Result<Resolved, ConfigError> {
    let argv: Vec<OsString> = argv.iter().map(OsString::from).collect();
    let env: Vec<(String, String)> = env.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect();
    resolve(&root(), &argv, &env)
}

fn setting<'a>(resolved: &'a Resolved, key: &str) -> &'a Setting {
    resolved.settings.iter().find(|setting| setting.key == key).expect("known key")
}

/// A config file that lives as long as the guard.
struct TempFile(PathBuf);
impl TempFile {
    fn new(name: &str, text: &str) -> Self {
        let path = std::env::temp_dir().join(format!("tandem-config-{}-{name}.toml", std::process::id()));
        fs::write(&path, text).expect("write");
        Self(path)
    }
    fn arg(&self) -> &str {
        self.0.to_str().expect("utf-8")
    }
}
impl Drop for TempFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

#[test]
fn flags_beat_env_beats_file_beats_defaults() {
    let file = TempFile::new("order", "port = 1\nserved-model-name = \"from-file\"\n[serve]\nport = 2\n[attn]\nport = 3\n");
    let with_file = ["tandem", "serve", "--config", file.arg()];
    let port = |resolved: &Resolved| (setting(resolved, "port").values.clone(), setting(resolved, "port").origin.clone());

    assert_eq!(port(&run(&["tandem", "serve"], &[]).expect("ok")), (vec!["8000".into()], Origin::Default));
    let section = Origin::File { path: file.0.clone(), section: Some("serve".into()) };
    assert_eq!(port(&run(&with_file, &[]).expect("ok")), (vec!["2".into()], section));
    let env = [("TANDEM_PORT", "4")];
    assert_eq!(port(&run(&with_file, &env).expect("ok")), (vec!["4".into()], Origin::Env("TANDEM_PORT".into())));
    let env = [("TANDEM_SERVE__PORT", "5"), ("TANDEM_PORT", "4"), ("TANDEM_ATTN__PORT", "6")];
    assert_eq!(port(&run(&with_file, &env).expect("ok")), (vec!["5".into()], Origin::Env("TANDEM_SERVE__PORT".into())));
    let flagged: Vec<&str> = with_file.iter().copied().chain(["--port", "7"]).collect();
    let resolved = run(&flagged, &env).expect("ok");
    assert_eq!(port(&resolved), (vec!["7".into()], Origin::Flag));
    assert_eq!(setting(&resolved, "served-model-name").values, ["from-file"]);
    assert_eq!(resolved.matches.subcommand_matches("serve").expect("sub").get_one::<u16>("port"), Some(&7));
}

#[test]
fn the_environment_can_name_the_file_and_give_required_values() {
    let file = TempFile::new("named", "kv-tokens = 4096\ndevices = [\"cpu\", \"cuda:0\"]\ninsecure = true\n");
    let resolved = run(&["tandem", "attn"], &[("TANDEM_CONFIG", file.arg())]).expect("ok");
    let sub = resolved.matches.subcommand_matches("attn").expect("sub");
    assert_eq!(sub.get_one::<u64>("kv"), Some(&4096));
    assert_eq!(setting(&resolved, "devices").values, ["cpu", "cuda:0"]);
    assert_eq!(setting(&resolved, "insecure").values, ["true"]);
    let off = run(&["tandem", "attn", "--insecure=false"], &[("TANDEM_CONFIG", file.arg()), ("TANDEM_DEVICES", "a,b,c")]).expect("ok");
    assert_eq!(setting(&off, "insecure").values, ["false"]);
    assert_eq!(off.matches.subcommand_matches("attn").expect("sub").get_many::<String>("devices").expect("values").count(), 3);
    let missing = run(&["tandem", "attn"], &[]).expect_err("kv-tokens is required");
    assert!(missing.to_string().contains("--kv-tokens"), "{missing}");
}

#[test]
fn unknown_keys_are_errors_that_name_the_nearest() {
    let error = run(&["tandem", "serve"], &[("TANDEM_PROT", "1")]).expect_err("unknown").to_string();
    assert_eq!(error, "environment TANDEM_PROT: unknown key \"prot\"; did you mean \"port\"?");
    let file = TempFile::new("unknown", "[serve]\nkv-tokens = 3\n");
    let error = run(&["tandem", "serve", "--config", file.arg()], &[]).expect_err("attn has it, serve not").to_string();
    assert!(error.contains("[serve]: unknown key \"kv-tokens\""), "{error}");
    let file = TempFile::new("section", "[server]\nport = 3\n");
    let error = run(&["tandem", "serve", "--config", file.arg()], &[]).expect_err("section").to_string();
    assert!(error.contains("unknown section [server]") && error.contains("[serve]"), "{error}");
    // A key that only another command has is no error.
    assert!(run(&["tandem", "serve"], &[("TANDEM_KV_TOKENS", "3")]).is_ok());
}

#[test]
fn bad_values_name_their_layer() {
    let error = run(&["tandem", "serve"], &[("TANDEM_PORT", "70000")]).expect_err("too large").to_string();
    assert!(error.starts_with("environment TANDEM_PORT: port: invalid value '70000'"), "{error}");
    let file = TempFile::new("bad", "port = {a = 1}\n");
    assert!(run(&["tandem", "serve", "--config", file.arg()], &[]).is_err());
    let file = TempFile::new("date", "port = 2020-01-01\n");
    let error = run(&["tandem", "serve", "--config", file.arg()], &[]).expect_err("date").to_string();
    assert!(error.contains("a datetime is no value here"), "{error}");
    let error = run(&["tandem", "serve", "--config", "/nonexistent/t.toml"], &[]).expect_err("no file").to_string();
    assert!(error.contains("/nonexistent/t.toml"), "{error}");
    assert!(matches!(run(&["tandem", "serve", "--port", "x"], &[]), Err(ConfigError::CommandLine(_))));
}

#[test]
fn service_links_of_kubernetes_are_not_settings() {
    let env = [
        ("TANDEM_PORT", "tcp://10.0.0.1:8000"),
        ("TANDEM_SERVICE_HOST", "10.0.0.1"),
        ("TANDEM_SERVICE_PORT_HTTP", "8000"),
        ("TANDEM_PORT_8000_TCP_ADDR", "10.0.0.1"),
    ];
    let resolved = run(&["tandem", "serve"], &env).expect("ignored");
    assert_eq!(setting(&resolved, "port").origin, Origin::Default);
}

#[test]
fn commands_without_layers_ignore_the_environment() {
    assert!(run(&["tandem", "doctor"], &[("TANDEM_NO_SUCH", "1")]).expect("ok").settings.is_empty());
}

proptest! {
    #[test]
    fn shown_settings_read_back_the_same(port in 1u16.., name in "[a-zA-Z0-9 .\"'\\\\#=é]{1,20}", devices in prop::collection::vec("[a-z]{1,5}", 1..4)) {
        let port = port.to_string();
        let devices = devices.join(",");
        let served = format!("--served-model-name={name}");
        let before = run(&["tandem", "serve", "--port", &port, &served, "--devices", &devices, "--insecure"], &[]).expect("ok");
        let file = TempFile::new("roundtrip", &render("serve", &before.settings));
        let after = run(&["tandem", "serve", "--config", file.arg()], &[]).expect("reads back");
        for setting in before.settings.iter().filter(|setting| setting.key != "config") {
            let again = self::setting(&after, &setting.key);
            prop_assert_eq!(&again.values, &setting.values);
        }
    }
}
