//! The GGUF container parser: real layouts round-trip, and no bytes at all make it panic or allocate without bound.
#![allow(clippy::unwrap_used, reason = "tests")]

use proptest::prelude::*;
use tandem_model::gguf::{GgufError, Header, Value};

/// A writer for test files; enough of the format to build every header that the reader accepts.
#[derive(Default)]
struct Writer {
    pairs: Vec<u8>,
    pair_count: u64,
    infos: Vec<u8>,
    info_count: u64,
}

fn string(out: &mut Vec<u8>, s: &str) {
    out.extend((s.len() as u64).to_le_bytes());
    out.extend(s.as_bytes());
}

impl Writer {
    fn pair(mut self, key: &str, kind: u32, value: &[u8]) -> Self {
        string(&mut self.pairs, key);
        self.pairs.extend(kind.to_le_bytes());
        self.pairs.extend(value);
        self.pair_count += 1;
        self
    }

    fn tensor(mut self, name: &str, ne: &[u64], kind: u32, offset: u64) -> Self {
        string(&mut self.infos, name);
        self.infos.extend((ne.len() as u32).to_le_bytes());
        ne.iter().for_each(|n| self.infos.extend(n.to_le_bytes()));
        self.infos.extend(kind.to_le_bytes());
        self.infos.extend(offset.to_le_bytes());
        self.info_count += 1;
        self
    }

    fn bytes(&self, version: u32) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(version.to_le_bytes());
        out.extend(self.info_count.to_le_bytes());
        out.extend(self.pair_count.to_le_bytes());
        out.extend(&self.pairs);
        out.extend(&self.infos);
        out
    }
}

fn sample() -> Writer {
    let mut list = 5u32.to_le_bytes().to_vec();
    list.extend(3u64.to_le_bytes());
    [0i32, 1, -1].iter().for_each(|v| list.extend(v.to_le_bytes()));
    let mut blob = 0u32.to_le_bytes().to_vec();
    blob.extend(4u64.to_le_bytes());
    blob.extend([9, 8, 7, 6]);
    let mut arch = Vec::new();
    string(&mut arch, "glm5-next");
    Writer::default()
        .pair("general.architecture", 8, &arch)
        .pair("general.alignment", 4, &64u32.to_le_bytes())
        .pair("list", 9, &list)
        .pair("blob", 9, &blob)
        .pair("flag", 7, &[1])
        .pair("x", 6, &1.5f32.to_le_bytes())
        .tensor("a.weight", &[256, 3], 12, 0)
        .tensor("b.weight", &[4], 0, 448)
}

#[test]
fn a_header_reads_back() {
    for version in [2, 3] {
        let bytes = sample().bytes(version);
        let header = Header::parse(&bytes).unwrap();
        assert_eq!(header.version, version);
        assert_eq!(header.architecture(), Some("glm5-next"));
        assert_eq!(header.get("list").unwrap().as_array().unwrap()[2], Value::Int(-1));
        assert_eq!(header.get("blob").unwrap().as_bytes(), Some([9, 8, 7, 6].as_slice()));
        assert_eq!((header.get("flag").unwrap().as_bool(), header.get("x").unwrap().as_f64()), (Some(true), Some(1.5)));
        assert_eq!(header.data_start, (bytes.len() as u64).next_multiple_of(64));
        assert_eq!((header.tensors[0].shape.as_slice(), header.tensors[0].bytes()), ([3, 256].as_slice(), Some(432)));
        header.check_extents(header.data_start + 448 + 16).unwrap();
        let short = header.check_extents(header.data_start + 448 + 15).unwrap_err();
        assert!(short.to_string().contains("b.weight") && short.to_string().contains("truncated"), "{short}");
    }
}

#[test]
fn wrong_headers_are_named() {
    let parse = |bytes: &[u8]| Header::parse(bytes).unwrap_err().to_string();
    assert!(parse(b"PK\x03\x04....").contains("not a GGUF file"));
    assert!(parse(&sample().bytes(1)).contains("version 1"));
    assert!(parse(&sample().bytes(3u32.swap_bytes())).contains("big-endian"));
    assert!(parse(&sample().tensor("a.weight", &[1], 0, 0).bytes(3)).contains("the name twice"));
    assert!(parse(&sample().pair("x", 6, &[0; 4]).bytes(3)).contains("the key twice"));
    assert!(parse(&sample().tensor("c", &[], 0, 0).bytes(3)).contains("1 to 4 dimensions"));
    assert!(parse(&sample().tensor("c", &[0], 0, 0).bytes(3)).contains("a dimension of 0"));
    assert!(parse(&sample().tensor("c", &[1 << 40, 1 << 40], 0, 0).bytes(3)).contains("2^48"));
    assert!(parse(&sample().tensor("c", &[4], 0, 7).bytes(3)).contains("multiple of 64"));
    assert!(parse(&sample().pair("y", 99, &[]).bytes(3)).contains("0 to 12"));
    assert!(parse(&sample().pair("y", 7, &[2]).bytes(3)).contains("a bool"));
}

#[test]
fn counts_cannot_ask_for_memory_that_the_file_does_not_justify() {
    for at in [8, 16] {
        let mut bytes = sample().bytes(3);
        bytes[at..at + 8].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(matches!(Header::parse(&bytes), Err(GgufError::Truncated { .. })));
    }
    let mut list = 8u32.to_le_bytes().to_vec();
    list.extend((1u64 << 60).to_le_bytes());
    assert!(matches!(Header::parse(&Writer::default().pair("l", 9, &list).bytes(3)), Err(GgufError::Truncated { .. })));
}

proptest! {
    #[test]
    fn any_prefix_is_an_error_and_no_panic(cut in 0usize..2000) {
        let bytes = sample().bytes(3);
        prop_assert!(Header::parse(&bytes[..cut % bytes.len()]).is_err());
    }

    #[test]
    fn any_flipped_bytes_parse_or_fail_cleanly(flips in proptest::collection::vec((0usize..2000, any::<u8>()), 1..8)) {
        let mut bytes = sample().bytes(3);
        for (at, value) in flips {
            let len = bytes.len();
            bytes[at % len] = value;
        }
        if let Ok(header) = Header::parse(&bytes) {
            let _either = header.check_extents(1 << 20);
        }
    }

    #[test]
    fn random_bytes_fail_cleanly(tail in proptest::collection::vec(any::<u8>(), 0..300)) {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend(tail);
        let _either = Header::parse(&bytes);
    }
}
