//! `tandem ctl`: a running server's health, numbers, workers and requests, and its drain. Numbers come from `/v1/stats`; a drain goes over
//! the control plane (control.v1), which only the instance's own network reaches, and never over the public API.

use std::{net::IpAddr, time::Duration};

use serde_json::Value;
use tandem_proto::control::v1::{DrainRequest, control_client::ControlClient};
use tonic::transport::Endpoint;

use crate::{
    cli::{CtlAction, CtlArgs},
    client::{Client, chain},
    failure::Failure,
    output,
};

/// How long an answer may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// Does what is asked.
///
/// # Errors
/// Nobody answers, the server is not ready (`health`), or nobody has that name (`drain`).
pub async fn run(args: CtlArgs) -> Result<(), Failure> {
    let client = Client::new(&args.server, Some(PATIENCE))?;
    match args.action {
        CtlAction::Health => health(&client, args.json).await,
        CtlAction::Stats => show(&client, args.json, None, |stats| format!("{}\n{}", summary(stats), workers(stats))).await,
        CtlAction::Workers => show(&client, args.json, Some("workers"), workers).await,
        CtlAction::Requests => show(&client, args.json, Some("requests"), requests).await,
        CtlAction::Drain { worker, timeout, control } => {
            let control = match control {
                Some(control) => control,
                None => control_of(&client).await?,
            };
            drain(&control, worker.as_deref(), timeout.0).await
        }
    }
}

async fn health(client: &Client, json: bool) -> Result<(), Failure> {
    let (_, live) = client.get("/livez").await?;
    let (status, ready) = client.get("/readyz").await?;
    let reasons: Vec<&str> =
        [&live, &ready].iter().flat_map(|b| b["reasons"].as_array().into_iter().flatten()).filter_map(Value::as_str).collect();
    if json {
        output::line(&serde_json::json!({"live": live["live"], "ready": ready["ready"], "reasons": reasons}).to_string())?;
    } else {
        output::line(if status.is_success() { "live, ready" } else { "not ready" })?;
        for reason in &reasons {
            output::line(&format!("  {reason}"))?;
        }
    }
    if status.is_success() { Ok(()) } else { Err(Failure::unavailable(format!("{} is not ready: {}", client.base(), reasons.join("; ")))) }
}

async fn show(client: &Client, json: bool, part: Option<&str>, text: impl Fn(&Value) -> String) -> Result<(), Failure> {
    let stats = client.get_ok("/v1/stats").await?;
    if json { output::line(&part.map_or(&stats, |part| &stats[part]).to_string()) } else { output::print(&text(&stats)) }
}

fn summary(stats: &Value) -> String {
    let text = |value: &Value| value.as_str().unwrap_or("?").to_owned();
    let mut rows = vec![
        vec!["model".into(), text(&stats["model"])],
        vec!["version".into(), text(&stats["version"])],
        vec!["ready".into(), if stats["ready"] == true { "yes".into() } else { format!("no: {}", join(&stats["reasons"])) }],
        vec!["up".into(), seconds(&stats["uptime_seconds"])],
        vec!["requests".into(), format!("{} running, {} waiting", stats["requests"]["running"], stats["requests"]["waiting"])],
        vec!["tokens".into(), format!("{} generated, {} of prompts", stats["tokens"]["generated"], stats["tokens"]["prompt"])],
    ];
    let limits = &stats["limits"];
    rows.push(vec!["limits".into(), format!("{} tokens a sequence, {} sequences at once", limits["max_seq_len"], limits["max_batch"])]);
    table(&[], &rows)
}

fn workers(stats: &Value) -> String {
    let all = |key: &str| stats[key].as_array().cloned().unwrap_or_default();
    let rows: Vec<Vec<String>> = all("workers")
        .iter()
        .map(|w| {
            let state = match w["state"].as_str() {
                Some("loading") => {
                    format!("loading: {} {}/{} bytes", w["phase"].as_str().unwrap_or(""), w["loaded_bytes"], w["total_bytes"])
                }
                state => state.unwrap_or("?").to_owned(),
            };
            let busy = w["busy"].as_f64().map_or_else(|| "-".into(), |busy| format!("{:.0} %", busy * 100.0));
            let cache = match w["kv_tokens_total"].as_u64() {
                Some(total @ 1..) => format!("{}/{total}", w["kv_tokens_used"]),
                _ => "-".into(),
            };
            let links: Vec<String> =
                w["links"].as_array().into_iter().flatten().map(|l| format!("{} {}", word(&l["link"]), word(&l["worker"]))).collect();
            // From +0: the sum of no floats is -0.
            let waits =
                w["layer_waits"].as_array().into_iter().flatten().filter_map(|l| l["milliseconds"].as_f64()).fold(0.0, |all, ms| all + ms);
            let waits = if links.is_empty() { "-".into() } else { format!("{waits:.2} ms") };
            let shards = join(&w["shards"]);
            vec![word(&w["name"]), word(&w["role"]), state, word(&w["device"]), busy, cache, shards, links.join(", "), waits]
        })
        .collect();
    if rows.is_empty() {
        return "no worker has joined\n".into();
    }
    table(&["WORKER", "ROLE", "STATE", "DEVICE", "BUSY", "CACHE TOKENS", "SHARDS", "LINKS", "WAIT PER STEP"], &rows)
}

fn requests(stats: &Value) -> String {
    let rows: Vec<Vec<String>> = stats["requests"]["list"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|r| {
            let (generated, most) = (&r["generated_tokens"], &r["max_tokens"]);
            vec![
                word(&r["id"]),
                word(&r["phase"]),
                word(&r["prompt_tokens"]),
                format!("{generated}/{most}"),
                seconds(&r["age_seconds"]),
                word(&r["attempts"]),
            ]
        })
        .collect();
    if rows.is_empty() {
        return "no request is running or waiting\n".into();
    }
    table(&["REQUEST", "PHASE", "PROMPT", "GENERATED", "AGE", "ATTEMPTS"], &rows)
}

/// Where the coordinator's control plane is: as the server says, on the host that it was reached at if it listens on all.
async fn control_of(client: &Client) -> Result<String, Failure> {
    let stats = client.get_ok("/v1/stats").await?;
    let told = stats["control_addr"]
        .as_str()
        .ok_or_else(|| Failure::unavailable("the server does not tell its control address; give --control URL"))?;
    let listens_on_all = |url: &reqwest::Url| {
        url.host_str().is_some_and(|host| host.trim_matches(['[', ']']).parse::<IpAddr>().is_ok_and(|ip| ip.is_unspecified()))
    };
    let (Ok(mut url), Ok(server)) = (reqwest::Url::parse(told), reqwest::Url::parse(client.base())) else {
        return Ok(told.to_owned());
    };
    if listens_on_all(&url) && url.set_host(server.host_str()).is_err() {
        return Ok(told.to_owned());
    }
    Ok(url.as_str().trim_end_matches('/').to_owned())
}

async fn drain(control: &str, worker: Option<&str>, timeout: Duration) -> Result<(), Failure> {
    let endpoint = Endpoint::from_shared(control.to_owned())
        .map_err(|_| Failure::usage(format!("--control {control:?} is no URL; write http://HOST:PORT")))?;
    let channel = endpoint.connect_timeout(PATIENCE).timeout(PATIENCE).connect().await.map_err(|error| {
        Failure::unavailable(format!(
            "{control}: {}; a drain goes over the control plane: run this where the workers can reach it",
            chain(&error)
        ))
    })?;
    let timeout_ms = u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX);
    let request = DrainRequest { worker: worker.unwrap_or_default().to_owned(), timeout_ms };
    let reply = ControlClient::new(channel)
        .request_drain(request)
        .await
        .map_err(|status| Failure::unavailable(format!("{control}: {}", status.message())))?;
    let reply = reply.into_inner();
    let who = worker.map_or_else(|| "the instance".to_owned(), |worker| format!("worker {worker}"));
    output::line(&format!("{who} drains: {} requests run, {} wait", reply.running, reply.waiting))
}

fn word(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

fn join(list: &Value) -> String {
    list.as_array().into_iter().flatten().map(word).collect::<Vec<_>>().join(", ")
}

fn seconds(value: &Value) -> String {
    match value.as_f64().unwrap_or(0.0) {
        short @ ..120.0 => format!("{short:.1} s"),
        mid @ ..7200.0 => format!("{:.1} min", mid / 60.0),
        long => format!("{:.1} h", long / 3600.0),
    }
}

/// Columns as wide as their widest cell, two spaces apart.
fn table(heads: &[&str], rows: &[Vec<String>]) -> String {
    let heads: Vec<String> = heads.iter().map(ToString::to_string).collect();
    let lines = || Some(&heads).filter(|heads| !heads.is_empty()).into_iter().chain(rows);
    let columns = lines().map(Vec::len).max().unwrap_or(0);
    let width = |column: usize| lines().filter_map(|line| line.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let mut text = String::new();
    for line in lines() {
        let cells: Vec<String> = line.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        text.push_str(cells.join("  ").trim_end());
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn tables_line_up() {
        let rows = [vec!["a".to_owned(), "é".to_owned(), "x".to_owned()], vec!["bbb".to_owned(), String::new(), "y".to_owned()]];
        assert_eq!(table(&["H", "KK"], &rows), "H    KK\na    é   x\nbbb      y\n");
        assert_eq!(table(&[], &[]), "");
    }

    #[test]
    fn stats_of_an_instance_and_of_nothing_can_be_shown() {
        let stats = json!({
            "model": "demo", "version": "0.1.0", "ready": false, "reasons": ["no attention worker"], "uptime_seconds": 7300.0,
            "limits": {"max_seq_len": 4096, "max_batch": 8, "kv_tokens": 1},
            "tokens": {"prompt": 5, "generated": 6},
            "requests": {"running": 1, "waiting": 0, "list": [
                {"id": "r-1", "phase": "decode", "prompt_tokens": 5, "generated_tokens": 2, "max_tokens": 9, "age_seconds": 1.25, "attempts": 1}
            ]},
            "workers": [
                {"name": "attn", "role": "attn", "state": "ready", "device": "CPU", "busy": 0.5, "kv_tokens_used": 3, "kv_tokens_total": 9,
                 "shards": [0, 1], "links": [{"worker": "experts-0", "link": "tcp", "addr": "127.0.0.1:1"}],
                 "layer_waits": [{"layer": 3, "milliseconds": 0.25}, {"layer": 4, "milliseconds": 0.5}]},
                {"name": "experts-0", "role": "experts", "state": "loading", "phase": "reading", "loaded_bytes": 1, "total_bytes": 2,
                 "device": "CPU", "busy": null, "kv_tokens_used": 0, "kv_tokens_total": 0, "shards": [0], "links": [], "layer_waits": []}
            ]
        });
        let shown = summary(&stats);
        for expected in ["ready     no: no attention worker", "up        2.0 h", "requests  1 running, 0 waiting"] {
            assert!(shown.contains(expected), "{shown}");
        }
        let shown = workers(&stats);
        for expected in ["50 %", "3/9", "0, 1", "tcp experts-0", "0.75 ms", "loading: reading 1/2 bytes"] {
            assert!(shown.contains(expected), "{shown}");
        }
        assert!(requests(&stats).contains("r-1      decode  5       2/9        1.2 s  1"), "{}", requests(&stats));
        for text in [summary(&json!({})), workers(&json!({})), requests(&json!({}))] {
            assert!(!text.is_empty());
        }
    }
}
