//! Property: whatever workers, clients and the clock do, each request's client sees exactly the tokens of an uninterrupted run, in order,
//! and one end; places are never overbooked; nobody waits beside a free place.

use proptest::prelude::*;

use super::*;

/// What a deterministic model says at `index` of the request with this prompt length.
fn oracle(prompt: usize, index: u32) -> u32 {
    (prompt as u32).wrapping_mul(31).wrapping_add(index.wrapping_mul(17)) % 1009
}

#[derive(Clone, Debug)]
enum Op {
    Admit {
        n: usize,
        max_tokens: u32,
    },
    Cancel(usize),
    Up(u32),
    Down(usize),
    Ready(usize, bool),
    /// Lets a worker make `tokens` for one of its attempts, with an optional fault.
    Step {
        worker: usize,
        attempt: usize,
        tokens: u32,
        fault: Fault,
    },
    Tick(u64),
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    None,
    /// The last token is said twice.
    Repeat,
    /// A token is lost on the way.
    Skip,
    /// The worker drops the attempt.
    Drop,
}

fn op() -> impl Strategy<Value = Op> {
    let fault = prop_oneof![6 => Just(Fault::None), 1 => Just(Fault::Repeat), 1 => Just(Fault::Skip), 1 => Just(Fault::Drop)];
    prop_oneof![
        4 => (1usize..4, 1u32..6).prop_map(|(n, max_tokens)| Op::Admit { n, max_tokens }),
        1 => (0usize..20).prop_map(Op::Cancel),
        1 => (1u32..4).prop_map(Op::Up),
        1 => (0usize..4).prop_map(Op::Down),
        2 => (0usize..4, prop::bool::weighted(0.8)).prop_map(|(worker, ready)| Op::Ready(worker, ready)),
        8 => (0usize..4, 0usize..6, 0u32..4, fault).prop_map(|(worker, attempt, tokens, fault)| Op::Step { worker, attempt, tokens, fault }),
        1 => (0u64..3).prop_map(Op::Tick),
    ]
}

/// A worker's own view of an attempt.
struct Running {
    attempt: AttemptId,
    prompt: usize,
    max_tokens: u32,
    next: u32,
}

#[derive(Default)]
struct Client {
    prompt: usize,
    max_tokens: u32,
    tokens: Vec<u32>,
    ended: bool,
    cancelled: bool,
    failed: bool,
}

struct World {
    scheduler: Scheduler,
    now: Duration,
    workers: Vec<(WorkerId, u32, bool, Vec<Running>)>,
    clients: BTreeMap<RequestId, Client>,
    next_worker: u64,
}

impl World {
    fn settle(&mut self) -> Result<(), TestCaseError> {
        let actions: Vec<Action> = self.scheduler.take_actions().collect();
        for action in actions {
            match action {
                Action::Submit(submission) => {
                    let (_, batch, ready, running) =
                        self.workers.iter_mut().find(|worker| worker.0 == submission.worker).expect("submitted to a live worker");
                    prop_assert!(*ready);
                    prop_assert!(running.len() < *batch as usize, "overbooked");
                    let client = &self.clients[&submission.request];
                    prop_assert_eq!(&client.tokens, &submission.emitted, "the journal is what the client has");
                    running.push(Running {
                        attempt: submission.attempt,
                        prompt: submission.what.prompt_ids.len(),
                        max_tokens: submission.what.max_tokens,
                        next: submission.emitted.len() as u32,
                    });
                }
                Action::Cancel { worker, attempt } => {
                    if let Some(worker) = self.workers.iter_mut().find(|live| live.0 == worker) {
                        worker.3.retain(|running| running.attempt != attempt);
                    }
                }
                Action::Emit { request, event } => {
                    let client = self.clients.get_mut(&request).expect("a client");
                    prop_assert!(!client.ended && !client.cancelled, "an event after the end");
                    match event {
                        GenerationEvent::Tokens(tokens) => {
                            for token in tokens {
                                prop_assert_eq!(token.index as usize, client.tokens.len());
                                prop_assert_eq!(token.id, oracle(client.prompt, token.index));
                                client.tokens.push(token.id);
                            }
                        }
                        GenerationEvent::Finished { .. } => {
                            prop_assert_eq!(client.tokens.len(), client.max_tokens as usize);
                            client.ended = true;
                        }
                        GenerationEvent::Error(_) => {
                            client.ended = true;
                            client.failed = true;
                        }
                        _ => {}
                    }
                }
                Action::Requeued { .. } | Action::Preempted { .. } => {}
            }
        }
        let free = self.workers.iter().any(|(_, batch, ready, running)| *ready && running.len() < *batch as usize);
        let waiting = self.scheduler.entries.values().any(|entry| entry.phase == Phase::Waiting);
        prop_assert!(!(free && waiting), "somebody waits beside a free place");
        Ok(())
    }

    fn step(&mut self, worker: usize, attempt: usize, tokens: u32, fault: Fault) {
        let count = self.workers.len().max(1);
        let Some((id, _, _, running)) = self.workers.get_mut(worker % count) else { return };
        let count = running.len().max(1);
        let Some(one) = running.get_mut(attempt % count) else { return };
        let mut events = vec![(one.attempt, WorkerEvent::Started { cached_tokens: None })];
        for _ in 0..tokens.min(one.max_tokens - one.next) {
            events.push((one.attempt, WorkerEvent::Token(token(one.next, oracle(one.prompt, one.next)))));
            one.next += 1;
        }
        if one.next == one.max_tokens {
            events.push((one.attempt, WorkerEvent::Finished(Finish::Length)));
        }
        let (attempt, id) = (one.attempt, *id);
        match fault {
            Fault::None => {}
            Fault::Repeat => {
                let last = events[events.len() - 1].clone();
                events.push(last);
            }
            // A stream keeps order, so what gets lost is seen by what follows; an end that follows directly is believed.
            Fault::Skip if matches!(events.get(2), Some((_, WorkerEvent::Token(_)))) => {
                events.remove(1);
            }
            Fault::Skip => {}
            Fault::Drop => events = vec![(attempt, WorkerEvent::Cancelled)],
        }
        if events.iter().any(|(_, event)| matches!(event, WorkerEvent::Finished(_) | WorkerEvent::Cancelled)) {
            running.retain(|one| one.attempt != attempt);
        }
        self.scheduler.events(self.now, id, events);
    }

    fn apply(&mut self, op: Op) -> Result<(), TestCaseError> {
        let count = self.workers.len().max(1);
        match op {
            Op::Admit { n, max_tokens } => {
                let prompt = 1 + self.clients.len() % 7;
                if let Ok(ids) = self.scheduler.admit(self.now, vec![request(prompt, max_tokens); n]) {
                    for id in ids {
                        self.clients.insert(id, Client { prompt, max_tokens, ..Client::default() });
                    }
                }
            }
            Op::Cancel(nth) => {
                if let Some((id, client)) = self.clients.iter_mut().nth(nth) {
                    client.cancelled |= !client.ended;
                    self.scheduler.cancel(self.now, *id);
                }
            }
            Op::Up(batch) if self.workers.len() < 4 => {
                self.next_worker += 1;
                let id = WorkerId(self.next_worker);
                self.workers.push((id, batch, false, Vec::new()));
                self.scheduler.worker_up(id, limits(batch));
            }
            Op::Up(_) => {}
            Op::Down(worker) => {
                if worker < self.workers.len() {
                    let (id, ..) = self.workers.remove(worker);
                    self.scheduler.worker_down(self.now, id);
                }
            }
            Op::Ready(worker, ready) => {
                if let Some(slot) = self.workers.get_mut(worker % count) {
                    slot.2 = ready;
                    let id = slot.0;
                    self.scheduler.set_ready(self.now, id, ready);
                }
            }
            Op::Step { worker, attempt, tokens, fault } => self.step(worker, attempt, tokens, fault),
            Op::Tick(seconds) => {
                self.now += Duration::from_secs(seconds);
                self.scheduler.tick(self.now);
            }
        }
        self.settle()
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn every_client_sees_the_uninterrupted_stream(ops in prop::collection::vec(op(), 1..120)) {
        let mut world = World {
            scheduler: Scheduler::new(6),
            now: Duration::ZERO,
            workers: Vec::new(),
            clients: BTreeMap::new(),
            next_worker: 0,
        };
        world.apply(Op::Up(2))?;
        for op in ops {
            world.apply(op)?;
        }
        // Then the weather clears: a worker that works brings everybody to the end.
        if world.workers.is_empty() {
            world.apply(Op::Up(2))?;
        }
        for worker in 0..world.workers.len() {
            world.apply(Op::Ready(worker, true))?;
        }
        for round in 0..2000 {
            if world.scheduler.is_idle() {
                break;
            }
            world.apply(Op::Step { worker: round % 4, attempt: round / 4, tokens: 2, fault: Fault::None })?;
        }
        prop_assert!(world.scheduler.is_idle(), "somebody never ended");
        for (id, client) in &world.clients {
            prop_assert!(client.ended || client.cancelled, "{:?} has no end", id);
            let whole = client.tokens.len() == client.max_tokens as usize;
            prop_assert!(client.cancelled || client.failed || whole);
        }
    }
}
