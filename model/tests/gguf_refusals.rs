//! What a GGUF file may not be (checkpoints.md §4.4, §5.1, §6.1, §6.2): each refusal with its message, on a whole file with one thing wrong.
#![allow(clippy::unwrap_used, reason = "tests")]

mod common;

use common::{ARRAY, BOOL, F32, Gguf, STRING, U8, U32, array, f32s, string, u32s};
use proptest::prelude::*;

/// Asserts that a file is refused, and that the message has every one of some parts.
fn assert_refused(gguf: &Gguf, parts: &[&str]) {
    let message = gguf.refused();
    for part in parts {
        assert!(message.contains(part), "no {part:?} in: {message}");
    }
}

fn edited(edit: impl FnOnce(&mut Gguf)) -> Gguf {
    let mut gguf = Gguf::tinyk();
    edit(&mut gguf);
    gguf
}

#[test]
fn types_that_are_not_read() {
    let down = "blk.2.ffn_down_exps.weight";
    for (kind, name) in [
        (34, "(TQ1_0)"),
        (35, "(TQ2_0)"),
        (4, "(removed from ggml)"),
        (31, "(removed from ggml)"),
        (33, "(removed from ggml)"),
        (36, "(removed from ggml)"),
        (38, "(removed from ggml)"),
        (41, "(Q1_0)"),
        (100, "(ROCmFP)"),
        (104, "(ROCmFP)"),
        (107, "(ROCmFP)"),
        (137, "(an ik_llama.cpp type)"),
        (153, "(an ik_llama.cpp type)"),
        (4096, ""),
    ] {
        let gguf = edited(|g| g.tensor(down).kind = kind);
        let needed = "needed BF16, F16, F32, F8_E4M3 with scales, NVFP4, MXFP4, or a ggml type from Q4_0 to NVFP4 without TQ1_0 and TQ2_0";
        assert_refused(&gguf, &[down, needed, format!("got ggml type {kind} {name}").trim_end()]);
    }
}

#[test]
fn drafts_and_add_ons() {
    let gguf = edited(|g| {
        g.tensors.retain(|t| !t.name.starts_with("blk."));
        g.add("blk.4.nextn.eh_proj.weight", &[512, 256], 30, vec![0; 512 * 256 * 2]);
        g.set("glm5-next.block_count", U32, u32s(&[5])).set("glm5-next.nextn_predict_layers", U32, u32s(&[1]));
    });
    assert_refused(&gguf, &["model.gguf", "needed the whole model", "got an MTP-only draft: it has the draft block and no trunk layers"]);
    for kind in ["adapter", "mmproj"] {
        let gguf = edited(|g| {
            g.set("general.type", STRING, string(kind));
        });
        assert_refused(&gguf, &["needed the whole model", &format!("general.type \"{kind}\" (an add-on to a model)")]);
    }
}

#[test]
fn other_architectures_and_dialects() {
    for arch in ["dflash", "eagle3", "deepseek2", "glm4moe"] {
        let gguf = edited(|g| {
            g.set("general.architecture", STRING, string(arch));
        });
        let got = format!("got \"{arch}\" (another model)");
        assert_refused(&gguf, &["general.architecture", "needed \"glm5-next\" or \"glm5next\"", &got]);
    }
    assert_refused(
        &edited(|g| {
            g.unset("general.architecture");
        }),
        &["general.architecture", "got nothing"],
    );
    let gguf = edited(|g| g.tensor("blk.0.attn_q.weight").name = "blk.0.kda_q.weight".into());
    assert_refused(&gguf, &["blk.0.kda_q.weight", "needed llama.cpp's tensor names", "the DwarfStar dialect (kda_*)"]);
}

#[test]
fn truncated_and_foreign_files() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("model.gguf");
    let bytes = Gguf::tinyk().bytes(32);
    let error = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        tandem_model::Checkpoint::open(&path).unwrap_err().to_string()
    };
    let short = error(&bytes[..bytes.len() - 100]);
    assert!(short.contains("model.gguf") && short.contains("needed bytes up to offset") && short.contains("(truncated?)"), "{short}");
    let header = error(&bytes[..1000]);
    assert!(header.contains("the header ends inside") && header.contains("(a truncated download?)"), "{header}");
    assert!(error(b"").contains("the header ends inside the magic"));
    let pointer = error(b"version https://git-lfs.github.com/spec/v1\n");
    assert!(pointer.contains("not a GGUF file"), "{pointer}");
}

#[test]
fn keys_that_say_another_model() {
    let key = |name: &str| format!("glm5-next.{name}");
    let refused = |name: &str, kind: u32, value: Vec<u8>, parts: &[&str]| {
        let key = key(name);
        let gguf = edited(|g| {
            g.set(&key, kind, value);
        });
        assert_refused(&gguf, &[&[key.as_str()], parts].concat());
    };
    refused("rope.dimension_count", U32, u32s(&[64]), &["needed 0", "got 64"]);
    refused("expert_gating_func", U32, u32s(&[1]), &["needed 2", "got 1"]);
    refused("attention.layer_norm_epsilon", F32, f32s(&[1e-5]), &["needed 0.000001"]);
    let kinds = |n: usize| array(U32, &vec![u32s(&[1]); n]);
    refused("attention.head_count_kv", ARRAY, kinds(3), &["needed 4 entries (one per block)", "got 3 entries"]);
    refused("attention.head_count_kv", ARRAY, array(F32, &vec![f32s(&[1.0]); 4]), &["head_count_kv[0]: needed a whole number, got 1"]);
    refused("attention.head_count_kv", STRING, string("all"), &["needed a whole number", "got \"all\""]);
    let clamps = |values: &[f32]| array(F32, &values.iter().map(|v| f32s(&[*v])).collect::<Vec<_>>());
    refused("swiglu_clamp_shexp", ARRAY, clamps(&[4.0, 4.0, 7.0, 4.0]), &["needed one clamp everywhere (4)", "got 7"]);
    refused("swiglu_clamp_exp", ARRAY, clamps(&[4.0; 3]), &["needed 4 entries (one per block)", "got 3 entries"]);
    refused("swiglu_clamp_exp", ARRAY, clamps(&[4.0, f32::NAN, 4.0, 4.0]), &["swiglu_clamp_exp[1]: needed a finite number, got NaN"]);
    let words = array(STRING, &["4", "4", "4", "4"].map(string));
    refused("swiglu_clamp_shexp", ARRAY, words, &["swiglu_clamp_shexp[0]: needed a finite number, got \"4\""]);
    refused("swiglu_clamp_exp", STRING, string("4"), &["needed a number", "got \"4\""]);
    let gguf = edited(|g| {
        g.unset(&key("swiglu_clamp_shexp")).set(&key("swiglu_clamp_exp"), F32, f32s(&[-4.0]));
    });
    assert_refused(&gguf, &["glm5-next.swiglu_clamp_exp (swiglu_limit): needed a number above 0", "got -4"]);
    refused("attention.indexer.types", ARRAY, array(BOOL, &[vec![1], vec![1]]), &["needed 4 entries", "got 2 entries"]);
    refused("attention.indexer.types", BOOL, vec![1], &["needed an array of true and false"]);
    refused(
        "hyper_connection.sinkhorn_iterations",
        U32,
        u32s(&[1001]),
        &["(hc_sinkhorn_iters): needed a whole number from 1 to 1000, got 1001"],
    );
    refused("hyper_connection.epsilon", F32, f32s(&[0.5]), &["(hc_eps): needed a number from 1e-12 to 0.01, got 5e-1"]);
    refused("block_count", U32, u32s(&[1 << 30]), &["needed at most as many blocks as there are tensors (", "got 1073741824"]);
    refused("nextn_predict_layers", U32, u32s(&[4]), &["needed fewer than block_count (4)", "got 4"]);
    refused("block_count", STRING, string("4"), &["needed a whole number", "got \"4\""]);
    refused("expert_shared_feed_forward_length", U32, u32s(&[7]), &["needed 256", "got 7"]);
    for required in
        ["block_count", "embedding_length", "attention.q_lora_rank", "expert_count", "hyper_connection.count", "ssm.conv_kernel"]
    {
        assert_refused(
            &edited(|g| {
                g.unset(&key(required));
            }),
            &[&key(required), "needed a whole number", "got nothing"],
        );
    }
    // These are caught where config.json is, and are told under the names of the file.
    let needed = "model.gguf: glm5-next.attention.indexer.top_k (index_topk): needed a multiple of attention.indexer.kpool (4), got 17";
    refused("attention.indexer.top_k", U32, u32s(&[17]), &[needed]);
    refused("expert_used_count", U32, u32s(&[5]), &["(num_experts_per_tok): needed at most expert_count (4), got 5"]);
    for bound in [0.0, f32::NAN] {
        assert!(
            edited(|g| {
                g.set(&key("kda.gate_lower_bound"), F32, f32s(&[bound]));
            })
            .refused()
            .contains("gate_lower_bound")
        );
    }
}

#[test]
fn tensors_that_do_not_fit() {
    let gguf = edited(|g| {
        g.drop_tensor("blk.3.attn_kv_a_mqa.weight");
    });
    assert_refused(
        &gguf,
        &[
            "model.gguf: tensor blk.3.attn_kv_a_mqa.weight (layers.3.self_attn.kv_a_proj_with_mqa.weight)",
            "needed shape [256, 256]",
            "got nothing: no file has it",
        ],
    );
    // Each in the one form that the format has, whatever the published checkpoint has in its place.
    for (tensor, shape) in [
        ("token_embd.weight", "[512, 256]"),
        ("output_norm.weight", "[256]"),
        ("blk.0.ssm_a", "[4]"),
        ("blk.1.attn_k_b.weight", "(layers.1.self_attn.kv_b_proj.weight): needed shape [4, 256, 64]"),
        ("blk.1.attn_v_b.weight", "needed shape [4, 64, 256]"),
        ("blk.2.ffn_gate_exps.weight", "[4, 256, 256]"),
        ("blk.2.ffn_down_exps.weight", "[4, 256, 256]"),
    ] {
        let gguf = edited(|g| {
            g.drop_tensor(tensor);
        });
        let message = gguf.refused();
        assert!(message.contains(&format!("model.gguf: tensor {tensor} (")) && message.contains(shape), "{message}");
    }
    // No key says that the head is the embedding: without it the file is not whole.
    let gguf = edited(|g| {
        g.drop_tensor("output.weight");
    });
    assert_refused(&gguf, &["model.gguf: tensor output.weight (lm_head.weight)", "never tied to token_embd.weight", "got nothing"]);
    let gguf = edited(|g| g.tensor("blk.2.ffn_gate_inp.weight").ne = vec![4, 256]);
    assert_refused(&gguf, &["blk.2.ffn_gate_inp.weight", "needed shape [4, 256] (from the metadata)", "got [256, 4]"]);
    let gguf = edited(|g| {
        let norm = g.tensor("blk.0.attn_norm.weight").clone();
        g.tensors.push(norm);
    });
    assert_refused(&gguf, &["tensor blk.0.attn_norm.weight", "needed one info", "got the name twice"]);
    // A row that is no whole number of blocks: 256 columns are none of NVFP4's 64? They are; 32 of the indexer's ape are not of Q4_K's 256.
    let gguf = edited(|g| g.tensor("blk.1.indexer_compressor_ape.weight").kind = 12);
    assert_refused(
        &gguf,
        &["blk.1.indexer_compressor_ape.weight", "needed rows of a whole number of Q4_K blocks (256 elements)", "got rows of 32"],
    );
    let gguf = edited(|g| {
        let ssm_a = g.tensor("blk.0.ssm_a");
        ssm_a.data = f32s(&[-1.0, 0.5, -1.0, -1.0]);
    });
    let error = gguf.open().unwrap().layer(0).unwrap_err().to_string();
    assert!(error.contains("blk.0.ssm_a") && error.contains("needed values below 0") && error.contains("got 0.5"), "{error}");
}

#[test]
fn scales_that_do_not_fit() {
    let scale = "blk.2.ffn_up_exps.scale";
    let gguf = edited(|g| {
        g.add(scale, &[3], 0, f32s(&[1.0; 3]));
    });
    assert_refused(&gguf, &[scale, "needed one F32 factor, or one for each of 4 matrices", "got F32 [3]"]);
    let gguf = edited(|g| {
        g.add(scale, &[4], 1, vec![0; 8]);
    });
    assert_refused(&gguf, &[scale, "got F16 [4]"]);
    let gguf = edited(|g| {
        g.add("blk.0.attn_norm.scale", &[1], 0, f32s(&[2.0]));
    });
    assert_refused(&gguf, &["blk.0.attn_norm.weight", "needed plain values: this tensor is no matrix", "got F32 with scales beside it"]);
}

/// A codebook sidecar of one entry for layer 2: `surface` is left out for p4mix.
fn sidecar(magic: &[u8; 8], layer: u32, surface: Option<u32>, shape: [u32; 3], book: u32, modes: &[u8]) -> Vec<u8> {
    let mut out = [magic.as_slice(), &u32s(&[1, 0, layer])].concat();
    out.extend(surface.iter().flat_map(|s| s.to_le_bytes()));
    out.extend(u32s(&[shape[0], shape[1], shape[2], 2, book]));
    out.extend(modes);
    if surface.is_none() {
        out.extend(vec![0; modes.len()]);
    }
    out.extend((0..shape[0] * 2 * book).flat_map(|i| half::bf16::from_f32(i as f32 / 4.0).to_le_bytes()));
    out
}

const P4MIX: &[u8; 8] = b"P4MIXv1\0";
const GUMIX: &[u8; 8] = b"GUMIXs1\0";

/// Makes a stack of layer 2 a ROCmFP type.
fn rocmfp(g: &mut Gguf, stack: &str, kind: u32) {
    let t = g.tensor(&format!("blk.2.{stack}.weight"));
    let blocks = t.ne.iter().product::<u64>() as usize / 32;
    (t.kind, t.data) = (kind, vec![0x11; blocks * if kind == 105 { 14 } else { 10 }]);
}

fn with_sidecar(g: &mut Gguf, kind: &str, bytes: &[u8]) {
    let items: Vec<Vec<u8>> = bytes.iter().map(|b| vec![*b]).collect();
    g.set(&format!("glm5-next.{kind}.sidecar"), ARRAY, array(U8, &items));
}

#[test]
fn rocmfp_without_its_codebook_or_in_the_wrong_place() {
    let shape = [4, 256, 256];
    let gguf = edited(|g| rocmfp(g, "ffn_down_exps", 105));
    let needed = "needed a codebook for layer 2, Down (key <arch>.p4mix.sidecar, or a file FILE.gguf.p4mix.bin)";
    assert_refused(&gguf, &["blk.2.ffn_down_exps.weight", needed, "got none: without it the codes mean nothing"]);
    let gguf = edited(|g| rocmfp(g, "ffn_gate_exps", 106));
    assert_refused(&gguf, &["needed a codebook for layer 2, Gate (key <arch>.gumix.sidecar", "got none"]);
    // The codebook of the other type does not do.
    let gguf = edited(|g| {
        rocmfp(g, "ffn_down_exps", 105);
        with_sidecar(g, "gumix", &sidecar(GUMIX, 2, Some(2), shape, 4, &[1; 4]));
    });
    assert_refused(&gguf, &["needed a codebook for layer 2, Down (key <arch>.p4mix.sidecar"]);
    for stack in ["ffn_gate_exps", "ffn_up_exps"] {
        let gguf = edited(|g| rocmfp(g, stack, 105));
        assert_refused(&gguf, &[stack, "needed Q3_1_ROCMFP3_MIX in ffn_down_exps only", "got another tensor"]);
    }
    let gguf = edited(|g| {
        let t = g.tensor("blk.0.ffn_up.weight");
        (t.kind, t.data) = (106, vec![0; 256 * 8 * 10]);
    });
    assert_refused(&gguf, &["blk.0.ffn_up.weight", "in ffn_gate_exps, ffn_up_exps or ffn_down_exps only"]);
    let gguf = edited(|g| {
        rocmfp(g, "ffn_down_exps", 105);
        with_sidecar(g, "p4mix", &sidecar(P4MIX, 2, None, [4, 128, 256], 8, &[0; 4]));
    });
    assert_refused(&gguf, &["needed shape [4, 128, 256], as its codebook says", "got [4, 256, 256]"]);
    let gguf = edited(|g| {
        rocmfp(g, "ffn_down_exps", 105);
        with_sidecar(g, "p4mix", &sidecar(P4MIX, 2, None, shape, 8, &[0; 4]));
        g.add("blk.2.ffn_down_exps.scale", &[1], 0, f32s(&[1.0]));
    });
    assert_refused(&gguf, &["blk.2.ffn_down_exps.scale", "needed no .scale beside a Q3_1_ROCMFP3_MIX tensor"]);
}

#[test]
fn sidecars_that_are_not_exactly_the_wire() {
    let shape = [4, 256, 256];
    let p4mix = |edit: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = sidecar(P4MIX, 2, None, shape, 8, &[1; 4]);
        edit(&mut bytes);
        edited(|g| {
            rocmfp(g, "ffn_down_exps", 105);
            with_sidecar(g, "p4mix", &bytes);
        })
    };
    assert!(p4mix(&|_| {}).open().is_ok());
    let at = |i: usize, value: u32| move |b: &mut Vec<u8>| b[i..i + 4].copy_from_slice(&value.to_le_bytes());
    assert_refused(&p4mix(&|b| b[0] = b'X'), &["p4mix", "needed the magic"]);
    assert_refused(&p4mix(&at(16, 9)), &["needed the tensor blk.9.ffn_down_exps.weight for its entry", "got none in any shard"]);
    assert_refused(&p4mix(&at(20, 65_537)), &["needed experts from 1 to 65536", "got 65537"]);
    assert_refused(&p4mix(&at(24, (1 << 20) + 1)), &["needed out from 1 to 1048576", "got 1048577"]);
    assert_refused(&p4mix(&at(28, 0)), &["needed in from 1 to 1048576", "got 0"]);
    assert_refused(&p4mix(&at(32, 3)), &["needed 2 books of 8 levels", "got 3 of 8"]);
    assert_refused(&p4mix(&at(36, 4)), &["needed 2 books of 8 levels", "got 2 of 4"]);
    assert_refused(&p4mix(&|b| b[40] = 2), &["needed modes 0 and 1", "got 2"]);
    assert_refused(&p4mix(&|b| b[44] = 1), &["needed rotation 0", "got 1"]);
    assert_refused(&p4mix(&|b| b.truncate(b.len() - 1)), &["p4mix entry 0", "the header ends inside"]);
    assert_refused(&p4mix(&|b| b.push(0)), &["needed nothing behind its 1 entries", "got 1 more bytes"]);
    let twice = |b: &mut Vec<u8>| {
        let entry = b[16..].to_vec();
        b.extend(entry);
        b[8] = 2;
    };
    assert_refused(&p4mix(&twice), &["needed one entry per tensor", "got a second one for layer 2, Down"]);

    let gumix = |bytes: Vec<u8>| {
        edited(|g| {
            rocmfp(g, "ffn_gate_exps", 106);
            with_sidecar(g, "gumix", &bytes);
        })
    };
    assert!(gumix(sidecar(GUMIX, 2, Some(0), shape, 4, &[1; 4])).open().is_ok());
    let fused = sidecar(b"GUMIXv1\0", 2, Some(0), shape, 4, &[1; 4]);
    assert_refused(&gumix(fused), &["gumix", "needed the magic", "(the fused form, which is not read)"]);
    assert_refused(&gumix(sidecar(GUMIX, 2, Some(3), shape, 4, &[1; 4])), &["needed surface 0 (gate), 1 (up) or 2 (down)", "got 3"]);
    let text = edited(|g| {
        g.set("glm5-next.gumix.sidecar", STRING, string("x"));
    });
    assert_refused(&text, &["glm5-next.gumix.sidecar", "needed an array of bytes"]);
}

#[test]
fn rocmfp2_needs_rows_of_128() {
    // 96 wide experts: a multiple of the block, but not of 128.
    let gguf = edited(|g| {
        g.set("glm5-next.expert_feed_forward_length", U32, u32s(&[96]));
        for t in g.tensors.iter_mut().filter(|t| t.name.contains("exp") && t.name.contains("ffn_")) {
            let narrow = usize::from(!t.name.contains("down"));
            t.ne[narrow] = 96;
            (t.kind, t.data) = (0, vec![0; t.ne.iter().product::<u64>() as usize * 4]);
        }
        let t = g.tensor("blk.2.ffn_down_exps.weight");
        (t.ne, t.kind, t.data) = (vec![96, 256, 4], 106, vec![0; 96 / 32 * 256 * 4 * 10]);
        with_sidecar(g, "gumix", &sidecar(GUMIX, 2, Some(2), [4, 256, 96], 4, &[0; 4]));
    });
    assert_refused(&gguf, &["needed rows of a multiple of 128 elements for Q2_1_ROCMFP2_MIX", "got rows of 96"]);
}

#[test]
fn tokenizers_of_other_families() {
    let text = |g: &Gguf| {
        let checkpoint = g.open().unwrap();
        tandem_model::gguf::tokenizer::tokenizer_json(checkpoint.config_file(), checkpoint.gguf().unwrap()).map_err(|e| e.to_string())
    };
    assert!(text(&Gguf::tinyk()).is_ok());
    let refused = |edit: &dyn Fn(&mut Gguf), parts: &[&str]| {
        let message = text(&edited(|g| edit(g))).unwrap_err();
        assert!(parts.iter().all(|part| message.contains(part)), "{message}");
    };
    refused(
        &|g| {
            g.set("tokenizer.ggml.pre", STRING, string("llama-bpe"));
        },
        &["tokenizer.ggml.pre", "needed glm4 or chatglm-bpe", "got \"llama-bpe\""],
    );
    refused(
        &|g| {
            g.set("tokenizer.ggml.model", STRING, string("llama"));
        },
        &["tokenizer.ggml.model", "needed gpt2", "got \"llama\""],
    );
    refused(
        &|g| {
            g.unset("tokenizer.ggml.merges");
        },
        &["tokenizer.ggml.merges", "needed an array", "got nothing"],
    );
    let no_space = array(STRING, &[string("ab")]);
    refused(
        &|g| {
            g.set("tokenizer.ggml.merges", ARRAY, no_space.clone());
        },
        &["needed pairs \"A B\"", "got \"ab\""],
    );
    let few = array(I32_TYPE, &[vec![1, 0, 0, 0]]);
    refused(
        &|g| {
            g.set("tokenizer.ggml.token_type", ARRAY, few.clone());
        },
        &["needed 512 entries, as in tokens", "got 1 entries"],
    );
    let odd = array(I32_TYPE, &[vec![vec![1, 0, 0, 0]; 511], vec![vec![7, 0, 0, 0]]].concat());
    refused(
        &|g| {
            g.set("tokenizer.ggml.token_type", ARRAY, odd.clone());
        },
        &["tokenizer.ggml.token_type[511]: needed a type from 1 to 6, got 7"],
    );
    for (key, kind, value, words) in [
        ("tokenizer.ggml.eos_token_id", U32, u32s(&[512]), "needed ids below the vocabulary (512), got 512"),
        ("tokenizer.ggml.eom_token_id", U32, u32s(&[600]), "needed ids below the vocabulary (512), got 600"),
        ("tokenizer.ggml.eot_token_id", STRING, string("<|user|>"), "needed a token id, got \"<|user|>\""),
        ("general.sampling.temp", F32, f32s(&[f32::NAN]), "needed a finite number, got NaN"),
        ("general.sampling.temp", F32, f32s(&[-1.0]), "needed a number from 0"),
        ("general.sampling.top_p", F32, f32s(&[1.5]), "to 1, got 1.5"),
    ] {
        let gguf = edited(|g| {
            g.set(key, kind, value);
        });
        assert_refused(&gguf, &[&format!("model.gguf: {key}: "), words]);
    }
    let flag = edited(|g| {
        g.set("glm5-next.attention.indexer.kpool_select_tail", BOOL, vec![2]);
    });
    assert!(flag.refused().contains("needed a bool (0 or 1), got 2"), "{}", flag.refused());
}

const I32_TYPE: u32 = common::I32;

#[test]
fn what_a_header_leaves_unsaid_is_noted() {
    let said = |gguf: &Gguf| gguf.open().unwrap().warnings().join("\n");
    let key = "glm5-next.swiglu_clamp_exp";
    assert!(!said(&Gguf::tinyk()).contains("swiglu"), "{}", said(&Gguf::tinyk()));
    let gguf = edited(|g| {
        g.unset(key).unset("glm5-next.swiglu_clamp_shexp");
    });
    assert!(said(&gguf).contains("model.gguf: the SwiGLU is not clamped"), "{}", said(&gguf));
    let gguf = edited(|g| {
        g.set("glm5-next.swiglu_clamps", F32, f32s(&[1.0]));
    });
    assert!(said(&gguf).contains("1 keys of the model are unknown and were ignored: glm5-next.swiglu_clamps"), "{}", said(&gguf));
}

/// The extension is read in any case, alone and in sets.
#[test]
fn upper_case_names_are_files_of_the_format() {
    let dir = tempfile::tempdir().unwrap();
    let path = Gguf::tinyk().write(&dir.path().join("TINYK.GGUF"));
    assert!(tandem_model::Checkpoint::open(&path).is_ok());
    assert_eq!(tandem_model::title::title(&path), "TINYK");
    assert!(tandem_model::Checkpoint::open(dir.path()).is_ok(), "the only one of its folder");
    for name in ["m-00001-of-00000.gguf", "m-00003-of-00002.gguf"] {
        assert!(tandem_model::Checkpoint::open(&Gguf::tinyk().write(&dir.path().join(name))).is_ok(), "{name} is no shard");
    }
    #[cfg(unix)]
    {
        std::os::unix::fs::symlink("nowhere", dir.path().join("TINYK.GGUF.p4mix.bin")).unwrap();
        let error = tandem_model::Checkpoint::open(&path).unwrap_err().to_string();
        assert!(error.contains("TINYK.GGUF.p4mix.bin: No such file"), "{error}");
    }
    let shards = tempfile::tempdir().unwrap();
    for path in common::write_set(shards.path(), &Gguf::tinyk().shards(3)) {
        std::fs::rename(&path, path.with_extension("GGUF")).unwrap();
    }
    let second = shards.path().join("Tinyk-00002-of-00003.GGUF");
    assert_eq!(tandem_model::Checkpoint::open(&second).unwrap().file_count(), 3);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever a header says, opening ends in a checkpoint or in an error.
    #[test]
    fn any_damage_to_a_header_ends_cleanly(flips in proptest::collection::vec((0usize..12_000, any::<u8>()), 1..6)) {
        let mut bytes = Gguf::tinyk().bytes(32);
        for (at, value) in flips {
            bytes[at] = value;
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.gguf");
        std::fs::write(&path, bytes).unwrap();
        let _either = tandem_model::Checkpoint::open(&path);
    }
}
