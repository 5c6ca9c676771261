//! A long sampled stream whose workers are killed or stopped on the way: it must come out as the undisturbed one does.

use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::{Client, Cluster, cluster::send};

/// Tokens of the stream.
pub const TOKENS: u64 = 300;
/// Signals in order, each with a pause after it: kill -9.
pub const KILL: &[(Signal, Duration)] = &[(Signal::SIGKILL, Duration::ZERO)];
/// Stopped for three seconds.
pub const STOP: &[(Signal, Duration)] = &[(Signal::SIGSTOP, Duration::from_secs(3)), (Signal::SIGCONT, Duration::ZERO)];

/// The request.
pub fn long_request() -> Value {
    json!({ "model": "any", "prompt": (1..40).collect::<Vec<u32>>(), "max_tokens": TOKENS, "temperature": 0.8, "seed": 7, "ignore_eos": true,
            "return_token_ids": true })
}

/// Its tokens.
pub async fn undisturbed(client: &Client) -> Vec<u64> {
    let stream = client.stream("/v1/completions", &long_request()).await;
    assert_eq!(stream.token_ids(0).len() as u64, TOKENS);
    stream.token_ids(0)
}

/// Streams the long request, does something to one role's process after some events, and expects the undisturbed tokens.
pub async fn disturbed(cluster: &Cluster, role: &str, after: usize, signals: &[(Signal, Duration)]) {
    let client = cluster.client();
    let want = undisturbed(&client).await;
    let mut live = client.live("/v1/completions", &long_request()).await;
    assert!(live.read(after).await, "the stream ended before event {after}");
    let pid = cluster.pids(role)[0];
    for (signal, pause) in signals {
        send(pid, *signal);
        tokio::time::sleep(*pause).await;
    }
    let stream = live.finish().await;
    assert_eq!(stream.error(), None);
    assert_eq!(stream.token_ids(0), want, "{role} after {after} events");
    assert_eq!(stream.finish_reasons(0), ["length"]);
    assert!(stream.done);
    assert_eq!(undisturbed(&client).await, want, "the next request is served");
}
