//! Every block type against ggml's reference values, bit for bit (`dequant_vectors/`: random blocks and what the `gguf` Python
//! package 0.19.0, MIT, makes of them).

use std::path::Path;

use tandem_quant::DType;

#[test]
fn every_type_dequantises_bit_exactly() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/dequant_vectors");
    let mut checked = 0;
    for dtype in DType::ALL.iter().filter(|dtype| !dtype.is_float() && dtype.ggml_id().is_some_and(|id| id < 100)) {
        let read = |what: &str| std::fs::read(dir.join(format!("{dtype}.{what}.bin"))).unwrap();
        let (blocks, want) = (read("blocks"), read("f32"));
        let mut got = vec![0.0; want.len() / 4];
        assert_eq!(blocks.len() / dtype.block_bytes() * dtype.block_elems(), got.len(), "{dtype}");
        dtype.dequantize(&blocks, &mut got);
        for (i, (got, want)) in got.iter().zip(want.as_chunks::<4>().0).enumerate() {
            let want = f32::from_le_bytes(*want);
            assert!(got.to_bits() == want.to_bits(), "{dtype}, element {i}: {got} instead of {want}");
        }
        checked += 1;
    }
    assert_eq!(checked, 21);
}

#[test]
fn ids_and_sizes_are_ggmls() {
    let index = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/dequant_vectors/index.json")).unwrap();
    for dtype in DType::ALL.iter().filter(|dtype| !dtype.is_float() && dtype.ggml_id().is_some_and(|id| id < 100)) {
        let entry = format!("[\"{dtype}\", {}, {}, {}, ", dtype.ggml_id().unwrap(), dtype.block_elems(), dtype.block_bytes());
        assert!(index.contains(&entry), "{entry}");
        assert_eq!(DType::from_ggml(dtype.ggml_id().unwrap()), Some(*dtype));
    }
    for refused in [4, 5, 9, 15, 31, 32, 33, 34, 35, 36, 37, 38, 41, 100, 104, 107, u32::MAX] {
        assert_eq!(DType::from_ggml(refused), None);
    }
}
