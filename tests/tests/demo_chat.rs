//! The embedded demo model through `/v1/chat/completions`: its goldens hold and its answers make sense.
#![allow(clippy::unwrap_used, reason = "tests")]

use serde_json::{Value, json};
use tandem_tests::{Client, Launch, golden::fixtures};

async fn ask(client: &Client, messages: Value, extra: &[(&str, Value)]) -> (Value, tandem_tests::sse::Stream) {
    let mut body = json!({ "model": "any", "messages": messages, "temperature": 0, "max_tokens": 200 });
    for (key, value) in extra {
        body[*key] = value.clone();
    }
    let answer = client.post("/v1/chat/completions", &body).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    let stream = client.stream("/v1/chat/completions", &body).await;
    let message = answer.body["choices"][0]["message"].clone();
    assert_eq!(stream.text(0), message["content"].as_str().unwrap_or_default(), "streamed text equals the whole");
    assert_eq!(stream.reasoning(0), message["reasoning_content"].as_str().unwrap_or_default(), "streamed reasoning equals the whole");
    assert_eq!(stream.finish_reasons(0), [answer.body["choices"][0]["finish_reason"].as_str().unwrap()]);
    assert!(stream.done);
    (answer.body, stream)
}

fn user(text: &str) -> Value {
    json!([{ "role": "user", "content": text }])
}

#[tokio::test]
async fn every_golden_case_is_rendered_tokenised_and_answered_as_the_reference_does() {
    let cluster = Launch::up().args(["--dtype", "f32"]).ready();
    let client = cluster.client();
    let gold: Value = serde_json::from_str(&std::fs::read_to_string(fixtures().join("gold/demo.json")).unwrap()).unwrap();
    for case in gold["cases"].as_array().unwrap() {
        let name = case["name"].as_str().unwrap();
        let stop = usize::try_from(case["stop_index"].as_u64().unwrap()).unwrap();

        let rendered = client.post("/tokenize", &json!({ "model": "any", "prompt": case["rendered"], "add_special_tokens": false })).await;
        assert_eq!(rendered.body["tokens"], case["prompt_ids"], "{name}: tokens of the rendered prompt");
        let back = client.post("/detokenize", &json!({ "model": "any", "tokens": case["prompt_ids"] })).await;
        assert_eq!(back.body["prompt"], case["rendered"], "{name}: and back");

        let mut body =
            json!({ "model": "any", "messages": case["messages"], "temperature": 0, "max_tokens": 300, "return_token_ids": true });
        for (key, value) in case["kwargs"].as_object().unwrap() {
            body[key] = value.clone();
        }
        let answer = client.post("/v1/chat/completions", &body).await;
        assert_eq!(answer.status, 200, "{name}: {}", answer.text);
        assert_eq!(answer.body["prompt_token_ids"], case["prompt_ids"], "{name}: the template");
        let calls = case["greedy_text"].as_str().unwrap().contains("<tool_call>");
        assert_eq!(answer.body["choices"][0]["finish_reason"], if calls { "tool_calls" } else { "stop" }, "{name}");
        let ids = answer.body["choices"][0]["token_ids"].as_array().unwrap();
        let want = case["greedy_ids"].as_array().unwrap();
        assert_eq!(ids[..stop.min(ids.len())], want[..stop], "{name}: tokens");
        assert!(ids.len() <= stop + 1, "{name}: stops at the stop token");

        let request = json!({ "model": "any", "prompt": case["prompt_ids"], "max_tokens": 64, "temperature": 0, "return_token_ids": true });
        let plain = client.post("/v1/completions", &request).await;
        assert_eq!(plain.body["choices"][0]["token_ids"].as_array().unwrap()[..stop], want[..stop], "{name}: as a completion");
        assert_eq!(
            plain.body["usage"]["prompt_tokens"],
            case["prompt_ids"].as_array().unwrap().len(),
            "{name}: a template's ids get no second start"
        );
    }
}

#[tokio::test]
async fn capitals_sums_languages_and_a_needle_in_the_default_precision() {
    let cluster = Launch::up().ready();
    let client = cluster.client();
    let content = |body: &Value| body["choices"][0]["message"]["content"].as_str().unwrap().to_owned();

    let (body, _) = ask(&client, user("What is the capital of France?"), &[]).await;
    assert!(content(&body).contains("Paris"), "{body}");
    let reasoning = body["choices"][0]["message"]["reasoning_content"].as_str().unwrap();
    assert!(!reasoning.is_empty() && !reasoning.contains("think>"), "{reasoning}");
    assert_eq!(body["choices"][0]["message"]["reasoning"], reasoning);
    assert!(!content(&body).contains("think>"));

    let (body, _) = ask(&client, user("What is 47 + 38?"), &[]).await;
    assert!(content(&body).contains("85"), "{body}");
    // The same with a thought that is closed after four tokens, in words and in JSON.
    let form = json!({ "type": "json_object" });
    for more in [json!({ "thinking_token_budget": 4 }), json!({ "thinking_token_budget": 4, "response_format": form })] {
        let mut body = json!({ "model": "any", "messages": user("What is 47 + 38?"), "temperature": 0, "max_tokens": 60 });
        more.as_object().unwrap().iter().for_each(|(key, value)| body[key] = value.clone());
        let answer = client.post("/v1/chat/completions", &body).await;
        assert_eq!(answer.body["usage"]["completion_tokens_details"]["reasoning_tokens"], 5, "with the tag: {}", answer.text);
        let message = &answer.body["choices"][0]["message"];
        assert!(!content(&answer.body).is_empty() && !content(&answer.body).contains("think>"), "{message}");
        assert!(!message["reasoning_content"].as_str().unwrap().is_empty());
    }
    let (body, _) = ask(&client, user("日本的首都是哪里？"), &[]).await;
    assert!(content(&body).contains("东京"), "{body}");
    let (body, _) = ask(&client, user("Repeat: 안녕하세요 🤖🎉"), &[]).await;
    assert_eq!(content(&body), "안녕하세요 🤖🎉");
    let (body, _) = ask(&client, user("Who are you?"), &[("reasoning_effort", json!("low"))]).await;
    assert!(content(&body).contains("demo model"), "{body}");
    assert_eq!(body["choices"][0]["message"]["reasoning_content"].as_str().unwrap_or_default(), "");

    let gold: Value = serde_json::from_str(&std::fs::read_to_string(fixtures().join("gold/demo.json")).unwrap()).unwrap();
    let needle = gold["cases"].as_array().unwrap().iter().find(|case| case["name"] == "needle").unwrap();
    assert!(needle["prompt_ids"].as_array().unwrap().len() > 500, "selection drops pools here");
    let (body, _) = ask(&client, needle["messages"].clone(), &[]).await;
    assert!(content(&body).contains("59428"), "{body}");
}

/// T-32: concurrent non-ASCII requests equal their serial runs, token by token.
#[tokio::test]
async fn t32_four_emoji_walls_at_once_equal_their_serial_runs() {
    let cluster = Launch::up().ready();
    let client = cluster.client();
    let texts = ["Repeat: 🤖🎉🚀 안녕하세요", "Repeat: 日本語テスト 🎉", "Repeat: 🎉🎉🎉🤖🤖🤖", "Repeat: Привет 🌍 мир"];
    let one = |text: &'static str| {
        let client = client.clone();
        async move {
            let body = json!({ "model": "any", "messages": user(text), "temperature": 0, "max_tokens": 80, "return_token_ids": true });
            let answer = client.post("/v1/chat/completions", &body).await;
            assert_eq!(answer.status, 200, "{}", answer.text);
            (answer.body["choices"][0]["token_ids"].clone(), answer.body["choices"][0]["message"]["content"].clone())
        }
    };
    let mut serial = Vec::new();
    for text in texts {
        serial.push(one(text).await);
    }
    for _ in 0..3 {
        let together = futures::future::join_all(texts.iter().map(|text| one(text))).await;
        assert_eq!(together, serial);
    }
}

/// T-20: each id of the eos set ends a generation, and none of them is text.
#[tokio::test]
async fn t20_every_end_token_stops() {
    let cluster = Launch::up().args(["--dtype", "f32"]).ready();
    let client = cluster.client();
    for id in [1490, 1497, 1499] {
        let body = json!({ "model": "any", "prompt": "Hello", "max_tokens": 20, "temperature": 0, "logit_bias": { id.to_string(): 100 },
                           "return_token_ids": true });
        let answer = client.post("/v1/completions", &body).await;
        assert_eq!(answer.status, 200, "{}", answer.text);
        let choice = &answer.body["choices"][0];
        assert_eq!((choice["finish_reason"].as_str(), choice["text"].as_str()), (Some("stop"), Some("")), "{choice}");
        let mut body = body.clone();
        body["ignore_eos"] = true.into();
        let answer = client.post("/v1/completions", &body).await;
        assert_eq!(answer.body["choices"][0]["token_ids"].as_array().unwrap().len(), 20, "ignore_eos: {}", answer.text);
    }
}

#[tokio::test]
async fn narrowed_weights_answer_too() {
    let cluster = Launch::up().args(["--attn-fp8", "--kda-fp8", "--mlp-fp8"]).ready();
    let (answer, _) = ask(&cluster.client(), user("What is the capital of France?"), &[]).await;
    assert_eq!(answer["choices"][0]["message"]["content"], "The capital of France is Paris.");
    assert!(
        cluster.stderr().contains("narrowing float weights to FP8 as they are loaded groups=attention, KDA, MLP"),
        "{}",
        cluster.stderr()
    );
}
