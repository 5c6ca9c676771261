//! The clients that people really use: the `openai` and `anthropic` Python packages and a Prometheus server, both installed by `scripts/test`.
//!
//! Without them (`TANDEM_TEST_PYTHON`, `promtool`/`prometheus` on the path) the tests say so and pass, except in CI, where they fail.
#![allow(clippy::unwrap_used, reason = "tests")]

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use serde_json::{Value, json};
use tandem_tests::{Client, Cluster, Launch};

/// A tool, or a loud skip; in CI a missing tool is a failure.
fn tool(name: &str, found: Option<PathBuf>) -> Option<PathBuf> {
    if found.is_none() {
        assert!(std::env::var_os("CI").is_none(), "{name} is missing: scripts/test installs it");
        eprintln!("SKIPPED: {name} is missing (scripts/test installs it)");
    }
    found
}

fn on_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join(name)).find(|file| file.is_file())
}

fn clients() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("clients")
}

#[tokio::test]
async fn the_official_packages_drive_the_server() {
    let Some(python) = tool("a Python with the official packages", std::env::var_os("TANDEM_TEST_PYTHON").map(PathBuf::from)) else {
        return;
    };
    let cluster = Launch::up().args(["--dtype", "f32"]).ready();
    for script in ["openai_client.py", "anthropic_client.py"] {
        let output = Command::new(&python).arg(clients().join(script)).arg(cluster.base()).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{script}: {text}");
        assert!(text.contains("all checks passed"), "{script}: {text}");
    }
}

/// Metrics addresses of the workers: each process logs its admin address.
fn admin_addresses(cluster: &Cluster) -> Vec<String> {
    let log = cluster.stderr();
    let mut found: Vec<String> = log
        .lines()
        .filter(|line| line.contains("admin"))
        .filter_map(|line| {
            line.split(|c: char| !(c.is_ascii_digit() || c == '.' || c == ':')).find(|w| w.starts_with("127.0.0.1:") && w.len() > 10)
        })
        .map(str::to_owned)
        .collect();
    found.sort();
    found.dedup();
    found
}

#[tokio::test]
async fn promtool_finds_nothing_in_any_process() {
    let Some(promtool) = tool("promtool", on_path("promtool")) else { return };
    let cluster = Launch::up().args(["--experts", "cpu,cpu", "--split", "experts"]).ready();
    let client = cluster.client();
    let body = json!({ "model": "any", "messages": [{ "role": "user", "content": "Hello!" }], "max_tokens": 20 });
    assert_eq!(client.post("/v1/chat/completions", &body).await.status, 200);
    let admin = admin_addresses(&cluster);
    assert_eq!(admin.len(), 3, "attn and two experts: {admin:?}\n{}", cluster.stderr());
    let mut pages = vec![("serve".to_owned(), client.get("/metrics").await.text)];
    for address in &admin {
        let worker = Client::new(&format!("http://{address}"));
        assert_eq!(worker.get("/readyz").await.status, 200);
        pages.push((address.clone(), worker.get("/metrics").await.text));
    }
    for (process, page) in pages {
        // The aliases carry vLLM's own names, which promtool objects to on principle (colons).
        let own: String = page.lines().filter(|line| !line.contains("vllm:")).fold(String::new(), |all, line| all + line + "\n");
        assert!(own.contains("tandem_build_info"), "{process}: {own}");
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), &own).unwrap();
        let lint = Command::new(&promtool).args(["check", "metrics"]).stdin(file.reopen().unwrap()).output().unwrap();
        let said = String::from_utf8_lossy(&lint.stdout).into_owned() + &String::from_utf8_lossy(&lint.stderr);
        assert!(lint.status.success() && said.trim().is_empty(), "{process}:\n{said}");
    }
}

#[tokio::test]
async fn prometheus_scrapes_all_processes() {
    let Some(prometheus) = tool("prometheus", on_path("prometheus")) else { return };
    let cluster = Launch::up().ready();
    let body = json!({ "model": "any", "messages": [{ "role": "user", "content": "Hello!" }], "max_tokens": 20 });
    assert_eq!(cluster.client().post("/v1/chat/completions", &body).await.status, 200);
    let coordinator = cluster.base().trim_start_matches("http://").to_owned();
    let targets: Vec<String> = admin_addresses(&cluster).into_iter().chain([coordinator]).map(|t| format!("'{t}'")).collect();
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("prometheus.yml");
    let text = format!(
        "global: {{ scrape_interval: 1s }}\nscrape_configs:\n  - job_name: tandem\n    static_configs: [{{ targets: [{}] }}]\n",
        targets.join(", ")
    );
    std::fs::write(&config, text).unwrap();
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let mut server = Command::new(prometheus)
        .arg(format!("--config.file={}", config.display()))
        .arg(format!("--storage.tsdb.path={}", dir.path().join("data").display()))
        .arg(format!("--web.listen-address=127.0.0.1:{port}"))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let outcome = tokio::time::timeout(Duration::from_secs(60), scraped(port, targets.len())).await;
    let _ended = server.kill();
    let _status = server.wait();
    outcome.expect("Prometheus sees every process within a minute");
}

async fn scraped(port: u16, targets: usize) {
    let http = reqwest::Client::builder().no_proxy().build().unwrap();
    let query = async |expr: &str| -> Vec<Value> {
        let url = format!("http://127.0.0.1:{port}/api/v1/query");
        let Ok(answer) = http.get(url).query(&[("query", expr)]).send().await else { return Vec::new() };
        let body: Value = serde_json::from_str(&answer.text().await.unwrap()).unwrap_or_default();
        body["data"]["result"].as_array().cloned().unwrap_or_default()
    };
    loop {
        let up = query("up == 1").await.len();
        let queries = [
            "vllm:generation_tokens_total > 0",
            "histogram_quantile(0.5, sum by (le) (tandem_expert_dispatch_seconds_bucket))",
            "tandem_expert_rows_total > 0",
            "tandem_link_bytes_total > 0",
        ];
        let mut full = 0;
        for expr in queries {
            full += usize::from(!query(expr).await.is_empty());
        }
        if up == targets && full == queries.len() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
}
