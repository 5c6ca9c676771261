//! The listener: small writes at once (a token must not wait for Nagle), no patience with half requests, a graceful end.

use std::future::Future;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};

/// How long a connection may take over a request's head, or stay open between two requests. Whoever opens connections and says nothing
/// must not use up the process's file descriptors.
const HEAD_WITHIN: Duration = Duration::from_secs(60);
/// Pause after a failed accept that is not the connection's own fault (no file descriptors left): it ends by itself.
const ACCEPT_PAUSE: Duration = Duration::from_millis(200);

/// Serves `router` until `stop` resolves, then lets running answers finish: idle connections are closed, streams end by themselves
/// (drop the future to cut them). While the engine drains, do not stop yet: new requests should get their 503.
///
/// # Errors
/// None in practice: failed accepts are retried.
pub async fn serve(listener: TcpListener, router: Router, stop: impl Future<Output = ()> + Send + 'static) -> std::io::Result<()> {
    serve_within(listener, router, HEAD_WITHIN, stop).await
}

async fn serve_within(listener: TcpListener, router: Router, head_within: Duration, stop: impl Future<Output = ()>) -> std::io::Result<()> {
    let connections = GracefulShutdown::new();
    let service = TowerToHyperService::new(router);
    let mut tasks = tokio::task::JoinSet::new();
    let mut stop = std::pin::pin!(stop);
    let mut failing = false;
    loop {
        let accepted = tokio::select! {
            () = &mut stop => break,
            accepted = listener.accept() => accepted,
            // Finished connections leave the set, so that it does not grow.
            Some(_) = tasks.join_next() => continue,
        };
        match accepted {
            Ok((stream, _)) => {
                failing = false;
                prepare(&stream);
                let connection = http1::Builder::new()
                    .timer(TokioTimer::new())
                    .header_read_timeout(head_within)
                    .serve_connection(TokioIo::new(stream), service.clone());
                let connection = connections.watch(connection);
                tasks.spawn(async move {
                    if let Err(error) = connection.await {
                        tracing::debug!(%error, "connection ended");
                    }
                });
            }
            Err(error) => {
                // Said once, not five times a second.
                if !std::mem::replace(&mut failing, true) {
                    tracing::warn!(%error, open = tasks.len(), "cannot accept connections; trying on");
                }
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    drop(listener);
    connections.shutdown().await;
    Ok(())
}

fn prepare(stream: &TcpStream) {
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "TCP_NODELAY could not be set");
    }
}

#[cfg(test)]
mod tests {
    use axum::routing::get;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    async fn server(head_within: Duration) -> (std::net::SocketAddr, tokio::sync::oneshot::Sender<()>, tokio::task::JoinHandle<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let addr = listener.local_addr().unwrap();
        let (stop, stopped) = tokio::sync::oneshot::channel();
        let slow = || async {
            tokio::time::sleep(Duration::from_millis(300)).await;
            "done"
        };
        let router = Router::new().route("/slow", get(slow));
        let task = tokio::spawn(async move {
            serve_within(listener, router, head_within, async move { drop(stopped.await) }).await.unwrap();
        });
        (addr, stop, task)
    }

    #[tokio::test]
    async fn half_a_head_is_not_waited_for() {
        let (addr, _stop, _task) = server(Duration::from_millis(100)).await;
        let mut silent = TcpStream::connect(addr).await.unwrap();
        let mut half = TcpStream::connect(addr).await.unwrap();
        half.write_all(b"GET /slow HT").await.unwrap();
        let mut answer = Vec::new();
        // Closed without an answer; a hang here fails by the test's own limit.
        let both = async { (silent.read_to_end(&mut Vec::new()).await, half.read_to_end(&mut answer).await) };
        let (silent, half) = tokio::time::timeout(Duration::from_secs(20), both).await.expect("both are closed");
        assert!(matches!(silent, Ok(0) | Err(_)), "{silent:?}");
        assert!(half.is_err() || !answer.starts_with(b"HTTP/1.1 200"), "{}", String::from_utf8_lossy(&answer));
    }

    #[tokio::test]
    async fn a_running_answer_outlives_the_stop_and_the_next_one_is_refused() {
        let (addr, stop, task) = server(Duration::from_secs(60)).await;
        let mut client = TcpStream::connect(addr).await.unwrap();
        client.write_all(b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
        tokio::time::sleep(Duration::from_millis(50)).await;
        stop.send(()).unwrap();
        let mut answer = String::new();
        client.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with("done"), "{answer}");
        task.await.unwrap();
        assert!(TcpStream::connect(addr).await.is_err());
    }
}
