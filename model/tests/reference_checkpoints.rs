//! The reference checkpoints open, and say the same under every layout. Skipped, loudly, where `../shared/golden` is not there.

use std::{
    fs,
    path::{Path, PathBuf},
};

use tandem_model::{Checkpoint, FfnTensors, MixerTensors};

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

#[test]
fn quantised_twins_are_refused_by_name() {
    for (name, dtype) in [("tiny-fp8", "F8_E4M3"), ("tiny-nvfp4", "U8")] {
        let (Some(twin), Some(plain)) = (golden(name), golden("tiny")) else { return };
        // The twins share files with the plain checkpoint through links, which a copy may have turned into text.
        let dir = tempfile::tempdir().unwrap();
        for entry in fs::read_dir(&twin).unwrap() {
            let path = entry.unwrap().path();
            let file = path.file_name().unwrap();
            let from = if path.metadata().unwrap().len() < 100 { plain.join(file) } else { path.clone() };
            fs::copy(from, dir.path().join(file)).unwrap();
        }
        let error = Checkpoint::open(dir.path()).unwrap_err().to_string();
        assert!(error.contains(dtype) && error.contains("BF16, F16 or F32") && error.contains(".safetensors: tensor model."), "{error}");
    }
}
