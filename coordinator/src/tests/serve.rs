//! A whole coordinator process but for the process: ports, checkpoint, HTTP, READY, metrics, drain; workers are scripted.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use tandem_runtime::Shutdown;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::fakes::{Attn, Beating, oracle_stream};
use super::*;
use crate::{Config, Coordinator, Error};

/// A running coordinator over the demo checkpoint.
struct Server {
    control: SocketAddr,
    http: SocketAddr,
    shutdown: Shutdown,
    task: JoinHandle<Result<(), Error>>,
    fingerprint: String,
    _cache: tempfile::TempDir,
}

struct Answer {
    status: u16,
    head: String,
    body: String,
}

impl Answer {
    fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }
}

fn config(cache: &std::path::Path) -> Config {
    Config { precision: "f32".into(), port: 0, ..Config::new(tandem_model::demo::unpack(cache).expect("the demo checkpoint")) }
}

impl Server {
    async fn start() -> Self {
        let cache = tempfile::tempdir().expect("a folder");
        let config = config(cache.path());
        let fingerprint = tandem_model::Checkpoint::open(&config.model).expect("opens").fingerprint().to_owned();
        let coordinator = Coordinator::bind(config).await.expect("free ports");
        let (control, http, shutdown) = (coordinator.control_addr(), coordinator.http_addr(), Shutdown::new());
        let task = tokio::spawn(coordinator.run(shutdown.clone()));
        Self { control, http, shutdown, task, fingerprint, _cache: cache }
    }

    fn hello(&self, name: &str) -> control::Hello {
        control::Hello { fingerprint: self.fingerprint.clone(), ..hello(name, 1) }
    }

    async fn call(&self, method: &str, path: &str, body: Option<Value>) -> Answer {
        let body = body.map_or(String::new(), |body| body.to_string());
        let mut stream = TcpStream::connect(self.http).await.expect("the port is open");
        let request = format!(
            "{method} {path} HTTP/1.1\r\nHost: t\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(request.as_bytes()).await.expect("sent");
        let mut text = Vec::new();
        within("an answer", stream.read_to_end(&mut text)).await.expect("read");
        let text = String::from_utf8(text).expect("UTF-8");
        let (head, body) = text.split_once("\r\n\r\n").expect("a head");
        let status = head.split_whitespace().nth(1).and_then(|status| status.parse().ok()).expect("a status");
        Answer { status, head: head.to_ascii_lowercase(), body: body.to_owned() }
    }

    async fn wait_until_ready(&self) {
        while self.call("GET", "/readyz", None).await.status != 200 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

fn completion(max_tokens: u32, stream: bool) -> Value {
    json!({"prompt": [5, 6, 7], "max_tokens": max_tokens, "temperature": 0, "ignore_eos": true, "return_token_ids": true, "stream": stream})
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn from_the_first_second_to_the_drain() {
    let server = Server::start().await;
    // The port is open before anybody has joined, and says what is missing.
    let early = server.call("POST", "/v1/completions", Some(completion(1, false))).await;
    assert_eq!(early.status, 503, "{}", early.body);
    assert!(early.head.contains("\r\nretry-after: "), "{}", early.head);
    assert_eq!(server.call("GET", "/readyz", None).await.status, 503);
    assert_eq!(server.call("GET", "/livez", None).await.status, 200);

    let attn = Attn::join_as(server.control, server.hello("attn-0"), u32::MAX).await;
    let not_yet = server.call("GET", "/readyz", None).await;
    assert_eq!(not_yet.status, 503);
    assert!(not_yet.body.contains("no worker holds it"), "{}", not_yet.body);
    let _experts = Beating::join_as(server.control, server.hello("experts-0")).await;
    within("READY", server.wait_until_ready()).await;
    assert!(attn.seen.lock().submits[0].warmup);

    let answer = server.call("POST", "/v1/completions", Some(completion(6, false))).await;
    assert_eq!(answer.status, 200, "{}", answer.body);
    assert_eq!(answer.json()["choices"][0]["token_ids"], json!(oracle_stream(&[5, 6, 7], 6)));

    metrics_are_as_listed(&server.call("GET", "/metrics", None).await.body);

    // Drain: what runs ends whole, what comes is refused.
    attn.pause(true);
    let before = attn.seen.lock().submits.len();
    let running = {
        let (http, body) = (server.http, completion(40, true).to_string());
        tokio::spawn(async move {
            let mut stream = TcpStream::connect(http).await.expect("connect");
            let head = format!("POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: {}\r\n\r\n{body}", body.len());
            stream.write_all(head.as_bytes()).await.expect("sent");
            let mut text = Vec::new();
            stream.read_to_end(&mut text).await.expect("read");
            String::from_utf8_lossy(&text).into_owned()
        })
    };
    within("the stream's start", async {
        while attn.seen.lock().submits.len() == before {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    server.shutdown.start_drain();
    within("refusals", async {
        loop {
            let late = server.call("POST", "/v1/completions", Some(completion(1, false))).await;
            assert!(matches!(late.status, 200 | 503), "{}", late.body);
            if late.status == 503 {
                assert!(late.head.contains("\r\nretry-after: "), "{}", late.head);
                break;
            }
        }
    })
    .await;
    attn.pause(false);
    let text = within("the stream's end", running).await.expect("no panic");
    assert!(text.contains("data: [DONE]"), "{text}");
    drop(attn);
    let ended = within("the exit", server.task).await.expect("no panic");
    assert!(ended.is_ok(), "{ended:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_signal_ends_at_once() {
    let server = Server::start().await;
    server.shutdown.start_drain();
    server.shutdown.stop_now();
    assert!(within("the exit", server.task).await.expect("no panic").is_ok());
}

#[tokio::test]
async fn a_taken_port_is_named_with_its_holder() {
    let cache = tempfile::tempdir().expect("a folder");
    let holder = std::net::TcpListener::bind("127.0.0.1:0").expect("bind");
    let addr = holder.local_addr().expect("addr");
    for config in [Config { port: addr.port(), ..config(cache.path()) }, Config { control_addr: addr, ..config(cache.path()) }] {
        let Err(error) = Coordinator::bind(config).await else { panic!("the port is taken") };
        let text = error.to_string();
        assert!(text.contains(&addr.to_string()) && text.contains(&format!("pid {}", std::process::id())), "{text}");
    }
}

#[tokio::test]
async fn a_wrong_model_path_is_an_error_that_names_it() {
    let config = Config { port: 0, ..Config::new("/no/such/model".into()) };
    let ended = within("the exit", crate::run(config, Shutdown::new())).await;
    assert!(ended.as_ref().is_err_and(|error| error.to_string().contains("/no/such/model")), "{ended:?}");
}

#[tokio::test]
async fn settings_that_cannot_work_are_refused_before_any_port_is_taken() {
    let lease = Config { lease: Duration::from_millis(10), ..Config::new("/m".into()) };
    assert!(matches!(Coordinator::bind(lease).await, Err(Error::Config(text)) if text.contains("lease")));
    let precision = Config { precision: "fp4".into(), ..Config::new("/m".into()) };
    assert!(matches!(Coordinator::bind(precision).await, Err(Error::Config(text)) if text.contains("fp4")));
}

/// Names, types and label names of everything that the coordinator exports, but for HTTP (`api/`) and the process (`tandem-runtime`).
fn metrics_are_as_listed(text: &str) {
    let mut families = BTreeSet::new();
    let mut kind = ("", "");
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            kind = rest.split_once(' ').expect("a type");
            continue;
        }
        if line.starts_with('#') || line.is_empty() {
            continue;
        }
        let labels = line.split_once('{').map_or("", |(_, rest)| rest.rsplit_once('}').map_or("", |(labels, _)| labels));
        let mut names: Vec<&str> =
            labels.split("\",").filter_map(|label| Some(label.split_once('=')?.0)).filter(|name| *name != "le").collect();
        names.sort_unstable();
        families.insert(format!("{} {} {}", kind.0, kind.1, names.join(",")).trim_end().to_owned());
    }
    let own = |line: &String| !line.starts_with("tandem_http_") && !line.starts_with("process_") && !line.starts_with("tandem_build_info");
    let listed: String = families.into_iter().filter(own).map(|line| line + "\n").collect();
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/src/telemetry/metrics.golden");
    if std::env::var_os("TANDEM_REWRITE").is_some() {
        std::fs::write(path, &listed).expect("rewrite");
    }
    assert_eq!(listed, std::fs::read_to_string(path).unwrap_or_default(), "{path} (TANDEM_REWRITE=1 rewrites it)");
    for line in listed.lines() {
        lint(line, text);
    }
}

/// The rules of `promtool check metrics`, for names that are ours to choose.
fn lint(line: &str, text: &str) {
    let mut words = line.split(' ');
    let (name, kind) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    assert!(text.contains(&format!("# HELP {name} ")), "{name} has no help text");
    if !name.starts_with("tandem_") {
        return;
    }
    assert!(name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_'), "{name}");
    assert_eq!(kind == "counter", name.ends_with("_total"), "{name}: exactly the counters end in _total");
    for suffix in ["_count", "_sum", "_bucket", "_milliseconds", "_ms", "_bytes_total_total", "_percent"] {
        assert!(!name.ends_with(suffix), "{name} ends in {suffix}");
    }
    assert!(kind != "summary", "{name} needs buckets");
}
