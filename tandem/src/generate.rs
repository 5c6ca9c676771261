//! `tandem generate`: man pages and completions from the command-line definition in `cli/`, and stubs of checkpoints.

use std::{fs, io, path::Path};

use clap::CommandFactory;

use crate::{
    cli::{Cli, Generate},
    failure::Failure,
    output,
};

/// Writes what was asked for.
///
/// # Errors
/// When a file or stdout cannot be written.
pub fn run(what: &Generate) -> Result<(), Failure> {
    let mut command = Cli::command();
    let written = match what {
        Generate::Completions { shell } => {
            let mut text = Vec::new();
            clap_complete::generate(*shell, &mut command, "tandem", &mut text);
            return output::print(&String::from_utf8_lossy(&text));
        }
        Generate::Man { dir } => man(command, dir),
        Generate::Stub { name, dir } => stub(name, dir),
    };
    written.map_err(|error| Failure::unavailable(error.to_string()))
}

/// Vocabulary of a GGUF stub: the model's.
const TOKENS: usize = 154_880;

fn stub(name: &str, dir: &Path) -> io::Result<()> {
    use tandem_model::stubs::{Mix, Release, mixes::MIXES};
    let all = name == "all";
    let place = |folder: &str| if all { dir.join(folder.replace('/', "-")) } else { dir.to_owned() };
    let releases: Vec<Release> = Release::ALL.into_iter().filter(|r| all || r.name() == name).collect();
    let title = |mix: &Mix| format!("{}/{}", mix.publisher, mix.name);
    let mixes: Vec<&Mix> = MIXES.iter().filter(|m| all || title(m) == name).collect();
    if releases.is_empty() && mixes.is_empty() {
        let known: Vec<String> = Release::ALL.iter().map(|r| r.name().to_owned()).chain(MIXES.iter().map(title)).collect();
        return Err(io::Error::new(io::ErrorKind::InvalidInput, format!("no stub {name:?}; needed all, or one of {}", known.join(", "))));
    }
    for release in releases {
        release.write(&place(release.name()), &text_files()).map_err(io::Error::other)?;
    }
    for mix in mixes {
        mix.stub(TOKENS).write(&place(&title(mix)), &mix.stem(), 3).map_err(io::Error::other)?;
    }
    Ok(())
}

/// Tokenizer and template for safetensors stubs: the demo model's.
#[cfg(feature = "demo")]
fn text_files() -> Vec<(&'static str, &'static [u8])> {
    let text = |name: &str| name.starts_with("tokenizer") || name.starts_with("chat_template");
    tandem_model::demo::FILES.iter().filter(|(name, _)| text(name)).copied().collect()
}

#[cfg(not(feature = "demo"))]
fn text_files() -> Vec<(&'static str, &'static [u8])> {
    Vec::new()
}

fn man(mut root: clap::Command, dir: &Path) -> io::Result<()> {
    fs::create_dir_all(dir)?;
    root.build();
    page(&root, "tandem", dir)
}

/// Writes `name.1` and the pages of the subcommands below it.
fn page(command: &clap::Command, name: &str, dir: &Path) -> io::Result<()> {
    let mut text = Vec::new();
    clap_mangen::Man::new(command.clone().name(name.to_owned())).render(&mut text)?;
    fs::write(dir.join(format!("{name}.1")), text)?;
    for sub in command.get_subcommands().filter(|sub| sub.get_name() != "help" && !sub.is_hide_set()) {
        page(sub, &format!("{name}-{}", sub.get_name()), dir)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn completions_and_man_pages_name_the_flags() {
        let mut text = Vec::new();
        clap_complete::generate(clap_complete::Shell::Bash, &mut Cli::command(), "tandem", &mut text);
        assert!(String::from_utf8_lossy(&text).contains("--resident-layers"));
        let dir = std::env::temp_dir().join(format!("tandem-man-{}", std::process::id()));
        run(&Generate::Man { dir: dir.clone() }).expect("writable");
        let page = fs::read_to_string(dir.join("tandem-up.1")).expect("written");
        assert!(page.contains("kv\\-tokens"), "{page}");
        assert!(dir.join("tandem-bench-make-checkpoint.1").exists());
        fs::remove_dir_all(dir).expect("clean up");
    }
}
