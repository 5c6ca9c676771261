//! Kernel sources → machine code of a device.
//!
//! A unit is one source with its defines. Its code is looked for in this order: a prebuilt pack (files beside the binary, or where
//! `TANDEM_KERNEL_PACK` says), the cache on disk (`TANDEM_KERNEL_CACHE`, else the user's cache folder), NVRTC. Both folders hold files named
//! `UNIT-HASH-ARCH.cubin`, where the hash covers the source, everything that it includes, and the flags: a file is right or not there.
//!
//! Neighbours: `driver.rs` loads the code; `probe.rs` says whether NVRTC is there; `.ci/kernels` compiles every unit for every architecture.

use std::{
    env,
    ffi::{CStr, CString},
    fs, io,
    path::{Path, PathBuf},
    process,
    sync::OnceLock,
};

use cudarc::nvrtc::sys as nvrtc;
use sha2::{Digest, Sha256};

use super::probe::{self, Found};

macro_rules! files {
    ($($name:literal),* $(,)?) => {
        /// The sources by file name.
        const FILES: &[(&str, &str)] = &[$(($name, include_str!(concat!("../../cuda/", $name)))),*];
    };
}

files!(
    "portable.cuh",
    "weights.cuh",
    "coded.cuh",
    "mma.cuh",
    "coded_mma.cuh",
    "hopper.cuh",
    "tokens.cuh",
    "ahead.cuh",
    "stream.cuh",
    "few.cuh",
    "some.cuh",
    "wide.cuh",
    "step.cuh",
    "mla.cuh",
    "kda.cuh",
    "split.cuh",
    "rows.cu",
    "lend.cu",
    "mhc.cu",
    "experts.cu",
    "kda.cu",
    "kda_chunk.cu",
    "mla.cu",
    "mla_mma.cu",
    "mla_wide.cu",
    "indexer.cu",
    "sample.cu",
    "format.cu",
);

/// A source's text: the embedded one, or, for who works on kernels, that of the folder `TANDEM_KERNEL_SOURCE`.
fn text_of(file: &str) -> &'static str {
    static TEXTS: OnceLock<Vec<(&str, String)>> = OnceLock::new();
    let texts = TEXTS.get_or_init(|| {
        let folder = env::var_os("TANDEM_KERNEL_SOURCE").map(PathBuf::from);
        let read = |name: &str| fs::read_to_string(folder.as_ref()?.join(name)).ok();
        FILES.iter().map(|(name, embedded)| (*name, read(name).unwrap_or_else(|| (*embedded).to_owned()))).collect()
    });
    texts.iter().find(|t| t.0 == file).map_or("", |t| t.1.as_str())
}

/// Headers that sources may include.
fn headers() -> impl Iterator<Item = &'static str> + Clone {
    FILES.iter().map(|f| f.0).filter(|name| name.ends_with(".cuh"))
}

const FLAGS: [&str; 2] = ["--std=c++17", "--fmad=true"];

/// What is compiled together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Unit {
    /// Name, also in file names.
    pub name: &'static str,
    /// Its source, a file of `kernels/cuda`.
    pub file: &'static str,
    /// What is defined for it, as the compiler takes it.
    pub define: Option<&'static str>,
}

macro_rules! units {
    ($($(#[$doc:meta])* $id:ident = $name:literal, $file:literal, $define:expr;)*) => {
        $($(#[$doc])* pub const $id: Unit = Unit { name: $name, file: $file, define: $define };)*
        /// Every unit.
        pub const UNITS: &[Unit] = &[$($id),*];
    };
}

units! {
    /// Embedding, norms, conversions.
    ROWS = "rows", "rows.cu", None;
    /// Rows in memory that two processes see.
    LEND = "lend", "lend.cu", None;
    /// Hyper-connections.
    MHC = "mhc", "mhc.cu", None;
    /// Router and grouping.
    EXPERTS = "experts", "experts.cu", None;
    /// Kimi delta attention.
    KDA = "kda", "kda.cu", None;
    /// The same for prompts.
    KDA_CHUNK = "kda_chunk", "kda_chunk.cu", None;
    /// Latent attention.
    MLA = "mla", "mla.cu", None;
    /// Latent attention on the matrix units.
    MLA_MMA = "mla_mma", "mla_mma.cu", None;
    /// The same for many rows on Hopper; empty for other chips.
    MLA_WIDE = "mla_wide", "mla_wide.cu", None;
    /// The indexer.
    INDEXER = "indexer", "indexer.cu", None;
    /// Sampling.
    SAMPLE = "sample", "sample.cu", None;
    /// Products with F32 weights.
    F32 = "f32", "format.cu", Some("-DWEIGHT=0");
    /// Products with F16 weights.
    F16 = "f16", "format.cu", Some("-DWEIGHT=1");
    /// Products with BF16 weights.
    BF16 = "bf16", "format.cu", Some("-DWEIGHT=2");
    /// Products with E4M3 weights.
    E4M3 = "e4m3", "format.cu", Some("-DWEIGHT=3");
    /// Products with NVFP4 weights.
    NVFP4 = "nvfp4", "format.cu", Some("-DWEIGHT=4");
    /// Products with MXFP4 weights.
    MXFP4 = "mxfp4", "format.cu", Some("-DWEIGHT=5");
    /// Products with Q8_0 weights.
    Q8_0 = "q8_0", "format.cu", Some("-DWEIGHT=6");
    /// Products with codes of up to 4 bits (coded.cuh).
    CODE4 = "code4", "format.cu", Some("-DWEIGHT=7");
    /// Products with codes of 4 bits through a table.
    LUT4 = "lut4", "format.cu", Some("-DWEIGHT=8");
    /// Products with codes of 5 and 6 bits.
    CODE8 = "code8", "format.cu", Some("-DWEIGHT=9");
    /// Products with codes of up to 4 bits and minima.
    CODE4_MIN = "code4_min", "format.cu", Some("-DWEIGHT=10");
    /// Products with codes of 5 bits and minima.
    CODE8_MIN = "code8_min", "format.cu", Some("-DWEIGHT=11");
}

/// Architectures that a release compiles every unit for.
pub const ARCHITECTURES: [&str; 6] = ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"];

/// Why a unit cannot be had for a device.
#[derive(Debug, thiserror::Error)]
pub enum CompileError {
    /// No code and no compiler.
    #[error(
        "no compiled kernels for {arch} (looked in {looked}), and NVRTC is not on this machine to compile them: libnvrtc.so.13 cannot be opened; \
         it is in the package cuda-nvrtc-13-0 of NVIDIA's repository and in the PyPI wheel nvidia-cuda-nvrtc (put its lib folder on \
         LD_LIBRARY_PATH)"
    )]
    NoCompiler {
        /// Architecture.
        arch: String,
        /// Folders.
        looked: String,
    },
    /// NVRTC does not know the chip.
    #[error("NVRTC {version} does not know {arch} (it knows {known}); install a newer NVRTC or a pack of compiled kernels")]
    UnknownArch {
        /// Architecture.
        arch: String,
        /// NVRTC's version.
        version: String,
        /// What it knows.
        known: String,
    },
    /// The source does not compile.
    #[error("kernel {unit} does not compile for {arch}: {log}")]
    Source {
        /// Unit.
        unit: &'static str,
        /// Architecture.
        arch: String,
        /// The compiler's words.
        log: String,
    },
    /// NVRTC itself failed.
    #[error("NVRTC: {0}")]
    Nvrtc(String),
}

/// Folders of compiled kernels.
#[derive(Clone, Debug, Default)]
pub struct Places {
    /// Prebuilt, only read.
    pub pack: Option<PathBuf>,
    /// Read and written.
    pub cache: Option<PathBuf>,
}

impl Places {
    /// Where the environment says, else beside the binary and in the user's cache folder.
    pub fn usual() -> Self {
        let set = |name: &str| env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        let beside = || Some(env::current_exe().ok()?.parent()?.join("tandem-kernels"));
        let cache = || set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(".cache"))).map(|c| c.join("tandem/kernels"));
        Self { pack: set("TANDEM_KERNEL_PACK").or_else(beside), cache: set("TANDEM_KERNEL_CACHE").or_else(cache) }
    }
}

/// Finds or makes code for one architecture.
#[derive(Clone, Debug)]
pub struct Compiler {
    arch: String,
    places: Places,
}

impl Compiler {
    /// For a device.
    pub fn new(device: &Found, places: Places) -> Self {
        Self { arch: device.arch(), places }
    }

    /// For an architecture.
    pub fn for_arch(arch: &str, places: Places) -> Self {
        Self { arch: arch.to_owned(), places }
    }

    /// The code of a unit.
    ///
    /// # Errors
    /// See [`CompileError`]. A cache that cannot be written is only logged.
    pub fn code(&self, unit: Unit) -> Result<Vec<u8>, CompileError> {
        let file = file_name(unit, &self.arch);
        let folders = [&self.places.pack, &self.places.cache];
        for folder in folders.into_iter().flatten() {
            match fs::read(folder.join(&file)) {
                Ok(code) if code.starts_with(b"\x7fELF") => return Ok(code),
                Ok(_) => tracing::warn!(file = %folder.join(&file).display(), "not machine code; compiling anew"),
                Err(_) => {}
            }
        }
        if !probe::has_nvrtc() {
            let looked = folders.into_iter().flatten().map(|p| p.display().to_string()).collect::<Vec<_>>().join(" and ");
            return Err(CompileError::NoCompiler { arch: self.arch.clone(), looked });
        }
        let began = std::time::Instant::now();
        let code = compile(unit, &self.arch)?;
        tracing::info!(unit = unit.name, arch = self.arch, seconds = began.elapsed().as_secs_f64(), "compiled kernels");
        if let Some(cache) = &self.places.cache
            && let Err(error) = keep(cache, &file, &code)
        {
            tracing::warn!(cache = %cache.display(), %error, "compiled kernels cannot be kept: the next start compiles them again");
        }
        Ok(code)
    }
}

/// What a unit's code for an architecture is called in a pack or cache.
pub fn file_name(unit: Unit, arch: &str) -> String {
    format!("{}-{}-{arch}.cubin", unit.name, hash(unit))
}

/// Writes a file as a whole or not at all: other processes may look for it at this moment.
fn keep(folder: &Path, file: &str, code: &[u8]) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    let aside = folder.join(format!(".{file}.{}", process::id()));
    fs::write(&aside, code)?;
    fs::rename(&aside, folder.join(file))
}

/// Hash of all that a unit's code depends on.
fn hash(unit: Unit) -> String {
    let mut sha = Sha256::new();
    let source = text_of(unit.file);
    let headers = headers().filter(|name| depends(source, name)).map(text_of);
    for part in headers.chain([source]).chain(unit.define).chain(FLAGS) {
        sha.update((part.len() as u64).to_le_bytes());
        sha.update(part);
    }
    hex(&sha.finalize()[..8])
}

/// Whether a text includes a header, directly or through another.
fn depends(text: &str, header: &str) -> bool {
    headers().any(|name| text.contains(&format!("#include \"{name}\"")) && (name == header || depends(text_of(name), header)))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// A short name of all sources together: two workers with the same one compute alike on equal chips.
pub fn source_mark() -> String {
    let mut sha = Sha256::new();
    UNITS.iter().for_each(|unit| sha.update(hash(*unit)));
    hex(&sha.finalize()[..4])
}

/// The kernels in a unit's machine code, by the names of the ELF image's sections.
pub fn kernels(code: &[u8]) -> Vec<String> {
    const SECTION: &[u8] = b"\0.text.";
    let mut names: Vec<String> = Vec::new();
    for (at, _) in code.windows(SECTION.len()).enumerate().filter(|(_, part)| *part == SECTION) {
        let name = code[at + SECTION.len()..].split(|&b| b == 0).next().unwrap_or_default();
        names.extend(std::str::from_utf8(name).ok().filter(|n| !n.is_empty()).map(str::to_owned));
    }
    names.sort();
    names.dedup();
    names
}

/// Compiles a unit with NVRTC, which must be there ([`probe::has_nvrtc`]).
///
/// # Errors
/// The architecture is unknown to it, or the source does not compile.
pub fn compile(unit: Unit, arch: &str) -> Result<Vec<u8>, CompileError> {
    if !probe::has_nvrtc() {
        return Err(CompileError::NoCompiler { arch: arch.to_owned(), looked: "no folder".to_owned() });
    }
    known_arch(arch)?;
    let text = |s: &str| CString::new(s).map_err(|e| CompileError::Nvrtc(e.to_string()));
    let source = text(text_of(unit.file))?;
    let name = text(unit.name)?;
    let names = headers().map(text).collect::<Result<Vec<_>, _>>()?;
    let bodies = headers().map(|name| text(text_of(name))).collect::<Result<Vec<_>, _>>()?;
    let options = FLAGS.into_iter().chain(unit.define).map(text).chain([text(&format!("--gpu-architecture={arch}"))]);
    let options = options.collect::<Result<Vec<_>, _>>()?;
    let pointers = |v: &[CString]| v.iter().map(|s| s.as_ptr()).collect::<Vec<_>>();
    let (names, bodies, options) = (pointers(&names), pointers(&bodies), pointers(&options));
    let mut program = Program(std::ptr::null_mut());
    // SAFETY: NVRTC is there; all texts live until the end of this function, and the counts are those of the arrays.
    unsafe {
        check(nvrtc::nvrtcCreateProgram(
            &raw mut program.0,
            source.as_ptr(),
            name.as_ptr(),
            names.len() as i32,
            bodies.as_ptr(),
            names.as_ptr(),
        ))?;
        if nvrtc::nvrtcCompileProgram(program.0, options.len() as i32, options.as_ptr()) != nvrtc::nvrtcResult::NVRTC_SUCCESS {
            return Err(CompileError::Source { unit: unit.name, arch: arch.to_owned(), log: program.log()? });
        }
        let mut size = 0;
        check(nvrtc::nvrtcGetCUBINSize(program.0, &raw mut size))?;
        let mut code = vec![0u8; size];
        check(nvrtc::nvrtcGetCUBIN(program.0, code.as_mut_ptr().cast()))?;
        Ok(code)
    }
}

fn known_arch(arch: &str) -> Result<(), CompileError> {
    let (mut count, mut major, mut minor) = (0, 0, 0);
    // SAFETY: NVRTC is there, and the places are ours.
    unsafe {
        check(nvrtc::nvrtcGetNumSupportedArchs(&raw mut count))?;
        check(nvrtc::nvrtcVersion(&raw mut major, &raw mut minor))?;
    }
    let mut known = vec![0; count.max(0) as usize];
    // SAFETY: the array holds as many as were announced.
    check(unsafe { nvrtc::nvrtcGetSupportedArchs(known.as_mut_ptr()) })?;
    let number = arch.trim_start_matches("sm_").trim_end_matches('a').parse::<i32>().unwrap_or(0);
    if known.contains(&number) {
        return Ok(());
    }
    let known = known.iter().map(|a| format!("sm_{a}")).collect::<Vec<_>>().join(", ");
    Err(CompileError::UnknownArch { arch: arch.to_owned(), version: format!("{major}.{minor}"), known })
}

struct Program(nvrtc::nvrtcProgram);

impl Program {
    fn log(&self) -> Result<String, CompileError> {
        let mut size = 0;
        // SAFETY: the program exists.
        check(unsafe { nvrtc::nvrtcGetProgramLogSize(self.0, &raw mut size) })?;
        let mut log = vec![0u8; size + 1];
        // SAFETY: the buffer holds the log and a zero behind it.
        check(unsafe { nvrtc::nvrtcGetProgramLog(self.0, log.as_mut_ptr().cast()) })?;
        Ok(CStr::from_bytes_until_nul(&log).map(|s| s.to_string_lossy().into_owned()).unwrap_or_default())
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: made by NVRTC, and not used after this. A failure leaves nothing to do.
            let _ = unsafe { nvrtc::nvrtcDestroyProgram(&raw mut self.0) };
        }
    }
}

fn check(result: nvrtc::nvrtcResult) -> Result<(), CompileError> {
    if result == nvrtc::nvrtcResult::NVRTC_SUCCESS { Ok(()) } else { Err(CompileError::Nvrtc(format!("{result:?}"))) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hash_covers_what_is_included() {
        assert!(
            depends(text_of(BF16.file), "mma.cuh")
                && depends(text_of(BF16.file), "portable.cuh")
                && !depends(text_of(KDA.file), "weights.cuh")
        );
        assert_ne!(hash(BF16), hash(NVFP4));
        assert_eq!(hash(BF16).len(), 16);
    }

    /// Launches may overlap (driver.rs): a kernel that does not await the one ahead could read what is not written yet.
    #[test]
    fn every_kernel_lets_the_next_begin_and_awaits_the_one_ahead() {
        let waits = |body: &str| body.contains("begin_next();") && body.contains("await_ahead();");
        for (name, _) in FILES.iter().filter(|f| f.0.ends_with(".cu")) {
            let text = text_of(name);
            let shared: Vec<&str> = text.split("\nDEVICE ").chain(text.split("\ntemplate ")).filter(|part| waits(part)).collect();
            for kernel in text.split("\nKERNEL ").skip(1) {
                let body = kernel.split("\n}").next().unwrap_or_default();
                let calls =
                    |part: &&&str| part.split('(').next().and_then(|head| head.split_whitespace().last()).is_some_and(|f| body.contains(f));
                assert!(waits(body) || shared.iter().any(|part| calls(&part)), "{name}: {}", kernel.lines().next().unwrap_or_default());
            }
        }
    }

    #[test]
    fn kept_code_is_found_again_and_rubbish_is_not_taken() {
        let dir = tempfile::tempdir().expect("a folder");
        let places = Places { pack: None, cache: Some(dir.path().to_owned()) };
        let file = format!("kda-{}-sm_80.cubin", hash(KDA));
        keep(dir.path(), &file, b"\x7fELF code").expect("written");
        let compiler = Compiler::for_arch("sm_80", places.clone());
        assert_eq!(compiler.code(KDA).expect("found"), b"\x7fELF code");
        keep(dir.path(), &file, b"rubbish").expect("written");
        match compiler.code(KDA) {
            Ok(code) => assert!(code.starts_with(b"\x7fELF"), "compiled anew"),
            Err(e @ CompileError::NoCompiler { .. }) => assert!(e.to_string().contains("nvidia-cuda-nvrtc"), "{e}"),
            Err(e) => panic!("{e}"),
        }
    }
}
