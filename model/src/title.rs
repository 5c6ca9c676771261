//! What a checkpoint is called where nobody names it: its folder, or its GGUF file without the shard's number.

use std::path::Path;

use crate::storage::gguf::{numbered, stem};

/// The default name of the checkpoint at `path` in the APIs.
pub fn title(path: &Path) -> String {
    let full = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let name = full.file_name().map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned());
    match numbered(&name) {
        Some((prefix, ..)) => prefix.to_owned(),
        None => stem(&name).unwrap_or(&name).to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_and_files_have_names() {
        for (path, name) in [
            ("/models/GLM-5.3-Flash-FP8", "GLM-5.3-Flash-FP8"),
            ("/models/GLM-5.3-Flash-FP8/", "GLM-5.3-Flash-FP8"),
            ("/m/GLM-5.3-Flash-Q4_K_M.gguf", "GLM-5.3-Flash-Q4_K_M"),
            ("/m/GLM-5.3-Flash-UD-IQ1_S-00002-of-00003.gguf", "GLM-5.3-Flash-UD-IQ1_S"),
            ("/", "model"),
        ] {
            assert_eq!(title(Path::new(path)), name);
        }
    }
}
