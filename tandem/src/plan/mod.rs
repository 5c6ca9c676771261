//! `tandem plan`: what goes where, whether it fits, and what a token would take, from the checkpoint's headers alone.
//!
//! | file | idea |
//! |---|---|
//! | [`sizes`] | the checkpoint in numbers |
//! | [`device`] | devices from flags, or this machine |
//! | [`layout`] | processes on devices, and the check that they fit |
//! | [`advise`] | what would work where they do not |
//! | [`time`] | milliseconds of a token by part |
//! | [`text`] | all of it in words and as JSON |
//!
//! `tandem up` makes and checks its plan with the same code.

pub mod advise;
pub mod device;
pub mod layout;
pub mod sizes;
#[cfg(test)]
mod tests;
pub mod text;
pub mod time;

use std::{num::NonZeroUsize, thread};

use tandem_kernels::DeviceKind;
use tandem_model::{
    Checkpoint, Geometry, Resident,
    budget::{Room, Short},
};
use tandem_proto::hop::MAX_ROWS;
use tandem_worker_attn::RunnerLimits;

use self::{
    layout::{Ask, Device, Layout},
    sizes::Sizes,
};
use crate::{
    cli::{PlanArgs, args::AttnLimits},
    doctor,
    failure::Failure,
    model, output, probe,
};

/// Makes a plan and prints it.
///
/// # Errors
/// When flags or checkpoint are wrong, or a device is too small: both numbers, and what would work.
pub fn run(args: &PlanArgs) -> Result<(), Failure> {
    let located = model::locate(&args.model, None)?;
    let checkpoint =
        Checkpoint::open_headers(&located.dir).map_err(|error| Failure::config(error.to_string()))?.with_fp8(args.limits.fp8.groups());
    let sizes = Sizes::of(&checkpoint);
    let resident = args.split.resident()?;
    let (mut devices, attn, experts) = devices(args, &resident)?;
    let (precision, workers) = (args.model.dtype.into(), !experts.is_empty());
    let ask = Ask {
        kinds: devices.iter().map(|d| d.kind).collect(),
        attn,
        experts,
        split: args.split.split.into(),
        resident,
        limits: limits(&args.limits, &sizes.geometry, workers)?,
        precision,
        latents: args.limits.kv_cache_dtype.stored(precision),
        threads: args.threads.map_or_else(cores, |n| n as usize),
        paging: args.allow_paging,
        cache: args.limits.cache.options(),
        parking: args.limits.parking(),
    };
    let layout = layout::lay_out(&sizes, &ask).map_err(|error| Failure::config(error.to_string()))?;
    let short = check(&sizes, &layout, &devices).err();
    let most = advise::most_tokens(&sizes, &devices, &ask);
    let mut timing = None;
    if short.is_none() {
        let given = |name: &str| args.device.iter().any(|d| d.name == name);
        for device in devices.iter_mut().filter(|d| d.bandwidth.is_none() && !given(&d.room.device)) {
            device.bandwidth = Some(probe::read_bandwidth());
        }
        let hop = match args.hop_us {
            Some(us) => us / 1e6,
            None => doctor::loopback().map_err(|e| Failure::unavailable(format!("loopback: {e}; give --hop-us")))?.as_secs_f64(),
        };
        let context = args.context.min(ask.limits.max_seq_len);
        timing = time::timing(&sizes, &layout, &devices, context, hop);
    }
    if args.json {
        print_json(&sizes, &layout, &devices, &short, most, timing)?;
    } else {
        let mut out = text::lines(&sizes, &layout, &devices);
        if let Some(most) = most.filter(|_| short.is_none()) {
            out += &format!("          the caches could hold {most} tokens\n");
        }
        match &timing {
            Some(timing) => out += &text::timing_lines(timing),
            None if short.is_none() => out += "token     unknown: give --device NAME=MEMORY,BANDWIDTH for every device in use\n",
            None => {}
        }
        output::print(&out)?;
    }
    short.map_or(Ok(()), |short| Err(refusal(&short)))
}

/// Checks that a layout fits; a refusal says what would.
///
/// # Errors
/// The first device that is too small.
pub fn check(sizes: &Sizes, layout: &Layout, devices: &[Device]) -> Result<(), Short> {
    layout.check(devices).map_err(|short| {
        let hint = advise::hint(sizes, devices, &layout.ask, &short);
        Short { hint, ..short }
    })
}

/// A refusal as the command's failure.
pub fn refusal(short: &Short) -> Failure {
    let paging = if short.device.starts_with("cpu") && short.parts.iter().any(|(part, _)| part.ends_with(" weights")) {
        "; --allow-paging reads weights from disk as they are needed (slow)"
    } else {
        ""
    };
    Failure::config(format!("{short}{paging}"))
}

/// The attention worker's limits, as it would take them; `workers`: whether there are expert workers beside it.
///
/// # Errors
/// A sequence that is longer than model and cache allow; steps of more rows than expert workers take.
pub fn limits(args: &AttnLimits, geometry: &Geometry, workers: bool) -> Result<RunnerLimits, Failure> {
    let max_batch = args.max_batch as usize;
    let max_rows = (args.max_num_batched_tokens as usize).max(max_batch);
    if workers && max_rows > MAX_ROWS as usize {
        return Err(Failure::config(format!(
            "--max-num-batched-tokens {max_rows}: expert workers take at most {MAX_ROWS} rows of a step; give no more, or let the attention worker \
             hold all experts (--resident-layers all)"
        )));
    }
    Ok(RunnerLimits {
        max_rows,
        max_batch,
        max_seq_len: usize::try_from(args.longest(geometry)?).unwrap_or(usize::MAX),
        kv_tokens: usize::try_from(args.kv_tokens).unwrap_or(usize::MAX),
        overlap_rows: args.overlap_rows as usize,
    })
}

/// Cores that this process may use.
pub fn cores() -> usize {
    thread::available_parallelism().map_or(1, NonZeroUsize::get)
}

/// The devices in use, and which of them the attention worker and the expert workers take.
fn devices(args: &PlanArgs, resident: &Resident) -> Result<(Vec<Device>, usize, Vec<usize>), Failure> {
    let mut list: Vec<Device> = args.device.iter().map(device::DeviceSpec::device).collect();
    if let Some(twice) = (1..list.len()).find(|i| list[..*i].iter().any(|d| d.room.device == list[*i].room.device)) {
        return Err(Failure::usage(format!("--device {}: given twice", list[twice].room.device)));
    }
    let mut find = |flag: &str, name: &str| -> Result<usize, Failure> {
        if let Some(at) = list.iter().position(|d| d.room.device == name) {
            return Ok(at);
        }
        match device::kind_of(name) {
            Some(DeviceKind::Cpu) if name == "cpu" => {
                let here = device::this_machine().ok_or_else(|| {
                    Failure::usage(format!("{flag} cpu: this machine does not say how much memory is free; give --device cpu=MEMORY"))
                })?;
                list.push(here);
                Ok(list.len() - 1)
            }
            Some(kind) => {
                let ordinal = tandem_kernels::cuda::ordinal(name).filter(|_| kind == DeviceKind::Cuda);
                let found = ordinal.and_then(|n| tandem_kernels::cuda::probe::device(n).ok()).ok_or_else(|| {
                    let hint = format!("give its memory with --device {name}=MEMORY or {name}=MEMORY,BANDWIDTH");
                    Failure::usage(format!("{flag} {name}: this machine has none; {hint}"))
                })?;
                list.push(Device { room: Room { device: name.to_owned(), ..device::gpu(&found).room }, ..device::gpu(&found) });
                Ok(list.len() - 1)
            }
            None => Err(Failure::usage(format!("{flag} {name}: no such device; needed cpu, cpu:N or cuda:N"))),
        }
    };
    let attn = find("--attn", &args.attn)?;
    let names: Vec<&str> = match args.experts.as_slice() {
        [] if *resident == Resident::All => Vec::new(),
        [] => vec!["cpu"],
        [one] if one == "none" => Vec::new(),
        some => some.iter().map(String::as_str).collect(),
    };
    let experts = names.into_iter().map(|name| find("--experts", name)).collect::<Result<_, _>>()?;
    // A GPU's attention worker keeps prefixes and copies in the memory of its host.
    if list.iter().all(|d| d.kind != DeviceKind::Cpu) {
        list.extend(device::this_machine());
    }
    Ok((list, attn, experts))
}

fn print_json(
    sizes: &Sizes,
    layout: &Layout,
    devices: &[Device],
    short: &Option<Short>,
    most: Option<usize>,
    token: Option<time::Timing>,
) -> Result<(), Failure> {
    let (devices, processes) = text::json_parts(layout, devices);
    let refusal = short.as_ref().map(|s| text::JsonRefusal {
        device: s.device.clone(),
        needed: s.needed,
        available: s.available,
        hint: s.hint.clone(),
    });
    let json = text::Json {
        model: &sizes.name,
        model_bytes: sizes.stored.total(),
        fits: short.is_none(),
        refusal,
        devices,
        processes,
        kv_tokens: layout.ask.limits.kv_tokens,
        most_kv_tokens: most,
        token,
    };
    let text = serde_json::to_string(&json).map_err(|error| Failure::internal(error.to_string()))?;
    output::print(&format!("{text}\n"))
}
