//! What a process needs of its device's memory, and the refusal where that is more than there is: one arithmetic for `tandem plan`,
//! `tandem up` and the workers themselves.
//!
//! Neighbours: `checkpoint.rs` counts weights; the workers know their pools and scratch (`worker-attn`, `worker-experts`: `memory.rs`).

use std::fmt;

/// What one process keeps in memory, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// Weights as stored.
    pub weights: u64,
    /// Weights that are kept in another form than stored.
    pub unpacked: u64,
    /// Caches that grow with tokens.
    pub kv: u64,
    /// State of fixed size, of all sequences.
    pub state: u64,
    /// Buffers and scratch of a step.
    pub workspace: u64,
    /// Host memory, whatever the device: remembered prefixes and copies of sequences, at their most.
    pub host: u64,
}

impl Needs {
    /// Everything.
    pub fn total(&self) -> u64 {
        self.weights.saturating_add(self.fixed())
    }

    /// What lies in the device's own memory, and what in the host's, for a device that has memory of its own.
    pub fn apart(self) -> (Self, Self) {
        (Self { host: 0, ..self }, Self { host: self.host, ..Self::default() })
    }

    /// What can never leave memory: everything but the weights as stored, which a CPU reads from a mapped file.
    pub fn fixed(&self) -> u64 {
        [self.unpacked, self.kv, self.state, self.workspace, self.host].into_iter().fold(0, u64::saturating_add)
    }
}

/// The memory that a device has for its processes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Room {
    /// The device.
    pub device: String,
    /// Bytes for weights, pools and scratch.
    pub bytes: u64,
    /// Where the number comes from, in words.
    pub origin: String,
}

/// Processes that do not fit their device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub struct Short {
    /// The device.
    pub device: String,
    /// Bytes needed.
    pub needed: u64,
    /// Bytes there.
    pub available: u64,
    /// Where that number comes from.
    pub origin: String,
    /// What needs them: name and bytes, the largest first.
    pub parts: Vec<(String, u64)>,
    /// What would work; empty where nothing is known.
    pub hint: String,
}

impl fmt::Display for Short {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device, needed, available, origin, .. } = self;
        write!(f, "{device}: needed {} GiB, got {} GiB ({origin})", Gib(*needed), Gib(*available))?;
        for (i, (name, bytes)) in self.parts.iter().enumerate() {
            write!(f, "{}{name} {}", if i == 0 { ": " } else { ", " }, Gib(*bytes))?;
        }
        if self.hint.is_empty() { Ok(()) } else { write!(f, "; {}", self.hint) }
    }
}

/// Bytes in GiB, with digits enough for small models.
#[derive(Clone, Copy, Debug)]
pub struct Gib(pub u64);

impl fmt::Display for Gib {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gib = self.0 as f64 / (1u64 << 30) as f64;
        match self.0 {
            // A sum that went over the edge of the type says no number.
            u64::MAX => f.pad("over 2^34"),
            _ if gib < 1.0 => f.pad(&format!("{gib:.3}")),
            _ => f.pad(&format!("{gib:.1}")),
        }
    }
}

/// Checks that the processes of one device fit it together. `paging`: weights as stored may be left on disk and read as they are needed, so
/// that only the rest must fit.
///
/// # Errors
/// [`Short`], with both numbers and the parts.
pub fn fits(needs: &[(&str, Needs)], room: &Room, paging: bool) -> Result<(), Short> {
    let of = |n: &Needs| if paging { n.fixed() } else { n.total() };
    let needed = needs.iter().map(|(_, n)| of(n)).fold(0, u64::saturating_add);
    if needed <= room.bytes {
        return Ok(());
    }
    let mut parts = Vec::new();
    for (name, n) in needs {
        let weights = if paging { 0 } else { n.weights };
        for (what, bytes) in [
            ("weights", weights),
            ("unpacked weights", n.unpacked),
            ("caches", n.kv),
            ("state", n.state),
            ("workspace", n.workspace),
            ("prefixes and copies", n.host),
        ] {
            if bytes > 0 {
                parts.push((format!("{name} {what}"), bytes));
            }
        }
    }
    parts.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
    let (device, origin) = (room.device.clone(), room.origin.clone());
    Err(Short { device, needed, available: room.bytes, origin, parts, hint: String::new() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_has_both_numbers_and_the_parts() {
        let attn = Needs { weights: 10 << 30, kv: 3 << 30, ..Needs::default() };
        let experts = Needs { weights: 20 << 30, workspace: 1 << 29, ..Needs::default() };
        let room = Room { device: "cpu".into(), bytes: 24 << 30, origin: "available memory of this machine".into() };
        let short = fits(&[("attn", attn), ("experts-0", experts)], &room, false).unwrap_err();
        assert_eq!((short.needed, short.available), ((33 << 30) + (1 << 29), 24 << 30));
        let text = short.to_string();
        assert!(
            text.starts_with(
                "cpu: needed 33.5 GiB, got 24.0 GiB (available memory of this machine): experts-0 weights 20.0, attn weights 10.0"
            ),
            "{text}"
        );
        assert_eq!(fits(&[("attn", attn), ("experts-0", experts)], &room, true), Ok(()));
        assert!(fits(&[("attn", attn)], &Room { bytes: 1 << 30, ..room }, true).is_err());
        let huge = Needs { weights: u64::MAX, kv: u64::MAX, ..Needs::default() };
        assert_eq!(huge.total(), u64::MAX, "sums saturate");
    }
}
