//! Scripted workers. Dropping one is its kill -9: its streams end without a word.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tandem_proto::attn::v1 as attn;
use tandem_proto::attn::v1::attn_client::AttnClient;
use tandem_proto::control::v1 as control;
use tandem_proto::control::v1::control_client::ControlClient;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::Streaming;
use tonic::transport::Channel;

use super::{hello, within};

/// What the scripted model says at `index` after `prompt`.
pub fn oracle(prompt: &[u32], index: u32) -> u32 {
    prompt.iter().fold(index.wrapping_mul(7919) + 13, |hash, id| hash.wrapping_mul(31).wrapping_add(*id)) % 200
}

pub fn oracle_stream(prompt: &[u32], tokens: u32) -> Vec<u32> {
    (0..tokens).map(|index| oracle(prompt, index)).collect()
}

async fn dial(addr: SocketAddr) -> Channel {
    let endpoint = Channel::from_shared(format!("http://{addr}")).expect("a URI");
    within("dial", endpoint.connect()).await.expect("the coordinator listens")
}

/// A control.v1 stream by hand.
pub struct Control {
    pub send: mpsc::UnboundedSender<control::WorkerMessage>,
    pub receive: Streaming<control::CoordinatorMessage>,
}

impl Control {
    pub async fn dial(addr: SocketAddr, hello: control::Hello) -> Self {
        let (send, messages) = mpsc::unbounded_channel();
        let control = Self::message(control::worker_message::Message::Hello(hello));
        send.send(control).expect("open");
        let mut client = ControlClient::new(dial(addr).await);
        let receive = within("join", client.join(UnboundedReceiverStream::new(messages))).await.expect("a stream").into_inner();
        Self { send, receive }
    }

    fn message(message: control::worker_message::Message) -> control::WorkerMessage {
        control::WorkerMessage { message: Some(message) }
    }

    /// The next message; `None` when the stream is over.
    pub async fn next(&mut self) -> Option<control::coordinator_message::Message> {
        within("a control message", self.receive.message()).await.ok().flatten().and_then(|message| message.message)
    }

    /// The next route table for which `good` holds.
    pub async fn routes(&mut self, good: impl Fn(&control::RouteTable) -> bool) -> control::RouteTable {
        loop {
            match self.next().await.expect("a live stream") {
                control::coordinator_message::Message::Routes(table) if good(&table) => return table,
                _ => {}
            }
        }
    }

    pub fn beat(&self, state: control::WorkerState, shards_ready: Vec<u32>) {
        let beat = control::Heartbeat { state: state.into(), shards_ready, ..control::Heartbeat::default() };
        let _ = self.send.send(Self::message(control::worker_message::Message::Heartbeat(beat)));
    }
}

/// A worker that beats for as long as it lives.
pub struct Beating {
    task: JoinHandle<()>,
    stalled: Arc<AtomicBool>,
}

impl Drop for Beating {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Beating {
    pub async fn join(addr: SocketAddr, name: &str, epoch: u64) -> Self {
        Self::join_as(addr, hello(name, epoch)).await
    }

    /// Joins and reports Ready with all its shards. Comes back by itself when its stream ends.
    pub async fn join_as(addr: SocketAddr, hello: control::Hello) -> Self {
        let stalled = Arc::new(AtomicBool::new(false));
        let mut control = Control::dial(addr, hello.clone()).await;
        let mut shards = accepted(&mut control).await;
        let stall = Arc::clone(&stalled);
        let task = tokio::spawn(async move {
            loop {
                if stall.load(Ordering::Relaxed) {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                    continue;
                }
                control.beat(control::WorkerState::Ready, shards.clone());
                let message = tokio::time::timeout(Duration::from_millis(20), control.receive.message()).await;
                if matches!(message, Ok(Ok(None) | Err(_))) {
                    control = Control::dial(addr, hello.clone()).await;
                    shards = accepted(&mut control).await;
                }
            }
        });
        Self { task, stalled }
    }

    /// As SIGSTOP (`true`) and SIGCONT (`false`): the streams stay open, nothing moves.
    pub fn stall(&self, stalled: bool) {
        self.stalled.store(stalled, Ordering::Relaxed);
    }
}

async fn accepted(control: &mut Control) -> Vec<u32> {
    match control.next().await {
        Some(control::coordinator_message::Message::Accept(accept)) => accept.shards.iter().map(|shard| shard.id).collect(),
        other => panic!("not accepted: {other:?}"),
    }
}

/// What a scripted attention worker has seen.
#[derive(Default)]
pub struct Seen {
    pub submits: Vec<attn::Submit>,
    pub cancels: Vec<u64>,
}

/// An attention worker whose tokens are [`oracle`]'s.
pub struct Attn {
    beating: Beating,
    task: JoinHandle<()>,
    pub seen: Arc<Mutex<Seen>>,
    paused: Arc<AtomicBool>,
}

impl Drop for Attn {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Attn {
    pub async fn join(addr: SocketAddr, name: &str, epoch: u64, lives: u32) -> Self {
        Self::join_as(addr, hello(name, epoch), lives).await
    }

    /// Joins, attaches, and serves until it has sent `lives` tokens; then its streams end.
    pub async fn join_as(addr: SocketAddr, hello: control::Hello, lives: u32) -> Self {
        let (name, epoch) = (hello.name.clone(), hello.epoch);
        let beating = Beating::join_as(addr, hello).await;
        let seen = Arc::new(Mutex::new(Seen::default()));
        let paused = Arc::new(AtomicBool::new(false));
        let left = Arc::new(AtomicU32::new(lives));
        let (see, pause, stall) = (Arc::clone(&seen), Arc::clone(&paused), Arc::clone(&beating.stalled));
        let task = tokio::spawn(async move {
            loop {
                serve(addr, &name, epoch, &see, &left, &[&pause, &stall]).await;
                if left.load(Ordering::Relaxed) == 0 {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
        Self { beating, task, seen, paused }
    }

    /// Holds the step loop (`true`) while the process stays alive.
    pub fn pause(&self, paused: bool) {
        self.paused.store(paused, Ordering::Relaxed);
    }

    pub fn stall(&self, stalled: bool) {
        self.beating.stall(stalled);
    }

    /// Whether its tokens are used up and its streams gone.
    pub fn is_dead(&self) -> bool {
        self.task.is_finished()
    }
}

struct Sequence {
    id: u64,
    prompt: Vec<u32>,
    next: u32,
    max: u32,
    started: bool,
}

async fn serve(addr: SocketAddr, name: &str, epoch: u64, seen: &Mutex<Seen>, left: &AtomicU32, holds: &[&AtomicBool]) {
    let (send, messages) = mpsc::unbounded_channel();
    let attach = attn::from_worker::Message::Attach(attn::Attach { name: name.into(), epoch });
    let _ = send.send(attn::FromWorker { message: Some(attach) });
    let mut client = AttnClient::new(dial(addr).await);
    let Ok(stream) = client.serve(UnboundedReceiverStream::new(messages)).await else { return };
    let mut stream = stream.into_inner();
    let mut running: Vec<Sequence> = Vec::new();
    loop {
        let held = holds.iter().any(|hold| hold.load(Ordering::Relaxed));
        match tokio::time::timeout(Duration::from_millis(1), stream.message()).await {
            Ok(Ok(Some(attn::ToWorker { message: Some(message) }))) => {
                receive(message, seen, &mut running);
                continue;
            }
            Ok(_) => return,
            Err(_) => {}
        }
        if held {
            continue;
        }
        let mut events = Vec::new();
        for sequence in &mut running {
            let mut say = |kind| events.push(attn::Event { request_id: sequence.id, kind: Some(kind) });
            if !std::mem::replace(&mut sequence.started, true) {
                say(attn::event::Kind::Started(attn::Started::default()));
            }
            if sequence.next < sequence.max {
                let id = oracle(&sequence.prompt, sequence.next);
                say(attn::event::Kind::Token(attn::Token { id, index: sequence.next, ..attn::Token::default() }));
                sequence.next += 1;
                if left.fetch_sub(1, Ordering::Relaxed) == 1 {
                    // Dies in the middle of a step: what it has not sent is lost.
                    let _ = send
                        .send(attn::FromWorker { message: Some(attn::from_worker::Message::Events(attn::StepEvents { events, rows: 1 })) });
                    tokio::time::sleep(Duration::from_millis(2)).await;
                    return;
                }
            }
            if sequence.next == sequence.max {
                let reason = attn::FinishReason::Length.into();
                events.push(attn::Event {
                    request_id: sequence.id,
                    kind: Some(attn::event::Kind::Finish(attn::Finish { reason, stop_id: None })),
                });
            }
        }
        running.retain(|sequence| sequence.next < sequence.max);
        if !events.is_empty() {
            let events = attn::from_worker::Message::Events(attn::StepEvents { events, rows: 1 });
            let _ = send.send(attn::FromWorker { message: Some(events) });
        }
    }
}

fn receive(message: attn::to_worker::Message, seen: &Mutex<Seen>, running: &mut Vec<Sequence>) {
    match message {
        attn::to_worker::Message::Submit(submit) => {
            let emitted: Vec<u32> = oracle_stream(&submit.prompt_ids, submit.emitted_ids.len() as u32);
            assert_eq!(submit.emitted_ids, emitted, "the journal is what the model said");
            running.push(Sequence {
                id: submit.request_id,
                prompt: submit.prompt_ids.clone(),
                next: submit.emitted_ids.len() as u32,
                max: submit.max_tokens,
                started: false,
            });
            seen.lock().submits.push(submit);
        }
        attn::to_worker::Message::Cancel(cancel) => {
            running.retain(|sequence| sequence.id != cancel.request_id);
            seen.lock().cancels.push(cancel.request_id);
        }
        attn::to_worker::Message::Vocabulary(_) => {}
    }
}
