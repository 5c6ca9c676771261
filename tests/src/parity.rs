//! Golden parity measured from outside, over `/v1/completions`.

use std::collections::HashMap;

use serde_json::{Value, json};

use crate::{
    Client,
    golden::{Golden, LOGIT_TOLERANCE, log_softmax},
};

/// The request that continues golden prompt `n` greedily by 48 tokens.
pub fn greedy_request(golden: &Golden, n: usize) -> Value {
    json!({
        "model": "any", "prompt": golden.ids(&format!("p{n}.input_ids")), "max_tokens": 48, "temperature": 0, "ignore_eos": true,
        "return_token_ids": true,
    })
}

/// The golden continuation of prompt `n`.
pub fn greedy_tokens(golden: &Golden, n: usize) -> Vec<u64> {
    golden.ids(&format!("p{n}.greedy")).into_iter().map(|id| u64::try_from(id).expect("an id")).collect()
}

/// Asserts that the greedy continuation of each prompt is the reference's, all prompts at once (so they share batches) or one by one.
pub async fn assert_greedy(client: &Client, golden: &Golden, prompts: &[usize], together: bool) {
    let one = |n: usize| async move {
        let answer = client.post("/v1/completions", &greedy_request(golden, n)).await;
        assert_eq!(answer.status, 200, "{}", answer.text);
        let ids: Vec<u64> =
            answer.body["choices"][0]["token_ids"].as_array().expect("token_ids").iter().filter_map(Value::as_u64).collect();
        assert_eq!(ids, greedy_tokens(golden, n), "prompt of {n} tokens");
    };
    if together {
        futures::future::join_all(prompts.iter().map(|n| one(*n))).await;
    } else {
        for n in prompts {
            one(*n).await;
        }
    }
}

/// Asserts that the log-probabilities of the whole vocabulary are the reference's at every prompt position and decode step that the
/// golden file has (a lite one: some prompts, and of all the first decode step), and returns the largest difference.
pub async fn assert_logits(client: &Client, golden: &Golden, n: usize) -> f64 {
    let rows = |key: &str| {
        let key = format!("p{n}.{key}");
        if golden.has(&key) { golden.rows(&key) } else { Vec::new() }
    };
    let prefill = rows("logits");
    let last = if prefill.is_empty() { rows("logits_last") } else { prefill[n - 1..].to_vec() };
    let decode = if golden.has(&format!("p{n}.greedy_logits")) { rows("greedy_logits") } else { last };
    let vocab = decode[0].len();
    let mut body = greedy_request(golden, n);
    body["logprobs"] = vocab.into();
    body["prompt_logprobs"] = vocab.into();
    body["return_tokens_as_token_ids"] = true.into();
    let answer = client.post("/v1/completions", &body).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    let choice = &answer.body["choices"][0];

    let mut worst: f64 = 0.0;
    let mut compare = |what: &str, want: &[f32], got: &HashMap<usize, f64>| {
        assert_eq!(got.len(), want.len(), "{what}: the whole vocabulary");
        for (id, reference) in log_softmax(want).into_iter().enumerate() {
            let difference = (reference - got[&id]).abs();
            worst = worst.max(difference);
            assert!(difference <= LOGIT_TOLERANCE, "{what}, id {id}: {} is {difference:.2e} from {reference}", got[&id]);
        }
    };
    let positions = choice["prompt_logprobs"].as_array().expect("prompt_logprobs");
    assert_eq!(positions.len(), n);
    assert!(positions[0].is_null());
    for (i, position) in positions.iter().enumerate().skip(1).take(prefill.len()) {
        let got = position.as_object().expect("a map").iter();
        let got = got.map(|(id, entry)| (id.parse().expect("id"), entry["logprob"].as_f64().expect("logprob"))).collect();
        compare(&format!("prompt of {n}, position {i}"), &prefill[i - 1], &got);
    }
    let steps = choice["logprobs"]["top_logprobs"].as_array().expect("top_logprobs");
    assert_eq!(steps.len(), 48);
    for (i, step) in steps.iter().enumerate().take(decode.len()) {
        let got = step.as_object().expect("a map").iter();
        let id = |key: &str| key.strip_prefix("token_id:").and_then(|id| id.parse().ok()).unwrap_or_else(|| panic!("{key}"));
        let got = got.map(|(key, logprob)| (id(key), logprob.as_f64().expect("logprob"))).collect();
        compare(&format!("prompt of {n}, step {i}"), &decode[i], &got);
    }
    worst
}
