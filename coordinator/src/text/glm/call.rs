//! The inside of one `<tool_call>`, behind the function's name: keys and values in tags → pieces of one JSON object.
//!
//! An argument that can only be a string is sent on as it comes, others when they are whole: half a number is another number. What a
//! model leaves out is forgiven where nothing else can be meant: a key without its opening tag, a value without its opening tag, a call
//! that ends inside its last value.

use std::sync::Arc;

use super::tools::{Bare, bare_key};
use super::value::to_json;
use super::{CALL, Kinds, Part, ToolSet, begins, overlap};
use crate::text::json::escape;

const END: &str = "</tool_call>";
const KEY: &str = "<arg_key>";
const KEY_END: &str = "</arg_key>";
const VALUE: &str = "<arg_value>";
const VALUE_END: &str = "</arg_value>";

/// What a step did.
pub enum Step {
    /// It changed the text or the state: look again.
    Again,
    /// It needs more text.
    Wait,
    /// The call has ended; `another` has begun behind it.
    Over {
        /// The next call's opening tag was taken as well.
        another: bool,
    },
}

#[derive(Clone, Debug)]
enum Place {
    /// Where a key may begin.
    Between,
    /// Inside a key.
    Key,
    /// Behind a key.
    Behind(String),
    /// Inside a value.
    Value(Value),
}

#[derive(Clone, Debug)]
struct Value {
    key: String,
    kinds: Kinds,
    /// The key came before: the first value stands, since it is sent already.
    again: bool,
    /// Bytes of the held text that are known to hold no closing tag.
    seen: usize,
}

/// One call.
#[derive(Clone, Debug)]
pub struct Call {
    tools: Arc<ToolSet>,
    tool: usize,
    place: Place,
    /// Keys whose values were begun.
    keys: Vec<String>,
}

impl Call {
    /// A call of function `tool`.
    pub fn new(tools: Arc<ToolSet>, tool: usize) -> Self {
        Self { tools, tool, place: Place::Between, keys: Vec::new() }
    }

    /// Reads on.
    pub fn step(&mut self, held: &mut String, out: &mut Vec<Part>) -> Step {
        match &mut self.place {
            Place::Between => self.between(held, out),
            Place::Key => self.key(held, out),
            Place::Behind(_) => self.behind(held, out),
            Place::Value(_) => self.value(held, out),
        }
    }

    /// Ends the sequence inside this call; see [`super::AnswerParser::finish`].
    pub fn finish(&mut self, held: &str, complete: bool, out: &mut Vec<Part>) {
        if let Place::Value(value) = &self.place {
            let text = if complete { held.trim_end().strip_suffix(END).unwrap_or(held) } else { held };
            if !value.again {
                if value.kinds == Kinds::STRING {
                    string(text, out);
                    if complete {
                        Part::Arguments("\"".into()).join(out);
                    }
                } else if complete {
                    let (key, json) = (value.key.clone(), to_json(text, value.kinds));
                    self.open(&key, &json, out);
                }
            }
        }
        if complete {
            self.close(out);
        }
    }

    fn between(&mut self, held: &mut String, out: &mut Vec<Part>) -> Step {
        skip_space(held);
        if take(held, KEY) {
            self.place = Place::Key;
        } else if take(held, END) {
            self.close(out);
            return Step::Over { another: false };
        } else if take(held, CALL) {
            self.close(out);
            return Step::Over { another: true };
        } else {
            let bare = bare_key(self.tools.get(self.tool), held);
            match bare {
                Bare::Is => self.place = Place::Key,
                _ if bare == Bare::Pending || [KEY, END, CALL].iter().any(|tag| begins(held, tag)) => return Step::Wait,
                // Neither key nor end: nothing that a call can hold.
                _ => drop_char(held),
            }
        }
        Step::Again
    }

    fn key(&mut self, held: &mut String, out: &mut Vec<Part>) -> Step {
        let first = [KEY_END, VALUE, END].iter().filter_map(|tag| Some((held.find(tag)?, *tag))).min();
        let Some((at, tag)) = first else { return Step::Wait };
        let key = held[..at].trim().to_owned();
        held.drain(..at + tag.len());
        match tag {
            KEY_END => self.place = Place::Behind(key),
            VALUE => self.begin(key, out),
            _ => {
                self.close(out);
                return Step::Over { another: false };
            }
        }
        Step::Again
    }

    fn behind(&mut self, held: &mut String, out: &mut Vec<Part>) -> Step {
        let Place::Behind(key) = &mut self.place else { return Step::Wait };
        let rest = held.trim_start();
        if rest.is_empty() || begins(rest, VALUE) || begins(rest, END) {
            return Step::Wait;
        }
        let key = std::mem::take(key);
        if rest.starts_with(END) {
            skip_space(held);
            self.place = Place::Between;
            return Step::Again;
        }
        if rest.starts_with(VALUE) {
            skip_space(held);
            held.drain(..VALUE.len());
        }
        self.begin(key, out);
        Step::Again
    }

    /// A value begins.
    fn begin(&mut self, key: String, out: &mut Vec<Part>) {
        let kinds = self.tools.get(self.tool).kinds(&key);
        let again = self.keys.contains(&key);
        if !again && kinds == Kinds::STRING {
            self.open(&key, "\"", out);
        }
        self.place = Place::Value(Value { key, kinds, again, seen: 0 });
    }

    fn value(&mut self, held: &mut String, out: &mut Vec<Part>) -> Step {
        let Place::Value(value) = &mut self.place else { return Step::Wait };
        let streamed = value.kinds == Kinds::STRING && !value.again;
        if let Some(at) = held[value.seen..].find(VALUE_END).map(|at| at + value.seen) {
            let text: String = held.drain(..at + VALUE_END.len()).collect();
            let text = &text[..at];
            let (key, kinds, again) = (std::mem::take(&mut value.key), value.kinds, value.again);
            self.place = Place::Between;
            if streamed {
                string(text, out);
                Part::Arguments("\"".into()).join(out);
            } else if !again {
                self.open(&key, &to_json(text, kinds), out);
            }
            return Step::Again;
        }
        let safe = undecided(held);
        if streamed {
            let text: String = held.drain(..safe).collect();
            string(&text, out);
        } else {
            value.seen = safe;
        }
        Step::Wait
    }

    /// The next member of the object, as far as `json` goes.
    fn open(&mut self, key: &str, json: &str, out: &mut Vec<Part>) {
        let mut text = String::from(if self.keys.is_empty() { "{\"" } else { ",\"" });
        escape(key, false, &mut text);
        text.push_str("\":");
        text.push_str(json);
        self.keys.push(key.to_owned());
        Part::Arguments(text).join(out);
    }

    fn close(&self, out: &mut Vec<Part>) {
        Part::Arguments(if self.keys.is_empty() { "{}" } else { "}" }.into()).join(out);
    }
}

/// The next piece of a string's inside.
fn string(text: &str, out: &mut Vec<Part>) {
    let mut json = String::with_capacity(text.len());
    escape(text, false, &mut json);
    Part::Arguments(json).join(out);
}

/// Where the end of `text` begins that may turn out not to belong to the value: a closing tag in the making, or the end of the whole call
/// (which a complete sequence may put right behind its last value).
fn undecided(text: &str) -> usize {
    let tag = text.len() - overlap(text, VALUE_END).max(overlap(text, END));
    let body = text[..tag].trim_end();
    if body.ends_with(END) { body.len() - END.len() } else { tag }
}

fn take(held: &mut String, tag: &str) -> bool {
    let there = held.starts_with(tag);
    if there {
        held.drain(..tag.len());
    }
    there
}

fn skip_space(held: &mut String) {
    let space = held.len() - held.trim_start().len();
    held.drain(..space);
}

fn drop_char(held: &mut String) {
    let first = held.chars().next().map_or(0, char::len_utf8);
    held.drain(..first);
}
