//! The interpreter of `testdata/*.txt`. Commands: `new queue=2`, `up w1 batch=2`, `ready w1`, `unready w1`, `down w1`,
//! `admit n=2 max=3 deadline=5`, `cancel r1`, `started a1`, `token a1 index=0`, `stop a1`, `length a1`, `drop a1`, `fail a1`,
//! `at 3` (seconds), `tick`, `drain`, `abort`, `counts`. Output: the actions, one a line. A token's id is 100 + its index.

use std::fmt::Write as _;

use super::*;
use crate::datadriven::{number, run};

struct Story {
    scheduler: Scheduler,
    now: Duration,
    /// Which worker got which attempt, as the story's workers know it.
    attempts: HashMap<AttemptId, WorkerId>,
}

#[test]
fn stories() {
    run("src/scheduler/testdata", || {
        let mut story = Story { scheduler: Scheduler::new(2), now: Duration::ZERO, attempts: HashMap::new() };
        move |line: &str| story.command(line)
    });
}

/// The number in a word such as `w1`.
fn id(line: &str) -> u64 {
    line.split_whitespace().nth(1).and_then(|word| word.trim_start_matches(['w', 'r', 'a']).parse().ok()).expect("an id in the story")
}

impl Story {
    fn command(&mut self, line: &str) -> String {
        let mut out = String::new();
        let now = self.now;
        let verb = line.split_whitespace().next().unwrap_or_default();
        match verb {
            "new" => self.scheduler = Scheduler::new(number(line, "queue", 2) as usize),
            "up" => self.scheduler.worker_up(WorkerId(id(line)), limits(number(line, "batch", 2) as u32)),
            "ready" => self.scheduler.set_ready(now, WorkerId(id(line)), true),
            "unready" => self.scheduler.set_ready(now, WorkerId(id(line)), false),
            "down" => self.scheduler.worker_down(now, WorkerId(id(line))),
            "admit" => {
                let mut request = request(number(line, "prompt", 3) as usize, number(line, "max", 3) as u32);
                request.deadline = Some(number(line, "deadline", 0)).filter(|left| *left > 0).map(Duration::from_secs);
                if let Err(error) = self.scheduler.admit(now, vec![request; number(line, "n", 1) as usize]) {
                    writeln!(out, "refused: {error}").expect("string");
                }
            }
            "cancel" => self.scheduler.cancel(now, RequestId(id(line))),
            "started" => self.say(line, WorkerEvent::Started { cached_tokens: None }),
            "token" => {
                let index = number(line, "index", 0) as u32;
                self.say(line, WorkerEvent::Token(token(index, number(line, "id", u64::from(100 + index)) as u32)));
            }
            "stop" => self.say(line, WorkerEvent::Finished(Finish::Stop { id: 2 })),
            "length" => self.say(line, WorkerEvent::Finished(Finish::Length)),
            "drop" => self.say(line, WorkerEvent::Cancelled),
            "fail" => self.say(line, WorkerEvent::Failed { code: ErrorCode::NonFinite, message: "a NaN".into() }),
            "at" => self.now = Duration::from_secs(id(line)),
            "tick" => self.scheduler.tick(now),
            "drain" => self.scheduler.drain(),
            "abort" => self.scheduler.abort_all(now, "shut down"),
            "counts" => writeln!(out, "{:?}", self.scheduler.counts()).expect("string"),
            other => panic!("unknown command {other}"),
        }
        for action in self.scheduler.take_actions() {
            if let Action::Submit(submission) = &action {
                self.attempts.insert(submission.attempt, submission.worker);
            }
            writeln!(out, "{}", show(&action)).expect("string");
        }
        out
    }

    fn say(&mut self, line: &str, event: WorkerEvent) {
        let attempt = AttemptId(id(line));
        self.scheduler.events(self.now, self.attempts[&attempt], [(attempt, event)]);
    }
}

fn show(action: &Action) -> String {
    match action {
        Action::Submit(s) => {
            let emitted = if s.emitted.is_empty() { String::new() } else { format!(" emitted={:?}", s.emitted) };
            let left = s.left.map_or(String::new(), |left| format!(" left={left:?}"));
            format!("w{} <- submit r{} as a{}{emitted}{left}", s.worker.0, s.request.0, s.attempt.0)
        }
        Action::Cancel { worker, attempt } => format!("w{} <- cancel a{}", worker.0, attempt.0),
        Action::Emit { request, event } => match event {
            GenerationEvent::Tokens(tokens) => format!("r{} tokens {:?}", request.0, tokens.iter().map(|t| t.id).collect::<Vec<_>>()),
            GenerationEvent::Finished { reason } => format!("r{} finished {reason:?}", request.0),
            GenerationEvent::Error(error) => format!("r{} error {:?}: {}", request.0, error.code, error.message),
            GenerationEvent::Started { .. } => format!("r{} Started", request.0),
            other => format!("r{} {other:?}", request.0),
        },
        Action::Requeued { request, why } => format!("r{} requeued: {why}", request.0),
        Action::Preempted { request } => format!("r{} preempted", request.0),
    }
}
