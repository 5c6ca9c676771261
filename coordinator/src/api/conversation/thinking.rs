//! How hard to think: `reasoning_effort`, `thinking`, `enable_thinking` and their kin → the names that the template reads.
//!
//! The family's template knows the efforts low and high (all else is max) and always opens a thought. Thinking that is switched off is
//! the template's low with the thought closed at once (see [`super::render`]).

use serde_json::{Map, Value};

use crate::api::ApiError;

/// How hard to think.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Thinking {
    effort: Option<&'static str>,
    off: bool,
    /// Most tokens of a thought; the worker closes it then.
    budget: Option<u32>,
}

impl Thinking {
    /// No thinking.
    pub const OFF: Self = Self { effort: Some("low"), off: true, budget: None };

    /// A request's `reasoning_effort` (named `field` in errors).
    pub fn effort(effort: Option<&str>, field: &str) -> Result<Self, ApiError> {
        let level = match effort {
            None => return Ok(Self::default()),
            Some("none") => return Ok(Self::OFF),
            // The least that the family's template can ask for.
            Some("minimal" | "low") => "low",
            Some("medium") => "medium",
            Some("high") => "high",
            Some("xhigh" | "max") => "max",
            Some(other) => {
                let shown: String = other.chars().take(40).collect();
                let message = format!("{field} is \"{shown}\"; none, minimal, low, medium, high, xhigh and max are known");
                return Err(ApiError::invalid(field, message));
            }
        };
        Ok(Self { effort: Some(level), ..Self::default() })
    }

    /// The same with a request's `thinking` object: `{"type": "disabled"}` switches it off, `enabled` and `adaptive` leave it on, for
    /// `budget_tokens` tokens at most where it says so.
    pub fn with_object(self, thinking: Option<&Value>) -> Result<Self, ApiError> {
        match thinking {
            None | Some(Value::Null) => Ok(self),
            Some(object) => match object.get("type").and_then(Value::as_str) {
                Some("disabled") => Ok(Self::OFF),
                Some("enabled" | "adaptive") => self.with_budget(object.get("budget_tokens"), "thinking.budget_tokens"),
                _ => Err(ApiError::invalid("thinking.type", "thinking.type must be \"enabled\", \"adaptive\" or \"disabled\"")),
            },
        }
    }

    /// The same with what the template's own names say: `enable_thinking: false` (or `thinking: false`), as other servers' templates have
    /// it.
    pub fn with_kwargs(self, kwargs: &Map<String, Value>) -> Self {
        let off = ["enable_thinking", "thinking"].iter().any(|name| kwargs.get(*name) == Some(&Value::Bool(false)));
        if off { Self::OFF } else { self }
    }

    /// The same with at most that many tokens of thought (`field` says so).
    pub fn with_budget(self, budget: Option<&Value>, field: &str) -> Result<Self, ApiError> {
        match budget {
            None | Some(Value::Null) => Ok(self),
            Some(given) => match given.as_u64().and_then(|tokens| u32::try_from(tokens).ok()) {
                Some(tokens) => Ok(Self { budget: Some(self.budget.map_or(tokens, |other| other.min(tokens))), ..self }),
                None => {
                    let shown: String = given.to_string().chars().take(40).collect();
                    Err(ApiError::invalid(field, format!("{field} must be an integer from 0 to {}, got {shown}", u32::MAX)))
                }
            },
        }
    }

    /// Most tokens of the thought.
    pub fn budget(self) -> Option<u32> {
        self.budget
    }

    /// Whether there is to be no thought.
    pub fn is_off(self) -> bool {
        self.off
    }

    /// Adds the template's name for it, unless the request has named it itself.
    pub fn apply(self, kwargs: &mut Map<String, Value>) {
        if let Some(effort) = self.effort {
            kwargs.entry("reasoning_effort").or_insert_with(|| Value::from(effort));
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn every_spelling_of_off_is_off() {
        let none = Map::new();
        assert!(Thinking::effort(Some("none"), "reasoning_effort").unwrap().is_off());
        let on = Thinking::effort(Some("high"), "reasoning_effort").unwrap();
        assert!(!on.is_off() && !on.with_kwargs(&none).is_off() && !on.with_object(Some(&json!({"type": "enabled"}))).unwrap().is_off());
        assert!(on.with_object(Some(&json!({"type": "disabled"}))).unwrap().is_off());
        for name in ["enable_thinking", "thinking"] {
            assert!(on.with_kwargs(json!({name: false}).as_object().unwrap()).is_off());
            assert!(!on.with_kwargs(json!({name: true}).as_object().unwrap()).is_off());
        }
        assert_eq!(Thinking::effort(Some("hard"), "reasoning.effort").unwrap_err().param.as_deref(), Some("reasoning.effort"));
        assert_eq!(on.with_object(Some(&json!({"type": 5}))).unwrap_err().param.as_deref(), Some("thinking.type"));
        assert_eq!(on.with_object(Some(&json!({"type": "enabled", "budget_tokens": 5}))).unwrap().budget(), Some(5));
        assert_eq!(on.with_budget(Some(&json!(0)), "b").unwrap().budget(), Some(0));
        for bad in [json!(-1), json!(1.5), json!("5"), json!(1u64 << 32)] {
            let error = on.with_object(Some(&json!({"type": "enabled", "budget_tokens": bad}))).unwrap_err();
            assert_eq!(error.param.as_deref(), Some("thinking.budget_tokens"));
        }
        let mut kwargs = json!({"reasoning_effort": "low"}).as_object().cloned().unwrap();
        on.apply(&mut kwargs);
        assert_eq!(kwargs["reasoning_effort"], "low", "the request's own name wins");
    }
}
