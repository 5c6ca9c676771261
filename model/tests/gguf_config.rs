//! The tinyk GGUF's keys give the geometry of its published config (skipped loudly without `../shared`).
#![allow(clippy::unwrap_used, reason = "tests")]

use std::path::Path;

use tandem_model::{Geometry, gguf};

#[test]
fn keys_give_the_published_geometry() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/golden");
    if !golden.exists() {
        eprintln!("SKIPPED: ../shared/golden is not here");
        return;
    }
    let want = Geometry::read(&golden.join("tinyk-config/config.json")).unwrap();
    for name in ["tinyk-MIX", "tinyk-Q4_K_M"] {
        let path = golden.join(format!("gguf/{name}.gguf"));
        let bytes = std::fs::read(&path).unwrap();
        let header = gguf::Header::parse(&bytes).unwrap();
        header.check_extents(bytes.len() as u64).unwrap();
        let config = gguf::config::config(&path, &header, &header.tensors).unwrap();
        assert_eq!(Geometry::from_json(&path, &config).unwrap(), want, "{name}");
        for tensor in &header.tensors {
            assert_ne!(gguf::names::classify(&tensor.name, 4), gguf::names::GgufName::Unknown, "{}", tensor.name);
        }
    }
}
