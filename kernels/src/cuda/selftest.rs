//! Every kernel once against the reference, before a worker says that it is ready; and the cases of the stored types, which the tests run too.

use std::ops::Range;

use half::f16;
use tandem_quant::{DType, MatrixSource, Scales, SharedBytes};

use super::{CudaBackend, compile};
use crate::{
    Backend, BackendError, ExpertSource,
    conformance::{self, coded, noise::Noise, rig, rows},
};

/// Seeds of the cases at a start: one row and nine.
const SEEDS: [Range<u64>; 2] = [0..1, 8..9];

/// Seeds and rows of the stored types' cases at a start: few, and so many that products are made by the kernels for many.
const WIDTHS: [(u64, usize); 2] = [(1, 9), (2, 130)];

/// Stored types that kernels read.
pub const TYPES: [&str; 30] = [
    "f32",
    "f16",
    "bf16",
    "e4m3",
    "e4m3-row",
    "e4m3-block",
    "e4m3-window",
    "nvfp4",
    "mxfp4",
    "q8_0",
    "gguf-nvfp4",
    "gguf-mxfp4",
    "Q4_0",
    "Q4_1",
    "Q5_0",
    "Q5_1",
    "Q2_K",
    "Q3_K",
    "Q4_K",
    "Q5_K",
    "Q6_K",
    "IQ2_XXS",
    "IQ2_XS",
    "IQ3_XXS",
    "IQ1_S",
    "IQ4_NL",
    "IQ3_S",
    "IQ2_S",
    "IQ4_XS",
    "IQ1_M",
];

/// Those that a start runs: one of each kernel, at least.
const AT_START: [&str; 17] = [
    "f32",
    "f16",
    "bf16",
    "e4m3",
    "e4m3-row",
    "e4m3-block",
    "e4m3-window",
    "nvfp4",
    "mxfp4",
    "q8_0",
    "gguf-nvfp4",
    "gguf-mxfp4",
    "Q4_K",
    "Q3_K",
    "IQ3_S",
    "Q6_K",
    "Q5_K",
];

impl CudaBackend {
    /// Runs every op and every kind of stored type on small random cases against the reference in f64.
    ///
    /// # Errors
    /// The first case in which the device differs by more than the op's tolerance: it must not serve. No memory for a case.
    pub fn self_test(&self) -> Result<(), BackendError> {
        let began = std::time::Instant::now();
        // Where memory runs out from here on, what follows may fail for that alone.
        drop(self.device.out_of_memory());
        let differs = |reason: String| {
            let wrong = || self.failed("self-test", format!("{reason}\n{} computes wrongly: it must not serve", self.device.name()));
            self.device.out_of_memory().unwrap_or_else(wrong)
        };
        for seeds in SEEDS {
            conformance::run_all(self, seeds).map_err(|f| differs(f.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")))?;
        }
        let no_kernels = |e| self.device.out_of_memory().unwrap_or_else(|| self.failed("self-test", e));
        self.kernels.load_all(compile::UNITS).map_err(no_kernels)?;
        for kind in AT_START {
            for (seed, rows) in WIDTHS {
                stored_type(self, kind, seed, rows).map_err(|e| differs(format!("{kind} weights, {rows} rows: {e}")))?;
            }
        }
        tracing::info!(seconds = began.elapsed().as_secs_f64(), "self-test passed");
        Ok(())
    }
}

/// A product and the experts with weights of a stored type, at a size that has edges.
///
/// # Errors
/// What disagreed.
pub fn stored_type<B: Backend>(b: &B, kind: &str, seed: u64, rows: usize) -> Result<(), String> {
    let mut n = Noise::new(seed);
    let block = codes(kind).map_or(1, DType::block_elems);
    for (out, cols) in [(37, 256), (40, 448), (16, 2048)] {
        let cols = usize::next_multiple_of(cols, block);
        let parts = vec![matrix(&mut n, kind, out, cols)?, matrix(&mut n, kind, 64, cols)?];
        rig::judge(b, &rows::Linear::of(&mut n, rows, parts))?;
    }
    let (width, hidden) = (usize::next_multiple_of(192, block), usize::next_multiple_of(320, block));
    let mut expert = || {
        Ok::<_, String>(ExpertSource {
            gate: matrix(&mut n, kind, width, hidden)?,
            up: matrix(&mut n, kind, width, hidden)?,
            down: matrix(&mut n, kind, hidden, width)?,
        })
    };
    let experts = (0..5).map(|_| expert()).collect::<Result<Vec<_>, _>>()?;
    rig::judge(b, &rows::Mlp::of(&mut n, rows, experts[0].clone()))?;
    rig::judge(b, &rows::Experts::of(&mut n, rows, experts, 3))
}

/// The type of codes of a name.
fn codes(kind: &str) -> Option<DType> {
    DType::ALL.iter().copied().find(|dtype| dtype.name() == kind && tandem_quant::coded::coding(*dtype).is_some())
}

/// A random matrix of a stored type, a window of a larger one.
///
/// # Errors
/// An unknown type.
pub fn matrix(n: &mut Noise, kind: &str, rows: usize, cols: usize) -> Result<MatrixSource, String> {
    let coded_type = codes(kind);
    let (above, left) = (4, coded_type.map_or(64, |dtype| dtype.block_elems().max(64)));
    let (all_rows, all_cols) = (rows + above, cols + left);
    let spread = 1.0 / (cols as f32).sqrt();
    let codes = |n: &mut Noise, len: usize, most: usize| (0..len).map(|_| n.between(0, most) as u8).collect::<Vec<u8>>();
    // E4M3 without NaN: exponents around 1.
    let e4m3 = |n: &mut Noise, len: usize| {
        let mut one = || (n.between(0x08, 0x47) | (n.between(0, 1) << 7)) as u8;
        (0..len).map(|_| one()).collect::<Vec<u8>>()
    };
    let factors = |n: &mut Noise, len: usize| (0..len).map(|_| spread * (0.25 + n.unit() as f32)).collect::<Vec<f32>>();
    let new = |dtype, bytes| MatrixSource::new(format!("{kind} [{rows}, {cols}]"), dtype, all_rows, all_cols, SharedBytes::from_vec(bytes));
    let elems = all_rows * all_cols;
    let made = match kind {
        "f32" => new(DType::F32, n.values(elems, 0.0, spread).iter().flat_map(|v| v.to_le_bytes()).collect()),
        "f16" => new(DType::F16, n.values(elems, 0.0, spread).iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()).collect()),
        "bf16" => new(DType::Bf16, n.values(elems, 0.0, spread).iter().flat_map(|&v| half::bf16::from_f32(v).to_le_bytes()).collect()),
        "e4m3" => new(DType::F8E4m3, e4m3(n, elems)).map(|m| m.with_scales(Scales::Tensor(spread))),
        "e4m3-row" => {
            let values = factors(n, all_rows);
            new(DType::F8E4m3, e4m3(n, elems)).map(|m| m.with_scales(Scales::Row(values.into())))
        }
        "e4m3-block" | "e4m3-window" => {
            // Blocks that windows start on, or not.
            let (block_rows, block_cols) = if kind == "e4m3-block" { (above, 64) } else { (5, 128) };
            let grid_cols = all_cols.div_ceil(block_cols);
            let values = factors(n, grid_cols * all_rows.div_ceil(block_rows)).into();
            new(DType::F8E4m3, e4m3(n, elems)).map(|m| m.with_scales(Scales::Grid { values, grid_cols, block_rows, block_cols }))
        }
        "nvfp4" => {
            let stride = all_cols / 16;
            let scales = (0..all_rows * stride).map(|_| n.between(0, 0x7E) as u8).collect();
            let global = spread / 16.0 * (0.5 + n.unit() as f32);
            let scales = Scales::E4m3Groups { bytes: SharedBytes::from_vec(scales), stride, global };
            new(DType::Nvfp4Pairs, codes(n, elems / 2, 255)).map(|m| m.with_scales(scales))
        }
        "mxfp4" => {
            let stride = all_cols / 32;
            let bytes = (0..all_rows * stride).map(|_| n.between(110, 130) as u8).collect();
            new(DType::Mxfp4Pairs, codes(n, elems / 2, 255))
                .map(|m| m.with_scales(Scales::E8m0Groups { bytes: SharedBytes::from_vec(bytes), stride }))
        }
        "q8_0" => {
            let block = |n: &mut Noise| [&f16::from_f32(spread / 64.0 * n.unit() as f32).to_le_bytes()[..], &codes(n, 32, 255)].concat();
            new(DType::Q8_0, (0..elems / 32).flat_map(|_| block(n)).collect())
        }
        "gguf-nvfp4" => {
            let block = |n: &mut Noise| [codes(n, 4, 0x40), codes(n, 32, 255)].concat();
            new(DType::Nvfp4, (0..elems / 64).flat_map(|_| block(n)).collect()).map(|m| m.with_scales(Scales::Tensor(spread)))
        }
        "gguf-mxfp4" => {
            let block = |n: &mut Noise| [vec![n.between(110, 130) as u8], codes(n, 16, 255)].concat();
            new(DType::Mxfp4, (0..elems / 32).flat_map(|_| block(n)).collect())
        }
        other => match coded_type {
            Some(dtype) => new(dtype, coded::elements(n, dtype, elems, 4.0 * spread)),
            None => return Err(format!("no stored type {other}")),
        },
    };
    let window = made.and_then(|m| m.row_window(above..above + rows)).and_then(|m| m.col_window(left..left + cols));
    window.map_err(|e| e.to_string())
}
