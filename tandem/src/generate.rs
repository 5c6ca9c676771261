//! `tandem generate`: man pages and completions from the command-line definition in `cli/`.

use std::{fs, io, path::Path};

use clap::CommandFactory;

use crate::cli::{Cli, Generate};

/// Writes what was asked for.
///
/// # Errors
/// When a file or stdout cannot be written.
pub fn run(what: &Generate) -> io::Result<()> {
    let mut command = Cli::command();
    match what {
        Generate::Completions { shell } => {
            let mut text = Vec::new();
            clap_complete::generate(*shell, &mut command, "tandem", &mut text);
            io::Write::write_all(&mut io::stdout(), &text)
        }
        Generate::Man { dir } => man(command, dir),
    }
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
