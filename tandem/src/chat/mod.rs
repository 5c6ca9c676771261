//! `tandem chat`: a conversation with a running server on the terminal. `answer.rs` reads one streamed answer, `screen.rs` writes it.

mod answer;
mod screen;

use std::io::{self, IsTerminal as _, Read as _};

use serde_json::{Value, json};
use tandem_runtime::process;

use self::{answer::Answer, screen::Screen};
use crate::{cli::ChatArgs, client::Client, failure::Failure, output};

const HELP: &str = "/help   this\n/clear  forget the conversation\n/undo   forget the last question and its answer\n/exit   end; so do Ctrl-D and, \
                    where nothing is being answered, Ctrl-C\nA line that ends in \\ goes on in the next one. Ctrl-C stops an answer.\n";

/// Asks one question, or holds a conversation.
///
/// # Errors
/// Nobody answers, or the server refuses.
pub async fn run(args: ChatArgs) -> Result<(), Failure> {
    let client = Client::new(&args.server, None)?;
    let model = client.model(args.model.as_deref()).await?;
    let mut chat = Chat { client, model, messages: Vec::new(), screen: Screen::new(!args.hide_reasoning), args };
    chat.begin();
    if let Some(message) = chat.args.message.clone() {
        return chat.ask(message).await.map(drop);
    }
    if io::stdin().is_terminal() {
        return chat.converse().await;
    }
    let mut message = String::new();
    io::stdin().read_to_string(&mut message).map_err(|error| Failure::usage(format!("standard input is not text: {error}")))?;
    match message.trim() {
        "" => Err(Failure::usage("standard input is empty; give a message there, or as an argument")),
        message => chat.ask(message.to_owned()).await.map(drop),
    }
}

struct Chat {
    client: Client,
    model: String,
    messages: Vec<Value>,
    screen: Screen,
    args: ChatArgs,
}

impl Chat {
    fn begin(&mut self) {
        self.messages.clear();
        if let Some(system) = &self.args.system {
            self.messages.push(json!({"role": "system", "content": system}));
        }
    }

    async fn converse(&mut self) -> Result<(), Failure> {
        process::complain(&format!("{} at {}; /help says what else there is", self.model, self.client.base()));
        while let Some(line) = question().await? {
            match line.trim() {
                "" => {}
                "/exit" | "/quit" => break,
                "/help" => output::print(HELP)?,
                "/clear" => self.begin(),
                "/undo" => self.undo(),
                message if message.starts_with('/') && !message.contains(char::is_whitespace) => {
                    process::complain(&format!("no command is called {message}; /help lists them"));
                }
                message => {
                    if let Err(failure) = self.ask(message.to_owned()).await {
                        self.undo();
                        process::complain(&format!("error: {failure}"));
                    }
                }
            }
        }
        Ok(())
    }

    /// Forgets the last question and what came after it.
    fn undo(&mut self) {
        if let Some(last) = self.messages.iter().rposition(|message| message["role"] == "user") {
            self.messages.truncate(last);
        }
    }

    /// Sends the conversation with one more message and shows the answer, which Ctrl-C cuts short.
    async fn ask(&mut self, message: String) -> Result<(), Failure> {
        self.messages.push(json!({"role": "user", "content": message}));
        let mut body = json!({
            "model": self.model,
            "messages": self.messages,
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        let ChatArgs { temperature, max_tokens, reasoning_effort, .. } = &self.args;
        for (key, value) in
            [("temperature", json!(temperature)), ("max_tokens", json!(max_tokens)), ("reasoning_effort", json!(reasoning_effort))]
        {
            if !value.is_null() {
                body[key] = value;
            }
        }
        let mut answer = Answer::begin(self.client.post("/v1/chat/completions", &body).await?);
        let outcome = loop {
            tokio::select! {
                piece = answer.next() => match piece {
                    Ok(Some(piece)) => match self.screen.show(&piece) {
                        Ok(()) => {}
                        Err(failure) => break Err(failure),
                    },
                    Ok(None) => break Ok(()),
                    Err(failure) => break Err(failure),
                },
                _ = tokio::signal::ctrl_c() => break Ok(()),
            }
        };
        let ended = self.screen.end(answer.summary().as_deref());
        outcome.and(ended)?;
        self.messages.push(json!({"role": "assistant", "content": answer.content()}));
        Ok(())
    }
}

/// A line from the terminal, with those that it goes on in; `None` at its end.
async fn question() -> Result<Option<String>, Failure> {
    let mut text = String::new();
    let mut sign = "> ";
    loop {
        let line = tokio::task::spawn_blocking(move || {
            eprint_now(sign);
            let mut line = String::new();
            io::stdin().read_line(&mut line).map(|read| (read > 0).then_some(line))
        });
        let line = line.await.map_err(|error| Failure::internal(error.to_string()))?;
        match line.map_err(|error| Failure::unavailable(format!("the terminal cannot be read: {error}")))? {
            None => return Ok((!text.is_empty()).then_some(text)),
            Some(line) => match line.trim_end_matches(['\r', '\n']).strip_suffix('\\') {
                Some(part) => {
                    text.push_str(part);
                    text.push('\n');
                    sign = ". ";
                }
                None => {
                    text.push_str(&line);
                    return Ok(Some(text));
                }
            },
        }
    }
}

/// Writes a prompt sign; a terminal that is gone shows in the read that follows.
fn eprint_now(text: &str) {
    use std::io::Write as _;
    let mut err = io::stderr();
    let _ = err.write_all(text.as_bytes());
    let _ = err.flush();
}
