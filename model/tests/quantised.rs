//! Quantised safetensors: values of every format down to their edge bytes, what is never narrowed, and what is refused.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use tandem_model::{
    Checkpoint, MixerTensors,
    synthetic::{self, Preset, Quantised, write_twin},
};

/// Tensors of a file: dtype, shape, data.
type Tensors = BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>;

fn tensors(path: &Path) -> Tensors {
    let bytes = fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    file.tensors().into_iter().map(|(name, t)| (name, (t.dtype(), t.shape().to_vec(), t.data().to_vec()))).collect()
}

/// `tiny-b` in a format, in a folder of its own.
fn twin(format: Quantised) -> (tempfile::TempDir, PathBuf) {
    let root = tempfile::tempdir().unwrap();
    let (plain, twin) = (root.path().join("plain"), root.path().join("twin"));
    synthetic::write(Preset::TinyB, &plain, &[]).unwrap();
    write_twin(&plain, format, &twin).unwrap();
    (root, twin)
}

/// Changes the tensors of a shard; the index goes, for a shard alone would need none, so it is rewritten.
fn edit(dir: &Path, shard: usize, change: impl FnOnce(&mut Tensors)) {
    let file = format!("model-{shard:05}-of-00003.safetensors");
    let mut all = tensors(&dir.join(&file));
    let before: Vec<String> = all.keys().cloned().collect();
    change(&mut all);
    let views = all.iter().map(|(name, (dtype, shape, data))| (name.as_str(), TensorView::new(*dtype, shape.clone(), data).unwrap()));
    fs::write(dir.join(&file), safetensors::serialize(views, None).unwrap()).unwrap();
    let index = dir.join("model.safetensors.index.json");
    let mut json: serde_json::Value = serde_json::from_slice(&fs::read(&index).unwrap()).unwrap();
    let map = json["weight_map"].as_object_mut().unwrap();
    before.iter().for_each(|name| drop(map.remove(name)));
    all.keys().for_each(|name| drop(map.insert(name.clone(), file.clone().into())));
    fs::write(index, json.to_string()).unwrap();
}

const EXPERT: &str = "model.language_model.layers.1.mlp.experts.0.up_proj";

#[test]
fn reciprocal_factors_mean_the_same() {
    let ((_a, modelopt), (_b, packed)) = (twin(Quantised::Nvfp4), twin(Quantised::Nvfp4Packed));
    let (modelopt, packed) = (Checkpoint::open(&modelopt).unwrap(), Checkpoint::open(&packed).unwrap());
    assert!(packed.warnings().is_empty(), "{:?}", packed.warnings());
    for layer in packed.geometry().moe_layers() {
        for expert in 0..packed.geometry().experts {
            let (a, b) = (modelopt.expert(layer, expert).unwrap(), packed.expert(layer, expert).unwrap());
            for (a, b) in [(a.gate, b.gate), (a.up, b.up), (a.down, b.down)] {
                assert!(a.to_f32().iter().zip(b.to_f32()).all(|(a, b)| (a - b).abs() <= a.abs() * 4e-7), "{}", a.name());
            }
        }
    }
}

/// E4M3 from its definition.
fn e4m3(byte: u8) -> f64 {
    let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f64::from(byte & 7));
    let magnitude = match byte & 0x7F {
        0x7F => f64::NAN,
        _ if exponent == 0 => mantissa / 8.0 * 2f64.powi(-6),
        _ => (1.0 + mantissa / 8.0) * 2f64.powi(exponent - 7),
    };
    if byte & 0x80 == 0 { magnitude } else { -magnitude }
}

fn assert_bits(got: f32, want: f64, what: &str) {
    let want = want as f32;
    assert!(got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan()), "{what}: {got} instead of {want}");
}

#[test]
fn every_fp8_byte_has_its_value() {
    let (_root, dir) = twin(Quantised::Fp8);
    edit(&dir, 3, |t| {
        t.get_mut(&format!("{EXPERT}.weight")).unwrap().2.iter_mut().enumerate().for_each(|(i, b)| *b = i as u8);
        let grid = &mut t.get_mut(&format!("{EXPERT}.weight_scale_inv")).unwrap().2;
        grid.chunks_exact_mut(4).for_each(|f| f.copy_from_slice(&0.5f32.to_le_bytes()));
    });
    let values = Checkpoint::open(&dir).unwrap().expert(1, 0).unwrap().up.to_f32();
    for (i, value) in values.iter().enumerate() {
        assert_bits(*value, e4m3(i as u8) / 2.0, &format!("byte {:#04x}", i as u8));
    }
    assert!(values[0x7F].is_nan() && values[0xFF].is_nan() && values[0x80].is_sign_negative() && values[1] == 2f32.powi(-10));
}

#[test]
fn every_nvfp4_code_and_scale_byte_has_its_value() {
    let codes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];
    let (_root, dir) = twin(Quantised::Nvfp4);
    edit(&dir, 3, |t| {
        // Each group of 16 elements has all codes in order, and group g the scale byte g.
        let bytes = &mut t.get_mut(&format!("{EXPERT}.weight")).unwrap().2;
        bytes.iter_mut().enumerate().for_each(|(i, b)| *b = ((2 * (i % 8)) | ((2 * (i % 8) + 1) << 4)) as u8);
        t.get_mut(&format!("{EXPERT}.weight_scale")).unwrap().2.iter_mut().enumerate().for_each(|(i, b)| *b = i as u8);
        t.get_mut(&format!("{EXPERT}.weight_scale_2")).unwrap().2 = 0.25f32.to_le_bytes().to_vec();
    });
    let values = Checkpoint::open(&dir).unwrap().expert(1, 0).unwrap().up.to_f32();
    assert!(values.len() >= 256 * 16, "all scale bytes occur");
    for (i, value) in values.iter().enumerate() {
        assert_bits(*value, codes[i % 16] * e4m3((i / 16) as u8) / 4.0, &format!("scale {:#04x}, code {}", (i / 16) as u8, i % 16));
    }
}

#[test]
fn every_mxfp4_scale_byte_has_its_value() {
    let (_root, dir) = twin(Quantised::Mxfp4);
    edit(&dir, 3, |t| {
        t.get_mut(&format!("{EXPERT}.weight")).unwrap().2.fill(0x52); // 1 and 3
        t.get_mut(&format!("{EXPERT}.weight_scale")).unwrap().2.iter_mut().enumerate().for_each(|(i, b)| *b = i as u8);
    });
    let values = Checkpoint::open(&dir).unwrap().expert(1, 0).unwrap().up.to_f32();
    for (i, value) in values.iter().enumerate() {
        let scale = match (i / 32) as u8 {
            0xFF => f64::NAN,
            e => 2f64.powi(i32::from(e) - 127),
        };
        assert_bits(*value, scale * if i % 2 == 0 { 1.0 } else { 3.0 }, &format!("scale {:#04x}", (i / 32) as u8));
    }
}

#[test]
fn what_the_release_keeps_in_f32_is_not_narrowed() {
    let (_root, dir) = twin(Quantised::Fp8);
    let (stored, checkpoint) = (tensors(&dir.join("model-00001-of-00003.safetensors")), Checkpoint::open(&dir).unwrap());
    let raw = |name: &str| -> Vec<u32> {
        let (dtype, _, data) = &stored[&format!("model.language_model.{name}")];
        assert_eq!(*dtype, Dtype::F32, "{name}");
        data.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect()
    };
    let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    let mut narrow = 0;
    let mut same = |values: &[f32], name: String| {
        assert_eq!(bits(values), raw(&name), "{name}");
        narrow += values.iter().filter(|v| v.to_bits() & 0xFFFF == 0).count();
    };
    for i in 0..checkpoint.geometry().layers {
        let layer = checkpoint.layer(i).unwrap();
        for (site, hc) in [("attn", &layer.attn_hc), ("ffn", &layer.ffn_hc)] {
            same(&hc.base, format!("layers.{i}.hc_{site}_base"));
            same(&hc.scale, format!("layers.{i}.hc_{site}_scale"));
        }
        if let MixerTensors::Kda(kda) = &layer.mixer {
            same(&kda.a_log, format!("layers.{i}.self_attn.A_log"));
            same(&kda.dt_bias, format!("layers.{i}.self_attn.dt_bias"));
        }
        if let tandem_model::FfnTensors::Moe(moe) = &layer.ffn {
            same(&moe.bias, format!("layers.{i}.mlp.gate.e_score_correction_bias"));
        }
    }
    assert!(narrow < 20, "the values need all of their digits: {narrow} would survive BF16");
}

#[test]
fn what_cannot_be_read_is_refused_by_name() {
    let refused = |format: Quantised, shard: usize, change: &dyn Fn(&mut Tensors), parts: &[&str]| {
        let (_root, dir) = twin(format);
        edit(&dir, shard, |t| change(t));
        let message = Checkpoint::open(&dir).and_then(|c| c.expert(1, 0).map(drop)).unwrap_err().to_string();
        for part in parts {
            assert!(message.contains(part), "no {part:?} in: {message}");
        }
    };
    let (weight, scale, global) = (format!("{EXPERT}.weight"), format!("{EXPERT}.weight_scale"), format!("{EXPERT}.weight_scale_2"));
    let grid = format!("{EXPERT}.weight_scale_inv");
    let take = |name: &str| {
        let name = name.to_owned();
        move |t: &mut Tensors| drop(t.remove(&name))
    };

    refused(Quantised::Fp8, 3, &take(&grid), &[&weight, "needed a weight_scale_inv or weight_scale beside an F8_E4M3 weight", "got none"]);
    let wide = |t: &mut Tensors| drop(t.insert(grid.clone(), (Dtype::F32, vec![2, 1], vec![0; 8])));
    refused(Quantised::Fp8, 3, &wide, &[&grid, "a scale per [128, 128] block of", "got [2, 1]"]);
    let e5m2 = |t: &mut Tensors| t.get_mut(&weight).unwrap().0 = Dtype::F8_E5M2;
    refused(Quantised::Fp8, 3, &e5m2, &[&weight, "needed BF16, F16, F32, F8_E4M3 with scales, NVFP4, MXFP4", "got F8_E5M2"]);
    refused(Quantised::Nvfp4, 3, &take(&scale), &[&weight, "needed scales beside a packed U8 weight", "got none"]);
    refused(Quantised::Nvfp4, 3, &take(&global), &[&weight, "needed scales beside a packed U8 weight"]);
    for (value, shown) in [(0.0f32, "got 0"), (f32::INFINITY, "got inf"), (f32::NAN, "got NaN")] {
        let set = |t: &mut Tensors| t.get_mut(&global).unwrap().2 = value.to_le_bytes().to_vec();
        refused(Quantised::Nvfp4, 3, &set, &[&global, "needed a finite factor other than 0", shown]);
    }
    let short = |t: &mut Tensors| {
        let groups = t.get_mut(&scale).unwrap();
        groups.1[1] -= 1;
        groups.2.truncate(groups.1[0] * groups.1[1]);
    };
    refused(Quantised::Nvfp4, 3, &short, &[&scale, "a scale per 16 elements of"]);
    let packed = format!("{EXPERT}.weight_packed");
    refused(Quantised::Nvfp4Packed, 3, &take(&format!("{EXPERT}.weight_global_scale")), &[&packed, "needed scales beside it", "got none"]);
    refused(Quantised::Mxfp4, 3, &take(&scale), &[&weight, "needed scales beside a packed U8 weight"]);

    // Scales that nothing asks for would be left out.
    let router = "model.language_model.layers.1.mlp.gate";
    let stray = |t: &mut Tensors| drop(t.insert(format!("{router}.weight_scale"), (Dtype::F32, vec![1], 2f32.to_le_bytes().to_vec())));
    refused(
        Quantised::Fp8,
        1,
        &stray,
        &["gate.weight_scale", "needed no scales beside a BF16 weight", "scales that nothing says how to apply"],
    );
    // A norm is no matrix.
    let norm = "model.language_model.layers.1.input_layernorm";
    let quantised_norm = |t: &mut Tensors| {
        let stored = t.get_mut(&format!("{norm}.weight")).unwrap();
        let len = stored.1[0];
        *stored = (Dtype::F8_E4M3, vec![len], vec![0x38; len]);
        t.insert(format!("{norm}.weight_scale"), (Dtype::F32, vec![1], 1f32.to_le_bytes().to_vec()));
    };
    refused(Quantised::Fp8, 1, &quantised_norm, &["input_layernorm.weight"]);
}

#[test]
fn activation_scales_are_ignored() {
    let (_root, dir) = twin(Quantised::Nvfp4);
    let plain = Checkpoint::open(&dir).unwrap().expert(1, 0).unwrap().up.to_f32();
    edit(&dir, 3, |t| drop(t.insert(format!("{EXPERT}.input_scale"), (Dtype::F32, vec![], 9f32.to_le_bytes().to_vec()))));
    let checkpoint = Checkpoint::open(&dir).unwrap();
    assert!(checkpoint.warnings().is_empty(), "{:?}", checkpoint.warnings());
    assert_eq!(checkpoint.expert(1, 0).unwrap().up.to_f32(), plain);
}
