//! The files of a checkpoint through `mmap`, and the tensors in them.
//!
//! | module | idea |
//! |---|---|
//! | [`safetensors`] | one file, or an index and its shards |
//! | [`gguf`] | one file, or a numbered set of shards |
//! | `dummy` | made-up weights behind headers alone |
//!
//! Nothing is copied: a tensor is a range of a mapped file, kept alive by [`SharedBytes`]. The only unsafe block of this crate is the
//! map itself.
//!
//! Neighbours: `checkpoint.rs` gives the stored names their meaning.

mod dummy;
pub mod gguf;
pub mod safetensors;

use std::{
    fmt,
    fs::File,
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
};

use ::safetensors::tensor::Dtype;
use memmap2::Mmap;
use tandem_quant::{DType, SharedBytes};

use crate::{ModelError, files::regular, gguf::sidecar::Codebooks};

/// The element type of a stored tensor, in its file's own terms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    /// A safetensors type.
    Safetensors(Dtype),
    /// A ggml type id.
    Ggml(u32),
}

impl Stored {
    /// The type, where its elements need nothing beside them to be read.
    pub fn plain(self) -> Option<DType> {
        match self {
            Self::Safetensors(Dtype::F32) => Some(DType::F32),
            Self::Safetensors(Dtype::F16) => Some(DType::F16),
            Self::Safetensors(Dtype::BF16) => Some(DType::Bf16),
            Self::Safetensors(_) => None,
            Self::Ggml(id) => DType::from_ggml(id),
        }
    }
}

impl fmt::Display for Stored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Safetensors(dtype) => write!(f, "{dtype:?}"),
            Self::Ggml(id) => match DType::from_ggml(*id) {
                Some(dtype) => write!(f, "{dtype}"),
                None => write!(f, "ggml type {id}{}", gguf::unread_name(*id)),
            },
        }
    }
}

/// How much of the files must be there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// Headers: a file may end right behind its header (a stub). One that ends inside its data is refused all the same.
    Headers,
    /// Everything.
    Data,
}

/// Where a stored tensor lies.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Its name in the file.
    pub stored_name: String,
    /// Number of the file.
    pub file: usize,
    /// Element type as the file has it.
    pub stored: Stored,
    /// Shape, row-major.
    pub shape: Vec<usize>,
    range: Range<usize>,
}

impl Entry {
    /// Bytes on disk.
    pub fn bytes(&self) -> usize {
        self.range.len()
    }
}

/// The mapped files of a checkpoint and the tensors in them.
#[derive(Debug)]
pub struct Storage {
    files: Vec<(PathBuf, SharedBytes)>,
    /// The maps behind the files' bytes, in the same order.
    maps: Vec<Arc<Mmap>>,
    /// All tensors, in the order of their stored names.
    pub entries: Vec<Entry>,
    /// The header with the model's keys, where the files are GGUF.
    pub gguf: Option<crate::gguf::Header>,
    /// Codebooks of ROCmFP tensors.
    pub codebooks: Codebooks,
    /// Whether the files end right behind their headers.
    pub stub: bool,
    /// A file with its data.
    whole: Option<PathBuf>,
    /// A file that ends right behind its header.
    cut: Option<PathBuf>,
    /// What stands in for the files' data.
    dummy: Option<dummy::Dummy>,
}

impl Storage {
    fn empty() -> Self {
        Self {
            files: Vec::new(),
            maps: Vec::new(),
            entries: Vec::new(),
            gguf: None,
            codebooks: Codebooks::new(),
            stub: false,
            whole: None,
            cut: None,
            dummy: None,
        }
    }

    fn push(&mut self, path: &Path, map: Arc<Mmap>) {
        self.files.push((path.to_owned(), SharedBytes::new(Arc::clone(&map) as _)));
        self.maps.push(map);
    }

    /// Whether pages will be used in order (the kernel reads ahead of faults) or here and there (it reads what is touched alone).
    pub(crate) fn expect_order(&self, order: bool) {
        #[cfg(unix)]
        for map in &self.maps {
            let _only_advice = map.advise(if order { memmap2::Advice::Normal } else { memmap2::Advice::Random });
        }
    }

    /// The mapped files, with their paths.
    pub(crate) fn maps(&self) -> impl ExactSizeIterator<Item = (&Path, &Mmap)> {
        self.files.iter().zip(&self.maps).map(|((path, _), map)| (path.as_path(), map.as_ref()))
    }

    /// Number of files.
    pub fn file_count(&self) -> usize {
        self.files.len()
    }

    /// Notes whether a file with tensors has its data.
    fn reaches(&mut self, path: &Path, is_stub: bool) {
        self.stub |= is_stub;
        let place = if is_stub { &mut self.cut } else { &mut self.whole };
        place.get_or_insert_with(|| path.to_owned());
    }

    fn sort(mut self) -> Result<Self, ModelError> {
        // All headers are a stub; some are a download that broke off between header and data.
        if let (Some(path), Some(whole)) = (&self.cut, &self.whole) {
            return Err(ModelError::File {
                path: path.clone(),
                needed: format!("its data, as {} has it", whole.display()),
                got: "a file that ends right behind its header (download it again)".to_owned(),
            });
        }
        self.entries.sort_by(|a, b| a.stored_name.cmp(&b.stored_name));
        match self.entries.windows(2).find(|w| w[0].stored_name == w[1].stored_name) {
            Some(twice) => Err(self.duplicate(&twice[0], &twice[1])),
            None => Ok(self),
        }
    }

    /// The error for two stored tensors that mean the same one.
    pub fn duplicate(&self, a: &Entry, b: &Entry) -> ModelError {
        ModelError::Tensor {
            path: self.path(b).to_owned(),
            tensor: b.stored_name.clone(),
            needed: "each tensor once".to_owned(),
            got: format!("a second one: {} in {}", a.stored_name, self.path(a).display()),
        }
    }

    /// The file that an entry is in.
    pub fn path(&self, entry: &Entry) -> &Path {
        &self.files[entry.file].0
    }

    /// From now on tensors have made-up values, whatever the files hold.
    pub(crate) fn make_up(&mut self) {
        self.dummy = Some(dummy::Dummy::of(&self.entries));
    }

    /// The bytes of an entry; `None` where its file ends before them (a header-only stub).
    pub fn bytes(&self, entry: &Entry) -> Option<SharedBytes> {
        match &self.dummy {
            Some(dummy) => dummy.bytes(entry),
            None => self.files[entry.file].1.slice(entry.range.clone()),
        }
    }
}

fn map(path: &Path) -> Result<Arc<Mmap>, ModelError> {
    let io = |source| ModelError::Io { path: path.to_owned(), source };
    regular(path).map_err(io)?;
    let file = File::open(path).map_err(io)?;
    // SAFETY: the map is read-only and private to this process's view; we hand out `&[u8]` of it alone. As with every mapped file, the
    // bytes are undefined if another process writes to it meanwhile, and a shrunk file raises SIGBUS: checkpoints are never changed in
    // place (our own writers write to a temporary folder and rename it).
    let map = unsafe { Mmap::map(&file) }.map_err(io)?;
    Ok(Arc::new(map))
}

/// File names in a folder with one extension (in any case), sorted.
fn files_in(dir: &Path, extension: &str) -> Result<Vec<String>, ModelError> {
    let io = |source| ModelError::Io { path: dir.to_owned(), source };
    let mut names = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(io)? {
        let name = entry.map_err(io)?.file_name().to_string_lossy().into_owned();
        if Path::new(&name).extension().is_some_and(|e| e.eq_ignore_ascii_case(extension)) {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}
