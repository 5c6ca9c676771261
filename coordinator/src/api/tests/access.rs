//! Keys, origins, bounds of headers, the description, and the length of the context in its three spellings.

use std::sync::Arc;

use serde_json::json;

use super::harness::*;
use crate::api::Keys;
use crate::engine::Finish;

#[tokio::test]
async fn keys_guard_what_costs_something() {
    let (addr, worker) = server_with(|p| p.options.keys = Arc::new(Keys::new(&["sk-one".into(), "sk-two".into()], None).unwrap())).await;
    answer_all(worker, |g| speak(g, &[100], 1, Finish::Stop { id: EOS[0] }));
    let body = chat(json!({})).to_string();
    for header in
        ["", "authorization: Bearer sk-three\r\n", "authorization: sk-one\r\n", "authorization: Basic sk-one\r\n", "x-api-key: sk-on\r\n"]
    {
        let reply = send(addr, "POST", "/v1/chat/completions", header, &body).await;
        assert_eq!((reply.status, reply.error()["code"].as_str()), (401, Some("invalid_api_key")), "{header}");
        assert_eq!(reply.header("www-authenticate"), Some("Bearer"));
        let reply = send(addr, "POST", "/v1/messages", header, "{}").await;
        assert_eq!((reply.status, reply.json()["error"]["type"].as_str()), (401, Some("authentication_error")));
        assert_eq!(reply.json()["request_id"].as_str(), reply.header("x-request-id"));
    }
    for header in ["authorization: Bearer sk-one\r\n", "authorization: bearer sk-two\r\n", "x-api-key: sk-two\r\n"] {
        assert_eq!(send(addr, "POST", "/v1/chat/completions", header, &body).await.status, 200, "{header}");
    }
    for path in ["/v1/models", "/v1/stats", "/v1/nowhere"] {
        assert_eq!(get(addr, path).await.status, 401, "{path}");
    }
    for path in ["/livez", "/readyz", "/health", "/version", "/metrics", "/openapi.json", "/"] {
        assert_eq!(get(addr, path).await.status, 200, "{path}");
    }
    assert_eq!(send(addr, "POST", "/tokenize", "", r#"{"prompt": "x"}"#).await.status, 401);
}

#[tokio::test]
async fn origins_are_none_unless_named() {
    let ask = "origin: https://a.example\r\naccess-control-request-method: POST\r\naccess-control-request-headers: authorization,content-type\r\n";
    let (addr, _worker) = server().await;
    let reply = send(addr, "OPTIONS", "/v1/chat/completions", ask, "").await;
    assert_eq!((reply.status, reply.header("access-control-allow-origin")), (405, None));
    let (addr, _worker) = server_with(|p| {
        p.options.cors_origins = vec!["https://a.example".parse().unwrap()];
        p.options.keys = Arc::new(Keys::new(&["k".into()], None).unwrap());
    })
    .await;
    let reply = send(addr, "OPTIONS", "/v1/chat/completions", ask, "").await;
    assert_eq!((reply.status, reply.header("access-control-allow-origin")), (200, Some("https://a.example")));
    let other = send(addr, "OPTIONS", "/v1/chat/completions", &ask.replace("a.example", "b.example"), "").await;
    assert_eq!(other.header("access-control-allow-origin"), None);
    let (addr, _worker) = server_with(|p| p.options.cors_origins = vec!["*".parse().unwrap()]).await;
    let reply = send(addr, "GET", "/v1/models", "origin: https://b.example\r\n", "").await;
    assert_eq!(reply.header("access-control-allow-origin"), Some("*"));
}

#[tokio::test]
async fn headers_are_bounded() {
    let (addr, _worker) = server().await;
    let large = format!("x-large: {}\r\n", "x".repeat(65 << 10));
    let reply = send(addr, "GET", "/v1/models", &large, "").await;
    assert_eq!((reply.status, reply.error()["code"].as_str()), (431, Some("headers_too_large")));
    let many: String = (0..200).map(|i| format!("x-{i}: y\r\n")).collect();
    assert_eq!(send(addr, "GET", "/v1/models", &many, "").await.status, 431);
    assert_eq!(get(addr, "/v1/models").await.status, 200);
}

#[tokio::test]
async fn the_context_length_has_three_spellings() {
    let (addr, _worker) = server().await;
    for model in [get(addr, "/v1/models").await.json()["data"][1].clone(), get(addr, "/v1/models/org/alias").await.json()] {
        assert_eq!(model["id"], "org/alias");
        for name in ["max_model_len", "context_length", "context_window"] {
            assert_eq!(model[name], LIMIT, "{name}");
        }
    }
    let document = get(addr, "/openapi.json").await;
    assert_eq!((document.status, document.json()["openapi"].as_str()), (200, Some("3.1.0")));
}

/// T-17: a sign of life after a second, headers before any token, and each face in its own way.
#[tokio::test]
async fn t17_silence_is_broken_from_the_first_second() {
    use tokio::io::AsyncReadExt;
    let cases = [
        ("/v1/chat/completions", chat(json!({"stream": true})), ": keep-alive\n\n"),
        (
            "/v1/messages",
            json!({"model": "demo", "max_tokens": 5, "stream": true, "messages": [{"role": "user", "content": "x"}]}),
            "event: ping\n",
        ),
        ("/v1/responses", json!({"model": "demo", "stream": true, "input": "x"}), ": keep-alive\n\n"),
    ];
    let (addr, mut worker) = server_with(|p| p.options.keep_alive = std::time::Duration::from_secs(3600)).await;
    for (path, body, sign) in cases {
        let mut stream = open(addr, path, &body).await;
        let held = worker.next().await.unwrap();
        let mut seen = String::new();
        while !seen.contains(sign) {
            let mut buffer = [0; 4096];
            let n = tokio::time::timeout(std::time::Duration::from_secs(30), stream.read(&mut buffer)).await.expect("a sign").unwrap();
            assert!(n > 0, "{path}: {seen}");
            seen.push_str(std::str::from_utf8(&buffer[..n]).unwrap());
        }
        assert!(seen.starts_with("HTTP/1.1 200 OK"), "{path}: {seen}");
        drop(held);
    }
}
