//! Runs one role in this process: arguments → the role crate's `Config`, logs, signals, supervision.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs as _};

use tandem_runtime::{Shutdown, process, signals, supervised};

use crate::{
    cli::{AttnArgs, ExpertsArgs, ServeArgs, args::CommonArgs},
    failure::Failure,
    start_logs,
};

/// `tandem serve`.
///
/// # Errors
/// When the coordinator cannot start or fails.
pub fn serve(args: ServeArgs) -> Result<(), Failure> {
    start_logs("serve", &args.common)?;
    process::set_name("tandem-serve");
    plaintext_allowed("--control-addr", args.control_addr.ip(), args.plaintext.insecure)?;
    Err(Failure::internal("the coordinator is not wired yet"))
}

/// `tandem attn`.
///
/// # Errors
/// When the worker cannot start or fails.
pub fn attn(args: AttnArgs) -> Result<(), Failure> {
    start_logs(args.join.name.as_deref().unwrap_or("attn"), &args.common)?;
    process::set_name("tandem-attn");
    coordinator_allowed(&args.join.coordinator, args.plaintext.insecure)?;
    Err(Failure::internal("the attention worker is not wired yet"))
}

/// `tandem experts`.
///
/// # Errors
/// When the worker cannot start or fails.
pub fn experts(args: ExpertsArgs) -> Result<(), Failure> {
    start_logs(args.join.name.as_deref().unwrap_or("experts"), &args.common)?;
    process::set_name("tandem-experts");
    coordinator_allowed(&args.join.coordinator, args.plaintext.insecure)?;
    plaintext_allowed("--listen", args.listen, args.plaintext.insecure)?;
    Err(Failure::internal("the expert worker is not wired yet"))
}

/// A shutdown handle that this process's signals, and its supervisor's end, set off.
fn lifetime(common: &CommonArgs) -> Result<Shutdown, Failure> {
    let shutdown = Shutdown::new();
    signals::install(shutdown.clone()).map_err(|error| Failure::internal(format!("cannot handle signals: {error}")))?;
    if common.supervised {
        supervised::watch_parent(shutdown.clone()).map_err(|error| Failure::internal(format!("cannot watch the supervisor: {error}")))?;
    }
    Ok(shutdown)
}

/// Refuses to talk plaintext beyond this machine without consent.
fn plaintext_allowed(flag: &str, ip: IpAddr, insecure: bool) -> Result<(), Failure> {
    if insecure || ip.is_loopback() {
        return Ok(());
    }
    Err(Failure::usage(format!(
        "{flag} {ip}: traffic between processes is plaintext, which needs --insecure on an address other than loopback; give it on a network that you trust as a whole"
    )))
}

/// The same for an outgoing connection, by where the name leads.
fn coordinator_allowed(url: &str, insecure: bool) -> Result<(), Failure> {
    let wrong = |what: &str| {
        Failure::usage(format!("--coordinator {url}: {what}; give http://HOST:PORT as `tandem serve` prints it after CONTROL"))
    };
    let authority = url.strip_prefix("http://").ok_or_else(|| wrong("does not begin with http://"))?.trim_end_matches('/');
    if authority.rsplit_once(':').is_none_or(|(_, port)| port.parse::<u16>().is_err()) {
        return Err(wrong("has no port"));
    }
    if insecure {
        return Ok(());
    }
    // A name that does not resolve now may do so later (a coordinator that starts after its workers): then nothing is sent yet.
    for addr in authority.to_socket_addrs().into_iter().flatten() {
        plaintext_allowed("--coordinator", SocketAddr::ip(&addr), insecure)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plaintext_needs_consent_beyond_loopback() {
        assert!(coordinator_allowed("http://127.0.0.1:7000", false).is_ok());
        assert!(coordinator_allowed("http://[::1]:7000/", false).is_ok());
        assert!(coordinator_allowed("http://192.0.2.7:7000", true).is_ok());
        let refused = coordinator_allowed("http://192.0.2.7:7000", false).expect_err("plaintext");
        assert!(refused.reason.contains("--insecure") && refused.reason.contains("192.0.2.7"), "{refused}");
        assert!(plaintext_allowed("--listen", "0.0.0.0".parse().expect("ip"), false).is_err());
    }

    #[test]
    fn a_coordinator_is_a_url_with_a_port() {
        for (url, needle) in
            [("127.0.0.1:7000", "http://"), ("http://host", "no port"), ("https://host:1", "http://"), ("http://host:x", "no port")]
        {
            let refused = coordinator_allowed(url, true).expect_err(url);
            assert!(refused.reason.contains(needle) && refused.reason.contains(url), "{refused}");
        }
    }
}
