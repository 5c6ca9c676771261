//! What this machine has: the driver, its version, the devices. Nothing here panics or fails where something is missing.
//!
//! `cudarc` opens libraries at the first call and panics where one is not there, so every use of the driver or of NVRTC starts here.

use std::{ffi::CStr, fmt, sync::OnceLock};

use cudarc::{driver::sys as cu, nvrtc::sys as nvrtc};

/// CUDA version that the driver must support: that of the calls made here, and of kernels that NVRTC 13 compiles.
const NEEDED: i32 = 13_000;
/// Oldest chips that have what the kernels use (bf16 matrix units, 99 KiB of shared memory).
const OLDEST: (i32, i32) = (8, 0);

/// A version as the driver reports it: 13000 is 13.0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub i32);

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0 / 1000, self.0 % 1000 / 10)
    }
}

/// A CUDA device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Its number: `cuda:ordinal`.
    pub ordinal: usize,
    /// Model name.
    pub name: String,
    /// Compute capability.
    pub major: i32,
    /// Compute capability.
    pub minor: i32,
    /// Multiprocessors.
    pub sms: i32,
    /// Bytes of memory.
    pub memory: u64,
    /// CUDA version of the driver.
    pub driver: Version,
}

impl Found {
    /// The architecture that kernels are compiled for: with the chip's own instructions where there is such a variant.
    pub fn arch(&self) -> String {
        let own = if self.major >= 9 { "a" } else { "" };
        format!("sm_{}{}{own}", self.major, self.minor)
    }
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gib = self.memory as f64 / f64::from(1 << 30);
        write!(f, "cuda:{} {} ({gib:.1} GiB, {} SMs, {})", self.ordinal, self.name, self.sms, self.arch())
    }
}

/// Why there is no device to use.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProbeError {
    /// libcuda is missing.
    #[error(
        "no CUDA driver on this machine: libcuda.so.1 cannot be opened; install NVIDIA's driver, version 580 or newer (Debian and Ubuntu: \
         nvidia-driver or cuda-drivers; in a container: start it with the NVIDIA runtime), or use --device cpu"
    )]
    NoDriver,
    /// The driver does not start.
    #[error("the CUDA driver does not start: {said}; {try_this}, or use --device cpu")]
    Init {
        /// Its own words.
        said: String,
        /// What would work.
        try_this: &'static str,
    },
    /// The driver is too old.
    #[error("the driver supports CUDA {got}, needed is {}: install NVIDIA's driver 580 or newer, or use --device cpu", Version(NEEDED))]
    OldDriver {
        /// What it supports.
        got: Version,
    },
    /// No such device.
    #[error("there is no cuda:{ordinal}: this machine has {}", list(.found))]
    NoDevice {
        /// Asked for.
        ordinal: usize,
        /// What there is.
        found: Vec<Found>,
    },
    /// The device lacks what kernels need.
    #[error(
        "cuda:{ordinal} {device} has compute capability {major}.{minor}, needed is {}.{} (Ampere) or newer: name another GPU, or use --device cpu",
        OLDEST.0, OLDEST.1
    )]
    OldDevice {
        /// Its number.
        ordinal: usize,
        /// Model name.
        device: String,
        /// Compute capability.
        major: i32,
        /// Compute capability.
        minor: i32,
    },
}

fn list(found: &[Found]) -> String {
    if found.is_empty() { "no CUDA device".to_owned() } else { found.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ") }
}

/// Whether libnvrtc can be opened.
pub fn has_nvrtc() -> bool {
    static HAS: OnceLock<bool> = OnceLock::new();
    // SAFETY: opening a library runs its initialisers; NVRTC's do nothing but set up its own memory.
    *HAS.get_or_init(|| unsafe { nvrtc::is_culib_present() })
}

/// The devices of this machine, asked once per process.
///
/// # Errors
/// No driver, one that does not start, or one that is too old.
pub fn devices() -> Result<Vec<Found>, ProbeError> {
    static FOUND: OnceLock<Result<Vec<Found>, ProbeError>> = OnceLock::new();
    FOUND.get_or_init(look).clone()
}

/// A device by number.
///
/// # Errors
/// As [`devices`]; no such device, or one that is too old.
pub fn device(ordinal: usize) -> Result<Found, ProbeError> {
    let found = devices()?;
    match found.get(ordinal) {
        Some(d) if (d.major, d.minor) < OLDEST => {
            Err(ProbeError::OldDevice { ordinal, device: d.name.clone(), major: d.major, minor: d.minor })
        }
        Some(d) => Ok(d.clone()),
        None => Err(ProbeError::NoDevice { ordinal, found }),
    }
}

fn look() -> Result<Vec<Found>, ProbeError> {
    // SAFETY: opening the driver library has no other effect.
    if !unsafe { cu::is_culib_present() } {
        return Err(ProbeError::NoDriver);
    }
    let mut version = 0;
    // SAFETY: the library is there; every driver has these calls, and the places written to are ours.
    unsafe {
        match cu::cuInit(0) {
            cu::CUresult::CUDA_SUCCESS => {}
            cu::CUresult::CUDA_ERROR_NO_DEVICE => return Ok(Vec::new()),
            error => return Err(no_start(error)),
        }
        check(cu::cuDriverGetVersion(&raw mut version))?;
    }
    if version < NEEDED {
        return Err(ProbeError::OldDriver { got: Version(version) });
    }
    let mut count = 0;
    // SAFETY: as above.
    check(unsafe { cu::cuDeviceGetCount(&raw mut count) })?;
    (0..count).map(|i| describe(i, Version(version))).collect()
}

/// What a driver says that does not start, and what helps.
fn no_start(result: cu::CUresult) -> ProbeError {
    use cu::CUresult as R;
    let try_this = match result {
        R::CUDA_ERROR_STUB_LIBRARY => {
            "the libcuda that was found is the toolkit's stub for linking: take its folder (…/stubs) off LD_LIBRARY_PATH, so that the driver's own \
             libcuda.so.1 is found"
        }
        R::CUDA_ERROR_SYSTEM_DRIVER_MISMATCH => {
            "libcuda and the loaded kernel module are of different driver versions, as after an update: restart the machine or load the module anew; \
             in a container, its libcuda must be the host's"
        }
        R::CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE => {
            "the forward-compatibility libcuda (cuda-compat) does not support this GPU: take its folder off LD_LIBRARY_PATH and install driver 580 or \
             newer"
        }
        R::CUDA_ERROR_SYSTEM_NOT_READY => {
            "where GPUs are joined by NVSwitch, nvidia-fabricmanager must run: start it, of the driver's own version"
        }
        _ => "nvidia-smi shows whether the device and the kernel module are there (and nvidia-modprobe -u makes the device files)",
    };
    ProbeError::Init { said: words(result), try_this }
}

fn describe(i: i32, driver: Version) -> Result<Found, ProbeError> {
    use cu::CUdevice_attribute_enum as A;
    let (mut device, mut bytes, mut name) = (0, 0usize, [0 as std::ffi::c_char; 128]);
    let attribute = |device, which| {
        let mut value = 0;
        // SAFETY: the driver is initialised and the device exists.
        check(unsafe { cu::cuDeviceGetAttribute(&raw mut value, which, device) }).map(|()| value)
    };
    // SAFETY: as above; the name's buffer is as long as is said.
    unsafe {
        check(cu::cuDeviceGet(&raw mut device, i))?;
        check(cu::cuDeviceGetName(name.as_mut_ptr(), 127, device))?;
        check(cu::cuDeviceTotalMem_v2(&raw mut bytes, device))?;
    }
    // SAFETY: the buffer ends with a zero whatever the driver wrote.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned();
    Ok(Found {
        ordinal: i as usize,
        name,
        major: attribute(device, A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        minor: attribute(device, A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        sms: attribute(device, A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        memory: bytes as u64,
        driver,
    })
}

fn check(result: cu::CUresult) -> Result<(), ProbeError> {
    if result == cu::CUresult::CUDA_SUCCESS { Ok(()) } else { Err(no_start(result)) }
}

/// The driver's own words for a result.
pub(super) fn words(result: cu::CUresult) -> String {
    let mut text = std::ptr::null();
    // SAFETY: the library is there; the text, where there is one, is a constant of it.
    unsafe {
        if cu::cuGetErrorString(result, &raw mut text) == cu::CUresult::CUDA_SUCCESS && !text.is_null() {
            return format!("{} ({result:?})", CStr::from_ptr(text).to_string_lossy());
        }
    }
    format!("{result:?}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_say_what_was_needed_and_what_there_is() {
        let h200 =
            Found { ordinal: 0, name: "NVIDIA H200".into(), major: 9, minor: 0, sms: 132, memory: 150 << 30, driver: Version(13_000) };
        assert_eq!(h200.arch(), "sm_90a");
        assert_eq!(Found { major: 8, minor: 6, ..h200.clone() }.arch(), "sm_86");
        let e = ProbeError::NoDevice { ordinal: 3, found: vec![h200] }.to_string();
        assert!(e.contains("no cuda:3") && e.contains("cuda:0 NVIDIA H200 (150.0 GiB, 132 SMs, sm_90a)"), "{e}");
        assert!(ProbeError::NoDevice { ordinal: 0, found: vec![] }.to_string().contains("no CUDA device"));
        let e = ProbeError::OldDriver { got: Version(12_040) }.to_string();
        assert!(e.contains("12.4") && e.contains("13.0") && e.contains("580"), "{e}");
        let e = ProbeError::OldDevice { ordinal: 1, device: "T4".into(), major: 7, minor: 5 }.to_string();
        assert!(e.contains("cuda:1 T4") && e.contains("7.5") && e.contains("8.0"), "{e}");
    }

    #[test]
    fn looking_never_panics() {
        if let Err(e) = device(0) {
            println!("no device here: {e}");
        }
        println!("NVRTC: {}", has_nvrtc());
    }
}
