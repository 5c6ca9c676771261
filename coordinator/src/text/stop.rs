//! Stop strings over a stream of text: nothing of a stop string is ever shown, however its characters are cut into tokens.
//!
//! Text that could be the beginning of a stop string is held until it is or is not one. The match that *begins* first wins
//! (among those that begin together the one that is complete first), so the result is the text cut at the first match however
//! the text arrives.

/// What one push did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StopMatch {
    /// Index of the stop string that matched.
    pub index: usize,
}

/// The matching state of one sequence.
#[derive(Clone, Debug)]
pub struct StopMatcher {
    stops: Vec<String>,
    include: bool,
    /// Text not yet shown: always a proper prefix of some stop string, or empty.
    held: String,
    done: bool,
}

impl StopMatcher {
    /// Watches for `stops` (empty strings are ignored). `include` shows the stop string itself at the end of the text.
    pub fn new(stops: Vec<String>, include: bool) -> Self {
        Self { stops, include, held: String::new(), done: false }
    }

    /// Takes a piece of text and appends what may be shown to `out`. After a match all later text is dropped.
    pub fn push(&mut self, text: &str, out: &mut String) -> Option<StopMatch> {
        if self.done {
            return None;
        }
        if self.stops.is_empty() {
            out.push_str(text);
            return None;
        }
        self.held.push_str(text);
        self.scan(false, out)
    }

    /// Walks the positions where a stop string could begin. The first position at which one is complete, or (unless this is the
    /// `end`) may yet become complete, decides: everything before it is free to show.
    fn scan(&mut self, end: bool, out: &mut String) -> Option<StopMatch> {
        let mut at = 0;
        while at < self.held.len() {
            let rest = &self.held[at..];
            if let Some(index) = self.complete_at(rest) {
                let shown = if self.include { at + self.stops[index].len() } else { at };
                out.push_str(&self.held[..shown]);
                self.held.clear();
                self.done = true;
                return Some(StopMatch { index });
            }
            if !end && self.stops.iter().any(|stop| stop.len() > rest.len() && stop.starts_with(rest)) {
                break;
            }
            at += rest.chars().next().map_or(1, char::len_utf8);
        }
        out.push_str(&self.held[..at]);
        self.held.drain(..at);
        None
    }

    /// The shortest stop string that `rest` begins with.
    fn complete_at(&self, rest: &str) -> Option<usize> {
        (0..self.stops.len())
            .filter(|&i| !self.stops[i].is_empty() && rest.starts_with(&self.stops[i]))
            .min_by_key(|&i| self.stops[i].len())
    }

    /// Shows a piece of text without looking for stop strings in it (the tokens below `min_tokens`). Held text goes with it.
    pub fn pass(&mut self, text: &str, out: &mut String) {
        if !self.done {
            out.push_str(&self.held);
            self.held.clear();
            out.push_str(text);
        }
    }

    /// Ends the sequence. Held text is shown, up to a stop string that was complete inside the beginning of a longer one.
    pub fn finish(&mut self, out: &mut String) -> Option<StopMatch> {
        self.scan(true, out)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn run(stops: &[&str], include: bool, pieces: &[&str]) -> (String, Option<usize>) {
        let mut matcher = StopMatcher::new(stops.iter().map(|s| (*s).to_owned()).collect(), include);
        let (mut out, mut hit) = (String::new(), None);
        for piece in pieces {
            if let Some(found) = matcher.push(piece, &mut out) {
                assert!(hit.is_none(), "one match only");
                hit = Some(found.index);
            }
        }
        if let Some(found) = matcher.finish(&mut out) {
            assert!(hit.is_none(), "one match only");
            hit = Some(found.index);
        }
        (out, hit)
    }

    /// The meaning, written as plainly as can be: the earliest beginning, then the shortest.
    fn oracle(stops: &[&str], include: bool, text: &str) -> (String, Option<usize>) {
        let best =
            stops.iter().enumerate().filter(|(_, s)| !s.is_empty()).filter_map(|(i, s)| text.find(s).map(|at| (at, s.len(), i))).min();
        match best {
            Some((at, len, i)) => (text[..if include { at + len } else { at }].to_owned(), Some(i)),
            None => (text.to_owned(), None),
        }
    }

    /// T-11: the named cases, over every cut into two and three pieces.
    #[test]
    fn t11_every_cut_gives_the_text_cut_at_the_first_match() {
        let sixty_four = "0123456789abcdef".repeat(4);
        let cases: &[(&[&str], String)] = &[
            (&["own fox"], "The quick brown fox jumps".into()),
            (&["\nUser:"], "Hello\n\nUser: hi\nUser:".into()),
            (&["🙂"], "ab🙂c🙂".into()),
            (&[&sixty_four], format!("x{}y{}z", &sixty_four[..63], sixty_four)),
            (&["abcd", "bc"], "xxabcdyy".into()),
            (&["abx", "b"], "aab".into()),
            (&["aaab", "aac"], "aaaaaab aac".into()),
            (&["nothing"], "noth nothin".into()),
            (&["", "end"], "the end".into()),
        ];
        for (stops, text) in cases {
            for include in [false, true] {
                let want = oracle(stops, include, text);
                let cuts: Vec<usize> = text.char_indices().map(|(i, _)| i).chain([text.len()]).collect();
                for &a in &cuts {
                    for &b in cuts.iter().filter(|&&b| b >= a) {
                        assert_eq!(run(stops, include, &[&text[..a], &text[a..b], &text[b..]]), want, "{stops:?} {a} {b}");
                    }
                }
                let chars: Vec<String> = text.chars().map(String::from).collect();
                assert_eq!(run(stops, include, &chars.iter().map(String::as_str).collect::<Vec<_>>()), want);
            }
        }
    }

    #[test]
    fn text_is_held_no_longer_than_needed() {
        let mut matcher = StopMatcher::new(vec!["fox".into()], false);
        let mut out = String::new();
        matcher.push("a f", &mut out);
        assert_eq!(out, "a ");
        matcher.push("og", &mut out);
        assert_eq!(out, "a fog");
        matcher.pass("fox", &mut out);
        assert_eq!(out, "a fogfox");
        assert_eq!(matcher.push("fox and more", &mut out), Some(StopMatch { index: 0 }));
        matcher.push("late", &mut out);
        matcher.finish(&mut out);
        assert_eq!(out, "a fogfox");
    }

    proptest! {
        #[test]
        fn random_texts_match_the_oracle(
            text in "[ab🙂]{0,24}",
            stops in proptest::collection::vec("[ab🙂]{1,4}", 1..4),
            cuts in proptest::collection::vec(0usize..30, 0..6),
            include: bool,
        ) {
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let chars: Vec<char> = text.chars().collect();
            let mut cuts: Vec<usize> = cuts.into_iter().map(|c| c.min(chars.len())).collect();
            cuts.extend([0, chars.len()]);
            cuts.sort_unstable();
            let pieces: Vec<String> = cuts.windows(2).map(|w| chars[w[0]..w[1]].iter().collect()).collect();
            let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
            prop_assert_eq!(run(&stops, include, &pieces), oracle(&stops, include, &text));
        }
    }
}
