//! Splits an answer into reasoning and content at `<think>` and `</think>`, however the tags are cut into pieces.
//!
//! The family's template ends the prompt in `<think>`, so an answer begins inside reasoning. Tags themselves are never shown on either
//! side; text that may be the beginning of a tag is held until it is or is not one.

const OPEN: &str = "<think>";
const CLOSE: &str = "</think>";

/// A piece of the answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// Thought, for `reasoning_content`.
    Reasoning(String),
    /// Answer, for `content`.
    Content(String),
}

/// The splitting state of one sequence.
#[derive(Clone, Debug)]
pub struct ReasoningSplitter {
    inside: bool,
    /// The beginning of a tag, or empty.
    held: String,
}

impl ReasoningSplitter {
    /// Starts a sequence; `inside` when the prompt already opened the reasoning (see [`prompt_opens_reasoning`]).
    pub fn new(inside: bool) -> Self {
        Self { inside, held: String::new() }
    }

    /// Whether the text pushed so far ends inside reasoning.
    pub fn is_inside(&self) -> bool {
        self.inside
    }

    /// Takes a piece of text; appends the parts that are certain. Neighbouring parts are of different kinds, none is empty.
    pub fn push(&mut self, text: &str, out: &mut Vec<Part>) {
        self.held.push_str(text);
        let held = std::mem::take(&mut self.held);
        let mut rest = held.as_str();
        while let Some(at) = rest.find('<') {
            self.emit(&rest[..at], out);
            rest = &rest[at..];
            if let Some(after) = rest.strip_prefix(OPEN) {
                self.inside = true;
                rest = after;
            } else if let Some(after) = rest.strip_prefix(CLOSE) {
                self.inside = false;
                rest = after;
            } else if OPEN.starts_with(rest) || CLOSE.starts_with(rest) {
                self.held.push_str(rest);
                return;
            } else {
                self.emit("<", out);
                rest = &rest[1..];
            }
        }
        self.emit(rest, out);
    }

    /// Ends the sequence: a held beginning is no tag and is shown.
    pub fn finish(&mut self, out: &mut Vec<Part>) {
        let held = std::mem::take(&mut self.held);
        self.emit(&held, out);
    }

    fn emit(&self, text: &str, out: &mut Vec<Part>) {
        if text.is_empty() {
            return;
        }
        match (out.last_mut(), self.inside) {
            (Some(Part::Reasoning(last)), true) | (Some(Part::Content(last)), false) => last.push_str(text),
            (_, true) => out.push(Part::Reasoning(text.to_owned())),
            (_, false) => out.push(Part::Content(text.to_owned())),
        }
    }
}

/// Whether a rendered prompt ends inside an open `<think>`, so that the answer starts with reasoning.
pub fn prompt_opens_reasoning(prompt: &str) -> bool {
    match (prompt.rfind(OPEN), prompt.rfind(CLOSE)) {
        (Some(open), Some(close)) => open > close && prompt[open + OPEN.len()..].trim().is_empty(),
        (Some(open), None) => prompt[open + OPEN.len()..].trim().is_empty(),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn run(inside: bool, pieces: &[String]) -> (String, String) {
        let mut splitter = ReasoningSplitter::new(inside);
        let mut parts = Vec::new();
        for piece in pieces {
            splitter.push(piece, &mut parts);
        }
        splitter.finish(&mut parts);
        let (mut reasoning, mut content) = (String::new(), String::new());
        for part in parts {
            match part {
                Part::Reasoning(text) => reasoning.push_str(&text),
                Part::Content(text) => content.push_str(&text),
            }
        }
        (reasoning, content)
    }

    fn pair(reasoning: &str, content: &str) -> (String, String) {
        (reasoning.into(), content.into())
    }

    #[test]
    fn splits_at_the_tags() {
        let whole = |inside, text: &str| run(inside, &[text.to_owned()]);
        assert_eq!(whole(true, "thought</think>answer"), pair("thought", "answer"));
        assert_eq!(whole(false, "<think>thought</think>\n\nanswer"), pair("thought", "\n\nanswer"));
        assert_eq!(whole(false, "answer, 1 < 2, <thin>"), pair("", "answer, 1 < 2, <thin>"));
        assert_eq!(whole(true, "cut off </thi"), pair("cut off </thi", ""));
        assert_eq!(whole(true, "</think>answer"), pair("", "answer"));
        assert_eq!(whole(true, "a<<think>b</</think>c"), pair("a<b</", "c"), "a stray opener is dropped, a lone < kept");
    }

    #[test]
    fn knows_whether_the_prompt_opened_it() {
        assert!(prompt_opens_reasoning("<|assistant|><think>"));
        assert!(prompt_opens_reasoning("<think>a</think>b<|assistant|><think>\n"));
        assert!(!prompt_opens_reasoning("<|assistant|><think></think>"));
        assert!(!prompt_opens_reasoning("what does <think> mean?<|assistant|>"));
        assert!(!prompt_opens_reasoning("hello"));
    }

    proptest! {
        #[test]
        fn every_cut_gives_the_same(
            text in "(<think>|</think>|<|</|think>|a|é|🙂| ){0,12}",
            cuts in proptest::collection::vec(0usize..80, 0..8),
            inside: bool,
        ) {
            let chars: Vec<char> = text.chars().collect();
            let mut cuts: Vec<usize> = cuts.into_iter().map(|c| c.min(chars.len())).collect();
            cuts.extend([0, chars.len()]);
            cuts.sort_unstable();
            let pieces: Vec<String> = cuts.windows(2).map(|w| chars[w[0]..w[1]].iter().collect()).collect();
            let whole = run(inside, std::slice::from_ref(&text));
            prop_assert_eq!(run(inside, &pieces), whole.clone());
            prop_assert!(!whole.0.contains(OPEN) || text.matches('<').count() > 1);
            prop_assert_eq!(run(inside, &text.chars().map(String::from).collect::<Vec<_>>()), whole);
        }
    }
}
