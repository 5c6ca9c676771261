//! A form that the answer must have: `response_format`, responses' `text.format`, and the names that vLLM's clients use.
//!
//! What cannot be enforced is refused: an answer that was only meant to fit looks the same as one that does.

use serde::Deserialize;
use serde_json::{Map, Value, json};

use tandem_grammar::Grammar;

use super::start::Asked;
use crate::api::ApiError;

/// Most alternatives of a choice.
const MOST_CHOICES: usize = 10_000;
/// Longest name of a schema, as OpenAI has it.
const LONGEST_NAME: usize = 64;

/// The form of an answer, and the field that asked for it.
#[derive(Clone, Debug, PartialEq)]
pub struct Form {
    /// What the answer must be.
    pub kind: Kind,
    /// For errors.
    pub field: String,
}

impl Form {
    /// The grammar of such an answer.
    pub fn grammar(&self) -> Asked {
        let grammar = match &self.kind {
            Kind::Json(schema) => Grammar::json(schema),
            Kind::Regex(regex) => Grammar::regex(regex),
            Kind::Choice(texts) => Grammar::choice(texts),
            Kind::Lark(text) => Grammar::lark(text),
        };
        Asked { grammar, field: self.field.clone() }
    }
}

/// What an answer must be.
#[derive(Clone, Debug, PartialEq)]
pub enum Kind {
    /// JSON that fits this schema.
    Json(Value),
    /// Text that matches this regular expression as a whole.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// Text of this grammar, in llguidance's dialect of Lark.
    Lark(String),
}

/// The fields that ask for a form.
#[derive(Clone, Debug, Default, Deserialize)]
#[allow(missing_docs)] // The names are the API's.
pub struct FormFields {
    pub response_format: Option<Value>,
    pub structured_outputs: Option<Map<String, Value>>,
    pub guided_json: Option<Value>,
    pub guided_regex: Option<Value>,
    pub guided_choice: Option<Value>,
    pub guided_grammar: Option<Value>,
}

impl FormFields {
    /// The form asked for; two at once are an error.
    pub fn form(&self) -> Result<Option<Form>, ApiError> {
        let mut forms = Vec::new();
        if let Some(format) = &self.response_format {
            forms.extend(response_format(format, "response_format")?);
        }
        if let Some(object) = &self.structured_outputs {
            for (key, value) in object.iter().filter(|(_, value)| !value.is_null()) {
                forms.extend(guided(key, value, format!("structured_outputs.{key}"))?);
            }
        }
        let flat = [
            ("json", &self.guided_json),
            ("regex", &self.guided_regex),
            ("choice", &self.guided_choice),
            ("grammar", &self.guided_grammar),
        ];
        for (key, value) in flat {
            if let Some(value) = value {
                forms.extend(guided(key, value, format!("guided_{key}"))?);
            }
        }
        let last = forms.pop();
        match (forms.pop(), last) {
            (Some(first), Some(last)) => {
                Err(ApiError::invalid(last.field.clone(), format!("{} and {} ask for two forms; send one", first.field, last.field)))
            }
            (_, last) => Ok(last),
        }
    }
}

/// A `response_format` (chat completions: the schema below `json_schema`) or a `text.format` (responses: the schema beside the type).
pub fn response_format(format: &Value, field: &str) -> Result<Option<Form>, ApiError> {
    let form = |kind| Ok(Some(Form { kind, field: field.to_owned() }));
    match format.get("type").and_then(Value::as_str) {
        _ if format.is_null() => Ok(None),
        Some("text") => Ok(None),
        Some("json_object") => form(Kind::Json(json!({"type": "object"}))),
        Some("json_schema") => {
            let (inside, path) = match format.get("json_schema") {
                Some(inside) => (inside, format!("{field}.json_schema")),
                None => (format, field.to_owned()),
            };
            let bad = |name: &str, needed: &str| {
                let param = format!("{path}.{name}");
                Err(ApiError::invalid(param.clone(), format!("{param} {needed}")))
            };
            match inside.get("name") {
                None | Some(Value::Null) => {}
                Some(Value::String(name)) if is_name(name) => {}
                Some(_) => return bad("name", "must have 1 to 64 characters of A-Za-z0-9_-"),
            }
            match inside.get("schema") {
                Some(schema @ Value::Object(_)) => Ok(Some(Form { kind: Kind::Json(schema.clone()), field: format!("{path}.schema") })),
                _ => bad("schema", "must be a JSON Schema object"),
            }
        }
        Some(other) => {
            let shown: String = other.chars().take(40).collect();
            let message = format!("{field}.type is \"{shown}\"; text, json_object and json_schema are supported");
            Err(ApiError::unsupported(field, message))
        }
        None => Err(ApiError::invalid(field, format!("{field}.type must be \"text\", \"json_object\" or \"json_schema\""))),
    }
}

fn is_name(name: &str) -> bool {
    (1..=LONGEST_NAME).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-".contains(&b))
}

/// One of vLLM's: `json`, `regex`, `choice`, `grammar`, `json_object`.
fn guided(key: &str, value: &Value, field: String) -> Result<Option<Form>, ApiError> {
    let bad = |needed: &str| Err(ApiError::invalid(field.clone(), format!("{field} must be {needed}")));
    let text = |value: &Value| value.as_str().filter(|text| !text.is_empty()).map(str::to_owned);
    let kind = match key {
        _ if value.is_null() => return Ok(None),
        "json" => match value {
            Value::Object(_) => Kind::Json(value.clone()),
            Value::String(schema) => match serde_json::from_str(schema) {
                Ok(schema @ Value::Object(_)) => Kind::Json(schema),
                _ => return bad("a JSON Schema object, or one as text"),
            },
            _ => return bad("a JSON Schema object, or one as text"),
        },
        "regex" => match text(value) {
            Some(regex) => Kind::Regex(regex),
            None => return bad("a regular expression"),
        },
        "grammar" => match text(value) {
            Some(grammar) if grammar.contains("%json") => {
                let message =
                    format!("{field}: %json inside of a grammar is not supported; send a schema as response_format, or spell the JSON out");
                return Err(ApiError::unsupported(field, message));
            }
            Some(grammar) => Kind::Lark(grammar),
            None => return bad("a grammar in Lark's notation"),
        },
        "choice" => {
            let list = value.as_array().filter(|list| (1..=MOST_CHOICES).contains(&list.len()));
            match list.and_then(|list| list.iter().map(text).collect::<Option<Vec<String>>>()) {
                Some(list) => Kind::Choice(list),
                None => return bad("a list of texts, none empty"),
            }
        }
        "json_object" => match value {
            Value::Bool(true) => Kind::Json(json!({"type": "object"})),
            Value::Bool(false) => return Ok(None),
            _ => return bad("true or false"),
        },
        "structural_tag" => return Err(ApiError::unsupported(field.clone(), format!("{field} is not supported"))),
        // Settings of other servers' engines.
        _ => return Ok(None),
    };
    Ok(Some(Form { kind, field }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn form(body: Value) -> Result<Option<Form>, ApiError> {
        serde_json::from_value::<FormFields>(body).unwrap().form()
    }

    #[test]
    fn forms_have_several_spellings() {
        let schema = json!({"type": "object"});
        let json = Kind::Json(schema.clone());
        let cases = [
            (json!({}), None),
            (json!({"response_format": {"type": "text"}}), None),
            (json!({"response_format": null, "guided_json": null}), None),
            (json!({"response_format": {"type": "json_object"}}), Some(json.clone())),
            (json!({"response_format": {"type": "json_schema", "json_schema": {"name": "a-b_1", "schema": schema}}}), Some(json.clone())),
            (json!({"response_format": {"type": "json_schema", "name": "x", "schema": schema}}), Some(json.clone())),
            (json!({"guided_json": "{\"type\": \"object\"}"}), Some(json.clone())),
            (json!({"structured_outputs": {"json": schema, "regex": null}}), Some(json)),
            (json!({"structured_outputs": {"regex": "a+", "disable_any_whitespace": true}}), Some(Kind::Regex("a+".into()))),
            (json!({"guided_choice": ["a", "b"]}), Some(Kind::Choice(vec!["a".into(), "b".into()]))),
            (json!({"guided_grammar": "start: \"a\""}), Some(Kind::Lark("start: \"a\"".into()))),
        ];
        for (body, want) in cases {
            assert_eq!(form(body.clone()).unwrap().map(|form| form.kind), want, "{body}");
        }
    }

    #[test]
    fn what_is_no_form_is_named() {
        let cases = [
            (json!({"response_format": 5}), "response_format"),
            (json!({"response_format": {"type": "yaml"}}), "response_format"),
            (json!({"response_format": {"type": "json_schema"}}), "response_format.schema"),
            (
                json!({"response_format": {"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}}),
                "response_format.json_schema.name",
            ),
            (json!({"response_format": {"type": "json_schema", "json_schema": {"schema": []}}}), "response_format.json_schema.schema"),
            (json!({"guided_regex": ""}), "guided_regex"),
            (json!({"guided_choice": []}), "guided_choice"),
            (json!({"guided_choice": ["a", 5]}), "guided_choice"),
            (json!({"structured_outputs": {"structural_tag": {}}}), "structured_outputs.structural_tag"),
            (json!({"structured_outputs": {"regex": "a", "choice": ["b"]}}), "structured_outputs.choice"),
            (json!({"response_format": {"type": "json_object"}, "guided_regex": "a"}), "guided_regex"),
        ];
        for (body, param) in cases {
            let error = form(body.clone()).unwrap_err();
            assert_eq!((error.status.as_u16(), error.param.as_deref()), (400, Some(param)), "{body}");
        }
    }
}
