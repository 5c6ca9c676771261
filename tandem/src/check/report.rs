//! The long form of a verdict, as Markdown: bytes by type and part, experts by layer, what was skipped or narrowed.

use std::fmt::Write as _;

use super::verdict::{Contents, Counted, Values, Verdict};
use crate::bytes::gib;

/// The report of one checkpoint.
pub fn report(verdict: &Verdict) -> String {
    let mut out = format!("## {}\n\n**{}**", verdict.path, verdict.verdict);
    if verdict.is_refused() {
        out += &format!(": {}", verdict.short_reason());
    }
    out += "\n\n";
    if let Some(contents) = &verdict.checkpoint {
        describe(contents, &mut out);
    }
    if let Some(values) = &verdict.semantic {
        describe_values(values, &mut out);
    }
    out
}

fn describe(c: &Contents, out: &mut String) {
    let [all, kda, mla, moe] = c.layers;
    let stub = if c.stub { ", headers only" } else { "" };
    let _ = writeln!(out, "{}, {} tensors in {} files, {} GiB used{stub}", c.format, c.tensors, c.files, gib(c.bytes));
    let _ = writeln!(out, "{all} layers: {kda} KDA, {mla} MLA; {moe} with {} routed experts", c.experts);
    let tokens = c.tokenizer_tokens.map_or_else(|| "none".to_owned(), |n| format!("{n} ids"));
    let template = if c.chat_template { "yes" } else { "no" };
    let _ = writeln!(out, "tokenizer {tokens}; chat template {template}; end tokens {:?}\n", c.eos_token_ids);
    table(out, "part", c.parts.iter(), c.bytes);
    table(out, "type", c.types.iter(), c.bytes);
    let _ = writeln!(out, "| layers | gate | up | down | GiB a layer |\n|---|---|---|---|---:|");
    let mut rest = c.experts_by_layer.as_slice();
    while let Some(first) = rest.first() {
        let same =
            rest.iter().take_while(|l| (&l.gate, &l.up, &l.down, l.bytes) == (&first.gate, &first.up, &first.down, first.bytes)).count();
        let last = rest[same - 1].layer;
        let layers = if same == 1 { first.layer.to_string() } else { format!("{}-{last}", first.layer) };
        let _ = writeln!(out, "| {layers} | {} | {} | {} | {} |", first.gate, first.up, first.down, gib(first.bytes));
        rest = &rest[same..];
    }
    let _ = writeln!(out);
    for (kind, types) in &c.without_kernel {
        let types: Vec<&str> = types.keys().copied().collect();
        let text = if types.is_empty() { "kernels for every type".to_owned() } else { format!("no kernel for {}", types.join(", ")) };
        let _ = writeln!(out, "* {kind}: {text}");
    }
    for warning in &c.warnings {
        let _ = writeln!(out, "* {warning}");
    }
    let _ = writeln!(out);
}

fn table<'a>(out: &mut String, what: &str, rows: impl Iterator<Item = (&'a &'static str, &'a Counted)>, total: u64) {
    let mut rows: Vec<_> = rows.collect();
    rows.sort_by_key(|(_, counted)| std::cmp::Reverse(counted.bytes));
    let _ = writeln!(out, "| {what} | tensors | GiB | share |\n|---|---:|---:|---:|");
    for (name, counted) in rows {
        let share = 100.0 * counted.bytes as f64 / total.max(1) as f64;
        let _ = writeln!(out, "| {name} | {} | {} | {share:.1} % |", counted.tensors, gib(counted.bytes));
    }
    let _ = writeln!(out);
}

fn describe_values(v: &Values, out: &mut String) {
    let rms: Vec<String> = v.median_rms.iter().map(|(kind, rms)| format!("{kind} {rms:.4e}")).collect();
    let _ = writeln!(
        out,
        "values of {} experts: median RMS {}; at most {:.1} % zeros in a matrix",
        v.experts,
        rms.join(", "),
        100.0 * v.most_zeros
    );
    for (what, correlation) in &v.column_order {
        let _ = writeln!(out, "column norms of {what} against their companions: correlation {correlation:.2}");
    }
    for (kind, lines) in [("problem", &v.problems), ("note", &v.notes)] {
        for line in lines {
            let _ = writeln!(out, "* {kind}: {line}");
        }
    }
    let _ = writeln!(out);
}
