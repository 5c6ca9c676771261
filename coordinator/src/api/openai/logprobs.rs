//! Log-probabilities in their three shapes: chat's list, the old completions' columns, vLLM's `prompt_logprobs`.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use crate::api::choice::TokenOut;
use crate::engine::{PromptPosition, TokenLogprob};
use crate::text::{Detokenizer, Tokenizer};

/// JSON has no infinity; this is what the field writes for "impossible".
const IMPOSSIBLE: f32 = -9999.0;

/// How tokens are named.
#[derive(Clone, Copy)]
pub struct Names<'a> {
    /// Ids → text.
    pub tokenizer: &'a Arc<Tokenizer>,
    /// `token_id:N` in place of the text, which need not be unique.
    pub as_ids: bool,
}

impl Names<'_> {
    fn name(&self, id: u32) -> String {
        if self.as_ids { format!("token_id:{id}") } else { self.tokenizer.token_text(id) }
    }
}

fn value(logprob: f32) -> f32 {
    if logprob.is_finite() { logprob.max(IMPOSSIBLE) } else { IMPOSSIBLE }
}

/// Chat: `{"content": [{token, logprob, bytes, top_logprobs}], "refusal": null}`.
pub fn chat(tokens: &[TokenOut], names: Names<'_>) -> Value {
    let entry = |t: &TokenLogprob| json!({"token": names.name(t.id), "logprob": value(t.logprob), "bytes": names.tokenizer.bytes(t.id)});
    let content: Vec<Value> = tokens
        .iter()
        .map(|token| {
            let own = token.event.logprob.unwrap_or(TokenLogprob { id: token.event.id, logprob: IMPOSSIBLE, rank: 0 });
            let mut entry_of_token = entry(&own);
            entry_of_token["top_logprobs"] = token.event.top.iter().map(entry).collect();
            entry_of_token
        })
        .collect();
    json!({"content": content, "refusal": null})
}

/// The old completions' columns.
#[derive(Debug, Default)]
pub struct Columns {
    tokens: Vec<String>,
    token_logprobs: Vec<Option<f32>>,
    top_logprobs: Vec<Option<Map<String, Value>>>,
    text_offset: Vec<usize>,
}

impl Columns {
    /// Appends the tokens of an echoed prompt; the first has no logprob. Returns the characters of the prompt.
    pub fn prompt(&mut self, ids: &[u32], positions: &[PromptPosition], names: Names<'_>) -> usize {
        // A prompt is shown as it is, special tokens included.
        let mut detokenizer = Detokenizer::new(Arc::clone(names.tokenizer), false);
        let (mut text, mut chars) = (String::new(), 0);
        for (i, &id) in ids.iter().enumerate() {
            let position = i.checked_sub(1).and_then(|i| positions.get(i));
            if i > 0 && position.is_none() {
                tracing::warn!(position = i, "the engine sent no logprobs for a prompt position");
            }
            self.push(id, chars, position.map(|p| p.actual), position.map_or(&[], |p| &p.top), names);
            text.clear();
            detokenizer.push(id, &mut text);
            chars += text.chars().count();
        }
        text.clear();
        detokenizer.finish(&mut text);
        chars + text.chars().count()
    }

    /// Appends generated tokens; `base` is the length of the text before the first one.
    pub fn generated(&mut self, tokens: &[TokenOut], base: usize, names: Names<'_>) {
        for token in tokens {
            self.push(token.event.id, base + token.offset, token.event.logprob, &token.event.top, names);
        }
    }

    fn push(&mut self, id: u32, offset: usize, own: Option<TokenLogprob>, top: &[TokenLogprob], names: Names<'_>) {
        self.tokens.push(names.name(id));
        self.text_offset.push(offset);
        self.token_logprobs.push(own.map(|own| value(own.logprob)));
        self.top_logprobs.push(own.map(|own| {
            // The token itself is always among them, as the field has it.
            let mut map = Map::new();
            for t in top.iter().chain([&own]) {
                map.entry(names.name(t.id)).or_insert_with(|| json!(value(t.logprob)));
            }
            map
        }));
    }

    /// `{tokens, token_logprobs, top_logprobs, text_offset}`.
    pub fn into_json(self) -> Value {
        json!({
            "tokens": self.tokens,
            "token_logprobs": self.token_logprobs,
            "top_logprobs": self.top_logprobs,
            "text_offset": self.text_offset,
        })
    }
}

/// vLLM's `prompt_logprobs`: one entry per prompt token, the first null, then `{id: {logprob, rank, decoded_token}}` of the token
/// itself and the likeliest.
pub fn prompt(positions: &[PromptPosition], tokenizer: &Tokenizer) -> Value {
    let mut all = vec![Value::Null];
    for position in positions {
        let mut map = Map::new();
        for t in std::iter::once(&position.actual).chain(&position.top) {
            map.entry(t.id.to_string())
                .or_insert_with(|| json!({"logprob": value(t.logprob), "rank": t.rank, "decoded_token": tokenizer.token_text(t.id)}));
        }
        all.push(Value::Object(map));
    }
    Value::Array(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::fixtures::{byte_token, demo_tokenizer};

    #[test]
    fn echoed_columns_start_with_null_and_count_characters() {
        let tokenizer = demo_tokenizer();
        let names = Names { tokenizer: &tokenizer, as_ids: false };
        let ids: Vec<u32> = "é!".bytes().map(byte_token).collect();
        let at = |id, logprob| TokenLogprob { id, logprob, rank: 1 };
        let positions = [
            PromptPosition { actual: at(ids[1], f32::NEG_INFINITY), top: vec![at(5, -0.5)] },
            PromptPosition { actual: at(ids[2], -1.0), top: vec![at(ids[2], -1.0)] },
        ];
        let mut columns = Columns::default();
        assert_eq!(columns.prompt(&ids, &positions, names), 2);
        let value = columns.into_json();
        assert_eq!(value["text_offset"], json!([0, 0, 1]));
        assert_eq!(value["token_logprobs"], json!([null, -9999.0, -1.0]));
        assert_eq!(value["top_logprobs"][2], json!({"!": -1.0}));
        let value = prompt(&positions, &tokenizer);
        assert_eq!(value[0], Value::Null);
        assert_eq!(value[2][ids[2].to_string()], json!({"logprob": -1.0, "rank": 1, "decoded_token": "!"}));
    }
}
