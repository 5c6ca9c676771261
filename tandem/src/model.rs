//! Finds the checkpoint to serve: the folder that was named, or the demo model that is built into the binary.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use crate::{cli::args::ModelArgs, failure::Failure};

/// Name of the demo model in the APIs.
const DEMO_NAME: &str = "tandem-demo";

/// A checkpoint on disk.
#[derive(Clone, Debug)]
pub struct Located {
    /// Its folder.
    pub dir: PathBuf,
    /// Its name in the APIs.
    pub name: String,
}

/// Checks that the folder can be read, or unpacks the demo into the cache folder. `served` overrides the name.
///
/// # Errors
/// When there is no such folder, it cannot be read, or the demo cannot be unpacked.
pub fn locate(args: &ModelArgs, served: Option<&str>) -> Result<Located, Failure> {
    let (dir, name) = match &args.model {
        Some(dir) => {
            check_folder(dir)?;
            let full = fs::canonicalize(dir).unwrap_or_else(|_| dir.clone());
            let name = full.file_name().map_or_else(|| "model".into(), |name| name.to_string_lossy().into_owned());
            (dir.clone(), name)
        }
        None => (unpack_demo(args.cache_dir.as_deref())?, DEMO_NAME.into()),
    };
    Ok(Located { dir, name: served.map_or(name, str::to_owned) })
}

fn check_folder(dir: &Path) -> Result<(), Failure> {
    let shown = dir.display();
    let problem = match fs::read_dir(dir) {
        Ok(_) if dir.join("config.json").exists() => return Ok(()),
        Ok(_) => format!("--model {shown}: there is no config.json in it; give the folder of a checkpoint (config.json and *.safetensors)"),
        Err(error) => match error.kind() {
            io::ErrorKind::NotFound => {
                format!("--model {shown}: no such folder; give the folder of a checkpoint, or leave --model out for the demo")
            }
            io::ErrorKind::NotADirectory => format!("--model {shown}: a file, not a folder; give the folder that it lies in"),
            io::ErrorKind::PermissionDenied => format!("--model {shown}: this user may not read it (permission denied)"),
            _ => format!("--model {shown}: {error}"),
        },
    };
    Err(Failure::config(problem))
}

#[cfg(feature = "demo")]
fn unpack_demo(cache_dir: Option<&Path>) -> Result<PathBuf, Failure> {
    let cache = cache_dir.map_or_else(default_cache, Path::to_owned);
    let hint = "give a folder that can be written to with --cache-dir, or a checkpoint with --model";
    tandem_model::demo::unpack(&cache)
        .map_err(|error| Failure::unavailable(format!("cannot unpack the demo model below {}: {error}; {hint}", cache.display())))
}

#[cfg(not(feature = "demo"))]
fn unpack_demo(_: Option<&Path>) -> Result<PathBuf, Failure> {
    Err(Failure::usage("this binary was built without the demo model: give --model DIR"))
}

/// `$XDG_CACHE_HOME/tandem`, `~/.cache/tandem`, or a folder below the temporary one.
#[cfg(feature = "demo")]
fn default_cache() -> PathBuf {
    let folder = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    match (folder("XDG_CACHE_HOME"), folder("HOME")) {
        (Some(cache), _) => cache.join("tandem"),
        (None, Some(home)) => home.join(".cache/tandem"),
        (None, None) => std::env::temp_dir().join("tandem-cache"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(model: &Path) -> ModelArgs {
        ModelArgs { model: Some(model.to_owned()), cache_dir: None, dtype: crate::cli::values::Dtype::F32 }
    }

    #[test]
    fn folders_that_cannot_be_served_are_named() {
        let root = std::env::temp_dir().join(format!("tandem-locate-{}", std::process::id()));
        fs::create_dir_all(root.join("empty")).expect("writable");
        fs::write(root.join("file"), "x").expect("writable");
        for (path, needle) in [("none", "no such folder"), ("file", "a file, not a folder"), ("empty", "no config.json")] {
            let failure = locate(&args(&root.join(path)), None).expect_err(path);
            assert!(failure.reason.contains(needle) && failure.reason.contains(path), "{failure}");
        }
        fs::write(root.join("empty/config.json"), "{}").expect("writable");
        assert_eq!(locate(&args(&root.join("empty")), None).expect("readable").name, "empty");
        assert_eq!(locate(&args(&root.join("empty")), Some("other")).expect("readable").name, "other");
        fs::remove_dir_all(root).expect("clean up");
    }
}
