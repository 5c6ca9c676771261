//! Random flag sets: whatever passes the check fits, whatever does not says both numbers, and advice that is given works.

use std::{collections::BTreeMap, path::Path};

use tandem_kernels::{DeviceKind, Precision, cpu::LatentType};
use tandem_model::{
    Geometry, Resident, Split,
    budget::Room,
    census::Part,
    resident::ResidentRange,
    stubs::{self, Release},
    synthetic::{TextConfig, hash::Stream},
};
use tandem_worker_attn::{
    RunnerLimits,
    cache::CacheOptions,
    engine::parking::{ParkingOptions, Preemption},
};

use super::{
    advise,
    layout::{Ask, Device, Place, lay_out},
    sizes::{Sizes, Weights},
    time,
};

/// Draws of one case.
struct Dice(Stream, u64);

impl Dice {
    fn bits(&mut self) -> u64 {
        self.1 += 1;
        self.0.bits(self.1)
    }

    /// Below `n`.
    fn roll(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    /// From 1 to 2^`bits`, small numbers as likely as large ones.
    fn size(&mut self, bits: usize) -> u64 {
        let shift = self.roll(bits + 1);
        1 + self.bits() % (1u64 << shift)
    }
}

fn geometry(config: &TextConfig) -> Geometry {
    Geometry::from_json(Path::new("config.json"), &config.to_json(false)).expect("valid")
}

fn sizes(dice: &mut Dice, release: &Geometry) -> Sizes {
    let geometry = if dice.roll(2) == 0 { release.clone() } else { geometry(&TextConfig::random(dice.bits())) };
    let bits = 1 + dice.roll(32) as u64;
    let elements = 3 * (geometry.experts * geometry.moe_intermediate * geometry.hidden) as u64;
    let routed: BTreeMap<u32, u64> = geometry.moe_layers().iter().map(|l| (*l as u32, elements * bits / 8)).collect();
    let mut parts: BTreeMap<Part, u64> = Part::ALL.iter().map(|part| (*part, dice.size(33))).collect();
    parts.insert(Part::Routed, routed.values().sum());
    let block = [1, 16, 32, 256][dice.roll(4)];
    // On a GPU as stored, or as f32.
    let wider = [1, 4, 16][dice.roll(3)];
    let stored = Weights { parts, routed };
    let cuda = Weights {
        parts: stored.parts.iter().map(|(part, bytes)| (*part, wider * bytes)).collect(),
        routed: stored.routed.iter().map(|(layer, bytes)| (*layer, wider * bytes)).collect(),
    };
    Sizes { name: "random".into(), geometry, stored, cuda, block, unpacked: dice.size(30), narrowed: 0 }
}

fn devices(dice: &mut Dice) -> Vec<Device> {
    let device = |i: usize, dice: &mut Dice| {
        let kind = DeviceKind::ALL[dice.roll(2)];
        let bandwidth = (dice.roll(4) > 0).then(|| dice.size(43) as f64);
        Device {
            kind,
            room: Room { device: format!("{}:{i}", kind.name()), bytes: dice.size(14) << 28, origin: "given".into() },
            bandwidth,
        }
    };
    (0..1 + dice.roll(4)).map(|i| device(i, dice)).collect()
}

fn ask(dice: &mut Dice, sizes: &Sizes, list: &[Device]) -> Ask {
    let (g, devices) = (&sizes.geometry, list.len());
    let resident = match dice.roll(4) {
        0 => Resident::None,
        1 => Resident::All,
        _ => {
            let first = dice.roll(g.layers) as u32;
            let last = first + dice.roll(g.layers - first as usize) as u32;
            let experts = (dice.roll(2) == 0).then(|| 0..1 + dice.roll(g.experts) as u32);
            Resident::Ranges(vec![ResidentRange { layers: first..last + 1, experts }])
        }
    };
    let kv_tokens = dice.size(30) as usize;
    Ask {
        kinds: list.iter().map(|d| d.kind).collect(),
        attn: dice.roll(devices),
        experts: (0..dice.roll(6)).map(|_| dice.roll(devices)).collect(),
        split: [Split::Layers, Split::Experts, Split::Ffn][dice.roll(3)],
        resident,
        limits: RunnerLimits {
            max_rows: dice.size(14) as usize,
            max_batch: dice.size(10) as usize,
            max_seq_len: kv_tokens.min(dice.size(20) as usize),
            kv_tokens,
            overlap_rows: dice.roll(5000),
        },
        precision: [Precision::Bf16, Precision::F32][dice.roll(2)],
        latents: [LatentType::F32, LatentType::Bf16, LatentType::Fp8][dice.roll(3)],
        threads: 1 + dice.roll(256),
        paging: dice.roll(4) == 0,
        cache: (dice.roll(4) > 0).then(|| CacheOptions { bytes: dice.size(34), ..CacheOptions::default() }),
        parking: ParkingOptions { preemption: [Preemption::Auto, Preemption::Recompute][dice.roll(2)], bytes: dice.size(34) },
    }
}

#[test]
fn ten_thousand_random_flag_sets_fit_or_are_refused_with_both_numbers() {
    let release = geometry(&stubs::config());
    let (mut fitted, mut refused, mut impossible, mut advised) = (0, 0, 0, 0);
    for case in 0..10_000 {
        let mut dice = Dice(Stream::new(case, "flag sets"), 0);
        let sizes = sizes(&mut dice, &release);
        let devices = devices(&mut dice);
        let ask = ask(&mut dice, &sizes, &devices);
        let Ok(layout) = lay_out(&sizes, &ask) else {
            impossible += 1;
            continue;
        };
        // Every byte of the model is placed, once; cuts along a dimension may round a few down.
        let total = sizes.stored.total();
        let wider = |p: &Place| sizes.on(ask.kind(p.device)).total() / total;
        let placed: u64 = layout.places.iter().map(|p| p.needs.weights / wider(p)).sum();
        assert!(placed <= total && placed + 4096 * 64 >= total, "case {case}: {placed} of {total}");
        match layout.check(&devices) {
            Ok(()) => {
                fitted += 1;
                for (i, device) in devices.iter().enumerate() {
                    let paging = ask.paging && device.kind == DeviceKind::Cpu;
                    let mut fixed: u64 = layout.on(i).map(|p| p.needs.kv + p.needs.state + p.needs.workspace + p.needs.unpacked).sum();
                    // Prefixes and copies: in the attention worker's own memory where that is a host's, else in the first CPU's.
                    let on_cpu = ask.kind(ask.attn) == DeviceKind::Cpu;
                    let host = if on_cpu { Some(ask.attn) } else { devices.iter().position(|d| d.kind == DeviceKind::Cpu) };
                    let kept = ask.prefixes(&sizes.geometry) + ask.parked(&sizes.geometry);
                    fixed += if host == Some(i) { kept } else { 0 };
                    let weights: u64 = layout.on(i).map(|p| p.needs.weights).sum();
                    assert!(fixed + if paging { 0 } else { weights } <= device.room.bytes, "case {case}: device {i}");
                }
            }
            Err(short) => {
                refused += 1;
                assert!(short.needed > short.available, "case {case}: {short}");
                let text = short.to_string();
                assert!(
                    text.contains("needed") && text.contains("got") && text.contains(&short.device) && !short.parts.is_empty(),
                    "{text}"
                );
                if case % 10 == 0 {
                    let hint = advise::hint(&sizes, &devices, &ask, &short);
                    advised += usize::from(hint.contains("would fit"));
                    assert!(!hint.is_empty());
                }
            }
        }
        if let Some(t) = time::timing(&sizes, &layout, &devices, dice.size(20) as usize, 1e-5) {
            assert!(t.total_ms.is_finite() && t.total_ms >= 0.0 && t.hops <= sizes.geometry.layers, "case {case}: {t:?}");
            let apart: f64 = t.rows.iter().map(|r| r.ms).sum::<f64>() + t.hop_ms;
            assert!((apart - t.overlapped_ms - t.total_ms).abs() <= 1e-6 * apart.max(1.0), "case {case}: {t:?}");
        }
    }
    // The draws reach every outcome.
    assert!(fitted > 500 && refused > 500 && impossible > 100 && advised > 20, "{fitted} {refused} {impossible} {advised}");
}

#[test]
fn the_most_tokens_fit_and_one_more_does_not() {
    let release = geometry(&stubs::config());
    let mut checked = 0;
    for case in 0..300 {
        let mut dice = Dice(Stream::new(case, "most tokens"), 0);
        let sizes = sizes(&mut dice, &release);
        let devices = devices(&mut dice);
        let ask = ask(&mut dice, &sizes, &devices);
        let Some(most) = advise::most_tokens(&sizes, &devices, &ask).filter(|most| *most < 1 << 39) else { continue };
        let fits = |tokens: usize| {
            // A sequence may be as long as the cache and the model allow, whatever was asked for.
            let longest = ask.limits.max_seq_len.max(sizes.geometry.max_position);
            let limits = RunnerLimits { kv_tokens: tokens, max_seq_len: longest.min(tokens), ..ask.limits };
            lay_out(&sizes, &Ask { limits, ..ask.clone() }).is_ok_and(|l| l.check(&devices).is_ok())
        };
        assert!(fits(most) && !fits(most + 1), "case {case}: {most}");
        checked += 1;
    }
    assert!(checked > 20, "{checked}");
}

fn gpu(gib: u64, bandwidth: f64) -> Device {
    Device {
        kind: DeviceKind::Cuda,
        room: Room { device: "cuda:0".into(), bytes: gib << 30, origin: "given".into() },
        bandwidth: Some(bandwidth),
    }
}

/// The published model: bytes by part and the rate that follows from them were computed by hand from the published shapes.
#[test]
fn the_release_reads_the_bytes_that_were_computed_by_hand() {
    let dir = tempfile::tempdir().expect("writable");
    Release::LibertAi.write(dir.path(), &[]).expect("writable");
    let sizes = Sizes::of(&tandem_model::Checkpoint::open_headers(dir.path()).expect("a stub"));
    let limits = RunnerLimits { max_rows: 256, max_batch: 8, max_seq_len: 32_768, kv_tokens: 32_768, overlap_rows: 4096 };
    let ask = Ask {
        kinds: vec![DeviceKind::Cuda, DeviceKind::Cpu],
        attn: 0,
        experts: vec![],
        split: Split::Layers,
        resident: Resident::All,
        limits,
        precision: Precision::Bf16,
        latents: LatentType::Bf16,
        threads: 1,
        paging: false,
        cache: None,
        parking: ParkingOptions { preemption: Preemption::Recompute, bytes: 0 },
    };
    let layout = lay_out(&sizes, &ask).expect("possible");
    let devices = [gpu(400, 4.3e12)];
    layout.check(&devices).expect("fits");
    // 136 MiB of KDA matrices and 4.8 MiB of taps (bf16 there, f32 here) a sequence.
    let state = layout.places[0].needs.state / 8;
    assert!((136 << 20..148 << 20).contains(&state), "{state}");
    // 11,264 bytes of latents a token, and pooled keys.
    let kv = layout.places[0].needs.kv / 32_768;
    assert!((11_264..11_264 + 11 * 4 * 128).contains(&kv), "{kv}");
    let t = time::timing(&sizes, &layout, &devices, 8192, 0.0).expect("bandwidth is known");
    let routed = t.rows.iter().find(|r| r.part == "routed experts").expect("there").bytes;
    assert!((4.75e9..4.76e9).contains(&(routed as f64)), "{routed}");
    // BF16 backbone and NVFP4 experts: 198 tokens/s.
    let rate = 1e3 / t.total_ms;
    assert!((195.0..200.0).contains(&rate), "{rate}");

    // Too small a card: the refusal has both numbers, and what would work is found.
    let small = [
        gpu(60, 4.3e12),
        Device {
            room: Room { device: "cpu".into(), bytes: 150 << 30, origin: "given".into() },
            kind: DeviceKind::Cpu,
            bandwidth: Some(2e11),
        },
    ];
    let short = super::check(&sizes, &layout, &small).expect_err("too large");
    assert!(short.hint.ends_with("--experts cpu would fit"), "{short}");
    let split = Ask { experts: vec![1], resident: Resident::None, ..ask.clone() };
    let short = super::check(&sizes, &lay_out(&sizes, &split).expect("possible"), &small).expect_err("the CPU is too small");
    assert_eq!(short.device, "cpu");
    assert!(short.hint.starts_with("--split layers --resident-layers 3-"), "{short}");
    let resident: Resident = short.hint.split_whitespace().nth(3).expect("ranges").parse().expect("ranges");
    let advised = lay_out(&sizes, &Ask { resident, ..split.clone() }).expect("possible");
    advised.check(&small).expect("the advice works");
    let t = time::timing(&sizes, &advised, &small, 8192, 30e-6).expect("known");
    assert!(t.hops > 0 && t.hops < 42 && t.overlapped_ms > 0.0, "{t:?}");
    let many = Ask { limits: RunnerLimits { kv_tokens: 1 << 30, ..limits }, ..ask };
    let short = super::check(&sizes, &lay_out(&sizes, &many).expect("possible"), &devices).expect_err("too many tokens");
    let tokens: usize =
        short.hint.strip_prefix("--kv-tokens ").and_then(|h| h.split(' ').next()).expect("a number").parse().expect("a number");
    assert!(tokens > 1 << 20, "{short}");
}

/// `tandem plan` with flags, over a stub; the failure, if any.
fn plan(model: &Path, flags: &[&str]) -> Option<crate::failure::Failure> {
    use clap::Parser as _;
    let model = format!("--model={}", model.display());
    let argv = ["tandem", "plan", &model, "--hop-us", "10"].into_iter().chain(flags.iter().copied());
    let cli = crate::cli::Cli::try_parse_from(argv).unwrap_or_else(|error| panic!("{flags:?}: {error}"));
    let crate::cli::Command::Plan(args) = cli.command else { panic!("plan") };
    super::run(&args).err()
}

#[test]
fn flags_place_processes_and_wrong_ones_are_named() {
    let dir = tempfile::tempdir().expect("writable");
    let model = stubs::Mix::find("ggml-org", "Q4_K").expect("a mix").stub(400).write(dir.path(), "m", 1).expect("writable");
    let gpu = "--device=cuda:0=32GiB,1792GB/s";
    assert_eq!(plan(&model, &[gpu, "--device=cpu=192GiB,170GB/s", "--attn=cuda:0"]), None);
    assert_eq!(plan(&model, &[gpu, "--device=cpu=192GiB", "--attn=cuda:0", "--json"]), None, "no bandwidth: no time, but a plan");
    let all = ["--device=cuda:0=2TiB", "--device=cpu=8GiB", "--attn=cuda:0", "--resident-layers=all"];
    assert_eq!(plan(&model, &all), None, "no expert worker is needed");
    let refusals: [(&[&str], u8, &[&str]); 10] = [
        // 159 GiB of Q4_K experts, which take 148 bytes there for 144.
        (
            &["--device=cuda:0=160GiB", "--device=cpu=8GiB", "--attn=cuda:0", "--resident-layers=all"],
            78,
            &["cuda:0: needed 17", "GiB, got 159.0"],
        ),
        // 2 GiB of prefixes and 1 GiB of copies, in the GPU's host and in the CPU's own memory.
        (
            &["--device=cuda:0=2TiB", "--device=cpu=3GiB", "--attn=cuda:0", "--resident-layers=all"],
            78,
            &["cpu: needed 3.0 GiB, got 2.8 GiB", "attn prefixes and copies 3.0"],
        ),
        (&["--device=cpu=174GiB", "--resident-layers=all"], 78, &["cpu: needed 17", "attn prefixes and copies 3.0", "would fit"]),
        (&[gpu, "--attn=cuda:60000"], 64, &["--attn cuda:60000: this machine has none", "--device cuda:60000=MEMORY"]),
        (&[gpu, "--attn=tpu"], 64, &["--attn tpu", "cpu:N or cuda:N"]),
        (&[gpu, gpu], 64, &["--device cuda:0: given twice"]),
        (&[gpu, "--attn=cuda:0", "--experts=cuda:0"], 78, &["cuda:0: needed 1", "GiB, got 31.0 GiB", "add a device"]),
        (&[gpu, "--device=cpu=64GiB", "--attn=cuda:0"], 78, &["cpu: needed 162.7 GiB, got 63.8 GiB", "--allow-paging"]),
        (&[gpu, "--device=cpu=1GiB", "--attn=cuda:0", "--experts=none"], 78, &["no expert worker is given"]),
        (&[gpu, "--device=cpu=192GiB", "--attn=cuda:0", "--kv-tokens=100000000"], 78, &["--kv-tokens 1", "would fit"]),
    ];
    for (flags, code, needles) in refusals {
        let failure = plan(&model, flags).unwrap_or_else(|| panic!("{flags:?} is fine"));
        assert_eq!(failure.code, code, "{failure}");
        assert!(needles.iter().all(|needle| failure.reason.contains(needle)), "{failure}");
    }
    assert_eq!(plan(&model, &[gpu, "--device=cpu=64GiB", "--attn=cuda:0", "--allow-paging"]), None);
    let nothing_kept = ["--prefix-cache-bytes=0", "--preemption=recompute"];
    let small_host = ["--device=cuda:0=2TiB", "--device=cpu=1GiB", "--attn=cuda:0", "--resident-layers=all"];
    assert_eq!(plan(&model, &[small_host, [nothing_kept[0], nothing_kept[1], "--json", "--split=layers"]].concat()), None);
}
