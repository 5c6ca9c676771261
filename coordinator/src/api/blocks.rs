//! An answer as a row of blocks: thought, text and calls in the order in which they came. What responses calls items and messages content
//! blocks.
//!
//! White space alone makes no block: between a thought and a call the model often writes a line break, and clients refuse empty text.

use crate::text::Part;

/// What a block holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Thought.
    Reasoning,
    /// Answer.
    Text,
    /// A call of this function; the text is its arguments.
    Call(String),
}

/// What happens to the blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// A block begins.
    Open(Kind),
    /// The open block goes on.
    Add(String),
    /// The open block ends.
    Close,
}

/// One block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// What it holds.
    pub kind: Kind,
    /// All of it.
    pub text: String,
}

/// Follows the parts of one answer.
#[derive(Debug, Default)]
pub struct Blocks {
    open: Option<Kind>,
    /// White space that begins a block if something visible follows.
    held: Option<(Kind, String)>,
}

impl Blocks {
    /// Takes the next part.
    pub fn part(&mut self, part: Part, out: &mut Vec<Step>) {
        match part {
            Part::Reasoning(text) => self.text(Kind::Reasoning, text, out),
            Part::Content(text) => self.text(Kind::Text, text, out),
            Part::Call(name) => {
                self.close(out);
                out.push(Step::Open(Kind::Call(name.clone())));
                self.open = Some(Kind::Call(name));
            }
            Part::Arguments(text) => out.push(Step::Add(text)),
        }
    }

    /// Ends the answer.
    pub fn close(&mut self, out: &mut Vec<Step>) {
        self.held = None;
        if self.open.take().is_some() {
            out.push(Step::Close);
        }
    }

    fn text(&mut self, kind: Kind, text: String, out: &mut Vec<Step>) {
        if self.open.as_ref() == Some(&kind) {
            out.push(Step::Add(text));
            return;
        }
        let mut all = match self.held.take() {
            Some((held, space)) if held == kind => space,
            _ => String::new(),
        };
        all.push_str(&text);
        if all.trim().is_empty() {
            self.held = Some((kind, all));
            return;
        }
        self.close(out);
        out.push(Step::Open(kind.clone()));
        out.push(Step::Add(all));
        self.open = Some(kind);
    }
}

/// The blocks of a whole answer.
pub fn whole(parts: Vec<Part>) -> Vec<Block> {
    let (mut blocks, mut steps) = (Blocks::default(), Vec::new());
    for part in parts {
        blocks.part(part, &mut steps);
    }
    let mut all: Vec<Block> = Vec::new();
    for step in steps {
        match (step, all.last_mut()) {
            (Step::Open(kind), _) => all.push(Block { kind, text: String::new() }),
            (Step::Add(text), Some(last)) => last.text.push_str(&text),
            _ => {}
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(text: &str) -> Part {
        Part::Content(text.into())
    }

    #[test]
    fn white_space_alone_is_no_block() {
        let parts = vec![
            Part::Reasoning("hm".into()),
            text("\n"),
            Part::Call("f".into()),
            Part::Arguments("{}".into()),
            text(" "),
            text("\nDone"),
            text(".\n"),
        ];
        let block = |kind, text: &str| Block { kind, text: text.into() };
        let want = [block(Kind::Reasoning, "hm"), block(Kind::Call("f".into()), "{}"), block(Kind::Text, " \nDone.\n")];
        assert_eq!(whole(parts), want);
        assert_eq!(whole(vec![text(" \n")]), []);
        let mut blocks = Blocks::default();
        let mut steps = Vec::new();
        for part in [text("a"), Part::Reasoning("\n".into()), text("b")] {
            blocks.part(part, &mut steps);
        }
        blocks.close(&mut steps);
        assert_eq!(steps, [Step::Open(Kind::Text), Step::Add("a".into()), Step::Add("b".into()), Step::Close]);
    }
}
