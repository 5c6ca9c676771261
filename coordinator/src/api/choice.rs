//! One sequence from tokens to what its client sees: text without stop strings, split into reasoning, content and calls, with counts.
//!
//! Pure: `run` feeds it the engine's events, the faces turn its deltas into answers. Streamed and collected answers both come from the
//! same deltas, which is why they agree.

use std::sync::Arc;

use crate::engine::{Finish, PromptPosition, TokenEvent};
use crate::text::{AnswerFormat, AnswerParser, Detokenizer, Part, StopMatcher, Tokenizer};

/// How a sequence's text is made.
#[derive(Clone, Debug)]
pub struct ChoiceOptions {
    /// Ids → bytes.
    pub tokenizer: Arc<Tokenizer>,
    /// Drop special tokens' text.
    pub skip_special: bool,
    /// Stop strings.
    pub stop: Vec<String>,
    /// Show what stopped the text.
    pub include_stop: bool,
    /// No stop string within the first tokens.
    pub min_tokens: u32,
    /// Ids whose stop is reported by id.
    pub stop_token_ids: Vec<u32>,
    /// How the text is read; `None`: all of it is content.
    pub format: Option<AnswerFormat>,
}

/// What stopped a sequence, beside the model's own end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StopReason {
    /// A stop string.
    Text(String),
    /// One of the request's stop ids.
    Id(u32),
}

/// The end of a sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct End {
    /// `stop`, `length` or `tool_calls`.
    pub finish_reason: &'static str,
    /// What stopped it.
    pub stop_reason: Option<StopReason>,
}

/// A token that counts, and where its text begins.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenOut {
    /// The engine's event.
    pub event: TokenEvent,
    /// Characters of the sequence's whole text before it.
    pub offset: usize,
}

/// What some events add to the answer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Delta {
    /// Text that can be shown now.
    pub parts: Vec<Part>,
    /// Tokens that arrived; their text may come with a later delta.
    pub tokens: Vec<TokenOut>,
    /// Set on the last delta.
    pub end: Option<End>,
}

/// One sequence.
#[derive(Debug)]
pub struct Choice {
    options: ChoiceOptions,
    detokenizer: Detokenizer,
    stop: StopMatcher,
    parser: Option<AnswerParser>,
    /// A call has begun.
    called: bool,
    /// Characters decoded so far.
    chars: usize,
    /// Tokens that count, the one that completed a stop string included.
    pub completion_tokens: u32,
    /// Of these, tokens of reasoning.
    pub reasoning_tokens: u32,
    /// Tokens of the prompt that came from the prefix cache.
    pub cached_tokens: u32,
    /// Logprobs of the prompt, if asked for.
    pub prompt_positions: Vec<PromptPosition>,
    ended: bool,
}

impl Choice {
    /// A sequence without tokens.
    pub fn new(options: ChoiceOptions) -> Self {
        Self {
            detokenizer: Detokenizer::new(Arc::clone(&options.tokenizer), options.skip_special),
            stop: StopMatcher::new(options.stop.clone(), options.include_stop),
            parser: options.format.clone().map(AnswerParser::new),
            called: false,
            chars: 0,
            completion_tokens: 0,
            reasoning_tokens: 0,
            cached_tokens: 0,
            prompt_positions: Vec::new(),
            ended: false,
            options,
        }
    }

    /// Whether the last delta was given.
    pub fn is_ended(&self) -> bool {
        self.ended
    }

    /// Takes tokens. Those behind a stop string are dropped and not counted.
    pub fn tokens(&mut self, events: Vec<TokenEvent>) -> Delta {
        let mut delta = Delta::default();
        for event in events {
            if self.ended {
                break;
            }
            let offset = self.chars;
            let mut text = String::new();
            self.detokenizer.push(event.id, &mut text);
            self.chars += text.chars().count();
            self.completion_tokens += 1;
            delta.tokens.push(TokenOut { event, offset });

            let was_inside = self.is_reasoning();
            let mut shown = String::new();
            let hit = if self.completion_tokens <= self.options.min_tokens {
                self.stop.pass(&text, &mut shown);
                None
            } else {
                self.stop.push(&text, &mut shown)
            };
            self.show(&shown, &mut delta.parts);
            self.reasoning_tokens += u32::from(was_inside || self.is_reasoning());
            if let Some(hit) = hit {
                self.end(Some(hit.index), None, &mut delta);
            } else if self.parser.as_ref().is_some_and(AnswerParser::is_done) {
                self.end(None, None, &mut delta);
            }
        }
        self.called |= delta.parts.iter().any(|part| matches!(part, Part::Call(_)));
        delta
    }

    /// Takes the engine's end.
    pub fn finish(&mut self, finish: Finish) -> Delta {
        let mut delta = Delta::default();
        if self.ended {
            return delta;
        }
        let (mut text, mut shown) = (String::new(), String::new());
        let mut id = None;
        if let Finish::Stop { id: stop } = finish {
            id = Some(stop);
            if self.options.include_stop {
                self.detokenizer.push(stop, &mut text);
            }
        }
        self.detokenizer.finish(&mut text);
        let hit = if self.completion_tokens < self.options.min_tokens {
            self.stop.pass(&text, &mut shown);
            None
        } else {
            self.stop.push(&text, &mut shown).or_else(|| self.stop.finish(&mut shown))
        };
        self.show(&shown, &mut delta.parts);
        self.end(hit.map(|hit| hit.index), id, &mut delta);
        delta
    }

    fn is_reasoning(&self) -> bool {
        self.parser.as_ref().is_some_and(AnswerParser::is_reasoning)
    }

    fn show(&mut self, text: &str, parts: &mut Vec<Part>) {
        match &mut self.parser {
            Some(parser) => parser.push(text, parts),
            None if text.is_empty() => {}
            None => match parts.last_mut() {
                Some(Part::Content(last)) => last.push_str(text),
                _ => parts.push(Part::Content(text.to_owned())),
            },
        }
    }

    /// Ends by stop string `hit`, else by stop id, else with the call that was wanted, else by length.
    fn end(&mut self, hit: Option<usize>, id: Option<u32>, delta: &mut Delta) {
        let mut done = false;
        if let Some(parser) = &mut self.parser {
            done = parser.is_done();
            parser.finish(hit.is_none() && id.is_some(), &mut delta.parts);
        }
        self.called |= delta.parts.iter().any(|part| matches!(part, Part::Call(_)));
        let stop_reason = match (hit, id) {
            (Some(index), _) => Some(StopReason::Text(self.options.stop[index].clone())),
            (None, Some(id)) if self.options.stop_token_ids.contains(&id) => Some(StopReason::Id(id)),
            _ => None,
        };
        let finish_reason = match (hit, id.is_some() || done) {
            (Some(_), _) => "stop",
            (None, true) if self.called => "tool_calls",
            (None, true) => "stop",
            (None, false) => "length",
        };
        delta.end = Some(End { finish_reason, stop_reason });
        self.ended = true;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::text::fixtures::{byte_token, demo_tokenizer};

    fn choice(stop: &[&str], edit: impl FnOnce(&mut ChoiceOptions)) -> Choice {
        let mut options = ChoiceOptions {
            tokenizer: demo_tokenizer(),
            skip_special: true,
            stop: stop.iter().map(|s| (*s).to_owned()).collect(),
            include_stop: false,
            min_tokens: 0,
            stop_token_ids: Vec::new(),
            format: None,
        };
        edit(&mut options);
        Choice::new(options)
    }

    fn events(ids: &[u32], first: usize) -> Vec<TokenEvent> {
        let event = |(i, &id): (usize, &u32)| TokenEvent { id, index: (first + i) as u32, logprob: None, top: Vec::new() };
        ids.iter().enumerate().map(event).collect()
    }

    /// Feeds `ids` in steps of the given sizes, then `finish`.
    fn run(choice: &mut Choice, ids: &[u32], sizes: &[usize], finish: Finish) -> (String, String, Option<End>) {
        let (mut reasoning, mut content, mut end) = (String::new(), String::new(), None);
        let mut take = |delta: Delta| {
            for part in delta.parts {
                match part {
                    Part::Reasoning(text) => reasoning.push_str(&text),
                    Part::Content(text) => content.push_str(&text),
                    Part::Call(name) => content.push_str(&format!("[{name}]")),
                    Part::Arguments(text) => content.push_str(&text),
                }
            }
            if delta.end.is_some() {
                assert!(end.is_none(), "exactly one end");
                end = delta.end;
            }
        };
        let mut at = 0;
        for size in sizes.iter().copied().chain(std::iter::repeat(1)) {
            if at >= ids.len() {
                break;
            }
            let next = (at + size.max(1)).min(ids.len());
            take(choice.tokens(events(&ids[at..next], at)));
            at = next;
        }
        take(choice.finish(finish));
        (reasoning, content, end)
    }

    fn reasoning(inside: bool) -> Option<AnswerFormat> {
        Some(AnswerFormat { reasoning: inside, ..AnswerFormat::default() })
    }

    fn bytes(text: &str) -> Vec<u32> {
        text.bytes().map(byte_token).collect()
    }

    #[test]
    fn a_stop_string_ends_the_count() {
        let mut c = choice(&["own fox"], |_| {});
        let ids = bytes("quick brown fox jumps");
        let (_, content, end) = run(&mut c, &ids, &[9, 9], Finish::Length);
        assert_eq!(content, "quick br");
        assert_eq!(end, Some(End { finish_reason: "stop", stop_reason: Some(StopReason::Text("own fox".into())) }));
        assert_eq!(c.completion_tokens, 15, "the token that completed it is the last that counts");
        let mut c = choice(&["own fox"], |o| o.include_stop = true);
        assert_eq!(run(&mut c, &ids, &[], Finish::Length).1, "quick brown fox");
        let mut c = choice(&["u", "x"], |o| o.min_tokens = 5);
        assert_eq!(run(&mut c, &ids, &[], Finish::Length).1, "quick brown fo");
    }

    #[test]
    fn ends_name_what_stopped() {
        let mut c = choice(&[], |o| o.stop_token_ids = vec![7]);
        assert_eq!(run(&mut c, &bytes("a"), &[], Finish::Stop { id: 7 }).2.unwrap().stop_reason, Some(StopReason::Id(7)));
        let mut c = choice(&[], |_| {});
        let end = run(&mut c, &bytes("a"), &[], Finish::Stop { id: 1497 }).2.unwrap();
        assert_eq!(end, End { finish_reason: "stop", stop_reason: None });
        let mut c = choice(&[], |_| {});
        assert_eq!(run(&mut c, &bytes("a"), &[], Finish::Length).2.unwrap().finish_reason, "length");
        let mut c = choice(&[], |o| (o.include_stop, o.skip_special) = (true, false));
        assert_eq!(run(&mut c, &bytes("a"), &[], Finish::Stop { id: 1497 }).1, "a<|user|>");
    }

    #[test]
    fn reasoning_tokens_are_counted_up_to_the_tag() {
        let ids = [&bytes("ab")[..], &[1512], &bytes("cd")[..]].concat();
        let mut c = choice(&[], |o| o.format = reasoning(true));
        let (reasoning, content, _) = run(&mut c, &ids, &[], Finish::Length);
        assert_eq!((reasoning.as_str(), content.as_str()), ("ab", "cd"));
        assert_eq!((c.reasoning_tokens, c.completion_tokens), (3, 5));
    }

    #[test]
    fn calls_are_an_end_of_their_own() {
        let tools = Arc::new(crate::text::ToolSet::of_request(&[serde_json::json!({"name": "f"})]));
        let format = |single_call| Some(AnswerFormat { tools: Arc::clone(&tools), single_call, ..AnswerFormat::default() });
        let ids = bytes("<tool_call>f</tool_call><tool_call>f</tool_call>");
        let mut c = choice(&[], |o| o.format = format(false));
        let (_, content, end) = run(&mut c, &ids, &[7], Finish::Stop { id: 1499 });
        assert_eq!((content.as_str(), end.unwrap().finish_reason), ("[f]{}[f]{}", "tool_calls"));
        let mut c = choice(&[], |o| o.format = format(true));
        let (_, content, end) = run(&mut c, &ids, &[7], Finish::Stop { id: 1499 });
        assert_eq!((content.as_str(), end.unwrap().finish_reason, c.completion_tokens), ("[f]{}", "tool_calls", 24));
        let mut c = choice(&[], |o| o.format = format(false));
        assert_eq!(run(&mut c, &ids[..26], &[], Finish::Length).2.unwrap().finish_reason, "length");
        let mut c = choice(&["</tool_call>"], |o| o.format = format(false));
        assert_eq!(run(&mut c, &ids, &[], Finish::Length).2.unwrap().finish_reason, "stop");
    }

    #[test]
    fn offsets_count_characters() {
        let mut c = choice(&[], |_| {});
        let delta = c.tokens(events(&bytes("é🙂b"), 0));
        assert_eq!(delta.tokens.iter().map(|t| t.offset).collect::<Vec<_>>(), [0, 0, 1, 1, 1, 1, 2]);
    }

    proptest! {
        /// However tokens are grouped into steps, the answer is the same; and it is the text cut at the first stop.
        #[test]
        fn step_sizes_do_not_matter(
            text in "(<think>|</think>|ab|b|🙂|é){0,12}",
            sizes in proptest::collection::vec(1usize..6, 0..20),
            inside in proptest::option::of(any::<bool>()),
            cut in proptest::option::of(0usize..3),
        ) {
            let mut ids = bytes(&text);
            if let Some(cut) = cut {
                ids.truncate(ids.len().saturating_sub(cut));
            }
            let stops = ["bab", "🙂é"];
            let whole = run(&mut choice(&stops, |o| o.format = inside.and_then(reasoning)), &ids, &[ids.len()], Finish::Length);
            let streamed = run(&mut choice(&stops, |o| o.format = inside.and_then(reasoning)), &ids, &sizes, Finish::Length);
            prop_assert_eq!(&whole, &streamed);
            if inside.is_none() {
                let decoded = demo_tokenizer().decode(&ids, true);
                let cut = stops.iter().filter_map(|s| decoded.find(s)).min().unwrap_or(decoded.len());
                prop_assert_eq!(&whole.1, &decoded[..cut]);
            }
        }
    }
}
