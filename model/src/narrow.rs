//! Which float matrices of the trunk are narrowed to FP8 when they are loaded, and which never are.
//!
//! The choice is made on an open [`Checkpoint`], which from then on hands out those matrices narrowed and counts their bytes so. What the native
//! FP8 release keeps as floats for its range or its size stays: embedding, head, router, mHC, norms, kv_b_proj, the indexer, and the low-rank
//! and per-head projections of KDA (docs/checkpoints.md §3).
//!
//! Neighbours: `linear.rs` asks here for each matrix, `tandem_quant::fp8` does it.

use std::fmt;

use crate::{Checkpoint, Geometry, Mixer};

/// Groups of weights that are narrowed where they are stored as floats.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fp8Groups {
    /// MLA layers: q_a_proj, q_b_proj, kv_a_proj_with_mqa, o_proj.
    pub attention: bool,
    /// KDA layers: q_proj, k_proj, v_proj, o_proj.
    pub kda: bool,
    /// Dense MLPs and shared experts: gate_proj, up_proj, down_proj.
    pub mlp: bool,
}

impl Fp8Groups {
    /// Whether nothing is narrowed.
    pub fn is_empty(self) -> bool {
        self == Self::default()
    }

    /// Whether the matrix of this canonical name belongs to a chosen group.
    fn covers(self, g: &Geometry, name: &str) -> bool {
        let Some((layer, rest)) = name.strip_prefix("layers.").and_then(|rest| rest.split_once('.')) else { return false };
        let Some(spec) = layer.parse().ok().and_then(|layer: usize| g.layer_specs.get(layer)) else { return false };
        let kda = spec.mixer == Mixer::Kda;
        match rest.strip_suffix(".weight") {
            Some("self_attn.q_proj" | "self_attn.k_proj" | "self_attn.v_proj") => self.kda && kda,
            Some("self_attn.q_a_proj" | "self_attn.q_b_proj" | "self_attn.kv_a_proj_with_mqa") => self.attention && !kda,
            Some("self_attn.o_proj") => {
                if kda {
                    self.kda
                } else {
                    self.attention
                }
            }
            Some(rest) => {
                let mlp = rest.strip_prefix("mlp.").map(|rest| rest.strip_prefix("shared_experts.").unwrap_or(rest));
                self.mlp && matches!(mlp, Some("gate_proj" | "up_proj" | "down_proj"))
            }
            None => false,
        }
    }
}

impl fmt::Display for Fp8Groups {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = [(self.attention, "attention"), (self.kda, "KDA"), (self.mlp, "MLP")];
        let chosen: Vec<&str> = names.iter().filter(|(on, _)| *on).map(|(_, name)| *name).collect();
        if chosen.is_empty() { write!(f, "none") } else { write!(f, "{}", chosen.join(", ")) }
    }
}

impl Checkpoint {
    /// The same checkpoint with these groups narrowed to FP8 wherever they are stored as floats.
    #[must_use]
    pub fn with_fp8(mut self, groups: Fp8Groups) -> Self {
        self.narrowed_groups = groups;
        self
    }

    /// Whether a matrix that is stored as plain floats is to be narrowed.
    pub(crate) fn narrows(&self, name: &str) -> bool {
        !self.narrowed_groups.is_empty() && self.narrowed_groups.covers(self.geometry(), name)
    }
}

#[cfg(test)]
mod tests {
    use tandem_quant::{DType, fp8};
    use tempfile::TempDir;

    use super::*;
    use crate::{
        FfnTensors, MixerTensors,
        synthetic::{Preset, Quantised, write, write_twin},
    };

    const ALL: Fp8Groups = Fp8Groups { attention: true, kda: true, mlp: true };

    fn tiny() -> (TempDir, Checkpoint) {
        let dir = TempDir::new().unwrap();
        write(Preset::Tiny, dir.path(), &[]).unwrap();
        let checkpoint = Checkpoint::open(dir.path()).unwrap();
        (dir, checkpoint)
    }

    #[test]
    fn chosen_groups_alone_are_narrowed() {
        let (dir, _) = tiny();
        for groups in [Fp8Groups { attention: true, ..Fp8Groups::default() }, Fp8Groups { kda: true, ..Fp8Groups::default() }, ALL] {
            let checkpoint = Checkpoint::open(dir.path()).unwrap().with_fp8(groups);
            for i in 0..checkpoint.geometry().layers {
                let layer = checkpoint.layer(i).unwrap();
                let is = |on: bool| if on { DType::F8E4m3 } else { DType::Bf16 };
                match layer.mixer {
                    MixerTensors::Kda(t) => {
                        assert!([&t.q, &t.k, &t.v, &t.o].iter().all(|m| m.dtype() == is(groups.kda)));
                        assert!([&t.f_a, &t.f_b, &t.g_a, &t.g_b, &t.b].iter().all(|m| m.dtype() == DType::Bf16));
                    }
                    MixerTensors::Mla(t) => {
                        assert!([&t.q_a, &t.q_b, &t.kv_a, &t.o].iter().all(|m| m.dtype() == is(groups.attention)));
                        assert_eq!(t.kv_b.dtype(), DType::Bf16);
                    }
                }
                let mlp = match layer.ffn {
                    FfnTensors::Dense(t) => t,
                    FfnTensors::Moe(t) => {
                        assert_eq!(t.router.dtype(), DType::Bf16);
                        t.shared
                    }
                };
                assert!(mlp.into_matrices().iter().all(|m| m.dtype() == is(groups.mlp)));
            }
            assert_eq!(checkpoint.lm_head().unwrap().dtype(), DType::Bf16);
            assert_eq!(checkpoint.expert(3, 0).unwrap().gate.dtype(), DType::Bf16);
        }
    }

    #[test]
    fn bytes_are_counted_as_held() {
        let (dir, whole) = tiny();
        let narrowed = Checkpoint::open(dir.path()).unwrap().with_fp8(ALL);
        let mut saved = 0;
        for need in whole.needs().iter().filter(|n| narrowed.narrows(&n.name)) {
            saved += 2 * need.shape.iter().product::<usize>() - fp8::bytes(need.shape[0], need.shape[1]);
        }
        assert!(saved > 100_000);
        assert_eq!(whole.trunk_bytes() - narrowed.trunk_bytes(), saved as u64);
        assert_eq!(whole.fingerprint(), narrowed.fingerprint());
    }

    #[test]
    fn what_is_quantised_already_stays_as_it_is() {
        let (dir, _) = tiny();
        let twin = TempDir::new().unwrap();
        write_twin(dir.path(), Quantised::Fp8, twin.path()).unwrap();
        let (stored, asked) = (Checkpoint::open(twin.path()).unwrap(), Checkpoint::open(twin.path()).unwrap().with_fp8(ALL));
        let shared = |c: &Checkpoint| match c.layer(4).unwrap().ffn {
            FfnTensors::Moe(t) => t.shared.down,
            FfnTensors::Dense(t) => t.down,
        };
        assert_eq!(shared(&stored).data()[..], shared(&asked).data()[..]);
        assert!(asked.trunk_bytes() < stored.trunk_bytes(), "its KDA projections are bf16");
    }
}
