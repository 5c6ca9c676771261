//! The template engine against the reference renderer: goldens, and the differences between Jinja2 and minijinja that matter.

use serde_json::json;

use super::*;
use crate::text::fixtures::{demo_goldens, demo_template, demo_tokenizer, gguf};
use crate::text::glm::prompt_opens_reasoning;

fn render(source: &str, context: Json) -> Result<String, TemplateError> {
    let kwargs = context.as_object().cloned().unwrap_or_default();
    ChatTemplate::new(source, "test", BTreeMap::new())?.render(&json!([{"role": "user", "content": "hi"}]), None, true, &kwargs)
}

/// T-22 and row 2 of the life of a token: text and ids of every golden conversation.
#[test]
fn t22_goldens_render_and_tokenize_exactly() {
    let (template, tokenizer) = (demo_template(), demo_tokenizer());
    assert!(template.reads_parts());
    let goldens = demo_goldens();
    let cases = goldens["cases"].as_array().unwrap();
    assert!(cases.len() >= 10);
    for case in cases {
        let kwargs = case["kwargs"].as_object().cloned().unwrap_or_default();
        let mut rest = kwargs.clone();
        let tools = rest.remove("tools");
        let prompt = template.render(&case["messages"], tools.as_ref(), true, &rest).unwrap();
        assert_eq!(prompt, case["rendered"].as_str().unwrap(), "{}", case["name"]);
        let ids = tokenizer.encode(&prompt, false).unwrap();
        assert_eq!(json!(ids), case["prompt_ids"], "{}", case["name"]);
        for (token, id) in [("[gMASK]", 1492), ("<sop>", 1494)] {
            assert_eq!(prompt.matches(token).count(), 1);
            assert_eq!(ids.iter().filter(|&&i| i == id).count(), 1);
        }
        assert!(prompt_opens_reasoning(&prompt));
        let greedy: Vec<u32> = case["greedy_ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
        let stop = case["stop_index"].as_u64().unwrap() as usize;
        assert_eq!(tokenizer.decode(&greedy[..=stop], false), case["greedy_text"].as_str().unwrap());
    }
}

#[test]
fn jinja2_whitespace_and_python_text() {
    assert_eq!(render("{% if true %}\n  a\n    {% endif %}\nb\n", json!({})).unwrap(), "  a\nb");
    assert_eq!(render("{{ x }} {{ y }} {{ z }} {{ w }}", json!({"x": true, "y": null, "z": 1.0})).unwrap(), "True None 1.0 ");
    assert_eq!(render("{{ '<b>' ~ messages[-1].content.upper().split('I')[0] }}", json!({})).unwrap(), "<b>H");
    assert_eq!(render("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", json!({})).unwrap(), "1");
    assert_eq!(render("{{ x | tojson }}", json!({"x": {"b": "é<", "a": 1}})).unwrap(), "{\"b\": \"é<\", \"a\": 1}");
    assert_eq!(render("{{ strftime_now('%%') }}{{ a.split(',')[1].strip() }}", json!({"a": "x, y"})).unwrap(), "%y");
}

#[test]
fn generation_tags_are_transparent() {
    let source = "{% for m in messages %}\n{%- generation -%}\n {{ m.content }}\n{% endgeneration %}\n!{% endfor %}";
    assert_eq!(render(source, json!({})).unwrap(), "hi\n!");
}

#[test]
fn errors_name_the_line() {
    let message = |r: Result<String, TemplateError>| r.unwrap_err().to_string();
    assert_eq!(message(render("a\n{% endif %}", json!({}))), "test: line 2: unknown statement endif");
    assert_eq!(message(render("a\nb\n{{ x.y.z }}", json!({}))), "the chat template failed at line 3: undefined value");
    assert_eq!(
        message(render("a\n{{ raise_exception('roles must alternate') }}", json!({}))),
        "the chat template refused the messages: roles must alternate"
    );
    let deep = "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}";
    assert!(matches!(render(deep, json!({})), Err(TemplateError::Render { .. })), "endless recursion ends");
}

#[test]
fn the_template_comes_from_the_file_then_from_the_config() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(dir.path().join(name), text).unwrap();
    let open = || ChatTemplate::open(dir.path()).map(|t| t.render(&json!([]), None, false, &Map::new()).unwrap());
    assert!(matches!(open(), Err(TemplateError::Absent)));
    write("tokenizer_config.json", r#"{"chat_template": [{"name": "x", "template": "no"}, {"name": "default", "template": "list"}]}"#);
    assert_eq!(open().unwrap(), "list");
    write(
        "tokenizer_config.json",
        r#"{"chat_template": "config {{ bos_token }}{{ eos_token }}", "bos_token": {"content": "<s>"}, "eos_token": "</s>"}"#,
    );
    assert_eq!(open().unwrap(), "config <s></s>");
    write("chat_template.jinja", "file");
    assert_eq!(open().unwrap(), "file");
    write("chat_template.jinja", "{% if %}");
    let error = open().unwrap_err().to_string();
    assert!(error.contains("chat_template.jinja: line 1"), "{error}");
}

#[test]
fn a_template_without_part_support_is_noticed() {
    let plain = ChatTemplate::new("{% for m in messages %}{{ m.content }}{% endfor %}", "t", BTreeMap::new()).unwrap();
    assert!(!plain.reads_parts());
}

#[test]
fn a_gguf_file_brings_its_template() {
    let messages = json!([{"role": "user", "content": "hi"}]);
    let render = |edits: &[(&str, &str)]| ChatTemplate::of(&gguf(edits)).map(|t| t.render(&messages, None, true, &Map::new()).unwrap());
    assert_eq!(render(&[]).unwrap(), "[gMASK]<sop><|user|>\nhi<|assistant|>\n");
    let named = [("[gMASK]<sop>{% for", "{{eos_token}}{%for")];
    assert_eq!(render(&named).unwrap(), "<|endoftext|><|user|>\nhi<|assistant|>\n");
    let without = render(&[("tokenizer.chat_template", "tokenizer.chat_template".replace("chat", "some").as_str())]);
    assert!(matches!(without, Err(TemplateError::Absent)));
    let error = render(&[("{% endfor %}", "{% endfoo %}")]).unwrap_err().to_string();
    assert!(error.contains("tinyk-MIX.gguf: tokenizer.chat_template: line 2"), "{error}");
}

/// The release's own template over conversations with several tools and rounds, against what Jinja2 makes of them.
#[test]
fn the_releases_template_renders_as_jinja2_does() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/template");
    let source = std::fs::read_to_string(dir.join("chat_template.jinja")).unwrap();
    let template = ChatTemplate::new(&source, "release", BTreeMap::new()).unwrap();
    assert!(template.reads_parts());
    let goldens: Json = serde_json::from_slice(&std::fs::read(dir.join("goldens.json")).unwrap()).unwrap();
    let cases = goldens.as_array().unwrap();
    assert!(cases.len() >= 18);
    for case in cases {
        let kwargs = case["kwargs"].as_object().cloned().unwrap();
        let tools = Some(&case["tools"]).filter(|tools| !tools.is_null());
        let opening = case["add_generation_prompt"] == true;
        let got = template.render(&case["messages"], tools, opening, &kwargs).unwrap();
        assert_eq!(got, case["rendered"].as_str().unwrap(), "{}", case["name"]);
    }
}
