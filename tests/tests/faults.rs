//! kill -9, SIGSTOP and deadlines: a death costs time, never a token (T-39, T-52, T-55).
#![allow(clippy::unwrap_used, reason = "tests")]

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use serde_json::json;
use tandem_tests::{
    Client, Cluster, Launch, checkpoints,
    cluster::send,
    disturb::{KILL, STOP, disturbed, long_request, undisturbed},
};

fn tiny(args: &[&str]) -> Cluster {
    Launch::up().model(checkpoints::tiny()).args(["--dtype", "f32"]).args(args.iter().copied()).ready()
}

#[tokio::test]
async fn an_expert_worker_killed_in_mid_stream_costs_no_token() {
    let cluster = tiny(&[]);
    disturbed(&cluster, "tandem-experts", 40, KILL).await;
    cluster.wait_for_stderr("SIGKILL", Duration::from_secs(5));
    let restarts = cluster.client().metric("tandem_worker_restarts_total", &["experts"]).await;
    assert!(restarts >= 1.0, "restarts are counted: {restarts}");
}

#[tokio::test]
async fn one_of_three_ffn_slices_killed_over_grpc_costs_no_token() {
    let cluster = tiny(&["--experts", "cpu,cpu,cpu", "--split", "ffn", "--link", "grpc"]);
    disturbed(&cluster, "tandem-experts", 25, KILL).await;
}

#[tokio::test]
async fn deaths_of_workers_that_share_memory_cost_no_token() {
    let cluster = tiny(&["--experts", "cpu,cpu", "--split", "ffn", "--shared-rows", "on", "--overlap-rows", "2"]);
    for (role, signals) in [("tandem-experts", KILL), ("tandem-attn", KILL), ("tandem-experts", STOP)] {
        disturbed(&cluster, role, 25, signals).await;
    }
    let stats = cluster.client().get("/v1/stats").await.text;
    assert_eq!(stats.matches("tcp+memory").count(), 2, "both share memory again: {stats}");
}

#[tokio::test]
async fn the_attention_worker_killed_in_mid_stream_costs_no_token() {
    let cluster = tiny(&[]);
    disturbed(&cluster, "tandem-attn", 40, KILL).await;
}

#[tokio::test]
async fn a_stopped_expert_worker_delays_the_stream_only() {
    let cluster = tiny(&[]);
    disturbed(&cluster, "tandem-experts", 30, STOP).await;
}

#[tokio::test]
async fn a_stopped_attention_worker_delays_the_stream_only() {
    let cluster = tiny(&[]);
    disturbed(&cluster, "tandem-attn", 30, STOP).await;
}

#[tokio::test]
async fn idle_deaths_show_in_readiness_and_heal() {
    let cluster = tiny(&[]);
    let client = cluster.client();
    let want = undisturbed(&client).await;
    for role in ["tandem-experts", "tandem-attn"] {
        assert_eq!(client.get("/readyz").await.status, 200);
        send(cluster.pids(role)[0], Signal::SIGKILL);
        let until = Instant::now() + Duration::from_secs(30);
        let mut seen_unready = false;
        loop {
            let ready = client.get("/readyz").await;
            assert_eq!(client.get("/livez").await.status, 200, "liveness does not depend on workers");
            seen_unready |= ready.status == 503;
            if seen_unready && ready.status == 200 {
                break;
            }
            assert!(Instant::now() < until, "{role}: unready seen {seen_unready}, now {}", ready.text);
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert_eq!(undisturbed(&client).await, want);
    }
}

#[tokio::test]
async fn kills_during_prefill_and_right_at_the_start() {
    // One token per chunk: the prompt of 500 takes 500 steps, each time.
    let cluster = tiny(&["--prefill-chunk", "1", "--max-num-batched-tokens", "1", "--no-prefix-cache"]);
    let client = cluster.client();
    let body = json!({ "model": "any", "prompt": (0..500u32).map(|i| i % 490).collect::<Vec<_>>(), "max_tokens": 20, "temperature": 0,
                       "ignore_eos": true, "return_token_ids": true });
    let want = client.stream("/v1/completions", &body).await.token_ids(0);
    assert_eq!(want.len(), 20);
    for role in ["tandem-experts", "tandem-attn"] {
        for pause in [0, 30, 150] {
            // Headers come when the request is taken: one that comes after a death is refused, which is another test's.
            let live = client.live("/v1/completions", &body).await;
            tokio::time::sleep(Duration::from_millis(pause)).await;
            let pid = *cluster.pids(role).first().expect("it runs");
            send(pid, Signal::SIGKILL);
            let stream = live.finish().await;
            assert_eq!(stream.error(), None, "{role} after {pause} ms");
            assert_eq!(stream.token_ids(0), want, "{role} after {pause} ms");
        }
    }
}

#[tokio::test]
async fn with_no_expert_worker_until_the_deadline_the_client_gets_a_clean_error() {
    let model = checkpoints::tiny();
    let mut serve = Launch::serve().model(model).args(["--dtype", "f32", "--request-timeout", "4"]).spawn();
    let control = serve.wait_for_line("CONTROL ", Duration::from_secs(30)).trim_start_matches("CONTROL ").to_owned();
    let _attn = Launch::role("attn").model(model).args(["--coordinator", &control, "--dtype", "f32"]).spawn();
    let experts = Launch::role("experts").model(model).args(["--coordinator", &control, "--dtype", "f32"]).spawn();
    let ready = serve.wait_for_line("READY ", Duration::from_secs(120));
    let client = Client::new(ready.trim_start_matches("READY ").trim());

    let mut body = long_request();
    body["max_tokens"] = 3000.into();
    let mut live = client.live("/v1/completions", &body).await;
    assert!(live.read(5).await);
    send(experts.pid(), Signal::SIGKILL);
    let stream = live.finish().await;
    let error = stream.error().unwrap_or_else(|| panic!("no error event: {:?}", stream.chunks.last()));
    for key in ["message", "type", "param", "code"] {
        assert!(error.get(key).is_some(), "{error}");
    }
    let refused = client.post("/v1/completions", &long_request()).await;
    assert_eq!(refused.status, 503, "{}", refused.text);
    assert!(refused.headers.contains_key("retry-after"));
    client.wait_metric("tandem_requests_running", &[], Duration::from_secs(5), |v| v == 0.0).await;
}

#[tokio::test]
async fn a_second_holder_of_the_same_shard_takes_over() {
    let model = checkpoints::tiny();
    let mut serve = Launch::serve().model(model).args(["--dtype", "f32"]).spawn();
    let control = serve.wait_for_line("CONTROL ", Duration::from_secs(30)).trim_start_matches("CONTROL ").to_owned();
    let worker = |role: &str, name: &str| {
        Launch::role(role).model(model).args(["--coordinator", &control, "--dtype", "f32", "--name", name]).spawn()
    };
    let (_attn, first) = (worker("attn", "attn-0"), worker("experts", "experts-0"));
    let ready = serve.wait_for_line("READY ", Duration::from_secs(120));
    let client = Client::new(ready.trim_start_matches("READY ").trim());
    let want = undisturbed(&client).await;
    let _second = worker("experts", "experts-1");
    client.wait_metric("tandem_worker_up", &["experts-1"], Duration::from_secs(60), |v| v == 1.0).await;

    let mut live = client.live("/v1/completions", &long_request()).await;
    assert!(live.read(20).await);
    send(first.pid(), Signal::SIGKILL); // nobody restarts it
    let stream = live.finish().await;
    assert_eq!(stream.error(), None);
    assert_eq!(stream.token_ids(0), want);
    assert_eq!(client.get("/readyz").await.status, 200, "the replica is enough");
}

#[tokio::test]
async fn a_dead_worker_is_reported_with_its_last_words() {
    let cluster = tiny(&[]);
    let pid = cluster.pids("tandem-experts")[0];
    send(pid, Signal::SIGKILL);
    cluster.wait_for_stderr("SIGKILL", Duration::from_secs(10));
    let log = cluster.stderr();
    assert!(log.contains("tandem-experts") || log.contains("experts-0"), "{log}");
    assert!(log.lines().any(|line| line.contains("its last lines")), "its last standard error lines are shown:\n{log}");
}

#[tokio::test]
async fn stopping_leaves_no_process_behind() {
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGKILL] {
        let mut cluster = tiny(&["--experts", "cpu,cpu", "--split", "experts"]);
        let family = cluster.descendants();
        assert_eq!(family.len(), 4, "serve, attn, two experts");
        cluster.signal(signal);
        let code = cluster.wait_exit(Duration::from_secs(20));
        if signal != Signal::SIGKILL {
            assert_eq!(code, Some(0), "{signal}");
        }
        let until = Instant::now() + Duration::from_secs(10);
        while family.iter().any(|pid| tandem_tests::cluster::alive(*pid)) {
            assert!(Instant::now() < until, "{signal}: {family:?} left behind");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

#[tokio::test]
async fn sigterm_under_load_truncates_no_stream() {
    let mut cluster = tiny(&[]);
    let client = cluster.client();
    let want = undisturbed(&client).await;
    let mut streams = Vec::new();
    for _ in 0..3 {
        let mut live = client.live("/v1/completions", &long_request()).await;
        assert!(live.read(3).await);
        streams.push(live);
    }
    cluster.signal(Signal::SIGTERM);
    for live in streams {
        let stream = live.finish().await;
        assert_eq!(stream.token_ids(0), want);
        assert!(stream.done);
    }
    assert_eq!(cluster.wait_exit(Duration::from_secs(20)), Some(0));
}

/// T-39: rows that turn NaN on an expert worker end their own request with an error; neighbours and later requests are untouched.
#[tokio::test]
async fn a_nan_row_ends_its_own_request_alone() {
    // The first dispatch of two rows after 60 steps: two requests are in decode together then, and the second row is spoilt.
    let cluster =
        Launch::up().model(checkpoints::tiny()).args(["--dtype", "f32"]).env("TANDEM_TEST_FAULT", "nan:row=1,rows=2,step=60").ready();
    let client = cluster.client();
    let mut other = long_request();
    other["seed"] = 8.into();
    let solo = Launch::up().model(checkpoints::tiny()).args(["--dtype", "f32"]).ready();
    let wants = [solo.client().stream("/v1/completions", &long_request()).await, solo.client().stream("/v1/completions", &other).await];
    drop(solo);
    let (first, second) = tokio::join!(async { client.live("/v1/completions", &long_request()).await.finish().await }, async {
        client.live("/v1/completions", &other).await.finish().await
    });
    let streams = [first, second];
    let hit: Vec<usize> = (0..2).filter(|i| streams[*i].error().is_some()).collect();
    assert_eq!(hit.len(), 1, "exactly one request is hit");
    let (hit, spared) = (hit[0], 1 - hit[0]);
    let got = streams[hit].token_ids(0);
    assert!(got.len() < wants[hit].token_ids(0).len() && wants[hit].token_ids(0).starts_with(&got), "only right tokens before the error");
    assert_eq!(streams[spared].token_ids(0), wants[spared].token_ids(0), "the neighbour is untouched");
    for (body, want) in [(long_request(), &wants[0]), (other, &wants[1])] {
        let again = client.stream("/v1/completions", &body).await;
        assert_eq!(again.token_ids(0), want.token_ids(0), "nothing spoilt stays behind");
    }
    let admin = cluster.stderr();
    let attn = admin.lines().find(|l| l.contains("attn metrics and health")).and_then(|l| l.split("http://").nth(1)).unwrap();
    let page = Client::new(&format!("http://{}", attn.trim().trim_end_matches("/metrics"))).get("/metrics").await.text;
    assert!(tandem_tests::client::metric_in(&page, "tandem_nan_rows_total", &[]) >= 1.0, "it is counted");
}
