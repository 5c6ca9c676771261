//! T-35: a sentence is found again in texts whose lengths lie around the limits that others have stumbled over, far behind what the demo model
//! was trained on (about 1,000 tokens; it has no positions). The long form is ignored by default: `cargo test -p tandem-tests --test needles -- --ignored`.
#![allow(clippy::unwrap_used, reason = "tests")]

use serde_json::{Value, json};
use tandem_tests::{Client, Launch, golden::fixtures};

/// The needle's text as the demo was trained on it: other sentences, the one with the password, the question.
struct Haystack {
    others: Vec<String>,
    needle: String,
    question: String,
}

impl Haystack {
    fn of_the_goldens() -> Self {
        let gold: Value = serde_json::from_str(&std::fs::read_to_string(fixtures().join("gold/demo.json")).unwrap()).unwrap();
        let case = gold["cases"].as_array().unwrap().iter().find(|case| case["name"] == "needle").unwrap();
        let text = case["messages"][0]["content"].as_str().unwrap();
        let (body, question) = text.rsplit_once("\n\n").unwrap();
        let sentences = body.split(". ").map(|sentence| sentence.trim_end_matches('.').to_owned() + ".");
        let (needles, others): (Vec<String>, Vec<String>) = sentences.partition(|sentence| sentence.contains("59428"));
        assert_eq!(needles.len(), 1);
        Self { others, needle: needles[0].clone(), question: question.to_owned() }
    }

    /// `n` sentences, the needle among them, then `more` words.
    fn text(&self, n: usize, early: bool, more: usize) -> String {
        let mut all: Vec<&str> = (0..n).map(|i| self.others[(i * 7 + i / self.others.len()) % self.others.len()].as_str()).collect();
        all.insert(if early { 20 } else { n - 4 }, &self.needle);
        format!("{}{}\n\n{}", all.join(" "), " a".repeat(more), self.question)
    }
}

async fn length(client: &Client, text: &str) -> usize {
    let body = json!({ "messages": [{ "role": "user", "content": text }] });
    client.post("/tokenize", &body).await.body["count"].as_u64().unwrap() as usize
}

/// A text whose prompt has exactly `tokens` tokens.
async fn exactly(client: &Client, hay: &Haystack, tokens: usize, early: bool) -> String {
    let mut n = tokens / 13;
    while length(client, &hay.text(n + 1, early, 0)).await <= tokens {
        let short = tokens - length(client, &hay.text(n, early, 0)).await;
        n += (short / 16).max(1);
    }
    let mut more = 0;
    loop {
        let text = hay.text(n, early, more);
        let short = tokens.checked_sub(length(client, &text).await).expect("a word is a token");
        if short == 0 {
            return text;
        }
        more += short;
    }
}

/// One after the other, so that each goes on from what the one before has left in the prefix cache.
async fn found_at(lengths: &[usize]) {
    let most = (lengths.iter().max().unwrap() + 64).to_string();
    let cluster =
        Launch::up().args(["--max-seq-len", &most, "--kv-tokens", &(2 * lengths.iter().max().unwrap() + 1024).to_string()]).ready();
    let (client, hay) = (cluster.client(), Haystack::of_the_goldens());
    for early in [true, false] {
        for &tokens in lengths {
            let text = exactly(&client, &hay, tokens, early).await;
            let body = json!({ "model": "any", "messages": [{ "role": "user", "content": text }], "temperature": 0, "max_tokens": 40, "stream": true });
            let stream = client.stream("/v1/chat/completions", &body).await;
            let said: String = stream.chunks.iter().filter_map(|c| c["choices"][0]["delta"]["content"].as_str()).collect();
            assert!(said.contains("59428"), "{tokens} tokens, early {early}: {said}");
        }
    }
}

#[tokio::test]
async fn t35_needles_around_2k_4k_and_8k() {
    found_at(&[2047, 2048, 2049, 4095, 4096, 4097, 8192]).await;
}

#[tokio::test]
#[ignore = "minutes"]
async fn t35_needles_at_16k_and_32k() {
    found_at(&[16_384, 32_768]).await;
}
