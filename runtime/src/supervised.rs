//! A child of `tandem up` must not outlive it, however `up` ends. `up` keeps the write end of each child's stdin open and never
//! writes: end of file means that the parent is gone, even by SIGKILL. A pipe was chosen over `PR_SET_PDEATHSIG` because that
//! one fires when the *thread* that forked ends, and needs unsafe code between fork and exec.

use std::{
    io::{self, Read},
    thread,
    time::Duration,
};

use crate::{Shutdown, exit};

/// How long an orphan may take to stop by itself before it is ended.
const ORPHAN_GRACE: Duration = Duration::from_secs(2);

/// Watches stdin on a thread of its own. At end of file `shutdown` stops at once, and if the process is still there after two
/// seconds it exits.
///
/// # Errors
/// When the thread cannot be started.
pub fn watch_parent(shutdown: Shutdown) -> io::Result<()> {
    thread::Builder::new().name("parent-watch".into()).spawn(move || {
        let mut stdin = io::stdin().lock();
        let mut buffer = [0u8; 64];
        loop {
            match stdin.read(&mut buffer) {
                Ok(0) => break,
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        shutdown.stop_now();
        tracing::warn!("the supervising process is gone: stopping");
        thread::sleep(ORPHAN_GRACE);
        std::process::exit(i32::from(exit::UNAVAILABLE));
    })?;
    Ok(())
}
