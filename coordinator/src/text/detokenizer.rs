//! Token ids → text, one token at a time, never half a code point.
//!
//! The deltas of one sequence, with the last one from [`Detokenizer::finish`], join to exactly [`Tokenizer::decode`] of all its
//! ids: bytes that may still become a code point are held, bytes that cannot any more become U+FFFD at once.

use std::sync::Arc;

use super::Tokenizer;

/// The decoding state of one sequence.
#[derive(Clone, Debug)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    skip_special: bool,
    /// The beginning of a code point (at most 3 bytes) whose rest has not come yet.
    tail: Vec<u8>,
}

impl Detokenizer {
    /// Starts a sequence. `skip_special` drops special tokens' text (not that of `<think>` and `<tool_call>`, see
    /// [`Tokenizer::is_special`]).
    pub fn new(tokenizer: Arc<Tokenizer>, skip_special: bool) -> Self {
        Self { tokenizer, skip_special, tail: Vec::new() }
    }

    /// Appends the text that `id` completes to `out`.
    pub fn push(&mut self, id: u32, out: &mut String) {
        if self.skip_special && self.tokenizer.is_special(id) {
            return;
        }
        let tokenizer = Arc::clone(&self.tokenizer);
        self.push_bytes(tokenizer.bytes(id), out);
    }

    fn push_bytes(&mut self, bytes: &[u8], out: &mut String) {
        self.tail.extend_from_slice(bytes);
        let mut rest = self.tail.as_slice();
        loop {
            match std::str::from_utf8(rest) {
                Ok(text) => {
                    out.push_str(text);
                    rest = &[];
                    break;
                }
                Err(error) => {
                    let (valid, after) = rest.split_at(error.valid_up_to());
                    // Valid by the error's own word, so nothing is replaced here.
                    out.push_str(&String::from_utf8_lossy(valid));
                    rest = after;
                    let Some(bad) = error.error_len() else { break };
                    out.push(char::REPLACEMENT_CHARACTER);
                    rest = &rest[bad..];
                }
            }
        }
        let held = rest.len();
        self.tail.drain(..self.tail.len() - held);
    }

    /// Whether bytes of an unfinished code point are held.
    pub fn is_holding(&self) -> bool {
        !self.tail.is_empty()
    }

    /// Ends the sequence: a held beginning can never be completed and becomes one U+FFFD.
    pub fn finish(&mut self, out: &mut String) {
        if !self.tail.is_empty() {
            out.push_str(&String::from_utf8_lossy(&self.tail));
            self.tail.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::text::fixtures::{byte_token, demo_tokenizer};

    fn stream(ids: &[u32], skip: bool) -> (Vec<String>, String) {
        let mut detokenizer = Detokenizer::new(demo_tokenizer(), skip);
        let mut deltas = Vec::new();
        for &id in ids {
            let mut delta = String::new();
            detokenizer.push(id, &mut delta);
            deltas.push(delta);
        }
        let mut last = String::new();
        detokenizer.finish(&mut last);
        deltas.push(last);
        let joined = deltas.concat();
        (deltas, joined)
    }

    /// T-14: every code point of four bytes, over four tokens and in every cut over fewer: nothing leaks before the last byte.
    #[test]
    fn t14_four_byte_code_points_never_leak_in_halves() {
        let tokenizer = demo_tokenizer();
        let mut detokenizer = Detokenizer::new(Arc::clone(&tokenizer), true);
        for c in '\u{10000}'..=char::MAX {
            let mut buffer = [0; 4];
            let bytes = c.encode_utf8(&mut buffer).as_bytes();
            // The 8 ways to cut 4 bytes into 1..=4 pieces: bit i set = a cut after byte i.
            for cuts in 0..8u32 {
                let mut out = String::new();
                let mut start = 0;
                for end in 1..=4 {
                    if end == 4 || cuts & (1 << (end - 1)) != 0 {
                        detokenizer.push_bytes(&bytes[start..end], &mut out);
                        start = end;
                        assert_eq!(out.is_empty(), end < 4, "{c:?} cut {cuts:03b}");
                    }
                }
                assert!(out.chars().eq([c]), "{c:?} cut {cuts:03b}");
                assert!(!detokenizer.is_holding());
            }
        }
        let ids: Vec<u32> = "🙂".bytes().map(byte_token).collect();
        let (deltas, joined) = stream(&ids, true);
        assert_eq!((deltas[..3].concat().as_str(), joined.as_str()), ("", "🙂"));
    }

    #[test]
    fn t14_a_truncated_tail_is_flushed_once() {
        let ids: Vec<u32> = "a🙂".bytes().take(4).map(byte_token).collect();
        let (deltas, joined) = stream(&ids, true);
        assert_eq!(deltas, ["a", "", "", "", "\u{FFFD}"]);
        assert_eq!(joined, demo_tokenizer().decode(&ids, true));
    }

    #[test]
    fn bytes_that_cannot_be_text_are_replaced_at_once() {
        let ids: Vec<u32> = [0xF0, 0x9F, b'a', 0xFF, 0xC3].into_iter().map(byte_token).collect();
        let (deltas, _) = stream(&ids, true);
        assert_eq!(deltas, ["", "", "\u{FFFD}a", "\u{FFFD}", "", "\u{FFFD}"]);
    }

    proptest! {
        #[test]
        fn deltas_join_to_the_whole(ids in proptest::collection::vec(0u32..1540, 0..80), skip: bool) {
            let (_, joined) = stream(&ids, skip);
            prop_assert_eq!(joined, demo_tokenizer().decode(&ids, skip));
        }

        #[test]
        fn any_text_over_byte_tokens_is_exact(text in "\\PC{0,40}") {
            let ids: Vec<u32> = text.bytes().map(byte_token).collect();
            prop_assert_eq!(stream(&ids, true).1, text);
        }

        #[test]
        fn random_bytes_join_to_the_lossy_whole(bytes in proptest::collection::vec(any::<u8>(), 0..40)) {
            let ids: Vec<u32> = bytes.iter().copied().map(byte_token).collect();
            prop_assert_eq!(stream(&ids, true).1, String::from_utf8_lossy(&bytes).into_owned());
        }
    }
}
