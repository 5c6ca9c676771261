//! Responses and messages over the wire: the same scripted answer through each face, streamed and whole.

use serde_json::{Value, json};

use super::harness::*;
use super::tools::tools;
use crate::engine::{ErrorCode, Finish, GenerationError, GenerationEvent};
use crate::text::fixtures::{byte_token, demo_tokenizer};

const OBSERVATION: Finish = Finish::Stop { id: EOS[2] };
const STOP: Finish = Finish::Stop { id: EOS[0] };
const ANSWER: &str = "I look.</think>\nOne 🙂 moment.<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome</arg_value><arg_key>days</arg_key><arg_value>2</arg_value></tool_call>\n<tool_call>now</tool_call>";

/// Named events as (name, data), after checking their framing.
fn events(reply: &Reply) -> Vec<(String, Value)> {
    assert_eq!(reply.status, 200, "{}", reply.body);
    assert!(reply.body.ends_with("\n\n"));
    let frames = reply.body.split("\n\n").filter(|frame| !frame.is_empty() && !frame.starts_with(':'));
    frames
        .map(|frame| {
            let (name, data) = frame.split_once('\n').unwrap();
            let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
            let name = name.strip_prefix("event: ").unwrap();
            assert_eq!(data["type"], name, "{frame}");
            (name.to_owned(), data)
        })
        .collect()
}

fn anthropic_tools() -> Value {
    let tool = |tool: &Value| json!({"name": tool["function"]["name"], "description": "d", "input_schema": tool["function"]["parameters"]});
    tools().as_array().unwrap().iter().map(tool).collect()
}

fn messages(extra: Value) -> Value {
    let mut body = json!({"model": "demo", "max_tokens": 500, "messages": [{"role": "user", "content": "hi"}]});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

fn responses(extra: Value) -> Value {
    let mut body = json!({"model": "demo", "input": "hi"});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

/// Ids are minted for each answer.
fn without_ids(mut value: Value) -> Value {
    match &mut value {
        Value::Object(map) => {
            ["id", "call_id", "item_id", "created_at"].iter().for_each(|key| drop(map.remove(*key)));
            map.values_mut().for_each(|v| *v = without_ids(v.take()));
        }
        Value::Array(list) => list.iter_mut().for_each(|v| *v = without_ids(v.take())),
        _ => {}
    }
    value
}

#[tokio::test]
async fn messages_are_blocks_streamed_or_not() {
    for step in [1, 7, 1000] {
        let addr = speaking(ANSWER, step, OBSERVATION).await;
        let ask = json!({"tools": anthropic_tools(), "thinking": {"type": "enabled", "budget_tokens": 1024}});
        let whole = post(addr, "/v1/messages", messages(ask.clone())).await.json();
        assert_eq!(
            (whole["type"].as_str(), whole["role"].as_str(), whole["stop_reason"].as_str()),
            (Some("message"), Some("assistant"), Some("tool_use"))
        );
        let content = without_ids(whole["content"].clone());
        let want = json!([
            {"type": "thinking", "thinking": "I look.", "signature": "unsigned"},
            {"type": "text", "text": "\nOne 🙂 moment."},
            {"type": "tool_use", "name": "get_weather", "input": {"city": "Rome", "days": 2}},
            {"type": "tool_use", "name": "now", "input": {}},
        ]);
        assert_eq!(content, want);
        assert!(whole["content"][2]["id"].as_str().unwrap().starts_with("toolu_"));

        let mut ask = ask;
        ask["stream"] = json!(true);
        let all = events(&post(addr, "/v1/messages", messages(ask)).await);
        let names: Vec<&str> = all.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!((names[0], names[names.len() - 2], names[names.len() - 1]), ("message_start", "message_delta", "message_stop"));
        let mut blocks: Vec<Value> = Vec::new();
        let mut json_text = String::new();
        for (name, data) in &all {
            let index = data["index"].as_u64().unwrap_or(0) as usize;
            match name.as_str() {
                "content_block_start" => {
                    assert_eq!(index, blocks.len());
                    blocks.push(data["content_block"].clone());
                    json_text.clear();
                }
                "content_block_delta" => {
                    assert_eq!(index + 1, blocks.len());
                    let (delta, block) = (&data["delta"], blocks.last_mut().unwrap());
                    for key in ["text", "thinking", "signature"] {
                        if let Some(more) = delta[key].as_str() {
                            block[key] = json!(block[key].as_str().unwrap().to_owned() + more);
                        }
                    }
                    json_text.push_str(delta["partial_json"].as_str().unwrap_or(""));
                    if !json_text.is_empty() {
                        block["input"] = serde_json::from_str(&json_text).unwrap_or_default();
                    }
                }
                _ => {}
            }
        }
        assert_eq!(without_ids(json!(blocks)), want, "T-19: the signature comes too");
        let end = &all[all.len() - 2].1;
        assert_eq!((end["delta"]["stop_reason"].as_str(), &end["usage"]), (Some("tool_use"), &whole["usage"]));
    }
}

#[tokio::test]
async fn messages_stop_reasons_and_thinking() {
    let addr = speaking("a</think>bcd", 2, STOP).await;
    let whole = post(addr, "/v1/messages", messages(json!({"stop_sequences": ["c"]}))).await.json();
    assert_eq!((whole["stop_reason"].as_str(), whole["stop_sequence"].as_str()), (Some("stop_sequence"), Some("c")));
    assert_eq!(without_ids(whole["content"].clone()), json!([{"type": "text", "text": "ab"}]), "thinking is off unless asked for");
    let whole = post(addr, "/v1/messages", messages(json!({"max_tokens": 3}))).await.json();
    assert_eq!(whole["stop_reason"], "max_tokens");
    let whole = post(addr, "/v1/messages", messages(json!({}))).await.json();
    assert_eq!((whole["stop_reason"].as_str(), &whole["stop_sequence"]), (Some("end_turn"), &Value::Null));
}

/// All faces bring the same conversation to the same prompt.
#[tokio::test]
async fn all_faces_make_the_same_prompt() {
    let (addr, mut worker) = server().await;
    let call = json!({"city": "Oslo", "days": 3});
    let chat_body = json!({
        "tools": tools().as_array().unwrap().iter().map(|t| { let mut t = t.clone(); t["function"]["description"] = json!("d"); let f = t["function"].as_object().unwrap();
            json!({"type": "function", "function": {"name": f["name"], "description": "d", "parameters": f["parameters"]}}) }).collect::<Value>(),
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": "I look.", "reasoning": "hm", "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": call.to_string()}}]},
            {"role": "tool", "tool_call_id": "c1", "content": "cold"},
            {"role": "user", "content": "And now?"},
        ],
    });
    let messages_body = json!({
        "max_tokens": 50, "tools": anthropic_tools(), "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "thinking": {"type": "adaptive"},
        "messages": [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "c1", "name": "get_weather", "input": call},
            ]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "cold"}]}, {"type": "text", "text": "And now?"}]},
        ],
    });
    let flat = |tool: &Value| json!({"type": "function", "name": tool["name"], "description": "d", "parameters": tool["input_schema"], "strict": false});
    let responses_body = json!({
        "instructions": "Be brief.",
        "tools": anthropic_tools().as_array().unwrap().iter().map(flat).collect::<Value>(),
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
            {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": call.to_string()},
            {"type": "function_call_output", "call_id": "c1", "output": "cold"},
            {"role": "user", "content": "And now?"},
        ],
    });
    let mut prompts = Vec::new();
    for (path, body) in [("/v1/chat/completions", chat_body), ("/v1/messages", messages_body.clone()), ("/v1/responses", responses_body)] {
        let reply = tokio::spawn(post(addr, path, body));
        let generation = worker.next().await.unwrap();
        prompts.push((path, demo_tokenizer().decode(&generation.request.prompt_ids, false)));
        speak(&generation, &[100], 1, STOP);
        assert_eq!(reply.await.unwrap().status, 200);
    }
    let (_, want) = prompts[0].clone();
    assert!(want.contains("<think>hm</think>I look.<tool_call>get_weather<arg_key>city</arg_key><arg_value>Oslo</arg_value>"), "{want}");
    for (path, prompt) in &prompts {
        let bare = prompt.replace(",\"strict\":false", "");
        assert_eq!(bare, want, "{path}");
    }
    let counted = post(addr, "/v1/messages/count_tokens", messages_body).await.json();
    assert_eq!(counted, json!({"input_tokens": demo_tokenizer().encode(&want, false).unwrap().len()}));
}

#[tokio::test]
async fn a_last_message_of_the_assistant_is_continued() {
    let (addr, mut worker) = server().await;
    let body = messages(json!({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "The answer is"}]}));
    let reply = tokio::spawn(post(addr, "/v1/messages", body));
    let generation = worker.next().await.unwrap();
    let prompt = demo_tokenizer().decode(&generation.request.prompt_ids, false);
    assert!(prompt.ends_with("</think>The answer is"), "{prompt}");
    speak(&generation, &" 4".bytes().map(byte_token).collect::<Vec<_>>(), 1, STOP);
    assert_eq!(reply.await.unwrap().json()["content"][0]["text"], " 4");
}

#[tokio::test]
async fn responses_are_items_streamed_or_not() {
    for step in [1, 7, 1000] {
        let addr = speaking(ANSWER, step, OBSERVATION).await;
        let declared: Value = anthropic_tools()
            .as_array()
            .unwrap()
            .iter()
            .map(|t| json!({"type": "function", "name": t["name"], "parameters": t["input_schema"]}))
            .collect();
        let whole = post(addr, "/v1/responses", responses(json!({"tools": declared}))).await.json();
        assert_eq!(
            (whole["object"].as_str(), whole["status"].as_str(), &whole["error"]),
            (Some("response"), Some("completed"), &Value::Null)
        );
        let want = json!([
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "I look."}], "status": "completed"},
            {"type": "message", "role": "assistant", "status": "completed",
             "content": [{"type": "output_text", "text": "\nOne 🙂 moment.", "annotations": [], "logprobs": []}]},
            {"type": "function_call", "name": "get_weather", "arguments": "{\"city\":\"Rome\",\"days\":2}", "status": "completed"},
            {"type": "function_call", "name": "now", "arguments": "{}", "status": "completed"},
        ]);
        assert_eq!(without_ids(whole["output"].clone()), want);
        assert!(whole["output"][2]["call_id"].as_str().unwrap().starts_with("call_"));

        let all = events(&post(addr, "/v1/responses", responses(json!({"tools": declared, "stream": true}))).await);
        assert!(all.iter().enumerate().all(|(i, (_, data))| data["sequence_number"] == i), "numbered without a gap");
        assert_eq!((all[0].0.as_str(), all.last().unwrap().0.as_str()), ("response.created", "response.completed"));
        let mut last = all.last().unwrap().1["response"].clone();
        assert_eq!(last["usage"], whole["usage"]);
        assert_eq!(without_ids(last["output"].take()), want);
        let mut texts = vec![String::new(); 4];
        for (name, data) in &all {
            let index = data["output_index"].as_u64().unwrap_or(0) as usize;
            if name.ends_with(".delta") {
                texts[index].push_str(data["delta"].as_str().unwrap());
            } else if name == "response.output_item.done" {
                assert_eq!(without_ids(data["item"].clone()), want[index]);
            }
        }
        assert_eq!(texts, ["I look.", "\nOne 🙂 moment.", "{\"city\":\"Rome\",\"days\":2}", "{}"]);
    }
    let addr = speaking("a</think>bcd", 2, STOP).await;
    let cut = post(addr, "/v1/responses", responses(json!({"max_output_tokens": 10}))).await.json();
    assert_eq!((cut["status"].as_str(), cut["incomplete_details"]["reason"].as_str()), (Some("incomplete"), Some("max_output_tokens")));
    assert_eq!(cut["output"][1]["status"], "incomplete");
    let reply = get(addr, "/v1/responses/resp_1").await;
    assert_eq!((reply.status, reply.error()["code"].as_str()), (404, Some("response_not_found")));
}

/// T-03 and the shapes of errors: each face's own, before and inside a stream.
#[tokio::test]
async fn errors_have_each_faces_shape() {
    let addr = speaking("x", 1, STOP).await;
    let cases = [
        (messages(json!({"max_tokens": null})), "max_tokens"),
        (messages(json!({"max_tokens": 0})), "max_tokens"),
        (messages(json!({"messages": [{"role": "king", "content": "x"}]})), "messages[0].role"),
        (messages(json!({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]})), "messages[0].content[0]"),
        (messages(json!({"stop_sequences": [""]})), "stop_sequences"),
        (messages(json!({"tools": [{"type": "web_search_20250305", "name": "web_search"}]})), "tools[0].type"),
        (messages(json!({"tool_choice": {"type": "tool", "name": "f"}})), "tool_choice.name"),
        (messages(json!({"messages": [{"role": "user", "content": "word ".repeat(6000)}]})), "prompt is too long:"),
    ];
    for (body, what) in cases {
        let reply = post(addr, "/v1/messages", body).await;
        let error = reply.json();
        assert_eq!(
            (reply.status, error["type"].as_str(), error["error"]["type"].as_str()),
            (400, Some("error"), Some("invalid_request_error")),
            "{}",
            reply.body
        );
        assert!(error["error"]["message"].as_str().unwrap().contains(what), "{what}: {}", reply.body);
        assert_eq!(error["request_id"].as_str(), reply.header("request-id"));
    }
    assert_eq!(post(addr, "/v1/messages", messages(json!({"model": "claude"}))).await.json()["error"]["type"], "not_found_error");
    let cases = [
        (responses(json!({"previous_response_id": "resp_1"})), "previous_response_id"),
        (responses(json!({"background": true})), "background"),
        (responses(json!({"input": 5})), "input"),
        (responses(json!({"input": []})), "input"),
        (responses(json!({"input": [{"type": "item_reference", "id": "x"}]})), "input[0]"),
        (responses(json!({"tools": [{"type": "web_search"}]})), "tools[0].type"),
        (responses(json!({"reasoning": {"effort": "huge"}})), "reasoning.effort"),
        (responses(json!({"max_output_tokens": 0})), "max_output_tokens"),
        (responses(json!({"text": {"format": {"type": "json_schema", "name": "x"}}})), "text.format.schema"),
    ];
    for (body, param) in cases {
        let reply = post(addr, "/v1/responses", body).await;
        assert_eq!((reply.status, reply.error()["param"].as_str()), (400, Some(param)), "{}", reply.body);
    }

    let (addr, worker) = server().await;
    answer_all(worker, |g| {
        g.send(GenerationEvent::Tokens(tokens(&[100], &g.request)));
        g.send(GenerationEvent::Error(GenerationError { code: ErrorCode::ExpertsUnavailable, message: "it broke".into() }));
    });
    let all = events(&post(addr, "/v1/messages", messages(json!({"stream": true}))).await);
    let (name, last) = all.last().unwrap();
    assert_eq!(
        (name.as_str(), last["error"]["type"].as_str(), last["error"]["message"].as_str()),
        ("error", Some("overloaded_error"), Some("it broke"))
    );
    let all = events(&post(addr, "/v1/responses", responses(json!({"stream": true}))).await);
    let names: Vec<&str> = all.iter().rev().take(2).map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["response.failed", "error"]);
    assert_eq!(all[all.len() - 2].1["code"], "experts_unavailable");
    let reply = post(addr, "/v1/messages", messages(json!({}))).await;
    assert_eq!((reply.status, reply.json()["error"]["type"].as_str()), (503, Some("overloaded_error")));
}
