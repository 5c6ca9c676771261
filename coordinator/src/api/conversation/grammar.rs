//! Form and tools of a request → the grammar that its answer is held to behind the reasoning, where there is anything to hold it to.
//!
//! Calls are written as the family's template writes them: `<tool_call>NAME<arg_key>K</arg_key><arg_value>V</arg_value>…</tool_call>`,
//! strings as they are and all other values as JSON. The arguments of a `strict` function fit its schema; of others only the frame is
//! held. A schema that cannot be held to in this notation is refused.

use serde_json::{Map, Value};
use tandem_grammar::Grammar;
use tandem_grammar::source::{alternatives, lexeme};

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
            return Ok(format!("%json {} \"{VALUE_END}\"", self.json(schema, root)));
        }
        let resolved = follow(schema, root);
        if let Some(texts) = members(resolved) {
            if texts.iter().any(|text| text.contains(VALUE_END)) {
                return Err(refuse(path, "an allowed value holds the notation's own tag"));
            }
            return Ok(format!("{} \"{VALUE_END}\"", lexeme(&alternatives(&texts)).map_err(|why| refuse(path, &why))?));
        }
        if is_plain(resolved, root, 0) {
            return Ok(self.rule("[lazy]", ANY_VALUE));
        }
        if kinds != Kinds::STRING {
            return Err(refuse(
                path,
                "a value that may be a string or something else can only be held to types without further conditions",
            ));
        }
        let limits = self.limits(resolved, path)?;
        Ok(self.rule("[lazy]", &limits))
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
        let known = ["type", "minLength", "maxLength", "pattern"];
        if let Some(word) = object.keys().find(|word| !known.contains(&word.as_str()) && !SILENT.contains(&word.as_str())) {
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

/// The schema behind references.
fn follow<'a>(schema: &'a Value, root: &'a Value) -> &'a Value {
    let mut at = schema;
    for _ in 0..16 {
        match at.get("$ref").and_then(Value::as_str).and_then(|target| resolve(target, root)) {
            Some(target) if at.as_object().is_some_and(|o| o.keys().all(|word| word == "$ref" || SILENT.contains(&word.as_str()))) => {
                at = target;
            }
            _ => break,
        }
    }
    at
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
mod tests {
    use serde_json::json;

    use super::*;
    use crate::text::fixtures::demo_vocabulary;

    fn strict(parameters: Value) -> Tools {
        let tool = json!({"type": "function", "function": {"name": "f", "strict": true, "parameters": parameters}});
        Tools::chat(Some(vec![tool]), Some(&json!("required")), None).unwrap()
    }

    /// Whether the grammar takes `text` as a whole.
    fn takes(asked: &Asked, text: &str) -> bool {
        let mut matcher = demo_vocabulary().compile(&asked.grammar.to_text()).unwrap();
        for byte in text.bytes() {
            let id = crate::text::fixtures::byte_token(byte);
            if !matcher.mask().unwrap().is_none_or(|mask| mask.allows(id)) || matcher.accept(id).is_err() {
                return false;
            }
        }
        matcher.mask().unwrap().is_none_or(|mask| mask.may_end)
    }

    fn call(arguments: &[(&str, &str)]) -> String {
        let pairs: String = arguments.iter().map(|(k, v)| format!("<arg_key>{k}</arg_key><arg_value>{v}</arg_value>")).collect();
        format!("<tool_call>f{pairs}</tool_call>")
    }

    #[test]
    fn strict_arguments_fit_their_schema() {
        let schema = json!({
            "type": "object",
            "$defs": {"unit": {"enum": ["C", "F"]}, "count": {"type": "integer", "minimum": 1}},
            "properties": {
                "city": {"type": "string"},
                "unit": {"$ref": "#/$defs/unit"},
                "days": {"$ref": "#/$defs/count"},
                "note": {"type": ["string", "null"]},
                "code": {"type": "string", "pattern": "^[A-Z]{2}$"},
                "near": {"type": "string", "minLength": 2, "maxLength": 4},
            },
            "required": ["city", "unit"],
            "additionalProperties": false,
        });
        let asked = build(None, &strict(schema)).unwrap().unwrap();
        let good = [
            call(&[("city", "New\nYork <b>"), ("unit", "C")]),
            call(&[("city", ""), ("unit", "F"), ("days", "3"), ("note", "x"), ("code", "DE"), ("near", "abc")]),
            call(&[("city", "a"), ("unit", "C")]) + &call(&[("city", "b"), ("unit", "F")]),
        ];
        for text in good {
            assert!(takes(&asked, &text), "{text}");
        }
        let bad = [
            "hello".to_owned(),
            call(&[]),
            call(&[("unit", "C"), ("city", "a")]),
            call(&[("city", "a"), ("unit", "K")]),
            call(&[("city", "a"), ("unit", "C"), ("days", "0")]),
            call(&[("city", "a"), ("unit", "C"), ("days", "\"3\"")]),
            call(&[("city", "a"), ("unit", "C"), ("code", "de")]),
            call(&[("city", "a"), ("unit", "C"), ("near", "abcde")]),
            call(&[("city", "a"), ("unit", "C"), ("more", "x")]),
            call(&[("city", "a"), ("unit", "C")]) + "text",
        ];
        for text in bad {
            assert!(!takes(&asked, &text), "{text}");
        }
    }

    #[test]
    fn text_may_surround_strict_calls_where_none_is_forced() {
        let tool = json!({"type": "function", "function": {"name": "f", "strict": true, "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}}});
        let tools = Tools::chat(Some(vec![tool]), None, None).unwrap();
        let asked = build(None, &tools).unwrap().unwrap();
        for text in ["", "just text <b>", &call(&[("n", "5")]), &format!("a{}b{}c", call(&[("n", "5")]), call(&[("n", "6")]))] {
            assert!(takes(&asked, text), "{text}");
        }
        for text in ["<tool_call>g</tool_call>", "<tool_call>", &call(&[("n", "x")]), &call(&[])] {
            assert!(!takes(&asked, text), "{text}");
        }
    }

    #[test]
    fn a_form_and_tools_are_alternatives() {
        let tool = json!({"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {}}}}});
        let form = Form { kind: super::super::form::Kind::Json(json!({"type": "object"})), field: "response_format".into() };
        let auto = Tools::chat(Some(vec![tool.clone()]), None, None).unwrap();
        assert!(build(None, &auto).unwrap().is_none(), "nothing to hold to");
        let asked = build(Some(&form), &auto).unwrap().unwrap();
        for text in ["{\"x\": 1}", &call(&[("a", "anything")])] {
            assert!(takes(&asked, text), "{text}");
        }
        for text in ["hello", "5", &call(&[("b", "1")])] {
            assert!(!takes(&asked, text), "{text}");
        }
        let none = Tools::chat(Some(vec![tool]), Some(&json!("none")), None).unwrap();
        assert!(takes(&build(Some(&form), &none).unwrap().unwrap(), "{}"));
    }

    #[test]
    fn schemas_that_the_notation_cannot_hold_are_refused() {
        let property = |schema: Value| json!({"type": "object", "properties": {"a": schema}});
        let cases = [
            (json!({"type": "object", "anyOf": [{}]}), "tools[0].function.parameters"),
            (json!({"type": "array"}), "tools[0].function.parameters"),
            (json!({"type": "object", "required": ["a"]}), "tools[0].function.parameters.required"),
            (property(json!({"type": "string", "format": "email"})), "tools[0].function.parameters.properties.a"),
            (property(json!({"type": "string", "pattern": "("})), "tools[0].function.parameters.properties.a"),
            (property(json!({"type": ["string", "integer"], "minimum": 3})), "tools[0].function.parameters.properties.a"),
            (property(json!({"enum": ["</arg_value>"]})), "tools[0].function.parameters.properties.a"),
        ];
        for (schema, param) in cases {
            let Err(error) = build(None, &strict(schema.clone())) else { panic!("{schema} was taken") };
            assert_eq!((error.status.as_u16(), error.param.as_deref()), (400, Some(param)), "{schema}");
        }
        // What only the compiler sees is refused there.
        let asked = build(None, &strict(property(json!({"type": "array", "uniqueItems": true})))).unwrap().unwrap();
        assert!(demo_vocabulary().compile(&asked.grammar.to_text()).is_err());
    }
}
