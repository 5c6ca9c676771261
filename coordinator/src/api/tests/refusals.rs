//! What is refused, with which status and words; and that the server goes on.

use std::time::Duration;

use serde_json::{Value, json};

use super::harness::*;
use crate::api::ReasoningFields;
use crate::engine::{AdmissionError, ErrorCode, Finish, GenerationError, GenerationEvent, Limits};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

/// Each body must give 400 with that `param` on that path, and the server must still answer.
async fn all_refused(path: &str, cases: Vec<(Value, &str)>) {
    let addr = speaking("ok", 1, Finish::Stop { id: EOS[0] }).await;
    for (body, param) in cases {
        let reply = post(addr, path, body.clone()).await;
        assert_eq!(reply.status, 400, "{body}: {}", reply.body);
        assert!(reply.head.starts_with("HTTP/1.1 400 Bad Request"));
        let error = reply.error();
        assert_eq!(error["type"], "invalid_request_error");
        assert_eq!(error["param"], param, "{body}: {error}");
        assert!(reply.header("x-request-id").is_some());
    }
    assert_eq!(post(addr, CHAT, chat(json!({}))).await.status, 200);
}

/// T-01 and T-03: numbers, phrases, a real 400, and the next request is served.
#[tokio::test]
async fn t01_t03_prompts_that_cannot_fit() {
    let limits = Limits { max_seq_len: 1 << 20, max_batch: 8, kv_tokens: 4096 };
    let (addr, worker) = server_within(limits, |_| {}).await;
    answer_all(worker, |g| speak(g, &[100, 101], 1, Finish::Stop { id: EOS[0] }));
    let ids = |n: usize| vec![7; n];
    for n in [4096, 5000] {
        let reply = post(addr, COMPLETIONS, completion(json!({"prompt": ids(n)}))).await;
        assert!(reply.head.starts_with("HTTP/1.1 400 Bad Request"), "{}", reply.head);
        let error = reply.error();
        assert_eq!((error["type"].as_str(), error["code"].as_str()), (Some("invalid_request_error"), Some("context_length_exceeded")));
        let message = error["message"].as_str().unwrap();
        assert!(message.contains(&format!("prompt is too long: {n} tokens > 4095 maximum")), "{message}");
        assert!(message.contains("maximum context length is 4096"), "{message}");
    }
    let long = "word ".repeat(6000);
    let reply = post(addr, CHAT, json!({"messages": [{"role": "user", "content": long}]})).await;
    assert_eq!((reply.status, reply.error()["code"].as_str()), (400, Some("context_length_exceeded")));
    assert_eq!(post(addr, COMPLETIONS, completion(json!({}))).await.status, 200);
    // Refused by its bytes alone: what no tokenizer has to see.
    let huge = "word ".repeat(200_000);
    let error = post(addr, COMPLETIONS, completion(json!({"prompt": huge}))).await.error();
    let message = error["message"].as_str().unwrap();
    assert!(message.starts_with("prompt is too long: at least ") && message.contains("(1000000 bytes) > 4095 maximum"), "{message}");
    assert_eq!((error["param"].as_str(), error["code"].as_str()), (Some("prompt"), Some("context_length_exceeded")));
    // The last token that fits is made, and then it is the length that ends it.
    let reply = post(addr, COMPLETIONS, completion(json!({"prompt": ids(4095), "max_tokens": 50}))).await;
    assert_eq!(reply.json()["choices"][0]["finish_reason"], "length");
}

/// T-04.
#[tokio::test]
async fn t04_empty_prompts() {
    all_refused(
        COMPLETIONS,
        vec![
            (completion(json!({"prompt": ""})), "prompt"),
            (completion(json!({"prompt": [""]})), "prompt"),
            (completion(json!({"prompt": []})), "prompt"),
            (completion(json!({"prompt": [[]]})), "prompt"),
            (completion(json!({"prompt": null})), "prompt"),
            (completion(json!({"prompt": ["a", ""]})), "prompt[1]"),
            (completion(json!({"prompt": [1, "a"]})), "prompt"),
            (completion(json!({"prompt": [-1]})), "prompt"),
            (completion(json!({"prompt": [1536]})), "prompt"),
            (completion(json!({"prompt": [[1], [99999]]})), "prompt[1]"),
            (completion(json!({"prompt": 5})), "prompt"),
        ],
    )
    .await;
    all_refused(
        CHAT,
        vec![
            (chat(json!({"messages": []})), "messages"),
            (chat(json!({"messages": null})), "messages"),
            (json!({"model": "demo"}), "messages"),
            (chat(json!({"messages": [{"role": "user", "content": null}]})), "messages[0].content"),
            (chat(json!({"messages": [{"role": "user"}]})), "messages[0].content"),
            (chat(json!({"messages": "hi"})), "messages"),
            (chat(json!({"messages": [5]})), "messages[0]"),
            (
                chat(json!({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]})),
                "messages[0].content[0]",
            ),
        ],
    )
    .await;
}

/// T-05.
#[tokio::test]
async fn t05_odd_max_tokens() {
    for path in [CHAT, COMPLETIONS] {
        let body = |value: Value| if path == CHAT { chat(json!({"max_tokens": value})) } else { completion(json!({"max_tokens": value})) };
        let bad = [json!(0), json!(-1), json!(1.5), json!("5"), json!([]), json!(true)];
        all_refused(path, bad.into_iter().map(|v| (body(v), "max_tokens")).collect()).await;
        let (addr, mut worker) = server().await;
        for value in [json!(1_000_000_000_000_u64), json!(1e12), json!(null), json!(5)] {
            let reply = tokio::spawn(post(addr, path, body(value.clone())));
            let generation = worker.next().await.unwrap();
            let room = LIMIT - generation.request.prompt_ids.len() as u32;
            let want = match (&value, path) {
                (Value::Null, COMPLETIONS) => 16,
                (v, _) if v == &json!(5) => 5,
                _ => room,
            };
            assert_eq!(generation.request.max_tokens, want, "{value} is clamped to what fits");
            speak(&generation, &[100], 1, Finish::Stop { id: EOS[0] });
            assert_eq!(reply.await.unwrap().status, 200);
        }
    }
    all_refused(CHAT, vec![(chat(json!({"max_tokens": 5, "max_completion_tokens": 6})), "max_completion_tokens")]).await;
}

/// T-06, the API's part.
#[tokio::test]
async fn t06_odd_logit_bias() {
    let bias = |key: &str, value: Value| (chat(json!({"logit_bias": {key: value}})), "logit_bias");
    all_refused(
        CHAT,
        vec![
            bias("-1", json!(1)),
            bias("1536", json!(1)),
            bias("154880", json!(1)),
            bias("2147483648", json!(1)),
            bias("abc", json!(1)),
            bias("1.5", json!(1)),
            bias("", json!(1)),
            bias("5", json!(1e9)),
            bias("5", json!(-1e9)),
            bias("5", json!("NaN")),
            bias("5", json!(null)),
            (chat(json!({"logit_bias": [1]})), "logit_bias"),
        ],
    )
    .await;
    let (addr, mut worker) = server().await;
    let reply = tokio::spawn(post(addr, CHAT, chat(json!({"logit_bias": {"5": 100, "7": -100.0}}))));
    let generation = worker.next().await.unwrap();
    assert_eq!(generation.request.sampling.logit_bias, [(5, 100.0), (7, -100.0)]);
    speak(&generation, &[100], 1, Finish::Stop { id: EOS[0] });
    assert_eq!(reply.await.unwrap().status, 200);
    // Not JSON at all, in any field.
    let reply = send(addr, "POST", CHAT, "", r#"{"messages": [{"role": "user", "content": "x"}], "logit_bias": {"5": NaN}}"#).await;
    assert_eq!((reply.status, reply.error()["code"].as_str()), (400, Some("invalid_json")));
}

#[tokio::test]
async fn other_values_out_of_range() {
    let fields = [
        ("temperature", json!(-0.1)),
        ("temperature", json!(2.5)),
        ("temperature", json!("hot")),
        ("top_p", json!(1.5)),
        ("top_p", json!(-1)),
        ("top_k", json!(-2)),
        ("top_k", json!(1.5)),
        ("min_p", json!(2)),
        ("frequency_penalty", json!(3)),
        ("presence_penalty", json!(-3)),
        ("repetition_penalty", json!(0)),
        ("repetition_penalty", json!(1e-60)),
        ("seed", json!("x")),
        ("n", json!(0)),
        ("n", json!(129)),
        ("min_tokens", json!(-1)),
        ("stop", json!("")),
        ("stop", json!(["a", ""])),
        ("stop", json!(5)),
        ("stop", json!(vec!["x"; 65])),
        ("stop_token_ids", json!([5000])),
        ("prompt_logprobs", json!(21)),
        ("prompt_logprobs", json!(-1)),
        ("response_format", json!({"type": "yaml"})),
        ("response_format", json!(5)),
        ("guided_regex", json!("(")),
        ("guided_json", json!({"type": "colour"})),
        ("guided_grammar", json!("start: nothing")),
        ("thinking", json!({"type": "sometimes"})),
        ("stream", json!("yes")),
        ("stream_options", json!({"include_usage": true})),
    ];
    let param = |field: &'static str| if field == "thinking" { "thinking.type" } else { field };
    all_refused(CHAT, fields.iter().map(|(f, v)| (chat(json!({*f: v})), param(f))).collect()).await;
    all_refused(
        CHAT,
        vec![
            (chat(json!({"top_logprobs": 3})), "top_logprobs"),
            (chat(json!({"logprobs": true, "top_logprobs": 21})), "top_logprobs"),
            (chat(json!({"logprobs": 5})), "logprobs"),
            (chat(json!({"tool_choice": "required"})), "tool_choice"),
            (chat(json!({"tools": [{"type": "function"}]})), "tools[0].name"),
            (chat(json!({"response_format": {"type": "json_object"}, "ignore_eos": true})), "ignore_eos"),
            (chat(json!({"reasoning_effort": "enormous"})), "reasoning_effort"),
            (chat(json!({"chat_template_kwargs": {"messages": []}})), "chat_template_kwargs.messages"),
            (chat(json!({"stream": true, "stream_options": {"include_usage": 1}})), "stream_options.include_usage"),
            (chat(json!({"stream": true, "prompt_logprobs": 1})), "prompt_logprobs"),
            (chat(json!({"min_tokens": 9, "max_tokens": 8})), "min_tokens"),
            (chat(json!({"best_of": 2})), "best_of"),
            (chat(json!({"functions": [{"name": "f"}]})), "functions"),
            (chat(json!({"function_call": "auto"})), "function_call"),
            (chat(json!({"modalities": ["text", "audio"]})), "modalities"),
            (chat(json!({"guided_grammar": "start: %json {\"type\": \"integer\"}"})), "guided_grammar"),
        ],
    )
    .await;
    all_refused(
        COMPLETIONS,
        vec![
            (completion(json!({"logprobs": 21})), "logprobs"),
            (completion(json!({"logprobs": true})), "logprobs"),
            (completion(json!({"best_of": 3})), "best_of"),
            (completion(json!({"suffix": "x"})), "suffix"),
            (completion(json!({"prompt": vec!["a"; 100], "n": 2})), "n"),
        ],
    )
    .await;
}

#[tokio::test]
async fn unknown_fields_and_defaults_are_fine() {
    let (addr, mut worker) = server().await;
    let body = chat(
        json!({"user": "me", "bogus": {"x": []}, "metadata": null, "stop": null, "logit_bias": null, "tools": [], "stop_token_ids": []}),
    );
    let reply = tokio::spawn(post(addr, CHAT, body));
    let generation = worker.next().await.unwrap();
    let sampling = &generation.request.sampling;
    assert_eq!((sampling.temperature, sampling.top_p, sampling.top_k), (1.0, 0.95, 0), "from the checkpoint");
    assert_eq!(generation.request.stop_ids, EOS, "T-20: every EOS id of the checkpoint");
    speak(&generation, &[100], 1, Finish::Stop { id: EOS[1] });
    assert_eq!(reply.await.unwrap().status, 200);
    let body = chat(
        json!({"temperature": 0, "top_p": 0, "top_k": -1, "seed": -1, "ignore_eos": true, "stop_token_ids": [9, 8, 9], "min_tokens": 3}),
    );
    let reply = tokio::spawn(post(addr, CHAT, body));
    let generation = worker.next().await.unwrap();
    let sampling = &generation.request.sampling;
    assert_eq!((sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed), (0.0, 1.0, 1, u64::MAX), "the request wins");
    assert_eq!((generation.request.stop_ids.as_slice(), generation.request.min_tokens), (&[8, 9][..], 3));
    speak(&generation, &[100], 1, Finish::Stop { id: 9 });
    assert_eq!(reply.await.unwrap().json()["choices"][0]["stop_reason"], 9);
}

#[tokio::test]
async fn bodies_and_routes() {
    let (addr, _worker) = server_with(|p| p.options.body_limit = 1000).await;
    for body in ["", "{", "[]", "nonsense", "{\"messages\": }", "{} {}", "\u{0}", "null"] {
        let reply = send(addr, "POST", CHAT, "", body).await;
        assert_eq!((reply.status, reply.error()["type"].as_str()), (400, Some("invalid_request_error")), "{body:?}");
    }
    let deep = "[".repeat(900);
    assert_eq!(send(addr, "POST", CHAT, "", &deep).await.status, 400);
    let reply = send(addr, "POST", CHAT, "", &"x".repeat(1001)).await;
    assert_eq!((reply.status, reply.error()["code"].as_str()), (413, Some("request_too_large")));
    let chunked = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n800\r\n{}\r\n0\r\n\r\n",
        "x".repeat(2048)
    );
    assert_eq!(raw(addr, chunked.as_bytes()).await.status, 413);

    let reply = get(addr, "/v1/embeddings").await;
    assert_eq!((reply.status, reply.error()["code"].as_str()), (404, Some("not_found")));
    let reply = get(addr, CHAT).await;
    assert_eq!((reply.status, reply.error()["code"].as_str(), reply.header("allow")), (405, Some("method_not_allowed"), Some("POST")));
    let reply = post(addr, CHAT, chat(json!({"model": "gpt-9"}))).await;
    assert_eq!((reply.status, reply.error()["code"].as_str()), (404, Some("model_not_found")));
    assert_eq!(get(addr, "/v1/models/gpt-9").await.error()["code"], "model_not_found");
    assert_eq!(get(addr, "/v1/models/org/alias").await.json()["id"], "org/alias");
    let list = get(addr, "/v1/models").await.json();
    assert_eq!((list["object"].as_str(), list["data"][0]["id"].as_str()), (Some("list"), Some("demo")));
    assert_eq!(list["data"][1]["max_model_len"], LIMIT);
    assert_eq!(get(addr, "/version").await.json()["version"], env!("CARGO_PKG_VERSION"));
    assert!(get(addr, "/metrics").await.body.contains("# HELP"));
}

#[tokio::test]
async fn request_ids_are_echoed_or_minted() {
    let (addr, _worker) = server().await;
    let with = |id: String| async move { send(addr, "GET", "/v1/models", &format!("x-request-id: {id}\r\n"), "").await };
    assert_eq!(with("abc-1".into()).await.header("x-request-id"), Some("abc-1"));
    for odd in ["x".repeat(257), "a b".into(), "<script>".into()] {
        let reply = with(odd.clone()).await;
        let minted = reply.header("x-request-id").unwrap();
        assert!(minted.starts_with("req-") && minted != odd);
    }
    for path in ["/nowhere", "/livez", CHAT] {
        assert!(get(addr, path).await.header("x-request-id").is_some(), "{path}");
    }
}

#[tokio::test]
async fn admission_refusals_say_when_to_come_back() {
    let (addr, worker) = server().await;
    let cases = [
        (AdmissionError::QueueFull { limit: 4, retry_after: Duration::from_millis(1500) }, 429, "rate_limit_exceeded", Some("2")),
        (AdmissionError::Draining, 503, "server_shutting_down", Some("10")),
        (AdmissionError::NotReady { reasons: vec!["no expert worker for shard 1".into()] }, 503, "server_not_ready", Some("5")),
        (AdmissionError::Invalid { field: "n", message: "n is too large".into() }, 400, "invalid_value", None),
    ];
    for stream in [false, true] {
        for (refusal, status, code, retry) in cases.clone() {
            worker.refuse_next(refusal);
            let reply = post(addr, CHAT, chat(json!({"stream": stream}))).await;
            assert_eq!((reply.status, reply.error()["code"].as_str()), (status, Some(code)), "{}", reply.body);
            assert_eq!(reply.header("retry-after"), retry);
        }
    }
    assert_eq!(get(addr, "/readyz").await.status, 200);
    worker.set_reasons(vec!["shard 1 has no holder".into()]);
    for path in ["/readyz", "/health"] {
        let reply = get(addr, path).await;
        assert_eq!(reply.status, 503);
        assert!(reply.body.contains("shard 1 has no holder"));
    }
    assert_eq!(get(addr, "/livez").await.status, 200, "another process's fault");
    let loading = Limits::default();
    let (addr, worker) = server_within(loading, |_| {}).await;
    worker.set_reasons(vec!["no attention worker".into()]);
    let reply = post(addr, CHAT, chat(json!({}))).await;
    assert_eq!((reply.status, reply.header("retry-after")), (503, Some("5")));
    assert!(reply.error()["message"].as_str().unwrap().contains("no attention worker"));
}

#[tokio::test]
async fn failures_of_running_requests() {
    let cases = [
        (ErrorCode::Invalid, 400),
        (ErrorCode::NonFinite, 500),
        (ErrorCode::Deadline, 504),
        (ErrorCode::ExpertsUnavailable, 503),
        (ErrorCode::Draining, 503),
        (ErrorCode::Internal, 500),
    ];
    for (code, status) in cases {
        let (addr, worker) =
            server_with(|p| p.options.reasoning_fields = ReasoningFields { reasoning_content: false, reasoning: true }).await;
        answer_all(worker, move |g| {
            g.send(GenerationEvent::Tokens(tokens(&[100], &g.request)));
            g.send(GenerationEvent::Error(GenerationError { code, message: "it broke".into() }));
        });
        let reply = post(addr, CHAT, chat(json!({"n": 2}))).await;
        assert_eq!((reply.status, reply.error()["message"].as_str()), (status, Some("it broke")));
        let reply = post(addr, CHAT, chat(json!({"stream": true}))).await;
        let chunks = reply.chunks();
        let last = chunks.last().unwrap();
        assert_eq!(last["error"]["message"], "it broke");
        assert!(last["error"]["code"].is_string() && last["error"].get("param").is_some());
        assert_eq!(chunks[1]["choices"][0]["delta"].as_object().unwrap().keys().collect::<Vec<_>>(), ["reasoning"]);
    }
}
