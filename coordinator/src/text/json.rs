//! `tojson` as the reference renderer has it: Python's `json.dumps` with `ensure_ascii=False`, separators `", "` and `": "`.
//!
//! The template engine's own filter prints compact JSON and escapes for HTML; a prompt must match the reference byte for byte.

use std::fmt::Write as _;

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, ErrorKind};

/// How `json.dumps` was asked to print.
struct Style {
    ensure_ascii: bool,
    sort_keys: bool,
    indent: Option<usize>,
    item: String,
    key: String,
}

/// The filter `value | tojson(ensure_ascii=false, indent=none, separators=none, sort_keys=false)`.
pub fn tojson(value: &Value, indent: Option<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let ensure_ascii = kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    let sort_keys = kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    let indent = match indent.or(kwargs.get::<Option<Value>>("indent")?) {
        Some(indent) if !indent.is_none() => Some(usize::try_from(indent).unwrap_or(0)),
        _ => None,
    };
    let (mut item, mut key) = (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned());
    if let Some(separators) = kwargs.get::<Option<Value>>("separators")?.filter(|s| !s.is_none()) {
        item = separators.get_item_by_index(0)?.to_string();
        key = separators.get_item_by_index(1)?.to_string();
    }
    kwargs.assert_all_used()?;
    let mut out = String::new();
    write(&mut out, value, &Style { ensure_ascii, sort_keys, indent, item, key }, 0)?;
    Ok(Value::from_safe_string(out))
}

fn write(out: &mut String, value: &Value, style: &Style, depth: usize) -> Result<(), Error> {
    match value.kind() {
        ValueKind::None => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => write_number(out, value),
        ValueKind::String => write_string(out, value.as_str().unwrap_or_default(), style.ensure_ascii),
        ValueKind::Seq | ValueKind::Iterable => {
            let items: Vec<Value> = value.try_iter()?.collect();
            write_block(out, style, depth, ('[', ']'), items.len(), |out, i| write(out, &items[i], style, depth + 1))?;
        }
        ValueKind::Map => {
            let mut keys: Vec<Value> = value.try_iter()?.collect();
            if style.sort_keys {
                keys.sort();
            }
            write_block(out, style, depth, ('{', '}'), keys.len(), |out, i| {
                match keys[i].kind() {
                    ValueKind::String => write_string(out, keys[i].as_str().unwrap_or_default(), style.ensure_ascii),
                    ValueKind::Number | ValueKind::Bool | ValueKind::None => {
                        out.push('"');
                        write(out, &keys[i], style, depth + 1)?;
                        out.push('"');
                    }
                    kind => return Err(refuse(&format!("a key of kind {kind}"))),
                }
                out.push_str(&style.key);
                write(out, &value.get_item(&keys[i])?, style, depth + 1)
            })?;
        }
        kind => return Err(refuse(&format!("a value of kind {kind}"))),
    }
    Ok(())
}

fn refuse(what: &str) -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("tojson: {what} is not JSON serializable"))
}

fn write_block(
    out: &mut String,
    style: &Style,
    depth: usize,
    (open, close): (char, char),
    len: usize,
    mut item: impl FnMut(&mut String, usize) -> Result<(), Error>,
) -> Result<(), Error> {
    let new_line = |out: &mut String, depth: usize| {
        if let Some(indent) = style.indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', indent * depth));
        }
    };
    out.push(open);
    for i in 0..len {
        if i > 0 {
            out.push_str(&style.item);
        }
        new_line(out, depth + 1);
        item(out, i)?;
    }
    if len > 0 {
        new_line(out, depth);
    }
    out.push(close);
    Ok(())
}

fn write_string(out: &mut String, text: &str, ensure_ascii: bool) {
    out.push('"');
    escape(text, ensure_ascii, out);
    out.push('"');
}

/// Appends `text` as it stands inside a JSON string. Character by character, so that pieces join.
pub fn escape(text: &str, ensure_ascii: bool, out: &mut String) {
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{C}' => out.push_str("\\f"),
            c if (c as u32) < 0x20 || (ensure_ascii && !c.is_ascii()) => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    let _ = write!(out, "\\u{unit:04x}");
                }
            }
            c => out.push(c),
        }
    }
}

fn write_number(out: &mut String, value: &Value) {
    if value.is_integer() {
        let _ = write!(out, "{value}");
    } else {
        out.push_str(&float_repr(f64::try_from(value.clone()).unwrap_or(f64::NAN)));
    }
}

/// Python's `repr` of a float as JSON prints it: shortest digits that read back, scientific below 1e-4 and from 1e16.
fn float_repr(x: f64) -> String {
    if x.is_nan() {
        return "NaN".into();
    }
    if x.is_infinite() {
        return if x > 0.0 { "Infinity" } else { "-Infinity" }.into();
    }
    let scientific = format!("{x:e}");
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) || x == 0.0 {
        let plain = format!("{x}");
        return if plain.contains('.') { plain } else { plain + ".0" };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{mantissa}e{sign}{:02}", exponent.abs())
}

#[cfg(test)]
mod tests {
    use minijinja::Environment;

    use super::*;

    fn render(expression: &str, value: serde_json::Value) -> String {
        let mut env = Environment::new();
        env.add_filter("tojson", tojson);
        env.render_str(&format!("{{{{ v | {expression} }}}}"), minijinja::context! { v => value }).unwrap()
    }

    #[test]
    fn prints_as_json_dumps_does() {
        let value = serde_json::json!({"b": [1, 2.5, true, null, "é\n\"<&>'🙂"], "a": {}, "c": []});
        assert_eq!(render("tojson", value.clone()), r#"{"b": [1, 2.5, true, null, "é\n\"<&>'🙂"], "a": {}, "c": []}"#);
        assert_eq!(
            render("tojson(ensure_ascii=True, sort_keys=true)", value.clone()),
            r#"{"a": {}, "b": [1, 2.5, true, null, "\u00e9\n\"<&>'\ud83d\ude42"], "c": []}"#
        );
        assert_eq!(render("tojson(separators=(',', ':'))", value), r#"{"b":[1,2.5,true,null,"é\n\"<&>'🙂"],"a":{},"c":[]}"#);
        let value = serde_json::json!({"a": [1, {"b": 2}], "c": {}});
        let indented = "{\n  \"a\": [\n    1,\n    {\n      \"b\": 2\n    }\n  ],\n  \"c\": {}\n}";
        assert_eq!(render("tojson(indent=2)", value.clone()), indented);
        assert_eq!(render("tojson(2)", value), indented);
    }

    #[test]
    fn floats_as_python_prints_them() {
        for (x, want) in [
            (1.0, "1.0"),
            (0.1, "0.1"),
            (-0.0, "-0.0"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e22, "1.5e+22"),
            (1e-4, "0.0001"),
            (1e-5, "1e-05"),
            (1.25e-7, "1.25e-07"),
            (123_456_789_012_345_680.0, "1.2345678901234568e+17"),
            (5e-324, "5e-324"),
        ] {
            assert_eq!(float_repr(x), want);
        }
        assert_eq!(render("tojson", serde_json::json!(9_007_199_254_740_993_u64)), "9007199254740993");
    }

    #[test]
    fn what_is_no_json_is_refused() {
        let mut env = Environment::new();
        env.add_filter("tojson", tojson);
        let error = env.render_str("{{ nothing | tojson }}", ()).unwrap_err().to_string();
        assert!(error.contains("not JSON serializable"), "{error}");
        assert!(env.render_str("{{ 1 | tojson(bogus=1) }}", ()).is_err());
    }
}
