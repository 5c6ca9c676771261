//! The bytes of every token, and the compiler over them. Built once per model: a trie over the whole vocabulary.

use std::sync::Arc;

use llguidance::ParserFactory;
use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};

use crate::{Grammar, GrammarError, Matcher, short};

/// Stack of a thread that compiles, which goes as deep as a grammar does (`bounds.rs`). Only what is used takes memory.
const STACK: usize = 256 << 20;

/// Marks the bytes of a token that is no text.
const SPECIAL: u8 = TokTrie::SPECIAL_TOKEN_MARKER;

/// What every token stands for, as it crosses a process boundary.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TokenTable {
    /// All tokens' bytes, end to end.
    pub bytes: Vec<u8>,
    /// Where token i ends.
    pub ends: Vec<u32>,
    /// Ascending ids of tokens that are no text (`<|user|>`).
    pub special: Vec<u32>,
    /// Ids that end an answer.
    pub stops: Vec<u32>,
}

impl TokenTable {
    fn token(&self, id: usize) -> Option<&[u8]> {
        let start = if id == 0 { 0 } else { *self.ends.get(id - 1)? };
        self.bytes.get(start as usize..*self.ends.get(id)? as usize)
    }
}

/// A compiler of grammars over one vocabulary.
pub struct Vocabulary {
    factory: ParserFactory,
    /// Ids in order of their bytes, for tokens that are text.
    sorted: Arc<[u32]>,
    table: Arc<TokenTable>,
}

impl std::fmt::Debug for Vocabulary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Vocabulary").field("tokens", &self.table.ends.len()).finish_non_exhaustive()
    }
}

impl Vocabulary {
    /// Builds the trie. A token without bytes can never be chosen.
    ///
    /// # Errors
    /// [`GrammarError::Table`].
    pub fn new(table: TokenTable) -> Result<Self, GrammarError> {
        let broken = |what: &str| GrammarError::Table(what.to_owned());
        let &end = table.stops.first().ok_or_else(|| broken("no token ends an answer"))?;
        let size = table.ends.len();
        if table.stops.iter().any(|&id| id as usize >= size) {
            return Err(broken("an end token lies outside of it"));
        }
        let mut words = Vec::with_capacity(size);
        for id in 0..size {
            let bytes = table.token(id).ok_or_else(|| broken("its ends are not ascending"))?;
            words.push(if table.special.binary_search(&(id as u32)).is_ok() {
                [&[SPECIAL], bytes].concat()
            } else if bytes.contains(&SPECIAL) {
                // No UTF-8 text holds that byte.
                Vec::new()
            } else {
                bytes.to_vec()
            });
        }
        let mut sorted: Vec<u32> = (0..size as u32).filter(|&id| words[id as usize].first().is_some_and(|&b| b != SPECIAL)).collect();
        sorted.sort_unstable_by(|&a, &b| words[a as usize].cmp(&words[b as usize]));
        let info = TokRxInfo::new(size as u32, end);
        let trie = TokTrie::from(&info, &words).with_eos_tokens(&table.stops);
        let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let mut factory = ParserFactory::new_simple(&env).map_err(|e| GrammarError::Table(short(&e)))?;
        factory.quiet();
        factory.limits_mut().verbose_errors = false;
        Ok(Self { factory, sorted: sorted.into(), table: Arc::new(table) })
    }

    /// Whether an answer can be held to what [`Grammar::to_text`] wrote: it compiles, and something can begin so.
    ///
    /// # Errors
    /// [`GrammarError::Compile`].
    pub fn check(&self, text: &str) -> Result<(), GrammarError> {
        match self.compile(text)?.mask() {
            Ok(_) => Ok(()),
            Err(GrammarError::Left(why)) => Err(GrammarError::Compile(format!("no text can be held to it, or it is too large: {why}"))),
            Err(other) => Err(other),
        }
    }

    /// Compiles what [`Grammar::to_text`] wrote.
    ///
    /// # Errors
    /// [`GrammarError::Compile`]: no grammar, or nothing that can be enforced, or too large.
    pub fn compile(&self, text: &str) -> Result<Matcher, GrammarError> {
        self.compile_after(text, &[])
    }

    /// The same, in force behind the first `after` in the answer (from the beginning if it is empty).
    ///
    /// # Errors
    /// As [`Vocabulary::compile`].
    pub fn compile_after(&self, text: &str, after: &[u8]) -> Result<Matcher, GrammarError> {
        let grammar = Grammar::parse(text).map_err(|e| GrammarError::Compile(short(&e)))?;
        let compile = || llguidance::Matcher::new(self.factory.create_parser(grammar));
        let inner = std::thread::scope(|scope| {
            let thread = std::thread::Builder::new().name("grammar".to_owned()).stack_size(STACK).spawn_scoped(scope, compile);
            let thread = thread.map_err(|e| GrammarError::Compile(format!("a thread to compile it could not be started: {e}")))?;
            thread.join().map_err(|_| GrammarError::Compile("the compiler failed on it".to_owned()))
        })?;
        match inner.get_error() {
            Some(error) => Err(GrammarError::Compile(short(&error))),
            None => Ok(Matcher::new(inner, Arc::clone(&self.table), Arc::clone(&self.sorted), after)),
        }
    }
}

/// The bytes of token `id` in a table that was checked.
pub(crate) fn bytes(table: &TokenTable, id: u32) -> &[u8] {
    table.token(id as usize).unwrap_or_default()
}
