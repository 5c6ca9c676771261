//! Facts about this process and its machine: names, standard process metrics, and who holds a port.

use std::{
    fs, io,
    io::Write,
    net::{IpAddr, SocketAddr},
    path::Path,
};

use metrics::{Unit, counter, describe_counter, describe_gauge, gauge};

/// Sets the name that `ps -o comm` and `/proc/PID/comm` show (at most 15 bytes). A failure is harmless and ignored.
pub fn set_name(name: &str) {
    let _ = fs::write("/proc/self/comm", name);
}

/// Writes one machine-readable line to stdout and flushes it. A closed stdout is no reason to end.
pub fn announce(line: &str) {
    let mut out = io::stdout().lock();
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}

/// Writes text to stdout. A reader that went away (`| head`) is no reason to fail.
///
/// # Errors
/// Anything else, such as a full disk: what was asked for is not there.
pub fn print(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    unless_closed(out.write_all(text.as_bytes()).and_then(|()| out.flush()))
}

/// A write's result, where a reader that went away counts as success.
///
/// # Errors
/// All others.
pub fn unless_closed(written: io::Result<()>) -> io::Result<()> {
    match written {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}

/// Writes a line to stderr, whether or not anybody reads it.
pub fn complain(line: &str) {
    let _ = writeln!(io::stderr().lock(), "{line}");
}

/// Describes the metrics that [`record_metrics`] sets.
pub fn describe_metrics() {
    describe_gauge!("process_resident_memory_bytes", Unit::Bytes, "Resident memory of this process.");
    describe_gauge!("process_open_fds", Unit::Count, "Open file descriptors of this process.");
    describe_gauge!("process_start_time_seconds", Unit::Seconds, "Start of this process, in Unix time.");
    describe_counter!("process_cpu_seconds_total", Unit::Seconds, "CPU time used by this process, whole seconds.");
}

/// Reads `/proc/self` into the standard `process_*` metrics; where there is no `/proc`, nothing is set.
pub fn record_metrics() {
    // Kernel clock ticks of /proc/PID/stat; 100 on every Linux that Rust targets.
    const TICKS: u64 = 100;
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).and_then(|rest| rest.split_whitespace().next());
    if let Some(kib) = resident.and_then(|field| field.parse::<f64>().ok()) {
        gauge!("process_resident_memory_bytes").set(kib * 1024.0);
    }
    if let Ok(entries) = fs::read_dir("/proc/self/fd") {
        gauge!("process_open_fds").set(entries.count() as f64);
    }
    // The command name (field 2) may hold spaces: count fields after its closing parenthesis.
    let Ok(stat) = fs::read_to_string("/proc/self/stat") else { return };
    let Some((_, rest)) = stat.rsplit_once(") ") else { return };
    let fields: Vec<&str> = rest.split_whitespace().collect();
    let ticks = |index: usize| fields.get(index).and_then(|field| field.parse::<u64>().ok());
    if let (Some(user), Some(system)) = (ticks(11), ticks(12)) {
        counter!("process_cpu_seconds_total").absolute((user + system) / TICKS);
    }
    if let (Some(start), Some(boot)) = (ticks(19), boot_time()) {
        gauge!("process_start_time_seconds").set(boot + start as f64 / TICKS as f64);
    }
}

fn boot_time() -> Option<f64> {
    let stat = fs::read_to_string("/proc/stat").ok()?;
    stat.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()
}

/// A bind error that names the address and, where this user may see it, the process that listens there.
pub fn describe_bind_error(addr: SocketAddr, error: &io::Error) -> io::Error {
    let text = match error.kind() {
        io::ErrorKind::AddrInUse => match port_holder(addr) {
            Some(holder) => format!("cannot listen on {addr}: the port is held by {holder}; choose another port, or 0 for a free one"),
            None => format!("cannot listen on {addr}: the port is in use; choose another port, or 0 for a free one"),
        },
        io::ErrorKind::AddrNotAvailable => format!("cannot listen on {addr}: this machine has no such address"),
        _ => format!("cannot listen on {addr}: {error}"),
    };
    io::Error::new(error.kind(), text)
}

/// The process that listens on `addr`, as `pid 123 (name)`; `None` where it cannot be found or seen.
pub fn port_holder(addr: SocketAddr) -> Option<String> {
    let inode = ["/proc/net/tcp", "/proc/net/tcp6"].iter().find_map(|table| listening_inode(&fs::read_to_string(table).ok()?, addr))?;
    let wanted = format!("socket:[{inode}]");
    for entry in fs::read_dir("/proc").ok()?.flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        let Ok(descriptors) = fs::read_dir(entry.path().join("fd")) else { continue };
        for descriptor in descriptors.flatten() {
            if fs::read_link(descriptor.path()).is_ok_and(|target| target == Path::new(&wanted)) {
                let name = fs::read_to_string(entry.path().join("comm")).unwrap_or_default();
                return Some(format!("pid {pid} ({})", name.trim()));
            }
        }
    }
    None
}

/// The socket inode of the listener that clashes with `addr`, from the text of `/proc/net/tcp` or `tcp6`.
fn listening_inode(table: &str, addr: SocketAddr) -> Option<u64> {
    const LISTEN: &str = "0A";
    table.lines().skip(1).find_map(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let (host, port) = fields.get(1)?.split_once(':')?;
        let clashes =
            addr.ip().is_unspecified() || host.bytes().all(|digit| digit == b'0') || host.eq_ignore_ascii_case(&proc_hex(addr.ip()));
        let same_port = u16::from_str_radix(port, 16).ok()? == addr.port();
        (*fields.get(3)? == LISTEN && same_port && clashes).then(|| fields.get(9)?.parse().ok())?
    })
}

/// An address as `/proc/net/tcp*` writes it: native-endian 32-bit words in hex.
fn proc_hex(ip: IpAddr) -> String {
    let octets = match ip {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    };
    octets.chunks_exact(4).map(|word| format!("{:08X}", u32::from_ne_bytes([word[0], word[1], word[2], word[3]]))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_of_this_process_is_found() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("bind");
        let addr = listener.local_addr().expect("addr");
        let holder = port_holder(addr).expect("own sockets can be seen");
        assert!(holder.starts_with(&format!("pid {} (", std::process::id())), "{holder}");
        let any: SocketAddr = format!("0.0.0.0:{}", addr.port()).parse().expect("addr");
        assert_eq!(port_holder(any), Some(holder.clone()));
        let error = std::net::TcpListener::bind(addr).expect_err("taken");
        let text = describe_bind_error(addr, &error).to_string();
        assert!(text.contains(&addr.to_string()) && text.contains(&holder), "{text}");
        drop(listener);
        assert_eq!(port_holder(addr), None);
    }
}
