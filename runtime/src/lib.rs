//! What every role does alike: configuration layers, logs, metrics, health, drain.

pub mod shutdown;

pub use shutdown::Shutdown;
