//! Every release, every shipped mix and every dialect of GGUF's keys passes as a stub.

use tandem_model::{
    gguf::write::Typed,
    stubs::{self, GgufStub, Mix, Release, gguf::HeadCounts, mixes::MIXES},
    synthetic::TextConfig,
};
use tandem_quant::DType;

use super::tests::{TOKENS, look, text};

#[test]
fn every_release_passes() {
    let root = tempfile::tempdir().expect("writable");
    for (release, types, narrowed) in [
        (Release::Bf16, &["BF16", "F32"][..], 0),
        (Release::Fp8, &["BF16", "F32", "F8_E4M3"], 0),
        (Release::LibertAi, &["BF16", "F32", "NVFP4 (packed pairs)"], 0),
        (Release::LibertAiScales, &["BF16", "F32", "NVFP4 (packed pairs)"], 0),
        (Release::RedHat, &["BF16", "NVFP4 (packed pairs)"], 4 * 45 + 2 * 34 + 42),
        (Release::Nvidia, &["BF16", "F32", "NVFP4 (packed pairs)"], 0),
        (Release::Quark, &["BF16", "F32", "MXFP4 (packed pairs)"], 0),
    ] {
        let dir = root.path().join(release.name());
        release.write(&dir, &text()).expect("writable");
        let verdict = look(&dir);
        assert_eq!(verdict.reason, None, "{}", release.name());
        let c = verdict.checkpoint.expect("read");
        assert!(c.stub && c.chat_template && c.tokenizer_tokens.is_some());
        assert_eq!(c.layers, [45, 34, 11, 42]);
        assert_eq!(c.types.keys().copied().collect::<Vec<_>>(), types, "{}", release.name());
        assert_eq!(c.skipped.len(), 2, "draft block and vision tower: {:?}", c.skipped);
        assert_eq!(c.narrowed.len(), narrowed, "{}", release.name());
        let named = |w: &String| w.contains("self_attn.A_log (BF16) ×34") && w.contains("mlp.gate.e_score_correction_bias (BF16) ×42");
        assert_eq!(c.warnings.iter().any(named), narrowed > 0, "{:?}", c.warnings);
        assert!(!c.warnings.iter().any(|w| w.contains("unknown")), "{:?}", c.warnings);
        std::fs::remove_dir_all(dir).expect("clean up");
    }
}

#[test]
fn every_shipped_mix_passes() {
    let root = tempfile::tempdir().expect("writable");
    for (i, mix) in MIXES.iter().enumerate() {
        let folder = root.path().join(format!("{}-{}", mix.publisher, mix.name));
        mix.stub(TOKENS).write(&folder, &mix.stem(), [1, 3, 5][i % 3]).expect("writable");
    }
    let found = super::find::checkpoints(&[root.path().to_owned()]);
    assert_eq!(found.len(), MIXES.len());
    for found in found {
        let super::find::Found::Checkpoint(path) = found else { panic!("{found:?}") };
        let verdict = look(&path);
        assert_eq!(verdict.reason, None, "{}", verdict.path);
        let c = verdict.checkpoint.expect("read");
        assert!(c.stub && c.chat_template && c.without_kernel["cpu"].is_empty());
        assert_eq!((c.tokenizer_tokens.is_some(), c.eos_token_ids.len()), (true, 3));
        assert!(c.warnings.iter().all(|w| w.contains("draft (MTP)")), "{}: {:?}", verdict.path, c.warnings);
    }
}

/// The whole vocabulary and all dialects of the keys.
#[test]
fn a_full_vocabulary_and_other_dialects_pass() {
    let root = tempfile::tempdir().expect("writable");
    let whole = Mix::find("unsloth", "UD-IQ1_S").expect("a mix").stub(154_880).write(root.path(), "whole", 3).expect("writable");
    let c = look(&whole).checkpoint.expect("read");
    assert_eq!(c.eos_token_ids, [154_820, 154_827, 154_829]);
    assert!(c.warnings.iter().all(|w| w.contains("draft")), "{:?}", c.warnings);

    let types = |_: &str, shape: &[usize]| if shape.len() > 1 { DType::Bf16 } else { DType::F32 };
    let config = stubs::config();
    for (arch, counts, mtp) in [("glm5next", HeadCounts::PerLayer, true), ("glm5-next", HeadCounts::PerBlock, false)] {
        let config = TextConfig { mtp, ..config.clone() };
        let stub = GgufStub::new(&config, arch, counts, TOKENS, types);
        let path = stub.write(root.path(), arch, 1).expect("writable");
        assert_eq!(look(&path).reason, None, "{arch}");
    }
    let mut old = GgufStub::new(&config, "glm5next", HeadCounts::Absent, TOKENS, types);
    for (key, value) in [("ssm.state_size", 128), ("attention.indexer.block_size", 4)] {
        old.set(&format!("glm5next.{key}"), Typed::U32(value));
    }
    for key in ["kda.head_dim", "kda.gate_lower_bound", "attention.indexer.kpool", "attention.key_length_mla", "attention.value_length_mla"]
    {
        old.unset(&format!("glm5next.{key}"));
    }
    assert_eq!(look(&old.write(root.path(), "old", 1).expect("writable")).reason, None);
}
