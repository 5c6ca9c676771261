//! The functions that a request declares, as the parser needs them: names, and which JSON types each argument may have.

use serde_json::{Map, Value};

use super::{CALL, begins};

/// What may follow a name: an argument, the end, or the next call where a model left the end out.
const ENDS: [&str; 3] = ["<arg_key>", "</tool_call>", CALL];
/// References that are followed from one schema to another, at most; a cycle ends there.
const DEEPEST: usize = 16;

/// A set of JSON types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kinds(u8);

impl Kinds {
    /// A string.
    pub const STRING: Self = Self(1);
    /// A number without a fraction.
    pub const INTEGER: Self = Self(2);
    /// A number with or without one.
    pub const NUMBER: Self = Self(4 | 2);
    /// True or false.
    pub const BOOLEAN: Self = Self(8);
    /// Null.
    pub const NULL: Self = Self(16);
    /// An array.
    pub const ARRAY: Self = Self(32);
    /// An object.
    pub const OBJECT: Self = Self(64);
    /// Anything.
    pub const ANY: Self = Self(127);

    /// Whether every type of `other` is in it.
    pub fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    fn only(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    fn named(name: &str) -> Self {
        match name {
            "string" => Self::STRING,
            "integer" => Self::INTEGER,
            "number" => Self::NUMBER,
            "boolean" => Self::BOOLEAN,
            "null" => Self::NULL,
            "array" => Self::ARRAY,
            "object" => Self::OBJECT,
            _ => Self::ANY,
        }
    }

    /// The type of a value.
    fn of(value: &Value) -> Self {
        match value {
            Value::Null => Self::NULL,
            Value::Bool(_) => Self::BOOLEAN,
            Value::Number(number) if number.is_f64() => Self::NUMBER,
            Value::Number(_) => Self::INTEGER,
            Value::String(_) => Self::STRING,
            Value::Array(_) => Self::ARRAY,
            Value::Object(_) => Self::OBJECT,
        }
    }

    /// The types that `schema` allows; what it does not say, or says in words that are not understood, allows all. `root` is the document
    /// that its references point into.
    pub fn of_schema(schema: &Value, root: &Value) -> Self {
        let kinds = Self::schema(schema, root, 0);
        if kinds.0 == 0 { Self::ANY } else { kinds }
    }

    fn schema(schema: &Value, root: &Value, depth: usize) -> Self {
        let Some(schema) = schema.as_object().filter(|_| depth < DEEPEST) else { return Self::ANY };
        let below = |schema: &Value| Self::schema(schema, root, depth + 1);
        let union = |list: &Vec<Value>, of: &dyn Fn(&Value) -> Self| list.iter().fold(Self(0), |all, one| all.with(of(one)));
        let mut kinds = match schema.get("type") {
            Some(Value::String(name)) => Self::named(name),
            Some(Value::Array(names)) => union(names, &|name| name.as_str().map_or(Self::ANY, Self::named)),
            _ => Self::ANY,
        };
        if let Some(Value::Array(values)) = schema.get("enum") {
            kinds = kinds.only(union(values, &Self::of));
        }
        if let Some(value) = schema.get("const") {
            kinds = kinds.only(Self::of(value));
        }
        for word in ["anyOf", "oneOf"] {
            if let Some(Value::Array(list)) = schema.get(word) {
                kinds = kinds.only(union(list, &below));
            }
        }
        if let Some(Value::Array(list)) = schema.get("allOf") {
            kinds = list.iter().fold(kinds, |kinds, one| kinds.only(below(one)));
        }
        if let Some(target) = schema.get("$ref").and_then(Value::as_str).and_then(|path| resolve(path, root)) {
            kinds = kinds.only(below(target));
        }
        if schema.get("nullable") == Some(&Value::Bool(true)) {
            kinds = kinds.with(Self::NULL);
        }
        kinds
    }
}

/// The schema that a reference inside `root` points to.
pub fn resolve<'a>(path: &str, root: &'a Value) -> Option<&'a Value> {
    root.pointer(path.strip_prefix('#')?)
}

/// One declared function.
#[derive(Clone, Debug)]
pub struct Tool {
    /// Its name.
    pub name: String,
    /// Its declared arguments.
    properties: Vec<(String, Kinds)>,
    /// What an argument that is not declared may be.
    others: Kinds,
}

impl Tool {
    /// A function with these `parameters` (a JSON Schema of an object).
    pub fn new(name: &str, parameters: &Value) -> Self {
        let root = parameters.as_object();
        // The whole may stand behind a reference of its own.
        let object =
            root.and_then(|root| root.get("$ref")?.as_str()).and_then(|path| resolve(path, parameters)).and_then(Value::as_object).or(root);
        let declared = object.and_then(|object| object.get("properties")?.as_object());
        let properties = declared.into_iter().flatten().map(|(key, schema)| (key.clone(), Kinds::of_schema(schema, parameters))).collect();
        let others = object.and_then(|object| object.get("additionalProperties")).map_or(Kinds::ANY, |s| Kinds::of_schema(s, parameters));
        Self { name: name.to_owned(), properties, others }
    }

    /// The types of argument `key`.
    pub fn kinds(&self, key: &str) -> Kinds {
        self.properties.iter().find(|(name, _)| name == key).map_or(self.others, |(_, kinds)| *kinds)
    }

    /// The declared arguments.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.properties.iter().map(|(key, _)| key.as_str())
    }
}

/// The declared functions of one request.
#[derive(Clone, Debug, Default)]
pub struct ToolSet(Vec<Tool>);

/// What a text that follows `<tool_call>` begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// Too short to say.
    Pending,
    /// The name of function `tool`; the first `used` bytes say so.
    Is {
        /// Index of the function.
        tool: usize,
        /// Bytes of the name and the white space around it.
        used: usize,
    },
    /// No declared name.
    None,
}

impl ToolSet {
    /// A set of functions.
    pub fn new(tools: Vec<Tool>) -> Self {
        Self(tools)
    }

    /// The set of a request's `tools`, each `{"function": {name, parameters}}` or that object itself.
    pub fn of_request(tools: &[Value]) -> Self {
        let empty = Value::Object(Map::new());
        let tool = |tool: &Value| {
            let function = tool.get("function").unwrap_or(tool);
            let parameters = function.get("parameters").unwrap_or(&empty);
            Some(Tool::new(function.get("name")?.as_str()?, parameters))
        };
        Self(tools.iter().filter_map(tool).collect())
    }

    /// Whether nothing can be called.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Function `index`.
    pub fn get(&self, index: usize) -> &Tool {
        &self.0[index]
    }

    /// The function of that name.
    pub fn find(&self, name: &str) -> Option<&Tool> {
        self.0.iter().find(|tool| tool.name == name)
    }

    /// Reads the name at the start of `text`: a declared name counts only once what follows shows that it is whole.
    pub fn at_start(&self, text: &str) -> Start {
        let name = text.trim_start();
        let before = text.len() - name.len();
        let mut pending = name.is_empty();
        for (tool, declared) in self.0.iter().enumerate() {
            if let Some(after) = name.strip_prefix(&declared.name) {
                let rest = after.trim_start();
                let is = ENDS.iter().any(|tag| rest.starts_with(tag)) || (rest.len() < after.len() && bare_key(declared, rest) == Bare::Is);
                if is {
                    return Start::Is { tool, used: before + declared.name.len() + (after.len() - rest.len()) };
                }
                pending |=
                    ENDS.iter().any(|tag| begins(rest, tag)) || (rest.len() < after.len() && bare_key(declared, rest) == Bare::Pending);
            } else {
                pending |= declared.name.starts_with(name);
            }
        }
        if pending { Start::Pending } else { Start::None }
    }
}

/// Whether a text begins with a declared key that lacks its `<arg_key>`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bare {
    /// Too short to say.
    Pending,
    /// It does.
    Is,
    /// It does not.
    No,
}

/// Models sometimes leave out the tag before a key; `KEY</arg_key>` with a declared key is still no other thing.
pub fn bare_key(tool: &Tool, text: &str) -> Bare {
    const CLOSE: &str = "</arg_key>";
    let mut found = Bare::No;
    for key in tool.keys() {
        let now = match text.strip_prefix(key) {
            Some(rest) if rest.starts_with(CLOSE) => return Bare::Is,
            Some(rest) if begins(rest, CLOSE) => Bare::Pending,
            None if begins(text, key) => Bare::Pending,
            _ => Bare::No,
        };
        if now == Bare::Pending {
            found = now;
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn schemas_say_which_types_they_allow() {
        let root = json!({"$defs": {"city": {"type": "string"}, "loop": {"$ref": "#/$defs/loop"}}});
        let cases = [
            (json!({"type": "string"}), Kinds::STRING),
            (json!({"type": "number"}), Kinds::NUMBER),
            (json!({"type": ["integer", "null"]}), Kinds(2 | 16)),
            (json!({"anyOf": [{"type": "string"}, {"type": "null"}]}), Kinds(1 | 16)),
            (json!({"oneOf": [{"type": "boolean"}, {"$ref": "#/$defs/city"}]}), Kinds(8 | 1)),
            (json!({"allOf": [{"type": ["string", "integer"]}, {"type": ["integer", "array"]}]}), Kinds::INTEGER),
            (json!({"enum": ["a", "b"]}), Kinds::STRING),
            (json!({"enum": ["a", 1, null]}), Kinds(1 | 2 | 16)),
            (json!({"const": 1.5}), Kinds::NUMBER),
            (json!({"$ref": "#/$defs/city"}), Kinds::STRING),
            (json!({"type": "string", "nullable": true}), Kinds(1 | 16)),
            (json!({"$ref": "#/$defs/loop"}), Kinds::ANY),
            (json!({"$ref": "http://elsewhere"}), Kinds::ANY),
            (json!({"type": "colour"}), Kinds::ANY),
            (json!({"description": "anything"}), Kinds::ANY),
            (json!(true), Kinds::ANY),
            (json!({"type": "string", "const": 5}), Kinds::ANY),
        ];
        for (schema, want) in cases {
            assert_eq!(Kinds::of_schema(&schema, &root), want, "{schema}");
        }
    }

    #[test]
    fn names_are_whole_and_declared() {
        let tools = ToolSet::new(vec![Tool::new("get", &json!({})), Tool::new("get_weather", &json!({"properties": {"city": {}}}))]);
        let is = |tool, used| Start::Is { tool, used };
        let cases = [
            ("", Start::Pending),
            ("\n", Start::Pending),
            ("ge", Start::Pending),
            ("get", Start::Pending),
            ("get_", Start::Pending),
            ("get<arg", Start::Pending),
            ("get<arg_key>", is(0, 3)),
            ("get </tool_call>", is(0, 4)),
            ("\nget_weather\n<arg_key>", is(1, 13)),
            ("get_weather\nci", Start::Pending),
            ("get_weather\ncity</arg_key>", is(1, 12)),
            ("get_weathercity</arg_key>", Start::None),
            ("get_weather\ntown</arg_key>", Start::None),
            ("get_weathers", Start::None),
            ("got", Start::None),
            ("get it", Start::None),
            ("get<b>", Start::None),
        ];
        for (text, want) in cases {
            assert_eq!(tools.at_start(text), want, "{text:?}");
        }
    }
}
