//! OpenAI's chat and text completions: their own fields, and their answers. What all faces share is in `api/conversation`.

pub mod chat;
mod chat_answer;
mod completion_answer;
pub mod completions;
mod logprobs;
mod usage;
