//! An answer of the GLM family → reasoning, content and tool calls, however its text is cut into pieces.
//!
//! | file | idea |
//! |---|---|
//! | this file | [`AnswerParser`]: the text between calls, and which state reads next |
//! | `call` | the inside of one `<tool_call>`, as pieces of a JSON object |
//! | `tools` | the declared functions, and which JSON types each argument may have |
//! | `value` | the text of one argument → JSON of those types |
//!
//! The family's template ends the prompt in `<think>`, so an answer begins inside reasoning. Tags are never shown; text that may be the
//! beginning of a tag is held until it is or is not one. Every decision depends on the text from one position on and never on where a
//! piece ended, so the parts of all cuts of one text join to the same. Used by `api/choice.rs`; what a request forces is
//! `api/conversation`'s business.

mod call;
pub mod tools;
mod value;

use std::sync::Arc;

use call::Call;
pub use tools::{Kinds, Tool, ToolSet};

const OPEN: &str = "<think>";
/// Ends the reasoning.
pub const CLOSE: &str = "</think>";
/// Begins a call.
pub const CALL: &str = "<tool_call>";

/// A piece of the answer. Calls come one after the other: [`Part::Arguments`] belongs to the last [`Part::Call`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// Thought, for `reasoning_content`.
    Reasoning(String),
    /// Answer, for `content`.
    Content(String),
    /// A call of this declared function begins.
    Call(String),
    /// The next piece of the call's arguments: the pieces join to one JSON object.
    Arguments(String),
}

impl Part {
    /// Appends `part` to `parts`; pieces of one kind that follow each other become one.
    pub fn join(self, parts: &mut Vec<Self>) {
        match (parts.last_mut(), self) {
            (_, Self::Reasoning(text) | Self::Content(text) | Self::Arguments(text)) if text.is_empty() => {}
            (Some(Self::Reasoning(last)), Self::Reasoning(text))
            | (Some(Self::Content(last)), Self::Content(text))
            | (Some(Self::Arguments(last)), Self::Arguments(text)) => last.push_str(&text),
            (_, part) => parts.push(part),
        }
    }
}

/// How an answer is to be read.
#[derive(Clone, Debug)]
pub struct AnswerFormat {
    /// The prompt has already opened the reasoning (see [`prompt_opens_reasoning`]).
    pub reasoning: bool,
    /// Functions that may be called; without any, `<tool_call>` is text like any other.
    pub tools: Arc<ToolSet>,
    /// The answer ends with its first call.
    pub single_call: bool,
    /// The answer behind the reasoning is held to a form of its own, which may contain tags as text: unless it begins with a call, it is
    /// content as it stands.
    pub verbatim: bool,
    /// A call may begin inside an unclosed thought.
    pub calls_in_reasoning: bool,
}

impl Default for AnswerFormat {
    fn default() -> Self {
        Self { reasoning: false, tools: Arc::default(), single_call: false, verbatim: false, calls_in_reasoning: true }
    }
}

#[derive(Clone, Debug)]
enum State {
    /// Between calls.
    Text,
    /// Behind `<tool_call>`, before the function's name is certain.
    Name,
    /// Inside a call.
    Call(Call),
    /// All further text is content.
    Verbatim,
    /// Nothing more is wanted.
    Done,
}

/// The parsing state of one sequence.
#[derive(Clone, Debug)]
pub struct AnswerParser {
    format: AnswerFormat,
    /// The text at hand is reasoning.
    inside: bool,
    state: State,
    /// Text that is not decided yet.
    held: String,
}

/// What a state did with the held text.
enum Step {
    /// It changed the text or the state: look again.
    Again,
    /// It needs more text.
    Wait,
}

impl AnswerParser {
    /// Starts a sequence.
    pub fn new(format: AnswerFormat) -> Self {
        Self { inside: format.reasoning, state: State::Text, held: String::new(), format }
    }

    /// Whether the text pushed so far ends inside reasoning.
    pub fn is_reasoning(&self) -> bool {
        self.inside && matches!(self.state, State::Text)
    }

    /// Whether the answer is complete, whatever else is generated (see [`AnswerFormat::single_call`]).
    pub fn is_done(&self) -> bool {
        matches!(self.state, State::Done)
    }

    /// Takes a piece of text; appends the parts that are certain.
    pub fn push(&mut self, text: &str, out: &mut Vec<Part>) {
        self.held.push_str(text);
        while matches!(self.step(out), Step::Again) {}
    }

    /// Ends the sequence. `complete`: it ended by itself, so that a call which lacks nothing but its closing tags is whole; a sequence that
    /// was cut off leaves the JSON of its last call open.
    pub fn finish(&mut self, complete: bool, out: &mut Vec<Part>) {
        match &mut self.state {
            State::Text | State::Verbatim => {
                let held = std::mem::take(&mut self.held);
                self.show(&held, out);
            }
            State::Name => {
                let name = self.held.trim();
                match self.format.tools.find(name).filter(|_| complete) {
                    Some(_) => {
                        Part::Call(name.to_owned()).join(out);
                        Part::Arguments("{}".into()).join(out);
                    }
                    None => {
                        let held = CALL.to_owned() + &std::mem::take(&mut self.held);
                        self.show(&held, out);
                    }
                }
            }
            State::Call(call) => call.finish(&self.held, complete, out),
            State::Done => {}
        }
        self.held.clear();
        self.state = State::Done;
    }

    fn step(&mut self, out: &mut Vec<Part>) -> Step {
        match &mut self.state {
            State::Text => self.text(out),
            State::Name => self.name(out),
            State::Call(call) => match call.step(&mut self.held, out) {
                call::Step::Again => Step::Again,
                call::Step::Wait => Step::Wait,
                call::Step::Over { another } => {
                    self.state = match (self.format.single_call, another) {
                        (true, _) => State::Done,
                        (false, true) => State::Name,
                        // What surrounded the call goes on: a call inside an unclosed thought does not close it.
                        (false, false) => State::Text,
                    };
                    Step::Again
                }
            },
            State::Verbatim => {
                let held = std::mem::take(&mut self.held);
                Part::Content(held).join(out);
                Step::Wait
            }
            State::Done => {
                self.held.clear();
                Step::Wait
            }
        }
    }

    fn text(&mut self, out: &mut Vec<Part>) -> Step {
        let calls = !self.format.tools.is_empty() && (!self.inside || self.format.calls_in_reasoning);
        if self.format.verbatim && !self.inside {
            if self.held.is_empty() || (calls && begins(&self.held, CALL)) {
                return Step::Wait;
            }
            self.state = if calls && self.held.starts_with(CALL) {
                self.held.drain(..CALL.len());
                State::Name
            } else {
                State::Verbatim
            };
            return Step::Again;
        }
        let Some(at) = self.held.find('<') else {
            let held = std::mem::take(&mut self.held);
            self.show(&held, out);
            return Step::Wait;
        };
        let before: String = self.held.drain(..at).collect();
        self.show(&before, out);
        if self.held.starts_with(OPEN) {
            self.held.drain(..OPEN.len());
            self.inside = true;
        } else if self.held.starts_with(CLOSE) {
            self.held.drain(..CLOSE.len());
            self.inside = false;
        } else if calls && self.held.starts_with(CALL) {
            self.held.drain(..CALL.len());
            self.state = State::Name;
        } else if begins(&self.held, OPEN) || begins(&self.held, CLOSE) || (calls && begins(&self.held, CALL)) {
            return Step::Wait;
        } else {
            self.held.drain(..1);
            self.show("<", out);
        }
        Step::Again
    }

    fn name(&mut self, out: &mut Vec<Part>) -> Step {
        match self.format.tools.at_start(&self.held) {
            tools::Start::Pending => return Step::Wait,
            tools::Start::Is { tool, used } => {
                self.held.drain(..used);
                Part::Call(self.format.tools.get(tool).name.clone()).join(out);
                self.state = State::Call(Call::new(Arc::clone(&self.format.tools), tool));
            }
            tools::Start::None => {
                // No function of that name: text, and what follows is read as such.
                self.state = State::Text;
                self.show(CALL, out);
            }
        }
        Step::Again
    }

    fn show(&self, text: &str, out: &mut Vec<Part>) {
        let text = text.to_owned();
        if self.inside { Part::Reasoning(text) } else { Part::Content(text) }.join(out);
    }
}

/// Whether `text` could still become `tag`.
fn begins(text: &str, tag: &str) -> bool {
    text.len() < tag.len() && tag.starts_with(text)
}

/// Length of the longest end of `text` that is a beginning of `tag` (less than the whole tag).
fn overlap(text: &str, tag: &str) -> usize {
    (1..tag.len().min(text.len() + 1)).rev().find(|&n| text.ends_with(&tag[..n])).unwrap_or(0)
}

/// Whether a rendered prompt ends inside an open `<think>`, so that the answer starts with reasoning.
pub fn prompt_opens_reasoning(prompt: &str) -> bool {
    match (prompt.rfind(OPEN), prompt.rfind(CLOSE)) {
        (Some(open), Some(close)) => open > close && prompt[open + OPEN.len()..].trim().is_empty(),
        (Some(open), None) => prompt[open + OPEN.len()..].trim().is_empty(),
        _ => false,
    }
}

#[cfg(test)]
mod tests;
