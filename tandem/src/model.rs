//! Finds the checkpoint to serve: the folder or GGUF file that was named, or the demo model that is built into the binary.

use std::{
    fs,
    path::{Path, PathBuf},
};

use tandem_model::locate::{self, Format};

use crate::{cli::args::ModelArgs, failure::Failure};

/// Name of the demo model in the APIs.
const DEMO_NAME: &str = "tandem-demo";

/// A checkpoint on disk.
#[derive(Clone, Debug)]
pub struct Located {
    /// Its folder, or its GGUF file.
    pub dir: PathBuf,
    /// Its name in the APIs.
    pub name: String,
}

/// Checks that the folder or file can be read, or unpacks the demo into the cache folder. `served` overrides the name.
///
/// # Errors
/// When there is no such folder or file, it cannot be read, or the demo cannot be unpacked.
pub fn locate(args: &ModelArgs, served: Option<&str>) -> Result<Located, Failure> {
    let (dir, name) = match &args.model {
        Some(dir) => {
            check(dir)?;
            (dir.clone(), tandem_model::title::title(dir))
        }
        None => (unpack_demo(args.cache_dir.as_deref())?, DEMO_NAME.into()),
    };
    Ok(Located { dir, name: served.map_or(name, str::to_owned) })
}

fn check(path: &Path) -> Result<(), Failure> {
    // A file that this user may not read is told apart here; the workers would say it much later.
    let readable = |format| match format {
        Format::Gguf if path.is_file() => fs::File::open(path).map(drop).map_err(|error| format!("{}: {error}", path.display())),
        _ => Ok(()),
    };
    let problem = locate::format_at(path).map_err(|error| error.to_string()).and_then(readable);
    let demo = if path.exists() { "" } else { "; without --model the demo is served" };
    problem.map_err(|problem| Failure::config(format!("--model {problem}{demo}")))
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
    use crate::cli::values::{Dtype, LoadFormat};

    fn args(model: &Path) -> ModelArgs {
        ModelArgs { model: Some(model.to_owned()), cache_dir: None, load_format: LoadFormat::Auto, dtype: Dtype::F32 }
    }

    #[test]
    fn what_cannot_be_served_is_named() {
        let root = std::env::temp_dir().join(format!("tandem-locate-{}", std::process::id()));
        fs::create_dir_all(root.join("empty")).expect("writable");
        fs::write(root.join("file"), "x").expect("writable");
        for (path, needle) in [("none", "no such file or folder"), ("file", "a file that is no .gguf"), ("empty", "no config.json")] {
            let failure = locate(&args(&root.join(path)), None).expect_err(path);
            assert!(failure.reason.contains(needle) && failure.reason.contains(path), "{failure}");
        }
        fs::write(root.join("empty/config.json"), "{}").expect("writable");
        assert_eq!(locate(&args(&root.join("empty")), None).expect("readable").name, "empty");
        assert_eq!(locate(&args(&root.join("empty")), Some("other")).expect("readable").name, "other");
        fs::write(root.join("empty/Name-Q8_0-00001-of-00002.gguf"), "GGUF").expect("writable");
        assert_eq!(locate(&args(&root.join("empty/Name-Q8_0-00001-of-00002.gguf")), None).expect("readable").name, "Name-Q8_0");
        fs::remove_file(root.join("empty/config.json")).expect("there");
        assert_eq!(locate(&args(&root.join("empty")), None).expect("readable").name, "empty");
        fs::remove_dir_all(root).expect("clean up");
    }
}
