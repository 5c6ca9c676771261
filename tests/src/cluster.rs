//! Starts `tandem` processes and finds their parts.

use std::{
    collections::VecDeque,
    io::{BufRead, BufReader},
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use parking_lot::Mutex;

use crate::Client;

/// Slowest start that is still no hang: an unoptimised build on two busy cores.
const START_LIMIT: Duration = Duration::from_secs(120);

/// The `tandem` binary: `$TANDEM_BIN`, or the one beside the test executable's profile folder.
pub fn binary() -> PathBuf {
    if let Some(path) = std::env::var_os("TANDEM_BIN") {
        return path.into();
    }
    let exe = std::env::current_exe().expect("own path");
    let profile = exe.parent().and_then(|deps| deps.parent()).expect("target/<profile>/deps");
    let bin = profile.join("tandem");
    assert!(bin.exists(), "{} is not built: run `cargo build -p tandem` first (scripts/test does)", bin.display());
    bin
}

/// A command line to start.
#[derive(Debug, Default)]
pub struct Launch {
    args: Vec<String>,
    envs: Vec<(String, String)>,
}

impl Launch {
    /// `tandem up` on a free port; the model is called "any".
    pub fn up() -> Self {
        Self::role("up").args(["--port", "0", "--served-model-name", "any"])
    }

    /// `tandem serve` on free ports, for roles that are started apart; the model is called "any".
    pub fn serve() -> Self {
        Self::role("serve").args(["--port", "0", "--control-addr", "127.0.0.1:0", "--served-model-name", "any", "--expert-workers", "1"])
    }

    /// Any subcommand.
    pub fn role(name: &str) -> Self {
        Self { args: vec![name.to_owned()], envs: Vec::new() }
    }

    /// Adds arguments.
    #[must_use]
    pub fn args<S: Into<String>>(mut self, args: impl IntoIterator<Item = S>) -> Self {
        self.args.extend(args.into_iter().map(Into::into));
        self
    }

    /// Adds `--model DIR`.
    #[must_use]
    pub fn model(self, dir: &std::path::Path) -> Self {
        self.args(["--model".to_owned(), dir.display().to_string()])
    }

    /// Adds an environment variable.
    #[must_use]
    pub fn env(mut self, key: &str, value: &str) -> Self {
        self.envs.push((key.to_owned(), value.to_owned()));
        self
    }

    /// Starts the process; does not wait for anything.
    pub fn spawn(self) -> Cluster {
        let mut command = Command::new(binary());
        command.args(&self.args).envs(self.envs.iter().map(|(k, v)| (k, v)));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("tandem starts");
        let log = Arc::new(Mutex::new(VecDeque::new()));
        let (stdout_tx, stdout) = mpsc::channel();
        let out = BufReader::new(child.stdout.take().expect("piped"));
        thread::spawn(move || out.lines().map_while(Result::ok).for_each(|line| drop(stdout_tx.send(line))));
        let err = BufReader::new(child.stderr.take().expect("piped"));
        let sink = Arc::clone(&log);
        thread::spawn(move || {
            for line in err.lines().map_while(Result::ok) {
                sink.lock().push_back(line);
            }
        });
        Cluster { child, stdout: Mutex::new(stdout), log, base: String::new(), command: self.args.join(" ") }
    }

    /// Starts the process and waits for its `READY` line.
    pub fn ready(self) -> Cluster {
        let mut cluster = self.spawn();
        let line = cluster.wait_for_line("READY ", START_LIMIT);
        cluster.base = line.trim_start_matches("READY ").trim().to_owned();
        cluster
    }
}

/// A running `tandem` process and its children. Dropping it stops them all.
pub struct Cluster {
    child: Child,
    stdout: Mutex<mpsc::Receiver<String>>,
    log: Arc<Mutex<VecDeque<String>>>,
    base: String,
    command: String,
}

impl Cluster {
    /// `http://HOST:PORT` of the coordinator.
    pub fn base(&self) -> &str {
        &self.base
    }

    /// A client of the coordinator.
    pub fn client(&self) -> Client {
        Client::new(&self.base)
    }

    /// The next line of standard output that starts with `prefix`.
    pub fn wait_for_line(&mut self, prefix: &str, limit: Duration) -> String {
        let until = Instant::now() + limit;
        loop {
            let line = self.stdout.lock().recv_timeout(until.saturating_duration_since(Instant::now()));
            match line {
                Ok(line) if line.starts_with(prefix) => return line,
                Ok(_) => {}
                Err(why) => {
                    let status = self.child.try_wait();
                    panic!("`tandem {}` printed no {prefix:?} ({why}; status {status:?}):\n{}", self.command, self.stderr());
                }
            }
        }
    }

    /// Everything on standard error so far.
    pub fn stderr(&self) -> String {
        self.log.lock().iter().fold(String::new(), |all, line| all + line + "\n")
    }

    /// Waits until standard error holds `text`.
    pub fn wait_for_stderr(&self, text: &str, limit: Duration) {
        let until = Instant::now() + limit;
        while !self.stderr().contains(text) {
            assert!(Instant::now() < until, "no {text:?} on standard error of `tandem {}`:\n{}", self.command, self.stderr());
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Process id of the started process.
    pub fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).expect("pid")
    }

    /// Process ids of descendants whose argv\[0\] is `name` (`tandem-serve`, `tandem-attn`, `tandem-experts`), oldest first.
    pub fn pids(&self, name: &str) -> Vec<i32> {
        let mut found: Vec<i32> = descendants(self.pid()).into_iter().filter(|pid| argv0(*pid).as_deref() == Some(name)).collect();
        found.sort_unstable();
        found
    }

    /// All descendants.
    pub fn descendants(&self) -> Vec<i32> {
        descendants(self.pid())
    }

    /// Sends a signal to the started process.
    pub fn signal(&self, signal: Signal) {
        send(self.pid(), signal);
    }

    /// Waits for the started process to end and returns its exit code (`None` for a signal).
    pub fn wait_exit(&mut self, limit: Duration) -> Option<i32> {
        let until = Instant::now() + limit;
        loop {
            if let Some(status) = self.child.try_wait().expect("wait") {
                return status.code();
            }
            assert!(Instant::now() < until, "`tandem {}` still runs after {limit:?}:\n{}", self.command, self.stderr());
            thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        let family = self.descendants();
        if matches!(self.child.try_wait(), Ok(None)) {
            send(self.pid(), Signal::SIGTERM);
            send(self.pid(), Signal::SIGTERM);
            let until = Instant::now() + Duration::from_secs(10);
            while matches!(self.child.try_wait(), Ok(None)) && Instant::now() < until {
                thread::sleep(Duration::from_millis(10));
            }
            let _already_gone = self.child.kill();
            let _status = self.child.wait();
        }
        for pid in family {
            send(pid, Signal::SIGKILL);
        }
        if thread::panicking() {
            eprintln!("---- standard error of `tandem {}` ----\n{}", self.command, self.stderr());
        }
    }
}

/// Sends a signal, whether or not the process still exists.
pub fn send(pid: i32, signal: Signal) {
    let _gone = kill(Pid::from_raw(pid), signal);
}

/// Whether a process exists and is no zombie.
pub fn alive(pid: i32) -> bool {
    stat(pid).is_some_and(|(_, state)| state != 'Z')
}

fn argv0(pid: i32) -> Option<String> {
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let first = line.split(|b| *b == 0).next()?;
    let name = String::from_utf8_lossy(first).into_owned();
    Some(name.rsplit('/').next().unwrap_or(&name).to_owned())
}

/// Parent and state of a process.
fn stat(pid: i32) -> Option<(i32, char)> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let rest = text.rsplit_once(") ")?.1;
    let mut fields = rest.split(' ');
    let state = fields.next()?.chars().next()?;
    Some((fields.next()?.parse().ok()?, state))
}

fn descendants(root: i32) -> Vec<i32> {
    let all: Vec<(i32, i32)> = std::fs::read_dir("/proc")
        .map(|dir| {
            dir.flatten()
                .filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok())
                .filter_map(|pid| Some((pid, stat(pid)?)))
                .filter(|(_, (_, state))| *state != 'Z')
                .map(|(pid, (parent, _))| (pid, parent))
                .collect()
        })
        .unwrap_or_default();
    let mut found = vec![root];
    let mut next = 0;
    while next < found.len() {
        let parent = found[next];
        found.extend(all.iter().filter(|(_, p)| *p == parent).map(|(pid, _)| *pid));
        next += 1;
    }
    found.split_off(1)
}
