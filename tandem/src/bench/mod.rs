//! `tandem bench`: a load client over HTTP, and the checkpoint to measure with.
//!
//! `load.rs` sends the requests, `report.rs` sums the times up.

mod load;
mod report;

use std::path::Path;

use tandem_runtime::process;

use crate::{
    block_on,
    cli::{BenchAction, BenchArgs, Preset},
    failure::Failure,
};

/// Runs a measurement or writes a checkpoint.
///
/// # Errors
/// When the server cannot be reached or answers with an error, or the checkpoint cannot be written.
pub fn run(args: BenchArgs) -> Result<(), Failure> {
    match args.action {
        None => block_on(1, load::run(args.load)),
        Some(BenchAction::MakeCheckpoint { preset, dir }) => make_checkpoint(preset, &dir),
    }
}

/// Writes a generated checkpoint, with the demo model's tokenizer and template where the vocabulary is large enough for them.
fn make_checkpoint(preset: Preset, dir: &Path) -> Result<(), Failure> {
    use tandem_model::synthetic;
    let preset = match preset {
        Preset::Tiny => synthetic::Preset::Tiny,
        Preset::TinyB => synthetic::Preset::TinyB,
        Preset::Tinyk => synthetic::Preset::Tinyk,
        Preset::Small => synthetic::Preset::Small,
    };
    if dir.join("config.json").exists() {
        return Err(Failure::usage(format!("{} holds a checkpoint already: give another folder", dir.display())));
    }
    let failed = |error: &dyn std::fmt::Display| Failure::unavailable(format!("{}: {error}", dir.display()));
    process::complain(&format!("writing {}", dir.display()));
    synthetic::write(preset, dir, &[]).map_err(|error| failed(&error))?;
    let text = text_files(preset.config().vocab);
    for (name, content) in &text {
        std::fs::write(dir.join(name), content).map_err(|error| failed(&error))?;
    }
    if text.is_empty() {
        process::complain(
            "no tokenizer is written: the vocabulary is smaller than the demo model's; copy tokenizer files beside it to serve it",
        );
    }
    Ok(())
}

/// Files that serve text with a vocabulary of this size.
#[cfg(feature = "demo")]
fn text_files(vocab: usize) -> Vec<(&'static str, &'static [u8])> {
    const DEMO_VOCAB: usize = 1536;
    let wanted = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"];
    let files = tandem_model::demo::FILES.iter().copied().filter(|(name, _)| wanted.contains(name));
    if vocab >= DEMO_VOCAB { files.collect() } else { Vec::new() }
}

#[cfg(not(feature = "demo"))]
fn text_files(_: usize) -> Vec<(&'static str, &'static [u8])> {
    Vec::new()
}
