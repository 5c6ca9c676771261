//! Types of flag values.

use std::{fmt, str::FromStr, time::Duration};

use clap::ValueEnum;
use tandem_proto::link::LinkChoice;

use crate::bytes::{UNITS, amount};

/// A duration as people write it: `30`, `30s`, `500ms`, `10m`, `2h`. A bare number is seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seconds(pub Duration);

impl FromStr for Seconds {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is no duration; write a number with ms, s, m or h, e.g. 30s");
        let split = text.find(|c: char| !(c.is_ascii_digit() || c == '.')).unwrap_or(text.len());
        let (number, unit) = text.split_at(split);
        let factor = match unit {
            "" | "s" => 1.0,
            "ms" => 1e-3,
            "m" => 60.0,
            "h" => 3600.0,
            _ => return Err(wrong()),
        };
        let number: f64 = number.parse().map_err(|_| wrong())?;
        Duration::try_from_secs_f64(number * factor).map(Self).map_err(|_| wrong())
    }
}

/// Reads a duration that must not be zero: a deadline that has passed before a request begins lets none through.
pub fn above_zero(text: &str) -> Result<Seconds, String> {
    match text.parse()? {
        Seconds(Duration::ZERO) => Err(format!("{text:?} is no time at all; write one above zero, e.g. 30s")),
        time => Ok(time),
    }
}

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}s", self.0.as_secs_f64())
    }
}

/// An amount of memory as people write it: `4GiB`, `512MiB`, `1.5GB`. A bare number is bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bytes(pub u64);

impl FromStr for Bytes {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || format!("{text:?} is no amount of memory; write a number with {UNITS} or nothing, e.g. 2GiB");
        amount(text).map(|bytes| Self(bytes as u64)).ok_or_else(wrong)
    }
}

/// Reads an amount of memory of at least one byte.
pub fn some_bytes(text: &str) -> Result<Bytes, String> {
    match text.parse()? {
        Bytes(0) => Err(format!("{text:?} is nothing at all; write an amount above zero, e.g. 64MiB")),
        bytes => Ok(bytes),
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
        match units.into_iter().find(|(shift, _)| self.0 > 0 && self.0.is_multiple_of(1 << shift)) {
            Some((shift, unit)) => write!(f, "{}{unit}", self.0 >> shift),
            None => write!(f, "{}", self.0),
        }
    }
}

/// Cores to pin compute threads to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Cpus {
    /// As the command finds best.
    Auto,
    /// The system places threads.
    None,
    /// These, in this order.
    List(Vec<usize>),
}

impl Cpus {
    /// The cores of a list; nothing where the system places threads.
    pub fn into_list(self) -> Vec<usize> {
        match self {
            Self::Auto | Self::None => Vec::new(),
            Self::List(cpus) => cpus,
        }
    }
}

impl FromStr for Cpus {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        /// As many as the kernel can name.
        const MOST: usize = 1024;
        let wrong = |why: &str| format!("{text:?} {why}; write auto, none, or cores below {MOST} and ranges of them, e.g. 0-3,8");
        match text {
            "auto" => return Ok(Self::Auto),
            "none" => return Ok(Self::None),
            _ => {}
        }
        let number = |part: &str| part.trim().parse::<usize>().ok().filter(|n| *n < MOST).ok_or_else(|| wrong("is no list of cores"));
        let mut cpus = Vec::new();
        for part in text.split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last) = (number(first)?, number(last)?);
            if first > last {
                return Err(wrong("has a range that runs backwards"));
            }
            for cpu in first..=last {
                if cpus.contains(&cpu) {
                    return Err(wrong(&format!("names core {cpu} twice")));
                }
                cpus.push(cpu);
            }
        }
        Ok(Self::List(cpus))
    }
}

impl fmt::Display for Cpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::None => f.write_str("none"),
            Self::List(cpus) => f.write_str(&cpus.iter().map(ToString::to_string).collect::<Vec<_>>().join(",")),
        }
    }
}

/// What activations, caches and hop payload are rounded to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Dtype {
    /// bf16 inputs of matrix products, cache and hop payload; sums in f32
    Bf16,
    /// Everything in f32
    F32,
}

/// A device that a worker computes on: `cpu`, `cuda:N`, or `reference`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// This machine's CPU
    Cpu,
    /// One of this machine's NVIDIA GPUs
    Cuda(usize),
    /// The slow, obvious formulas, for checking
    Reference,
}

impl FromStr for Device {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            None if text == "cpu" => Ok(Self::Cpu),
            None if text == "cuda" => Ok(Self::Cuda(0)),
            None if text == "reference" => Ok(Self::Reference),
            Some(("cuda", number)) if number.parse::<u16>().is_ok() => Ok(Self::Cuda(number.parse().unwrap_or_default())),
            _ => Err(format!("{text:?} is no device; write cpu, cuda:N (N counts the GPUs from 0), or reference")),
        }
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu => f.write_str("cpu"),
            Self::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
            Self::Reference => f.write_str("reference"),
        }
    }
}

/// A kind of device that `tandem check` asks kernels of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    /// CPUs
    Cpu,
    /// NVIDIA GPUs
    Cuda,
}

impl From<Kind> for tandem_kernels::DeviceKind {
    fn from(kind: Kind) -> Self {
        match kind {
            Kind::Cpu => Self::Cpu,
            Kind::Cuda => Self::Cuda,
        }
    }
}

/// A device of an expert worker in `tandem up --experts`; `none`: no expert worker at all, with --resident-layers all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertDevice {
    /// A worker on this device
    On(Device),
    /// No worker
    None,
}

impl FromStr for ExpertDevice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "none" {
            return Ok(Self::None);
        }
        text.parse().map(Self::On).map_err(|error: String| error.replace("or reference", "reference, or none"))
    }
}

impl ExpertDevice {
    /// The device; nothing for none.
    pub fn device(self) -> Option<Device> {
        match self {
            Self::On(device) => Some(device),
            Self::None => None,
        }
    }
}

/// How the routed experts are cut over the expert workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Split {
    /// Each worker holds a range of layers
    Layers,
    /// Each worker holds a range of each layer's experts
    Experts,
    /// Each worker holds a slice of every expert's intermediate dimension
    Ffn,
}

impl From<Split> for tandem_model::Split {
    fn from(split: Split) -> Self {
        match split {
            Split::Layers => Self::Layers,
            Split::Experts => Self::Experts,
            Split::Ffn => Self::Ffn,
        }
    }
}

impl From<Dtype> for tandem_kernels::Precision {
    fn from(dtype: Dtype) -> Self {
        match dtype {
            Dtype::Bf16 => Self::Bf16,
            Dtype::F32 => Self::F32,
        }
    }
}

impl Dtype {
    /// The name that processes compare in the handshake.
    pub fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
        }
    }
}

/// The transport between attention and expert workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Link {
    /// The first that both sides have: tcp, then grpc
    Auto,
    /// Plain TCP frames
    Tcp,
    /// Frames inside HTTP/2, where only that passes
    Grpc,
}

impl From<Link> for LinkChoice {
    fn from(link: Link) -> Self {
        match link {
            Link::Auto => Self::Auto,
            Link::Tcp => Self::Tcp,
            Link::Grpc => Self::Grpc,
        }
    }
}

/// Whether rows go to expert workers of this machine through memory that both see.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SharedRows {
    /// On GPUs, where copies through a link would count
    Auto,
    /// On every device that can
    On,
    /// Always over the link
    Off,
}

impl From<SharedRows> for Option<bool> {
    fn from(rows: SharedRows) -> Self {
        match rows {
            SharedRows::Auto => None,
            SharedRows::On => Some(true),
            SharedRows::Off => Some(false),
        }
    }
}

/// Where weights come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LoadFormat {
    /// The checkpoint's files
    Auto,
    /// Made up; the files may end behind their headers
    Dummy,
}

impl From<LoadFormat> for tandem_model::LoadFormat {
    fn from(format: LoadFormat) -> Self {
        match format {
            LoadFormat::Auto => Self::Auto,
            LoadFormat::Dummy => Self::Dummy,
        }
    }
}

/// What the latent cache stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum KvCacheDtype {
    /// As --dtype says
    Auto,
    /// f32
    F32,
    /// bf16
    Bf16,
    /// E4M3 with an f32 scale for each 128 values
    Fp8,
}

impl KvCacheDtype {
    /// What is stored where `precision` decides unless this does.
    pub fn stored(self, precision: tandem_kernels::Precision) -> tandem_kernels::cpu::LatentType {
        self.latents().unwrap_or(tandem_kernels::cpu::LatentType::of(precision))
    }

    /// The type; nothing where --dtype decides.
    pub fn latents(self) -> Option<tandem_kernels::cpu::LatentType> {
        use tandem_kernels::cpu::LatentType;
        match self {
            Self::Auto => None,
            Self::F32 => Some(LatentType::F32),
            Self::Bf16 => Some(LatentType::Bf16),
            Self::Fp8 => Some(LatentType::Fp8),
        }
    }
}

/// What becomes of a sequence's state when it has to make room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Preemption {
    /// Whichever of the two is measured to be faster, within the budget
    Auto,
    /// Copied to host memory, and back later
    Snapshot,
    /// Computed again
    Recompute,
}

impl From<Preemption> for tandem_worker_attn::engine::parking::Preemption {
    fn from(preemption: Preemption) -> Self {
        match preemption {
            Preemption::Auto => Self::Auto,
            Preemption::Snapshot => Self::Snapshot,
            Preemption::Recompute => Self::Recompute,
        }
    }
}

/// Shape of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// One readable line per event
    Text,
    /// One JSON object per event
    Json,
}

/// Aliases of metrics that other servers' dashboards know.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum MetricsCompat {
    /// vllm:* names beside tandem_*
    Vllm,
    /// tandem_* only
    None,
}

/// The field that carries the model's reasoning in answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ReasoningFields {
    /// reasoning_content and reasoning, the same text in each
    Both,
    /// reasoning_content only
    #[value(name = "reasoning_content")]
    ReasoningContent,
    /// reasoning only
    Reasoning,
}

impl ReasoningFields {
    /// The fields' names.
    pub fn names(self) -> Vec<String> {
        let (old, new) = ("reasoning_content", "reasoning");
        let names: &[&str] = match self {
            Self::Both => &[old, new],
            Self::ReasoningContent => &[old],
            Self::Reasoning => &[new],
        };
        names.iter().map(ToString::to_string).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_parse_and_print() {
        for (text, device) in
            [("cpu", Device::Cpu), ("cuda:0", Device::Cuda(0)), ("cuda:11", Device::Cuda(11)), ("reference", Device::Reference)]
        {
            assert_eq!(text.parse(), Ok(device));
            assert_eq!(device.to_string(), text);
            assert_eq!(text.parse(), Ok(ExpertDevice::On(device)));
        }
        assert_eq!("cuda".parse(), Ok(Device::Cuda(0)));
        assert_eq!("none".parse(), Ok(ExpertDevice::None));
        for text in ["", "gpu", "cuda:", "cuda:-1", "cuda:x", "cpu:0", "none"] {
            let error = text.parse::<Device>().expect_err(text);
            assert!(error.contains("cuda:N"), "{error}");
        }
        assert!("tpu".parse::<ExpertDevice>().expect_err("tpu").contains("none"));
    }

    #[test]
    fn durations_parse_and_print() {
        for (text, seconds) in [("30", 30.0), ("30s", 30.0), ("1.5s", 1.5), ("250ms", 0.25), ("10m", 600.0), ("2h", 7200.0), ("0", 0.0)] {
            let parsed: Seconds = text.parse().expect(text);
            assert!((parsed.0.as_secs_f64() - seconds).abs() < 1e-9, "{text}");
            assert_eq!(parsed.to_string().parse::<Seconds>(), Ok(parsed));
        }
        for text in ["", "s", "-3", "3 s", "3d", "1e400", "1.2.3", "nan"] {
            let error = text.parse::<Seconds>().expect_err(text);
            assert!(error.contains("is no duration"), "{error}");
        }
    }

    #[test]
    fn amounts_of_memory_parse_and_print() {
        for (text, bytes) in [
            ("0", 0),
            ("17", 17),
            ("2GiB", 2 << 30),
            ("3TiB", 3 << 40),
            ("1.5g", 3 << 29),
            ("512MiB", 512 << 20),
            ("1kb", 1000),
            ("3KiB", 3072),
        ] {
            let parsed: Bytes = text.parse().expect(text);
            assert_eq!(parsed.0, bytes, "{text}");
            assert_eq!(parsed.to_string().parse::<Bytes>(), Ok(parsed));
        }
        for text in ["", "GiB", "-1", "2 GiB", "2PiB", "1e3", "1.2.3", "99999999999GiB"] {
            assert!(text.parse::<Bytes>().expect_err(text).contains("is no amount of memory"));
        }
    }

    #[test]
    fn lists_of_cores_parse_and_print() {
        for (text, cpus) in
            [("auto", Cpus::Auto), ("none", Cpus::None), ("3", Cpus::List(vec![3])), ("0-2,8,5", Cpus::List(vec![0, 1, 2, 8, 5]))]
        {
            let parsed: Cpus = text.parse().expect(text);
            assert_eq!(parsed, cpus);
            assert_eq!(parsed.to_string().parse::<Cpus>(), Ok(parsed));
        }
        for (text, why) in [
            ("", "is no list"),
            ("a", "is no list"),
            ("1,", "is no list"),
            ("-1", "is no list"),
            ("0-99999999", "is no list"),
            ("3-1", "runs backwards"),
            ("1,0-2", "names core 1 twice"),
        ] {
            let error = text.parse::<Cpus>().expect_err(text);
            assert!(error.contains(why), "{error}");
        }
    }
}
