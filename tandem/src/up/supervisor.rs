//! Runs the roles: start order, READY, deaths and restarts, drain.

use std::{
    collections::BTreeMap,
    net::{SocketAddr, ToSocketAddrs as _},
    time::{Duration, Instant},
};

use nix::sys::signal::Signal;
use tandem_model::Checkpoint;
use tandem_runtime::{Shutdown, config::Setting, exit, process, signals};
use tokio::{
    sync::mpsc::{self, UnboundedReceiver, UnboundedSender},
    time::{sleep_until, timeout_at},
};

use super::{
    child::{Child, Note, Spec},
    children::{self, Recipe},
    cores::{self, Share},
    devices,
    progress::{self, Loading, say},
    restart::{Cause, History, Verdict},
};
use crate::{
    cli::{
        UpArgs,
        values::{Device, LogFormat},
    },
    failure::Failure,
    model,
    plan::{self, layout::Ask, sizes::Sizes},
};

/// How long the coordinator may take to say where workers join.
const CONTROL_TIMEOUT: Duration = Duration::from_secs(30);
/// What a child may take to end beyond its own shutdown timeout, before it is killed.
const STOP_GRACE: Duration = Duration::from_secs(5);

/// Place of the coordinator in the list of children.
const SERVE: usize = 0;

/// Runs a whole instance until it is told to stop.
///
/// # Errors
/// When the plan cannot be, or a role does not start; every child is gone by then.
pub async fn run(args: UpArgs, settings: &[Setting]) -> Result<(), Failure> {
    let shutdown = Shutdown::new();
    signals::install(shutdown.clone()).map_err(|error| Failure::internal(format!("cannot handle signals: {error}")))?;
    let prefix = args.common.log_format == LogFormat::Text;
    if !prefix {
        progress::say_json();
    }
    let started = Instant::now();
    check_port(&args.http.host, args.http.port)?;
    let prepared = prepare(&args).await?;
    for note in &prepared.notes {
        say(note);
    }
    say(&prepared.plan);

    let recipe = Recipe {
        settings,
        model: &prepared.model.dir,
        served_model_name: &prepared.model.name,
        expert_workers: prepared.experts.len(),
        max_seq_len: prepared.max_seq_len,
    };
    let (notes, inbox) = mpsc::unbounded_channel();
    let drain_limit = args.common.shutdown_timeout.0 + STOP_GRACE;
    let mut instance = Instance {
        slots: Vec::new(),
        notes,
        inbox,
        ready: false,
        drain_asked: false,
        prefix,
        started,
        due: BTreeMap::new(),
        loading: Some(Loading::new()),
    };
    let outcome = tokio::select! {
        biased;
        () = shutdown.stopping() => Ok(()),
        outcome = instance.serve(&recipe, &prepared, &args, &shutdown) => outcome,
    };
    let outcome = match outcome {
        Ok(()) if !shutdown.is_stopping() => instance.drain(drain_limit, &shutdown).await,
        other => other,
    };
    instance.kill_all().await;
    match outcome {
        Ok(()) if shutdown.is_stopping() => Err(Failure::stopped()),
        other => other,
    }
}

struct Prepared {
    model: model::Located,
    plan: String,
    max_seq_len: u64,
    /// What was found and chosen, for the user.
    notes: Vec<String>,
    /// The coordinator is told that all experts are resident.
    all_resident: bool,
    /// Names and devices of the expert workers.
    experts: Vec<(String, Device)>,
    attn_share: Share,
    expert_shares: Vec<Share>,
}

/// Opens the checkpoint's headers and makes the plan, off the runtime's thread.
async fn prepare(args: &UpArgs) -> Result<Prepared, Failure> {
    let args = args.clone();
    tokio::task::spawn_blocking(move || prepare_now(&args)).await.map_err(|error| Failure::internal(error.to_string()))?
}

fn prepare_now(args: &UpArgs) -> Result<Prepared, Failure> {
    let model = model::locate(&args.model, args.http.served_model_name.as_deref())?;
    let checkpoint = Checkpoint::open_as(&model.dir, args.model.load_format.into())
        .map_err(|error| Failure::config(error.to_string()))?
        .with_fp8(args.limits.fp8.groups());
    let resident = args.split.resident()?;
    let choice = devices::choose(args.attn, &args.experts, &resident)?;
    let resident = if choice.all_resident { tandem_model::Resident::All } else { resident };
    let devices = choice.experts;
    // All workers on the CPU share its memory; each GPU has its own.
    let (here, on) = devices::rooms([args.attn].iter().chain(&devices))?;
    let sizes = Sizes::of(&checkpoint);
    let limits = plan::limits(&args.limits, checkpoint.geometry(), !devices.is_empty())?;
    let precision = args.model.dtype.into();
    let ask = Ask {
        kinds: here.iter().map(|d| d.kind).collect(),
        attn: on[0],
        experts: on[1..].to_vec(),
        split: args.split.split.into(),
        resident,
        limits,
        precision,
        latents: args.limits.kv_cache_dtype.stored(precision),
        threads: args.compute.threads.map_or_else(plan::cores, |n| n as usize),
        paging: args.compute.allow_paging,
        cache: args.limits.cache.options(),
        parking: args.limits.parking(),
    };
    let layout = plan::layout::lay_out(&sizes, &ask).map_err(|error| Failure::config(error.to_string()))?;
    let lines = plan::text::lines(&sizes, &layout, &here);
    plan::check(&sizes, &layout, &here).map_err(|short| plan::refusal(&short))?;
    let experts: Vec<(String, Device)> =
        devices.into_iter().enumerate().map(|(index, device)| (format!("experts-{index}"), device)).collect();
    let (attn_share, expert_shares) = cores::shares(&args.compute, args.split.split, experts.len());
    Ok(Prepared {
        model,
        plan: lines.trim_end().to_owned(),
        max_seq_len: limits.max_seq_len as u64,
        notes: choice.notes,
        all_resident: choice.all_resident,
        attn_share,
        expert_shares,
        experts,
    })
}

/// Fails early, and with the holder's name, where the port is taken. The coordinator binds it a moment later.
fn check_port(host: &str, port: u16) -> Result<(), Failure> {
    let addr: SocketAddr =
        (host, port).to_socket_addrs().ok().and_then(|mut all| all.next()).ok_or_else(|| {
            Failure::usage(format!("--host {host}: no address of that name; give an IP address or a name of this machine"))
        })?;
    match std::net::TcpListener::bind(addr) {
        Ok(_) => Ok(()),
        Err(error) => Err(Failure::unavailable(process::describe_bind_error(addr, &error).to_string())),
    }
}

struct Slot {
    spec: Spec,
    child: Option<Child>,
    generation: u32,
    history: History,
}

struct Instance {
    slots: Vec<Slot>,
    notes: UnboundedSender<Note>,
    inbox: UnboundedReceiver<Note>,
    ready: bool,
    /// The coordinator drains already: an operator asked it to.
    drain_asked: bool,
    prefix: bool,
    started: Instant,
    /// Restarts to come: when, and which child.
    due: BTreeMap<(Instant, usize), ()>,
    /// Until the first READY.
    loading: Option<Loading>,
}

impl Instance {
    /// Starts everything and keeps it running until a drain is asked for.
    async fn serve(&mut self, recipe: &Recipe<'_>, prepared: &Prepared, args: &UpArgs, shutdown: &Shutdown) -> Result<(), Failure> {
        let mut serve = recipe.serve();
        if prepared.all_resident {
            children::set(&mut serve, "resident-layers", "all");
        }
        self.add(serve)?;
        let deadline = tokio::time::Instant::now() + CONTROL_TIMEOUT;
        let mut workers_started = false;
        let mut refresh = tokio::time::interval(progress::INTERVAL);
        loop {
            let next_restart = self.due.keys().next().copied();
            tokio::select! {
                () = shutdown.draining() => return Ok(()),
                note = self.inbox.recv() => {
                    let Some(note) = note else { return Err(Failure::internal("the children's reports ended")) };
                    let control = self.note(note)?;
                    if self.drain_asked {
                        return Ok(());
                    }
                    if let Some(control) = control
                        && !workers_started
                    {
                        workers_started = true;
                        self.add(recipe.attn(&control, args.attn, &prepared.attn_share))?;
                        for ((name, device), share) in prepared.experts.iter().zip(&prepared.expert_shares) {
                            self.add(recipe.experts(&control, name, *device, share))?;
                        }
                        self.announce_processes(args);
                    }
                }
                _ = refresh.tick(), if self.loading.is_some() => {
                    if let Some(loading) = &mut self.loading {
                        loading.refresh().await;
                    }
                }
                () = sleep_until(deadline), if !workers_started => {
                    return Err(Failure::unavailable(format!("the coordinator did not open its control address within {} s", CONTROL_TIMEOUT.as_secs())));
                }
                () = sleep_until(next_restart.map_or(deadline, |(at, _)| at.into())), if next_restart.is_some() => {
                    if let Some(key) = next_restart {
                        self.due.remove(&key);
                        self.start(key.1)?;
                    }
                }
            }
        }
    }

    fn add(&mut self, spec: Spec) -> Result<(), Failure> {
        self.slots.push(Slot { spec, child: None, generation: 0, history: History::default() });
        self.start(self.slots.len() - 1)
    }

    fn start(&mut self, index: usize) -> Result<(), Failure> {
        let slot = &mut self.slots[index];
        slot.generation += 1;
        let child = Child::start(&slot.spec, index, slot.generation, self.prefix, &self.notes)
            .map_err(|error| Failure::internal(format!("cannot start {}: {error}", slot.spec.name)))?;
        if slot.generation > 1 {
            say(&format!("{} restarted (pid {}, generation {})", slot.spec.name, child.pid, slot.generation));
        }
        slot.child = Some(child);
        Ok(())
    }

    fn announce_processes(&self, args: &UpArgs) {
        let list: Vec<String> =
            self.slots.iter().filter_map(|slot| Some(format!("{} pid {}", slot.spec.name, slot.child.as_ref()?.pid))).collect();
        say(&format!("started {}; loading weights, computing in {}", list.join(", "), args.model.dtype.name()));
    }

    /// Acts on a child's note; gives the control address when the coordinator names it.
    fn note(&mut self, note: Note) -> Result<Option<String>, Failure> {
        match note {
            Note::Line { index, generation, text } if self.slots[index].generation == generation => Ok(self.line(index, &text)),
            Note::Line { .. } => Ok(None),
            Note::Exited { index, generation, cause } => {
                if self.slots[index].generation == generation {
                    self.died(index, cause)?;
                }
                Ok(None)
            }
        }
    }

    /// One machine-readable line of a child.
    fn line(&mut self, index: usize, text: &str) -> Option<String> {
        let (word, url) = text.split_once(' ').unwrap_or((text, ""));
        let addr = url.strip_prefix("http://").unwrap_or(url);
        let slot = &mut self.slots[index];
        match word {
            "CONTROL" if index == SERVE => {
                // A restarted coordinator must be found where it was.
                children::set(&mut slot.spec, "control-addr", addr);
                return Some(url.to_owned());
            }
            "READY" if index == SERVE => {
                if let Some((_, port)) = addr.rsplit_once(':') {
                    children::set(&mut slot.spec, "port", port);
                }
                if self.ready {
                    say(&format!("ready again at {url}"));
                } else {
                    self.ready = true;
                    self.loading = None;
                    say(&format!("ready after {:.1} s: {url}", self.started.elapsed().as_secs_f64()));
                    process::announce(text);
                }
            }
            "DRAINING" if index == SERVE => self.drain_asked = true,
            "ADMIN" => {
                say(&format!("{} metrics and health: {url}/metrics {url}/readyz", slot.spec.name));
                children::set(&mut slot.spec, "admin", addr);
                if let Some(loading) = &mut self.loading {
                    loading.watch(&slot.spec.name, url);
                }
            }
            _ => say(&format!("{}: {text}", slot.spec.name)),
        }
        None
    }

    fn died(&mut self, index: usize, cause: Cause) -> Result<(), Failure> {
        let ready = self.ready;
        let slot = &mut self.slots[index];
        let Some(child) = slot.child.take() else { return Ok(()) };
        let verdict = slot.history.died(cause, child.started.elapsed(), ready);
        let name = &slot.spec.name;
        let tail = child.tail();
        if let (Verdict::GiveUp, Cause::Exit(code @ 1..)) = (verdict, cause)
            && let Some(reason) = tail.iter().rev().find(|line| !line.trim().is_empty())
        {
            // A role that cannot start says why in its last line; the rest of its log has been relayed.
            let reason = reason.strip_prefix("tandem: error: ").unwrap_or(reason);
            return Err(Failure::new(u8::try_from(code).unwrap_or(exit::INTERNAL), format!("{name}: {reason}")));
        }
        let mut report = format!("{name} (pid {}, generation {}) {cause}; its last lines:", child.pid, child.generation);
        for line in &tail {
            report.push_str("\n  | ");
            report.push_str(line);
        }
        if tail.is_empty() {
            report.push_str(" none");
        }
        say(&report);
        match verdict {
            Verdict::Restart(pause) => {
                say(&format!("{name} starts again in {:.1} s", pause.as_secs_f64()));
                self.due.insert((Instant::now() + pause, index), ());
                Ok(())
            }
            Verdict::GiveUp => Err(Failure::new(exit::UNAVAILABLE, format!("{name} {cause} {} times while starting", child.generation))),
        }
    }

    /// Ends the instance in order: the coordinator finishes its requests first, then the workers go.
    async fn drain(&mut self, limit: Duration, shutdown: &Shutdown) -> Result<(), Failure> {
        say("draining: no new requests, running ones finish; a second signal stops at once");
        for stage in [SERVE..1, 1..self.slots.len().max(1)] {
            // To a coordinator that drains already, a signal would say: stop now.
            let skip = self.drain_asked && stage.contains(&SERVE);
            for slot in &self.slots[stage.clone().start.min(self.slots.len())..stage.end.min(self.slots.len())] {
                if let (Some(child), false) = (&slot.child, skip) {
                    child.signal(Signal::SIGTERM);
                }
            }
            let deadline = tokio::time::Instant::now() + limit;
            while stage.clone().any(|index| self.slots.get(index).is_some_and(|slot| slot.child.is_some())) {
                tokio::select! {
                    () = shutdown.stopping() => return Ok(()),
                    note = timeout_at(deadline, self.inbox.recv()) => match note {
                        Ok(Some(Note::Exited { index, generation, cause })) if self.slots[index].generation == generation => {
                            self.slots[index].child = None;
                            if cause != Cause::Exit(0) {
                                say(&format!("{} {cause} while draining", self.slots[index].spec.name));
                            }
                        }
                        Ok(Some(_)) => {}
                        Ok(None) | Err(_) => {
                            say(&format!("not everything ended within {} s: stopping now", limit.as_secs()));
                            return Ok(());
                        }
                    },
                }
            }
        }
        say("stopped");
        Ok(())
    }

    /// Kills what is left and waits until it is gone.
    async fn kill_all(&mut self) {
        for slot in &self.slots {
            if let Some(child) = &slot.child {
                child.signal(Signal::SIGKILL);
            }
        }
        while self.slots.iter().any(|slot| slot.child.is_some()) {
            match timeout_at(tokio::time::Instant::now() + STOP_GRACE, self.inbox.recv()).await {
                Ok(Some(Note::Exited { index, generation, .. })) if self.slots[index].generation == generation => {
                    self.slots[index].child = None;
                }
                Ok(Some(_)) => {}
                Ok(None) | Err(_) => return,
            }
        }
    }
}
