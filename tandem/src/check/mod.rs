//! `tandem check`: whether checkpoints can be served, from their headers alone.
//!
//! `find.rs` says which checkpoints the paths stand for, `verdict.rs` looks at one with the loader's own code, `report.rs` prints the
//! long form.

#[cfg(all(test, feature = "demo"))]
mod damage;
mod find;
#[cfg(all(test, feature = "demo"))]
mod published;
mod report;
#[cfg(all(test, feature = "demo"))]
mod tests;
mod verdict;

use self::{find::Found, verdict::Verdict};
use crate::{bytes::gib, cli::CheckArgs, failure::Failure, output};

/// Looks at every checkpoint and prints a verdict each.
///
/// # Errors
/// When one is refused: the exit code tells scripts, the reasons are printed. When a line cannot be written.
pub fn run(args: &CheckArgs) -> Result<(), Failure> {
    let kinds: Vec<_> = args.device.iter().map(|kind| (*kind).into()).collect();
    let found = find::checkpoints(&args.paths);
    let count = found.len();
    let mut refused = 0;
    for found in found {
        let mut verdict = match found {
            Found::Checkpoint(path) => Verdict::of(&path, &kinds, args.semantic),
            Found::Unseen { path, reason } => Verdict::refused(&path, reason),
        };
        refused += usize::from(verdict.is_refused());
        let text = match (args.jsonl, args.report) {
            (false, false) => line(&verdict),
            (false, true) => report::report(&verdict),
            (true, report) => {
                verdict.report = report.then(|| report::report(&verdict));
                serde_json::to_string(&verdict).map_err(|error| Failure::internal(error.to_string()))? + "\n"
            }
        };
        output::print(&text)?;
    }
    match refused {
        0 => Ok(()),
        n => Err(Failure::config(format!("{n} of {count} checkpoints refused"))),
    }
}

/// The short form: one line, and one for each warning.
fn line(verdict: &Verdict) -> String {
    let mut text = match &verdict.reason {
        Some(_) => format!("REFUSED  {}: {}\n", verdict.path, verdict.short_reason()),
        None => {
            let what = verdict.checkpoint.as_ref().map_or_else(String::new, |c| {
                let stub = if c.stub { ", headers only" } else { "" };
                format!(" ({}, {} tensors in {} files, {} GiB{stub})", c.format, c.tensors, c.files, gib(c.bytes))
            });
            format!("PASS     {}{what}\n", verdict.path)
        }
    };
    let warnings = verdict.checkpoint.iter().flat_map(|c| &c.warnings);
    for note in warnings.chain(verdict.semantic.iter().flat_map(|v| &v.notes)) {
        text += &format!("         note: {note}\n");
    }
    text
}
