//! Tool calls over the wire: shapes, finish reasons, streams that equal the whole, and what reaches the engine.

use serde_json::{Value, json};

use super::harness::*;
use crate::engine::Finish;
use crate::text::fixtures::{byte_token, demo_tokenizer};

const OBSERVATION: Finish = Finish::Stop { id: EOS[2] };
const CALLS: &str = "I look it up.</think>One moment.<tool_call>get_weather<arg_key>city</arg_key><arg_value>Par\"is 🙂</arg_value><arg_key>days</arg_key><arg_value>2</arg_value></tool_call><tool_call>now</tool_call>";

pub fn tools() -> Value {
    json!([
        {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}},
        {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
    ])
}

/// Joins a stream's deltas: content, calls as (id, name, arguments), finish reasons.
fn join(chunks: &[Value]) -> (String, Vec<(String, String, String)>, Vec<String>) {
    let (mut content, mut calls, mut finish) = (String::new(), Vec::new(), Vec::new());
    for choice in chunks.iter().flat_map(|chunk| chunk["choices"].as_array().unwrap()) {
        content.push_str(choice["delta"]["content"].as_str().unwrap_or(""));
        for call in choice["delta"]["tool_calls"].as_array().into_iter().flatten() {
            let index = call["index"].as_u64().unwrap() as usize;
            if let Some(id) = call["id"].as_str() {
                assert_eq!((index, call["type"].as_str()), (calls.len(), Some("function")), "an id begins a call");
                calls.push((id.to_owned(), call["function"]["name"].as_str().unwrap().to_owned(), String::new()));
            } else {
                assert!(call["function"].get("name").is_none(), "a name comes once, whole");
            }
            calls[index].2.push_str(call["function"]["arguments"].as_str().unwrap());
        }
        finish.extend(choice["finish_reason"].as_str().map(str::to_owned));
    }
    (content, calls, finish)
}

/// T-15, T-20, T-23, T-24 over the wire.
#[tokio::test]
async fn t15_t20_calls_are_objects_streamed_or_not() {
    for step in [1, 5, 1000] {
        let addr = speaking(CALLS, step, OBSERVATION).await;
        let whole = post(addr, "/v1/chat/completions", chat(json!({"tools": tools()}))).await.json();
        let (choice, message) = (&whole["choices"][0], &whole["choices"][0]["message"]);
        assert_eq!((choice["finish_reason"].as_str(), message["content"].as_str()), (Some("tool_calls"), Some("One moment.")));
        assert_eq!(message["reasoning_content"], "I look it up.");
        let calls: Vec<(&str, &str)> = message["tool_calls"]
            .as_array()
            .unwrap()
            .iter()
            .map(|call| {
                assert!(call["id"].as_str().unwrap().starts_with("call_") && call["type"] == "function");
                (call["function"]["name"].as_str().unwrap(), call["function"]["arguments"].as_str().unwrap())
            })
            .collect();
        assert_eq!(calls, [("get_weather", r#"{"city":"Par\"is 🙂","days":2}"#), ("now", "{}")]);

        let body = chat(json!({"tools": tools(), "stream": true, "stream_options": {"include_usage": true}}));
        let mut chunks = post(addr, "/v1/chat/completions", body).await.chunks();
        assert_eq!(chunks.pop().unwrap()["usage"], whole["usage"], "the usage chunk");
        let (content, streamed, finish) = join(&chunks);
        assert_eq!((content.as_str(), finish.as_slice()), ("One moment.", &["tool_calls".to_owned()][..]));
        let streamed: Vec<(&str, &str)> = streamed.iter().map(|(_, name, arguments)| (name.as_str(), arguments.as_str())).collect();
        assert_eq!(streamed, calls);
    }
    let addr = speaking("</think><tool_call>now</tool_call>", 3, OBSERVATION).await;
    let message = post(addr, "/v1/chat/completions", chat(json!({"tools": tools()}))).await.json()["choices"][0]["message"].clone();
    assert_eq!((&message["content"], message["tool_calls"].as_array().unwrap().len()), (&Value::Null, 1));
    let message = post(addr, "/v1/chat/completions", chat(json!({}))).await.json()["choices"][0]["message"].clone();
    assert_eq!(message["content"], "<tool_call>now</tool_call>", "nothing declared, nothing called");
}

#[tokio::test]
async fn choices_reach_prompt_and_sampler() {
    let (addr, mut worker) = server().await;
    let named = json!({"type": "function", "function": {"name": "now"}});
    // tool_choice, whether tools are shown, what the sampler is held to.
    let cases = [
        (json!(null), true, None),
        (json!("auto"), true, None),
        (json!("none"), false, None),
        (json!("required"), true, Some("get_weather")),
        (named, true, Some("now")),
    ];
    for (choice, shown, held) in cases {
        let reply = tokio::spawn(post(addr, "/v1/chat/completions", chat(json!({"tools": tools(), "tool_choice": choice}))));
        let generation = worker.next().await.unwrap();
        let prompt = demo_tokenizer().decode(&generation.request.prompt_ids, false);
        assert_eq!(prompt.contains("\"get_weather\""), shown, "{choice}: {prompt}");
        let guide = generation.request.guide.clone();
        assert_eq!(guide.is_some(), held.is_some(), "{choice}");
        if let (Some(guide), Some(name)) = (guide, held) {
            assert_eq!(guide.after, "</think>");
            assert!(guide.grammar.contains(name) && guide.grammar.contains("get_weather") == (name == "get_weather"), "{}", guide.grammar);
        }
        let ids: Vec<u32> = "</think><tool_call>now</tool_call><tool_call>now</tool_call>".bytes().map(byte_token).collect();
        speak(&generation, &ids, 1, OBSERVATION);
        let message = reply.await.unwrap().json()["choices"][0]["message"].clone();
        let calls = message["tool_calls"].as_array().map_or(0, Vec::len);
        assert_eq!(
            calls,
            match choice {
                Value::String(ref none) if none == "none" => 0,
                Value::Object(_) => 1,
                _ => 2,
            },
            "{choice}"
        );
    }
    // One call ends the answer, and the sequence, where parallel calls are not wanted.
    let reply = tokio::spawn(post(addr, "/v1/chat/completions", chat(json!({"tools": tools(), "parallel_tool_calls": false}))));
    let mut generation = worker.next().await.unwrap();
    let ids: Vec<u32> = "</think><tool_call>now</tool_call><tool_call>".bytes().map(byte_token).collect();
    generation.send(crate::engine::GenerationEvent::Tokens(tokens(&ids, &generation.request)));
    generation.cancelled().await;
    assert_eq!(reply.await.unwrap().json()["choices"][0]["finish_reason"], "tool_calls");
}

/// Forms reach the sampler, whatever field asks for them, and hold behind the reasoning.
#[tokio::test]
async fn forms_reach_the_sampler() {
    let (addr, mut worker) = server().await;
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false});
    let forms = [
        json!({"response_format": {"type": "json_object"}}),
        json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": true}}}),
        json!({"guided_regex": "[0-9]+"}),
        json!({"structured_outputs": {"choice": ["a", "b"]}}),
        json!({"guided_grammar": "start: \"a\" | \"b\""}),
    ];
    for form in forms {
        for (path, body, after) in
            [("/v1/chat/completions", chat(form.clone()), "</think>"), ("/v1/completions", completion(form.clone()), "")]
        {
            let reply = tokio::spawn(post(addr, path, body));
            let generation = worker.next().await.unwrap();
            let guide = generation.request.guide.clone().unwrap();
            assert_eq!(guide.after, after, "{form}");
            speak(&generation, &"</think>{\"a\": \"<think>\"}".bytes().map(byte_token).collect::<Vec<_>>(), 4, OBSERVATION);
            let choice = reply.await.unwrap().json()["choices"][0].clone();
            if path.contains("chat") {
                assert_eq!(choice["message"]["content"], "{\"a\": \"<think>\"}", "tags inside the form are text");
            }
        }
    }
    let off = chat(json!({"response_format": {"type": "json_object"}, "reasoning_effort": "none"}));
    let reply = tokio::spawn(post(addr, "/v1/chat/completions", off));
    let generation = worker.next().await.unwrap();
    assert_eq!(generation.request.guide.as_ref().unwrap().after, "", "no reasoning to wait for");
    speak(&generation, &[100], 1, OBSERVATION);
    assert_eq!(reply.await.unwrap().status, 200);
}
