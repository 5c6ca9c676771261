//! The parser against whole texts: named cases, and every cut of generated answers.

use rand::rngs::SmallRng;
use rand::seq::IndexedRandom as _;
use rand::{Rng as _, SeedableRng as _};
use serde_json::{Value, json};

use super::*;

fn tools() -> Arc<ToolSet> {
    let tool = |name: &str, properties: Value| json!({"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}});
    Arc::new(ToolSet::of_request(&[
        tool("get", json!({"id": {"type": "integer"}})),
        tool("get_weather", json!({"city": {"type": "string"}, "days": {"type": ["integer", "null"]}})),
        tool(
            "write_file",
            json!({"path": {"type": "string"}, "text": {"type": "string"}, "mode": {"enum": ["a", "w"]}, "meta": {"type": "object"}}),
        ),
        tool("now", json!({})),
        json!({"name": "bare", "parameters": {}}),
    ]))
}

/// Everything an answer amounts to: reasoning, content, calls.
#[derive(Debug, Default, PartialEq, Eq, Clone)]
struct Answer {
    reasoning: String,
    content: String,
    calls: Vec<(String, String)>,
}

impl Answer {
    fn take(&mut self, parts: Vec<Part>) {
        for part in parts {
            match part {
                Part::Reasoning(text) => self.reasoning.push_str(&text),
                Part::Content(text) => self.content.push_str(&text),
                Part::Call(name) => self.calls.push((name, String::new())),
                Part::Arguments(text) => self.calls.last_mut().expect("a call has begun").1.push_str(&text),
            }
        }
    }
}

fn format(reasoning: bool) -> AnswerFormat {
    AnswerFormat { reasoning, tools: tools(), ..AnswerFormat::default() }
}

fn read(format: &AnswerFormat, pieces: &[&str], complete: bool) -> Answer {
    let mut parser = AnswerParser::new(format.clone());
    let mut answer = Answer::default();
    for piece in pieces {
        let mut parts = Vec::new();
        parser.push(piece, &mut parts);
        assert!(parts.windows(2).all(|w| std::mem::discriminant(&w[0]) != std::mem::discriminant(&w[1]) || matches!(w[0], Part::Call(_))));
        answer.take(parts);
    }
    let mut parts = Vec::new();
    parser.finish(complete, &mut parts);
    answer.take(parts);
    answer
}

fn whole(text: &str) -> Answer {
    read(&format(true), &[text], true)
}

fn pair(reasoning: &str, content: &str) -> Answer {
    Answer { reasoning: reasoning.into(), content: content.into(), calls: Vec::new() }
}

fn calls(calls: &[(&str, &str)]) -> Vec<(String, String)> {
    calls.iter().map(|(name, json)| ((*name).to_owned(), (*json).to_owned())).collect()
}

#[test]
fn reasoning_ends_at_its_tag() {
    let outside = |text: &str| read(&format(false), &[text], true);
    assert_eq!(whole("thought</think>answer"), pair("thought", "answer"));
    assert_eq!(outside("<think>thought</think>\n\nanswer"), pair("thought", "\n\nanswer"));
    assert_eq!(outside("answer, 1 < 2, <thin>"), pair("", "answer, 1 < 2, <thin>"));
    assert_eq!(whole("cut off </thi"), pair("cut off </thi", ""));
    assert_eq!(whole("</think>answer"), pair("", "answer"));
    assert_eq!(whole("a<<think>b</</think>c"), pair("a<b</", "c"), "a stray opener is dropped, a lone < kept");
    assert_eq!(outside("a</think>b"), pair("", "ab"), "and so is a stray closer");
}

#[test]
fn knows_whether_the_prompt_opened_it() {
    assert!(prompt_opens_reasoning("<|assistant|><think>"));
    assert!(prompt_opens_reasoning("<think>a</think>b<|assistant|><think>\n"));
    assert!(!prompt_opens_reasoning("<|assistant|><think></think>"));
    assert!(!prompt_opens_reasoning("what does <think> mean?<|assistant|>"));
    assert!(!prompt_opens_reasoning("hello"));
}

#[test]
fn calls_are_typed_objects() {
    let answer = whole(
        "why</think>I look.<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>São \"Paulo\"</arg_value>\n<arg_key>days</arg_key><arg_value>3</arg_value>\n</tool_call>\n<tool_call>get<arg_key>id</arg_key><arg_value> 7 </arg_value></tool_call>done",
    );
    assert_eq!((answer.reasoning.as_str(), answer.content.as_str()), ("why", "I look.\ndone"));
    assert_eq!(answer.calls, calls(&[("get_weather", r#"{"city":"São \"Paulo\"","days":3}"#), ("get", r#"{"id":7}"#)]));
}

/// T-23: calls without arguments, with and without line breaks.
#[test]
fn t23_calls_without_arguments() {
    for text in ["<tool_call>now</tool_call>", "<tool_call>now\n</tool_call>", "<tool_call>\nnow\n\n</tool_call>", "<tool_call>now"] {
        let answer = whole(&format!("x</think>{text}"));
        assert_eq!((answer.content.as_str(), answer.calls), ("", calls(&[("now", "{}")])), "{text:?}");
    }
}

#[test]
fn a_call_inside_an_unclosed_thought_is_a_call() {
    let answer = whole("I need it.<tool_call>get<arg_key>id</arg_key><arg_value>1</arg_value></tool_call> and more</think>ok");
    assert_eq!((answer.reasoning.as_str(), answer.content.as_str()), ("I need it. and more", "ok"));
    assert_eq!(answer.calls, calls(&[("get", r#"{"id":1}"#)]));
}

#[test]
fn names_that_are_not_declared_stay_text() {
    let text = "<tool_call>rm<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>";
    assert_eq!(whole(&format!("</think>{text}")), pair("", text));
    assert_eq!(whole(&format!("{text}</think>a")), pair(text, "a"));
    let nested = whole("</think><tool_call><tool_call>now</tool_call>");
    assert_eq!((nested.content.as_str(), nested.calls), ("<tool_call>", calls(&[("now", "{}")])));
    let none = AnswerFormat { reasoning: true, ..AnswerFormat::default() };
    assert_eq!(read(&none, &["</think><tool_call>now</tool_call>"], true), pair("", "<tool_call>now</tool_call>"));
}

#[test]
fn what_models_leave_out() {
    let cases = [
        ("<tool_call>get_weather\ncity</arg_key><arg_value>Rome</arg_value></tool_call>", r#"{"city":"Rome"}"#),
        ("<tool_call>get_weather<arg_key>city</arg_key>Rome</arg_value></tool_call>", r#"{"city":"Rome"}"#),
        ("<tool_call>get_weather<arg_key>city<arg_value>Rome</arg_value></tool_call>", r#"{"city":"Rome"}"#),
        ("<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome</arg_value>", r#"{"city":"Rome"}"#),
        ("<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome</tool_call>\n", r#"{"city":"Rome"}"#),
        ("<tool_call>get_weather<arg_key>days</arg_key><arg_value>4</tool_call>", r#"{"days":4}"#),
        ("<tool_call>get_weather<arg_key>city</arg_key></tool_call>", "{}"),
        (
            "<tool_call>get_weather<arg_key>city</arg_key><arg_value>a</arg_value>junk<arg_key>days</arg_key><arg_value>null</arg_value></tool_call>",
            r#"{"city":"a","days":null}"#,
        ),
        (
            "<tool_call>get_weather<arg_key>city</arg_key><arg_value>a</arg_value><arg_key>city</arg_key><arg_value>b</arg_value></tool_call>",
            r#"{"city":"a"}"#,
        ),
    ];
    for (text, json) in cases {
        let answer = whole(&format!("</think>{text}"));
        assert_eq!((answer.content.as_str(), answer.calls), ("", calls(&[("get_weather", json)])), "{text}");
    }
    let two = whole("</think><tool_call>now<tool_call>get<arg_key>id</arg_key><arg_value>2</arg_value></tool_call>");
    assert_eq!(two.calls, calls(&[("now", "{}"), ("get", r#"{"id":2}"#)]));
}

#[test]
fn an_answer_that_was_cut_off_leaves_its_json_open() {
    let cut = |text: &str| read(&format(false), &[text], false).calls;
    assert_eq!(cut("<tool_call>get_weather<arg_key>city</arg_key><arg_value>Ro"), calls(&[("get_weather", "{\"city\":\"Ro")]));
    assert_eq!(cut("<tool_call>get<arg_key>id</arg_key><arg_value>12"), calls(&[("get", "")]));
    assert_eq!(cut("<tool_call>now"), []);
}

#[test]
fn one_call_ends_the_answer_where_no_more_are_wanted() {
    let single = AnswerFormat { single_call: true, ..format(false) };
    let mut parser = AnswerParser::new(single);
    let mut parts = Vec::new();
    parser.push("<tool_call>now</tool_call><tool_call>now</tool_call>", &mut parts);
    assert!(parser.is_done());
    parser.finish(true, &mut parts);
    assert_eq!(parts, [Part::Call("now".into()), Part::Arguments("{}".into())]);
}

#[test]
fn a_verbatim_answer_keeps_its_tags() {
    let verbatim = AnswerFormat { verbatim: true, calls_in_reasoning: false, ..format(true) };
    let text = r#"{"a": "<think>x</think><tool_call>now</tool_call>"}"#;
    let thought = "why<tool_call>now</tool_call>";
    assert_eq!(read(&verbatim, &[thought, "</think>", text], true), pair(thought, text));
    assert_eq!(read(&verbatim, &["</think><tool_call>now</tool_call>"], true).calls, calls(&[("now", "{}")]));
    let bare = AnswerFormat { reasoning: false, ..verbatim };
    assert_eq!(read(&bare, &["</think>"], true), pair("", "</think>"));
}

/// T-28: a long string argument comes in many pieces, not in one.
#[test]
fn t28_long_arguments_are_streamed() {
    let long = "line of text\n".repeat(1600);
    let text = format!("<tool_call>write_file<arg_key>text</arg_key><arg_value>{long}</arg_value></tool_call>");
    let mut parser = AnswerParser::new(format(false));
    let (mut answer, mut deltas) = (Answer::default(), 0);
    for piece in text.as_bytes().chunks(64) {
        let mut parts = Vec::new();
        parser.push(std::str::from_utf8(piece).unwrap(), &mut parts);
        deltas += parts.iter().filter(|part| matches!(part, Part::Arguments(_))).count();
        answer.take(parts);
    }
    assert!(long.len() > 20_000 && deltas > 100, "{deltas} deltas");
    assert_eq!(serde_json::from_str::<Value>(&answer.calls[0].1).unwrap(), json!({"text": long}));
}

/// One answer as a model might write it, well-formed or not.
fn generate(rng: &mut SmallRng) -> String {
    const WORDS: [&str; 14] =
        ["because ", "1 < 2", "<b>", "</arg_value", "é", "🙂", "\n", "<think>", "</thi", "<tool", "}", "\"", "\\n", "안녕"];
    const VALUES: [&str; 14] = [
        "Rome",
        "10",
        "\"10\"",
        "{\"a\": [1, \"</x>\"]}",
        "[1]",
        "null",
        "true",
        "9007199254740993",
        "001",
        "NaN",
        "",
        "a\nb\"c\\",
        "</tool_call>",
        "🙂<arg_key>",
    ];
    const NAMES: [&str; 7] = ["get", "get_weather", "write_file", "now", "bare", "unknown", "get_"];
    const KEYS: [&str; 7] = ["id", "city", "days", "path", "text", "mode", "other"];
    let some = |rng: &mut SmallRng, most: usize| -> String {
        let n = rng.random_range(0..=most);
        (0..n).map(|_| *WORDS.choose(rng).unwrap()).collect()
    };
    let mut text = some(rng, 4);
    if rng.random_bool(0.8) {
        text += "</think>";
    }
    text += &some(rng, 3);
    for _ in 0..rng.random_range(0..3) {
        text += "<tool_call>";
        text += NAMES.choose(rng).unwrap();
        text += ["", "\n", " \n"].choose(rng).unwrap();
        for _ in 0..rng.random_range(0..4) {
            // One tag in ten is left out.
            let mut tag = |tag: &'static str| if rng.random_bool(0.1) { "" } else { tag };
            let tags = [tag("<arg_key>"), tag("</arg_key>"), tag("<arg_value>"), tag("</arg_value>")];
            let (key, value) = (KEYS.choose(rng).unwrap(), VALUES.choose(rng).unwrap());
            text += &format!("{}{key}{}{}{value}{}", tags[0], tags[1], tags[2], tags[3]);
            text += ["", "\n", "??"].choose(rng).unwrap();
        }
        if rng.random_bool(0.9) {
            text += "</tool_call>";
        }
        text += &some(rng, 2);
    }
    text
}

/// T-24: 240 generated answers; all cuts in two, random cuts in many, and character by character.
#[test]
fn t24_every_cut_gives_the_same() {
    let mut rng = SmallRng::seed_from_u64(24);
    let mut called = 0;
    for i in 0..240 {
        let text = generate(&mut rng);
        let format = AnswerFormat { single_call: i % 7 == 0, verbatim: i % 11 == 0, calls_in_reasoning: i % 4 != 0, ..format(i % 5 != 0) };
        let complete = i % 3 != 0;
        let want = read(&format, &[&text], complete);
        called += want.calls.len();
        for (_, json) in want.calls.iter().filter(|_| complete) {
            assert!(serde_json::from_str::<Value>(json).is_ok_and(|v| v.is_object()), "{text:?}: {json}");
        }
        let cuts: Vec<usize> = text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
        for &cut in &cuts {
            assert_eq!(read(&format, &[&text[..cut], &text[cut..]], complete), want, "{text:?} cut at {cut}");
        }
        let singles: Vec<&str> = cuts.windows(2).map(|w| &text[w[0]..w[1]]).collect();
        assert_eq!(read(&format, &singles, complete), want, "{text:?} in characters");
        for _ in 0..20 {
            let mut some: Vec<usize> = cuts.iter().copied().filter(|_| rng.random_bool(0.2)).collect();
            some.extend([0, text.len()]);
            some.sort_unstable();
            let pieces: Vec<&str> = some.windows(2).map(|w| &text[w[0]..w[1]]).collect();
            assert_eq!(read(&format, &pieces, complete), want, "{text:?} in {pieces:?}");
        }
    }
    assert!(called > 100, "{called} calls in all");
}
