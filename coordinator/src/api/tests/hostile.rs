//! Odd values in every field: an answer or a 400 that names a field, never a 5xx, and the server goes on.

use serde_json::{Value, json};

use super::harness::*;
use crate::engine::Finish;

const FIELDS: &str = "model stream stream_options n max_tokens max_completion_tokens min_tokens temperature top_p top_k min_p \
    frequency_penalty presence_penalty repetition_penalty seed stop stop_token_ids include_stop_str_in_output ignore_eos \
    skip_special_tokens logit_bias prompt_logprobs return_token_ids return_tokens_as_token_ids response_format guided_json guided_regex guided_choice guided_grammar structured_outputs thinking thinking_token_budget parallel_tool_calls max_output_tokens \
    use_beam_search messages tools tool_choice logprobs top_logprobs reasoning_effort chat_template_kwargs add_generation_prompt \
    continue_final_message prompt echo best_of suffix add_special_tokens unheard_of";

fn odd_values() -> Vec<Value> {
    vec![
        json!(null),
        json!(true),
        json!(false),
        json!(0),
        json!(1),
        json!(-1),
        json!(2),
        json!(1.5),
        json!(-0.0),
        json!(1e12),
        json!(1e300),
        json!(u64::MAX),
        json!(i64::MIN),
        json!(""),
        json!("5"),
        json!("\u{0}\u{FFFF}🙂"),
        json!("x".repeat(5000)),
        json!([]),
        json!([null]),
        json!([1, 2]),
        json!(["a", "b"]),
        json!([[1], ["a"]]),
        json!([{}]),
        json!([{"role": "user", "content": [{"type": "text", "text": "x"}], "tool_calls": [{}]}]),
        json!([{"role": "tool", "content": []}, {"role": "tool", "content": [{"output": {"a": [1]}}]}]),
        json!([{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": null}}}}]),
        json!({}),
        json!({"type": "text"}),
        json!({"5": 5}),
        json!({"messages": {}, "reasoning_effort": [1], "clear_thinking": "x"}),
    ]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn odd_values_in_every_field() {
    let addr = speaking("</think>ok", 2, Finish::Stop { id: EOS[0] }).await;
    let mut wrong = Vec::new();
    for field in FIELDS.split_whitespace() {
        for value in odd_values() {
            for (path, mut body) in [("/v1/chat/completions", chat(json!({}))), ("/v1/completions", completion(json!({})))] {
                body[field] = value.clone();
                let reply = post(addr, path, body).await;
                let fine = match reply.status {
                    200 if reply.header("content-type").is_some_and(|t| t.starts_with("text/event-stream")) => !reply.chunks().is_empty(),
                    200 => reply.json()["choices"].is_array(),
                    404 => field == "model" && reply.error()["code"] == "model_not_found",
                    400 => reply.error()["param"].as_str().is_some_and(|param| param.starts_with(field)),
                    _ => false,
                };
                if !fine {
                    wrong.push(format!("{path} {field} = {value}: {} {}", reply.status, reply.body));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
