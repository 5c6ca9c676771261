//! Masks over a vocabulary of single bytes and a few longer tokens: what they allow validates, and what they cannot hold is refused.
#![allow(clippy::unwrap_used, reason = "tests")]

use proptest::prelude::*;
use serde_json::{Value, json};
use tandem_grammar::{Grammar, Matcher, TokenTable, Vocabulary};

const STOP: u32 = 300;
const CLOSE: &[u8] = b"</think>";

/// Ids 0 to 255 are bytes; then longer tokens; then two that end.
fn vocabulary() -> &'static Vocabulary {
    static ONCE: std::sync::LazyLock<Vocabulary> = std::sync::LazyLock::new(|| {
        let mut words: Vec<Vec<u8>> = (0..=255).map(|b| vec![b]).collect();
        words.extend(["\":", "{\"", "true", "</think>", ">{", "</", "think", "a</think>b", "é", "🙂", "12"].map(|w| w.as_bytes().to_vec()));
        words.resize(300, Vec::new());
        words.extend(["<|end|>", "<|user|>"].map(|w| w.as_bytes().to_vec()));
        let mut table = TokenTable { special: vec![300, 301], stops: vec![STOP, 301], ..TokenTable::default() };
        for word in words {
            table.bytes.extend(word);
            table.ends.push(table.bytes.len() as u32);
        }
        Vocabulary::new(table).unwrap()
    });
    &ONCE
}

fn text_of(id: u32) -> Vec<u8> {
    match id {
        0..=255 => vec![id as u8],
        _ => ["\":", "{\"", "true", "</think>", ">{", "</", "think", "a</think>b", "é", "🙂", "12"][id as usize - 256].as_bytes().to_vec(),
    }
}

/// Walks a grammar at random; `None` where the walk did not end in `steps` tokens.
fn walk(mut matcher: Matcher, choices: &[u32], steps: usize) -> Option<String> {
    let mut out = Vec::new();
    for step in 0..steps {
        let mask = matcher.mask().unwrap().expect("a grammar is in force");
        let allowed: Vec<u32> = (0..300).filter(|&id| mask.allows(id)).collect();
        assert_eq!(allowed.is_empty(), mask.must_end);
        assert!(!mask.allows(STOP) && (mask.may_end || !allowed.is_empty()), "neither end nor token after {out:?}");
        let pick = choices[step % choices.len()];
        if mask.must_end || (mask.may_end && pick.is_multiple_of(3)) {
            return Some(String::from_utf8(out).unwrap());
        }
        // Late in the walk, what closes is preferred, so that most walks end.
        let closing = allowed.iter().copied().find(|&id| step > 60 && id < 256 && b"\"}]0".contains(&(id as u8)));
        let id = closing.unwrap_or(allowed[(pick as usize) % allowed.len()]);
        out.extend(text_of(id));
        matcher.accept(id).unwrap();
    }
    None
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// T-08: whatever a mask lets through validates.
    #[test]
    fn t08_what_a_schema_lets_through_fits_it(choices in proptest::collection::vec(any::<u32>(), 50..200), which in 0usize..4) {
        let (schema, fits): (Value, fn(&Value) -> bool) = match which {
            0 => (json!({"type": "object", "properties": {"a": {"type": "integer", "minimum": 3}}, "required": ["a"], "additionalProperties": false}),
                  |v| v["a"].as_f64().is_some_and(|a| a >= 3.0) && v.as_object().unwrap().len() == 1),
            1 => (json!({"enum": ["red", "green", 5, null]}), |v| [json!("red"), json!("green"), json!(5), json!(null)].contains(v)),
            2 => (json!({"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3}),
                  |v| v.as_array().is_some_and(|a| (1..=3).contains(&a.len()) && a.iter().all(Value::is_boolean))),
            _ => (json!({"type": "string", "pattern": "^[ab]{2,4}$"}),
                  |v| v.as_str().is_some_and(|s| (2..=4).contains(&s.len()) && s.bytes().all(|b| b == b'a' || b == b'b'))),
        };
        let matcher = vocabulary().compile(&Grammar::json(&schema).to_text()).unwrap();
        if let Some(text) = walk(matcher, &choices, 200) {
            let value: Value = serde_json::from_str(&text).map_err(|e| TestCaseError::fail(format!("{text:?}: {e}")))?;
            prop_assert!(fits(&value), "{text}");
        }
    }

    #[test]
    fn regexes_and_choices_match_as_a_whole(choices in proptest::collection::vec(any::<u32>(), 20..60)) {
        let regex = vocabulary().compile(&Grammar::regex("^v[0-9]{1,3}/(x|yz)$").to_text()).unwrap();
        let text = walk(regex, &choices, 60).expect("it ends");
        let (number, tail) = text.strip_prefix('v').unwrap().split_once('/').unwrap();
        prop_assert!((1..=3).contains(&number.len()) && number.bytes().all(|b| b.is_ascii_digit()) && ["x", "yz"].contains(&tail));
        let texts = ["yes".to_owned(), "yes, but (no)".to_owned(), "🙂".to_owned()];
        let choice = vocabulary().compile(&Grammar::choice(&texts).to_text()).unwrap();
        prop_assert!(texts.contains(&walk(choice, &choices, 60).expect("it ends")));
    }
}

/// T-07: what is broken or cannot be enforced is refused in words, and nothing panics.
#[test]
fn t07_what_cannot_be_enforced_is_refused() {
    let schemas = [
        json!({"type": "object", "properties": {"foo": "bar"}}),
        json!({"type": "colour"}),
        json!({"properties": []}),
        json!({"items": [{"type": "integer"}, 5]}),
        json!({"$ref": "#/$defs/missing"}),
        json!({"$ref": "http://example.com/schema"}),
        json!({"type": "string", "pattern": "("}),
        json!({"type": "string", "pattern": "(?=a)b"}),
        json!({"type": "string", "minLength": 5, "maxLength": 2}),
        json!({"type": "integer", "minimum": 5, "maximum": 2}),
        json!({"type": "object", "patternProperties": {"(": {}}}),
        json!({"not": {"type": "string"}}),
        json!({"if": {"type": "string"}, "then": {}}),
        json!({"type": "array", "uniqueItems": true}),
        json!({"type": "object", "required": "a"}),
        json!({"enum": []}),
        json!({"anyOf": "x"}),
        json!({"type": "array", "contains": {"type": "integer"}}),
        json!({"type": "object", "dependentRequired": {"a": ["b"]}}),
        json!({"type": "string", "format": "color-hex-ish"}),
        json!({"x-guidance": {"lenient": true}, "not": {}}),
        json!({"allOf": [{"type": "string"}, {"type": "integer"}]}),
    ];
    for schema in schemas {
        let error = vocabulary().compile(&Grammar::json(&schema).to_text()).expect_err(&schema.to_string()).to_string();
        assert!(!error.is_empty() && error.len() < 400 && !error.contains('\n'), "{schema}: {error}");
    }
    for grammar in [
        Grammar::regex("("),
        Grammar::regex("a\\"),
        Grammar::regex("(?<=a)b"),
        Grammar::lark("start: nothing"),
        Grammar::lark("%%%"),
        Grammar::lark(""),
    ] {
        assert!(vocabulary().compile(&grammar.to_text()).is_err(), "{grammar:?}");
    }
    let many: Vec<Value> = (0..1_000_000).map(Value::from).collect();
    assert!(vocabulary().compile(&Grammar::json(&json!({"enum": many})).to_text()).is_err());
    let mut deep = json!({"type": "integer"});
    for _ in 0..60 {
        deep = json!({"type": "array", "items": deep});
    }
    let _ = vocabulary().compile(&Grammar::json(&deep).to_text());
    let loops = json!({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}});
    let _ = vocabulary().compile(&Grammar::json(&loops).to_text());
}

/// The grammar begins behind the tag, however the tag is spelled; and no token runs on behind it.
#[test]
fn a_grammar_may_wait_for_the_end_of_the_reasoning() {
    let compile = || vocabulary().compile_after(&Grammar::regex("ok").to_text(), CLOSE).unwrap();
    let id = |text: &str| (0..267).find(|&id| text_of(id) == text.as_bytes()).unwrap();
    for spelling in
        [vec!["x", "</think>"], vec!["<", "</", "think", ">"], vec!["</think", ">"], vec!["<", "/", "t", "h", "i", "n", "k", ">"]]
    {
        let mut matcher = compile();
        for piece in &spelling {
            let ids: Vec<u32> = if piece.len() > 1 && *piece == "</think" { ["</", "think"].map(id).to_vec() } else { vec![id(piece)] };
            for id in ids {
                assert!(matcher.mask().unwrap().is_none_or(|mask| mask.allows(id) && mask.may_end), "{spelling:?}");
                matcher.accept(id).unwrap();
            }
        }
        let mask = matcher.mask().unwrap().expect("in force now");
        assert_eq!((0..300).filter(|&id| mask.allows(id)).collect::<Vec<_>>(), [u32::from(b'o')]);
    }
    let mut matcher = compile();
    let mask = matcher.mask().unwrap().expect("one token holds the tag and more");
    assert!(!mask.allows(id("a</think>b")) && mask.allows(id("</think>")) && mask.allows(id("é")));
    for piece in ["</", "think"] {
        matcher.accept(id(piece)).unwrap();
    }
    let mask = matcher.mask().unwrap().unwrap();
    assert!(mask.allows(id(">")) && !mask.allows(id(">{")) && mask.allows(id("12")));
}

/// A sequence that is taken up again from its tokens goes on with the same masks.
#[test]
fn replayed_tokens_give_the_same_masks() {
    let schema = json!({"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]});
    let text = Grammar::json(&schema).to_text();
    let mut first = vocabulary().compile_after(&text, CLOSE).unwrap();
    let ids: Vec<u32> = "why</think>{\"a\": \"x".bytes().map(u32::from).collect();
    for (n, &id) in ids.iter().enumerate() {
        let mut again = vocabulary().compile_after(&text, CLOSE).unwrap();
        for &id in &ids[..n] {
            again.accept(id).unwrap();
        }
        assert_eq!(again.mask().unwrap(), first.mask().unwrap(), "after {n} tokens");
        first.accept(id).unwrap();
    }
    assert!(first.accept(u32::from(b'\n')).is_err(), "a raw line break in a JSON string");
}

/// T-07: whatever a schema or a grammar asks of the compiler's recursion, the process stands.
#[test]
fn t07_deep_and_endless_forms_end_in_words() {
    let said = |grammar: Grammar| vocabulary().check(&grammar.to_text()).map_err(|e| e.to_string());
    for (low, high) in [(i64::MIN.into(), i64::MIN.into()), (json!(-1e25), json!(-1e24))] as [(Value, Value); 2] {
        let error = said(Grammar::json(&json!({"type": "integer", "minimum": low, "maximum": high}))).unwrap_err();
        assert!(error.contains("numbers are exact up to 2^53"), "{error}");
    }
    let chain = |n: usize| {
        let mut definitions: serde_json::Map<String, Value> =
            (0..n).map(|i| (format!("d{i}"), json!({"$ref": format!("#/$defs/d{}", i + 1)}))).collect();
        definitions.insert(format!("d{n}"), json!({"type": "integer"}));
        Grammar::json(&json!({"$defs": definitions, "$ref": "#/$defs/d0"}))
    };
    // Followed or refused, as the engine likes; never the end of the process.
    for n in [500, 5_000, 9_000] {
        let _either = said(chain(n));
    }
    assert!(said(chain(20)).is_ok());
    let objects: serde_json::Map<String, Value> = (0..3_000)
        .map(|i| (format!("d{i}"), json!({"type": "object", "properties": {"a": {"$ref": format!("#/$defs/d{}", (i + 1) % 3_000)}}})))
        .collect();
    let _either = said(Grammar::json(&json!({"$defs": objects, "$ref": "#/$defs/d0"})));
    let rules: String = (0..9_000).map(|i| format!("r{i}: r{}\n", i + 1)).collect();
    let _either = said(Grammar::lark(&format!("start: r0\n{rules}r9000: \"a\"\n")));
    for endless in [
        Grammar::json(&json!({"$ref": "#"})),
        Grammar::json(&json!({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"})),
        Grammar::lark("start: start"),
        Grammar::regex("[^\\s\\S]"),
    ] {
        let error = said(endless).unwrap_err();
        assert!(!error.contains("left its grammar"), "{error}");
    }
}
