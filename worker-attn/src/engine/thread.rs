//! The step thread: one dedicated OS thread that owns the engine and does nothing but steps.
//!
//! Neighbours: `service/` holds the [`Mailbox`] and reads [`Load`] into heartbeats.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
        mpsc::{self, Receiver, RecvTimeoutError, Sender},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use tandem_kernels::Backend;
use tandem_proto::attn::v1::ErrorCode;

use super::{Engine, sequence::Request};
use crate::{
    cancel::Cancelled,
    hop::{Hop, HopReport},
    model::StepError,
    telemetry,
};

/// How long an idle thread sleeps before it looks after its links.
const IDLE: Duration = Duration::from_millis(100);
/// Steps in a row that the device may fail before the worker gives up (and is started anew by whoever supervises it).
const MAX_FAILED_STEPS: u32 = 3;

/// What the thread is told.
enum Command {
    Submit(Box<Request>),
    Cancel(u64),
    Clear,
    Stop,
}

/// Sends to the step thread. Never blocks.
#[derive(Clone)]
pub struct Mailbox {
    commands: Sender<Command>,
    cancelled: Cancelled,
}

impl Mailbox {
    /// A request joins at a step boundary.
    pub fn submit(&self, request: Request) {
        self.send(Command::Submit(Box::new(request)));
    }

    /// A request is not wanted any more: everything it holds is free within one step.
    pub fn cancel(&self, id: u64) {
        self.cancelled.add(id);
        self.send(Command::Cancel(id));
    }

    /// None of the requests submitted so far is wanted any more, and nobody is to hear of them.
    pub fn clear(&self) {
        self.cancelled.add_all();
        self.send(Command::Clear);
    }

    /// The thread is to end.
    pub fn stop(&self) {
        self.cancelled.add_all();
        self.send(Command::Stop);
    }

    fn send(&self, command: Command) {
        // A thread that is gone has reported why; nothing is left to be told.
        let _ = self.commands.send(command);
    }
}

/// What the worker is doing, for heartbeats. Written by the step thread after each step.
#[derive(Debug, Default)]
pub struct Load {
    running: AtomicU32,
    waiting: AtomicU32,
    kv_used: AtomicU64,
    kv_total: AtomicU64,
    rows: AtomicU64,
    busy_nanos: AtomicU64,
    reachable: Mutex<Vec<u32>>,
    hop: Mutex<HopReport>,
}

impl Load {
    /// Sequences that hold state, sequences that wait.
    pub fn sequences(&self) -> (u32, u32) {
        (self.running.load(Ordering::Relaxed), self.waiting.load(Ordering::Relaxed))
    }

    /// Token places in use, in all.
    pub fn kv_tokens(&self) -> (u64, u64) {
        (self.kv_used.load(Ordering::Relaxed), self.kv_total.load(Ordering::Relaxed))
    }

    /// Rows computed since start.
    pub fn rows(&self) -> u64 {
        self.rows.load(Ordering::Relaxed)
    }

    /// Time in steps since start.
    pub fn busy(&self) -> Duration {
        Duration::from_nanos(self.busy_nanos.load(Ordering::Relaxed))
    }

    /// Shards whose rows would be computed now.
    pub fn reachable(&self) -> Vec<u32> {
        self.reachable.lock().clone()
    }

    /// How the remote side does.
    pub fn hop(&self) -> HopReport {
        self.hop.lock().clone()
    }
}

/// Makes the pieces that outlive the thread: the cancellations go to the hop, the mailbox to the service.
pub fn mailbox() -> (Mailbox, Inbox, Cancelled) {
    let (commands, receiver) = mpsc::channel();
    let cancelled = Cancelled::default();
    (Mailbox { commands, cancelled: cancelled.clone() }, Inbox { commands: receiver, cancelled: cancelled.clone() }, cancelled)
}

/// The thread's end of a [`Mailbox`].
pub struct Inbox {
    commands: Receiver<Command>,
    cancelled: Cancelled,
}

/// Starts the thread; `make` builds the engine on it. The handle gives the failure that ended it, if one did.
///
/// # Errors
/// The thread cannot be started.
pub fn spawn<B: Backend, H: Hop<B> + 'static>(
    inbox: Inbox,
    load: Arc<Load>,
    make: impl FnOnce() -> Result<Engine<B, H>, StepError> + Send + 'static,
) -> io::Result<JoinHandle<Result<(), StepError>>> {
    std::thread::Builder::new().name("step".into()).spawn(move || run(make()?, &inbox, &load))
}

fn run<B: Backend, H: Hop<B>>(mut engine: Engine<B, H>, inbox: &Inbox, load: &Load) -> Result<(), StepError> {
    let mut failed_steps = 0;
    let mut tended = Instant::now();
    publish(&mut engine, load, true);
    loop {
        if engine.is_idle() {
            engine.runner().hop().idle();
            match inbox.commands.recv_timeout(IDLE) {
                Ok(command) => {
                    if !take(&mut engine, inbox, command) {
                        return Ok(());
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
            }
        }
        while let Ok(command) = inbox.commands.try_recv() {
            if !take(&mut engine, inbox, command) {
                return Ok(());
            }
        }
        if engine.is_idle() {
            engine.runner().hop().tend();
            publish(&mut engine, load, true);
            continue;
        }
        let timer = Instant::now();
        match engine.step(timer) {
            Ok(rows) => {
                failed_steps = 0;
                load.rows.fetch_add(rows as u64, Ordering::Relaxed);
            }
            Err(e) => {
                failed_steps += 1;
                tracing::error!(error = %e, failed_steps, "step failed");
                if failed_steps == MAX_FAILED_STEPS {
                    engine.fail_all(ErrorCode::Internal, &format!("the attention worker gave up: {e}"));
                    return Err(e);
                }
            }
        }
        load.busy_nanos.fetch_add(timer.elapsed().as_nanos() as u64, Ordering::Relaxed);
        let look = tended.elapsed() > IDLE;
        publish(&mut engine, load, look);
        if look {
            tended = Instant::now();
        }
    }
}

/// Carries a command out; `false` ends the thread.
fn take<B: Backend, H: Hop<B>>(engine: &mut Engine<B, H>, inbox: &Inbox, command: Command) -> bool {
    match command {
        Command::Submit(request) => engine.submit(*request),
        Command::Cancel(id) => {
            engine.cancel(id);
            inbox.cancelled.forget(id);
        }
        Command::Clear => {
            engine.clear();
            inbox.cancelled.forget_all();
        }
        Command::Stop => return false,
    }
    true
}

fn publish<B: Backend, H: Hop<B>>(engine: &mut Engine<B, H>, load: &Load, hop: bool) {
    let (running, waiting) = engine.counts();
    let (used, total) = engine.kv_tokens();
    load.running.store(running as u32, Ordering::Relaxed);
    load.waiting.store(waiting as u32, Ordering::Relaxed);
    load.kv_used.store(used as u64, Ordering::Relaxed);
    load.kv_total.store(total as u64, Ordering::Relaxed);
    if hop {
        *load.reachable.lock() = engine.runner().hop().reachable();
        *load.hop.lock() = engine.runner().hop().report();
    }
    telemetry::load(running, waiting, used, total);
    engine.publish_memory();
}
