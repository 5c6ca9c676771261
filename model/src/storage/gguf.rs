//! GGUF: one file, or a numbered set of shards found from any of them (docs/checkpoints.md §4.5).

use std::path::{Path, PathBuf};

use super::{Entry, Reach, Storage, Stored, files_in, map};
use crate::{
    ModelError,
    gguf::{GgufError, Header, TensorInfo, Value, config::ARCHITECTURES, sidecar},
};

/// Names of types that exist and are not read, for messages.
pub fn unread_name(id: u32) -> &'static str {
    match id {
        4 | 5 | 31..=33 | 36..=38 => " (removed from ggml)",
        34 => " (TQ1_0)",
        35 => " (TQ2_0)",
        41 => " (Q1_0)",
        100..=107 => " (ROCmFP)",
        133..=399 => " (an ik_llama.cpp type)",
        _ => "",
    }
}

/// A shard's place in its set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Split {
    no: u64,
    count: u64,
    tensors: Option<u64>,
}

impl Storage {
    /// Maps a GGUF file, all shards of its set, or the only set in a folder, and reads the headers. Comes back with the first file and its
    /// header, which has the model's keys.
    ///
    /// # Errors
    /// Not a GGUF file; a sibling that is missing, twice there or of another set; a tensor that is in two shards or runs past its
    /// file's end; a total that does not add up.
    pub fn open_gguf(path: &Path, reach: Reach) -> Result<(Self, PathBuf, Header), ModelError> {
        let mut storage = Self::empty();
        let paths = set_of(path)?;
        let count = paths.len() as u64;
        let mut total = 0;
        let (mut announced, mut first) = (None, None);
        for (i, path) in paths.iter().enumerate() {
            let bytes = map(path)?;
            let header = Header::parse(&bytes).map_err(|source| ModelError::Gguf { path: path.clone(), source })?;
            let is_stub = reach == Reach::Headers && bytes.len() as u64 <= header.data_start && !header.tensors.is_empty();
            if !header.tensors.is_empty() {
                storage.reaches(path, is_stub);
            }
            if !is_stub {
                header.check_extents(bytes.len() as u64).map_err(|source| ModelError::Gguf { path: path.clone(), source })?;
            }
            let split = split_of(path, &header)?;
            if (split.no, split.count) != (i as u64, count) {
                return Err(ModelError::File {
                    path: path.clone(),
                    needed: format!("shard {} of {count}, as its name says", i + 1),
                    got: format!("split.no {} of split.count {} inside (renamed or swapped?)", split.no, split.count),
                });
            }
            total += header.tensors.len() as u64;
            if let (Some(wanted), Some(got)) = (announced, split.tensors)
                && wanted != got
            {
                let needed = format!("split.tensors.count {wanted}, as the shards before it have");
                return Err(ModelError::File { path: path.clone(), needed, got: format!("{got} (a shard of another upload?)") });
            }
            announced = announced.or(split.tensors);
            for info in &header.tensors {
                storage.entries.push(entry(storage.files.len(), header.data_start, info));
            }
            storage.push(path, bytes);
            storage.read_sidecars(path, &header)?;
            first.get_or_insert_with(|| (path.clone(), Header { tensors: Vec::new(), ..header }));
        }
        let Some((first, header)) = first else {
            return Err(ModelError::Folder { path: path.to_owned(), reason: "no .gguf file here".to_owned() });
        };
        if let Some(wanted) = announced
            && wanted != total
        {
            let (needed, got) = (format!("{wanted} tensors in all shards (split.tensors.count)"), total.to_string());
            return Err(ModelError::File { path: first, needed, got });
        }
        let storage = storage.sort()?;
        storage.check_codebooks(&first)?;
        Ok((storage, first, header))
    }

    /// Every codebook belongs to a stack of experts that is there.
    fn check_codebooks(&self, path: &Path) -> Result<(), ModelError> {
        for (kind, layer, surface) in self.codebooks.keys() {
            let stack = format!("blk.{layer}.{}", surface.stack());
            if self.entries.binary_search_by(|e| e.stored_name.as_str().cmp(&stack)).is_err() {
                let source = GgufError::field(kind.name(), &format!("the tensor {stack} for its entry"), "none in any shard");
                return Err(ModelError::Gguf { path: path.to_owned(), source });
            }
        }
        Ok(())
    }

    /// Codebooks under either spelling of the architecture's key, or in loose files beside the shard.
    fn read_sidecars(&mut self, path: &Path, header: &Header) -> Result<(), ModelError> {
        for kind in sidecar::Kind::ALL {
            let keys = ARCHITECTURES.map(|arch| format!("{arch}.{}.sidecar", kind.name()));
            for key in keys.iter().filter(|key| header.get(key).is_some()) {
                let bytes = header.get(key).and_then(Value::as_bytes).ok_or_else(|| ModelError::Key {
                    path: path.to_owned(),
                    key: key.clone(),
                    needed: "an array of bytes".to_owned(),
                    got: header.get(key).map_or_else(String::new, Value::describe),
                })?;
                let gguf = |source| ModelError::Gguf { path: path.to_owned(), source };
                sidecar::read(kind, bytes, &mut self.codebooks).map_err(gguf)?;
            }
            let mut loose = path.as_os_str().to_owned();
            loose.push(format!(".{}.bin", kind.name()));
            let loose = PathBuf::from(loose);
            // A link to nothing is there, too: something was lost.
            if loose.symlink_metadata().is_ok() {
                let bytes = map(&loose)?;
                sidecar::read(kind, &bytes, &mut self.codebooks).map_err(|source| ModelError::Gguf { path: loose, source })?;
            }
        }
        Ok(())
    }

    /// Tensor infos of all shards, for reading the model's keys.
    pub(crate) fn gguf_infos(&self) -> Vec<TensorInfo> {
        let info = |e: &Entry| {
            let Stored::Ggml(ggml_type) = e.stored else { return None };
            Some(TensorInfo { name: e.stored_name.clone(), shape: e.shape.clone(), ggml_type, offset: 0 })
        };
        self.entries.iter().filter_map(info).collect()
    }
}

fn entry(file: usize, data_start: u64, info: &TensorInfo) -> Entry {
    // Checked by `check_extents`: the end lies inside of the file; types that are not read have no known size.
    let start = usize::try_from(data_start + info.offset).unwrap_or(usize::MAX);
    let bytes = info.bytes().and_then(|b| usize::try_from(b).ok()).unwrap_or(0);
    // Some writers pad convolutions with leading dimensions of one, and A_log with one on either side.
    let mut shape = info.shape.clone();
    while shape.len() > 1 && shape[0] == 1 && (shape.len() == 4 || info.name.ends_with(".ssm_a")) {
        shape.remove(0);
    }
    if info.name.ends_with(".ssm_a") && shape.len() == 2 && shape[1] == 1 {
        shape.pop();
    }
    Entry { stored_name: info.name.clone(), file, stored: Stored::Ggml(info.ggml_type), shape, range: start..start.saturating_add(bytes) }
}

/// Whether a path has the format's extension, in any case.
pub fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf"))
}

/// A file's name without the format's extension.
pub(crate) fn stem(name: &str) -> Option<&str> {
    is_gguf(Path::new(name)).then(|| &name[..name.len() - ".gguf".len()])
}

/// `prefix`, number and count of `prefix-00001-of-00003.gguf`.
pub(crate) fn numbered(name: &str) -> Option<(&str, u64, u64)> {
    let stem = stem(name)?;
    let (rest, count) = stem.rsplit_once("-of-")?;
    let (prefix, no) = rest.rsplit_once('-')?;
    let five = |s: &str| (s.len() == 5).then(|| s.parse::<u64>().ok()).flatten();
    let (no, count) = (five(no)?, five(count)?);
    // Others are names that only look like it.
    (1..=count).contains(&no).then_some((prefix, no, count))
}

/// A name for all shards of the set that a file's name says it is one of; other files are sets of their own.
pub fn set_name(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    match numbered(&name) {
        Some((prefix, _, count)) => path.with_file_name(format!("{prefix}-of-{count:05}.gguf")),
        None => path.to_owned(),
    }
}

/// The files of the set that `path` (a file of it, or a folder that holds nothing else) belongs to, in order.
///
/// # Errors
/// No such file, a missing sibling, or a folder with more than one set.
pub fn set_of(path: &Path) -> Result<Vec<PathBuf>, ModelError> {
    if path.is_dir() {
        let names = files_in(path, "gguf")?;
        let first = match names.as_slice() {
            [] => return Err(ModelError::Folder { path: path.to_owned(), reason: "no .gguf file here".to_owned() }),
            [one] => one,
            many => {
                let set = numbered(&many[0]).map(|(prefix, _, count)| (prefix, count));
                let other = many.iter().find(|n| numbered(n).map(|(prefix, _, count)| (prefix, count)) != set);
                if set.is_none() || other.is_some() {
                    let reason = format!("{} .gguf files that are no one set ({}, {}): name the one to load", many.len(), many[0], many[1]);
                    return Err(ModelError::Folder { path: path.to_owned(), reason });
                }
                &many[0]
            }
        };
        return set_of(&path.join(first));
    }
    let exists = |path: &Path| path.try_exists().map_err(|source| ModelError::Io { path: path.to_owned(), source });
    if !exists(path)? {
        return Err(ModelError::Folder { path: path.to_owned(), reason: "no such file".to_owned() });
    }
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let Some((prefix, _, count)) = numbered(&name) else { return Ok(vec![path.to_owned()]) };
    let extension = &name[name.len() - ".gguf".len()..];
    let mut siblings = Vec::new();
    for i in 1..=count {
        let sibling = path.with_file_name(format!("{prefix}-{i:05}-of-{count:05}{extension}"));
        if !exists(&sibling)? {
            return Err(ModelError::File {
                path: sibling,
                needed: format!("this shard: {name} is one of {count}"),
                got: "no such file (download it again)".to_owned(),
            });
        }
        siblings.push(sibling);
    }
    Ok(siblings)
}

fn split_of(path: &Path, header: &Header) -> Result<Split, ModelError> {
    let number = |key: &str| header.get(key).and_then(Value::as_u64);
    let count = number("split.count").unwrap_or(1).max(1);
    let no = number("split.no").unwrap_or(0);
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    if count > 1 && numbered(&name).is_none() {
        return Err(ModelError::File {
            path: path.to_owned(),
            needed: format!("the name of a shard, PREFIX-{:05}-of-{count:05}.gguf, beside its siblings", no + 1),
            got: format!("one of {count} shards under another name (renamed, or several joined with cat?)"),
        });
    }
    Ok(Split { no, count, tensors: number("split.tensors.count") })
}
