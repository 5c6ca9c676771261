//! What the tests of `text` and `api` share: the demo checkpoint's tokenizer and template, and its goldens.

use std::path::PathBuf;
use std::sync::{Arc, LazyLock};

use tandem_model::Checkpoint;

use super::{ChatTemplate, Tokenizer};

/// The demo checkpoint's folder in the repository.
pub fn demo_dir() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../model/assets/demo")
}

/// The demo checkpoint's tokenizer, loaded once.
pub fn demo_tokenizer() -> Arc<Tokenizer> {
    static TOKENIZER: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| Arc::new(Tokenizer::open(&demo_dir()).unwrap()));
    Arc::clone(&TOKENIZER)
}

/// The demo checkpoint's chat template.
pub fn demo_template() -> ChatTemplate {
    ChatTemplate::open(&demo_dir()).unwrap()
}

/// The goldens of the demo checkpoint: conversations with their rendered prompts and ids.
pub fn demo_goldens() -> serde_json::Value {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/gold/demo.json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// `tinyk-MIX.gguf`, with some bytes replaced by as many others.
pub fn gguf(edits: &[(&str, &str)]) -> Checkpoint {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/gguf/tinyk-MIX.gguf");
    let mut bytes = std::fs::read(path).unwrap();
    for (old, new) in edits {
        assert_eq!(old.len(), new.len());
        let at = bytes.windows(old.len()).position(|w| w == old.as_bytes()).unwrap();
        bytes[at..at + new.len()].copy_from_slice(new.as_bytes());
    }
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tinyk-MIX.gguf");
    std::fs::write(&file, bytes).unwrap();
    // Its maps outlive the folder.
    Checkpoint::open(&file).unwrap()
}

/// The token that stands for one byte alone.
pub fn byte_token(byte: u8) -> u32 {
    static TABLE: LazyLock<Vec<u32>> = LazyLock::new(|| {
        let tokenizer = demo_tokenizer();
        let find = |byte: u8| (0..tokenizer.len() as u32).find(|&id| tokenizer.bytes(id) == [byte]).unwrap();
        (0..=255).map(find).collect()
    });
    TABLE[usize::from(byte)]
}

/// The demo checkpoint's vocabulary, built once.
pub fn demo_vocabulary() -> &'static tandem_grammar::Vocabulary {
    static VOCABULARY: LazyLock<tandem_grammar::Vocabulary> =
        LazyLock::new(|| tandem_grammar::Vocabulary::new(demo_tokenizer().table(1536, &[1490, 1497, 1499])).unwrap());
    &VOCABULARY
}
