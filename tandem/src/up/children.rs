//! How each role is started: the settings of `tandem up` that the role also has, handed down as flags, and what only the
//! supervisor knows.

use std::{ffi::OsString, net::SocketAddr, path::Path};

use clap::CommandFactory;
use tandem_runtime::config::Setting;

use super::{child::Spec, cores::Share};
use crate::cli::{Cli, values::Device};

/// Settings that `up` does not hand down: it computed them itself, or they are about `up`.
const OWN: [&str; 8] = ["config", "model", "cache-dir", "served-model-name", "threads", "cpus", "spin-us", "max-seq-len"];

/// Everything that the children's command lines are made from.
pub struct Recipe<'a> {
    /// The settings of `tandem up`.
    pub settings: &'a [Setting],
    /// Checkpoint folder, demo unpacked.
    pub model: &'a Path,
    /// Name in the APIs.
    pub served_model_name: &'a str,
    /// Expert workers.
    pub expert_workers: usize,
    /// Longest sequence.
    pub max_seq_len: u64,
}

impl Recipe<'_> {
    /// The coordinator.
    pub fn serve(&self) -> Spec {
        let mut args = self.common("serve");
        push(&mut args, "served-model-name", self.served_model_name);
        push(&mut args, "expert-workers", self.expert_workers);
        push(&mut args, "control-addr", SocketAddr::from(([127, 0, 0, 1], 0)));
        Spec { name: "serve".into(), process: "tandem-serve", args }
    }

    /// The attention worker of the coordinator at `control`.
    pub fn attn(&self, control: &str, device: Device, share: &Share) -> Spec {
        let mut args = self.common("attn");
        push(&mut args, "max-seq-len", self.max_seq_len);
        join(&mut args, control, "attn", device, share);
        Spec { name: "attn".into(), process: "tandem-attn", args }
    }

    /// The expert worker called `name`.
    pub fn experts(&self, control: &str, name: &str, device: Device, share: &Share) -> Spec {
        let mut args = self.common("experts");
        join(&mut args, control, name, device, share);
        Spec { name: name.into(), process: "tandem-experts", args }
    }

    fn common(&self, command: &str) -> Vec<OsString> {
        let mut args = vec![OsString::from(command), OsString::from("--supervised")];
        let mut model = OsString::from("--model=");
        model.push(self.model);
        args.push(model);
        let root = Cli::command();
        let known = root.find_subcommand(command).into_iter().flat_map(clap::Command::get_arguments).filter_map(clap::Arg::get_long);
        for key in known.filter(|key| !OWN.contains(key)) {
            for setting in self.settings.iter().filter(|setting| setting.key == key) {
                for value in &setting.values {
                    push(&mut args, key, value);
                }
            }
        }
        args
    }
}

fn join(args: &mut Vec<OsString>, control: &str, name: &str, device: Device, share: &Share) {
    push(args, "coordinator", control);
    push(args, "name", name);
    push(args, "device", device);
    push(args, "threads", share.threads);
    push(args, "cpus", &share.cpus);
    push(args, "spin-us", share.spin_us);
}

fn push(args: &mut Vec<OsString>, key: &str, value: impl std::fmt::Display) {
    args.push(format!("--{key}={value}").into());
}

/// Sets a flag of a spec to a new value, or adds it.
pub fn set(spec: &mut Spec, key: &str, value: impl std::fmt::Display) {
    let prefix = format!("--{key}=");
    spec.args.retain(|arg| !arg.to_string_lossy().starts_with(&prefix));
    push(&mut spec.args, key, value);
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use tandem_runtime::config;

    use super::*;
    use crate::cli::{Command, values, values::Cpus};

    fn recipe_of(flags: &[&str], check: impl FnOnce(&Recipe<'_>)) {
        let argv: Vec<OsString> = ["tandem", "up"].iter().chain(flags).map(OsString::from).collect();
        let resolved = config::resolve(&Cli::command(), &argv, &[]).expect("valid flags");
        let recipe =
            Recipe { settings: &resolved.settings, model: Path::new("/m"), served_model_name: "m", expert_workers: 2, max_seq_len: 100 };
        check(&recipe);
    }

    fn parse(spec: &Spec) -> Command {
        let argv = std::iter::once(OsString::from(spec.process)).chain(spec.args.iter().cloned());
        Cli::try_parse_from(argv).unwrap_or_else(|error| panic!("{}: {error}", spec.name)).command
    }

    #[test]
    fn settings_reach_the_roles_that_have_them() {
        let flags = [
            "--port",
            "0",
            "--dtype",
            "f32",
            "--split=ffn",
            "--experts",
            "cpu,cpu",
            "--kv-tokens",
            "77",
            "--link",
            "grpc",
            "--max-logprobs",
            "-1",
        ];
        recipe_of(&flags, |recipe| {
            let share = &Share { threads: 3, cpus: Cpus::List(vec![2, 0, 1]), spin_us: 0 };
            let Command::Serve(serve) = parse(&recipe.serve()) else { panic!("serve") };
            assert_eq!((serve.http.port, serve.expert_workers, serve.http.max_logprobs), (0, 2, -1));
            assert_eq!((serve.model.dtype, serve.split.split), (values::Dtype::F32, values::Split::Ffn));
            assert!(serve.common.supervised);
            let Command::Attn(attn) = parse(&recipe.attn("http://127.0.0.1:9", Device::Reference, share)) else { panic!("attn") };
            assert_eq!((attn.limits.kv_tokens, attn.limits.link, attn.compute.threads), (77, values::Link::Grpc, Some(3)));
            assert_eq!(attn.join.device, Device::Reference);
            assert_eq!(attn.compute.cpus, share.cpus);
            assert_eq!((attn.join.coordinator.as_str(), attn.limits.max_seq_len), ("http://127.0.0.1:9", Some(100)));
            let mut spec = recipe.experts("http://127.0.0.1:9", "experts-1", Device::Cpu, share);
            set(&mut spec, "admin", "127.0.0.1:5");
            set(&mut spec, "admin", "127.0.0.1:6");
            let Command::Experts(experts) = parse(&spec) else { panic!("experts") };
            assert_eq!((experts.join.name.as_deref(), experts.model.dtype), (Some("experts-1"), values::Dtype::F32));
            assert_eq!(experts.join.admin.port(), 6);
        });
    }
}
