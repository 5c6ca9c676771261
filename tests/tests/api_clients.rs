//! The API under tools that know nothing of it: its description validates, a fuzzer that reads the description finds no server error, and the
//! official clients take answers apart that come character by character.
//!
//! The server is the coordinator's router in this process, over an engine that answers from a script. `scripts/test` installs the tools; without
//! them (`TANDEM_TEST_PYTHON`) the tests say so and pass, except in CI, where they fail.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::path::{Path, PathBuf};
use std::process::Output;
use std::sync::Arc;

use tandem_coordinator::api::{ApiParts, Defaults, Model, Options, router, serve};
use tandem_coordinator::engine::{Engine, Finish, GenerationEvent, Limits, ScriptedGeneration, TokenEvent, TokenLogprob};
use tandem_coordinator::text::Tokenizer;
use tandem_model::Checkpoint;
use tokio::process::Command;

fn python() -> Option<PathBuf> {
    let found = std::env::var_os("TANDEM_TEST_PYTHON").map(PathBuf::from);
    if found.is_none() {
        assert!(std::env::var_os("CI").is_none(), "TANDEM_TEST_PYTHON is missing: scripts/test sets it");
        eprintln!("SKIPPED: TANDEM_TEST_PYTHON is missing (scripts/test installs the clients)");
    }
    found
}

/// A server of the demo checkpoint's text side over a script; gives its base URL.
async fn server() -> String {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/assets/demo");
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let model = Model::of(&checkpoint, vec!["demo".into()], Defaults::default()).unwrap();
    let tokenizer = Arc::clone(&model.tokenizer);
    let (engine, mut worker) = Engine::scripted(Limits { max_seq_len: 16384, max_batch: 64, kv_tokens: 1 << 20 });
    let parts = ApiParts { engine, model, options: Options::default(), metrics: Some(Arc::new(|| "# HELP x y\n".to_owned())), stuck: None };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let base = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(serve(listener, router(parts), std::future::pending()));
    tokio::spawn(async move {
        while let Some(generation) = worker.next().await {
            answer(&tokenizer, &generation);
        }
    });
    base
}

/// What the script says to a prompt, in tokens of one character, each with logprobs if they were asked for.
fn answer(tokenizer: &Tokenizer, generation: &ScriptedGeneration) {
    let request = &generation.request;
    let prompt = tokenizer.decode(&request.prompt_ids, false);
    let thinks = prompt.ends_with("<think>");
    let last = prompt.rfind("<|observation|>").max(prompt.rfind("<|user|>")).map_or("", |at| &prompt[at..]);
    let said = if last.starts_with("<|observation|>") {
        "The tools say: 12 °C 🌦 in Paris."
    } else if last.contains("weather") && prompt.contains("get_weather") {
        "I look.<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris \"🗼\"</arg_value><arg_key>days</arg_key><arg_value>3</arg_value></tool_call><tool_call>now</tool_call>"
    } else {
        "Hello, 世界! 🙂"
    };
    let text = if thinks { format!("I think.</think>{said}") } else { said.to_owned() };
    let byte = |b: u8| (0..tokenizer.len() as u32).find(|&id| tokenizer.bytes(id) == [b]).unwrap();
    let ids: Vec<u32> = text.bytes().map(byte).take(request.max_tokens as usize).collect();
    generation.send(GenerationEvent::Started { cached_tokens: None });
    let logprob = |id| TokenLogprob { id, logprob: -0.5, rank: 1 };
    if request.prompt_logprobs.is_some() {
        let positions =
            request.prompt_ids[1..].iter().map(|&id| tandem_coordinator::engine::PromptPosition { actual: logprob(id), top: vec![] });
        generation.send(GenerationEvent::PromptLogprobs(positions.collect()));
    }
    for (index, &id) in ids.iter().enumerate() {
        let top = request.logprobs.map_or(Vec::new(), |n| (0..n).map(logprob).collect());
        let event = TokenEvent { id, index: index as u32, logprob: request.logprobs.map(|_| logprob(id)), top };
        generation.send(GenerationEvent::Tokens(vec![event]));
    }
    let full = ids.len() == request.max_tokens as usize;
    let stop = request.stop_ids.first().copied().unwrap_or(1490);
    generation.send(GenerationEvent::Finished { reason: if full { Finish::Length } else { Finish::Stop { id: stop } } });
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

async fn script(name: &str) {
    let Some(python) = python() else { return };
    let base = server().await;
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("clients").join(name);
    let output = Command::new(python).arg(file).arg(base).output().await.unwrap();
    assert!(output.status.success() && said(&output).contains("all checks passed"), "{}", said(&output));
}

/// T-19: strict parsing by both official packages.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t19_official_clients_take_answers_in_single_characters() {
    script("strict_clients.py").await;
}

/// T-27: conversations of coding agents, as they send them, through each face.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t27_agents_conversations_replay() {
    script("agent_replay.py").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_description_validates_and_a_fuzzer_finds_no_server_error() {
    let Some(python) = python() else { return };
    let base = server().await;
    let url = format!("{base}/openapi.json");
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("openapi.json");
    std::fs::write(&file, reqwest::get(&url).await.unwrap().text().await.unwrap()).unwrap();
    let output = Command::new(&python).args(["-m", "openapi_spec_validator"]).arg(&file).output().await.unwrap();
    assert!(output.status.success(), "{}", said(&output));
    let fuzzer = python.parent().unwrap().join("schemathesis");
    let output = Command::new(fuzzer)
        .args(["run", &url, "--checks", "not_a_server_error", "--max-examples", "12", "--phases", "examples,coverage,fuzzing"])
        .args(["--seed", "7", "--workers", "1", "--request-timeout", "20", "--suppress-health-check", "all", "--no-color"])
        .current_dir(dir.path())
        .output()
        .await
        .unwrap();
    assert!(output.status.success(), "{}", said(&output));
}
