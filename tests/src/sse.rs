//! Server-sent events as clients expect them from a chat or completion stream.

use serde_json::Value;

/// All events of one finished stream.
#[derive(Clone, Debug)]
pub struct Stream {
    /// The JSON chunks, in order, without `[DONE]`.
    pub chunks: Vec<Value>,
    /// Whether `[DONE]` ended it.
    pub done: bool,
}

impl Stream {
    /// Parses and checks the framing: only `data:` lines and comments, each event ended by a blank line, nothing after `[DONE]`.
    pub fn parse(bytes: &[u8]) -> Self {
        let text = std::str::from_utf8(bytes).expect("a stream is UTF-8");
        assert!(text.is_empty() || text.ends_with("\n\n"), "the last event is cut: {text:?}");
        let mut stream = Self { chunks: Vec::new(), done: false };
        for event in text.split("\n\n").filter(|event| !event.is_empty()) {
            if event.starts_with(':') {
                continue;
            }
            let data = event.strip_prefix("data: ").unwrap_or_else(|| panic!("no data line: {event:?}"));
            assert!(!data.contains('\n'), "one data line per event: {event:?}");
            assert!(!stream.done, "after [DONE]: {event:?}");
            if data == "[DONE]" {
                stream.done = true;
            } else {
                stream.chunks.push(serde_json::from_str(data).unwrap_or_else(|why| panic!("{why} in {data:?}")));
            }
        }
        stream
    }

    /// The error event, if there was one.
    pub fn error(&self) -> Option<&Value> {
        self.chunks.iter().find_map(|chunk| chunk.get("error"))
    }

    /// Joined text of one choice: `text` of completions, `delta.content` of chats.
    pub fn text(&self, choice: u64) -> String {
        self.joined(choice, |c| c.get("text").or_else(|| c.get("delta")?.get("content"))?.as_str())
    }

    /// Joined `delta.reasoning_content` of one choice.
    pub fn reasoning(&self, choice: u64) -> String {
        self.joined(choice, |c| c.get("delta")?.get("reasoning_content")?.as_str())
    }

    /// Joined `token_ids` of one choice (`return_token_ids`).
    pub fn token_ids(&self, choice: u64) -> Vec<u64> {
        let ids = |c: &Value| Some(c.get("token_ids")?.as_array()?.iter().filter_map(Value::as_u64).collect::<Vec<_>>());
        self.choices(choice).filter_map(ids).flatten().collect()
    }

    /// The finish reasons of one choice: exactly one in a correct stream.
    pub fn finish_reasons(&self, choice: u64) -> Vec<&str> {
        self.choices(choice).filter_map(|c| c.get("finish_reason")?.as_str()).collect()
    }

    fn choices(&self, index: u64) -> impl Iterator<Item = &Value> {
        let all = self.chunks.iter().filter_map(|chunk| chunk.get("choices")?.as_array()).flatten();
        all.filter(move |choice| choice.get("index").and_then(Value::as_u64) == Some(index))
    }

    fn joined<'a>(&'a self, choice: u64, part: impl Fn(&'a Value) -> Option<&'a str>) -> String {
        self.choices(choice).filter_map(part).collect()
    }
}
