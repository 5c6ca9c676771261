//! What masks cost over a vocabulary of the published model's size: 154,880 made-up tokens (bytes, syllables with and without a space before
//! them, numbers of up to three digits, runs of white space and dashes, characters of other scripts).
//!
//! `cargo bench -p tandem-grammar`. Each case walks one text that its grammar takes, token by token, and times compiling and every mask.
#![allow(clippy::unwrap_used, reason = "a bench that cannot go on says so")]

use std::{
    collections::HashMap,
    hint::black_box,
    time::{Duration, Instant},
};

use serde_json::json;
use tandem_grammar::{Grammar, TokenTable, Vocabulary};

const SIZE: usize = 154_880;
const ROUNDS: usize = 20;

/// The words of the vocabulary, without doubles.
fn words() -> Vec<Vec<u8>> {
    let mut words: Vec<Vec<u8>> = (0..=255u8).map(|b| vec![b]).collect();
    let mut seen: HashMap<Vec<u8>, ()> = words.iter().map(|w| (w.clone(), ())).collect();
    let mut add = |word: Vec<u8>, words: &mut Vec<Vec<u8>>| {
        if words.len() < SIZE - 2 && seen.insert(word.clone(), ()).is_none() {
            words.push(word);
        }
    };
    for n in 0..1000 {
        add(n.to_string().into_bytes(), &mut words);
        add(format!("{n:03}").into_bytes(), &mut words);
    }
    for n in 2..=64 {
        [" ", "-", "=", "\n", "\t"].iter().for_each(|c| add(c.repeat(n).into_bytes(), &mut words));
    }
    for text in ["\":", "\": \"", "\",\n  \"", "{\"", "\"}", "},{\"", "</", "\"],", ": ", ", ", "();", "://", "[]"] {
        add(text.as_bytes().to_vec(), &mut words);
    }
    ('\u{4E00}'..'\u{8000}').for_each(|c| add(c.to_string().into_bytes(), &mut words));
    let onsets = ["b", "c", "d", "f", "g", "h", "l", "m", "n", "p", "r", "s", "t", "st", "pr", "ch", "v", "w", "k"];
    let rimes = ["a", "e", "i", "o", "u", "an", "er", "ing", "ion", "ate", "al", "ous", "ent"];
    let syllables: Vec<String> = onsets.iter().flat_map(|o| rimes.iter().map(move |r| format!("{o}{r}"))).collect();
    for first in &syllables {
        [first.clone(), format!(" {first}")].into_iter().for_each(|w| add(w.into_bytes(), &mut words));
    }
    for first in &syllables {
        for second in &syllables {
            let word = format!("{first}{second}");
            let capital = word[..1].to_uppercase() + &word[1..];
            [format!(" {word}"), word, format!(" {capital}")].into_iter().for_each(|w| add(w.into_bytes(), &mut words));
        }
    }
    words.resize(SIZE - 2, Vec::new());
    words.extend([b"<|end|>".to_vec(), b"<|user|>".to_vec()]);
    words
}

fn main() {
    let words = words();
    let ids: HashMap<&[u8], u32> = words.iter().enumerate().filter(|w| !w.1.is_empty()).map(|(i, w)| (w.as_slice(), i as u32)).collect();
    let mut table = TokenTable { special: vec![SIZE as u32 - 2, SIZE as u32 - 1], stops: vec![SIZE as u32 - 2], ..TokenTable::default() };
    for word in &words {
        table.bytes.extend(word);
        table.ends.push(table.bytes.len() as u32);
    }
    let timer = Instant::now();
    let vocabulary = Vocabulary::new(table).unwrap();
    println!("{SIZE} tokens; the trie is built in {:.0} ms, once a process\n", timer.elapsed().as_secs_f64() * 1e3);
    // The longest token first.
    let tokens = |text: &str| {
        let (mut bytes, mut out) = (text.as_bytes(), Vec::new());
        while !bytes.is_empty() {
            let n = (1..=bytes.len().min(64)).rev().find(|n| ids.contains_key(&bytes[..*n])).unwrap();
            out.push(ids[&bytes[..n]]);
            bytes = &bytes[n..];
        }
        out
    };
    let person = json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 80},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["alpha", "beta", "gamma"]}},
            "address": {"type": "object", "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
                "required": ["street", "zip"], "additionalProperties": false},
            "score": {"type": ["number", "null"]},
        },
        "required": ["name", "age", "tags", "address", "score"],
        "additionalProperties": false,
    });
    let filled = r#"{"name": "Chanter Station", "age": 47, "tags": ["alpha", "gamma"], "address": {"street": "12 Manser ingate", "zip": "10115"}, "score": 1.5e3}"#;
    let call = "start: (before call)* text?\nbefore[lazy]: /(?s:.*)<tool_call>/\ntext: TEXT\nTEXT: /(?s:.+)/ & ~/(?s:.*<tool_call>.*)/\n\
                call: \"f<arg_key>city</arg_key><arg_value>\" value \"</tool_call>\"\nvalue[lazy]: /(?s:.*)<\\/arg_value>/\n";
    let cases = [
        ("any JSON object", Grammar::json(&json!({"type": "object"})), filled.to_owned()),
        ("a schema of five fields", Grammar::json(&person), filled.to_owned()),
        ("a regular expression", Grammar::regex("[A-Z][a-z]+( [a-z]+){3,40}\\."), format!("Station{}.", " manser chanter".repeat(12))),
        (
            "one of 500 texts",
            Grammar::choice(&(0..500).map(|i| format!("choice number {i}")).collect::<Vec<_>>()),
            "choice number 417".to_owned(),
        ),
        (
            "free text with strict calls",
            Grammar::lark(call),
            format!("{}<tool_call>f<arg_key>city</arg_key><arg_value>Manser</arg_value></tool_call>", "chanter ingate ".repeat(12)),
        ),
    ];
    println!("| grammar | tokens | compile ms | mask µs: median | 90 % | most |\n|---|---:|---:|---:|---:|---:|");
    for (name, grammar, text) in cases {
        let (ids, source) = (tokens(&text), grammar.to_text());
        let (mut compiling, mut masks) = (Duration::MAX, Vec::new());
        for _ in 0..ROUNDS {
            let timer = Instant::now();
            let mut matcher = vocabulary.compile(&source).unwrap();
            compiling = compiling.min(timer.elapsed());
            for &id in &ids {
                let timer = Instant::now();
                let mask = black_box(matcher.mask().unwrap());
                masks.push(timer.elapsed());
                assert!(mask.is_none_or(|mask| mask.allows(id)), "{name}: {:?}", String::from_utf8_lossy(&words[id as usize]));
                matcher.accept(id).unwrap();
            }
        }
        masks.sort_unstable();
        let at = |share: f64| masks[((masks.len() - 1) as f64 * share) as usize].as_secs_f64() * 1e6;
        println!("| {name} | {} | {:.1} | {:.0} | {:.0} | {:.0} |", ids.len(), compiling.as_secs_f64() * 1e3, at(0.5), at(0.9), at(1.0));
    }
}
