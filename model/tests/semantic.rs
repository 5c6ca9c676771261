//! The look at experts' values: trained weights pass in every format, and faults of encoding are named.
#![cfg(feature = "demo")]
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use safetensors::{SafeTensors, tensor::TensorView};
use tandem_model::{
    Checkpoint, demo,
    semantic::Semantic,
    synthetic::{
        self, Preset,
        twin::{Quantised, write_twin},
    },
};

/// The demo model, whose weights are trained, in the three files that twins are made of.
fn demo_in_shards(dir: &Path) {
    fs::create_dir_all(dir).unwrap();
    let file = |name: &str| demo::FILES.iter().find(|(n, _)| *n == name).unwrap().1;
    let bytes = file("model.safetensors");
    let all = SafeTensors::deserialize(bytes).unwrap();
    let mut map = BTreeMap::new();
    for shard in 1..=3 {
        let name = format!("model-{shard:05}-of-00003.safetensors");
        let mine = |t: &str| {
            if t.contains(".mlp.experts.") {
                3
            } else if t.ends_with("embed_tokens.weight") {
                1
            } else {
                2
            }
        };
        let tensors: Vec<(String, TensorView<'_>)> = all.tensors().into_iter().filter(|(t, _)| mine(t) == shard).collect();
        map.extend(tensors.iter().map(|(t, _)| (t.clone(), name.clone())));
        fs::write(dir.join(&name), safetensors::serialize(tensors, None).unwrap()).unwrap();
    }
    fs::write(dir.join("model.safetensors.index.json"), serde_json::json!({ "weight_map": map }).to_string()).unwrap();
    for name in ["config.json", "generation_config.json"] {
        fs::write(dir.join(name), file(name)).unwrap();
    }
}

fn look(dir: &Path) -> Semantic {
    Semantic::of(&Checkpoint::open(dir).unwrap()).unwrap()
}

/// Changes the bytes of every tensor of the experts' file whose name `wanted` picks.
fn damage(from: &Path, to: PathBuf, wanted: impl Fn(&str) -> bool, change: impl Fn(&mut [u8])) -> PathBuf {
    fs::create_dir_all(&to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, to.join(path.file_name().unwrap())).unwrap();
    }
    let file = to.join("model-00003-of-00003.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    let (header, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
    let ranges: Vec<_> = metadata.tensors().into_iter().filter(|(name, _)| wanted(name)).map(|(_, info)| info.data_offsets).collect();
    assert!(!ranges.is_empty());
    for (start, end) in ranges {
        change(&mut bytes[8 + header + start..8 + header + end]);
    }
    fs::write(file, bytes).unwrap();
    to
}

fn scale_by(factor: f32) -> impl Fn(&mut [u8]) {
    move |bytes| {
        let value = f32::from_le_bytes(bytes.try_into().unwrap()) * factor;
        bytes.copy_from_slice(&value.to_le_bytes());
    }
}

#[test]
fn trained_weights_pass_and_damage_is_named() {
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join(name);
    demo_in_shards(&at("demo"));
    let plain = look(&at("demo"));
    assert_eq!(plain.problems, [""; 0]);
    assert_eq!(plain.experts.len(), 5 * 3);
    assert!(plain.orders.iter().all(|o| o.best == "as decoded" && o.as_decoded.abs() > 0.1), "{:?}", plain.orders);
    for (name, format) in [("nvfp4", Quantised::Nvfp4), ("packed", Quantised::Nvfp4Packed), ("mxfp4", Quantised::Mxfp4)] {
        write_twin(&at("demo"), format, &at(name)).unwrap();
        assert_eq!(look(&at(name)).problems, [""; 0], "{name}");
    }

    let nibbles = |bytes: &mut [u8]| bytes.iter_mut().for_each(|b| *b = b.rotate_left(4));
    for (name, tensors, matrices) in
        [("all", ".weight", "down_proj"), ("down", "down_proj.weight", "down_proj"), ("up", "gate_proj.weight", "gate_proj and up_proj")]
    {
        // Both gate and up, so that their common norms move.
        let wanted = |t: &str| t.ends_with(tensors) || (name == "up" && t.ends_with("up_proj.weight"));
        let swapped = look(&damage(&at("nvfp4"), at(&format!("swapped-{name}")), wanted, nibbles));
        let hit =
            swapped.problems.iter().find(|p| p.starts_with(matrices) && p.contains("neighbours swapped (low and high nibble of a byte)"));
        assert!(hit.is_some(), "{name}: {:?} {:?}", swapped.problems, swapped.orders);
    }

    let one = look(&damage(&at("nvfp4"), at("one"), |t| t.contains("layers.5.mlp.experts.8.up_proj.weight_scale_2"), scale_by(32.0)));
    assert_eq!(one.problems.len(), 1, "{:?}", one.problems);
    assert!(one.problems[0].starts_with("layer 5, expert 8, up_proj (NVFP4 (packed pairs)): RMS"), "{:?}", one.problems);
    let reciprocal = |bytes: &mut [u8]| {
        let value = 1.0 / f32::from_le_bytes((&*bytes).try_into().unwrap());
        bytes.copy_from_slice(&value.to_le_bytes());
    };
    let all = look(&damage(&at("nvfp4"), at("reciprocal"), |t| t.ends_with("weight_scale_2"), reciprocal));
    assert!(all.problems.iter().any(|p| p.contains("of routed experts against") && p.contains("of shared experts")), "{:?}", all.problems);
    let nan = look(&damage(
        &at("nvfp4"),
        at("nan"),
        |t| t.contains("layers.3.mlp.experts.0.gate_proj.weight_scale") && !t.ends_with('2'),
        |b| b[7] = 0x7F,
    ));
    assert_eq!(nan.problems, ["layer 3, expert 0, gate_proj (NVFP4 (packed pairs)): 16 values are not finite"]);
    let zero = look(&damage(
        &at("nvfp4"),
        at("zero"),
        |t| t.contains("layers.4.mlp.experts.15.down_proj.weight") && !t.contains("scale"),
        |b| b.fill(0),
    ));
    assert!(
        zero.problems.iter().any(|p| p.starts_with("layer 4, expert 15, down_proj") && p.contains("100 % of the values are 0")),
        "{:?}",
        zero.problems
    );
    // Scales of other rows: blocks of a matrix no longer fit each other.
    let moved = look(&damage(
        &at("mxfp4"),
        at("moved"),
        |t| t.contains("layers.6.mlp.experts.0.gate_proj.weight_scale"),
        |b| b.iter_mut().enumerate().for_each(|(i, b)| *b = b.wrapping_add(if i % 2 == 0 { 4 } else { 0 })),
    ));
    assert!(moved.problems.iter().any(|p| p.starts_with("layer 6, expert 0, gate_proj")), "{:?}", moved.problems);
}

#[test]
fn random_weights_pass_with_a_note_that_order_cannot_be_judged() {
    let dir = tempfile::tempdir().unwrap();
    synthetic::write(Preset::Tiny, dir.path(), &[]).unwrap();
    let tiny = look(dir.path());
    assert_eq!(tiny.problems, [""; 0]);
    assert_eq!(tiny.notes.len(), 2, "{:?}", tiny.notes);
    assert!(tiny.notes.iter().all(|n| n.contains("cannot be judged")), "{:?}", tiny.notes);
}
