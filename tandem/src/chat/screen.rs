//! Writes an answer as it comes: reasoning dimmed on a terminal, on stderr elsewhere, so that a pipe gets the answer alone.

use std::io::{self, IsTerminal as _, Write as _};

use super::answer::Piece;
use crate::{failure::Failure, output};

const DIM: &str = "\x1b[2m";
const PLAIN: &str = "\x1b[0m";

/// Where answers go.
pub struct Screen {
    reasoning: bool,
    terminal: bool,
    /// What was written last.
    last: Option<bool>,
    /// Whether that ended a line.
    at_start: bool,
}

impl Screen {
    /// `reasoning` = show it.
    pub fn new(reasoning: bool) -> Self {
        Self { reasoning, terminal: io::stdout().is_terminal(), last: None, at_start: true }
    }

    /// Shows new text. A reader that went away is no reason to fail.
    ///
    /// # Errors
    /// When the answer cannot be written for another reason.
    pub fn show(&mut self, piece: &Piece) -> Result<(), Failure> {
        let (is_reasoning, text) = match piece {
            Piece::Reasoning(text) => (true, text),
            Piece::Content(text) => (false, text),
        };
        if is_reasoning && !self.reasoning {
            return Ok(());
        }
        let text = visible(text);
        if let Some(before) = self.last.filter(|before| *before != is_reasoning && !self.at_start) {
            write(before && !self.terminal, "\n")?;
        }
        match (is_reasoning, self.terminal) {
            (true, true) => write(false, &format!("{DIM}{text}{PLAIN}"))?,
            (true, false) => write(true, &text)?,
            (false, _) => write(false, &text)?,
        }
        self.last = Some(is_reasoning);
        self.at_start = text.ends_with('\n');
        Ok(())
    }

    /// Ends the answer.
    ///
    /// # Errors
    /// As [`Screen::show`].
    pub fn end(&mut self, summary: Option<&str>) -> Result<(), Failure> {
        let line_end = if self.at_start { Ok(()) } else { write(self.last == Some(true) && !self.terminal, "\n") };
        (self.last, self.at_start) = (None, true);
        if let (true, Some(summary)) = (self.terminal, summary) {
            write(true, &format!("{DIM}{summary}{PLAIN}\n"))?;
        }
        line_end
    }
}

/// A model's text must not steer the terminal: control characters but for line ends and tabs become visible.
fn visible(text: &str) -> String {
    let shown = |c: char| if c.is_control() && !matches!(c, '\n' | '\t') { '\u{fffd}' } else { c };
    text.chars().map(shown).collect()
}

/// Writes to stdout, where errors count, or to stderr, where nobody may be reading.
fn write(to_stderr: bool, text: &str) -> Result<(), Failure> {
    if !to_stderr {
        return output::print(text);
    }
    let _ = io::stderr().write_all(text.as_bytes()).and_then(|()| io::stderr().flush());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_cannot_steer_the_terminal() {
        assert_eq!(visible("a\x1b[31mb\r\n\tc\u{9b}d"), "a\u{fffd}[31mb\u{fffd}\n\tc\u{fffd}d");
    }
}
