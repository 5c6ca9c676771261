//! Shows how far the workers are with loading: a bar for each on a terminal, a plain line now and then elsewhere. The numbers come
//! from the workers' `/readyz`.

use std::{
    io::{self, IsTerminal as _, Write as _},
    sync::{
        OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::Value;

use crate::bytes::gib;

/// How often the workers are asked.
pub const INTERVAL: Duration = Duration::from_millis(300);
/// How often a plain line is printed at most.
const LINE_INTERVAL: Duration = Duration::from_secs(5);
/// A worker that does not answer within this time is asked again later.
const ANSWER_LIMIT: Duration = Duration::from_millis(200);

/// The bars of this process, if standard error is a terminal.
fn bars() -> Option<&'static MultiProgress> {
    static BARS: OnceLock<Option<MultiProgress>> = OnceLock::new();
    BARS.get_or_init(|| io::stderr().is_terminal().then(|| MultiProgress::with_draw_target(ProgressDrawTarget::stderr()))).as_ref()
}

/// Writes a line to standard error without tearing the bars.
pub fn print_line(text: &str) {
    let write = || {
        // A closed standard error is no reason to end.
        let _ = writeln!(io::stderr().lock(), "{text}");
    };
    match bars() {
        Some(bars) => bars.suspend(write),
        None => write(),
    }
}

/// Whether standard error is to hold JSON lines only.
static JSON: AtomicBool = AtomicBool::new(false);

/// Makes [`say`] write log events instead of plain lines.
pub fn say_json() {
    JSON.store(true, Ordering::Relaxed);
}

/// Lines of the supervisor's own.
pub fn say(text: &str) {
    for line in text.lines() {
        if JSON.load(Ordering::Relaxed) {
            tracing::info!("{line}");
        } else {
            print_line(&format!("[up] {line}"));
        }
    }
}

/// The display of one start.
pub struct Loading {
    client: Option<reqwest::Client>,
    workers: Vec<Worker>,
    last_line: Instant,
}

struct Worker {
    name: String,
    url: String,
    bar: Option<ProgressBar>,
    /// When it was first watched: speeds are counted from here.
    since: Instant,
}

impl Loading {
    /// Nothing to show yet.
    pub fn new() -> Self {
        Self {
            client: reqwest::Client::builder().timeout(ANSWER_LIMIT).no_proxy().build().ok(),
            workers: Vec::new(),
            last_line: Instant::now(),
        }
    }

    /// A worker answers at `url` (`http://HOST:PORT`).
    pub fn watch(&mut self, name: &str, url: &str) {
        self.workers.retain(|worker| worker.name != name);
        self.workers.push(Worker { name: name.to_owned(), url: url.to_owned(), bar: None, since: Instant::now() });
    }

    /// Asks every worker once and shows what it says.
    pub async fn refresh(&mut self) {
        let Some(client) = &self.client else { return };
        let line_due = self.last_line.elapsed() >= LINE_INTERVAL;
        for worker in &mut self.workers {
            let Some((done, total)) = ask(client, &worker.url).await else {
                if let Some(bar) = worker.bar.take() {
                    bar.finish_and_clear();
                }
                continue;
            };
            match bars() {
                Some(bars) => {
                    let bar = worker
                        .bar
                        .get_or_insert_with(|| bars.add(ProgressBar::new(total).with_style(style()).with_prefix(worker.name.clone())));
                    bar.set_length(total);
                    bar.set_position(done);
                }
                None if line_due => {
                    let speed = done as f64 / 1e9 / worker.since.elapsed().as_secs_f64().max(1e-3);
                    say(&format!("{} has loaded {} of {} GiB ({speed:.2} GB/s)", worker.name, gib(done), gib(total)));
                    self.last_line = Instant::now();
                }
                None => {}
            }
        }
    }
}

impl Drop for Loading {
    fn drop(&mut self) {
        for bar in self.workers.iter_mut().filter_map(|worker| worker.bar.take()) {
            bar.finish_and_clear();
        }
    }
}

fn style() -> ProgressStyle {
    ProgressStyle::with_template("{prefix:<10} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}")
        .unwrap_or_else(|_| ProgressStyle::default_bar())
}

/// Bytes loaded and in all, while the worker is loading.
async fn ask(client: &reqwest::Client, url: &str) -> Option<(u64, u64)> {
    let report: Value = client.get(format!("{url}/readyz")).send().await.ok()?.json().await.ok()?;
    let progress = &report["progress"];
    Some((progress["done"].as_u64()?, progress["total"].as_u64()?))
}
