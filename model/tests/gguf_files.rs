//! What a GGUF checkpoint may be: split sets from any shard, both spellings and the old dialect, drafts skipped, factors beside NVFP4.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use common::{ARRAY, Gguf, I32, STRING, U32, array, f32s, string, u32s, write_set};
use tandem_model::{Checkpoint, Mixer, Resident, ShardPlan, Split};

#[test]
fn any_shard_of_a_set_opens_it() {
    let dir = tempfile::tempdir().unwrap();
    let whole = Gguf::tinyk();
    let paths = write_set(dir.path(), &whole.shards(3));
    let want = whole.open().unwrap();
    for path in paths.iter().map(|p| p.as_path()).chain([dir.path()]) {
        let checkpoint = Checkpoint::open(path).unwrap();
        assert_eq!(checkpoint.fingerprint(), want.fingerprint(), "{}", path.display());
        assert_eq!(checkpoint.geometry(), want.geometry());
        assert_eq!(checkpoint.embed().unwrap().to_f32(), want.embed().unwrap().to_f32());
        assert_eq!(checkpoint.config_file(), paths[0], "the keys are in the first shard");
        assert_eq!(checkpoint.dir(), dir.path());
    }
    assert_eq!(tandem_model::title::title(&paths[1]), "Tinyk");
    // Alignment is each file's own.
    let mut second = whole.shards(3)[1].clone();
    second.set("general.alignment", U32, u32s(&[128]));
    std::fs::write(&paths[1], second.bytes(128)).unwrap();
    assert_eq!(Checkpoint::open(&paths[2]).unwrap().fingerprint(), want.fingerprint());
}

#[test]
fn sets_that_do_not_belong_together() {
    let dir = tempfile::tempdir().unwrap();
    let shards = Gguf::tinyk().shards(3);
    let refused = |edit: &dyn Fn(&mut Vec<Gguf>), open: usize, parts: &[&str]| {
        let mut shards = shards.clone();
        edit(&mut shards);
        let paths = write_set(dir.path(), &shards);
        let message = Checkpoint::open(&paths[open]).unwrap_err().to_string();
        assert!(parts.iter().all(|part| message.contains(part)), "{message}");
    };
    let swap = |s: &mut Vec<Gguf>| s.swap(1, 2);
    refused(&swap, 0, &["Tinyk-00002-of-00003.gguf", "needed shard 2 of 3, as its name says", "got split.no 2 of split.count 3 inside"]);
    let count = |s: &mut Vec<Gguf>| {
        s[2].set("split.count", U32, u32s(&[4]));
    };
    refused(&count, 0, &["Tinyk-00003-of-00003.gguf", "needed shard 3 of 3", "split.count 4"]);
    let total = |s: &mut Vec<Gguf>| {
        s.iter_mut().for_each(|s| {
            s.set("split.tensors.count", I32, u32s(&[7]));
        });
    };
    refused(&total, 1, &["needed 7 tensors in all shards (split.tensors.count)"]);
    let twice = |s: &mut Vec<Gguf>| {
        let tensor = s[1].tensors[0].clone();
        s[2].tensors[0] = tensor;
    };
    refused(&twice, 2, &["needed each tensor once", "got a second one", "Tinyk-00002-of-00003.gguf"]);

    let paths = write_set(dir.path(), &shards);
    std::fs::remove_file(&paths[1]).unwrap();
    let missing = Checkpoint::open(&paths[2]).unwrap_err().to_string();
    assert!(missing.contains("Tinyk-00002-of-00003.gguf") && missing.contains("is one of 3"), "{missing}");
    assert!(missing.contains("no such file (download it again)"), "{missing}");
    let renamed = dir.path().join("renamed.gguf");
    std::fs::copy(&paths[0], &renamed).unwrap();
    let message = Checkpoint::open(&renamed).unwrap_err().to_string();
    assert!(message.contains("PREFIX-00001-of-00003.gguf") && message.contains("one of 3 shards under another name"), "{message}");
    let several = Checkpoint::open(dir.path()).unwrap_err().to_string();
    assert!(several.contains(".gguf files that are no one set") && several.contains("name the one to load"), "{several}");
}

#[test]
fn spellings_and_dialects_mean_the_same() {
    let want = Gguf::tinyk().open().unwrap();
    let same = |edit: &dyn Fn(&mut Gguf)| {
        let mut gguf = Gguf::tinyk();
        edit(&mut gguf);
        let got = gguf.open().unwrap();
        assert_eq!(got.geometry(), want.geometry());
        assert_eq!(got.fingerprint(), want.fingerprint());
    };
    let old_prefix = |g: &mut Gguf| {
        g.set("general.architecture", STRING, string("glm5next"));
        g.pairs.iter_mut().for_each(|(key, ..)| *key = key.replace("glm5-next.", "glm5next."));
    };
    same(&old_prefix);
    // The first writers: KDA sizes under ssm.*, pools as block_size, kinds and head widths left to the tensors.
    same(&|g| {
        old_prefix(g);
        for key in
            ["kda.head_dim", "kda.gate_lower_bound", "attention.head_count_kv", "attention.key_length_mla", "attention.value_length_mla"]
        {
            g.unset(&format!("glm5next.{key}"));
        }
        g.unset("glm5next.attention.indexer.kpool").set("glm5next.attention.indexer.block_size", U32, u32s(&[4]));
        g.set("glm5next.ssm.state_size", U32, u32s(&[64])).unset("glm5next.vocab_size");
    });
    // One entry more than trunk layers, as where the draft block has one; a scalar says nothing, so tensors do.
    same(&|g| {
        g.set("glm5-next.attention.head_count_kv", U32, u32s(&[4]));
    });
    // Vectors with leading dimensions of one, convolutions without theirs.
    same(&|g| {
        for i in [0, 2] {
            g.tensor(&format!("blk.{i}.ssm_a")).ne = vec![1, 4];
        }
        for t in g.tensors.iter_mut().filter(|t| t.name.contains("ssm_conv1d")) {
            t.ne = vec![t.ne[0], 1, t.ne[2], 1];
        }
    });
    assert!(want.geometry().layer_specs.iter().map(|l| l.mixer == Mixer::Kda).eq([true, false, true, false]));
}

#[test]
fn a_draft_block_is_skipped_whatever_its_types() {
    let mut gguf = Gguf::tinyk();
    gguf.set("glm5-next.block_count", U32, u32s(&[5])).set("glm5-next.nextn_predict_layers", U32, u32s(&[1]));
    gguf.set("glm5-next.attention.head_count_kv", ARRAY, array(U32, &[0, 1, 0, 1, 1].map(|n| u32s(&[n]))));
    gguf.add("blk.4.nextn.eh_proj.weight", &[512, 256], 30, vec![0; 512 * 256 * 2]);
    gguf.add("blk.4.ffn_down_exps.weight", &[256, 256, 4], 34, vec![0; 1000]);
    let checkpoint = gguf.open().unwrap();
    assert_eq!((checkpoint.geometry().layers, checkpoint.geometry().mtp_layers), (4, 1));
    let warning = checkpoint.warnings().join("; ");
    assert!(warning.contains("skipped the draft (MTP) block: 2 tensors"), "{warning}");
}

#[test]
fn factors_beside_a_stack_are_applied_to_each_expert() {
    let mut gguf = Gguf::tinyk();
    let t = gguf.tensor("blk.2.ffn_up_exps.weight");
    // Scale bytes 1.0 (halved: ½), codes all 2 (doubled: 2): every element is 1 before its factor.
    let block = [[0x38; 4].as_slice(), &[0x22; 32]].concat();
    (t.kind, t.data) = (40, block.repeat(256 * 256 * 4 / 64));
    gguf.add("blk.2.ffn_up_exps.scale", &[4], 0, f32s(&[1.0, 2.0, 0.25, -3.0]));
    gguf.add("blk.2.ffn_up_exps.input_scale", &[4], 0, f32s(&[9.0; 4]));
    let embed = gguf.tensor("token_embd.weight");
    (embed.kind, embed.data) = (40, block.repeat(256 * 512 / 64));
    gguf.add("token_embd.scale", &[1], 0, f32s(&[0.5]));
    let checkpoint = gguf.open().unwrap();
    for (expert, factor) in [1.0, 2.0, 0.25, -3.0].into_iter().enumerate() {
        assert!(checkpoint.expert(2, expert).unwrap().up.to_f32().iter().all(|v| *v == factor), "expert {expert}");
    }
    assert!(checkpoint.embed().unwrap().to_f32().iter().all(|v| *v == 0.5));
    let warning = checkpoint.warnings().join("; ");
    assert!(!warning.contains("unknown"), "{warning}");
}

#[test]
fn cuts_fall_on_the_largest_block_of_any_layer() {
    let block = |checkpoint: &Checkpoint| checkpoint.ffn_block();
    let gguf = Gguf::tinyk();
    let checkpoint = gguf.open().unwrap();
    assert_eq!(block(&checkpoint), 256, "down is Q5_K");
    let plan = |workers: usize| ShardPlan::with_block(checkpoint.geometry(), Split::Ffn, workers, &Resident::None, block(&checkpoint));
    let message = plan(2).unwrap_err().to_string();
    assert_eq!(message, "2 expert workers cannot share the routed experts by ffn: the largest possible count is 1");
    assert!(plan(1).is_ok());

    // One layer of Q8_0 and one of Q5_K: the coarser one decides.
    let mut mixed = gguf.clone();
    let t = mixed.tensor("blk.2.ffn_down_exps.weight");
    (t.kind, t.data) = (8, vec![0; 256 * 256 * 4 / 32 * 34]);
    assert_eq!(block(&mixed.open().unwrap()), 256);
    let t = mixed.tensor("blk.3.ffn_down_exps.weight");
    (t.kind, t.data) = (8, vec![0; 256 * 256 * 4 / 32 * 34]);
    let checkpoint = mixed.open().unwrap();
    assert_eq!(block(&checkpoint), 32);
    let plan = ShardPlan::with_block(checkpoint.geometry(), Split::Ffn, 3, &Resident::None, 32).unwrap();
    assert!(plan.shards.iter().all(|s| s.ffn.start % 32 == 0 && s.ffn.end % 32 == 0), "{plan:?}");
    let cut = checkpoint.expert(2, 0).unwrap().down.col_window(0..100).unwrap_err().to_string();
    assert!(cut.contains("cannot cut columns 0..100 out of 256") && cut.contains("multiples of 32 (Q8_0)"), "{cut}");
}
