//! Exit codes of the `tandem` binary (the `sysexits.h` numbers), one place so that docs, supervisor and tests agree.

/// Everything went well, or a drain ended in time.
pub const OK: u8 = 0;
/// A flag, an environment variable or a config key is wrong.
pub const USAGE: u8 = 64;
/// Something this process needs is not there: a port, a coordinator, a worker.
pub const UNAVAILABLE: u8 = 69;
/// A failure that is Tandem's own.
pub const INTERNAL: u8 = 70;
/// What was asked for cannot be written: standard output is a full disk, say.
pub const OUTPUT: u8 = 74;
/// The checkpoint or the plan cannot be served as asked.
pub const CONFIG: u8 = 78;
