//! The small HTTP server of a worker process: `/livez`, `/readyz`, `/metrics`, `/version`. The coordinator merges
//! [`router`]'s routes into its own server instead.

use std::{io, net::SocketAddr};

use axum::{
    Json, Router,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
};
use serde_json::json;
use tokio::net::TcpListener;

use crate::{health::Health, metrics::MetricsHandle};

/// The four routes over `health` and `metrics`.
pub fn router(health: Health, metrics: MetricsHandle) -> Router {
    let live = health.clone();
    Router::new()
        .route(
            "/livez",
            get(move || async move {
                let report = live.report();
                (status(report.live), Json(report)).into_response()
            }),
        )
        .route(
            "/readyz",
            get(move || async move {
                let report = health.report();
                (status(report.ready), Json(report)).into_response()
            }),
        )
        .route("/metrics", get(move || async move { exposition(metrics.render()) }))
        .route("/version", get(|| async { Json(json!({ "version": env!("CARGO_PKG_VERSION") })) }))
}

/// A `/metrics` answer in the Prometheus text format.
pub fn exposition(text: String) -> Response {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text).into_response()
}

fn status(good: bool) -> StatusCode {
    if good { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }
}

/// Binds `addr` (port 0 = a free one), serves in the background until the runtime ends, and prints `ADMIN http://HOST:PORT` on
/// stdout, where `tandem up` reads it. Returns the bound address.
///
/// # Errors
/// When the address cannot be bound; the error names the address and, where it can be seen, the process that holds it.
pub async fn serve(addr: SocketAddr, health: Health, metrics: MetricsHandle) -> io::Result<SocketAddr> {
    let listener = TcpListener::bind(addr).await.map_err(|error| crate::process::describe_bind_error(addr, &error))?;
    let bound = listener.local_addr()?;
    let app = router(health, metrics);
    tokio::spawn(async move {
        if let Err(error) = axum::serve(listener, app).await {
            tracing::error!(%error, "admin server ended");
        }
    });
    tracing::info!(addr = %bound, "admin endpoints up");
    crate::process::announce(&format!("ADMIN http://{bound}"));
    Ok(bound)
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    async fn get_raw(addr: SocketAddr, path: &str) -> String {
        let mut stream = tokio::net::TcpStream::connect(addr).await.expect("connect");
        stream.write_all(format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").as_bytes()).await.expect("write");
        let mut text = String::new();
        stream.read_to_string(&mut text).await.expect("read");
        text
    }

    #[tokio::test]
    async fn codes_follow_health() {
        let health = Health::new();
        let latch = health.latch("weights");
        let metrics = crate::metrics::install(&[]).expect("recorder");
        let addr = serve("127.0.0.1:0".parse().expect("addr"), health, metrics.clone()).await.expect("bind");
        assert!(get_raw(addr, "/livez").await.starts_with("HTTP/1.1 200"));
        let not_ready = get_raw(addr, "/readyz").await;
        assert!(not_ready.starts_with("HTTP/1.1 503") && not_ready.contains("weights: starting"), "{not_ready}");
        latch.open();
        assert!(get_raw(addr, "/readyz").await.starts_with("HTTP/1.1 200"));
        assert!(get_raw(addr, "/version").await.contains(env!("CARGO_PKG_VERSION")));
        assert!(get_raw(addr, "/metrics").await.contains("text/plain; version=0.0.4"));
        let taken = serve(addr, Health::new(), metrics).await.expect_err("the port is taken");
        assert!(taken.to_string().contains(&addr.to_string()), "{taken}");
    }
}
