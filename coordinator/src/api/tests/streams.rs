//! Streams: framing, one finish, usage only on request, and the same answer as without streaming.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::AsyncReadExt;

use super::harness::*;
use crate::engine::{Finish, GenerationEvent};
use crate::text::fixtures::byte_token;

const STOP: Finish = Finish::Stop { id: EOS[0] };

/// Joins a chat stream: (reasoning, content, finish reasons).
fn join(chunks: &[Value]) -> (String, String, Vec<String>) {
    let (mut reasoning, mut content, mut finish) = (String::new(), String::new(), Vec::new());
    for choice in chunks.iter().flat_map(|c| c["choices"].as_array().unwrap()) {
        reasoning.push_str(choice["delta"]["reasoning_content"].as_str().unwrap_or(""));
        content.push_str(choice["delta"]["content"].as_str().unwrap_or(""));
        finish.extend(choice["finish_reason"].as_str().map(str::to_owned));
    }
    (reasoning, content, finish)
}

/// T-11, T-14, T-15 and T-16 at once, over step sizes: a stream is the answer in pieces.
#[tokio::test]
async fn t11_t14_t15_t16_streams_equal_whole_answers() {
    let texts = ["thought 🙂</think>The quick brown fox", "a</think>", "never closed <", "é🙂</think>x\nUser: y", ""];
    let stops = [json!(null), json!("own fox"), json!(["\nUser:", "🙂"]), json!(["</think>"]), json!("fox jumps")];
    for text in texts {
        for step in [1, 3, 64] {
            let addr = speaking(text, step, STOP).await;
            for stop in &stops {
                for options in [json!(null), json!({}), json!({"include_usage": false}), json!({"include_usage": true})] {
                    let whole = post(addr, "/v1/chat/completions", chat(json!({"stop": stop}))).await.json();
                    let message = &whole["choices"][0]["message"];
                    let body = chat(json!({"stop": stop, "stream": true, "stream_options": options}));
                    let mut chunks = post(addr, "/v1/chat/completions", body).await.chunks();
                    let usage = options["include_usage"] == json!(true);
                    if usage {
                        let last = chunks.pop().unwrap();
                        assert_eq!((&last["choices"], &last["usage"]), (&json!([]), &whole["usage"]));
                    }
                    for chunk in &chunks {
                        assert_eq!(chunk.get("usage"), usage.then_some(&Value::Null));
                        assert_eq!((&chunk["object"], &chunk["id"]), (&json!("chat.completion.chunk"), &chunks[0]["id"]));
                        assert_eq!(chunk["choices"].as_array().unwrap().len(), 1);
                    }
                    assert_eq!(chunks[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
                    let (reasoning, content, finish) = join(&chunks);
                    assert_eq!(
                        (reasoning.as_str(), content.as_str()),
                        (message["reasoning_content"].as_str().unwrap_or(""), message["content"].as_str().unwrap())
                    );
                    assert_eq!(finish, [whole["choices"][0]["finish_reason"].as_str().unwrap()]);
                    assert_eq!(chunks.last().unwrap()["choices"][0]["stop_reason"], whole["choices"][0]["stop_reason"]);
                    assert!(!content.contains("think>") && !reasoning.contains("think>"));
                }
            }
        }
    }
}

#[tokio::test]
async fn completion_streams_equal_whole_answers() {
    let addr = speaking("The quick brown fox 🙂.", 3, STOP).await;
    for extra in [
        json!({"max_tokens": 100}),
        json!({"max_tokens": 100, "stop": "own fox", "logprobs": 2}),
        json!({"max_tokens": 100, "echo": true, "logprobs": 1, "return_token_ids": true}),
        json!({"max_tokens": 0, "echo": true}),
        json!({"max_tokens": 22, "return_token_ids": true}),
        json!({"max_tokens": 100, "n": 3, "prompt": [[1, 2], [3]]}),
    ] {
        let whole = post(addr, "/v1/completions", completion(extra.clone())).await.json();
        let mut body = completion(extra);
        body["stream"] = json!(true);
        let chunks = post(addr, "/v1/completions", body).await.chunks();
        for want in whole["choices"].as_array().unwrap() {
            let mine: Vec<&Value> = chunks.iter().map(|c| &c["choices"][0]).filter(|c| c["index"] == want["index"]).collect();
            let text: String = mine.iter().map(|c| c["text"].as_str().unwrap()).collect();
            assert_eq!(text, want["text"].as_str().unwrap());
            let finishes: Vec<&Value> = mine.iter().map(|c| &c["finish_reason"]).filter(|f| !f.is_null()).collect();
            assert_eq!(finishes, [&want["finish_reason"]]);
            for column in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
                let joined: Vec<&Value> = mine.iter().filter_map(|c| c["logprobs"][column].as_array()).flatten().collect();
                assert_eq!(json!(joined), want["logprobs"].get(column).cloned().unwrap_or(json!([])), "{column}");
            }
            if want.get("token_ids").is_some() {
                let ids: Vec<&Value> = mine.iter().filter_map(|c| c["token_ids"].as_array()).flatten().collect();
                assert_eq!(json!(ids), want["token_ids"]);
                assert_eq!(mine[0]["prompt_token_ids"], want["prompt_token_ids"]);
            }
        }
    }
}

#[tokio::test]
async fn choices_interleave_under_their_own_index() {
    let (addr, mut worker) = server().await;
    let reply =
        tokio::spawn(post(addr, "/v1/chat/completions", chat(json!({"n": 2, "stream": true, "logprobs": true, "return_token_ids": true}))));
    let (a, b) = (worker.next().await.unwrap(), worker.next().await.unwrap());
    assert_eq!((a.request.choice, b.request.choice), (0, 1));
    for (generation, text) in [(&a, "</think>a1"), (&b, "</think>b1"), (&a, "a2"), (&b, "b2")] {
        let ids: Vec<u32> = text.bytes().map(byte_token).collect();
        generation.send(GenerationEvent::Tokens(tokens(&ids, &generation.request)));
    }
    a.send(GenerationEvent::Finished { reason: STOP });
    b.send(GenerationEvent::Finished { reason: Finish::Length });
    let chunks = reply.await.unwrap().chunks();
    for (index, text, finish) in [(0, "a1a2", "stop"), (1, "b1b2", "length")] {
        let mine: Vec<Value> = chunks.iter().filter(|c| c["choices"][0]["index"] == index).cloned().collect();
        assert_eq!(mine[0]["choices"][0]["delta"]["role"], "assistant");
        assert_eq!(join(&mine).1, text);
        assert_eq!(join(&mine).2, [finish]);
        let ids: usize = mine.iter().filter_map(|c| c["choices"][0]["token_ids"].as_array()).map(Vec::len).sum();
        let logprobs: usize = mine.iter().filter_map(|c| c["choices"][0]["logprobs"]["content"].as_array()).map(Vec::len).sum();
        assert_eq!((ids, logprobs), (12, 12));
    }
}

/// T-17, in small: headers before prefill, comments in silence, then the answer.
#[tokio::test]
async fn t17_silence_is_filled_with_comments() {
    let (addr, mut worker) = server_with(|p| p.options.keep_alive = Duration::from_millis(20)).await;
    let mut stream = open(addr, "/v1/chat/completions", &chat(json!({"stream": true}))).await;
    let generation = worker.next().await.unwrap();
    // Nothing was generated, not even started: what arrives now are the headers and comments.
    let mut seen = String::new();
    while seen.matches(": keep-alive\n\n").count() < 3 {
        let mut buffer = [0; 1024];
        let n = stream.read(&mut buffer).await.unwrap();
        assert!(n > 0);
        seen.push_str(std::str::from_utf8(&buffer[..n]).unwrap());
    }
    assert!(seen.starts_with("HTTP/1.1 200 OK\r\n") && !seen.contains("data:"), "{seen}");
    speak(&generation, &[1512, 100], 1, STOP);
    while !seen.contains("data: [DONE]\n\n") {
        let mut buffer = [0; 1024];
        let n = stream.read(&mut buffer).await.unwrap();
        assert!(n > 0);
        seen.push_str(std::str::from_utf8(&buffer[..n]).unwrap());
    }
}

#[tokio::test]
async fn continuous_usage_counts_up() {
    let addr = speaking("ab", 1, STOP).await;
    let body = chat(json!({"stream": true, "stream_options": {"include_usage": true, "continuous_usage_stats": true}}));
    let chunks = post(addr, "/v1/chat/completions", body).await.chunks();
    let counts: Vec<u64> = chunks.iter().map(|c| c["usage"]["completion_tokens"].as_u64().unwrap()).collect();
    assert!(counts.is_sorted() && counts.first() <= Some(&1) && counts.last() == Some(&2), "{counts:?}");
}
