//! `tandem bench`: a load client over HTTP, and the checkpoint to measure with.
//!
//! `load.rs` sends the requests, `sse.rs` reads their streams, `report.rs` sums the times up.

mod load;
mod report;
mod sse;

use crate::{
    block_on,
    cli::{BenchAction, BenchArgs},
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

fn make_checkpoint(preset: crate::cli::Preset, dir: &std::path::Path) -> Result<(), Failure> {
    let _ = (preset, dir);
    Err(Failure::internal("not wired yet"))
}
