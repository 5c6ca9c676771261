//! A server with a scripted worker, and a client that shows exactly what came over the wire.

use std::net::SocketAddr;
use std::sync::Arc;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::api::{ApiParts, Defaults, Model, Options, router, serve};
use crate::engine::{
    Engine, Finish, GenerateRequest, GenerationEvent, Limits, PromptPosition, ScriptedGeneration, ScriptedWorker, TokenEvent, TokenLogprob,
};
use crate::text::fixtures::{byte_token, demo_template, demo_tokenizer};

pub const LIMIT: u32 = 4096;
pub const EOS: [u32; 3] = [1490, 1497, 1499];

/// Starts a server on a free port.
pub async fn server_with(edit: impl FnOnce(&mut ApiParts)) -> (SocketAddr, ScriptedWorker) {
    let limits = Limits { max_seq_len: LIMIT, max_batch: 8, kv_tokens: 100_000 };
    server_within(limits, edit).await
}

pub async fn server_within(limits: Limits, edit: impl FnOnce(&mut ApiParts)) -> (SocketAddr, ScriptedWorker) {
    let (engine, worker) = Engine::scripted(limits);
    let defaults = Defaults { top_p: 0.95, ..Defaults::default() };
    let model = Model {
        names: vec!["demo".into(), "org/alias".into()],
        created: 1,
        fingerprint: "abcdef0123456789".into(),
        vocab: 1536,
        eos_ids: EOS.to_vec(),
        defaults,
        tokenizer: demo_tokenizer(),
        template: Some(Arc::new(demo_template())),
    };
    let mut parts =
        ApiParts { engine, model, options: Options::default(), metrics: Some(Arc::new(|| "# HELP x y\n".to_owned())), stuck: None };
    edit(&mut parts);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let addr = listener.local_addr().unwrap();
    tokio::spawn(serve(listener, router(parts), std::future::pending()));
    (addr, worker)
}

pub async fn server() -> (SocketAddr, ScriptedWorker) {
    server_with(|_| {}).await
}

/// A server whose worker gives every request the same answer: `text` in tokens of one byte, `step` tokens at a time.
pub async fn speaking(text: &str, step: usize, finish: Finish) -> SocketAddr {
    let (addr, worker) = server().await;
    let ids: Vec<u32> = text.bytes().map(byte_token).collect();
    answer_all(worker, move |generation| speak(generation, &ids, step, finish));
    addr
}

/// Runs `script` for each admitted sequence.
pub fn answer_all(mut worker: ScriptedWorker, script: impl Fn(&ScriptedGeneration) + Send + 'static) {
    tokio::spawn(async move {
        while let Some(generation) = worker.next().await {
            script(&generation);
        }
    });
}

/// Sends `ids` as an engine would: within `max_tokens`, with whatever logprobs were asked for.
pub fn speak(generation: &ScriptedGeneration, ids: &[u32], step: usize, finish: Finish) {
    let request = &generation.request;
    generation.send(GenerationEvent::Started { cached_tokens: Some(1) });
    if let Some(top) = request.prompt_logprobs {
        let positions = request.prompt_ids[1..].iter().map(|&id| PromptPosition { actual: logprob(id), top: tops(top) }).collect();
        generation.send(GenerationEvent::PromptLogprobs(positions));
    }
    let most = request.max_tokens as usize;
    let events = tokens(&ids[..ids.len().min(most)], request);
    for chunk in events.chunks(step) {
        generation.send(GenerationEvent::Tokens(chunk.to_vec()));
    }
    let reason = if ids.len() >= most { Finish::Length } else { finish };
    generation.send(GenerationEvent::Finished { reason });
}

pub fn tokens(ids: &[u32], request: &GenerateRequest) -> Vec<TokenEvent> {
    let event = |(i, &id): (usize, &u32)| TokenEvent {
        id,
        index: i as u32,
        logprob: request.logprobs.map(|_| logprob(id)),
        top: request.logprobs.map_or(Vec::new(), tops),
    };
    ids.iter().enumerate().map(event).collect()
}

pub fn logprob(id: u32) -> TokenLogprob {
    TokenLogprob { id, logprob: -0.5, rank: 2 }
}

fn tops(n: u32) -> Vec<TokenLogprob> {
    (0..n).map(|i| TokenLogprob { id: 30 + i, logprob: -0.25 - i as f32, rank: i + 1 }).collect()
}

/// One answer as it came.
#[derive(Debug)]
pub struct Reply {
    pub status: u16,
    pub head: String,
    pub body: String,
}

impl Reply {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().find_map(|line| line.split_once(": ").filter(|(n, _)| n.eq_ignore_ascii_case(name)).map(|(_, v)| v))
    }

    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.body))
    }

    /// The error object, after checking that its shape is OpenAI's.
    pub fn error(&self) -> Value {
        let error = self.json()["error"].clone();
        let keys: Vec<&String> = error.as_object().unwrap().keys().collect();
        assert_eq!(keys, ["message", "type", "param", "code"], "{}", self.body);
        assert!(error["message"].is_string() && error["type"].is_string());
        error
    }

    /// The stream's chunks, after checking its framing: only `data:` lines and comments, `[DONE]` last unless an error is.
    pub fn chunks(&self) -> Vec<Value> {
        assert_eq!(self.status, 200, "{}", self.body);
        assert!(self.header("content-type").unwrap().starts_with("text/event-stream"));
        assert!(self.body.ends_with("\n\n"));
        let lines: Vec<&str> = self.body.split("\n\n").filter(|l| !l.is_empty() && !l.starts_with(':')).collect();
        let mut chunks = Vec::new();
        for (i, line) in lines.iter().enumerate() {
            assert!(!line.contains('\n'), "one line per event: {line:?}");
            let data = line.strip_prefix("data: ").unwrap_or_else(|| panic!("no data line: {line:?}"));
            if data == "[DONE]" {
                assert_eq!(i + 1, lines.len(), "[DONE] is the last event");
            } else {
                chunks.push(serde_json::from_str(data).unwrap());
            }
        }
        let failed = chunks.last().is_some_and(|c: &Value| c.get("error").is_some());
        assert_eq!(lines.last() != Some(&"data: [DONE]"), failed, "{}", self.body);
        chunks
    }
}

/// Opens a connection and sends a POST without reading the answer.
pub async fn open(addr: SocketAddr, path: &str, body: &Value) -> TcpStream {
    let body = body.to_string();
    let mut stream = TcpStream::connect(addr).await.unwrap();
    let head = format!("POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n", body.len());
    stream.write_all((head + &body).as_bytes()).await.unwrap();
    stream
}

/// Sends raw bytes and reads until the server closes.
pub async fn raw(addr: SocketAddr, request: &[u8]) -> Reply {
    let mut stream = TcpStream::connect(addr).await.unwrap();
    stream.write_all(request).await.unwrap();
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).await.unwrap();
    let text = String::from_utf8(bytes).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    let body = if head.to_ascii_lowercase().contains("transfer-encoding: chunked") { unchunk(body) } else { body.to_owned() };
    Reply { status, head: head.to_owned(), body }
}

fn unchunk(mut text: &str) -> String {
    let mut out = String::new();
    while let Some((size, rest)) = text.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).unwrap();
        out.push_str(&rest[..size]);
        text = &rest[size + 2..];
        if size == 0 {
            break;
        }
    }
    out
}

pub async fn send(addr: SocketAddr, method: &str, path: &str, headers: &str, body: &str) -> Reply {
    let head = format!("{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{headers}content-length: {}\r\n\r\n", body.len());
    raw(addr, (head + body).as_bytes()).await
}

pub async fn post(addr: SocketAddr, path: &str, body: Value) -> Reply {
    send(addr, "POST", path, "", &body.to_string()).await
}

pub async fn get(addr: SocketAddr, path: &str) -> Reply {
    send(addr, "GET", path, "", "").await
}

/// A chat request with `extra` fields.
pub fn chat(extra: Value) -> Value {
    merged(json!({"model": "demo", "messages": [{"role": "user", "content": "hi"}]}), extra)
}

/// A text completion request with `extra` fields.
pub fn completion(extra: Value) -> Value {
    merged(json!({"model": "demo", "prompt": "hi"}), extra)
}

fn merged(mut base: Value, extra: Value) -> Value {
    for (key, value) in extra.as_object().unwrap() {
        base[key] = value.clone();
    }
    base
}
