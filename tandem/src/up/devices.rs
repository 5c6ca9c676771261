//! Which devices an instance runs on: what the flags say, checked against what this machine has, and a choice where they say nothing.
//!
//! Neighbours: `supervisor.rs` prints the choice before anything starts; `tandem doctor` prints what is found.

use tandem_kernels::cuda::probe::{self, Found};
use tandem_model::Resident;

use crate::{
    cli::values::{Device, ExpertDevice},
    failure::Failure,
    plan::{self, layout},
};

/// What was chosen.
#[derive(Debug, PartialEq, Eq)]
pub struct Choice {
    /// Devices of the expert workers.
    pub experts: Vec<Device>,
    /// All experts stay on the attention worker, though no flag says so.
    pub all_resident: bool,
    /// Lines for the user.
    pub notes: Vec<String>,
}

/// Checks the devices that are asked for, and chooses those of the experts where nothing is.
///
/// # Errors
/// A device that is not there, or flags that contradict each other.
pub fn choose(attn: Device, experts: &[ExpertDevice], resident: &Resident) -> Result<Choice, Failure> {
    if experts.len() > 1 && experts.contains(&ExpertDevice::None) {
        return Err(Failure::usage("--experts: none stands alone; give devices or none, not both"));
    }
    let asked = |device: Device| if let Device::Cuda(n) = device { Some(n) } else { None };
    let wanted: Vec<usize> = asked(attn).into_iter().chain(experts.iter().filter_map(|e| e.device()).filter_map(asked)).collect();
    if wanted.is_empty() {
        return Ok(decide(attn, experts, resident, &[]));
    }
    for ordinal in wanted {
        probe::device(ordinal).map_err(|error| Failure::config(error.to_string()))?;
    }
    let found = probe::devices().map_err(|error| Failure::config(error.to_string()))?;
    let mut choice = decide(attn, experts, resident, &found);
    for (i, device) in found.iter().enumerate() {
        choice.notes.insert(i, format!("found     {device}"));
    }
    Ok(choice)
}

/// The choice, given this machine's GPUs.
fn decide(attn: Device, experts: &[ExpertDevice], resident: &Resident, found: &[Found]) -> Choice {
    let of = |experts: Vec<Device>| Choice { experts, all_resident: false, notes: Vec::new() };
    if !experts.is_empty() {
        return of(experts.iter().filter_map(|e| e.device()).collect());
    }
    let Device::Cuda(hot) = attn else {
        return of(if matches!(resident, Resident::All) { Vec::new() } else { vec![Device::Cpu] });
    };
    match found.iter().find(|d| d.ordinal != hot) {
        _ if matches!(resident, Resident::All) => of(Vec::new()),
        Some(other) => {
            let note = format!("experts   on cuda:{}, the machine's other GPU (--experts chooses)", other.ordinal);
            Choice { notes: vec![note], ..of(vec![Device::Cuda(other.ordinal)]) }
        }
        None => {
            let note = format!("experts   resident on {attn}: the machine has no second GPU (--experts cpu puts them on the CPU)");
            Choice { all_resident: true, notes: vec![note], ..of(Vec::new()) }
        }
    }
}

/// The memories behind some devices, and which of them each device uses; with the host's, which GPU workers use, too. None where this
/// machine does not say how much memory is free: nothing is checked then.
///
/// # Errors
/// A GPU that is not there.
pub fn rooms<'a>(devices: impl Iterator<Item = &'a Device>) -> Result<(Vec<layout::Device>, Vec<usize>), Failure> {
    let (mut rooms, mut names, mut on): (Vec<layout::Device>, Vec<Device>, Vec<usize>) = Default::default();
    let mut unknown = false;
    for device in devices {
        // The reference backend computes in the CPU's memory.
        let place = if matches!(device, Device::Cuda(_)) { *device } else { Device::Cpu };
        let at = match names.iter().position(|known| *known == place) {
            Some(at) => at,
            None => {
                let room = match place {
                    Device::Cuda(n) => Some(plan::device::gpu(&probe::device(n).map_err(|error| Failure::config(error.to_string()))?)),
                    _ => plan::device::this_machine(),
                };
                unknown |= room.is_none();
                rooms.extend(room);
                names.push(place);
                names.len() - 1
            }
        };
        on.push(at);
    }
    if !names.contains(&Device::Cpu) {
        rooms.extend(plan::device::this_machine());
    }
    Ok((if unknown { Vec::new() } else { rooms }, on))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpus(n: usize) -> Vec<Found> {
        let one =
            |ordinal| Found { ordinal, name: "GPU".into(), major: 9, minor: 0, sms: 132, memory: 1 << 37, driver: probe::Version(13_000) };
        (0..n).map(one).collect()
    }

    fn none() -> Resident {
        "none".parse().expect("none")
    }

    #[test]
    fn flags_are_taken_as_they_are() {
        let experts = [ExpertDevice::On(Device::Cuda(1)), ExpertDevice::On(Device::Cpu)];
        assert_eq!(decide(Device::Cuda(0), &experts, &none(), &gpus(2)).experts, [Device::Cuda(1), Device::Cpu]);
        assert_eq!(decide(Device::Cuda(0), &[ExpertDevice::None], &Resident::All, &gpus(2)).experts, []);
        assert_eq!(decide(Device::Cpu, &[], &none(), &[]).experts, [Device::Cpu]);
        assert_eq!(decide(Device::Cpu, &[], &Resident::All, &[]).experts, []);
    }

    #[test]
    fn without_flags_experts_take_another_gpu_or_stay() {
        let choice = decide(Device::Cuda(0), &[], &none(), &gpus(2));
        assert_eq!((choice.experts, choice.all_resident), (vec![Device::Cuda(1)], false));
        assert_eq!(decide(Device::Cuda(1), &[], &none(), &gpus(2)).experts, [Device::Cuda(0)]);
        let choice = decide(Device::Cuda(0), &[], &none(), &gpus(1));
        assert_eq!((choice.experts, choice.all_resident), (vec![], true));
        assert!(choice.notes[0].contains("no second GPU"), "{:?}", choice.notes);
        assert!(!decide(Device::Cuda(0), &[], &Resident::All, &gpus(2)).all_resident);
    }

    #[test]
    fn a_machine_without_the_device_is_told_so() {
        let experts = [ExpertDevice::None, ExpertDevice::On(Device::Cpu)];
        assert!(choose(Device::Cpu, &experts, &none()).expect_err("contradiction").reason.contains("none stands alone"));
        let missing = choose(Device::Cuda(60_000), &[], &none()).expect_err("no such device").reason;
        assert!(missing.contains("CUDA") || missing.contains("cuda:60000"), "{missing}");
    }
}
