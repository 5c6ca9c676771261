//! `tandem up`: all roles on one machine, as child processes.
//!
//! `crate::plan` says what goes where, `children.rs` how each role is started, `restart.rs` what a death means, `supervisor.rs` runs
//! it all, `progress.rs` shows how far loading is, `cores.rs` shares the cores out, `devices.rs` chooses GPUs.

mod child;
mod children;
mod cores;
mod devices;
mod progress;
mod restart;
mod supervisor;

pub use cores::spin_us;
pub use supervisor::run;
