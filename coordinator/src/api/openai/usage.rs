//! Token counts of an answer.

use serde_json::{Value, json};

use crate::api::run::Run;

/// The counts so far.
pub fn usage(run: &Run) -> Value {
    let (prompt, completion) = (run.prompt_tokens(), run.completion_tokens());
    json!({
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": run.cached_tokens()},
        "completion_tokens_details": {"reasoning_tokens": run.reasoning_tokens()},
    })
}
