//! Forms and forced calls on the demo model: whatever the model would rather say, the answer fits, and it does so after a worker's death too.
#![allow(clippy::unwrap_used, reason = "tests")]

use nix::sys::signal::Signal;
use serde_json::{Value, json};
use tandem_tests::{Client, Launch, cluster::send, sse};

const CHAT: &str = "/v1/chat/completions";

fn schema() -> Value {
    json!({
        "type": "object",
        "properties": {
            "city": {"enum": ["Paris", "Oslo", "東京 \"x\""]},
            "degrees": {"type": "integer", "minimum": -50, "maximum": 60},
            "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{1,5}$"}, "minItems": 1, "maxItems": 3},
            "sure": {"type": "boolean"},
        },
        "required": ["city", "degrees", "tags", "sure"],
        "additionalProperties": false,
    })
}

/// Whether `text` is of that schema.
fn fits(text: &str) -> bool {
    let Ok(value) = serde_json::from_str::<Value>(text) else { return false };
    let tags = value["tags"].as_array().cloned().unwrap_or_default();
    value.as_object().is_some_and(|o| o.len() == 4)
        && ["Paris", "Oslo", "東京 \"x\""].iter().any(|city| value["city"] == *city)
        && value["degrees"].as_f64().is_some_and(|d| (-50.0..=60.0).contains(&d) && d.fract() == 0.0)
        && (1..=3).contains(&tags.len())
        && tags.iter().all(|t| t.as_str().is_some_and(|t| (1..=5).contains(&t.len()) && t.bytes().all(|b| b.is_ascii_lowercase())))
        && value["sure"].is_boolean()
}

fn ask(text: &str, extra: Value) -> Value {
    let mut body = json!({"model": "any", "messages": [{"role": "user", "content": text}], "max_tokens": 600, "temperature": 0});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

fn form() -> Value {
    json!({"response_format": {"type": "json_schema", "json_schema": {"name": "w", "schema": schema(), "strict": true}}})
}

async fn whole(client: &Client, body: &Value) -> Value {
    let answer = client.post(CHAT, body).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    answer.body
}

fn content(answer: &Value, i: usize) -> String {
    answer["choices"][i]["message"]["content"].as_str().unwrap_or_default().to_owned()
}

/// Calls of a stream: names and joined arguments.
fn calls(stream: &sse::Stream) -> Vec<(String, String)> {
    let mut calls: Vec<(String, String)> = Vec::new();
    for call in stream.chunks.iter().flat_map(|c| c["choices"][0]["delta"]["tool_calls"].as_array().cloned().unwrap_or_default()) {
        if let Some(name) = call["function"]["name"].as_str() {
            calls.push((name.to_owned(), String::new()));
        }
        calls.last_mut().unwrap().1.push_str(call["function"]["arguments"].as_str().unwrap());
    }
    calls
}

/// T-08: every answer fits, with reasoning and without, streamed and whole, sampled and greedy, with n, logprobs, penalties and seeds.
#[tokio::test]
async fn t08_answers_fit_their_form() {
    let cluster = Launch::up().ready();
    let client = cluster.client();
    for (text, extra) in [
        ("Hello!", json!({})),
        ("What is the capital of France?", json!({"reasoning_effort": "none"})),
        ("Tell me a story.", json!({"temperature": 1.2, "seed": 11, "presence_penalty": 0.5, "min_tokens": 5})),
    ] {
        let mut body = ask(text, form());
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        let answer = whole(&client, &body).await;
        assert_eq!(answer["choices"][0]["finish_reason"], "stop", "{answer}");
        assert!(fits(&content(&answer, 0)), "{answer}");
        let reasoning = answer["choices"][0]["message"]["reasoning_content"].as_str().unwrap_or_default();
        assert_eq!(reasoning.is_empty(), body.get("reasoning_effort").is_some(), "the thought itself is free: {answer}");
        let stream = client.stream(CHAT, &body).await;
        assert_eq!(stream.text(0), content(&answer, 0), "streamed equals whole");
    }
    let mut several = ask("Tell me a story.", form());
    several
        .as_object_mut()
        .unwrap()
        .extend(json!({"n": 4, "temperature": 1.5, "seed": 3, "logprobs": true, "top_logprobs": 2}).as_object().unwrap().clone());
    let answer = whole(&client, &several).await;
    for i in 0..4 {
        assert!(fits(&content(&answer, i)), "{answer}");
        assert!(!answer["choices"][i]["logprobs"]["content"].as_array().unwrap().is_empty());
    }

    let plain = |extra: Value| ask("What is 47 + 38?", extra);
    let number = content(&whole(&client, &plain(json!({"guided_regex": "[0-9]{2} apples"}))).await, 0);
    assert!(number.len() == 9 && number.ends_with(" apples") && number[..2].parse::<u32>().is_ok(), "{number}");
    let choice = content(&whole(&client, &plain(json!({"structured_outputs": {"choice": ["yes", "yes, certainly", "никогда"]}}))).await, 0);
    assert!(["yes", "yes, certainly", "никогда"].contains(&choice.as_str()), "{choice}");
    let grammar = "start: item (\", \" item)~1..3\nitem: /[ab]+/ | \"🙂\"\n";
    let list =
        content(&whole(&client, &plain(json!({"guided_grammar": grammar, "temperature": 1.0, "seed": 2, "max_tokens": 300}))).await, 0);
    assert!(list.split(", ").all(|item| item == "🙂" || item.bytes().all(|b| b == b'a' || b == b'b')), "{list}");
    let object = content(&whole(&client, &plain(json!({"response_format": {"type": "json_object"}, "max_tokens": 900}))).await, 0);
    assert!(serde_json::from_str::<Value>(&object).is_ok_and(|v| v.is_object()) || object.starts_with('{'), "{object}");
    let stopped = whole(&client, &plain(json!({"guided_regex": "abc[0-9]END", "stop": "END"}))).await;
    assert!(content(&stopped, 0).starts_with("abc") && content(&stopped, 0).len() == 4, "{stopped}");
    let body = json!({"model": "any", "prompt": "The capital is", "max_tokens": 600, "temperature": 0, "guided_json": schema()});
    let answer = client.post("/v1/completions", &body).await;
    assert!(fits(answer.body["choices"][0]["text"].as_str().unwrap()), "{}", answer.text);
}

/// Forced calls and strict arguments: what is called is declared and fits, on both sides of the wire's faces.
#[tokio::test]
async fn forced_calls_are_calls() {
    let cluster = Launch::up().ready();
    let client = cluster.client();
    let add = json!({"type": "function", "function": {"name": "add", "strict": true, "parameters": {
        "type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer", "minimum": 1, "maximum": 9}, "unit": {"enum": ["m", "km"]}},
        "required": ["a", "b", "unit"], "additionalProperties": false}}});
    let other = json!({"type": "function", "function": {"name": "get_date", "parameters": {"type": "object", "properties": {}}}});
    for choice in [json!("required"), json!({"type": "function", "function": {"name": "add"}})] {
        let body = ask("Hello!", json!({"tools": [add, other], "tool_choice": choice, "parallel_tool_calls": false}));
        let answer = whole(&client, &body).await;
        let message = &answer["choices"][0]["message"];
        assert_eq!(answer["choices"][0]["finish_reason"], "tool_calls", "{answer}");
        let call = &message["tool_calls"][0]["function"];
        let arguments: Value = serde_json::from_str(call["arguments"].as_str().unwrap()).unwrap();
        if call["name"] == "add" {
            assert!(arguments["a"].is_i64() && (1..=9).contains(&arguments["b"].as_i64().unwrap()), "{answer}");
            assert!(["m", "km"].contains(&arguments["unit"].as_str().unwrap()));
        } else {
            assert!(choice == "required" && call["name"] == "get_date", "{answer}");
        }
        let stream = client.stream(CHAT, &body).await;
        assert_eq!(calls(&stream), [(call["name"].as_str().unwrap().to_owned(), call["arguments"].as_str().unwrap().to_owned())]);
    }
    let body = json!({"model": "any", "max_tokens": 600, "temperature": 0, "messages": [{"role": "user", "content": "Hello!"}], "tool_choice": {"type": "tool", "name": "add"},
                      "tools": [{"name": "add", "strict": true, "input_schema": add["function"]["parameters"]}]});
    let answer = client.post("/v1/messages", &body).await;
    assert_eq!((answer.status, answer.body["stop_reason"].as_str()), (200, Some("tool_use")), "{}", answer.text);
    assert!(answer.body["content"][0]["input"]["a"].is_i64(), "{}", answer.text);
}

/// The attention worker dies in the middle of a form: the coordinator's journal brings the same tokens back under the same masks.
#[tokio::test]
async fn a_form_outlives_the_attention_worker() {
    let cluster = Launch::up().args(["--dtype", "f32"]).ready();
    let client = cluster.client();
    let mut body = ask("Tell me a story.", form());
    body["temperature"] = json!(0.9);
    body["seed"] = json!(4);
    let want = content(&whole(&client, &body).await, 0);
    assert!(fits(&want), "{want}");
    for after in [3, 25, 60] {
        let mut live = client.live(CHAT, &body).await;
        let _went_on = live.read(after).await;
        send(cluster.pids("tandem-attn")[0], Signal::SIGKILL);
        let stream = live.finish().await;
        assert_eq!(stream.error(), None);
        assert_eq!(stream.text(0), want, "killed after {after} events");
        // The next kill is of the next process.
        while client.get("/readyz").await.status != 200 {
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    }
}
