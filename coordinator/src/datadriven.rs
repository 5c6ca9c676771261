//! Runs stories kept as text files: command lines, `----`, the expected output, an empty line. `TANDEM_REWRITE=1 cargo test` writes what
//! came out into the files, for a change made on purpose; the diff is then what a reviewer reads.

use std::fmt::Write as _;
use std::path::Path;

/// Runs each `*.txt` in `folder` (relative to the crate) with a fresh interpreter from `start`, which maps one command line to its output.
pub(crate) fn run<I: FnMut(&str) -> String>(folder: &str, mut start: impl FnMut() -> I) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
    let mut files: Vec<_> = std::fs::read_dir(&folder)
        .expect("story folder")
        .map(|entry| entry.expect("story entry").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "txt"))
        .collect();
    files.sort();
    assert!(!files.is_empty(), "no stories in {}", folder.display());
    for path in files {
        let text = std::fs::read_to_string(&path).expect("story text");
        let mut interpreter = start();
        let mut actual = String::new();
        for block in text.split("\n\n").map(|block| block.trim_matches('\n')).filter(|block| !block.is_empty()) {
            let commands = block.split("\n----").next().unwrap_or_default();
            let mut output = String::new();
            for line in commands.lines() {
                writeln!(actual, "{line}").expect("string");
                if !line.starts_with('#') {
                    output.push_str(&interpreter(line));
                }
            }
            if block.contains("\n----") {
                writeln!(actual, "----\n{}", if output.is_empty() { "ok\n" } else { output.as_str() }).expect("string");
            } else {
                actual.push('\n');
            }
        }
        let actual = format!("{}\n", actual.trim_end());
        if std::env::var_os("TANDEM_REWRITE").is_some() {
            std::fs::write(&path, &actual).expect("rewrite story");
        } else {
            assert_eq!(actual, text, "{} (TANDEM_REWRITE=1 rewrites it)", path.display());
        }
    }
}

/// The value of `key=value` among the words of a command line.
pub(crate) fn value<'a>(line: &'a str, key: &str) -> Option<&'a str> {
    line.split_whitespace().find_map(|word| word.strip_prefix(key)?.strip_prefix('='))
}

/// The number of `key=number`, or `default`.
pub(crate) fn number(line: &str, key: &str, default: u64) -> u64 {
    value(line, key).map_or(default, |text| text.parse().expect("a number in a story"))
}
