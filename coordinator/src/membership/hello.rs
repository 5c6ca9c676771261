//! The handshake: each field of a Hello against the coordinator's terms. A refusal says the field, what was needed, what came and what
//! would work.

use tandem_proto::control::v1 as wire;

use super::Terms;

/// The version of control.v1, attn.v1 and experts.v1 taken together.
pub const PROTOCOL_VERSION: u32 = 1;

const LONGEST_NAME: usize = 64;

pub(super) fn refuse(field: &str, needed: impl Into<String>, got: impl Into<String>, hint: &str) -> wire::Refuse {
    wire::Refuse { field: field.into(), needed: needed.into(), got: got.into(), hint: hint.into() }
}

/// Checks everything that does not depend on the other members.
pub(super) fn check(terms: &Terms, hello: &wire::Hello) -> Result<(), wire::Refuse> {
    if hello.protocol_version != PROTOCOL_VERSION {
        let got = hello.protocol_version.to_string();
        return Err(refuse("protocol_version", PROTOCOL_VERSION.to_string(), got, "run the same Tandem version on every host"));
    }
    check_name(&hello.name)?;
    if hello.epoch == 0 {
        return Err(refuse("epoch", "a number other than 0, new per process start", "0", "this is a fault of the worker"));
    }
    if hello.fingerprint != terms.fingerprint {
        return Err(refuse(
            "fingerprint",
            terms.fingerprint.as_str(),
            hello.fingerprint.as_str(),
            "open the same checkpoint on every host (--model)",
        ));
    }
    if hello.precision != terms.precision {
        return Err(refuse("precision", terms.precision.as_str(), hello.precision.as_str(), "give every process the same --dtype"));
    }
    match wire::Role::try_from(hello.role) {
        Ok(wire::Role::Attn) => check_attn(terms, hello),
        Ok(wire::Role::Experts) => check_addresses(hello),
        _ => Err(refuse("role", "attn or experts", hello.role.to_string(), "run the same Tandem version on every host")),
    }
}

fn check_name(name: &str) -> Result<(), wire::Refuse> {
    let good = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    if name.is_empty() || name.len() > LONGEST_NAME || !name.chars().all(good) {
        let got: String = name.chars().take(2 * LONGEST_NAME).collect();
        return Err(refuse(
            "name",
            format!("1 to {LONGEST_NAME} of A-Z a-z 0-9 - _ ."),
            got,
            "give the worker a name such as experts-0 (--name)",
        ));
    }
    Ok(())
}

fn check_attn(terms: &Terms, hello: &wire::Hello) -> Result<(), wire::Refuse> {
    let limits = hello.limits.unwrap_or_default();
    let each = [
        ("limits.max_batch", u64::from(limits.max_batch), "--max-batch"),
        ("limits.max_seq_len", u64::from(limits.max_seq_len), "--max-seq-len"),
        ("limits.kv_tokens", limits.kv_tokens, "--kv-tokens"),
    ];
    if let Some((field, _, flag)) = each.iter().find(|(_, value, _)| *value == 0) {
        return Err(refuse(field, "at least 1", "0", &format!("raise {flag}, or free memory for it")));
    }
    let mut claimed: Vec<String> = hello.local_shards.iter().map(|shard| super::routes::shard_from_wire(shard).to_string()).collect();
    let mut local: Vec<String> =
        terms.plan.local.iter().filter_map(|id| terms.plan.shards.get(*id as usize)).map(ToString::to_string).collect();
    claimed.sort();
    local.sort();
    if !claimed.is_empty() && claimed != local {
        let text = |list: &[String]| if list.is_empty() { "none".to_owned() } else { list.join(" and ") };
        return Err(refuse("local_shards", text(&local), text(&claimed), "give `tandem serve` the same --resident-layers"));
    }
    Ok(())
}

fn check_addresses(hello: &wire::Hello) -> Result<(), wire::Refuse> {
    let needed = "at least one host:port where experts.v1 is served";
    if hello.addresses.is_empty() {
        return Err(refuse("addresses", needed, "none", "let the worker listen on tcp or grpc"));
    }
    for address in &hello.addresses {
        let port = address.addr.rsplit_once(':').filter(|(host, _)| !host.is_empty()).and_then(|(_, port)| port.parse::<u16>().ok());
        if port.is_none_or(|port| port == 0) {
            let got = format!("{} {}", address.link, address.addr);
            return Err(refuse("addresses", needed, got, "give an address that attention workers can dial (--advertise or --listen)"));
        }
    }
    Ok(())
}
