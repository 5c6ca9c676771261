//! Form and tools of a request → the grammar that its answer is held to behind the reasoning, where there is anything to hold it to.
//!
//! Calls are written as the family's template writes them: `<tool_call>NAME<arg_key>K</arg_key><arg_value>V</arg_value>…</tool_call>`,
//! strings as they are and all other values as JSON. The arguments of a `strict` function fit its schema; of others only the frame is
//! held. A schema that cannot be held to in this notation is refused.

use serde_json::{Map, Value, json};
use tandem_grammar::source::{alternatives, lexeme};
use tandem_grammar::{Grammar, bounds};

use super::form::Form;
use super::start::Asked;
use super::tools::{Function, Tools};
use crate::api::ApiError;
use crate::text::Kinds;
use crate::text::glm::tools::resolve;

/// Ends a value; no value may hold it.
const VALUE_END: &str = "</arg_value>";
/// Any text up to the end of a value.
const ANY_VALUE: &str = r"/(?s:.*)<\/arg_value>/";
/// Keywords of a strict function's schema that the notation can hold to.
const OBJECT_WORDS: [&str; 11] =
    ["type", "properties", "required", "additionalProperties", "$defs", "definitions", "description", "title", "$schema", "$id", "default"];
/// Keywords that are conditions of a string.
const STRING_WORDS: [&str; 3] = ["minLength", "maxLength", "pattern"];
/// Keywords that say nothing about a value.
const SILENT: [&str; 7] = ["description", "title", "default", "examples", "$comment", "nullable", "deprecated"];

/// The grammar of an answer; `None`: any text will do.
pub fn build(form: Option<&Form>, tools: &Tools) -> Result<Option<Asked>, ApiError> {
    let form = form.map(Form::grammar);
    let calls = tools.is_constrained();
    match form {
        None if !calls => Ok(None),
        Some(form) if tools.may_call().next().is_none() => Ok(Some(form)),
        form => {
            let mut lark = Lark::default();
            for function in tools.may_call() {
                lark.call(function)?;
            }
            let again = if tools.single() { "" } else { " (\"<tool_call>\" call)*" };
            let start = match &form {
                _ if tools.must_call() => format!("start: \"<tool_call>\" call{again}"),
                Some(_) => format!("start: @form | \"<tool_call>\" call{again}"),
                // Text first, calls in between; no tag that is not the beginning of a call.
                None if tools.single() => "start: text? | before call".to_owned(),
                None => "start: (before call)* text?".to_owned(),
            };
            let free = "before[lazy]: /(?s:.*)<tool_call>/\ntext: TEXT\nTEXT: /(?s:.+)/ & ~/(?s:.*<tool_call>.*)/\n";
            let free = if start.contains("before") { free } else { "" };
            let grammar = Grammar::lark(&format!("{start}\n{free}{}", lark.finish()));
            let field = if tools.must_call() { "tool_choice" } else { "tools" }.to_owned();
            match form.filter(|_| !tools.must_call()) {
                Some(form) => Ok(Some(Asked { grammar: grammar.with("form", form.grammar), field: form.field })),
                None => Ok(Some(Asked { grammar, field })),
            }
        }
    }
}

/// Rules for the declared functions.
#[derive(Default)]
struct Lark {
    /// One alternative of `call` for each function.
    calls: Vec<String>,
    /// Further rules and terminals.
    rules: Vec<String>,
}

impl Lark {
    fn finish(self) -> String {
        format!("call: {}\n{}\n", self.calls.join("\n    | "), self.rules.join("\n"))
    }

    /// A name for a rule that no other has.
    fn fresh(&self) -> usize {
        self.rules.len()
    }

    /// Adds a rule and gives its name.
    fn rule(&mut self, head: &str, body: &str) -> String {
        let name = format!("r{}", self.fresh());
        self.rules.push(format!("{name}{head}: {body}"));
        name
    }

    fn call(&mut self, function: &Function) -> Result<(), ApiError> {
        let arguments = if function.strict { self.strict(function)? } else { self.loose(function) };
        self.calls.push(format!("{} {arguments} \"</tool_call>\"", literal(&function.name)));
        Ok(())
    }

    /// Arguments in any order and number, declared where any are.
    fn loose(&mut self, function: &Function) -> String {
        let declared = function.parameters.get("properties").and_then(Value::as_object);
        let keys: Vec<String> = declared.into_iter().flatten().map(|(key, _)| key.clone()).filter(|key| !key.contains('<')).collect();
        // The expression is made here, of escaped text: it is valid.
        let key = if keys.is_empty() { Ok("/[^<]+/".to_owned()) } else { lexeme(&alternatives(&keys)) };
        let value = self.rule("[lazy]", ANY_VALUE);
        format!("(\"<arg_key>\" {} \"</arg_key><arg_value>\" {value})*", key.unwrap_or_else(|_| "/[^<]+/".to_owned()))
    }

    /// Every declared argument in the declared order, those that are not required at will.
    fn strict(&mut self, function: &Function) -> Result<String, ApiError> {
        let path = format!("{}.parameters", function.path);
        let root = &function.parameters;
        let schema = root.get("$ref").and_then(Value::as_str).and_then(|target| resolve(target, root)).unwrap_or(root);
        let Some(object) = schema.as_object() else { return Err(refuse(&path, "a strict function needs a schema of an object")) };
        if let Some(word) = object.keys().find(|word| !OBJECT_WORDS.contains(&word.as_str())) {
            return Err(refuse(&path, &format!("\"{word}\" cannot be enforced for a strict function's arguments as a whole")));
        }
        if object.get("type").is_some_and(|kind| kind != "object") {
            return Err(refuse(&path, "a strict function needs a schema of type \"object\""));
        }
        let empty = Map::new();
        let properties = match object.get("properties") {
            None => &empty,
            Some(Value::Object(properties)) => properties,
            Some(_) => return Err(refuse(&format!("{path}.properties"), "properties must be an object")),
        };
        let required = match object.get("required") {
            None => Vec::new(),
            Some(Value::Array(names)) if names.iter().all(Value::is_string) => names.iter().filter_map(Value::as_str).collect(),
            Some(_) => return Err(refuse(&format!("{path}.required"), "required must be a list of names")),
        };
        if let Some(name) = required.iter().find(|name| !properties.contains_key(**name)) {
            return Err(refuse(&format!("{path}.required"), &format!("\"{name}\" is required and not declared")));
        }
        let mut all = String::new();
        for (key, schema) in properties {
            let path = format!("{path}.properties.{key}");
            if key.contains('<') || key.is_empty() || key.trim() != key {
                return Err(refuse(&path, "a strict function's argument cannot have that name"));
            }
            let value = self.value(schema, root, &path)?;
            let pair = format!("{} {value}", literal(&format!("<arg_key>{key}</arg_key><arg_value>")));
            all += &if required.contains(&key.as_str()) { format!("{pair} ") } else { format!("({pair})? ") };
        }
        Ok(all)
    }

    /// The text of one value, with the tag behind it.
    fn value(&mut self, schema: &Value, root: &Value, path: &str) -> Result<String, ApiError> {
        let kinds = Kinds::of_schema(schema, root);
        if !kinds.has(Kinds::STRING) {
            bounds::schema(schema).and_then(|()| bounds::schema(root)).map_err(|why| refuse(path, &why))?;
            return Ok(format!("%json {} \"{VALUE_END}\"", self.json(schema, root)));
        }
        let resolved = follow(schema, root);
        if let Some(texts) = members(resolved) {
            if texts.iter().any(|text| text.contains(VALUE_END)) {
                return Err(refuse(path, "an allowed value holds the notation's own tag"));
            }
            return self.whole(&alternatives(&texts), path);
        }
        if is_plain(resolved, root, 0) {
            return Ok(self.rule("[lazy]", ANY_VALUE));
        }
        if let Some((strings, others)) = alternatives_of(resolved, root) {
            let mut all = Vec::new();
            for schema in strings {
                all.push(self.value(&schema, root, path)?);
            }
            if !others.is_empty() {
                all.push(self.whole(&others.join("|"), path)?);
            }
            return Ok(format!("({})", all.join(" | ")));
        }
        if kinds != Kinds::STRING {
            return Err(refuse(
                path,
                "a value that may be a string or something else can only be held to types without further conditions (but for a string beside null, booleans and numbers)",
            ));
        }
        let limits = self.limits(resolved, path)?;
        Ok(self.rule("[lazy]", &limits))
    }

    /// A value that matches `regex`, with the tag behind it, as one terminal: beside others that go on where it ends, two would not do.
    fn whole(&mut self, regex: &str, path: &str) -> Result<String, ApiError> {
        let whole = lexeme(&format!("(?:{regex}){VALUE_END}")).map_err(|why| refuse(path, &why))?;
        Ok(self.rule("[lazy]", &whole))
    }

    /// A string's conditions as one terminal, up to the tag behind it.
    fn limits(&mut self, schema: &Value, path: &str) -> Result<String, ApiError> {
        let object = schema.as_object().ok_or_else(|| refuse(path, "its schema is no object"))?;
        let number = |word: &str| match object.get(word) {
            None => Ok(None),
            Some(value) => value.as_u64().map(Some).ok_or_else(|| refuse(path, &format!("{word} must be a count"))),
        };
        let mut all = vec![r"~/(?s:.*<\/arg_value>.*)/".to_owned()];
        match (number("minLength")?, number("maxLength")?) {
            (None, None) => {}
            (least, most) => {
                all.push(format!("/(?s:.{{{},{}}})/", least.unwrap_or(0), most.map_or(String::new(), |most| most.to_string())));
            }
        }
        if let Some(pattern) = object.get("pattern") {
            let pattern = pattern.as_str().ok_or_else(|| refuse(path, "pattern must be a string"))?;
            // A schema's pattern may match anywhere; a terminal matches as a whole.
            let front = if pattern.starts_with('^') { "" } else { "(?s:.*)" };
            let back = if pattern.ends_with('$') && !pattern.ends_with("\\$") { "" } else { "(?s:.*)" };
            let inner = pattern.strip_prefix('^').unwrap_or(pattern);
            let inner = if back.is_empty() { inner.strip_suffix('$').unwrap_or(inner) } else { inner };
            all.push(lexeme(&format!("{front}(?:{inner}){back}")).map_err(|why| refuse(path, &why))?);
        }
        let known = |word: &str| word == "type" || STRING_WORDS.contains(&word) || SILENT.contains(&word);
        if let Some(word) = object.keys().find(|word| !known(word)) {
            return Err(refuse(path, &format!("\"{word}\" cannot be enforced for a string argument")));
        }
        let name = format!("T{}", self.fresh());
        self.rules.push(format!("{name}: {}", all.join(" & ")));
        Ok(format!("{name} \"{VALUE_END}\""))
    }

    /// A value's schema as a document of its own.
    fn json(&self, schema: &Value, root: &Value) -> String {
        let mut own = schema.as_object().cloned().unwrap_or_default();
        // Options of the engine are not the request's to set.
        own.remove("x-guidance");
        for word in ["$defs", "definitions"] {
            if let Some(definitions) = root.get(word) {
                own.entry(word).or_insert_with(|| definitions.clone());
            }
        }
        Value::Object(own).to_string()
    }
}

/// The schema behind references, and behind an `allOf` of one.
fn follow<'a>(schema: &'a Value, root: &'a Value) -> &'a Value {
    let mut at = schema;
    for _ in 0..16 {
        let only = |word: &str| at.as_object().is_some_and(|o| o.keys().all(|other| other == word || SILENT.contains(&other.as_str())));
        let behind = match (at.get("$ref").and_then(Value::as_str), at.get("allOf").and_then(Value::as_array).map(Vec::as_slice)) {
            (Some(target), None) if only("$ref") => resolve(target, root),
            (None, Some([one])) if only("allOf") => Some(one),
            _ => None,
        };
        match behind {
            Some(behind) => at = behind,
            None => break,
        }
    }
    at
}

/// A value's alternatives, where they can be held to one by one: schemas of strings alone, and regular expressions of the plain types beside
/// them. A plain type takes whatever JSON of it the text happens to be, so that a text that is both fits either way.
fn alternatives_of(schema: &Value, root: &Value) -> Option<(Vec<Value>, Vec<&'static str>)> {
    let object = schema.as_object()?;
    let loud = |word: &&String| !SILENT.contains(&word.as_str());
    let list: Vec<Value> = match object.get("type") {
        // Conditions of a string say nothing about other types.
        Some(Value::Array(names)) if object.keys().filter(loud).all(|word| word == "type" || STRING_WORDS.contains(&word.as_str())) => {
            let of = |name: &Value| match name.as_str() {
                Some("string") => {
                    let mut own = object.clone();
                    own.insert("type".into(), name.clone());
                    Value::Object(own)
                }
                _ => json!({"type": name}),
            };
            names.iter().map(of).collect()
        }
        None if object.keys().filter(loud).all(|word| word == "anyOf") => object.get("anyOf")?.as_array()?.clone(),
        _ => return None,
    };
    let (mut strings, mut others) = (Vec::new(), Vec::new());
    for one in list {
        match Kinds::of_schema(&one, root) {
            Kinds::STRING => strings.push(one),
            kinds if is_plain(&one, root, 0) => others.push(match kinds {
                Kinds::NULL => "null",
                Kinds::BOOLEAN => "true|false",
                Kinds::INTEGER => "-?(0|[1-9][0-9]*)",
                Kinds::NUMBER => r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?",
                _ => return None,
            }),
            _ => return None,
        }
    }
    (!strings.is_empty()).then_some((strings, others))
}

/// The texts of a schema that lists its values, as they stand between the tags.
fn members(schema: &Value) -> Option<Vec<String>> {
    let object = schema.as_object()?;
    let list = match (object.get("enum"), object.get("const")) {
        (Some(Value::Array(list)), None) => list.clone(),
        (None, Some(value)) => vec![value.clone()],
        _ => return None,
    };
    let others = object.keys().any(|word| !["enum", "const", "type"].contains(&word.as_str()) && !SILENT.contains(&word.as_str()));
    let text = |value: Value| match value {
        Value::String(text) => text,
        other => other.to_string(),
    };
    (!others && !list.is_empty()).then(|| list.into_iter().map(text).collect())
}

/// Whether a schema names types and nothing else.
fn is_plain(schema: &Value, root: &Value, depth: usize) -> bool {
    let Some(object) = follow(schema, root).as_object().filter(|_| depth < 8) else { return schema == &Value::Bool(true) };
    object.iter().all(|(word, value)| match word.as_str() {
        "type" => true,
        "anyOf" => value.as_array().is_some_and(|list| list.iter().all(|one| is_plain(one, root, depth + 1))),
        word => SILENT.contains(&word),
    })
}

fn literal(text: &str) -> String {
    Value::from(text).to_string()
}

fn refuse(path: &str, why: &str) -> ApiError {
    ApiError::unsupported(path, format!("{path} cannot be enforced: {why}"))
}

#[cfg(test)]
mod tests;
