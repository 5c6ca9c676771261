//! What clients send, typed. Unknown fields are ignored; a field of the wrong type is an error that names it.
//!
//! Numbers are kept wide here: `settings` says what is out of range.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error, SeqAccess, Unexpected, Visitor};
use serde_json::{Map, Value};

/// An integer as clients write it: `5`, or `5.0`, but never `"5"`, `true` or `1.5`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Int(pub i128);

impl<'de> Deserialize<'de> for Int {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct IntVisitor;
        impl Visitor<'_> for IntVisitor {
            type Value = Int;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an integer")
            }
            fn visit_i64<E: Error>(self, v: i64) -> Result<Int, E> {
                Ok(Int(v.into()))
            }
            fn visit_u64<E: Error>(self, v: u64) -> Result<Int, E> {
                Ok(Int(v.into()))
            }
            fn visit_f64<E: Error>(self, v: f64) -> Result<Int, E> {
                // Beyond 2^64 an f64 no longer says which integer was meant; no field here reaches that far.
                if v.fract() == 0.0 && v.abs() <= u64::MAX as f64 {
                    Ok(Int(v as i128))
                } else {
                    Err(E::invalid_type(Unexpected::Float(v), &self))
                }
            }
        }
        deserializer.deserialize_any(IntVisitor)
    }
}

/// A string or a list of strings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Strings(pub Vec<String>);

impl<'de> Deserialize<'de> for Strings {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct StringsVisitor;
        impl<'de> Visitor<'de> for StringsVisitor {
            type Value = Strings;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string or a list of strings")
            }
            fn visit_str<E: Error>(self, v: &str) -> Result<Strings, E> {
                Ok(Strings(vec![v.to_owned()]))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Strings, A::Error> {
                let mut all = Vec::new();
                while let Some(one) = seq.next_element()? {
                    all.push(one);
                }
                Ok(Strings(all))
            }
        }
        deserializer.deserialize_any(StringsVisitor)
    }
}

/// One prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prompt {
    /// Text to tokenize.
    Text(String),
    /// Token ids as they are.
    Ids(Vec<Int>),
}

/// `prompt` of text completions: a string, a list of strings, a list of ids, or a list of lists of ids.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompts(pub Vec<Prompt>);

impl<'de> Deserialize<'de> for Prompts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct PromptsVisitor;
        impl<'de> Visitor<'de> for PromptsVisitor {
            type Value = Prompts;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string, a list of strings, a list of token ids or a list of lists of token ids")
            }
            fn visit_str<E: Error>(self, v: &str) -> Result<Prompts, E> {
                Ok(Prompts(vec![Prompt::Text(v.to_owned())]))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Prompts, A::Error> {
                let mut prompts = Vec::new();
                let mut ids: Option<Vec<Int>> = None;
                while let Some(item) = seq.next_element::<Item>()? {
                    match item {
                        Item::Id(id) if prompts.is_empty() => ids.get_or_insert_default().push(id),
                        Item::Prompt(prompt) if ids.is_none() => prompts.push(prompt),
                        _ => return Err(A::Error::custom("token ids and prompts are mixed in one list")),
                    }
                }
                prompts.extend(ids.map(Prompt::Ids));
                Ok(Prompts(prompts))
            }
        }
        deserializer.deserialize_any(PromptsVisitor)
    }
}

/// An element of a `prompt` list.
enum Item {
    Id(Int),
    Prompt(Prompt),
}

impl<'de> Deserialize<'de> for Item {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ItemVisitor;
        impl<'de> Visitor<'de> for ItemVisitor {
            type Value = Item;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a string, a token id or a list of token ids")
            }
            fn visit_str<E: Error>(self, v: &str) -> Result<Item, E> {
                Ok(Item::Prompt(Prompt::Text(v.to_owned())))
            }
            fn visit_i64<E: Error>(self, v: i64) -> Result<Item, E> {
                Ok(Item::Id(Int(v.into())))
            }
            fn visit_u64<E: Error>(self, v: u64) -> Result<Item, E> {
                Ok(Item::Id(Int(v.into())))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Item, A::Error> {
                let mut ids = Vec::new();
                while let Some(id) = seq.next_element()? {
                    ids.push(id);
                }
                Ok(Item::Prompt(Prompt::Ids(ids)))
            }
        }
        deserializer.deserialize_any(ItemVisitor)
    }
}

/// `stream_options`.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
pub struct StreamOptions {
    /// One more chunk with the usage at the end.
    pub include_usage: Option<bool>,
    /// The usage so far in every chunk.
    pub continuous_usage_stats: Option<bool>,
}

/// The fields that say how tokens are chosen and when they end; the same for chat and text completions, and what the other faces bring
/// theirs into.
#[derive(Clone, Debug, Default, Deserialize)]
#[allow(missing_docs)] // The names are the API's.
pub struct Common {
    pub model: Option<String>,
    pub stream: Option<bool>,
    pub stream_options: Option<StreamOptions>,
    pub n: Option<Int>,
    pub max_tokens: Option<Int>,
    pub max_completion_tokens: Option<Int>,
    pub max_output_tokens: Option<Int>,
    pub min_tokens: Option<Int>,
    pub temperature: Option<f64>,
    pub top_p: Option<f64>,
    pub top_k: Option<Int>,
    pub min_p: Option<f64>,
    pub frequency_penalty: Option<f64>,
    pub presence_penalty: Option<f64>,
    pub repetition_penalty: Option<f64>,
    pub seed: Option<Int>,
    pub stop: Option<Strings>,
    pub stop_token_ids: Option<Vec<Int>>,
    pub include_stop_str_in_output: Option<bool>,
    pub ignore_eos: Option<bool>,
    pub skip_special_tokens: Option<bool>,
    pub logit_bias: Option<Map<String, Value>>,
    pub prompt_logprobs: Option<Int>,
    pub return_token_ids: Option<bool>,
    pub return_tokens_as_token_ids: Option<bool>,
    pub use_beam_search: Option<bool>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_are_integers() {
        for (text, want) in [("5", Some(5)), ("-1", Some(-1)), ("5.0", Some(5)), ("1e12", Some(1_000_000_000_000)), ("1.5", None)] {
            assert_eq!(serde_json::from_str::<Int>(text).ok().map(|i| i.0), want, "{text}");
        }
        for text in ["\"5\"", "true", "[]", "{}", "1e300"] {
            assert!(serde_json::from_str::<Int>(text).is_err(), "{text}");
        }
        assert_eq!(serde_json::from_str::<Option<Int>>("null").unwrap(), None);
    }

    #[test]
    fn prompts_come_in_four_shapes() {
        let parse = |text: &str| serde_json::from_str::<Prompts>(text).map(|p| p.0);
        let ids = |ids: &[i128]| Prompt::Ids(ids.iter().map(|&i| Int(i)).collect());
        assert_eq!(parse("\"a\"").unwrap(), [Prompt::Text("a".into())]);
        assert_eq!(parse("[\"a\", \"b\"]").unwrap(), [Prompt::Text("a".into()), Prompt::Text("b".into())]);
        assert_eq!(parse("[1, 2]").unwrap(), [ids(&[1, 2])]);
        assert_eq!(parse("[[1], [2, 3]]").unwrap(), [ids(&[1]), ids(&[2, 3])]);
        assert_eq!(parse("[]").unwrap(), []);
        for text in ["[1, \"a\"]", "[\"a\", 1]", "[[1], 2]", "[null]", "[[\"a\"]]", "[1.5]", "{}", "3"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
