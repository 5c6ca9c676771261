//! The identity of a checkpoint, compared in the handshake before two processes exchange activations.
//!
//! SHA-256 over: the geometry (every field that changes the result), the sorted (canonical name, type, shape) list of the tensors that
//! the model uses, and 4 KiB of bytes from the middle of a fixed sample of them: all tensors of the trunk, and of the routed experts the
//! first, middle and last of each layer. How tensors are cut into files does not matter.

use std::ops::Range;

use sha2::{Digest, Sha256};

use crate::{Checkpoint, Geometry, ModelError, inventory::Need};

const SAMPLE: usize = 4096;

/// The fingerprint, 32 hexadecimal digits.
///
/// # Errors
/// A tensor that cannot be read.
pub fn of(checkpoint: &Checkpoint) -> Result<String, ModelError> {
    let mut hash = Sha256::new();
    hash.update(b"tandem fingerprint 1\n");
    hash.update(canonical(checkpoint.geometry()).as_bytes());
    let mut needs: Vec<&Need> = checkpoint.needs().iter().collect();
    needs.sort_by(|a, b| a.name.cmp(&b.name));
    for need in needs {
        for entry in checkpoint.layout(&need.name)?.entries() {
            let bytes = checkpoint.entry_bytes(entry)?;
            hash.update(format!("{} {} {:?}\n", need.name, entry.stored, entry.shape).as_bytes());
            for part in samples(need, bytes.len(), checkpoint.geometry().experts) {
                hash.update(&bytes[part]);
            }
        }
    }
    let digest = hash.finalize();
    Ok(digest[..16].iter().map(|b| format!("{b:02x}")).collect())
}

/// One line per field, in alphabetical order.
fn canonical(g: &Geometry) -> String {
    let mut lines: Vec<String> =
        format!("{g:#?}").lines().map(|l| l.trim().to_owned()).filter(|l| l.ends_with(',') && l.contains(": ")).collect();
    lines.sort();
    let layers: Vec<String> = g.layer_specs.iter().map(|l| format!("{:?}/{:?}", l.mixer, l.ffn)).collect();
    format!("{}\n{}\n", lines.join("\n"), layers.join(" "))
}

/// The byte ranges of a tensor that are hashed.
fn samples(need: &Need, len: usize, experts: usize) -> Vec<Range<usize>> {
    let middle = |from: usize, to: usize| {
        let take = SAMPLE.min(to - from);
        let start = from + (to - from - take) / 2;
        start..start + take
    };
    if !need.routed {
        return vec![middle(0, len)];
    }
    let mut chosen = vec![0, experts / 2, experts - 1];
    chosen.dedup();
    match need.name.split(".mlp.experts.").nth(1).and_then(|s| s.split('.').next()).and_then(|s| s.parse::<usize>().ok()) {
        Some(e) if chosen.contains(&e) => vec![middle(0, len)],
        Some(_) => Vec::new(),
        None => chosen.iter().map(|e| middle(len / experts * e, len / experts * (e + 1))).collect(),
    }
}
