//! Text → token ids with the checkpoint's `tokenizer.json` (or a GGUF file's tokenizer keys), and each id's exact bytes for the way back.
//!
//! Encoding is the `tokenizers` crate's. Decoding is our own table of bytes per id: a token may end inside a code point, and only bytes
//! can be joined without loss (`detokenizer` turns them into text). The table follows the ByteLevel decoder, which every
//! checkpoint of this family uses; another decoder is refused by name at load.

use std::path::{Path, PathBuf};

use tandem_grammar::TokenTable;
use tandem_model::{Checkpoint, ModelError, files, gguf};
use tokenizers::DecoderWrapper;

/// Words, white space, digits, and letters of two to four bytes: what must survive a tokenizer.
const PROBE: &str = "Hello in the\n\tw\u{f6}rld 1234, \u{4f60}\u{597d} \u{1f642}";

/// Why a tokenizer could not be loaded or a text not be encoded.
#[derive(Debug, thiserror::Error)]
pub enum TokenizerError {
    /// The file is missing or unreadable.
    #[error("{path}: {source}: a checkpoint needs tokenizer.json beside its config.json")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The file is no tokenizer.
    #[error("{path}: not a tokenizer: {message}")]
    Parse {
        /// The file.
        path: PathBuf,
        /// What the parser said.
        message: String,
    },
    /// The tokenizer keys of a GGUF file.
    #[error(transparent)]
    Gguf(#[from] ModelError),
    /// A decoder whose bytes per token we do not know.
    #[error("{path}: decoder is {got}, needed ByteLevel (byte-level BPE, as all glm5_next checkpoints have)")]
    Decoder {
        /// The file.
        path: PathBuf,
        /// The decoder found.
        got: String,
    },
    /// Text does not survive: the vocabulary lacks tokens of single bytes, or what cuts texts is not of this family.
    #[error(
        "{path}: {text:?} comes back from its tokens as {got:?}; needed every byte kept: a pre_tokenizer with ByteLevel, and a token for each byte"
    )]
    Lossy {
        /// The file.
        path: PathBuf,
        /// The text that was tried.
        text: &'static str,
        /// What its tokens say.
        got: String,
    },
    /// The text defeated the pre-tokenizer (a pathological run of characters).
    #[error("the text cannot be tokenized: {0}")]
    Encode(String),
}

/// A loaded tokenizer. Immutable; share it in an `Arc`.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    /// All tokens' bytes, end to end; `ends[id]` is where token `id` ends.
    blob: Vec<u8>,
    ends: Vec<u32>,
    /// `special[id]`: dropped by `skip_special_tokens`.
    special: Vec<bool>,
    /// The most that one token holds, of all bytes and of letters; `None` where a normalizer may shorten a text first.
    most: Option<(usize, usize)>,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer").field("tokens", &self.len()).finish()
    }
}

impl Tokenizer {
    /// The tokenizer of a checkpoint: from its GGUF file, or from `tokenizer.json` in its folder.
    pub fn of(checkpoint: &Checkpoint) -> Result<Self, TokenizerError> {
        let Some(header) = checkpoint.gguf() else { return Self::open(checkpoint.dir()) };
        let path = checkpoint.config_file();
        let json = gguf::tokenizer::tokenizer_json(path, header)?;
        Self::from_bytes(json.to_string().as_bytes(), path)
    }

    /// Loads `tokenizer.json` of a checkpoint directory.
    pub fn open(dir: &Path) -> Result<Self, TokenizerError> {
        let path = dir.join("tokenizer.json");
        let bytes = files::read(&path).map_err(|source| TokenizerError::Read { path: path.clone(), source })?;
        Self::from_bytes(&bytes, &path)
    }

    /// Parses the content of a `tokenizer.json`; `path` is for messages.
    pub fn from_bytes(bytes: &[u8], path: &Path) -> Result<Self, TokenizerError> {
        let parse = |e: Box<dyn std::error::Error + Send + Sync>| TokenizerError::Parse { path: path.into(), message: e.to_string() };
        let mut inner = tokenizers::Tokenizer::from_bytes(bytes).map_err(parse)?;
        // A file saved in training may cut or pad every text; a server must do neither.
        inner.with_truncation(None).map_err(parse)?;
        inner.with_padding(None);
        match inner.get_decoder() {
            Some(DecoderWrapper::ByteLevel(_)) => {}
            other => {
                let got = other.map_or("absent".to_owned(), |d| format!("{d:?}").chars().take(60).collect());
                return Err(TokenizerError::Decoder { path: path.into(), got });
            }
        }
        let size = inner.get_vocab(true).values().max().map_or(0, |&id| id + 1);
        let byte_of = ByteAlphabet::new();
        let added = inner.get_added_tokens_decoder();
        let (mut blob, mut ends, mut special) = (Vec::new(), Vec::with_capacity(size as usize), Vec::with_capacity(size as usize));
        for id in 0..size {
            if let Some(token) = inner.id_to_token(id) {
                byte_of.append(&token, &mut blob);
            }
            ends.push(u32::try_from(blob.len()).unwrap_or(u32::MAX));
            special.push(added.get(&id).is_some_and(|token| token.special));
        }
        let mut tokenizer = Self { inner, blob, ends, special, most: None };
        if tokenizer.inner.get_normalizer().is_none() {
            let bytes: Vec<u8> = tokenizer.encode(PROBE, false)?.into_iter().flat_map(|id| tokenizer.bytes(id).to_vec()).collect();
            if bytes != PROBE.as_bytes() {
                return Err(TokenizerError::Lossy { path: path.into(), text: PROBE, got: String::from_utf8_lossy(&bytes).into_owned() });
            }
            let most = |count: fn(&[u8]) -> usize| (0..size).map(|id| count(tokenizer.bytes(id))).max().unwrap_or(0).max(1);
            tokenizer.most = Some((most(<[u8]>::len), most(letters)));
        }
        Ok(tokenizer)
    }

    /// Number of ids the tokenizer knows (the model's vocabulary may be padded beyond it).
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether the tokenizer knows no id at all.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Token ids of `text`. Added tokens written out in the text (`<|user|>`) become their ids. `add_special` asks for the
    /// tokenizer's own beginning and end tokens, if its file defines any; the family's files define none.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, TokenizerError> {
        let encoding = self.inner.encode_fast(text, add_special).map_err(|e| TokenizerError::Encode(e.to_string()))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// How many tokens `text` has at least, by its bytes alone: a text that is far too long needs no tokenizing to be refused.
    pub fn least_tokens(&self, text: &str) -> u64 {
        let (bytes, of_letters) = self.most.unwrap_or((usize::MAX, usize::MAX));
        // Vocabularies have long tokens of white space and dashes; of letters none is as long.
        text.len().div_ceil(bytes).max(letters(text.as_bytes()).div_ceil(of_letters)) as u64
    }

    /// The bytes `id` stands for; empty for an id that has no token (padding of the vocabulary).
    pub fn bytes(&self, id: u32) -> &[u8] {
        let id = id as usize;
        let Some(&end) = self.ends.get(id) else { return &[] };
        let start = if id == 0 { 0 } else { self.ends[id - 1] };
        &self.blob[start as usize..end as usize]
    }

    /// Whether `skip_special_tokens` drops `id`. Markers that carry meaning in the answer (`<think>`, `<tool_call>`, …) are
    /// added tokens but not special ones, so they survive.
    pub fn is_special(&self, id: u32) -> bool {
        self.special.get(id as usize).copied().unwrap_or(false)
    }

    /// The text of one token by itself; bytes that are no whole code point show as U+FFFD.
    pub fn token_text(&self, id: u32) -> String {
        String::from_utf8_lossy(self.bytes(id)).into_owned()
    }

    /// The id of an added or ordinary token by its exact content.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The text of `ids`; bytes that form no code point become U+FFFD.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let mut bytes = Vec::new();
        for &id in ids {
            if !(skip_special && self.is_special(id)) {
                bytes.extend_from_slice(self.bytes(id));
            }
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Every token's bytes, for a model of `vocab` ids (more than the tokenizer knows, where it is padded) whose answers end in `stops`.
    pub fn table(&self, vocab: u32, stops: &[u32]) -> TokenTable {
        let end = self.ends.last().copied().unwrap_or(0);
        let mut ends = self.ends.clone();
        ends.resize(vocab as usize, end);
        let special = (0..vocab).filter(|&id| self.is_special(id)).collect();
        let stops = stops.iter().copied().filter(|&id| id < vocab).collect();
        TokenTable { bytes: self.blob.clone(), ends, special, stops }
    }

    #[cfg(test)]
    pub(crate) fn inner(&self) -> &tokenizers::Tokenizer {
        &self.inner
    }
}

/// Bytes that are letters, digits, or parts of characters beyond ASCII.
fn letters(bytes: &[u8]) -> usize {
    bytes.iter().filter(|b| b.is_ascii_alphanumeric() || !b.is_ascii()).count()
}

/// GPT-2's printable alphabet: 256 characters that stand for the 256 byte values in a vocabulary file.
struct ByteAlphabet {
    /// Indexed by code point; all characters of the alphabet lie below 0x144.
    byte: [Option<u8>; 0x144],
}

impl ByteAlphabet {
    fn new() -> Self {
        let mut byte = [None; 0x144];
        let mut stand_in = 0x100;
        for b in 0..=255u8 {
            let printable = matches!(b, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
            let at = if printable { usize::from(b) } else { stand_in };
            byte[at] = Some(b);
            stand_in += usize::from(!printable);
        }
        Self { byte }
    }

    /// Appends the bytes of `token`. A token with any character outside the alphabet stands for itself (added tokens such as
    /// `a b`), as the ByteLevel decoder has it.
    fn append(&self, token: &str, out: &mut Vec<u8>) {
        let start = out.len();
        for c in token.chars() {
            match self.byte.get(c as usize).copied().flatten() {
                Some(b) => out.push(b),
                None => {
                    out.truncate(start);
                    out.extend_from_slice(token.as_bytes());
                    return;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::text::fixtures::{demo_tokenizer, gguf};

    #[test]
    fn encodes_added_tokens_and_no_special_ones() {
        let t = demo_tokenizer();
        assert_eq!(t.encode("[gMASK]<sop><|user|>", false).unwrap(), [1492, 1494, 1497]);
        assert_eq!(t.encode("", false).unwrap(), [0u32; 0]);
        assert_eq!(t.token_id("</think>"), Some(1512));
        assert!(t.is_special(1497) && !t.is_special(1511) && !t.is_special(1513) && !t.is_special(9999));
        assert_eq!(t.bytes(1530), b"", "padding of the vocabulary has no text");
        assert_eq!(t.decode(&[1497, 1511, 1530], true), "<think>");
    }

    #[test]
    fn a_gguf_file_brings_its_tokenizer() {
        let t = Tokenizer::of(&gguf(&[])).unwrap();
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/tiny");
        let same = Tokenizer::open(&path).unwrap();
        assert_eq!(t.len(), same.len());
        for id in 0..t.len() as u32 {
            assert_eq!((t.bytes(id), t.is_special(id)), (same.bytes(id), same.is_special(id)), "{id}");
        }
        for text in ["Hello world", "  two  spaces\n\n", "12345 <|user|>x<think>", "don't I'LL", "日本 ü 🙂"] {
            assert_eq!(t.encode(text, false).unwrap(), same.encode(text, false).unwrap(), "{text:?}");
        }
        let error = Tokenizer::of(&gguf(&[("tokenizer.ggml.pre", "tokenizer.ggml.prf")])).unwrap_err().to_string();
        assert!(error.contains("tinyk-MIX.gguf: tokenizer.ggml.pre: needed glm4 or chatglm-bpe, got nothing"), "{error}");
    }

    #[test]
    fn a_tokenizer_that_loses_text_is_refused() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/tiny/tokenizer.json");
        let whole: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        let refused = |json: &serde_json::Value| Tokenizer::from_bytes(json.to_string().as_bytes(), &path).unwrap_err().to_string();
        let mut uncut = whole.clone();
        uncut["pre_tokenizer"] = serde_json::Value::Null;
        let error = refused(&uncut);
        assert!(error.contains("tiny/tokenizer.json: \"Hello in the") && error.contains("a pre_tokenizer with ByteLevel"), "{error}");
        let mut few = whole;
        few["model"]["merges"] = serde_json::json!([]);
        few["model"]["vocab"] = serde_json::json!({ "a": 0, "b": 1 });
        let error = refused(&few);
        assert!(error.contains("a token for each byte"), "{error}");
    }

    #[test]
    fn a_decoder_we_do_not_know_is_refused() {
        let json = r#"{"version":"1.0","added_tokens":[],"decoder":{"type":"WordPiece","prefix":"","cleanup":false},
            "model":{"type":"BPE","vocab":{"a":0},"merges":[]}}"#;
        let err = Tokenizer::from_bytes(json.as_bytes(), Path::new("x/tokenizer.json")).unwrap_err().to_string();
        assert!(err.contains("x/tokenizer.json") && err.contains("WordPiece") && err.contains("ByteLevel"), "{err}");
    }

    #[test]
    fn long_runs_are_encoded_or_refused_but_never_panic() {
        let t = demo_tokenizer();
        for text in [" ".repeat(100_000), "a".repeat(100_000), "\n \n".repeat(30_000), "🙂".repeat(20_000)] {
            assert!(t.least_tokens(&text) > 1000);
            if let Ok(ids) = t.encode(&text, false) {
                assert!(t.least_tokens(&text) <= ids.len() as u64);
                assert_eq!(t.decode(&ids, false), text);
            }
        }
    }

    proptest! {
        #[test]
        fn any_text_survives_the_round_trip(text in "\\PC{0,80}") {
            let t = demo_tokenizer();
            let ids = t.encode(&text, false).unwrap();
            prop_assert!(t.least_tokens(&text) <= ids.len() as u64);
            prop_assert_eq!(t.decode(&ids, false), text);
        }

        #[test]
        fn our_decode_is_the_librarys(ids in proptest::collection::vec(0u32..1540, 0..60), skip: bool) {
            let t = demo_tokenizer();
            prop_assert_eq!(t.decode(&ids, skip), t.inner().decode(&ids, skip).unwrap());
        }
    }
}
