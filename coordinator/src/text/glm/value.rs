//! The text of one argument → JSON.
//!
//! The template writes a string as it is and everything else as JSON, so only the schema tells `10` from `"10"`. Where it allows both, JSON
//! wins. Numbers keep their digits. Text that is nothing which the schema allows stays a string: nothing is lost, and the caller's own
//! validation can name it.

use serde::de::IgnoredAny;

use super::Kinds;
use crate::text::json::escape;

/// JSON of `text` for an argument of these types.
pub fn to_json(text: &str, kinds: Kinds) -> String {
    if kinds == Kinds::STRING {
        return quoted(text);
    }
    let trimmed = text.trim();
    typed(trimmed, kinds).unwrap_or_else(|| quoted(text))
}

fn typed(text: &str, kinds: Kinds) -> Option<String> {
    let word = match text {
        "True" => "true",
        "False" => "false",
        "None" => "null",
        other => other,
    };
    match kind(word) {
        Some(kind) if kinds.has(kind) => return Some(word.to_owned()),
        // 10.0 where only an integer will do.
        Some(Kinds::NUMBER) if kinds.has(Kinds::INTEGER) && !kinds.has(Kinds::STRING) => {
            let (whole, fraction) = word.split_once('.')?;
            return (fraction.bytes().all(|b| b == b'0') && kind(whole) == Some(Kinds::INTEGER)).then(|| whole.to_owned());
        }
        // A value in quotes that it should not have.
        Some(Kinds::STRING) => {
            let inner: String = serde_json::from_str(word).ok()?;
            return (kind(&inner).is_some_and(|kind| kind != Kinds::STRING && kinds.has(kind))).then_some(inner);
        }
        _ => {}
    }
    None
}

/// The type of a JSON text; `None` if it is none.
fn kind(text: &str) -> Option<Kinds> {
    serde_json::from_str::<IgnoredAny>(text).ok()?;
    Some(match text.trim_start().as_bytes().first()? {
        b'"' => Kinds::STRING,
        b'{' => Kinds::OBJECT,
        b'[' => Kinds::ARRAY,
        b't' | b'f' => Kinds::BOOLEAN,
        b'n' => Kinds::NULL,
        _ if text.contains(['.', 'e', 'E']) => Kinds::NUMBER,
        _ => Kinds::INTEGER,
    })
}

fn quoted(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    out.push('"');
    escape(text, false, &mut out);
    out.push('"');
    out
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// T-25: every schema against every value, as the template prints it.
    #[test]
    fn t25_schema_matrix() {
        let root = json!({"$defs": {"n": {"type": "integer"}}});
        let schemas = [
            json!({"type": "string"}),
            json!({"type": "number"}),
            json!({"type": "integer"}),
            json!({"type": "boolean"}),
            json!({"type": "array"}),
            json!({"type": "object"}),
            json!({"type": ["string", "null"]}),
            json!({"enum": ["10", "a"]}),
            json!({"anyOf": [{"type": "integer"}, {"type": "string"}]}),
            json!({"$ref": "#/$defs/n"}),
            json!({}),
        ];
        // Columns in the order of the schemas; every cell is the JSON that the client gets.
        let big = "9007199254740993";
        let rows: [(&str, [&str; 11]); 11] = [
            ("10", ["\"10\"", "10", "10", "\"10\"", "\"10\"", "\"10\"", "\"10\"", "\"10\"", "10", "10", "10"]),
            ("\"10\"", [Q, "10", "10", Q, Q, Q, "\"10\"", Q, "\"10\"", "10", "\"10\""]),
            ("{\"a\":1}", [Q, Q, Q, Q, Q, "{\"a\":1}", Q, Q, Q, Q, "{\"a\":1}"]),
            ("[1]", [Q, Q, Q, Q, "[1]", Q, Q, Q, Q, Q, "[1]"]),
            ("null", [Q, Q, Q, Q, Q, Q, "null", Q, Q, Q, "null"]),
            ("None", [Q, Q, Q, Q, Q, Q, "null", Q, Q, Q, "null"]),
            ("true", [Q, Q, Q, "true", Q, Q, Q, Q, Q, Q, "true"]),
            (big, [Q, big, big, Q, Q, Q, Q, Q, big, big, big]),
            ("001", [Q; 11]),
            ("NaN", [Q; 11]),
            ("10.0", [Q, "10.0", "10", Q, Q, Q, Q, Q, Q, "10", "10.0"]),
        ];
        for (text, cells) in rows {
            for (schema, cell) in schemas.iter().zip(cells) {
                let got = to_json(text, Kinds::of_schema(schema, &root));
                let want = if cell == Q { quoted(text) } else { cell.to_owned() };
                assert_eq!(got, want, "{text} for {schema}");
                assert!(serde_json::from_str::<Value>(&got).is_ok());
            }
        }
    }

    /// The text itself, as a string.
    const Q: &str = "quoted";

    #[test]
    fn escapes_are_json() {
        let text = "a\"b\\c\n\r\t\u{1}é🙂</x>";
        assert_eq!(serde_json::from_str::<String>(&quoted(text)).unwrap(), text);
    }
}
