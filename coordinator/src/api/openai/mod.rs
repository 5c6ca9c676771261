//! OpenAI's chat and text completions.
//!
//! A request goes `request` (typed) → `validate` (checked, with defaults) → `messages` or `prompt` (token ids) → the engine, and comes
//! back through `choice` and `run` into `chat` or `completions` (answers), with `logprobs` and `usage` shared by both.

pub mod chat;
mod chat_answer;
mod completion_answer;
pub mod completions;
mod logprobs;
pub mod messages;
mod request;
mod start;
mod usage;
mod validate;

pub use request::Int;
pub use validate::token_id;
