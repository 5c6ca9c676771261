//! Turns SIGTERM and SIGINT into [`Shutdown`]: the first one drains, the second one stops at once.

use std::io;

use tokio::signal::unix::{SignalKind, signal};

use crate::Shutdown;

/// Starts listening on the current runtime. From then on the default action of both signals (end the process) is off, so the
/// caller must act on `shutdown`.
///
/// # Errors
/// When the handlers cannot be registered with the system.
pub fn install(shutdown: Shutdown) -> io::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;
    tokio::spawn(async move {
        loop {
            let name = tokio::select! {
                got = terminate.recv() => if got.is_some() { "SIGTERM" } else { return },
                got = interrupt.recv() => if got.is_some() { "SIGINT" } else { return },
            };
            if shutdown.is_draining() {
                tracing::warn!(signal = name, "second signal: stopping now");
                shutdown.stop_now();
            } else {
                tracing::info!(signal = name, "draining; a second signal stops at once");
                shutdown.start_drain();
            }
        }
    });
    Ok(())
}
