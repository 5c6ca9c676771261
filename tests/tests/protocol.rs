//! Requests, limits and streams as clients and agents rely on them (T-01, T-04, T-05, T-06, T-11, T-14, T-15, T-16, T-18).
#![allow(clippy::unwrap_used, reason = "tests")]

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tandem_tests::{Client, Cluster, Launch, client::Answer};

fn demo(args: &[&str]) -> Cluster {
    Launch::up().args(args.iter().copied()).ready()
}

fn assert_error(answer: &Answer, status: u16, what: &str) {
    assert_eq!(answer.status, status, "{what}: {}", answer.text);
    let error = answer.body["error"].as_object().unwrap_or_else(|| panic!("{what}: {}", answer.text));
    for key in ["message", "type", "param", "code"] {
        assert!(error.contains_key(key), "{what}: no {key}: {}", answer.text);
    }
    assert!(error["message"].as_str().is_some_and(|m| m.len() > 5), "{what}");
}

async fn chat(client: &Client, extra: Value) -> Answer {
    let mut body = json!({ "model": "any", "messages": [{ "role": "user", "content": "Hello!" }], "max_tokens": 8, "temperature": 0 });
    for (key, value) in extra.as_object().unwrap() {
        body[key] = value.clone();
    }
    client.post("/v1/chat/completions", &body).await
}

/// T-01: longer than the pool: refused at once with both numbers, and the next short request is served.
#[tokio::test]
async fn t01_a_prompt_longer_than_the_pool_is_refused_at_once() {
    let cluster = demo(&["--kv-tokens", "1024"]);
    let client = cluster.client();
    let body = json!({ "model": "any", "prompt": vec![5; 1500], "max_tokens": 4 });
    let answer = client.post("/v1/completions", &body).await;
    assert_error(&answer, 400, "too long");
    let message = answer.body["error"]["message"].as_str().unwrap();
    assert!(message.contains("1500") && message.contains("1024"), "{message}");
    assert!(message.contains("prompt is too long: 1500 tokens > ") && message.contains("maximum context length is "), "{message}");
    assert_eq!(answer.body["error"]["code"], "context_length_exceeded");
    assert_eq!(answer.body["error"]["type"], "invalid_request_error");
    assert_eq!(chat(&client, json!({})).await.status, 200);
    // The limit hit during generation ends with `length`.
    let body = json!({ "model": "any", "prompt": vec![5; 1000], "ignore_eos": true, "temperature": 0 });
    let answer = client.post("/v1/completions", &body).await;
    assert_eq!(answer.body["choices"][0]["finish_reason"], "length", "{}", answer.text);
}

/// T-04, T-05, T-06: bad ids and values are 400, the server lives.
#[tokio::test]
async fn t04_t05_t06_bad_values_are_refused_and_the_server_lives() {
    let cluster = demo(&[]);
    let client = cluster.client();
    for prompt in
        [json!(""), json!([""]), json!([]), json!([[]]), json!([-1]), json!([1536]), json!([1 << 31]), json!([1.5]), json!({}), json!(null)]
    {
        let answer = client.post("/v1/completions", &json!({ "model": "any", "prompt": prompt, "max_tokens": 4 })).await;
        assert_error(&answer, 400, &format!("prompt {prompt}"));
    }
    for messages in
        [json!([]), json!(null), json!("hi"), json!([{}]), json!([{ "role": "user" }]), json!([{ "role": "wizard", "content": "x" }])]
    {
        assert_error(&chat(&client, json!({ "messages": messages })).await, 400, &format!("messages {messages}"));
    }
    let media = json!([{ "role": "user", "content": [{ "type": "image_url", "image_url": { "url": "data:," } }] }]);
    assert_error(&chat(&client, json!({ "messages": media })).await, 400, "an image");
    for (key, value) in [
        ("max_tokens", json!(0)),
        ("max_tokens", json!(-1)),
        ("max_tokens", json!(1.5)),
        ("max_tokens", json!("5")),
        ("temperature", json!(-0.1)),
        ("temperature", json!("hot")),
        ("temperature", json!(1e9)),
        ("top_p", json!(1.5)),
        ("top_p", json!(-1)),
        ("top_k", json!(-5)),
        ("min_p", json!(2)),
        ("presence_penalty", json!(3)),
        ("frequency_penalty", json!(-3)),
        ("repetition_penalty", json!(0)),
        ("n", json!(0)),
        ("n", json!(100_000)),
        ("stop", json!([1])),
        ("stop", json!("")),
        ("top_logprobs", json!(-1)),
        ("top_logprobs", json!(1_000_000)),
        ("logit_bias", json!({ "-1": 1 })),
        ("logit_bias", json!({ "1536": 1 })),
        ("logit_bias", json!({ "2147483648": 1 })),
        ("logit_bias", json!({ "abc": 1 })),
        ("logit_bias", json!({ "5": "NaN" })),
        ("logit_bias", json!({ "5": 1e9 })),
        ("logit_bias", json!([1])),
        ("seed", json!("x")),
        ("stream", json!("yes")),
        ("stop_token_ids", json!([-1])),
        ("stop_token_ids", json!([99_999])),
    ] {
        let mut extra = json!({ key: value });
        if key == "top_logprobs" {
            extra["logprobs"] = true.into();
        }
        assert_error(&chat(&client, extra).await, 400, &format!("{key} {value}"));
    }
    assert_error(&chat(&client, json!({ "max_tokens": 5, "max_completion_tokens": 6 })).await, 400, "both limits, different");
    for text in ["", "{", "[]", "nonsense", "{\"model\": 5}", "\u{0}"] {
        assert_error(&client.post_text("/v1/chat/completions", text.to_owned()).await, 400, text);
    }
    let deep = "[".repeat(100_000);
    assert_error(&client.post_text("/v1/completions", deep).await, 400, "deep nesting");
    assert_error(&client.get("/v1/nonsense").await, 404, "unknown path");
    assert_error(&client.get("/v1/models/nonsense").await, 404, "unknown model");
    assert!(chat(&client, json!({ "max_tokens": null })).await.status == 200);
    assert!(chat(&client, json!({ "max_tokens": 1_000_000_000_000u64 })).await.status < 500, "clamped or refused");
    assert_eq!(chat(&client, json!({ "some_future_field": { "x": 1 } })).await.status, 200, "unknown fields are ignored");
    let forced =
        json!({ "model": "any", "prompt": [5], "max_tokens": 3, "temperature": 0, "logit_bias": { "77": 100 }, "return_token_ids": true });
    let answer = client.post("/v1/completions", &forced).await;
    assert_eq!(answer.body["choices"][0]["token_ids"], json!([77, 77, 77]), "+100 forces a token");
    assert_eq!(chat(&client, json!({})).await.status, 200);
}

/// T-11: stop strings across token boundaries: stream, non-stream and the cut text agree, and nothing of the stop leaks.
#[tokio::test]
async fn t11_stop_strings_cut_alike_everywhere() {
    let cluster = demo(&["--dtype", "f32"]);
    let client = cluster.client();
    let body = json!({ "model": "any", "messages": [{ "role": "user", "content": "Write a numbered list of four planets." }], "temperature": 0,
                       "max_tokens": 100 });
    let whole = client.post("/v1/chat/completions", &body).await.body["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
    assert!(whole.contains("Earth"), "{whole}");
    let stops = [
        json!("Earth"),
        json!("arth\n4"),
        json!(". Ve"),
        json!("\n"),
        json!(["Mars", "Ear"]),
        json!(["enus", "Venus"]),
        json!("not there"),
    ];
    for stop in stops {
        let strings: Vec<&str> =
            stop.as_str().map_or_else(|| stop.as_array().unwrap().iter().map(|s| s.as_str().unwrap()).collect(), |s| vec![s]);
        let cut = strings.iter().filter_map(|s| whole.find(s)).min();
        let want = &whole[..cut.unwrap_or(whole.len())];
        let mut body = body.clone();
        body["stop"] = stop.clone();
        let answer = client.post("/v1/chat/completions", &body).await;
        assert_eq!(answer.body["choices"][0]["message"]["content"], want, "{stop}");
        assert_eq!(answer.body["choices"][0]["finish_reason"], "stop");
        let stream = client.stream("/v1/chat/completions", &body).await;
        assert_eq!(stream.text(0), want, "{stop} streamed");
        assert_eq!(stream.finish_reasons(0), ["stop"]);
    }
    let emoji =
        json!({ "model": "any", "messages": [{ "role": "user", "content": "Repeat: 안녕하세요 🤖🎉" }], "temperature": 0, "stop": "🎉" });
    assert_eq!(client.stream("/v1/chat/completions", &emoji).await.text(0), "안녕하세요 🤖");
}

/// T-14: characters over several tokens never become U+FFFD, whole or streamed, cut at any max_tokens.
#[tokio::test]
async fn t14_multi_byte_characters_survive_streaming() {
    let cluster = demo(&["--dtype", "f32"]);
    let client = cluster.client();
    for max_tokens in 9..24 {
        let body = json!({ "model": "any", "messages": [{ "role": "user", "content": "Repeat: 안녕하세요 🤖🎉" }], "temperature": 0, "max_tokens": max_tokens });
        let whole = client.post("/v1/chat/completions", &body).await;
        let text = whole.body["choices"][0]["message"]["content"].as_str().unwrap_or_default().to_owned();
        let stream = client.stream("/v1/chat/completions", &body).await;
        assert_eq!(stream.text(0), text, "max_tokens {max_tokens}");
        assert!("안녕하세요 🤖🎉".starts_with(text.trim_end_matches('\u{fffd}')), "max_tokens {max_tokens}: {text:?}");
        assert!(text.matches('\u{fffd}').count() <= 1, "a cut tail shows at most once: {text:?}");
    }
}

/// T-15, T-16: one finish reason, usage only on request, then [DONE].
#[tokio::test]
async fn t15_t16_stream_framing_usage_and_choices() {
    let cluster = demo(&["--dtype", "f32"]);
    let client = cluster.client();
    let base = json!({ "model": "any", "messages": [{ "role": "user", "content": "What is 2 + 4?" }], "temperature": 0, "max_tokens": 60 });
    for (options, wanted) in [
        (None, false),
        (Some(json!({})), false),
        (Some(json!({ "include_usage": false })), false),
        (Some(json!({ "include_usage": true })), true),
    ] {
        for n in [1, 3] {
            let mut body = base.clone();
            body["n"] = n.into();
            if let Some(options) = &options {
                body["stream_options"] = options.clone();
            }
            let stream = client.stream("/v1/chat/completions", &body).await;
            assert!(stream.done);
            let id = &stream.chunks[0]["id"];
            assert!(
                stream
                    .chunks
                    .iter()
                    .all(|c| c["id"] == *id && c["object"] == "chat.completion.chunk" && c["created"] == stream.chunks[0]["created"])
            );
            for choice in 0..n {
                assert_eq!(stream.finish_reasons(choice), ["stop"], "choice {choice} of {n}");
                assert!(stream.text(choice).contains('6'), "{}", stream.text(choice));
            }
            assert_eq!(stream.chunks[0]["choices"][0]["delta"]["role"], "assistant");
            let usage: Vec<&Value> = stream.chunks.iter().filter(|c| c["choices"].as_array().is_some_and(Vec::is_empty)).collect();
            assert_eq!(usage.len(), usize::from(wanted), "{options:?}");
            if wanted {
                assert!(std::ptr::eq(usage[0], stream.chunks.last().unwrap()), "usage comes last");
                let plain = client
                    .post("/v1/chat/completions", &{
                        let mut b = body.clone();
                        b.as_object_mut().unwrap().remove("stream_options");
                        b
                    })
                    .await;
                assert_eq!(usage[0]["usage"]["completion_tokens"], plain.body["usage"]["completion_tokens"]);
                assert_eq!(usage[0]["usage"]["prompt_tokens"], plain.body["usage"]["prompt_tokens"]);
                assert!(stream.chunks[..stream.chunks.len() - 1].iter().all(|c| c.get("usage").is_some_and(Value::is_null)));
            } else {
                assert!(stream.chunks.iter().all(|c| c.get("usage").is_none_or(Value::is_null)));
            }
        }
    }
}

/// T-18: a client that goes away frees everything, streaming or not, queued, in prefill or in decode.
#[tokio::test]
async fn t18_a_vanished_client_frees_its_slot_in_every_phase() {
    let cluster = demo(&["--max-batch", "1", "--dtype", "f32"]);
    let client = cluster.client();
    let idle = async || {
        for metric in ["tandem_requests_running", "tandem_requests_waiting", "tandem_kv_cache_usage_ratio"] {
            client.wait_metric(metric, &[], Duration::from_secs(10), |v| v == 0.0).await;
        }
    };
    let long = json!({ "model": "any", "prompt": vec![5; 900], "max_tokens": 3000, "temperature": 0, "ignore_eos": true });
    idle().await;
    for (phase, wait) in [("prefill", Duration::from_millis(1)), ("decode", Duration::from_millis(600))] {
        for streaming in [true, false] {
            let mut body = long.clone();
            body["stream"] = streaming.into();
            // Abandoning the request future closes its connection.
            let gone = tokio::time::timeout(wait, async { client.raw("/v1/completions", &body).await.bytes().await }).await;
            assert!(gone.is_err(), "{phase}: it had not finished");
            idle().await;
        }
    }
    // In the queue, behind a running one.
    let mut running = client.live("/v1/completions", &long).await;
    assert!(running.read(2).await);
    for streaming in [true, false] {
        let mut body = long.clone();
        body["stream"] = streaming.into();
        let queued = tokio::time::timeout(Duration::from_millis(200), async { client.raw("/v1/completions", &body).await.bytes().await });
        assert!(queued.await.is_err());
        client.wait_metric("tandem_requests_waiting", &[], Duration::from_secs(10), |v| v == 0.0).await;
    }
    drop(running);
    idle().await;
    let started = Instant::now();
    assert_eq!(chat(&client, json!({})).await.status, 200, "the slot is free again after {:?}", started.elapsed());
}

#[tokio::test]
async fn a_full_queue_is_429_with_retry_after() {
    let cluster = demo(&["--max-batch", "1", "--max-queue", "1"]);
    let client = cluster.client();
    let long = json!({ "model": "any", "prompt": [5], "max_tokens": 3500, "temperature": 0, "ignore_eos": true });
    let mut running = client.live("/v1/completions", &long).await;
    assert!(running.read(1).await);
    let waiting = client.live("/v1/completions", &long);
    let refused = async {
        client.wait_metric("tandem_requests_waiting", &[], Duration::from_secs(10), |v| v == 1.0).await;
        client.post("/v1/completions", &long).await
    };
    let (_waiting, refused) = tokio::join!(waiting, refused);
    assert_error(&refused, 429, "queue full");
    assert!(refused.headers["retry-after"].to_str().unwrap().parse::<u64>().is_ok());
}

#[tokio::test]
async fn logprobs_echo_seeds_and_ids() {
    let cluster = demo(&["--dtype", "f32"]);
    let client = cluster.client();
    let answer = chat(&client, json!({ "logprobs": true, "top_logprobs": 3 })).await;
    let content = answer.body["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(content.len() as u64, answer.body["usage"]["completion_tokens"].as_u64().unwrap());
    for token in content {
        assert_eq!(token["top_logprobs"].as_array().unwrap().len(), 3);
        assert_eq!(token["top_logprobs"][0]["logprob"], token["logprob"], "greedy is the best");
        assert!(token["logprob"].as_f64().unwrap() <= 0.0 && token["bytes"].is_array());
    }
    let body = json!({ "model": "any", "prompt": "Hello", "max_tokens": 4, "temperature": 0, "echo": true, "logprobs": 2 });
    let answer = client.post("/v1/completions", &body).await;
    let choice = &answer.body["choices"][0];
    assert!(choice["text"].as_str().unwrap().starts_with("Hello"), "{choice}");
    let logprobs = &choice["logprobs"];
    let n = logprobs["tokens"].as_array().unwrap().len();
    for key in ["token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(logprobs[key].as_array().unwrap().len(), n, "{key}");
    }
    assert!(logprobs["token_logprobs"][0].is_null(), "nothing predicts the first prompt token");

    let sample = json!({ "model": "any", "prompt": "Hello", "max_tokens": 24, "temperature": 1.3, "seed": 11, "n": 2, "ignore_eos": true, "return_token_ids": true });
    let first = client.post("/v1/completions", &sample).await.body;
    let again = client.post("/v1/completions", &sample).await.body;
    assert_eq!(first["choices"], again["choices"], "a seed repeats");
    assert_ne!(first["choices"][0]["token_ids"], first["choices"][1]["token_ids"], "choices differ");
    let mut other = sample.clone();
    other["seed"] = 12.into();
    assert_ne!(client.post("/v1/completions", &other).await.body["choices"], first["choices"]);
    let with_id = client.get("/v1/models").await;
    assert!(with_id.headers.contains_key("x-request-id"));
    assert_eq!(client.get("/version").await.status, 200);
}
