//! What is said about a checkpoint that can be served all the same: parts that are skipped, digits that were lost, what nothing asks for.
//!
//! Neighbours: `checkpoint.rs` keeps these as its warnings; `tandem check` prints them, servers log them.

use std::collections::{BTreeMap, BTreeSet};

use tandem_quant::DType;

use crate::{Checkpoint, gguf, linear::SIDE_SUFFIXES};

impl Checkpoint {
    /// All notes, one sentence each.
    pub(crate) fn notes(&self) -> Vec<String> {
        let mut notes: Vec<String> = self.skipped().iter().map(ToString::to_string).collect();
        notes.extend(self.narrowed());
        notes.extend(self.unknown());
        notes.extend(self.unsaid());
        let odd_keys = self.gguf().map(gguf::keys::unknown).unwrap_or_default();
        notes.extend(listing(&odd_keys).map(|list| format!("{} keys of the model are unknown and were ignored: {list}", odd_keys.len())));
        notes
    }

    /// Tensors that the release keeps in F32 and this checkpoint does not.
    pub fn narrowed_tensors(&self) -> Vec<String> {
        let narrow = self
            .needs()
            .iter()
            .filter(|n| n.keeps_f32)
            .filter_map(|n| self.entry(&n.name))
            .filter(|e| e.stored.plain() != Some(DType::F32));
        narrow.map(|e| format!("{} ({})", e.stored_name, e.stored)).collect()
    }

    fn narrowed(&self) -> Option<String> {
        let names = self.narrowed_tensors();
        let tail = "the release keeps them in F32, so digits were lost when this checkpoint was made";
        (!names.is_empty()).then(|| format!("{} tensors are stored narrower than F32: {}; {tail}", names.len(), by_kind(&names)))
    }

    /// What the family has and this checkpoint says nothing of.
    fn unsaid(&self) -> Option<String> {
        let key = if self.gguf().is_some() { "swiglu_clamp_exp" } else { "swiglu_limit" };
        let text = || format!("no {key} in {}: the SwiGLU is not clamped (the release clamps it at 10)", self.config_file().display());
        self.geometry().swiglu_limit.is_none().then(text)
    }

    /// Tensors that nothing asks for.
    fn unknown(&self) -> Option<String> {
        let known: BTreeSet<&str> = self.needs().iter().map(|n| n.name.as_str()).collect();
        let beside = |name: &str| {
            let base = SIDE_SUFFIXES.iter().find_map(|suffix| name.strip_suffix(suffix));
            base.is_some_and(|base| known.contains(base) || known.contains(format!("{base}.weight").as_str()))
        };
        let left = self.stored().filter(|(name, _)| !known.contains(name) && !beside(name));
        let names: Vec<String> = left.map(|(_, entry)| entry.stored_name.clone()).collect();
        listing(&names).map(|list| format!("{} tensors are unknown and were ignored: {list}", names.len()))
    }
}

/// The first few of some names; `None` where there are none.
pub(crate) fn listing(names: &[String]) -> Option<String> {
    const SHOWN: usize = 4;
    let more = if names.len() > SHOWN { ", …" } else { "" };
    (!names.is_empty()).then(|| format!("{}{more}", names[..names.len().min(SHOWN)].join(", ")))
}

/// Names of tensors by what they are in a layer, with the number of layers: `A_log (BF16) ×34, dt_bias (BF16) ×34`.
fn by_kind(names: &[String]) -> String {
    let mut kinds: BTreeMap<&str, usize> = BTreeMap::new();
    for name in names {
        let number = name.split('.').position(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit()));
        let rest = number.map_or(name.as_str(), |at| name.splitn(at + 2, '.').last().unwrap_or(name));
        *kinds.entry(rest).or_default() += 1;
    }
    let text = |(kind, count): (&&str, &usize)| if *count > 1 { format!("{kind} ×{count}") } else { (*kind).to_owned() };
    kinds.iter().map(text).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_of_one_kind_are_one_entry() {
        let names = ["model.language_model.layers.3.self_attn.A_log (BF16)", "model.layers.12.self_attn.A_log (BF16)", "blk.7.ssm_a (F16)"];
        assert_eq!(by_kind(&names.map(str::to_owned)), "self_attn.A_log (BF16) ×2, ssm_a (F16)");
        assert_eq!(by_kind(&["odd".to_owned()]), "odd");
        assert_eq!(listing(&[]), None);
        assert_eq!(listing(&["a", "b", "c", "d", "e"].map(str::to_owned)).as_deref(), Some("a, b, c, d, …"));
    }
}
