//! What the grammar of an answer takes, and which schemas are refused.

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
fn alternatives_of_strings_and_plain_types_are_held_one_by_one() {
    let parameters = json!({
        "type": "object",
        "$defs": {"unit": {"enum": ["C", "F"], "type": "string"}},
        "properties": {
            // As pydantic writes optional values.
            "unit": {"anyOf": [{"$ref": "#/$defs/unit"}, {"type": "null"}], "default": null},
            "code": {"type": ["string", "null"], "pattern": "^[A-Z]{2}$", "title": "Code"},
            "near": {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "integer"}]},
            "kind": {"allOf": [{"$ref": "#/$defs/unit"}], "description": "older pydantic"},
            "name": {"anyOf": [{"const": "x"}, {"type": "string", "minLength": 3}]},
            "note": {"type": ["string", "boolean", "null"], "minLength": 8},
        },
    });
    let asked = build(None, &strict(parameters)).unwrap().unwrap();
    let good = [
        ("unit", "C"),
        ("unit", "null"),
        ("code", "DE"),
        ("code", "null"),
        ("near", "ab"),
        ("near", "12345"),
        ("near", "a"),
        ("kind", "F"),
    ];
    for pair in good.into_iter().chain([("name", "x"), ("name", "xyz"), ("note", "null"), ("note", "long enough"), ("note", "true")]) {
        assert!(takes(&asked, &call(&[pair])), "{pair:?}");
    }
    let bad = [
        ("unit", "K"),
        ("unit", "nul"),
        ("code", "de"),
        ("near", "abc"),
        ("near", "1.5x"),
        ("kind", "null"),
        ("name", "xy"),
        ("note", "short"),
    ];
    for pair in bad {
        assert!(!takes(&asked, &call(&[pair])), "{pair:?}");
    }
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
