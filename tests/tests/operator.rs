//! What an operator does to a running instance: looks at it, talks to it, drains a worker, drains the whole.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{process::Command, time::Duration};

use serde_json::{Value, json};
use tandem_tests::{Launch, cluster::binary};

/// Runs `tandem ARGS` to its end: exit code, standard output, standard error.
fn tandem(args: &[&str]) -> (i32, String, String) {
    let output = Command::new(binary()).args(args).stdin(std::process::Stdio::null()).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code().unwrap_or(-1), text(&output.stdout), text(&output.stderr))
}

/// What was asked for is not there: the exit code says so. A reader that went away is no failure.
#[test]
fn output_that_cannot_be_written_is_a_failure() {
    let full = || std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
    let plan = ["plan", "--device", "cpu=64GiB", "--hop-us", "10"];
    for args in [&["check", "/nowhere"][..], &plan, &["config", "show"], &["generate", "completions", "bash"], &["--help"], &["--version"]]
    {
        let run = |out: std::process::Stdio| Command::new(binary()).args(args).stdout(out).output().unwrap();
        let failed = run(full().into());
        let error = String::from_utf8_lossy(&failed.stderr);
        assert_eq!(failed.status.code(), Some(74), "{args:?}: {error}");
        assert!(error.contains("standard output: No space left on device"), "{args:?}: {error}");
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let closed = run(writer.into());
        assert_eq!(closed.status.code(), Some(if args[0] == "check" { 78 } else { 0 }), "{args:?}: {closed:?}");
    }
}

fn json_of(args: &[&str]) -> Value {
    let (code, out, err) = tandem(args);
    assert_eq!(code, 0, "{args:?}: {err}");
    serde_json::from_str(&out).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_instance_can_be_looked_at_talked_to_and_drained() {
    let mut cluster = Launch::up().args(["--dtype", "f32"]).ready();
    let (url, client) = (cluster.base().to_owned(), cluster.client());

    let (code, out, _) = tandem(&["ctl", "health", "--url", &url]);
    assert_eq!((code, out.as_str()), (0, "live, ready\n"));

    // One question, one answer: the text alone on stdout.
    let (code, out, err) = tandem(&["chat", "--url", &url, "--temperature", "0", "--hide-reasoning", "What is the capital of France?"]);
    assert_eq!(code, 0, "{err}");
    let direct = client
        .post(
            "/v1/chat/completions",
            &json!({"temperature": 0, "messages": [{"role": "user", "content": "What is the capital of France?"}]}),
        )
        .await;
    assert_eq!(out.trim_end(), direct.body["choices"][0]["message"]["content"].as_str().unwrap().trim_end());

    // The workers, with the link in use and a wait for every layer that has remote experts.
    let seen = |stats: &Value| {
        let attn = stats.as_array().unwrap().iter().find(|worker| worker["role"] == "attn").cloned().unwrap();
        !attn["layer_waits"].as_array().unwrap().is_empty() && attn["links"][0]["link"] == "tcp"
    };
    let mut workers = json_of(&["ctl", "workers", "--json", "--url", &url]);
    for _ in 0..100 {
        if seen(&workers) {
            break;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
        workers = json_of(&["ctl", "workers", "--json", "--url", &url]);
    }
    assert!(seen(&workers), "{workers}");
    let experts =
        workers.as_array().unwrap().iter().find(|worker| worker["role"] == "experts").unwrap()["name"].as_str().unwrap().to_owned();
    let stats = json_of(&["ctl", "stats", "--json", "--url", &url]);
    assert!(stats["tokens"]["generated"].as_u64().unwrap() > 0, "{stats}");
    assert_eq!(stats["requests"]["list"], json!([]), "{stats}");
    let (code, out, _) = tandem(&["ctl", "stats", "--url", &url]);
    assert!(code == 0 && out.contains(&experts) && out.contains("ready"), "{out}");

    // An unknown worker is refused by name; a known one finishes, ends and is started again.
    let (code, _, err) = tandem(&["ctl", "drain", "--worker", "nobody", "--url", &url]);
    assert!(code != 0 && err.contains("nobody") && err.contains(&experts), "{err}");
    let before = cluster.pids("tandem-experts");
    let (code, out, err) = tandem(&["ctl", "drain", "--worker", &experts, "--url", &url]);
    assert!(code == 0 && out.contains(&experts), "{out}{err}");
    let again = client
        .post(
            "/v1/chat/completions",
            &json!({"temperature": 0, "messages": [{"role": "user", "content": "What is the capital of France?"}]}),
        )
        .await;
    assert_eq!(again.body["choices"][0]["message"], direct.body["choices"][0]["message"], "{}", cluster.stderr());
    cluster.wait_for_stderr("restarted", Duration::from_secs(20));
    assert_ne!(cluster.pids("tandem-experts"), before);
    for _ in 0..200 {
        if tandem(&["ctl", "health", "--url", &url]).0 == 0 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }

    // The whole: a request that runs is finished, then everything ends with 0.
    let body = json!({"prompt": [5, 6, 7], "max_tokens": 200, "ignore_eos": true, "stream": true, "return_token_ids": true});
    let mut live = client.live("/v1/completions", &body).await;
    assert!(live.read(2).await);
    let requests = json_of(&["ctl", "requests", "--json", "--url", &url]);
    assert_eq!((&requests["running"], &requests["list"][0]["phase"]), (&json!(1), &json!("decode")), "{requests}");
    let (code, out, err) = tandem(&["ctl", "drain", "--url", &url]);
    assert!(code == 0 && out.contains("1 requests run"), "{out}{err}");
    let stream = live.finish().await;
    assert_eq!((stream.token_ids(0).len(), stream.finish_reasons(0)), (200, vec!["length"]));
    assert_eq!(cluster.wait_exit(Duration::from_secs(30)), Some(0), "{}", cluster.stderr());
    assert!(cluster.descendants().is_empty());

    let (code, _, err) = tandem(&["ctl", "health", "--url", &url]);
    assert!(code != 0 && err.contains(&url), "{err}");
}
