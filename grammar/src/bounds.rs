//! What a grammar may not hold, said before the engine sees it: numbers that it would not keep exactly, names that it would not count, and texts
//! that it would follow too deep.
//!
//! The engine compiles by recursion. Its depth is bounded here by what a text can ask for (`MOST_REFERENCES`, `DEEPEST`, `MOST_RULES`), and
//! `vocabulary.rs` gives it the stack for that.

use serde_json::{Number, Value};

/// Whole numbers up to here are exact in the engine's arithmetic.
const LARGEST_EXACT: u64 = 1 << 53;
/// Most `$ref`s of a schema.
const MOST_REFERENCES: usize = 10_000;
/// Deepest nesting of brackets in a grammar's text.
const DEEPEST: usize = 500;
/// Most rules of a grammar's text.
const MOST_RULES: usize = 10_000;

/// Looks at a schema.
///
/// # Errors
/// What it holds that cannot be enforced.
pub fn schema(schema: &Value) -> Result<(), String> {
    let (mut left, mut references) = (vec![schema], 0);
    while let Some(value) = left.pop() {
        match value {
            Value::Number(number) if !is_exact(number) => {
                return Err(format!("the number {number} cannot be enforced: numbers are exact up to 2^53 (9007199254740992) either way"));
            }
            Value::Array(items) => left.extend(items),
            Value::Object(members) => {
                references += usize::from(members.contains_key("$ref"));
                let required = members.get("required").and_then(Value::as_array).map_or(0, Vec::len);
                let least = members.get("minProperties").and_then(Value::as_u64);
                if let Some(least) = least.filter(|least| *least > required.max(1) as u64) {
                    return Err(format!(
                        "minProperties {least} cannot be enforced beside {required} required names: a name could be given twice"
                    ));
                }
                left.extend(members.values());
            }
            _ => {}
        }
    }
    if references > MOST_REFERENCES {
        return Err(format!("it has {references} references; at most {MOST_REFERENCES} are allowed"));
    }
    Ok(())
}

fn is_exact(number: &Number) -> bool {
    match (number.as_i64(), number.as_u64()) {
        (Some(n), _) => n.unsigned_abs() <= LARGEST_EXACT,
        (None, Some(_)) => false,
        (None, None) => number.as_f64().is_some_and(|n| n.abs() <= LARGEST_EXACT as f64),
    }
}

/// Looks at a grammar in Lark's notation.
///
/// # Errors
/// It is nested too deep, or has too many rules.
pub fn lark(text: &str) -> Result<(), String> {
    let (mut depth, mut deepest) = (0usize, 0);
    for byte in text.bytes() {
        match byte {
            b'(' | b'[' | b'{' => {
                depth += 1;
                deepest = deepest.max(depth);
            }
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    if deepest > DEEPEST {
        return Err(format!("its brackets are nested {deepest} deep; at most {DEEPEST} are allowed"));
    }
    let rules = text.lines().filter(|line| line.contains(':')).count();
    if rules > MOST_RULES {
        return Err(format!("it has {rules} rules; at most {MOST_RULES} are allowed"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn numbers_that_would_not_stay_are_refused() {
        assert_eq!(schema(&json!({"minimum": -9_007_199_254_740_992i64, "enum": [1.5, 9_007_199_254_740_992u64]})), Ok(()));
        for number in [json!(9_007_199_254_740_993u64), json!(i64::MIN), json!(u64::MAX), json!(-1e25)] {
            let said = schema(&json!({"properties": {"a": {"anyOf": [{"const": number}]}}})).unwrap_err();
            assert!(said.contains("cannot be enforced"), "{said}");
        }
    }

    #[test]
    fn more_names_than_are_required_cannot_be_counted() {
        assert_eq!(schema(&json!({"minProperties": 2, "required": ["a", "b"]})), Ok(()));
        assert_eq!(schema(&json!({"minProperties": 1, "patternProperties": {"^x": {}}})), Ok(()));
        assert!(schema(&json!({"items": {"minProperties": 2, "required": ["a"]}})).unwrap_err().contains("minProperties 2"));
    }

    #[test]
    fn depth_is_bounded() {
        let refs = |n: usize| Value::Array(vec![json!({"$ref": "#"}); n]);
        assert!(schema(&refs(10_000)).is_ok() && schema(&refs(10_001)).is_err());
        let nested = |n: usize| format!("start: {}\"a\"{}", "(".repeat(n), ")".repeat(n));
        assert!(lark(&nested(500)).is_ok() && lark(&nested(501)).is_err());
        assert!(lark(&"a: \"b\"\n".repeat(10_001)).is_err());
    }
}
