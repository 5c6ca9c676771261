//! Messages → prompt text with the checkpoint's own chat template, rendered as the reference renderer (Jinja2 in transformers) does.
//!
//! Row 2 of the life of one token; `tokenizer` turns the text into ids. The template comes from `chat_template.jinja`, else from
//! the `chat_template` of `tokenizer_config.json` (a string, or a list of named ones); of a GGUF file, from its `tokenizer.chat_template`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use minijinja::{AutoEscape, Environment, ErrorKind, Value};
use serde_json::{Map, Value as Json};
use tandem_model::{Checkpoint, files, gguf};

use super::{json, strftime};

/// Why there is no template, or why one did not render.
#[derive(Debug, thiserror::Error)]
pub enum TemplateError {
    /// A file is unreadable.
    #[error("{path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// `tokenizer_config.json` is no JSON, or its `chat_template` is neither string nor list.
    #[error("{path}: {message}")]
    Config {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        message: String,
    },
    /// The template does not parse.
    #[error("{origin}: line {line}: {message}")]
    Syntax {
        /// File (and key) of the template.
        origin: String,
        /// 1-based line in the template.
        line: usize,
        /// What is wrong there.
        message: String,
    },
    /// The template called `raise_exception`: it does not accept these messages.
    #[error("the chat template refused the messages: {0}")]
    Raised(String),
    /// The template failed on these messages.
    #[error("the chat template failed at line {line}: {message}")]
    Render {
        /// 1-based line in the template, 0 if unknown.
        line: usize,
        /// What went wrong there.
        message: String,
    },
    /// The checkpoint ships no template.
    #[error(
        "this checkpoint has no chat template (neither chat_template.jinja nor chat_template in tokenizer_config.json, nor \
         tokenizer.chat_template in a GGUF file); use /v1/completions"
    )]
    Absent,
}

const NAME: &str = "chat_template";
/// Marks an error as made by `raise_exception`.
const RAISED: &str = "raise_exception: ";

/// A compiled chat template. Immutable; share it in an `Arc`.
pub struct ChatTemplate {
    env: Environment<'static>,
    /// Names every render sees (`bos_token`, `eos_token`, …).
    globals: BTreeMap<String, Value>,
    /// Whether it renders lists of content parts itself.
    reads_parts: bool,
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChatTemplate").field("globals", &self.globals).finish_non_exhaustive()
    }
}

impl ChatTemplate {
    /// The template of a checkpoint: from its GGUF file, or from its folder; [`TemplateError::Absent`] if it has none.
    pub fn of(checkpoint: &Checkpoint) -> Result<Self, TemplateError> {
        let Some(header) = checkpoint.gguf() else { return Self::open(checkpoint.dir()) };
        let source = gguf::tokenizer::chat_template(header).ok_or(TemplateError::Absent)?;
        let tokens = gguf::tokenizer::named_tokens(header).into_iter();
        let globals = tokens.map(|(name, token)| (name.to_owned(), Value::from(token))).collect();
        Self::new(source, &format!("{}: tokenizer.chat_template", checkpoint.config_file().display()), globals)
    }

    /// Loads the template of a checkpoint directory; [`TemplateError::Absent`] if it has none.
    pub fn open(dir: &Path) -> Result<Self, TemplateError> {
        let config_path = dir.join("tokenizer_config.json");
        let config = match read(&config_path)? {
            Some(text) => serde_json::from_str(&text)
                .map_err(|e| TemplateError::Config { path: config_path.clone(), message: format!("not JSON: {e}") })?,
            None => Json::Null,
        };
        if !config.is_object() && !config.is_null() {
            return Err(TemplateError::Config { path: config_path, message: "no object of settings".to_owned() });
        }
        let file = dir.join("chat_template.jinja");
        let (source, origin) = match read(&file)? {
            Some(source) => (source, file.display().to_string()),
            None => (from_config(&config, &config_path)?, format!("{}: chat_template", config_path.display())),
        };
        let mut globals = BTreeMap::new();
        for name in ["bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token"] {
            // A token is a string or an object with its content.
            let token = config.get(name).and_then(|t| t.as_str().or_else(|| t.get("content")?.as_str()));
            if let Some(token) = token {
                globals.insert(name.to_owned(), Value::from(token));
            }
        }
        Self::new(&source, &origin, globals)
    }

    /// Compiles `source`; `origin` names it in errors.
    pub fn new(source: &str, origin: &str, globals: BTreeMap<String, Value>) -> Result<Self, TemplateError> {
        let mut env = Environment::new();
        env.set_trim_blocks(true);
        env.set_lstrip_blocks(true);
        env.set_auto_escape_callback(|_| AutoEscape::None);
        env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        // A template is data from a checkpoint: bound its recursion and keep it from the file system (no loader is set).
        env.set_recursion_limit(200);
        env.add_filter("tojson", json::tojson);
        env.add_function("raise_exception", |message: String| -> Result<Value, minijinja::Error> {
            Err(minijinja::Error::new(ErrorKind::InvalidOperation, format!("{RAISED}{message}")))
        });
        env.add_function("strftime_now", |format: &str| strftime::now(format));
        env.add_template_owned(NAME, without_generation_tags(source)).map_err(|e| TemplateError::Syntax {
            origin: origin.to_owned(),
            line: e.line().unwrap_or(0),
            message: e.detail().map_or_else(|| e.kind().to_string(), str::to_owned),
        })?;
        let mut template = Self { env, globals, reads_parts: false };
        template.reads_parts = template.probe_parts();
        Ok(template)
    }

    /// Whether the template takes a list of text parts for what the same text as a string would be. If not, lists must be
    /// joined to strings before they are rendered.
    pub fn reads_parts(&self) -> bool {
        self.reads_parts
    }

    fn probe_parts(&self) -> bool {
        let render = |content: Json| {
            let messages = serde_json::json!([{"role": "user", "content": content}]);
            self.render(&messages, None, true, &Map::new()).ok()
        };
        let plain = render(Json::from("probe text"));
        plain.is_some() && plain == render(serde_json::json!([{"type": "text", "text": "probe text"}]))
    }

    /// The prompt of `messages` (an array of objects). `tools` is the request's list; `kwargs` are further names the template may read
    /// (`reasoning_effort`, `clear_thinking`, …).
    pub fn render(
        &self,
        messages: &Json,
        tools: Option<&Json>,
        add_generation_prompt: bool,
        kwargs: &Map<String, Json>,
    ) -> Result<String, TemplateError> {
        let mut context = self.globals.clone();
        context.extend(kwargs.iter().map(|(name, value)| (name.clone(), Value::from_serialize(value))));
        context.insert("messages".into(), Value::from_serialize(messages));
        context.insert("tools".into(), tools.map_or(Value::from(()), Value::from_serialize));
        context.insert("add_generation_prompt".into(), Value::from(add_generation_prompt));
        let template = self.env.get_template(NAME).map_err(render_error)?;
        template.render(Value::from(context)).map_err(render_error)
    }
}

fn read(path: &Path) -> Result<Option<String>, TemplateError> {
    files::read_if_there(path).map_err(|source| TemplateError::Read { path: path.into(), source })
}

fn from_config(config: &Json, path: &Path) -> Result<String, TemplateError> {
    let named = |entry: &Json, name: &str| {
        (entry.get("name")?.as_str()? == name).then(|| entry.get("template")?.as_str().map(str::to_owned)).flatten()
    };
    match config.get("chat_template") {
        None | Some(Json::Null) => Err(TemplateError::Absent),
        Some(Json::String(source)) => Ok(source.clone()),
        Some(Json::Array(list)) => list.iter().find_map(|entry| named(entry, "default")).ok_or_else(|| TemplateError::Config {
            path: path.into(),
            message: "chat_template is a list without an entry named \"default\"".into(),
        }),
        Some(_) => {
            Err(TemplateError::Config { path: path.into(), message: "chat_template must be a string or a list of {name, template}".into() })
        }
    }
}

/// Training marks (`{% generation %}`) mean nothing when serving: an `if true` keeps the whitespace rules of the tags.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at);
        let Some(end) = tag.find("%}").map(|end| end + 2) else { break };
        out.push_str(before);
        let (tag, after) = tag.split_at(end);
        match tag[2..end - 2].trim_matches(|c: char| c.is_whitespace() || c == '-' || c == '+') {
            "generation" => out.push_str(&tag.replacen("generation", "if true", 1)),
            "endgeneration" => out.push_str(&tag.replacen("endgeneration", "endif", 1)),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

fn render_error(error: minijinja::Error) -> TemplateError {
    // The innermost error says what happened, the first with a line says where.
    let mut deepest = &error;
    let mut line = error.line();
    while let Some(source) = std::error::Error::source(deepest).and_then(|s| s.downcast_ref::<minijinja::Error>()) {
        deepest = source;
        line = deepest.line().or(line);
    }
    let detail = deepest.detail().map_or_else(|| deepest.kind().to_string(), str::to_owned);
    match detail.strip_prefix(RAISED) {
        Some(message) => TemplateError::Raised(message.to_owned()),
        None => TemplateError::Render { line: line.unwrap_or(0), message: detail },
    }
}

#[cfg(test)]
mod tests;
