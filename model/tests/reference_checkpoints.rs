//! The reference checkpoints open, and say the same under every layout. Skipped, loudly, where `../shared/golden` is not there.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    fs,
    path::{Path, PathBuf},
};

use tandem_model::{
    Checkpoint, FfnTensors, MixerTensors,
    synthetic::{self, Preset},
};

fn golden(name: &str) -> Option<PathBuf> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/golden").join(name);
    if !dir.is_dir() {
        eprintln!("SKIPPED: no reference checkpoint at {}", dir.display());
        return None;
    }
    Some(dir)
}

#[test]
fn reference_checkpoints_open() {
    for name in ["tiny", "tiny-b", "demo"] {
        let Some(dir) = golden(name) else { return };
        let c = Checkpoint::open(&dir).unwrap();
        let g = c.geometry();
        eprintln!("{name}: {} {:?} {} bytes", c.fingerprint(), c.warnings(), c.total_bytes());
        for i in 0..g.layers {
            let layer = c.layer(i).unwrap();
            assert_eq!(layer.input_norm.len(), g.hidden);
            match layer.mixer {
                MixerTensors::Kda(k) => assert_eq!(k.conv.len(), 3 * g.kda_width() * g.conv),
                MixerTensors::Mla(m) => assert!(m.indexer.is_some()),
            }
            match layer.ffn {
                FfnTensors::Dense(m) => assert_eq!((m.down.rows(), m.down.cols()), (g.hidden, g.intermediate)),
                FfnTensors::Moe(m) => {
                    assert_eq!(m.bias.len(), g.experts);
                    assert_eq!(c.expert(i, g.experts - 1).unwrap().down.cols(), g.moe_intermediate);
                    assert!(c.expert(i, g.experts).is_err());
                }
            }
        }
        assert_eq!(g.mtp_layers, usize::from(name == "demo"));
        assert_eq!(c.warnings().iter().any(|w| w.contains("MTP")), name == "demo");
        assert_eq!(c.warnings().iter().any(|w| w.contains("vision")), name == "tiny");
    }
}

/// A twin shares files with the plain checkpoint through links, which a copy may have turned into text.
fn with_links_followed(twin: &Path, plain: &Path) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(twin).unwrap() {
        let path = entry.unwrap().path();
        let file = path.file_name().unwrap();
        let from = if path.metadata().unwrap().len() < 100 { plain.join(file) } else { path.clone() };
        fs::copy(from, dir.path().join(file)).unwrap();
    }
    dir
}

/// ‖a − b‖ / ‖b‖.
fn distance(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    let norm = |x: &mut dyn Iterator<Item = f32>| x.map(|v| v * v).sum::<f32>().sqrt();
    norm(&mut a.iter().zip(b).map(|(a, b)| a - b)) / norm(&mut b.iter().copied())
}

#[test]
fn quantised_twins_are_what_they_were_made_from() {
    // E4M3 rounds to 4 significant bits, E2M1 to about 2 with a scale per 16.
    for (base, format, most) in [("tiny", "fp8", 0.03), ("tiny-b", "fp8", 0.03), ("tiny", "nvfp4", 0.12), ("tiny-b", "nvfp4", 0.12)] {
        let (Some(twin), Some(plain)) = (golden(&format!("{base}-{format}")), golden(base)) else { return };
        let dir = with_links_followed(&twin, &plain);
        let (quantised, plain) = (Checkpoint::open(dir.path()).unwrap(), Checkpoint::open(&plain).unwrap());
        assert_eq!(quantised.geometry(), plain.geometry());
        assert_ne!(quantised.fingerprint(), plain.fingerprint());
        assert!(quantised.total_bytes() < plain.total_bytes());
        assert!(!quantised.warnings().iter().any(|w| w.contains("unknown")), "{:?}", quantised.warnings());
        for layer in plain.geometry().moe_layers() {
            for expert in [0, plain.geometry().experts - 1] {
                let (q, p) = (quantised.expert(layer, expert).unwrap(), plain.expert(layer, expert).unwrap());
                for (q, p) in [(q.gate, p.gate), (q.up, p.up), (q.down, p.down)] {
                    let d = distance(&q.to_f32(), &p.to_f32());
                    assert!(d > 1e-4 && d < most, "{}: {d}", q.name());
                }
            }
        }
    }
}

#[test]
fn gguf_files_are_what_they_were_made_from() {
    let Some(files) = golden("gguf") else { return };
    let dir = tempfile::tempdir().unwrap();
    synthetic::write(Preset::Tinyk, dir.path(), &[]).unwrap();
    let plain = Checkpoint::open(dir.path()).unwrap();
    for name in ["tinyk-MIX.gguf", "tinyk-Q4_K_M.gguf"] {
        let gguf = Checkpoint::open(&files.join(name)).unwrap();
        assert_eq!(gguf.geometry(), plain.geometry());
        assert_eq!(gguf.warnings(), [] as [&str; 0], "{name}");
        assert_eq!(gguf.generation().eos_token_ids, [509, 510]);
        assert!(distance(&gguf.embed().unwrap().to_f32(), &plain.embed().unwrap().to_f32()) < 0.1);
        for i in 0..plain.geometry().layers {
            let (q, p) = (gguf.layer(i).unwrap(), plain.layer(i).unwrap());
            assert_eq!(q.input_norm, p.input_norm);
            match (q.mixer, p.mixer) {
                (MixerTensors::Kda(q), MixerTensors::Kda(p)) => {
                    assert!(distance(&q.a_log, &p.a_log) < 1e-6, "A_log is undone");
                    assert_eq!(q.conv, p.conv);
                    assert!(distance(&q.q.to_f32(), &p.q.to_f32()) < 0.2);
                }
                (MixerTensors::Mla(q), MixerTensors::Mla(p)) => assert_eq!(q.kv_b.to_f32(), p.kv_b.to_f32(), "halves are joined"),
                _ => panic!("layer {i} of another kind"),
            }
        }
        for layer in plain.geometry().moe_layers() {
            let (q, p) = (gguf.expert(layer, 3).unwrap(), plain.expert(layer, 3).unwrap());
            for (q, p) in [(q.gate, p.gate), (q.up, p.up), (q.down, p.down)] {
                let d = distance(&q.to_f32(), &p.to_f32());
                assert!(d > 1e-4 && d < 0.15, "{}: {d}", q.name());
            }
        }
    }
}
