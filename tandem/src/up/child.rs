//! One child process: its start, its output, its end.

use std::{
    collections::VecDeque,
    ffi::OsString,
    io,
    process::Stdio,
    sync::Arc,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use parking_lot::Mutex;
use tokio::{
    io::{AsyncBufReadExt, AsyncRead, BufReader},
    process::{ChildStdin, Command},
    sync::mpsc::UnboundedSender,
    task::JoinHandle,
};

use super::{progress::print_line, restart::Cause};

/// Lines of standard error that are kept for the report of a death.
const TAIL_LINES: usize = 20;
/// How long a dead child's pipes may stay open (a grandchild may hold them) before its report goes out without their rest.
const PIPE_GRACE: Duration = Duration::from_millis(500);

/// How to start a child.
#[derive(Clone, Debug)]
pub struct Spec {
    /// Name within the instance: `serve`, `attn`, `experts-0`.
    pub name: String,
    /// `argv[0]`, which `ps` shows.
    pub process: &'static str,
    /// Arguments after `argv[0]`.
    pub args: Vec<OsString>,
}

/// What a child tells the supervisor. `index` is its place in the supervisor's list, `generation` counts its starts.
#[derive(Debug)]
pub enum Note {
    /// A line on its stdout.
    Line {
        /// Which child.
        index: usize,
        /// Which start of it.
        generation: u32,
        /// The line without its end.
        text: String,
    },
    /// It ended, and its output has been read.
    Exited {
        /// Which child.
        index: usize,
        /// Which start of it.
        generation: u32,
        /// Why.
        cause: Cause,
    },
}

/// A child that was started. Dropping it closes its stdin, at which it ends (`tandem_runtime::supervised`).
pub struct Child {
    /// Process id.
    pub pid: u32,
    /// Which start this is, from 1.
    pub generation: u32,
    /// When it was started.
    pub started: Instant,
    tail: Arc<Mutex<VecDeque<String>>>,
    _stdin: Option<ChildStdin>,
}

impl Child {
    /// Starts `spec` from this very executable, in a process group of its own so that a terminal's Ctrl-C reaches the supervisor
    /// alone, which then stops the roles in order. Its stderr is relayed line by line with its name before it.
    ///
    /// # Errors
    /// When the process cannot be started.
    pub fn start(spec: &Spec, index: usize, generation: u32, prefix: bool, notes: &UnboundedSender<Note>) -> io::Result<Self> {
        // Not current_exe(): after an upgrade in place that path leads to another version.
        let mut command = Command::new("/proc/self/exe");
        command.args(&spec.args).arg0(spec.process).process_group(0);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        for (name, _) in std::env::vars_os() {
            // The supervisor's own settings go down as flags; read again by a child they would be other layers' values.
            let text = name.to_string_lossy();
            if text.starts_with("TANDEM_") && !text.starts_with("TANDEM_TEST_") && !text.starts_with("TANDEM_KERNEL_") {
                command.env_remove(&name);
            }
        }
        let mut process = command.spawn()?;
        let pid = process.id().unwrap_or_default();
        let tail = Arc::new(Mutex::new(VecDeque::with_capacity(TAIL_LINES)));
        let stdin = process.stdin.take();
        let label = prefix.then(|| spec.name.clone());
        let errors = process.stderr.take().map(|pipe| relay_stderr(pipe, label, Arc::clone(&tail)));
        let lines = process.stdout.take().map(|pipe| read_stdout(pipe, index, generation, notes.clone()));
        let notes = notes.clone();
        tokio::spawn(async move {
            let cause = match process.wait().await {
                Ok(status) => Cause::from(status),
                Err(_) => Cause::Exit(-1),
            };
            for reader in [errors, lines].into_iter().flatten() {
                let _ = tokio::time::timeout(PIPE_GRACE, reader).await;
            }
            let _ = notes.send(Note::Exited { index, generation, cause });
        });
        Ok(Self { pid, generation, started: Instant::now(), tail, _stdin: stdin })
    }

    /// Sends a signal; a child that is gone already is no error.
    pub fn signal(&self, signal: Signal) {
        if let Ok(pid) = i32::try_from(self.pid)
            && pid > 0
        {
            let _ = kill(Pid::from_raw(pid), signal);
        }
    }

    /// Its last lines on stderr, oldest first.
    pub fn tail(&self) -> Vec<String> {
        self.tail.lock().iter().cloned().collect()
    }
}

fn relay_stderr(
    pipe: impl AsyncRead + Unpin + Send + 'static,
    label: Option<String>,
    tail: Arc<Mutex<VecDeque<String>>>,
) -> JoinHandle<()> {
    tokio::spawn(async move {
        let mut reader = BufReader::new(pipe);
        let mut raw = Vec::new();
        while let Ok(read @ 1..) = reader.read_until(b'\n', &mut raw).await {
            let text = String::from_utf8_lossy(&raw[..read]).trim_end().to_owned();
            raw.clear();
            match &label {
                Some(label) => print_line(&format!("[{label}] {text}")),
                None => print_line(&text),
            }
            let mut tail = tail.lock();
            if tail.len() == TAIL_LINES {
                tail.pop_front();
            }
            tail.push_back(text);
        }
    })
}

fn read_stdout(
    pipe: impl AsyncRead + Unpin + Send + 'static,
    index: usize,
    generation: u32,
    notes: UnboundedSender<Note>,
) -> JoinHandle<()> {
    tokio::spawn(async move {
        let mut lines = BufReader::new(pipe).lines();
        while let Ok(Some(text)) = lines.next_line().await {
            if notes.send(Note::Line { index, generation, text }).is_err() {
                return;
            }
        }
    })
}
