//! Starts that must fail fast, with one clear line, and leave nothing behind (T-10), and handshakes that refuse by name.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    net::TcpListener,
    time::{Duration, Instant},
};

use tandem_tests::{Launch, checkpoints};

/// Runs to its end and returns (exit code, standard error).
fn fails(launch: Launch, limit: Duration) -> String {
    let started = Instant::now();
    let mut cluster = launch.spawn();
    let code = cluster.wait_exit(limit);
    std::thread::sleep(Duration::from_millis(100)); // the reader thread drains the pipe
    let log = cluster.stderr();
    assert!(code.is_some_and(|code| code != 0), "exit {code:?} after {:?}:\n{log}", started.elapsed());
    assert!(cluster.descendants().is_empty(), "children left");
    log
}

const SOON: Duration = Duration::from_secs(6);

#[test]
fn a_taken_port_is_named() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let log = fails(Launch::role("up").args(["--port", &port]), SOON);
    assert!(log.contains(&port), "{log}");
}

#[test]
fn a_missing_model_folder_is_named() {
    let log = fails(Launch::up().args(["--model", "/nonexistent/glm"]), SOON);
    assert!(log.contains("/nonexistent/glm"), "{log}");
}

#[test]
fn a_folder_without_a_config_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let log = fails(Launch::up().model(dir.path()), SOON);
    assert!(log.contains("config.json"), "{log}");
}

#[test]
fn a_truncated_shard_is_named() {
    let dir = copy_of_tiny();
    let shard = shards(dir.path()).pop().unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(&shard).unwrap();
    file.set_len(file.metadata().unwrap().len() / 2).unwrap();
    let log = fails(Launch::up().model(dir.path()), SOON);
    assert!(log.contains(shard.file_name().unwrap().to_str().unwrap()), "{log}");
}

/// A copy of the tiny checkpoint to damage.
fn copy_of_tiny() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(checkpoints::tiny()).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), dir.path().join(entry.file_name())).unwrap();
    }
    dir
}

/// Names of the checkpoint's safetensors files, sorted.
fn shards(dir: &std::path::Path) -> Vec<std::path::PathBuf> {
    let mut files: Vec<_> = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()).collect();
    files.retain(|p| p.extension().is_some_and(|e| e == "safetensors"));
    files.sort();
    files
}

#[test]
fn a_checkpoint_that_gives_no_finite_token_ends_the_start() {
    let dir = copy_of_tiny();
    for path in shards(dir.path()) {
        let mut bytes = std::fs::read(&path).unwrap();
        let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let entries: serde_json::Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
        let Some((_, norm)) = entries.as_object().unwrap().iter().find(|(name, _)| name.ends_with("language_model.norm.weight")) else {
            continue;
        };
        let at = |i: usize| 8 + header + norm["data_offsets"][i].as_u64().unwrap() as usize;
        bytes[at(0)..at(1)].fill(0xff);
        std::fs::write(&path, bytes).unwrap();
    }
    let log = fails(Launch::up().model(dir.path()), Duration::from_secs(60));
    assert!(log.contains("no token can be made of this checkpoint"), "{log}");
}

#[test]
fn a_pipe_in_place_of_a_shard_is_refused_and_not_waited_for() {
    let dir = copy_of_tiny();
    let shard = shards(dir.path()).pop().unwrap();
    std::fs::remove_file(&shard).unwrap();
    assert!(std::process::Command::new("mkfifo").arg(&shard).status().unwrap().success());
    let log = fails(Launch::up().model(dir.path()), SOON);
    assert!(log.contains(shard.file_name().unwrap().to_str().unwrap()) && log.contains("pipe"), "{log}");
}

#[test]
fn impossible_flags_are_refused_with_what_would_work() {
    for (args, words) in [
        (vec!["--split", "diagonal"], vec!["diagonal", "layers"]),
        (vec!["--experts", "cpu,cpu,cpu,cpu,cpu,cpu,cpu,cpu,cpu", "--split", "layers"], vec!["5"]),
        (vec!["--resident-layers", "99"], vec!["99"]),
        (vec!["--resident-layers", "0-2"], vec!["dense"]),
        (vec!["--dtype", "int3"], vec!["int3", "bf16"]),
        (vec!["--experts", "tpu"], vec!["tpu", "cpu"]),
        (vec!["--max-batch", "0"], vec!["max-batch"]),
        (vec!["--max-num-batched-tokens", "8193"], vec!["8193", "at most 8192", "--resident-layers all"]),
        (vec!["--no-such-flag"], vec!["--no-such-flag"]),
    ] {
        let log = fails(Launch::up().args(args.iter().copied()), SOON);
        for word in words {
            assert!(log.contains(word), "{args:?}: no {word:?} in:\n{log}");
        }
    }
}

#[test]
fn workers_with_another_model_or_precision_are_refused_by_name() {
    let mut serve = Launch::serve().model(checkpoints::tiny()).args(["--dtype", "f32"]).spawn();
    let control = serve.wait_for_line("CONTROL ", Duration::from_secs(30)).trim_start_matches("CONTROL ").to_owned();
    let log = fails(
        Launch::role("experts").model(checkpoints::tiny_b()).args(["--coordinator", &control, "--dtype", "f32"]),
        Duration::from_secs(20),
    );
    assert!(log.contains("fingerprint"), "{log}");
    let log = fails(
        Launch::role("attn").model(checkpoints::tiny()).args(["--coordinator", &control, "--dtype", "bf16"]),
        Duration::from_secs(20),
    );
    assert!(log.contains("precision") && log.contains("f32") && log.contains("bf16"), "{log}");
    let log = fails(
        Launch::role("attn")
            .model(checkpoints::tiny())
            .args(["--coordinator", &control, "--dtype", "f32"])
            .args(["--max-num-batched-tokens", "8193"]),
        Duration::from_secs(20),
    );
    assert!(log.contains("--max-num-batched-tokens 8193: needed at most 8192"), "{log}");
    // Refused before the device is asked for, and whether or not there is one.
    let log = fails(
        Launch::role("attn").model(checkpoints::tiny()).args(["--coordinator", &control, "--device", "cuda:0", "--kv-cache-dtype", "fp8"]),
        SOON,
    );
    assert!(log.contains("--kv-cache-dtype: needed auto on --device cuda:0"), "{log}");
}

#[tokio::test]
async fn headers_alone_serve_with_made_up_weights_and_are_refused_without() {
    let dir = copy_of_tiny();
    for shard in shards(dir.path()) {
        let mut bytes = std::fs::read(&shard).unwrap();
        let header = u64::from_le_bytes(bytes[..8].try_into().unwrap());
        bytes.truncate(8 + usize::try_from(header).unwrap());
        std::fs::write(&shard, bytes).unwrap();
    }
    let cluster = Launch::up().model(dir.path()).args(["--load-format", "dummy", "--experts", "cpu,cpu", "--split", "ffn"]).ready();
    assert!(cluster.stderr().contains("the weights are made up (--load-format dummy)"), "{}", cluster.stderr());
    let body = serde_json::json!({ "model": "any", "prompt": [1, 2, 3], "max_tokens": 8, "ignore_eos": true, "return_token_ids": true });
    let answer = cluster.client().post("/v1/completions", &body).await;
    assert_eq!(answer.body["usage"]["completion_tokens"], 8, "{}", answer.text);

    let error = fails(Launch::up().model(dir.path()), Duration::from_secs(10));
    assert!(error.contains("the file is truncated"), "{error}");
}
