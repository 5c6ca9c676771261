//! `--link`: opens a link to a worker by the first transport that works.

use std::time::Duration;

use super::grpc::GrpcLink;
use super::inproc::InprocLink;
use super::tcp::TcpLink;
use super::{AnyLink, LinkChoice, LinkError, LinkKind};
use crate::route_table::Address;

/// A link and why it is of that transport.
#[derive(Debug)]
pub struct Dialled {
    /// The link.
    pub link: AnyLink,
    /// For logs and metrics, e.g. `auto: tcp failed (connection refused)`.
    pub reason: String,
}

/// Connects by one transport.
///
/// # Errors
/// [`LinkError::Connect`], also when `timeout` passes.
pub async fn connect(kind: LinkKind, addr: &str, timeout: Duration) -> Result<AnyLink, LinkError> {
    let connecting = async {
        match kind {
            LinkKind::Inproc => InprocLink::connect(addr).await.map(AnyLink::Inproc),
            LinkKind::Tcp => TcpLink::connect(addr).await.map(AnyLink::Tcp),
            LinkKind::Grpc => GrpcLink::connect(addr).await.map(AnyLink::Grpc),
        }
    };
    let late = |_| LinkError::Connect { kind, addr: addr.to_owned(), reason: format!("no answer within {timeout:?}") };
    tokio::time::timeout(timeout, connecting).await.map_err(late)?
}

/// Connects to a worker by `choice`. `auto` prefers inproc (offered only inside one process), then tcp, then grpc.
///
/// # Errors
/// [`LinkError::NoAddress`], or the failure of the last transport tried.
pub async fn dial(choice: LinkChoice, addresses: &[Address], timeout: Duration) -> Result<Dialled, LinkError> {
    let order: &[LinkKind] = match choice {
        LinkChoice::Auto => &[LinkKind::Inproc, LinkKind::Tcp, LinkKind::Grpc],
        LinkChoice::Tcp => &[LinkKind::Tcp],
        LinkChoice::Grpc => &[LinkKind::Grpc],
    };
    let mut failed: Option<LinkError> = None;
    for kind in order {
        let Some(address) = addresses.iter().find(|address| address.link == *kind) else { continue };
        match connect(*kind, &address.addr, timeout).await {
            Ok(link) => {
                let reason = match &failed {
                    None => format!("{choice}: first offered"),
                    Some(error) => format!("{choice}: {error}"),
                };
                return Ok(Dialled { link, reason });
            }
            Err(error) => failed = Some(error),
        }
    }
    Err(failed.unwrap_or_else(|| {
        let offered: Vec<&str> = addresses.iter().map(|address| address.link.name()).collect();
        LinkError::NoAddress { choice, offered: if offered.is_empty() { "none".into() } else { offered.join(", ") } }
    }))
}
