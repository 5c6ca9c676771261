//! What is packed means what the file's blocks mean, bit for bit: rows are read back as `load8_coded` of coded.cuh reads them.

use std::path::Path;

use proptest::prelude::*;
use tandem_quant::SharedBytes;

use super::{super::pack::Layout, *};

/// The elements of a packed row.
fn unpacked(layout: &Layout, q: &[u8], s: &[u8]) -> Vec<f32> {
    let coding = layout.coding.expect("codes");
    let (zero, table) = levels(&coding);
    let behind = layout.cols.next_multiple_of(PAD) / 16;
    let half = |at: usize| f16::from_le_bytes([s[at], s[at + 1]]).to_f32();
    let byte = |at: usize| f32::from(s[at]);
    let element = |k: usize| {
        let (d, pair) = (behind + 2 * (k / 256), behind + 4 * (k / 256));
        let (scale, min) = match form(&coding) {
            0 => (half(d) * (byte(k / 16) - 128.0), 0.0),
            1 => (half(pair) * f32::from(s[k / 16] & 15), half(pair + 2) * f32::from(s[k / 16] >> 4)),
            2 => (half(pair) * byte(k / 32 * 2), half(pair + 2) * byte(k / 32 * 2 + 1)),
            3 => (half(k / 32 * 2), 0.0),
            _ => (half(k / 32 * 2), half(behind + k / 32 * 2)),
        };
        let (lane, i) = (k % 16 / 4, k % 4);
        let level = if matches!(layout.kind, Kind::Code8 | Kind::Code8Min) {
            f32::from(q[k / 64 * 64 + 16 * lane + k % 64 / 16 * 4 + i]) - zero as f32
        } else {
            let word = four(q, k / 128 * 64 + 16 * lane + k % 128 / 32 * 4);
            let second = k / 16 % 2;
            if layout.kind != Kind::Lut4 {
                (word >> (8 * second + 16 * (i % 2) + 4 * (i / 2)) & 15) as f32 - zero as f32
            } else {
                let code = (word >> (16 * second + 4 * i) & 15) as usize;
                let of = |from: usize| table[from + code / 4] >> (8 * (code % 4)) & 255;
                f32::from_bits(of(0) << 16 | of(4) << 24)
            }
        };
        scale.mul_add(level, -min) * layout.global
    };
    (0..layout.cols).map(element).collect()
}

/// Packs a matrix and compares.
fn judge(m: &MatrixSource) -> Result<(), String> {
    let layout = Layout::of(m)?;
    let (q_row, s_row) = (layout.q_row(), layout.s_row());
    let (mut q, mut s) = (vec![0; m.rows() * q_row], vec![0; m.rows() * s_row]);
    super::super::pack::pack(m, &layout, &mut q, &mut s);
    let mut want = vec![0.0; m.cols()];
    for (r, (q, s)) in q.chunks_exact(q_row).zip(s.chunks_exact(s_row)).enumerate() {
        m.dequantize_row(r, &mut want);
        for (k, (got, want)) in unpacked(&layout, q, s).iter().zip(&want).enumerate() {
            if got.to_bits() != want.to_bits() && !(got.is_nan() && want.is_nan()) {
                return Err(format!("{}, row {r}, column {k}: {got} instead of {want}", m.dtype()));
            }
        }
    }
    Ok(())
}

fn coded_types() -> impl Iterator<Item = DType> {
    DType::ALL.iter().copied().filter(|dtype| coding(*dtype).is_some())
}

#[test]
fn ggmls_own_blocks_come_back_bit_for_bit() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("quant/tests/dequant_vectors");
    for dtype in coded_types() {
        let bytes = std::fs::read(dir.join(format!("{dtype}.blocks.bin"))).expect("vectors");
        let cols = bytes.len() / dtype.block_bytes() * dtype.block_elems();
        let m = MatrixSource::new("w", dtype, 1, cols, SharedBytes::from_vec(bytes)).expect("sizes");
        judge(&m).expect("bit for bit");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn random_windows_come_back_bit_for_bit(seed in any::<u64>(), rows in 1usize..5, blocks in 1usize..8) {
        let mut n = crate::conformance::noise::Noise::new(seed);
        for dtype in coded_types() {
            let (cols, all) = (blocks * dtype.block_elems(), (blocks + 1) * dtype.block_elems());
            let bytes = n.bytes((rows + 1) * dtype.row_bytes(all).unwrap_or(0));
            let m = MatrixSource::new("w", dtype, rows + 1, all, SharedBytes::from_vec(bytes)).expect("sizes");
            let m = m.row_window(1..rows + 1).and_then(|m| m.col_window(all - cols..all)).expect("inside");
            prop_assert_eq!(judge(&m), Ok(()));
        }
    }
}

#[test]
fn sizes_are_near_the_files() {
    let bits = |dtype: DType| {
        let m = MatrixSource::new("w", dtype, 1, 4096, SharedBytes::from_vec(vec![0; dtype.row_bytes(4096).expect("blocks")]));
        let layout = Layout::of(&m.expect("sizes")).expect("a layout");
        (layout.q_row() + layout.s_row()) as f64 * 8.0 / 4096.0
    };
    assert_eq!([DType::Q4K, DType::Q5K, DType::Q6K, DType::Q2K].map(bits), [4.625, 8.625, 8.5625, 4.625]);
    assert_eq!([DType::Iq2Xs, DType::Iq3S, DType::Iq4Xs, DType::Iq1M].map(bits), [4.5625; 4]);
    assert_eq!([DType::Q4_0, DType::Q4_1, DType::Iq4Nl, DType::Q5_1].map(bits), [4.5625, 5.0, 4.5625, 9.0]);
}

#[test]
fn threads_share_a_large_matrix() {
    let (rows, cols) = (1100, 4096);
    let bytes = crate::conformance::noise::Noise::new(3).bytes(rows * DType::Q6K.row_bytes(cols).expect("blocks"));
    judge(&MatrixSource::new("w", DType::Q6K, rows, cols, SharedBytes::from_vec(bytes)).expect("sizes")).expect("bit for bit");
}

/// `cargo test --release -p tandem-kernels --lib pack_rate -- --ignored --nocapture`: bytes of file a second, on one core.
#[test]
#[ignore = "measures"]
fn pack_rate() {
    let mut n = crate::conformance::noise::Noise::new(1);
    for dtype in coded_types() {
        let (rows, cols) = (1024, 4096);
        let bytes = n.bytes(rows * dtype.row_bytes(cols).expect("blocks"));
        let len = bytes.len();
        let m = MatrixSource::new("w", dtype, rows, cols, SharedBytes::from_vec(bytes)).expect("sizes");
        let layout = Layout::of(&m).expect("a layout");
        let (mut q, mut s) = (vec![0; rows * layout.q_row()], vec![0; rows * layout.s_row()]);
        let took = (0..5).map(|_| {
            let began = std::time::Instant::now();
            pack_rows(&m, 0, layout.kind, &layout.coding.expect("codes"), (&mut q, layout.q_row()), (&mut s, layout.s_row()));
            began.elapsed().as_secs_f64()
        });
        let best = took.fold(f64::INFINITY, f64::min);
        println!("{dtype:>8}: {:.2} GB/s of file, {:.2} GB/s of device", len as f64 / best / 1e9, (q.len() + s.len()) as f64 / best / 1e9);
    }
}
