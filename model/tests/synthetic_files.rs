//! The reference presets come out byte for byte as the files that the goldens were computed from.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{fs, path::Path};

use sha2::{Digest, Sha256};
use tandem_model::synthetic::{self, Preset, Quantised, write_twin};

/// SHA-256 of each weight file of the reference checkpoints.
const FILES: [(Preset, &str, [&str; 3]); 2] = [
    (
        Preset::Tiny,
        "tiny",
        [
            "0fe885d475a0662935c51b7857007c5e9040abed39ab2f9552a23ca25e2c1dc9",
            "c7fd8d4e0c0f9bb6e5a9bd7ca66d1b7a1c0fc8bff8f58799b11d8742e3edc074",
            "04c171bb464691693bb6656d9683428c73908b1e1226a4273574ff8e81b53552",
        ],
    ),
    (
        Preset::TinyB,
        "tiny-b",
        [
            "862d6d372caa7f9f649c3c8b999e94c5332307a1d10391a722556b8678268fc9",
            "54c9b214116bfc494515eaad7cecae2a4dd3b4097f1a06cca2b5572253842157",
            "bd6fe78017c7e7d4c1b798c54ee9b430bf109462f58a396917b7a7d0833e93c3",
        ],
    ),
];

/// SHA-256 of the quantised shards of the reference twins.
const TWINS: [(Preset, Quantised, usize, &str); 6] = [
    (Preset::Tiny, Quantised::Fp8, 2, "d83c4d2b9f685b7082cad886b31823864ac78a8d4299818ee78ed83bd3e9f03c"),
    (Preset::Tiny, Quantised::Fp8, 3, "a1445cce9612ae738108f0e3eee4ae435e6d51a6e38ecb57ce328bbe69a838c7"),
    (Preset::Tiny, Quantised::Nvfp4, 3, "62933ac56677e714d44b9f8c6623f4b6ababda667a7bd1e2ba15a806a2581ddd"),
    (Preset::TinyB, Quantised::Fp8, 2, "0119b7a3db96fbff309e7a1a98e3e1bdab265df56e83fd6aadc277fe66613fdf"),
    (Preset::TinyB, Quantised::Fp8, 3, "7d1b0b8f1f586f9bfd6842f5e4c92b6ca72e3746048d0cf26f0006750a5df8aa"),
    (Preset::TinyB, Quantised::Nvfp4, 3, "ff8f3df0227ffe40913cfcb772d54da23319d25b4d81bae408e63abeb01e88ec"),
];

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|b| format!("{b:02x}")).collect()
}

#[test]
fn twins_are_bit_identical() {
    let dir = tempfile::tempdir().unwrap();
    for (preset, format, shard, sum) in TWINS {
        let (plain, twin) = (dir.path().join(format!("{preset:?}")), dir.path().join(format!("{preset:?}-{format:?}")));
        if !twin.exists() {
            synthetic::write(preset, &plain, &[]).unwrap();
            write_twin(&plain, format, &twin).unwrap();
        }
        let bytes = fs::read(twin.join(format!("model-{shard:05}-of-00003.safetensors"))).unwrap();
        assert_eq!(sha256(&bytes), sum, "{preset:?} in {format:?}, shard {shard}");
    }
}

#[test]
fn presets_are_bit_identical() {
    for (preset, name, sums) in FILES {
        let dir = tempfile::tempdir().unwrap();
        synthetic::write(preset, dir.path(), &[]).unwrap();
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/golden").join(name);
        if !golden.is_dir() {
            eprintln!("SKIPPED the comparison with {}: not there; its checksums are compared all the same", golden.display());
        }
        for (i, sum) in sums.iter().enumerate() {
            let file = format!("model-{:05}-of-00003.safetensors", i + 1);
            let bytes = fs::read(dir.path().join(&file)).unwrap();
            assert_eq!(sha256(&bytes), *sum, "{name}/{file}");
            if golden.is_dir() {
                assert!(fs::read(golden.join(&file)).unwrap() == bytes, "{name}/{file}");
            }
        }
        if golden.is_dir() {
            for file in ["config.json", "generation_config.json", "model.safetensors.index.json"] {
                let json = |dir: &Path| serde_json::from_slice::<serde_json::Value>(&fs::read(dir.join(file)).unwrap()).unwrap();
                assert_eq!(json(dir.path()), json(&golden), "{name}/{file}");
            }
        }
    }
}

/// 1.25 GB on disk: run with `--ignored`.
#[test]
#[ignore = "writes 1.25 GB"]
fn the_benchmark_model_is_whole() {
    let dir = tempfile::tempdir().unwrap();
    synthetic::write(Preset::Small, dir.path(), &[]).unwrap();
    let checkpoint = tandem_model::Checkpoint::open(dir.path()).unwrap();
    assert!(checkpoint.warnings().is_empty());
    assert_eq!(checkpoint.total_bytes() / 10_000_000, 124);
}
