//! What an answer may look like, as masks over the next token.
//!
//! | file | idea |
//! |---|---|
//! | [`bounds`] | what a grammar may not hold |
//! | [`source`] | [`Grammar`]: a grammar as text that crosses a process boundary |
//! | [`vocabulary`] | [`Vocabulary`]: the bytes of every token, once per model, and the compiler over them |
//! | [`matcher`] | [`Matcher`]: one sequence: tokens in, masks out |
//!
//! The coordinator compiles a grammar to refuse what cannot be enforced; the attention worker compiles the same text with the same
//! vocabulary and limits beside its sampler (`docs/adr/0006-grammar-masks.md`). The engine is `llguidance`; nothing of it shows outside of
//! this crate. Nothing here knows of HTTP, chats or models.
#![forbid(unsafe_code)]

pub mod bounds;
pub mod matcher;
pub mod source;
pub mod vocabulary;

pub use matcher::{Mask, Matcher};
pub use source::Grammar;
pub use vocabulary::{TokenTable, Vocabulary};

/// Why a grammar cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrammarError {
    /// The vocabulary's table does not fit together.
    #[error("the token table is broken: {0}")]
    Table(String),
    /// The text is no grammar, or one that asks for something that cannot be enforced.
    #[error("{0}")]
    Compile(String),
    /// The token does not continue the text, or the grammar became too large to follow.
    #[error("the answer left its grammar: {0}")]
    Left(String),
}

/// One line of at most a few hundred characters: the text may hold a user's whole schema.
fn short(error: &impl std::fmt::Display) -> String {
    const LONGEST: usize = 300;
    let text = error.to_string();
    let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let first = lines.next().unwrap_or_default();
    // A drawing of the place comes between the heading and the reason.
    let line = match lines.next_back().filter(|_| first.ends_with(':')) {
        Some(reason) => format!("{first} {}", reason.trim_start_matches("error: ")),
        None => first.to_owned(),
    };
    let mut out: String = line.chars().take(LONGEST).collect();
    if out.len() < line.len() {
        out.push('…');
    }
    out
}
