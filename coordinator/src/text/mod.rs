//! Text on the way in and out: messages → prompt → token ids, and token ids → bytes → text → stop strings → reasoning, answer and tool calls.
//!
//! `template` and `tokenizer` serve row 2 of the life of one token, `detokenizer`, `stop` and `glm` row 12. Everything here
//! is pure: no I/O after loading, no clock but the template's `strftime_now`, no knowledge of HTTP.

pub mod detokenizer;
pub mod glm;
mod json;
pub mod stop;
mod strftime;
pub mod template;
pub mod tokenizer;

pub use detokenizer::Detokenizer;
pub use glm::{AnswerFormat, AnswerParser, Kinds, Part, ToolSet};
pub use stop::{StopMatch, StopMatcher};
pub use template::{ChatTemplate, TemplateError};
pub use tokenizer::{Tokenizer, TokenizerError};

#[cfg(test)]
pub(crate) mod fixtures;
