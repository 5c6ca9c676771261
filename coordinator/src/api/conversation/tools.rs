//! Declared functions, and which of them may or must be called.

use serde_json::{Map, Value, json};

use crate::api::ApiError;
use crate::text::ToolSet;

/// Longest name of a function.
const LONGEST_NAME: usize = 128;
/// Most functions of one request.
const MOST: usize = 1024;

/// Whether functions are called.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// The model decides.
    #[default]
    Auto,
    /// No calls.
    None,
    /// At least one call.
    Required,
    /// A call of this function.
    Named(String),
}

/// One declared function.
#[derive(Clone, Debug)]
pub struct Function {
    /// Its name.
    pub name: String,
    /// JSON Schema of its arguments.
    pub parameters: Value,
    /// The arguments must fit the schema.
    pub strict: bool,
    /// Where it stands in the request, for errors.
    pub path: String,
    /// What the template is given.
    value: Value,
}

/// The functions of a request.
#[derive(Clone, Debug, Default)]
pub struct Tools {
    functions: Vec<Function>,
    choice: ToolChoice,
    /// Only these may be called, though all are shown.
    allowed: Option<Vec<String>>,
    /// No more than one call in an answer.
    one_call: bool,
}

impl Tools {
    /// Chat completions' `tools` and `tool_choice`.
    pub fn chat(tools: Option<Vec<Value>>, choice: Option<&Value>, parallel: Option<bool>) -> Result<Self, ApiError> {
        let mut all = Self { one_call: parallel == Some(false), ..Self::default() };
        for (i, tool) in tools.unwrap_or_default().into_iter().enumerate() {
            let path = format!("tools[{i}]");
            if let Some(kind) = tool.get("type").and_then(Value::as_str).filter(|kind| *kind != "function") {
                return Err(ApiError::unsupported(
                    format!("{path}.type"),
                    format!("{path}.type is \"{kind}\"; only \"function\" is supported"),
                ));
            }
            let (inside, path) = match tool.get("function") {
                Some(function) => (function.clone(), format!("{path}.function")),
                None => (tool, path),
            };
            all.declare(path, inside, "parameters")?;
        }
        all.choose(choice)?;
        Ok(all)
    }

    /// Declares a function given as `{name, description, strict, SCHEMA}`; `schema` is that last key.
    pub fn declare(&mut self, path: String, function: Value, schema: &str) -> Result<(), ApiError> {
        let bad = |field: &str, needed: &str| {
            let param = format!("{path}.{field}");
            Err(ApiError::invalid(param.clone(), format!("{param} {needed}")))
        };
        let Value::Object(mut function) = function else {
            return Err(ApiError::invalid(path.clone(), format!("{path} must be an object")));
        };
        let Some(name) = function.get("name").and_then(Value::as_str).map(str::to_owned) else { return bad("name", "must be a string") };
        // The name stands between tags in the answer.
        if name.is_empty() || name.len() > LONGEST_NAME || name.contains(|c: char| c.is_whitespace() || c.is_control() || c == '<') {
            return bad("name", &format!("must have 1 to {LONGEST_NAME} bytes without white space and \"<\""));
        }
        if self.functions.iter().any(|known| known.name == name) {
            return bad("name", &format!("\"{name}\" is declared twice"));
        }
        if self.functions.len() == MOST {
            return Err(ApiError::invalid("tools", format!("at most {MOST} tools are allowed")));
        }
        let parameters = function.get(schema).cloned().unwrap_or(Value::Null);
        let parameters = if parameters.is_null() { json!({}) } else { parameters };
        if !parameters.is_object() {
            return bad(schema, "must be a JSON Schema object");
        }
        let strict = match function.get("strict") {
            None | Some(Value::Null) => false,
            Some(Value::Bool(strict)) => *strict,
            Some(_) => return bad("strict", "must be true or false"),
        };
        if schema != "parameters" {
            // One spelling for the template, whatever the face's is.
            function = ["name", "description"].iter().filter_map(|key| Some(((*key).to_owned(), function.remove(*key)?))).collect();
            function.insert("parameters".into(), parameters.clone());
        }
        let value = json!({"type": "function", "function": function});
        self.functions.push(Function { name, parameters, strict, path, value });
        Ok(())
    }

    /// Allows no more than one call in an answer.
    pub fn one_call(&mut self) {
        self.one_call = true;
    }

    /// Takes a `tool_choice`, in chat completions' or responses' spelling.
    pub fn choose(&mut self, choice: Option<&Value>) -> Result<(), ApiError> {
        let choice = match choice {
            None | Some(Value::Null) => return Ok(()),
            Some(Value::String(mode)) => self.mode(mode, "tool_choice")?,
            Some(Value::Object(object)) => match object.get("type").and_then(Value::as_str) {
                Some("function") => ToolChoice::Named(self.declared(named(object), "tool_choice.function.name")?),
                Some("allowed_tools") => {
                    let inside = object.get("allowed_tools").and_then(Value::as_object).unwrap_or(object);
                    let mode = inside.get("mode").and_then(Value::as_str).unwrap_or("auto");
                    let list = inside.get("tools").and_then(Value::as_array);
                    let list = list.ok_or_else(|| ApiError::invalid("tool_choice.tools", "tool_choice.tools must be a list of tools"))?;
                    let names: Result<Vec<String>, ApiError> =
                        list.iter().map(|tool| self.declared(tool.as_object().and_then(named), "tool_choice.tools")).collect();
                    self.allowed = Some(names?);
                    self.mode(mode, "tool_choice.mode")?
                }
                _ => return Err(ApiError::invalid("tool_choice.type", "tool_choice.type must be \"function\" or \"allowed_tools\"")),
            },
            Some(_) => return Err(ApiError::invalid("tool_choice", "tool_choice must be a string or an object")),
        };
        self.set_choice(choice)
    }

    /// Sets the choice; one that needs functions needs some.
    pub fn set_choice(&mut self, choice: ToolChoice) -> Result<(), ApiError> {
        if matches!(choice, ToolChoice::Required | ToolChoice::Named(_)) && self.may_call().next().is_none() {
            return Err(ApiError::invalid("tool_choice", "tool_choice asks for a call, but no tools are declared"));
        }
        self.choice = choice;
        Ok(())
    }

    fn mode(&self, mode: &str, field: &str) -> Result<ToolChoice, ApiError> {
        match mode {
            "auto" => Ok(ToolChoice::Auto),
            "none" => Ok(ToolChoice::None),
            "required" | "any" => Ok(ToolChoice::Required),
            _ => Err(ApiError::invalid(
                field,
                format!("{field} must be \"auto\", \"none\", \"required\", or an object that names a function"),
            )),
        }
    }

    /// A declared name; anything else is an error at `field`.
    pub fn declared(&self, name: Option<&str>, field: &str) -> Result<String, ApiError> {
        let name = name.ok_or_else(|| ApiError::invalid(field, format!("{field} must name a function")))?;
        if self.functions.iter().any(|function| function.name == name) {
            return Ok(name.to_owned());
        }
        let shown: String = name.chars().take(LONGEST_NAME).collect();
        Err(ApiError::invalid(field, format!("{field} names \"{shown}\", which is not among the declared tools")))
    }

    /// What the template shows: all functions, or nothing where none may be called.
    pub fn rendered(&self) -> Option<Value> {
        let all = || Value::Array(self.functions.iter().map(|function| function.value.clone()).collect());
        (!self.functions.is_empty() && self.choice != ToolChoice::None).then(all)
    }

    /// The functions that may be called.
    pub fn may_call(&self) -> impl Iterator<Item = &Function> {
        let named = move |name: &str| match &self.choice {
            ToolChoice::None => false,
            ToolChoice::Named(only) => only == name,
            _ => self.allowed.as_ref().is_none_or(|allowed| allowed.iter().any(|one| one == name)),
        };
        self.functions.iter().filter(move |function| named(&function.name))
    }

    /// The same, as the parser needs them.
    pub fn callable(&self) -> ToolSet {
        ToolSet::new(self.may_call().map(|function| crate::text::glm::Tool::new(&function.name, &function.parameters)).collect())
    }

    /// Whether the answer must be a call.
    pub fn must_call(&self) -> bool {
        matches!(self.choice, ToolChoice::Required | ToolChoice::Named(_))
    }

    /// Whether an answer ends with its first call.
    pub fn single(&self) -> bool {
        self.one_call || matches!(self.choice, ToolChoice::Named(_))
    }

    /// Whether calls must be held to a grammar: something is forced, forbidden, or strict.
    pub fn is_constrained(&self) -> bool {
        self.must_call() || (self.choice != ToolChoice::None && (self.allowed.is_some() || self.may_call().any(|function| function.strict)))
    }
}

fn named(object: &Map<String, Value>) -> Option<&str> {
    object.get("function").unwrap_or(&Value::Null).get("name").or_else(|| object.get("name"))?.as_str()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tools(tools: Value, choice: Value) -> Result<Tools, ApiError> {
        Tools::chat(tools.as_array().cloned(), Some(&choice), None)
    }

    fn names(tools: &Tools) -> Vec<&str> {
        tools.may_call().map(|function| function.name.as_str()).collect()
    }

    #[test]
    fn choices_say_what_may_and_must_be_called() {
        let declared = json!([{"type": "function", "function": {"name": "f"}}, {"name": "g", "parameters": {"type": "object"}}]);
        let auto = tools(declared.clone(), json!("auto")).unwrap();
        assert_eq!((names(&auto), auto.must_call(), auto.is_constrained()), (vec!["f", "g"], false, false));
        let none = tools(declared.clone(), json!("none")).unwrap();
        assert_eq!((names(&none).len(), none.rendered()), (0, None));
        let required = tools(declared.clone(), json!("required")).unwrap();
        assert!(required.must_call() && required.is_constrained() && !required.single());
        let named = tools(declared.clone(), json!({"type": "function", "function": {"name": "g"}})).unwrap();
        assert_eq!((names(&named), named.must_call(), named.single()), (vec!["g"], true, true));
        let allowed =
            json!({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "f"}}]}});
        let allowed = tools(declared, allowed).unwrap();
        assert_eq!((names(&allowed), allowed.must_call(), allowed.is_constrained()), (vec!["f"], false, true));
        assert_eq!(allowed.rendered().unwrap().as_array().unwrap().len(), 2, "all are shown");
    }

    #[test]
    fn what_cannot_be_declared_or_chosen_is_named() {
        let f = json!([{"type": "function", "function": {"name": "f"}}]);
        let cases = [
            (json!([{"type": "function"}]), json!("auto"), "tools[0].name"),
            (json!([{"type": "function", "function": {"name": "a b"}}]), json!("auto"), "tools[0].function.name"),
            (json!([{"type": "function", "function": {"name": ""}}]), json!("auto"), "tools[0].function.name"),
            (json!([{"function": {"name": "f"}}, {"function": {"name": "f"}}]), json!("auto"), "tools[1].function.name"),
            (json!([{"function": {"name": "f", "parameters": []}}]), json!("auto"), "tools[0].function.parameters"),
            (json!([{"function": {"name": "f", "strict": 1}}]), json!("auto"), "tools[0].function.strict"),
            (json!([{"type": "web_search"}]), json!("auto"), "tools[0].type"),
            (json!([5]), json!("auto"), "tools[0]"),
            (json!([]), json!("required"), "tool_choice"),
            (f.clone(), json!("always"), "tool_choice"),
            (f.clone(), json!(5), "tool_choice"),
            (f.clone(), json!({"type": "custom"}), "tool_choice.type"),
            (f.clone(), json!({"type": "function", "function": {"name": "g"}}), "tool_choice.function.name"),
            (f, json!({"type": "allowed_tools", "mode": "auto", "tools": [{"name": "g"}]}), "tool_choice.tools"),
        ];
        for (declared, choice, param) in cases {
            let error = tools(declared.clone(), choice.clone()).unwrap_err();
            assert_eq!((error.status.as_u16(), error.param.as_deref()), (400, Some(param)), "{declared} {choice}");
        }
    }
}
