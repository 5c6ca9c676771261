//! Answers that are not streamed: shapes, counts, logprobs, token ids, echo, n.

use serde_json::{Value, json};

use super::harness::*;
use crate::engine::Finish;
use crate::text::fixtures::{byte_token, demo_goldens, demo_tokenizer};

const STOP: Finish = Finish::Stop { id: EOS[0] };

#[tokio::test]
async fn chat_splits_reasoning_from_content() {
    let addr = speaking("think</think>Paris", 3, STOP).await;
    let answer = post(addr, "/v1/chat/completions", chat(json!({}))).await.json();
    assert_eq!(answer["object"], "chat.completion");
    assert_eq!(answer["model"], "demo");
    assert_eq!(answer["system_fingerprint"], "fp_abcdef012345");
    assert!(answer["id"].as_str().unwrap().starts_with("chatcmpl-"));
    let choice = &answer["choices"][0];
    let message = &choice["message"];
    assert_eq!(message["role"], "assistant");
    assert_eq!(
        (&message["content"], &message["reasoning_content"], &message["reasoning"]),
        (&json!("Paris"), &json!("think"), &json!("think"))
    );
    assert_eq!((&choice["finish_reason"], &choice["stop_reason"], &choice["logprobs"]), (&json!("stop"), &Value::Null, &Value::Null));
    let usage = &answer["usage"];
    assert_eq!((&usage["completion_tokens"], &usage["completion_tokens_details"]["reasoning_tokens"]), (&json!(18), &json!(13)));
    assert_eq!(usage["total_tokens"], json!(usage["prompt_tokens"].as_u64().unwrap() + 18));
}

/// The prompt that reaches the engine is the reference's, token for token (T-22: one [gMASK], one <sop>).
#[tokio::test]
async fn t22_golden_conversations_reach_the_engine_exactly() {
    let (addr, mut worker) = server().await;
    for case in demo_goldens()["cases"].as_array().unwrap() {
        let mut body = json!({"messages": case["messages"]});
        for (key, value) in case["kwargs"].as_object().into_iter().flatten() {
            if key == "tools" || key == "reasoning_effort" {
                body[key] = value.clone();
            } else {
                body["chat_template_kwargs"][key] = value.clone();
            }
        }
        let counted = post(addr, "/tokenize", body.clone()).await.json();
        assert_eq!(counted["tokens"], case["prompt_ids"], "{}", case["name"]);
        let reply = tokio::spawn(post(addr, "/v1/chat/completions", body));
        let generation = worker.next().await.unwrap();
        assert_eq!(json!(generation.request.prompt_ids), case["prompt_ids"], "{}", case["name"]);
        let ids: Vec<u32> = case["greedy_ids"].as_array().unwrap().iter().map(|i| i.as_u64().unwrap() as u32).collect();
        let stop = case["stop_index"].as_u64().unwrap() as usize;
        speak(&generation, &ids[..stop], 2, Finish::Stop { id: ids[stop] });
        let message = reply.await.unwrap().json()["choices"][0]["message"].clone();
        let (reasoning, content) = (message["reasoning_content"].as_str().unwrap_or(""), message["content"].as_str().unwrap_or(""));
        let whole = demo_tokenizer().decode(&ids[..stop], false);
        let (want, rest) = whole.split_once("</think>").unwrap_or((&whole, ""));
        let (text, called) = rest.split_once("<tool_call>").map_or((rest, 0), |(text, _)| (text, rest.matches("<tool_call>").count()));
        assert_eq!((reasoning, content), (want, text), "{}", case["name"]);
        assert_eq!(message["tool_calls"].as_array().map_or(0, Vec::len), called, "{}", case["name"]);
    }
}

#[tokio::test]
async fn completions_add_nothing_to_a_prompt() {
    let (addr, mut worker) = server().await;
    let text = "[gMASK]<sop>Bonjour, le monde 🙂";
    let ids = demo_tokenizer().encode(text, false).unwrap();
    for prompt in [json!(text), json!([text]), json!(ids), json!([ids])] {
        let reply = tokio::spawn(post(addr, "/v1/completions", completion(json!({"prompt": prompt, "return_token_ids": true}))));
        let generation = worker.next().await.unwrap();
        assert_eq!(generation.request.prompt_ids, ids);
        speak(&generation, &[1511, 1497, 1490], 1, Finish::Length);
        let answer = reply.await.unwrap().json();
        let choice = &answer["choices"][0];
        assert_eq!(answer["object"], "text_completion");
        assert_eq!(choice["text"], "<think>", "special tokens have no text, markers do");
        assert_eq!((&choice["token_ids"], &choice["prompt_token_ids"]), (&json!([1511, 1497, 1490]), &json!(ids)));
    }
    let detokenized = post(addr, "/detokenize", json!({"tokens": ids})).await.json();
    assert_eq!(detokenized["prompt"], text);
    let tokenized = post(addr, "/tokenize", json!({"prompt": "hi<sop>", "return_token_strs": true})).await.json();
    assert_eq!(
        (tokenized["count"].as_u64(), &tokenized["max_model_len"]),
        (Some(tokenized["tokens"].as_array().unwrap().len() as u64), &json!(LIMIT))
    );
    assert_eq!(tokenized["token_strs"].as_array().unwrap().last().unwrap(), "<sop>");
    assert_eq!(post(addr, "/detokenize", json!({"tokens": [5000]})).await.status, 400);
    assert_eq!(post(addr, "/tokenize", json!({})).await.status, 400);
}

#[tokio::test]
async fn skip_special_tokens_false_shows_them() {
    let (addr, worker) = server().await;
    answer_all(worker, |g| speak(g, &[1511, 1497], 1, STOP));
    let answer =
        post(addr, "/v1/completions", completion(json!({"skip_special_tokens": false, "include_stop_str_in_output": true}))).await.json();
    assert_eq!(answer["choices"][0]["text"], "<think><|user|><|endoftext|>");
}

#[tokio::test]
async fn several_prompts_and_choices_keep_their_indices() {
    let (addr, worker) = server().await;
    answer_all(worker, |g| {
        let ids: Vec<u32> = format!("{}-{}", g.request.prompt_ids.len(), g.request.choice).bytes().map(byte_token).collect();
        speak(g, &ids, 1, STOP);
    });
    let answer = post(addr, "/v1/completions", completion(json!({"prompt": [[1], [2, 3]], "n": 2, "seed": 7}))).await.json();
    let texts: Vec<(u64, &str)> =
        answer["choices"].as_array().unwrap().iter().map(|c| (c["index"].as_u64().unwrap(), c["text"].as_str().unwrap())).collect();
    assert_eq!(texts, [(0, "1-0"), (1, "1-1"), (2, "2-0"), (3, "2-1")]);
    assert_eq!(
        answer["usage"],
        json!({"prompt_tokens": 3, "completion_tokens": 12, "total_tokens": 15, "completion_tokens_details": {"reasoning_tokens": 0},
               "prompt_tokens_details": {"cached_tokens": 2}})
    );
}

#[tokio::test]
async fn chat_logprobs() {
    let addr = speaking("é", 1, STOP).await;
    let answer = post(addr, "/v1/chat/completions", chat(json!({"logprobs": true, "top_logprobs": 2}))).await.json();
    let content = answer["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(content.len(), 2);
    assert_eq!(content[0]["bytes"], json!([0xC3]), "exact bytes where the text is half a character");
    assert_eq!((&content[0]["token"], &content[0]["logprob"]), (&json!("\u{FFFD}"), &json!(-0.5)));
    assert_eq!(content[0]["top_logprobs"].as_array().unwrap().len(), 2);
    assert!(answer["choices"][0]["logprobs"]["refusal"].is_null());
    let answer =
        post(addr, "/v1/chat/completions", chat(json!({"logprobs": true, "return_tokens_as_token_ids": true, "return_token_ids": true})))
            .await
            .json();
    let first = &answer["choices"][0]["logprobs"]["content"][0];
    assert_eq!((&first["token"], &first["top_logprobs"]), (&json!(format!("token_id:{}", byte_token(0xC3))), &json!([])));
    assert_eq!(answer["prompt_token_ids"], answer["choices"][0]["prompt_token_ids"]);
}

#[tokio::test]
async fn completion_logprobs_and_echo() {
    let addr = speaking("ab", 1, STOP).await;
    let ask = |extra: Value| post(addr, "/v1/completions", completion(extra));
    let choice = ask(json!({"prompt": "é!", "logprobs": 1})).await.json()["choices"][0].clone();
    assert_eq!(choice["logprobs"]["tokens"], json!(["a", "b"]));
    assert_eq!(choice["logprobs"]["text_offset"], json!([0, 1]));
    assert_eq!(choice["logprobs"]["top_logprobs"][0].as_object().unwrap().len(), 2, "the best one and its own");

    let choice =
        ask(json!({"prompt": [byte_token(0xC3), byte_token(0xA9), byte_token(b'!')], "logprobs": 0, "echo": true})).await.json()["choices"]
            [0]
        .clone();
    assert_eq!(choice["text"], "é!ab");
    let logprobs = &choice["logprobs"];
    assert_eq!(logprobs["text_offset"], json!([0, 0, 1, 2, 3]));
    assert_eq!(logprobs["token_logprobs"], json!([null, -0.5, -0.5, -0.5, -0.5]));
    assert_eq!((&logprobs["top_logprobs"][0], &logprobs["top_logprobs"][4]), (&Value::Null, &json!({"b": -0.5})));
    assert!(choice.get("prompt_logprobs").is_none(), "not asked for by that name");

    // T-05: the prompt alone.
    let answer = ask(json!({"prompt": "hi", "echo": true, "max_tokens": 0, "logprobs": 1})).await.json();
    assert_eq!((&answer["choices"][0]["text"], &answer["choices"][0]["finish_reason"]), (&json!("hi"), &json!("length")));
    assert_eq!(answer["usage"]["completion_tokens"], 0);
    assert_eq!(
        answer["choices"][0]["logprobs"]["tokens"].as_array().unwrap().len() as u64,
        answer["usage"]["prompt_tokens"].as_u64().unwrap()
    );
}

#[tokio::test]
async fn prompt_logprobs_as_vllm_has_them() {
    let (addr, worker) = server_with(|p| p.options.max_logprobs = -1).await;
    answer_all(worker, |g| speak(g, &[100], 1, STOP));
    let choice = post(addr, "/v1/completions", completion(json!({"prompt": [5, 6, 7], "prompt_logprobs": -1, "logprobs": -1})))
        .await
        .json()["choices"][0]
        .clone();
    let positions = choice["prompt_logprobs"].as_array().unwrap();
    assert_eq!((positions.len(), &positions[0]), (3, &Value::Null));
    assert_eq!(positions[1].as_object().unwrap().len(), 1536 + 1, "the whole vocabulary (the script's ids run past it)");
    assert_eq!(positions[2]["7"], json!({"logprob": -0.5, "rank": 2, "decoded_token": demo_tokenizer().token_text(7)}));
    let answer = post(addr, "/v1/chat/completions", chat(json!({"prompt_logprobs": 0}))).await.json();
    assert_eq!(answer["prompt_logprobs"].as_array().unwrap().len() as u64, answer["usage"]["prompt_tokens"].as_u64().unwrap());
}

/// T-21: tags never show, efforts reach the template, and thinking that is off is closed before the answer begins.
#[tokio::test]
async fn t21_efforts_and_history() {
    let (addr, mut worker) = server().await;
    let off = [
        json!({"reasoning_effort": "none"}),
        json!({"thinking": {"type": "disabled"}}),
        json!({"chat_template_kwargs": {"enable_thinking": false}}),
    ];
    let on = [("low", "Low"), ("minimal", "Low"), ("high", "High"), ("medium", "Max"), ("max", "Max"), ("", "Max")];
    let on = on.map(|(effort, shown)| (if effort.is_empty() { json!({}) } else { json!({"reasoning_effort": effort}) }, shown, true));
    for (extra, shown, thinks) in off.map(|extra| (extra, "Low", false)).into_iter().chain(on) {
        let reply = tokio::spawn(post(addr, "/v1/chat/completions", chat(extra.clone())));
        let generation = worker.next().await.unwrap();
        let prompt = demo_tokenizer().decode(&generation.request.prompt_ids, false);
        assert!(prompt.contains(&format!("Reasoning Effort: {shown}<")), "{extra}: {prompt}");
        assert!(prompt.ends_with(if thinks { "<think>" } else { "<think></think>" }), "{extra}: {prompt}");
        let ids: Vec<u32> = "a<think>b</think>c</think>d".bytes().map(byte_token).collect();
        speak(&generation, &ids, 1, STOP);
        let message = reply.await.unwrap().json()["choices"][0]["message"].clone();
        let want = if thinks { ("cd", "ab") } else { ("acd", "b") };
        assert_eq!((message["content"].as_str().unwrap(), message["reasoning_content"].as_str().unwrap()), want, "{extra}");
    }
    for name in ["reasoning", "reasoning_content"] {
        let history =
            json!([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", name: "why"}, {"role": "user", "content": "r"}]);
        let tokens = post(addr, "/tokenize", json!({"messages": history})).await.json()["tokens"].clone();
        let prompt = post(addr, "/detokenize", json!({"tokens": tokens})).await.json()["prompt"].clone();
        assert!(prompt.as_str().unwrap().contains("<think>why</think>a"), "{prompt}");
    }
    let open = json!({"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "The answer "}], "continue_final_message": true});
    let tokens = post(addr, "/tokenize", open).await.json()["tokens"].clone();
    let prompt = post(addr, "/detokenize", json!({"tokens": tokens})).await.json()["prompt"].clone();
    assert!(prompt.as_str().unwrap().ends_with("</think>The answer"), "{prompt}");
}

/// A budget of thought reaches the engine with what closes it, where there is a thought at all.
#[tokio::test]
async fn a_thought_has_its_budget() {
    let (addr, mut worker) = server().await;
    let enabled = |budget: u32| json!({"thinking": {"type": "enabled", "budget_tokens": budget}, "max_tokens": 50});
    let messages = |extra: Value| {
        let mut body = chat(extra);
        body["model"] = json!("demo");
        ("/v1/messages", body)
    };
    let completions = |extra: Value| ("/v1/chat/completions", chat(extra));
    let cases = [
        (completions(enabled(7)), Some(7)),
        (completions(json!({"thinking_token_budget": 9})), Some(9)),
        (completions(json!({"thinking": {"type": "adaptive"}})), None),
        (completions(json!({"thinking_token_budget": 9, "reasoning_effort": "none"})), None),
        (messages(enabled(1024)), Some(1024)),
        (messages(json!({"max_tokens": 50})), None),
    ];
    for ((path, body), want) in cases {
        let reply = tokio::spawn(post(addr, path, body.clone()));
        let generation = worker.next().await.unwrap();
        let thought = generation.request.thought.as_ref().map(|thought| (thought.tokens, thought.close.to_vec()));
        assert_eq!(thought, want.map(|tokens| (tokens, vec![demo_tokenizer().token_id("</think>").unwrap()])), "{path} {body}");
        speak(&generation, &[100], 1, STOP);
        assert_eq!(reply.await.unwrap().status, 200);
    }
    let error = post(addr, "/v1/chat/completions", chat(json!({"thinking": {"type": "enabled", "budget_tokens": -1}}))).await.error();
    assert_eq!(error["param"], "thinking.budget_tokens");
}
