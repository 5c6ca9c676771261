//! The two listeners, with errors that say which flag, which address and who holds it.

use std::io;
use std::net::SocketAddr;

use tandem_runtime::process;
use tokio::net::TcpListener;

use super::Error;

/// The first address of `host`, which may be a name.
pub(super) async fn resolve(host: &str, port: u16) -> Result<SocketAddr, Error> {
    let flag = "--host";
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    let mut found = tokio::net::lookup_host((bare, port)).await.map_err(|source| {
        let text = format!("`{host}` is no address or name of this machine: {source}");
        Error::Bind { flag, source: io::Error::new(source.kind(), text) }
    })?;
    let none = || Error::Bind { flag, source: io::Error::new(io::ErrorKind::NotFound, format!("`{host}` has no address")) };
    found.next().ok_or_else(none)
}

/// Listens on `addr`.
pub(super) async fn bind(flag: &'static str, addr: SocketAddr) -> Result<TcpListener, Error> {
    TcpListener::bind(addr).await.map_err(|error| Error::Bind { flag, source: process::describe_bind_error(addr, &error) })
}

/// Where a listener really is.
pub(super) fn local_addr(flag: &'static str, listener: &TcpListener) -> Result<SocketAddr, Error> {
    listener.local_addr().map_err(|source| Error::Bind { flag, source })
}
