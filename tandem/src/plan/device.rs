//! Devices: as they are given on the command line, or as this machine is.

use std::str::FromStr;

use tandem_kernels::{DeviceKind, cuda::probe::Found};
use tandem_model::budget::Room;
use tandem_runtime::memory;

use super::layout::Device;
use crate::bytes::{UNITS, amount};

/// What plans leave of a CPU's memory: code, tokenizer, sockets and their buffers of all processes.
const CPU_RESERVE: u64 = 256 << 20;
/// What plans leave of a GPU's memory: context, kernels, fragments.
const CUDA_RESERVE: u64 = 1 << 30;
/// The least memory, and bandwidth in a second, that a device is believed to have.
const LEAST: f64 = 1048576.0;

/// `NAME=MEMORY[,BANDWIDTH]`: `cuda:0=141GiB,4500GB/s`, `cpu=64GiB`.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceSpec {
    /// `cpu`, `cpu:1`, `cuda:0` …
    pub name: String,
    kind: DeviceKind,
    /// Bytes.
    memory: u64,
    /// Bytes in a second.
    bandwidth: Option<f64>,
}

impl DeviceSpec {
    /// The device, with what plans may use of it.
    pub fn device(&self) -> Device {
        Device {
            kind: self.kind,
            room: room(&self.name, self.kind, self.memory, &format!("of {} GiB given", crate::bytes::gib(self.memory))),
            bandwidth: self.bandwidth,
        }
    }
}

/// This machine's CPUs and memory; the bandwidth is not known.
pub fn this_machine() -> Option<Device> {
    let free = memory::free()?;
    Some(Device { kind: DeviceKind::Cpu, room: room("cpu", DeviceKind::Cpu, free.bytes, &free.bound.to_string()), bandwidth: None })
}

/// A GPU of this machine; the bandwidth is not known.
pub fn gpu(found: &Found) -> Device {
    let name = format!("cuda:{}", found.ordinal);
    let origin = format!("of {} GiB on {}", crate::bytes::gib(found.memory), found.name);
    Device { kind: DeviceKind::Cuda, room: room(&name, DeviceKind::Cuda, found.memory, &origin), bandwidth: None }
}

fn room(name: &str, kind: DeviceKind, memory: u64, origin: &str) -> Room {
    let reserve = match kind {
        DeviceKind::Cpu => CPU_RESERVE,
        DeviceKind::Cuda => CUDA_RESERVE,
    };
    let origin = format!("{origin}, less {} GiB in reserve", crate::bytes::gib(reserve));
    Room { device: name.to_owned(), bytes: memory.saturating_sub(reserve), origin }
}

/// The kind of device that a name stands for.
pub fn kind_of(name: &str) -> Option<DeviceKind> {
    let base = match name.split_once(':') {
        Some((base, number)) => number.parse::<u16>().ok().map(|_| base)?,
        None => name,
    };
    DeviceKind::ALL.into_iter().find(|kind| kind.name() == base)
}

impl FromStr for DeviceSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong =
            |what: &str| format!("{text:?}: {what}; write NAME=MEMORY or NAME=MEMORY,BANDWIDTH, e.g. cuda:0=141GiB,4500GB/s or cpu=64GiB");
        let (name, rest) = text.split_once('=').ok_or_else(|| wrong("no memory"))?;
        let kind = kind_of(name).ok_or_else(|| wrong("the name is none of cpu, cpu:N, cuda:N"))?;
        let (memory, bandwidth) = rest.split_once(',').map_or((rest, None), |(memory, bandwidth)| (memory, Some(bandwidth)));
        let memory = amount(memory).ok_or_else(|| wrong(&format!("the memory is no size up to 8 PiB ({UNITS})")))?;
        if memory < LEAST {
            return Err(wrong("less memory than any device has; is its unit missing?"));
        }
        let bandwidth = match bandwidth {
            None => None,
            Some(text) => {
                let rate = text.strip_suffix("/s").and_then(amount).filter(|b| *b >= LEAST);
                Some(rate.ok_or_else(|| wrong("the bandwidth is no rate (GB/s, TB/s, GiB/s)"))?)
            }
        };
        Ok(Self { name: name.to_owned(), kind, memory: memory as u64, bandwidth })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_parse_or_say_what_is_wrong() {
        let gpu: DeviceSpec = "cuda:0=141GiB,4500GB/s".parse().expect("a device");
        assert_eq!((gpu.kind, gpu.memory, gpu.bandwidth), (DeviceKind::Cuda, 141 << 30, Some(4.5e12)));
        assert_eq!(gpu.device().room.bytes, 140 << 30);
        let cpu: DeviceSpec = "cpu=0.5GiB".parse().expect("a device");
        assert_eq!((cpu.memory, cpu.bandwidth, cpu.device().room.bytes), (1 << 29, None, 1 << 28));
        for (text, needle) in [
            ("cuda:0", "no memory"),
            ("tpu=1GiB", "none of cpu"),
            ("cuda:x=1GiB", "none of cpu"),
            ("cpu=1", "is its unit missing?"),
            ("cpu=9000TiB", "no size up to 8 PiB"),
            ("cpu=64GiB,20B/s", "no rate"),
            ("cpu=-1GiB", "no size"),
            ("cpu=nanGiB", "no size"),
            ("cpu=1GiB,3", "no rate"),
            ("cpu=1GiB,3GB", "no rate"),
            ("", "no memory"),
        ] {
            let error = text.parse::<DeviceSpec>().expect_err(text);
            assert!(error.contains(needle) && error.contains("e.g."), "{error}");
        }
        assert!(this_machine().is_some_and(|d| d.room.bytes > 0));
    }
}
