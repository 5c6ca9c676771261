//! Sequences that are held to a grammar: masks over their next token, computed on threads of their own while the layers run.
//!
//! Neighbours: `service/attach.rs` brings the vocabulary, `engine/` asks for a mask once the layers of a step are done and says which token
//! was chosen. A mask depends on the sequence's tokens alone, so a sequence that is taken up again goes on with the same ones.

use std::{
    fmt,
    sync::{
        Arc, OnceLock,
        mpsc::{self, Receiver, Sender},
    },
};

use parking_lot::{Mutex, RwLock};
use tandem_grammar::{GrammarError, Mask, Matcher, TokenTable, Vocabulary};
use tandem_kernels::SampleRow;

/// Most threads that compute masks.
const MOST_THREADS: usize = 4;
/// Their stacks: a mask may go as deep as its grammar. Only what is used takes memory.
const STACK: usize = 64 << 20;

/// What a sequence is held to, as the coordinator says it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuideText {
    /// The grammar.
    pub grammar: String,
    /// It holds behind the first occurrence of these bytes.
    pub after: Vec<u8>,
}

type Job = Box<dyn FnOnce() + Send>;
type Outcome = Result<(Matcher, Option<Mask>), GrammarError>;

/// The vocabulary and the threads, shared by all sequences. Cloning gives another handle.
#[derive(Clone, Default)]
pub struct Guides {
    vocabulary: Arc<RwLock<Option<Arc<Lazy>>>>,
    jobs: Arc<OnceLock<Sender<Job>>>,
}

/// A vocabulary whose trie is built when the first grammar needs it.
struct Lazy {
    table: Arc<TokenTable>,
    built: OnceLock<Result<Vocabulary, GrammarError>>,
}

impl fmt::Debug for Guides {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guides").field("vocabulary", &self.vocabulary.read().is_some()).finish_non_exhaustive()
    }
}

impl Guides {
    /// Takes the model's vocabulary. The same one again changes nothing.
    pub fn set_vocabulary(&self, table: TokenTable) {
        let mut slot = self.vocabulary.write();
        if slot.as_ref().is_none_or(|known| *known.table != table) {
            *slot = Some(Arc::new(Lazy { table: Arc::new(table), built: OnceLock::new() }));
        }
    }

    /// Starts to compile what a sequence is held to, which has generated `tokens` already.
    pub fn guide(&self, text: GuideText, tokens: &[u32]) -> Guide {
        let vocabulary = self.vocabulary.read().clone();
        let tokens = tokens.to_vec();
        let outcome = self.start(move || {
            let lazy = vocabulary.ok_or_else(|| GrammarError::Table("the coordinator has sent none".to_owned()))?;
            let built = lazy.built.get_or_init(|| Vocabulary::new((*lazy.table).clone()));
            let mut matcher = built.as_ref().map_err(Clone::clone)?.compile_after(&text.grammar, &text.after)?;
            for token in tokens {
                matcher.accept(token)?;
            }
            let mask = matcher.mask()?;
            Ok((matcher, mask))
        });
        Guide { guides: self.clone(), next: Next::Coming(outcome) }
    }

    fn start(&self, work: impl FnOnce() -> Outcome + Send + 'static) -> Receiver<Outcome> {
        let (sender, outcome) = mpsc::channel();
        // A sequence that has ended meanwhile no longer listens.
        let job: Job = Box::new(move || drop(sender.send(work())));
        // Threads that could not be started leave the job undone, which its listener notices.
        let _ = self.jobs.get_or_init(start_threads).send(job);
        outcome
    }
}

fn start_threads() -> Sender<Job> {
    let (sender, jobs) = mpsc::channel::<Job>();
    let jobs = Arc::new(Mutex::new(jobs));
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    for i in 0..cores.clamp(1, MOST_THREADS) {
        let jobs = Arc::clone(&jobs);
        let started = std::thread::Builder::new().name(format!("mask-{i}")).stack_size(STACK).spawn(move || {
            loop {
                // One thread waits at a time; it lets go before it works.
                let job = jobs.lock().recv();
                match job {
                    Ok(job) => job(),
                    Err(_) => return,
                }
            }
        });
        if let Err(error) = started {
            tracing::error!(%error, "a thread for masks could not be started");
        }
    }
    sender
}

/// One sequence's grammar.
#[derive(Debug)]
pub struct Guide {
    guides: Guides,
    next: Next,
}

#[derive(Debug)]
enum Next {
    /// On a thread.
    Coming(Receiver<Outcome>),
    /// The state behind the last token, and the mask of the next one.
    Here(Box<Matcher>, Option<Mask>),
    /// The sequence cannot go on.
    Failed(String),
}

impl Guide {
    /// Why the sequence cannot go on, if it cannot. Waits.
    pub fn failure(&mut self) -> Option<&str> {
        self.wait();
        match &self.next {
            Next::Failed(why) => Some(why),
            _ => None,
        }
    }

    /// Holds the row that samples the sequence's next token to the grammar, over `vocab` ids; `stop_ids` end the sequence where the grammar
    /// lets it end, and where nothing else is possible they do so whatever bans them. Waits for the mask.
    pub fn hold(&mut self, row: &mut SampleRow, vocab: usize, stop_ids: &[u32]) {
        self.wait();
        let Next::Here(_, Some(mask)) = &self.next else { return };
        let mut mask = mask.clone();
        mask.words.resize(vocab.div_ceil(32), 0);
        if mask.may_end {
            stop_ids.iter().for_each(|id| mask.set(*id, true));
        }
        if mask.must_end {
            row.bias.retain(|(id, bias)| *bias > f32::NEG_INFINITY || !stop_ids.contains(id));
        }
        row.allowed = Some(mask.words);
    }

    /// The sequence goes on with `token`.
    pub fn push(&mut self, token: u32) {
        self.wait();
        let failed = Next::Failed("the thread that computed its masks is gone".to_owned());
        match std::mem::replace(&mut self.next, failed) {
            Next::Here(mut matcher, _) => {
                let outcome = self.guides.start(move || {
                    matcher.accept(token)?;
                    let mask = matcher.mask()?;
                    Ok((*matcher, mask))
                });
                self.next = Next::Coming(outcome);
            }
            other => self.next = other,
        }
    }

    fn wait(&mut self) {
        if let Next::Coming(outcome) = &self.next {
            self.next = match outcome.recv() {
                Ok(Ok((matcher, mask))) => Next::Here(Box::new(matcher), mask),
                Ok(Err(error)) => Next::Failed(error.to_string()),
                Err(_) => Next::Failed("the thread that computed its masks is gone".to_owned()),
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use tandem_grammar::Grammar;

    use super::*;
    use crate::sampler::{SamplingParams, Seen};

    const STOP: u32 = 256;

    fn guides() -> Guides {
        let guides = Guides::default();
        let mut table = TokenTable { special: vec![STOP], stops: vec![STOP], ..TokenTable::default() };
        for byte in 0..=255u8 {
            table.bytes.push(byte);
            table.ends.push(table.bytes.len() as u32);
        }
        table.bytes.extend(b"<end>");
        table.ends.push(table.bytes.len() as u32);
        guides.set_vocabulary(table);
        guides
    }

    fn row(banned: &[u32]) -> SampleRow {
        SamplingParams::default().row(0, 0, &Seen::default(), banned, None)
    }

    fn allowed(guide: &mut Guide, banned: &[u32]) -> Vec<u32> {
        let mut row = row(banned);
        guide.hold(&mut row, 300, &[STOP]);
        let banned = row.bias.iter().filter(|(_, bias)| *bias == f32::NEG_INFINITY).map(|(id, _)| *id).collect::<Vec<_>>();
        (0..300).filter(|&id| row.allows(id as usize) && !banned.contains(&id)).collect()
    }

    #[test]
    fn masks_follow_the_tokens_and_end_with_the_text() {
        let text = GuideText { grammar: Grammar::regex("ab?").to_text(), after: b"!".to_vec() };
        let guides = guides();
        let mut guide = guides.guide(text.clone(), &[]);
        assert_eq!(allowed(&mut guide, &[]).len(), 300, "free before the tag");
        for byte in b"x!" {
            guide.push(u32::from(*byte));
        }
        assert_eq!(allowed(&mut guide, &[]), [u32::from(b'a')]);
        guide.push(u32::from(b'a'));
        assert_eq!(allowed(&mut guide, &[]), [u32::from(b'b'), STOP]);
        assert_eq!(allowed(&mut guide, &[STOP]), [u32::from(b'b')], "min_tokens bans the end where there is another way");
        guide.push(u32::from(b'b'));
        assert_eq!(allowed(&mut guide, &[STOP]), [STOP], "and does not where there is none");
        let mut again = guides.guide(text, &"x!a".bytes().map(u32::from).collect::<Vec<_>>());
        assert_eq!(allowed(&mut again, &[]), [u32::from(b'b'), STOP], "taken up again");
        again.push(u32::from(b'z'));
        assert!(again.failure().is_some_and(|why| why.contains("left its grammar")));
    }

    #[test]
    fn what_cannot_be_held_fails_in_words() {
        let text = GuideText { grammar: Grammar::lark("start: nothing").to_text(), after: Vec::new() };
        assert!(guides().guide(text.clone(), &[]).failure().is_some_and(|why| why.contains("nothing")));
        assert!(Guides::default().guide(text, &[]).failure().is_some_and(|why| why.contains("has sent none")));
    }
}
