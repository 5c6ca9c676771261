//! The listener: small writes at once (a token must not wait for Nagle), a graceful end.

use std::future::Future;

use axum::Router;
use axum::serve::ListenerExt;
use tokio::net::TcpListener;

/// Serves `router` until `stop` resolves, then lets running answers finish: idle connections are closed, streams end by themselves
/// (drop the future to cut them). While the engine drains, do not stop yet: new requests should get their 503.
///
/// # Errors
/// None in practice: failed accepts are retried.
pub async fn serve(listener: TcpListener, router: Router, stop: impl Future<Output = ()> + Send + 'static) -> std::io::Result<()> {
    let listener = listener.tap_io(|stream| {
        if let Err(error) = stream.set_nodelay(true) {
            tracing::debug!(%error, "TCP_NODELAY could not be set");
        }
    });
    axum::serve(listener, router).with_graceful_shutdown(stop).await
}
