//! Token counts of an answer.

use serde_json::{Value, json};

use crate::api::run::Run;

/// The counts so far. A prompt counts once, however many choices it has.
pub fn usage(run: &Run) -> Value {
    let prompt: usize = run.prompts.iter().map(|p| p.ids.len()).sum();
    let completion: u64 = run.choices.iter().map(|c| u64::from(c.completion_tokens)).sum();
    let reasoning: u64 = run.choices.iter().map(|c| u64::from(c.reasoning_tokens)).sum();
    json!({
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt as u64 + completion,
        "prompt_tokens_details": {"cached_tokens": run.cached_tokens()},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    })
}
