//! A grammar as text: one or more parts, the first of which is the whole and may name the others (`@name`).

use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use llguidance::regex_to_lark;
use serde_json::{Value, json};

use crate::bounds;

/// White space between the parts of a JSON text: a space, or a line break with an indentation. No endless run.
const WHITE_SPACE: &str = r"( |\n {0,40})";

/// Most bytes of a grammar: what is larger takes seconds to compile.
const LARGEST: usize = 512 << 10;

/// A grammar that is not compiled yet.
#[derive(Clone, Debug)]
pub struct Grammar {
    parts: Vec<GrammarWithLexer>,
    /// What makes it impossible, said when it is compiled.
    broken: Option<String>,
}

impl Grammar {
    fn of(part: GrammarWithLexer) -> Self {
        Self { parts: vec![part], broken: None }
    }

    fn broken(why: String) -> Self {
        Self { parts: Vec::new(), broken: Some(why) }
    }

    /// JSON that fits `schema`. Keywords that cannot be enforced fail when it is compiled.
    pub fn json(schema: &Value) -> Self {
        if let Err(why) = bounds::schema(schema) {
            return Self::broken(why);
        }
        let mut schema = schema.clone();
        if let Some(object) = schema.as_object_mut() {
            // Options of the engine, among them one that ignores keywords: not the request's to set.
            object.insert("x-guidance".into(), json!({"whitespace_pattern": WHITE_SPACE, "json_allow_general_unicode_escapes": true}));
        }
        Self::of(GrammarWithLexer::from_json_schema(schema))
    }

    /// Text that matches `regex` (Rust's dialect) from its beginning to its end.
    pub fn regex(regex: &str) -> Self {
        match lexeme(regex) {
            Ok(lexeme) => Self::lark(&format!("start: {lexeme}")),
            Err(why) => Self::broken(why),
        }
    }

    /// One of `texts`.
    pub fn choice(texts: &[String]) -> Self {
        Self::regex(&alternatives(texts))
    }

    /// Text of a grammar in llguidance's dialect of Lark; it starts at `start`.
    pub fn lark(text: &str) -> Self {
        match bounds::lark(text) {
            Ok(()) => Self::of(GrammarWithLexer::from_lark(text.to_owned())),
            Err(why) => Self::broken(why),
        }
    }

    /// The same, with `part` under the name `@name`.
    #[must_use]
    pub fn with(mut self, name: &str, part: Self) -> Self {
        self.broken = self.broken.or(part.broken);
        for (i, mut part) in part.parts.into_iter().enumerate() {
            if i == 0 {
                part.name = Some(name.to_owned());
            }
            self.parts.push(part);
        }
        self
    }

    /// The text that [`crate::Vocabulary::compile`] takes.
    pub fn to_text(&self) -> String {
        match &self.broken {
            Some(why) => json!({"broken": why}).to_string(),
            None => json!({"grammars": self.parts}).to_string(),
        }
    }

    /// Reads what [`Grammar::to_text`] wrote.
    pub(crate) fn parse(text: &str) -> Result<TopLevelGrammar, String> {
        if text.len() > LARGEST {
            return Err(format!("it has {} bytes; at most {LARGEST} are allowed", text.len()));
        }
        let value: Value = serde_json::from_str(text).map_err(|e| e.to_string())?;
        match value.get("broken").and_then(Value::as_str) {
            Some(why) => Err(why.to_owned()),
            None => serde_json::from_value(value).map_err(|e| e.to_string()),
        }
    }
}

/// `regex` as a lexeme of Lark (`/…/`), checked. Anchors at its ends are dropped: a lexeme is always matched as a whole.
///
/// # Errors
/// What is wrong with it.
pub fn lexeme(regex: &str) -> Result<String, String> {
    regex_syntax::Parser::new().parse(regex).map_err(|e| crate::short(&format!("the regular expression is invalid: {}", reason(&e))))?;
    let bare = regex.strip_prefix('^').unwrap_or(regex);
    let bare = match bare.strip_suffix('$') {
        // `\$` is a dollar sign.
        Some(rest) if (rest.len() - rest.trim_end_matches('\\').len()) % 2 == 0 => rest,
        _ => bare,
    };
    Ok(format!("/{}/", regex_to_lark(bare, "")))
}

/// The parser's reason without its drawing of the pattern.
fn reason(error: &regex_syntax::Error) -> String {
    match error {
        regex_syntax::Error::Parse(e) => e.kind().to_string(),
        regex_syntax::Error::Translate(e) => e.kind().to_string(),
        other => other.to_string(),
    }
}

/// A regular expression that matches exactly `texts`.
pub fn alternatives(texts: &[String]) -> String {
    let escaped: Vec<String> = texts.iter().map(|text| regex_syntax::escape(text)).collect();
    format!("({})", escaped.join("|"))
}
