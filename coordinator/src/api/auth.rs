//! Who may ask: API keys, compared in constant time and re-read when their file changes; and bounds on the headers.
//!
//! Without keys everybody may. With keys, the routes below `/v1` and the tokenizer's need one, as `Authorization: Bearer KEY` or
//! `x-api-key: KEY`; health, metrics and the API's description do not.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use axum::extract::{Request, State};
use axum::http::{HeaderMap, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use subtle::{Choice, ConstantTimeEq};

use super::{ApiError, anthropic, request_id};

/// Most bytes of all header names and values together.
const MOST_HEADER_BYTES: usize = 64 << 10;
/// How often a key file is looked at, at most.
const LOOK: Duration = Duration::from_secs(1);

/// A key's SHA-256: of one length, so that comparing two says nothing about either.
type Hash = [u8; 32];

/// The keys that this server knows.
#[derive(Debug, Default)]
pub struct Keys {
    given: Vec<Hash>,
    file: Option<KeyFile>,
}

#[derive(Debug)]
struct KeyFile {
    path: PathBuf,
    known: Mutex<Known>,
}

/// What was read of a file.
#[derive(Debug)]
struct Known {
    looked: Instant,
    stamp: Option<(SystemTime, u64)>,
    keys: Vec<Hash>,
}

impl Keys {
    /// The keys `given`, and those of a file with one key per line (empty lines and lines that begin with `#` are passed over).
    ///
    /// # Errors
    /// The file cannot be read, or a key is no header value.
    pub fn new(given: &[String], file: Option<PathBuf>) -> Result<Self, String> {
        for key in given {
            check(key).map_err(|why| format!("an API key {why}"))?;
        }
        let file = match file {
            None => None,
            Some(path) => {
                let keys = read(&path)?;
                let known = Known { looked: Instant::now(), stamp: stamp(&path), keys };
                Some(KeyFile { path, known: Mutex::new(known) })
            }
        };
        Ok(Self { given: given.iter().map(|key| hash(key)).collect(), file })
    }

    /// Whether anybody may ask. A file that has become empty locks everybody out rather than nobody.
    pub fn is_open(&self) -> bool {
        self.given.is_empty() && self.file.is_none()
    }

    /// Whether `key` is one of them.
    fn knows(&self, key: &str) -> bool {
        let asked = hash(key);
        let among = |keys: &[Hash]| keys.iter().fold(Choice::from(0), |found, known| found | known.ct_eq(&asked));
        let mut found = among(&self.given);
        if let Some(file) = &self.file {
            let mut known = file.known.lock();
            file.refresh(&mut known);
            found |= among(&known.keys);
        }
        found.into()
    }
}

impl KeyFile {
    /// Reads the file again if it has changed. One that cannot be read leaves the keys as they were.
    fn refresh(&self, known: &mut Known) {
        if known.looked.elapsed() < LOOK {
            return;
        }
        known.looked = Instant::now();
        let now = stamp(&self.path);
        if now == known.stamp {
            return;
        }
        match read(&self.path) {
            Ok(keys) => {
                tracing::info!(path = %self.path.display(), keys = keys.len(), "API keys read again");
                (known.keys, known.stamp) = (keys, now);
            }
            Err(why) => tracing::warn!("the API keys stay as they were: {why}"),
        }
    }
}

fn read(path: &PathBuf) -> Result<Vec<Hash>, String> {
    let text = std::fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
    let keys = text.lines().map(str::trim).enumerate().filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
    keys.map(|(i, key)| check(key).map(|()| hash(key)).map_err(|why| format!("{}: line {}: the key {why}", path.display(), i + 1)))
        .collect()
}

fn check(key: &str) -> Result<(), String> {
    if key.is_empty() || !key.bytes().all(|b| b.is_ascii_graphic()) {
        return Err("must be printable ASCII without spaces".to_owned());
    }
    Ok(())
}

fn stamp(path: &PathBuf) -> Option<(SystemTime, u64)> {
    let data = std::fs::metadata(path).ok()?;
    Some((data.modified().ok()?, data.len()))
}

fn hash(key: &str) -> Hash {
    Sha256::digest(key.as_bytes()).into()
}

/// The key that a request brings.
fn brought(headers: &HeaderMap) -> Option<&str> {
    let bearer = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok()).and_then(|value| {
        let (scheme, key) = value.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then_some(key.trim())
    });
    bearer.or_else(|| headers.get("x-api-key")?.to_str().ok())
}

/// Lets a request through, or answers it.
pub async fn layer(State(keys): State<Arc<Keys>>, request: Request, next: Next) -> Response {
    let headers = request.headers();
    let size: usize = headers.iter().map(|(name, value)| name.as_str().len() + value.len()).sum();
    let path = request.uri().path();
    let guarded = path.starts_with("/v1/") || matches!(path, "/tokenize" | "/detokenize");
    let error = if size > MOST_HEADER_BYTES {
        ApiError::headers_too_large(MOST_HEADER_BYTES)
    } else if guarded && !keys.is_open() {
        match brought(headers) {
            Some(key) if keys.knows(key) => return next.run(request).await,
            key => ApiError::unauthorized(key.is_some()),
        }
    } else {
        return next.run(request).await;
    };
    if path.starts_with("/v1/messages") {
        let id = request.extensions().get::<request_id::RequestId>().map_or(String::new(), |id| id.0.clone());
        return anthropic::to_response(&error, &id);
    }
    error.into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_read_again_when_their_file_changes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keys");
        std::fs::write(&path, "# ours\nalpha\n\n beta \n").unwrap();
        let keys = Keys::new(&["gamma".to_owned()], Some(path.clone())).unwrap();
        assert!(["alpha", "beta", "gamma"].iter().all(|key| keys.knows(key)));
        assert!(!keys.is_open() && !["", "# ours", "Alpha", "alph", "delta"].iter().any(|key| keys.knows(key)));
        let look_again = || keys.file.as_ref().unwrap().known.lock().looked = Instant::now() - LOOK;
        std::fs::write(&path, "delta-and-longer\n").unwrap();
        look_again();
        assert!(keys.knows("delta-and-longer") && keys.knows("gamma") && !keys.knows("alpha"));
        std::fs::remove_file(&path).unwrap();
        look_again();
        assert!(keys.knows("delta-and-longer"), "a file that is gone changes nothing");
    }

    #[test]
    fn what_is_no_key_is_named() {
        assert!(Keys::new(&[], None).unwrap().is_open());
        assert!(Keys::new(&["a b".to_owned()], None).unwrap_err().contains("printable"));
        assert!(Keys::new(&[], Some("/nowhere/keys".into())).unwrap_err().contains("/nowhere/keys"));
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("keys");
        std::fs::write(&path, "good\nnot good\n").unwrap();
        assert!(Keys::new(&[], Some(path)).unwrap_err().contains("line 2"));
    }
}
