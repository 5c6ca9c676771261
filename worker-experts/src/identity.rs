//! Who this process is to others: its epoch, its host, and the address that others reach it at.

use std::{
    fs,
    net::{IpAddr, SocketAddr, UdpSocket},
    time::{SystemTime, UNIX_EPOCH},
};

/// A number that no earlier or later start of this worker has; never 0.
pub fn new_epoch() -> u64 {
    let nanos = SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |d| d.as_nanos() as u64);
    // Two workers of one machine may start in the same tick of a coarse clock.
    (nanos ^ (u64::from(std::process::id()) << 44)).max(1)
}

/// Machine and boot: processes with equal identities can share memory. Empty where the system says nothing (then nobody is equal).
pub fn host() -> String {
    let read = |path: &str| fs::read_to_string(path).map(|s| s.trim().to_owned()).unwrap_or_default();
    match (read("/etc/machine-id"), read("/proc/sys/kernel/random/boot_id")) {
        (_, boot) if boot.is_empty() => String::new(),
        (machine, boot) => format!("{machine}:{boot}"),
    }
}

/// The address of this host on the way to `peer` (`http://HOST:PORT` or `HOST:PORT`), for workers that listen on all interfaces.
pub fn address_towards(peer: &str) -> Option<IpAddr> {
    let peer = peer.trim_start_matches("http://").trim_start_matches("https://").trim_end_matches('/');
    // Connecting a datagram socket sends nothing; it only asks the routing table.
    let socket = UdpSocket::bind("0.0.0.0:0").and_then(|s| s.connect(peer).map(|()| s));
    let socket = socket.or_else(|_| UdpSocket::bind("[::]:0").and_then(|s| s.connect(peer).map(|()| s)));
    socket.and_then(|s| s.local_addr()).map(|a| a.ip()).ok()
}

/// `address` as others dial it: `host` instead of its own, where given.
pub fn dialled(address: &str, host: Option<&str>) -> String {
    match (address.parse::<SocketAddr>(), host) {
        (Ok(bound), Some(host)) if host.contains(':') && !host.starts_with('[') => format!("[{host}]:{}", bound.port()),
        (Ok(bound), Some(host)) => format!("{host}:{}", bound.port()),
        _ => address.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dialled_addresses_keep_the_port() {
        assert_eq!(dialled("0.0.0.0:7001", Some("10.0.0.5")), "10.0.0.5:7001");
        assert_eq!(dialled("0.0.0.0:7001", Some("fe80::1")), "[fe80::1]:7001");
        assert_eq!(dialled("127.0.0.1:7001", None), "127.0.0.1:7001");
        assert_eq!(address_towards("http://127.0.0.1:9"), Some(IpAddr::from([127, 0, 0, 1])));
        assert_ne!(new_epoch(), 0);
    }
}
