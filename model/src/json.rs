//! Typed reading of config files: each error names the file, the dotted key, what was needed and what is there.
//!
//! Neighbours: `geometry.rs` and `generation.rs` read through [`Section`].

use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::{ModelError, files};

/// Reads a JSON file whose top level is an object.
///
/// # Errors
/// The file cannot be read, is not JSON, or is no object.
pub fn read_object(path: &Path) -> Result<Value, ModelError> {
    let text = files::text(path).map_err(|source| ModelError::Io { path: path.to_owned(), source })?;
    parse_object(path, &text)
}

/// Parses the text of such a file; `path` is for messages.
///
/// # Errors
/// It is not JSON, or no object.
pub fn parse_object(path: &Path, text: &str) -> Result<Value, ModelError> {
    let value: Value = serde_json::from_str(text).map_err(|source| ModelError::Json { path: path.to_owned(), source })?;
    if value.is_object() {
        Ok(value)
    } else {
        Err(ModelError::Key { path: path.to_owned(), key: "(top level)".to_owned(), needed: "an object".to_owned(), got: describe(&value) })
    }
}

/// A value in few words, for messages.
pub fn describe(value: &Value) -> String {
    let text = value.to_string();
    if text.chars().count() <= 60 { text } else { format!("{}…", text.chars().take(60).collect::<String>()) }
}

/// Largest size in a config. Sizes are multiplied in pairs later on: a bound far above any model keeps that free of overflow.
const MOST: usize = 1 << 28;

/// One object of a config file, with its place for messages.
#[derive(Clone, Debug)]
pub struct Section<'a> {
    path: PathBuf,
    prefix: String,
    value: &'a Value,
}

impl<'a> Section<'a> {
    /// The top level of a file.
    pub fn new(path: &Path, value: &'a Value) -> Self {
        Self { path: path.to_owned(), prefix: String::new(), value }
    }

    /// A nested object; `None` where the key is absent or null.
    ///
    /// # Errors
    /// The key is there and is no object.
    pub fn section(&self, key: &str) -> Result<Option<Section<'a>>, ModelError> {
        match self.get(key) {
            None => Ok(None),
            Some(value) if value.is_object() => {
                Ok(Some(Section { path: self.path.clone(), prefix: format!("{}{key}.", self.prefix), value }))
            }
            Some(value) => Err(self.error(key, "an object", describe(value))),
        }
    }

    /// The raw value; `None` where the key is absent or null.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.value.get(key).filter(|v| !v.is_null())
    }

    /// An error about one of this section's keys.
    pub fn error(&self, key: &str, needed: impl Into<String>, got: impl Into<String>) -> ModelError {
        ModelError::Key { path: self.path.clone(), key: format!("{}{key}", self.prefix), needed: needed.into(), got: got.into() }
    }

    /// A whole number ≥ `min`; `None` where the key is absent or null.
    ///
    /// # Errors
    /// Another type, or a smaller number.
    pub fn opt_int(&self, key: &str, min: usize) -> Result<Option<usize>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_u64().and_then(|n| usize::try_from(n).ok()) {
            Some(n) if n >= min && n <= MOST => Ok(Some(n)),
            Some(n) if n > MOST => Err(self.error(key, format!("a whole number from {min} to {MOST}"), describe(value))),
            _ => Err(self.error(key, format!("a whole number of at least {min}"), describe(value))),
        }
    }

    /// A whole number ≥ `min` that must be there.
    ///
    /// # Errors
    /// Absent, another type, or a smaller number.
    pub fn int(&self, key: &str, min: usize) -> Result<usize, ModelError> {
        self.opt_int(key, min)?.ok_or_else(|| self.error(key, format!("a whole number of at least {min}"), "nothing"))
    }

    /// A finite number; `None` where the key is absent or null.
    ///
    /// # Errors
    /// Another type.
    pub fn opt_float(&self, key: &str) -> Result<Option<f32>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.as_f64().map(|f| f as f32) {
            Some(f) if f.is_finite() => Ok(Some(f)),
            _ => Err(self.error(key, "a finite number", describe(value))),
        }
    }

    /// A finite number > 0 that must be there.
    ///
    /// # Errors
    /// Absent, another type, or not positive.
    pub fn positive(&self, key: &str) -> Result<f32, ModelError> {
        match self.opt_float(key)? {
            Some(f) if f > 0.0 => Ok(f),
            Some(f) => Err(self.error(key, "a number above 0", f.to_string())),
            None => Err(self.error(key, "a number above 0", "nothing")),
        }
    }

    /// A boolean; `None` where the key is absent or null.
    ///
    /// # Errors
    /// Another type.
    pub fn opt_bool(&self, key: &str) -> Result<Option<bool>, ModelError> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Bool(b)) => Ok(Some(*b)),
            Some(value) => Err(self.error(key, "true or false", describe(value))),
        }
    }

    /// A list of strings of the given length; `None` where the key is absent or null.
    ///
    /// # Errors
    /// Another type or length.
    pub fn opt_strings(&self, key: &str, len: usize) -> Result<Option<Vec<&'a str>>, ModelError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let list = value.as_array().ok_or_else(|| self.error(key, format!("a list of {len} strings"), describe(value)))?;
        if list.len() != len {
            return Err(self.error(key, format!("{len} entries (one per layer: num_hidden_layers)"), format!("{} entries", list.len())));
        }
        let strings =
            list.iter().enumerate().map(|(i, v)| v.as_str().ok_or_else(|| self.error(&format!("{key}[{i}]"), "a string", describe(v))));
        strings.collect::<Result<_, _>>().map(Some)
    }

    /// Token ids, as one number or a list; empty where the key is absent or null.
    ///
    /// # Errors
    /// Another type, or a negative or too large number.
    pub fn token_ids(&self, key: &str) -> Result<Vec<u32>, ModelError> {
        let id = |v: &Value| v.as_u64().and_then(|n| u32::try_from(n).ok());
        let Some(value) = self.get(key) else { return Ok(Vec::new()) };
        let ids = match value {
            Value::Array(list) => list.iter().map(id).collect::<Option<Vec<_>>>(),
            one => id(one).map(|n| vec![n]),
        };
        ids.ok_or_else(|| self.error(key, "a token id or a list of token ids", describe(value)))
    }

    /// Refuses any value but `needed` (an absent key passes).
    ///
    /// # Errors
    /// The key is there with another value.
    pub fn only(&self, key: &str, needed: &Value) -> Result<(), ModelError> {
        match self.get(key) {
            Some(value) if value != needed => Err(self.error(key, format!("{needed} (nothing else is implemented)"), describe(value))),
            _ => Ok(()),
        }
    }
}
