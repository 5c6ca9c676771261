//! T-18: a client that goes away frees its sequences in every phase, streamed or not, by FIN or by RST; and only then.

use std::time::Duration;

use serde_json::json;
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;

use super::harness::*;
use crate::engine::{Finish, GenerationEvent, ScriptedGeneration};
use crate::text::fixtures::byte_token;

#[derive(Clone, Copy, Debug)]
enum Phase {
    Queued,
    Prefill,
    Decode,
}

fn reach(phase: Phase, generation: &ScriptedGeneration) {
    if !matches!(phase, Phase::Queued) {
        generation.send(GenerationEvent::Started { cached_tokens: None });
    }
    if matches!(phase, Phase::Decode) {
        generation.send(GenerationEvent::Tokens(tokens(&[100, 101], &generation.request)));
    }
}

fn close(stream: TcpStream, reset: bool) {
    if reset {
        // Linger 0 turns the close into a RST.
        stream.set_zero_linger().unwrap();
    }
    drop(stream);
}

/// A cancellation that never comes is a hang: the limit only turns it into a failure.
async fn cancelled(generation: &mut ScriptedGeneration) {
    tokio::time::timeout(Duration::from_secs(20), generation.cancelled()).await.expect("the sequence is cancelled");
}

#[tokio::test]
async fn t18_a_client_that_leaves_cancels_all_its_sequences() {
    for path in ["/v1/chat/completions", "/v1/completions"] {
        for stream in [false, true] {
            for phase in [Phase::Queued, Phase::Prefill, Phase::Decode] {
                for reset in [false, true] {
                    let (addr, mut worker) = server().await;
                    let extra = json!({"stream": stream, "n": 2});
                    let body = if path.contains("chat") { chat(extra) } else { completion(extra) };
                    let mut client = open(addr, path, &body).await;
                    let (mut a, mut b) = (worker.next().await.unwrap(), worker.next().await.unwrap());
                    reach(phase, &a);
                    if stream {
                        // The client has seen the headers, so the stream is under way.
                        let _ = client.read(&mut [0; 64]).await.unwrap();
                    }
                    assert!(!a.is_cancelled() && !b.is_cancelled());
                    close(client, reset);
                    cancelled(&mut a).await;
                    cancelled(&mut b).await;
                }
            }
        }
    }
}

#[tokio::test]
async fn a_stop_string_cancels_its_own_sequence_at_once() {
    let (addr, mut worker) = server().await;
    let reply = tokio::spawn(post(addr, "/v1/completions", completion(json!({"n": 2, "stop": "END"}))));
    let (mut a, b) = (worker.next().await.unwrap(), worker.next().await.unwrap());
    let ids: Vec<u32> = "okENDmore".bytes().map(byte_token).collect();
    a.send(GenerationEvent::Tokens(tokens(&ids, &a.request)));
    cancelled(&mut a).await;
    assert!(!b.is_cancelled(), "the other choice goes on");
    speak(&b, &[byte_token(b'x')], 1, Finish::Stop { id: EOS[0] });
    let answer = reply.await.unwrap().json();
    assert_eq!((&answer["choices"][0]["text"], &answer["choices"][0]["stop_reason"]), (&json!("ok"), &json!("END")));
    assert_eq!(answer["usage"]["completion_tokens"], 5 + 1, "what came behind the stop string is not counted");
}

#[tokio::test]
async fn a_failed_choice_cancels_the_others_and_a_normal_end_cancels_nothing() {
    let (addr, mut worker) = server().await;
    let reply = tokio::spawn(post(addr, "/v1/completions", completion(json!({"n": 2}))));
    let (a, mut b) = (worker.next().await.unwrap(), worker.next().await.unwrap());
    drop(a); // An engine that vanishes.
    assert_eq!(reply.await.unwrap().status, 500);
    cancelled(&mut b).await;

    let reply = tokio::spawn(post(addr, "/v1/completions", completion(json!({"stream": true}))));
    let c = worker.next().await.unwrap();
    speak(&c, &[100], 1, Finish::Stop { id: EOS[0] });
    assert_eq!(reply.await.unwrap().chunks().len(), 2);
    assert!(!c.is_cancelled());
}

/// A connection that is kept open for the next request does not keep the last one alive, and pipelined bytes do no harm.
#[tokio::test]
async fn keep_alive_connections_serve_again() {
    let addr = speaking("ok", 1, Finish::Stop { id: EOS[0] }).await;
    let one = completion(json!({})).to_string();
    let request = |close: &str| format!("POST /v1/completions HTTP/1.1\r\nhost: x\r\n{close}content-length: {}\r\n\r\n{one}", one.len());
    let both = request("") + &request("connection: close\r\n");
    let reply = raw(addr, both.as_bytes()).await;
    assert_eq!(reply.status, 200);
    assert!(reply.body.contains("HTTP/1.1 200 OK"), "the second answer follows: {}", reply.body);
}
