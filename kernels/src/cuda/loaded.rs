//! Kernels of a device, loaded unit by unit, and the shared memory that each may ask for.
//!
//! Neighbours: `compile.rs` has the code, `driver.rs` launches.

use std::{collections::HashMap, ffi::CString, sync::Arc};

use cudarc::driver::sys as cu;
use parking_lot::Mutex;

use super::{
    compile::{self, Compiler, Unit},
    driver::{Device, Kernel, check},
};

/// Kernels of a device by unit and name, loaded when they are first asked for.
pub(super) struct Kernels {
    device: Arc<Device>,
    compiler: Compiler,
    loaded: Mutex<HashMap<&'static str, Module>>,
}

/// A kernel of a loaded unit.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Counted {
    /// The unit.
    pub unit: &'static str,
    /// Its name in the unit.
    pub kernel: String,
    /// Whether this backend has launched it.
    pub launched: bool,
}

struct Module {
    module: cu::CUmodule,
    kernels: HashMap<&'static str, Kernel>,
}

// SAFETY: see [`Kernel`].
unsafe impl Send for Module {}

/// Kernels whose shared memory is sized at launch.
const DYNAMIC_SHARED: [&str; 7] =
    ["kda_follow", "mla_attend", "mla_attend_mma", "index_score", "index_score_2", "index_score_8", "index_score_rows"];
/// Shared memory of a block that every supported chip has (8.6, 8.9 and 12.0 have the least).
pub(super) const MOST_SHARED: usize = 99 << 10;
/// Kernels that are there on Hopper alone, and what their blocks take of it (wide.cuh): eight stages and an image of 16 KiB each from a multiple of
/// 1024 on, and sixteen gates.
const WIDE: [&str; 3] = ["linear_wide", "glu_wide", "mla_out_wide"];
pub(super) const WIDE_SHARED: usize = 1024 + 9 * (16 << 10) + 16 * 8;
/// What blocks of mla_wide.cu take: 256 lines of four chunks, and `Attending`, both from a multiple of 1024 on.
pub(super) const FOLD_SHARED: usize = 1024 + (128 << 10);
pub(super) const ATTEND_SHARED: usize = 1024 + (211 << 10);
/// One that is used only where a chip has as much as it asks for, and how much that is.
pub(super) const MANY: (&str, usize) = ("mla_attend_many", 180 << 10);
/// What such kernels use beside it.
const STATIC_SHARED: usize = 2 << 10;

/// Kernels of few rows (few.cuh), and those of some (some.cuh) with the most that they take where there is more than on the oldest chips.
const FEW: [&str; 4] = ["linear_1", "linear_8", "glu_1", "glu_8"];
const SOME: [&str; 6] = ["linear_some_2", "linear_some_4", "linear_some_8", "glu_some_2", "glu_some_4", "glu_some_8"];
pub(super) const SOME_SHARED: usize = 224 << 10;

/// The shared memory that a kernel whose launches size it may ask for, where a block may have `most`.
fn dynamic_shared(name: &str, most: usize) -> Option<usize> {
    if WIDE.contains(&name) {
        Some(WIDE_SHARED)
    } else if name == "mla_fold_wide" {
        Some(FOLD_SHARED)
    } else if name == "mla_attend_wide" {
        Some(ATTEND_SHARED)
    } else if SOME.contains(&name) {
        Some(most.min(SOME_SHARED))
    } else if name == MANY.0 {
        Some(MANY.1)
    } else {
        (DYNAMIC_SHARED.contains(&name) || FEW.contains(&name)).then_some(MOST_SHARED - STATIC_SHARED)
    }
}

/// What a model of any type needs.
const COMMON: [Unit; 11] = [
    compile::ROWS,
    compile::LEND,
    compile::MHC,
    compile::EXPERTS,
    compile::KDA,
    compile::KDA_CHUNK,
    compile::MLA,
    compile::MLA_MMA,
    compile::INDEXER,
    compile::SAMPLE,
    compile::F32,
];

impl Kernels {
    pub(super) fn new(device: Arc<Device>, compiler: Compiler) -> Self {
        Self { device, compiler, loaded: Mutex::default() }
    }

    /// Loads what every model needs.
    pub(super) fn load_common(&self) -> Result<(), String> {
        self.load_all(&COMMON)?;
        self.load_all(if self.device.wide { &[compile::MLA_WIDE] } else { &[] })
    }

    /// Loads the units that are not loaded yet; compiles on several threads where it must.
    pub(super) fn load_all(&self, units: &[Unit]) -> Result<(), String> {
        let missing: Vec<Unit> = units.iter().copied().filter(|unit| !self.loaded.lock().contains_key(unit.name)).collect();
        let codes: Vec<_> = std::thread::scope(|s| {
            let jobs: Vec<_> = missing.iter().map(|unit| (unit, s.spawn(|| self.compiler.code(*unit)))).collect();
            jobs.into_iter().map(|(unit, job)| (*unit, job.join())).collect()
        });
        for (unit, code) in codes {
            let code = code.map_err(|_| format!("compiling {} panicked", unit.name))?.map_err(|e| e.to_string())?;
            self.load_code(unit, &code)?;
        }
        Ok(())
    }

    /// Loads a unit, if it is not.
    pub(super) fn load(&self, unit: Unit) -> Result<(), String> {
        if self.loaded.lock().contains_key(unit.name) {
            return Ok(());
        }
        let code = self.compiler.code(unit).map_err(|e| e.to_string())?;
        self.load_code(unit, &code)
    }

    /// Every kernel of the loaded units, in order of their names, and whether it was asked for: launched, that is.
    pub(super) fn census(&self) -> Result<Vec<Counted>, String> {
        let mut all = Vec::new();
        for (unit, module) in self.loaded.lock().iter() {
            let Some(known) = compile::UNITS.iter().find(|u| u.name == *unit) else { continue };
            let code = self.compiler.code(*known).map_err(|e| e.to_string())?;
            let of = |kernel: String| Counted { unit, launched: module.kernels.contains_key(kernel.as_str()), kernel };
            all.extend(compile::kernels(&code).into_iter().map(of));
        }
        all.sort();
        Ok(all)
    }

    fn load_code(&self, unit: Unit, code: &[u8]) -> Result<(), String> {
        self.device.bind()?;
        let mut module = std::ptr::null_mut();
        // SAFETY: the code is an ELF image as a whole, which the driver checks and copies.
        match unsafe { cu::cuModuleLoadData(&raw mut module, code.as_ptr().cast()) } {
            cu::CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                return Err(self.device.no_room(&format!("the kernels of {}", unit.name), code.len() as u64).to_string());
            }
            other => check(unit.name, other)?,
        }
        self.loaded.lock().insert(unit.name, Module { module, kernels: HashMap::new() });
        Ok(())
    }

    /// A kernel of a loaded unit, allowed all the shared memory that the oldest chips have.
    pub(super) fn get(&self, unit: Unit, name: &'static str) -> Result<Kernel, String> {
        let mut loaded = self.loaded.lock();
        let module = loaded.get_mut(unit.name).ok_or_else(|| format!("kernels of {} are not loaded", unit.name))?;
        if let Some(kernel) = module.kernels.get(name) {
            return Ok(*kernel);
        }
        let mut function = std::ptr::null_mut();
        let text = CString::new(name).map_err(|e| e.to_string())?;
        // SAFETY: the module is loaded and is never unloaded.
        unsafe {
            check(name, cu::cuModuleGetFunction(&raw mut function, module.module, text.as_ptr()))?;
            if let Some(most) = dynamic_shared(name, self.device.shared) {
                let attribute = cu::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
                check(name, cu::cuFuncSetAttribute(function, attribute, most as i32))?;
            }
        }
        module.kernels.insert(name, Kernel(function));
        Ok(Kernel(function))
    }
}
