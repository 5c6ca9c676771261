//! What is wrong with a stub is named; `published.rs` has those that pass.

use std::path::{Path, PathBuf};

use serde_json::Value;
use tandem_kernels::DeviceKind;
use tandem_model::{
    demo,
    gguf::{TensorInfo, write::Typed},
    stubs::{
        GgufStub, Release,
        gguf::HeadCounts,
        release::{self, StubTensor},
    },
    synthetic::{Preset, TextConfig},
};
use tandem_quant::DType;

use super::{line, report::report, verdict::Verdict};

pub(super) const CPU: &[DeviceKind] = &[DeviceKind::Cpu];
/// A vocabulary short enough for many files.
pub(super) const TOKENS: usize = 400;

/// Tokenizer and template of the demo model: their ids fit every vocabulary here but the smallest.
pub(super) fn text() -> Vec<(&'static str, &'static [u8])> {
    demo::FILES.iter().filter(|(name, _)| name.starts_with("tokenizer") || name.starts_with("chat")).copied().collect()
}

pub(super) fn look(path: &Path) -> Verdict {
    let verdict = Verdict::of(path, CPU, false);
    serde_json::to_string(&verdict).expect("serialises");
    assert!(line(&verdict).starts_with(verdict.verdict) && report(&verdict).contains(verdict.verdict));
    verdict
}

/// The reason of a refusal.
#[track_caller]
fn refused(path: &Path) -> String {
    let verdict = look(path);
    assert_eq!(verdict.verdict, "REFUSED", "{verdict:?}");
    verdict.reason.expect("a refusal has a reason")
}

/// A small model in the published layout, with one thing wrong.
pub(super) fn safetensors(root: &Path, change: impl FnOnce(&mut Value, &mut Vec<StubTensor>)) -> PathBuf {
    let (mut config, mut tensors) = (Release::Fp8.config(), Release::Fp8.tensors_of(&small()));
    config["text_config"] = small().to_json(false)["text_config"].clone();
    change(&mut config, &mut tensors);
    let dir = root.join("hf");
    let _ = std::fs::remove_dir_all(&dir);
    release::write(&config, &tensors, 2, &dir, &text()).expect("writable");
    dir
}

/// Sizes for quick stubs; rows are whole blocks of every type, and the demo's tokenizer fits.
fn small() -> TextConfig {
    TextConfig { vocab: 2048, eos: vec![1492], mtp: true, ..Preset::Tinyk.config() }
}

#[test]
fn broken_safetensors_stubs_are_refused_by_name() {
    let root = tempfile::tempdir().expect("writable");
    let root = root.path();
    assert_eq!(look(&safetensors(root, |_, _| {})).reason, None);

    let missing = refused(&safetensors(root, |_, t| t.retain(|t| !t.name.contains("layers.3.mlp.experts.2."))));
    assert!(missing.contains("layers.3.mlp.experts.2.gate_proj.weight") && missing.contains("got nothing"), "{missing}");
    let bank = refused(&safetensors(root, |_, t| t.retain(|t| !t.name.contains("layers.2.mlp.experts."))));
    assert!(bank.contains("layers.2.mlp.experts.0.gate_proj.weight"), "{bank}");
    let shape = refused(&safetensors(root, |_, t| {
        let embed = t.iter_mut().find(|t| t.name.ends_with("embed_tokens.weight")).expect("there");
        embed.shape[1] = 128;
    }));
    assert!(shape.contains("embed_tokens.weight: needed shape [2048, 256]") && shape.contains("got [2048, 128]"), "{shape}");
    let scale =
        refused(&safetensors(root, |_, t| t.retain(|t| t.name != "model.language_model.layers.2.mlp.experts.0.up_proj.weight_scale_inv")));
    assert!(scale.contains("experts.0.up_proj.weight") && scale.contains("weight_scale_inv"), "{scale}");
    let experts = refused(&safetensors(root, |c, _| c["text_config"]["n_routed_experts"] = 268_435_456.into()));
    assert!(experts.contains("layers.2.mlp.gate.weight") && experts.contains("268435456"), "{experts}");
    let config = refused(&safetensors(root, |c, _| c["text_config"]["hidden_size"] = "wide".into()));
    assert!(config.contains("text_config.hidden_size: needed a whole number") && config.contains("\"wide\""), "{config}");

    let dir = safetensors(root, |_, _| {});
    std::fs::remove_file(dir.join("tokenizer.json")).expect("there");
    let tokenizer = refused(&dir);
    assert!(tokenizer.contains("tokenizer.json") && tokenizer.contains("a checkpoint needs"), "{tokenizer}");
    let other = refused(&{
        let dir = safetensors(root, |c, t| {
            c["text_config"]["vocab_size"] = 1500.into();
            t.iter_mut().filter(|t| t.name.contains("embed_tokens") || t.name.contains("lm_head")).for_each(|t| t.shape[0] = 1500);
        });
        std::fs::write(dir.join("generation_config.json"), "{}").expect("writable");
        dir
    });
    assert!(other.contains("vocabulary has 1500"), "{other}");

    let dir = safetensors(root, |_, _| {});
    std::fs::remove_file(dir.join("chat_template.jinja")).expect("there");
    std::fs::write(dir.join("tokenizer_config.json"), "{}").expect("writable");
    let base = look(&dir);
    assert!(
        base.reason.is_none()
            && base.checkpoint.is_some_and(|c| !c.chat_template && c.warnings.iter().any(|w| w.contains("chat template")))
    );
    std::fs::write(dir.join("chat_template.jinja"), "{% for %}").expect("writable");
    assert!(refused(&dir).contains("chat_template.jinja: line 1"));
    for (template, note) in [("", "leaves out what a user says"), ("{{ messages[7].content.x }}", "does not render")] {
        std::fs::write(dir.join("chat_template.jinja"), template).expect("writable");
        let c = look(&dir).checkpoint.expect("read");
        assert!(c.chat_template && c.warnings.iter().any(|w| w.contains(note)), "{:?}", c.warnings);
    }
    std::fs::write(dir.join("tokenizer_config.json"), "[]").expect("writable");
    assert!(refused(&dir).contains("tokenizer_config.json: no object of settings"));

    // Part of the data is there: that is no stub, but a download that broke off.
    let dir = safetensors(root, |_, _| {});
    let file = dir.join("model-00001-of-00002.safetensors");
    let mut bytes = std::fs::read(&file).expect("there");
    bytes.extend([0; 100]);
    std::fs::write(&file, bytes).expect("writable");
    assert!(refused(&dir).contains("truncated"));
    // All of one file's data is there, and of the other only the header.
    let dir = safetensors(root, |_, _| {});
    let file = dir.join("model-00001-of-00002.safetensors");
    let end = tandem_model::storage::safetensors::header(&file, &std::fs::read(&file).expect("there")).expect("a header").end;
    std::fs::OpenOptions::new().write(true).open(&file).and_then(|f| f.set_len(end as u64)).expect("writable");
    let cut = refused(&dir);
    assert!(cut.contains("model-00002-of-00002.safetensors: needed its data, as ") && cut.contains("right behind its header"), "{cut}");
    assert!(refused(&root.join("nowhere")).contains("no such"));
    let semantic = Verdict::of(&safetensors(root, |_, _| {}), CPU, true).reason.expect("no data");
    assert!(semantic.contains("--semantic") && semantic.contains("header-only stub"), "{semantic}");
}

/// ROCmFP codebooks of some layers: the fixed levels for every expert, as a sidecar key holds them.
fn codebooks(kind: &str, layers: &[u32]) -> Vec<u8> {
    let config = small();
    let (experts, hidden, inter) = (config.experts as u32, config.hidden as u32, config.moe_intermediate as u32);
    let p4 = kind == "p4mix";
    let surfaces: &[Option<u32>] = if p4 { &[None] } else { &[Some(0), Some(1)] };
    let mut out = if p4 { b"P4MIXv1\0".to_vec() } else { b"GUMIXs1\0".to_vec() };
    let word = |out: &mut Vec<u8>, n: u32| out.extend(n.to_le_bytes());
    word(&mut out, (layers.len() * surfaces.len()) as u32);
    word(&mut out, 0);
    for layer in layers {
        for surface in surfaces {
            word(&mut out, *layer);
            surface.iter().for_each(|s| word(&mut out, *s));
            let (rows, cols) = if p4 { (hidden, inter) } else { (inter, hidden) };
            for n in [experts, rows, cols, 2, if p4 { 8 } else { 4 }] {
                word(&mut out, n);
            }
            // Modes, for p4mix rotations too, and two books of bf16 levels for each expert.
            let bytes = experts * if p4 { 2 + 2 * 8 * 2 } else { 1 + 2 * 4 * 2 };
            out.extend(std::iter::repeat_n(0, bytes as usize));
        }
    }
    out
}

/// A GGUF file with ROCmFP experts and the codebooks of some layers.
fn rocmfp(root: &Path, p4: &[u32], gu: &[u32]) -> PathBuf {
    gguf(root, 1, |s| {
        for (tensor, id) in [("ffn_gate_exps", 106), ("ffn_up_exps", 106), ("ffn_down_exps", 105)] {
            for layer in [2, 3] {
                s.tensor(&format!("blk.{layer}.{tensor}.weight")).expect("there").ggml_type = id;
            }
        }
        s.set("glm5next.p4mix.sidecar", Typed::U8s(codebooks("p4mix", p4)));
        s.set("glm5-next.gumix.sidecar", Typed::U8s(codebooks("gumix", gu)));
    })
}

#[test]
fn rocmfp_passes_with_all_codebooks_and_not_with_one_missing() {
    let root = tempfile::tempdir().expect("writable");
    let mixed = |p4: &[u32], gu: &[u32]| rocmfp(root.path(), p4, gu);
    let verdict = look(&mixed(&[2, 3], &[2, 3]));
    assert_eq!(verdict.reason, None);
    let types = verdict.checkpoint.expect("read").types;
    assert!(types.contains_key("Q3_1_ROCMFP3_MIX") && types.contains_key("Q2_1_ROCMFP2_MIX"), "{types:?}");
    let down = refused(&mixed(&[2], &[2, 3]));
    assert!(down.contains("blk.3.ffn_down_exps.weight") && down.contains("a codebook for layer 3, Down"), "{down}");
    let gate = refused(&mixed(&[2, 3], &[3]));
    assert!(gate.contains("blk.2.ffn_gate_exps.weight") && gate.contains("a codebook for layer 2, Gate"), "{gate}");
}

/// A small model as one GGUF file, Q4_K, with one thing wrong.
pub(super) fn gguf(root: &Path, shards: usize, change: impl FnOnce(&mut GgufStub)) -> PathBuf {
    let types = |name: &str, shape: &[usize]| match shape {
        [_] => DType::F32,
        _ if name.contains("conv1d") => DType::F32,
        [.., row] if row % 256 == 0 => DType::Q4K,
        _ => DType::F16,
    };
    let mut stub = GgufStub::new(&small(), "glm5-next", HeadCounts::PerBlock, TOKENS, types);
    change(&mut stub);
    let dir = root.join("gguf");
    let _ = std::fs::remove_dir_all(&dir);
    stub.write(&dir, "small", shards).expect("writable")
}

#[test]
fn broken_gguf_stubs_are_refused_by_name() {
    let root = tempfile::tempdir().expect("writable");
    let root = root.path();
    assert_eq!(look(&gguf(root, 1, |_| {})).reason, None);
    let retype = |stub: &mut GgufStub, name: &str, id: u32| stub.tensor(name).expect("there").ggml_type = id;

    let bank = refused(&gguf(root, 1, |s| s.tensors.retain(|t| t.name != "blk.3.ffn_up_exps.weight")));
    assert!(bank.contains("layers.3.mlp.experts.up_proj") && bank.contains("got nothing"), "{bank}");
    assert!(bank.starts_with(&format!("{}: tensor blk.3.ffn_up_exps.weight (", root.join("gguf/small.gguf").display())), "{bank}");
    let head = refused(&gguf(root, 3, |s| s.tensors.retain(|t| t.name != "output.weight")));
    assert!(head.contains("small-00001-of-00003.gguf: tensor output.weight") && head.contains("never tied"), "{head}");
    let shape = refused(&gguf(root, 1, |s| s.tensor("blk.2.ffn_down_exps.weight").expect("there").shape[0] = 3));
    assert!(shape.contains("blk.2.ffn_down_exps.weight: needed shape [4, 256, 256]") && shape.contains("[3, 256, 256]"), "{shape}");
    for (id, name) in [
        (34, "TQ1_0"),
        (35, "TQ2_0"),
        (31, "removed"),
        (36, "removed"),
        (41, "Q1_0"),
        (144, "ik_llama.cpp"),
        (77, "ggml type 77"),
        (100, "ROCmFP"),
    ] {
        let unknown = refused(&gguf(root, 1, |s| retype(s, "blk.2.ffn_gate_exps.weight", id)));
        assert!(unknown.contains("blk.2.ffn_gate_exps.weight") && unknown.contains(name), "{unknown}");
    }
    assert_eq!(look(&gguf(root, 1, |s| retype(s, "blk.4.ffn_gate_exps.weight", 144))).reason, None, "the draft block is not served");
    let codebook = refused(&gguf(root, 1, |s| retype(s, "blk.2.ffn_down_exps.weight", 105)));
    assert!(codebook.contains("a codebook for layer 2, Down") && codebook.contains("p4mix"), "{codebook}");
    let place = refused(&gguf(root, 1, |s| retype(s, "blk.2.ffn_gate_exps.weight", 105)));
    assert!(place.contains("in ffn_down_exps only"), "{place}");
    // IQ1_M, NVFP4 embeddings and unlike gate and up types may be refused elsewhere: here they work.
    assert_eq!(look(&gguf(root, 1, |s| retype(s, "blk.2.ffn_gate_exps.weight", 29))).reason, None);
    assert_eq!(look(&gguf(root, 1, |s| retype(s, "token_embd.weight", 40))).reason, None);

    let tokenizer = refused(&gguf(root, 1, |s| s.unset("tokenizer.ggml.tokens")));
    assert!(tokenizer.contains("tokenizer.ggml.tokens: needed an array"), "{tokenizer}");
    let pre = refused(&gguf(root, 1, |s| s.set("tokenizer.ggml.pre", Typed::Str("llama-bpe".into()))));
    assert!(pre.contains("tokenizer.ggml.pre") && pre.contains("llama-bpe"), "{pre}");
    let base = look(&gguf(root, 1, |s| s.unset("tokenizer.chat_template")));
    assert!(base.reason.is_none() && base.checkpoint.is_some_and(|c| c.warnings.iter().any(|w| w.contains("chat template"))));

    let draft = refused(&gguf(root, 1, |s| s.keep_draft(&small())));
    assert!(draft.contains("MTP-only draft"), "{draft}");
    let arch = refused(&gguf(root, 1, |s| s.set("general.architecture", Typed::Str("dflash".into()))));
    assert!(arch.contains("general.architecture") && arch.contains("dflash") && arch.contains("another model"), "{arch}");
    let projector = refused(&gguf(root, 1, |s| s.set("general.type", Typed::Str("mmproj".into()))));
    assert!(projector.contains("mmproj"), "{projector}");
    let star = refused(&gguf(root, 1, |s| s.tensor("blk.0.attn_q.weight").expect("there").name = "blk.0.kda_q.weight".into()));
    assert!(star.contains("DwarfStar"), "{star}");
    let rope = refused(&gguf(root, 1, |s| s.set("glm5-next.rope.dimension_count", Typed::U32(64))));
    assert!(rope.contains("rope.dimension_count: needed 0, got 64"), "{rope}");

    let twice = refused(&gguf(root, 1, |s| {
        let again: TensorInfo = s.tensors[0].clone();
        s.tensors.push(again);
    }));
    assert!(twice.contains("the name twice"), "{twice}");
    let path = gguf(root, 3, |_| {});
    assert_eq!(look(&path).reason, None);
    let second = path.with_file_name("small-00002-of-00003.gguf");
    assert_eq!(look(&second).reason, None, "any shard stands for its set");
    std::fs::rename(&second, path.with_file_name("kept")).expect("there");
    let sibling = refused(&path);
    assert!(sibling.contains("small-00002-of-00003.gguf") && sibling.contains("no such file"), "{sibling}");
    std::fs::copy(path.with_file_name("small-00003-of-00003.gguf"), &second).expect("there");
    let swapped = refused(&path);
    assert!(swapped.contains("needed shard 2 of 3") && swapped.contains("split.no 2"), "{swapped}");

    // A total that does not add up: two files of a set that was cut into three tensors more.
    let path = gguf(root, 2, |_| {});
    let other = gguf(&root.join("other"), 2, |s| s.tensors.truncate(10));
    std::fs::copy(other.with_file_name("small-00002-of-00002.gguf"), path.with_file_name("small-00002-of-00002.gguf")).expect("there");
    let total = refused(&path);
    assert!(total.contains("split.tensors.count") && total.contains("got 10"), "{total}");

    // Some of the data: no stub.
    let path = gguf(root, 1, |_| {});
    let mut bytes = std::fs::read(&path).expect("there");
    bytes.extend([0; 100]);
    std::fs::write(&path, bytes).expect("writable");
    assert!(refused(&path).contains("truncated"));
    std::fs::write(&path, b"GGUF").expect("writable");
    assert!(refused(&path).contains("the version"));
}

/// Scripts read these names.
#[test]
fn the_fields_of_a_verdict_keep_their_names() {
    let root = tempfile::tempdir().expect("writable");
    let keys = |value: &Value| -> Vec<String> { value.as_object().expect("an object").keys().cloned().collect() };
    let passed = serde_json::to_value(look(&gguf(root.path(), 1, |_| {}))).expect("serialises");
    assert_eq!(keys(&passed), ["path", "verdict", "reason", "checkpoint", "semantic"]);
    let contents = [
        "format",
        "stub",
        "files",
        "tensors",
        "bytes",
        "layers",
        "experts",
        "types",
        "parts",
        "experts_by_layer",
        "without_kernel",
        "tokenizer_tokens",
        "chat_template",
        "eos_token_ids",
        "skipped",
        "narrowed",
        "warnings",
    ];
    assert_eq!(keys(&passed["checkpoint"]), contents);
    assert_eq!(keys(&passed["checkpoint"]["experts_by_layer"][0]), ["layer", "gate", "up", "down", "bytes"]);
    let mut with_page = look(&gguf(root.path(), 1, |_| {}));
    with_page.report = Some(report(&with_page));
    let with_page = serde_json::to_value(with_page).expect("serialises");
    assert_eq!(keys(&with_page), ["path", "verdict", "reason", "checkpoint", "semantic", "report"]);
    assert!(with_page["report"].as_str().is_some_and(|page| page.starts_with("## ") && page.contains("| layers | gate |")));
    let failed = serde_json::to_value(look(&root.path().join("nowhere"))).expect("serialises");
    assert_eq!((keys(&failed), &failed["verdict"], failed["checkpoint"].is_null()), (keys(&passed), &Value::from("REFUSED"), true));
}

#[test]
fn a_device_without_kernels_is_a_refusal() {
    let root = tempfile::tempdir().expect("writable");
    let verdict = Verdict::of(&gguf(root.path(), 1, |_| {}), &DeviceKind::ALL, false);
    assert_eq!(verdict.reason, None, "every device computes with Q4_K");
    let verdict = Verdict::of(&rocmfp(root.path(), &[2, 3], &[2, 3]), &DeviceKind::ALL, false);
    let reason = verdict.reason.expect("no CUDA kernels for ROCmFP");
    assert!(reason.contains("no cuda kernel for") && reason.contains("tensor "), "{reason}");
}

/// A path stands once in a line.
#[test]
fn a_reason_does_not_repeat_the_path() {
    for (path, reason, short) in [
        ("a/b", "a/b: no such file", "no such file"),
        ("a/b/", "a/b/config.json: hidden_size: needed 1", "config.json: hidden_size: needed 1"),
        ("a/m-00001-of-00002.gguf", "a/m-00002-of-00002.gguf: not a GGUF file", "m-00002-of-00002.gguf: not a GGUF file"),
        ("m.gguf", "m.gguf: not a GGUF file", "not a GGUF file"),
        ("a/b", "no cpu kernel", "no cpu kernel"),
        ("/", "/: no config.json", "no config.json"),
        ("a/b", "a/bc: odd", "bc: odd"),
    ] {
        let verdict = Verdict::refused(Path::new(path), reason.to_owned());
        assert_eq!(line(&verdict), format!("REFUSED  {path}: {short}\n"));
    }
    let root = tempfile::tempdir().expect("writable");
    let path = gguf(root.path(), 1, |s| s.unset("glm5-next.block_count"));
    let text = line(&look(&path));
    assert_eq!(text.matches(&path.display().to_string()).count(), 1, "{text}");
}

/// What lies below a folder and is no whole checkpoint has a line of its own, and counts.
#[test]
fn what_is_not_whole_is_refused_by_name() {
    let root = tempfile::tempdir().expect("writable");
    std::fs::rename(gguf(root.path(), 1, |_| {}), root.path().join("UPPER.GGUF")).expect("there");
    let dir = safetensors(root.path(), |_, _| {});
    let args = |paths: Vec<PathBuf>| crate::cli::CheckArgs {
        paths,
        device: vec![crate::cli::values::Kind::Cpu],
        jsonl: false,
        report: false,
        semantic: false,
    };
    assert_eq!(super::run(&args(vec![root.path().to_owned()])), Ok(()));
    std::fs::remove_file(dir.join("config.json")).expect("there");
    let failure = super::run(&args(vec![root.path().to_owned()])).expect_err("the config is gone");
    assert_eq!(failure.reason, "1 of 2 checkpoints refused");
    let file = root.path().join("UPPER.GGUF");
    let failure = super::run(&args(vec![file.join("x")])).expect_err("no folder");
    assert_eq!(failure.reason, "1 of 1 checkpoints refused");
    assert!(refused(&file.join("x")).contains("Not a directory"));
}

#[test]
fn the_exit_code_tells_whether_one_is_refused() {
    let root = tempfile::tempdir().expect("writable");
    let path = gguf(root.path(), 1, |_| {});
    let mut args = crate::cli::CheckArgs {
        paths: vec![root.path().to_owned()],
        device: vec![crate::cli::values::Kind::Cpu],
        jsonl: true,
        report: false,
        semantic: false,
    };
    assert_eq!(super::run(&args), Ok(()));
    std::fs::write(path.with_file_name("other.gguf"), "GGUF").expect("writable");
    let failure = super::run(&args).expect_err("one is refused");
    assert_eq!((failure.code, failure.reason.as_str()), (tandem_runtime::exit::CONFIG, "1 of 2 checkpoints refused"));
    args.paths = vec![rocmfp(root.path(), &[2, 3], &[2, 3])];
    assert_eq!(super::run(&args), Ok(()));
    args.device.push(crate::cli::values::Kind::Cuda);
    assert!(super::run(&args).is_err());
}
