//! How a matrix is stored, decided by the tensors that are present and never by what a config claims (docs/checkpoints.md §3.2).
//!
//! | tensors beside `X.weight` | format |
//! |---|---|
//! | `X.weight_packed` U8, `X.weight_scale` F8, `X.weight_global_scale` | NVFP4, compressed-tensors: divide by the global scale |
//! | `X.weight` U8, `X.weight_scale` F8, `X.weight_scale_2` | NVFP4, ModelOpt: multiply by it |
//! | `X.weight` U8, `X.weight_scale` U8 or E8M0 | MXFP4 |
//! | `X.weight` F8, `X.weight_scale_inv` | FP8 in blocks: multiply |
//! | `X.weight` F8, `X.weight_scale` F32/BF16 (one, or one a row), or E8M0 groups | FP8 per tensor or row, MXFP8 |
//! | `X.weight_packed` U8, `X.weight_scale` U8 or E8M0 | MXFP4 |
//! | neither | floats, or a ggml type that carries its own scales; in GGUF perhaps with a `.scale` beside it (NVFP4) |
//!
//! Scales that no row of the table explains are an error: they would otherwise be left out.
//!
//! Neighbours: `checkpoint.rs` asks for layouts when it checks a folder and for matrices when workers load.

use std::sync::Arc;

use safetensors::tensor::Dtype;
use tandem_quant::{DType, MatrixSource, ScaleForm, Scales, fp8};

use crate::{
    Checkpoint, ModelError,
    gguf::sidecar::{Codebook, Kind, Surface},
    storage::{Entry, Stored},
};

/// A stored matrix: its elements and the scales beside them.
#[derive(Debug)]
pub(crate) struct Layout<'a> {
    /// The elements.
    pub weight: &'a Entry,
    /// Their type.
    pub dtype: DType,
    /// Logical `[out, in]`, or `[experts, out, in]` of a stack.
    pub shape: Vec<usize>,
    /// What lies beside them.
    scales: Side<'a>,
}

#[derive(Debug)]
enum Side<'a> {
    None,
    /// One factor, or one per matrix of a stack.
    Factor(&'a Entry),
    Row(&'a Entry),
    Grid {
        grid: &'a Entry,
        block: [usize; 2],
    },
    E4m3 {
        groups: &'a Entry,
        global: &'a Entry,
        divide: bool,
    },
    E8m0(&'a Entry),
    /// Levels of ROCmFP codes, per matrix of the stack.
    Codebook(&'a Codebook),
}

/// Suffixes of the tensors beside a `.weight` that a layout may use or that are about activations.
pub(crate) const SIDE_SUFFIXES: [&str; 9] = [
    ".weight_scale",
    ".weight_scale_2",
    ".weight_scale_inv",
    ".weight_global_scale",
    ".weight_packed",
    ".weight_shape",
    ".input_scale",
    ".input_global_scale",
    ".scale",
];

impl Layout<'_> {
    /// The form of the scales.
    pub fn form(&self) -> ScaleForm {
        match &self.scales {
            Side::None | Side::Codebook(_) => ScaleForm::None,
            // As `source` has it: a factor for each matrix of a stack is one for the matrix.
            Side::Factor(_) => ScaleForm::Tensor,
            Side::Row(_) => ScaleForm::Row,
            Side::Grid { block, .. } => ScaleForm::Grid { block_cols: block[1] },
            Side::E4m3 { .. } => ScaleForm::E4m3Groups,
            Side::E8m0(_) => ScaleForm::E8m0Groups,
        }
    }

    /// Whether something lies beside the elements.
    pub fn is_scaled(&self) -> bool {
        !matches!(self.scales, Side::None)
    }

    /// Whether the elements are floats that need nothing beside them.
    pub fn is_plain(&self) -> bool {
        self.dtype.is_float() && !self.is_scaled()
    }

    /// All stored tensors that take part.
    pub fn entries(&self) -> impl Iterator<Item = &Entry> {
        let (a, b) = match &self.scales {
            Side::None | Side::Codebook(_) => (None, None),
            Side::Factor(e) | Side::Row(e) | Side::Grid { grid: e, .. } | Side::E8m0(e) => (Some(*e), None),
            Side::E4m3 { groups, global, .. } => (Some(*groups), Some(*global)),
        };
        [Some(self.weight), a, b].into_iter().flatten()
    }
}

impl Checkpoint {
    /// How the tensor with a canonical name is stored, from headers alone.
    ///
    /// # Errors
    /// No such tensor, a type that is not read, scales that do not fit.
    pub(crate) fn layout(&self, name: &str) -> Result<Layout<'_>, ModelError> {
        let base = name.strip_suffix(".weight").unwrap_or(name);
        let side = |suffix: &str| self.entry(&format!("{base}{suffix}"));
        if let Some(packed) = side(".weight_packed") {
            return match (side(".weight_scale"), side(".weight_global_scale")) {
                (Some(groups), Some(global)) => self.nvfp4(packed, groups, global, true),
                (Some(groups), None) if is_e8m0(groups) => self.groups(packed, groups, DType::Mxfp4Pairs, 2),
                _ => {
                    let needed = "scales beside it (F8_E4M3 weight_scale and weight_global_scale: NVFP4; U8 weight_scale: MXFP4)";
                    Err(self.bad(packed, needed, "none"))
                }
            };
        }
        let weight = self.entry(name).ok_or_else(|| self.missing(name, "a tensor of this name"))?;
        let scale = side(".weight_scale");
        match weight.stored {
            Stored::Safetensors(Dtype::U8) => match (scale, side(".weight_scale_2")) {
                (Some(groups), Some(global)) => self.nvfp4(weight, groups, global, false),
                (Some(groups), None) if is_e8m0(groups) => self.groups(weight, groups, DType::Mxfp4Pairs, 2),
                _ => Err(self.bad(
                    weight,
                    "scales beside a packed U8 weight (weight_scale and weight_scale_2: NVFP4; U8 weight_scale: MXFP4)",
                    "none",
                )),
            },
            Stored::Safetensors(Dtype::F8_E4M3) => match (side(".weight_scale_inv"), scale) {
                (Some(grid), _) => self.fp8_grid(weight, grid),
                (None, Some(groups)) if is_e8m0(groups) => self.groups(weight, groups, DType::F8E4m3, 1),
                (None, Some(factors)) => self.fp8_rows(weight, factors),
                (None, None) => Err(self.bad(weight, "a weight_scale_inv or weight_scale beside an F8_E4M3 weight", "none")),
            },
            stored => {
                let dtype = stored.plain().ok_or_else(|| {
                    let needed =
                        "BF16, F16, F32, F8_E4M3 with scales, NVFP4, MXFP4, or a ggml type from Q4_0 to NVFP4 without TQ1_0 and TQ2_0";
                    self.bad(weight, needed, &stored.to_string())
                })?;
                if let Some(odd) = [scale, side(".weight_scale_inv"), side(".weight_scale_2")].into_iter().flatten().next() {
                    let needed = format!("no scales beside a {dtype} weight ({})", weight.stored_name);
                    return Err(self.bad(odd, &needed, "scales that nothing says how to apply"));
                }
                let scales = match (dtype, side(".scale")) {
                    (DType::RocmFp3Mix | DType::RocmFp2Mix, None) => Side::Codebook(self.codebook(weight, name, dtype)?),
                    (DType::RocmFp3Mix | DType::RocmFp2Mix, Some(factor)) => {
                        return Err(self.bad(factor, &format!("no .scale beside a {dtype} tensor"), "one"));
                    }
                    (_, Some(factor)) => self.factor(weight, factor)?,
                    (_, None) => Side::None,
                };
                if let Some(last) = weight.shape.last()
                    && dtype.row_bytes(*last).is_none()
                {
                    let needed = format!("rows of a whole number of {dtype} blocks ({} elements)", dtype.block_elems());
                    return Err(self.bad(weight, &needed, &format!("rows of {last}")));
                }
                Ok(Layout { weight, dtype, shape: weight.shape.clone(), scales })
            }
        }
    }

    /// GGUF's `.scale`: one factor, or one for each matrix of a stack.
    fn factor<'a>(&self, weight: &Entry, factor: &'a Entry) -> Result<Side<'a>, ModelError> {
        let count: usize = factor.shape.iter().product();
        let members = if let [members, _, _] = *weight.shape { members } else { 1 };
        if factor.stored.plain() != Some(DType::F32) || (count != 1 && count != members) {
            let needed =
                if members == 1 { "one F32 factor".to_owned() } else { format!("one F32 factor, or one for each of {members} matrices") };
            return Err(self.bad(factor, &needed, &format!("{} {:?}", factor.stored, factor.shape)));
        }
        Ok(Side::Factor(factor))
    }

    /// The codebook of a ROCmFP stack. One that is missing or does not fit is an error, never a fallback: the codes mean nothing without.
    fn codebook(&self, weight: &Entry, name: &str, dtype: DType) -> Result<&Codebook, ModelError> {
        let (layer, rest) = name.strip_prefix("layers.").and_then(|s| s.split_once('.')).unwrap_or(("", name));
        let surface = match rest {
            "mlp.experts.gate_proj" => Some(Surface::Gate),
            "mlp.experts.up_proj" => Some(Surface::Up),
            "mlp.experts.down_proj" => Some(Surface::Down),
            _ => None,
        };
        let allowed = surface.filter(|s| dtype == DType::RocmFp2Mix || *s == Surface::Down);
        let (Some(surface), Ok(layer)) = (allowed, layer.parse::<u32>()) else {
            let where_ = if dtype == DType::RocmFp3Mix { "ffn_down_exps" } else { "ffn_gate_exps, ffn_up_exps or ffn_down_exps" };
            return Err(self.bad(weight, &format!("{dtype} in {where_} only"), "another tensor"));
        };
        if dtype == DType::RocmFp2Mix
            && let Some(cols) = weight.shape.last().filter(|n| !n.is_multiple_of(128))
        {
            return Err(self.bad(weight, &format!("rows of a multiple of 128 elements for {dtype}"), &format!("rows of {cols}")));
        }
        let kind = if dtype == DType::RocmFp3Mix { Kind::P4Mix } else { Kind::GuMix };
        let codebook = self.codebooks().get(&(kind, layer, surface)).ok_or_else(|| {
            let needed =
                format!("a codebook for layer {layer}, {surface:?} (key <arch>.{0}.sidecar, or a file FILE.gguf.{0}.bin)", kind.name());
            self.bad(weight, &needed, "none: without it the codes mean nothing")
        })?;
        if codebook.shape.as_slice() != weight.shape {
            let needed = format!("shape {:?}, as its codebook says", codebook.shape);
            return Err(self.bad(weight, &needed, &format!("{:?}", weight.shape)));
        }
        Ok(codebook)
    }

    /// Shape `[a, b]` of an entry.
    fn two(&self, entry: &Entry) -> Result<[usize; 2], ModelError> {
        entry.shape.as_slice().try_into().map_err(|_| self.bad(entry, "a matrix", &format!("shape {:?}", entry.shape)))
    }

    fn nvfp4<'a>(&'a self, weight: &'a Entry, groups: &'a Entry, global: &'a Entry, divide: bool) -> Result<Layout<'a>, ModelError> {
        if groups.stored != Stored::Safetensors(Dtype::F8_E4M3) {
            return Err(self.bad(groups, "F8_E4M3 group scales of an NVFP4 weight", &groups.stored.to_string()));
        }
        if global.stored != Stored::Safetensors(Dtype::F32) || global.shape.iter().product::<usize>() != 1 {
            return Err(self.bad(global, "one F32 value", &format!("{} {:?}", global.stored, global.shape)));
        }
        let mut layout = self.groups(weight, groups, DType::Nvfp4Pairs, 2)?;
        layout.scales = Side::E4m3 { groups, global, divide };
        Ok(layout)
    }

    /// Elements packed `per_byte` to a byte, with a scale per block of the type (32 for MXFP8).
    fn groups<'a>(&'a self, weight: &'a Entry, groups: &'a Entry, dtype: DType, per_byte: usize) -> Result<Layout<'a>, ModelError> {
        let [rows, bytes] = self.two(weight)?;
        let cols = bytes * per_byte;
        let group = if dtype == DType::Nvfp4Pairs { 16 } else { 32 };
        if !cols.is_multiple_of(group) || groups.shape != [rows, cols / group] {
            let needed = format!("shape [{rows}, {}]: a scale per {group} elements of {}", cols.div_ceil(group), weight.stored_name);
            return Err(self.bad(groups, &needed, &format!("{:?}", groups.shape)));
        }
        Ok(Layout { weight, dtype, shape: vec![rows, cols], scales: Side::E8m0(groups) })
    }

    fn fp8_grid<'a>(&'a self, weight: &'a Entry, grid: &'a Entry) -> Result<Layout<'a>, ModelError> {
        let [rows, cols] = self.two(weight)?;
        let block = self.fp8_block();
        let needed = [rows.div_ceil(block[0]), cols.div_ceil(block[1])];
        if grid.shape != needed {
            let needed = format!("shape {needed:?}: a scale per {block:?} block of {}", weight.stored_name);
            return Err(self.bad(grid, &needed, &format!("{:?}", grid.shape)));
        }
        if grid.stored.plain().is_none() {
            return Err(self.bad(grid, "F32 (or BF16) scales", &grid.stored.to_string()));
        }
        Ok(Layout { weight, dtype: DType::F8E4m3, shape: weight.shape.clone(), scales: Side::Grid { grid, block } })
    }

    fn fp8_rows<'a>(&'a self, weight: &'a Entry, factors: &'a Entry) -> Result<Layout<'a>, ModelError> {
        let [rows, _] = self.two(weight)?;
        let count: usize = factors.shape.iter().product();
        if factors.stored.plain().is_none() || (count != 1 && count != rows) {
            let needed = format!("one scale, or one for each of the {rows} rows of {}", weight.stored_name);
            return Err(self.bad(factors, &needed, &format!("{} {:?}", factors.stored, factors.shape)));
        }
        let scales = if count == 1 { Side::Factor(factors) } else { Side::Row(factors) };
        Ok(Layout { weight, dtype: DType::F8E4m3, shape: weight.shape.clone(), scales })
    }

    /// A matrix by canonical name.
    ///
    /// # Errors
    /// As [`Checkpoint::layout`]; bytes that are not there (a header-only stub).
    pub(crate) fn matrix(&self, name: &str) -> Result<MatrixSource, ModelError> {
        let layout = self.layout(name)?;
        let [rows, cols] =
            layout.shape.as_slice().try_into().map_err(|_| self.bad(layout.weight, "a matrix", &format!("shape {:?}", layout.shape)))?;
        let matrix = self.source(&layout, rows, cols, 0)?;
        Ok(if matrix.is_plain() && self.narrows(name) { fp8::narrow(&matrix)? } else { matrix })
    }

    /// Matrix `index` of a stack `[count, rows, cols]`.
    ///
    /// # Errors
    /// As [`Checkpoint::matrix`].
    pub(crate) fn stack_member(&self, name: &str, index: usize) -> Result<MatrixSource, ModelError> {
        let layout = self.layout(name)?;
        let [count, rows, cols]: [usize; 3] = layout
            .shape
            .as_slice()
            .try_into()
            .map_err(|_| self.bad(layout.weight, "a stack of matrices", &format!("shape {:?}", layout.shape)))?;
        let whole = self.source(&layout, count * rows, cols, index)?;
        Ok(whole.row_window(index * rows..(index + 1) * rows)?)
    }

    /// `member`: which matrix of a stack is wanted, where factors are per matrix.
    fn source(&self, layout: &Layout<'_>, rows: usize, cols: usize, member: usize) -> Result<MatrixSource, ModelError> {
        let bytes = self.entry_bytes(layout.weight)?;
        let matrix = MatrixSource::new(layout.weight.stored_name.as_str(), layout.dtype, rows, cols, bytes)?;
        let scales = match &layout.scales {
            Side::None => return Ok(matrix),
            Side::Codebook(codebook) => return Ok(matrix.with_levels(codebook.levels[member].clone())),
            Side::Factor(e) => {
                let factors = self.floats(e)?;
                Scales::Tensor(*factors.get(if factors.len() > 1 { member } else { 0 }).ok_or_else(|| self.bad(e, "a factor", "none"))?)
            }
            Side::Row(e) => Scales::Row(Arc::from(self.floats(e)?)),
            Side::Grid { grid, block } => {
                Scales::Grid { values: Arc::from(self.floats(grid)?), grid_cols: grid.shape[1], block_rows: block[0], block_cols: block[1] }
            }
            Side::E4m3 { groups, global, divide } => {
                let factor = self.floats(global)?.first().copied().unwrap_or(f32::NAN);
                if !factor.is_finite() || factor == 0.0 {
                    return Err(self.bad(global, "a finite factor other than 0", &factor.to_string()));
                }
                let global = if *divide { 1.0 / factor } else { factor };
                Scales::E4m3Groups { bytes: self.entry_bytes(groups)?, stride: groups.shape[1], global }
            }
            Side::E8m0(groups) => Scales::E8m0Groups { bytes: self.entry_bytes(groups)?, stride: groups.shape[1] },
        };
        Ok(matrix.with_scales(scales))
    }

    /// A plain tensor's values.
    fn floats(&self, entry: &Entry) -> Result<Vec<f32>, ModelError> {
        let dtype =
            entry.stored.plain().ok_or_else(|| self.bad(entry, "BF16, F16, F32 or a ggml type that is read", &entry.stored.to_string()))?;
        let len = entry.shape.iter().product();
        Ok(MatrixSource::new(entry.stored_name.as_str(), dtype, 1, len, self.entry_bytes(entry)?)?.to_f32())
    }

    /// A tensor of any shape as f32, row-major.
    ///
    /// # Errors
    /// As [`Checkpoint::matrix`].
    pub(crate) fn vector(&self, name: &str) -> Result<Vec<f32>, ModelError> {
        let entry = self.entry(name).ok_or_else(|| self.missing(name, "a tensor of this name"))?;
        self.floats(entry)
    }
}

fn is_e8m0(entry: &Entry) -> bool {
    matches!(entry.stored, Stored::Safetensors(Dtype::U8 | Dtype::F8_E8M0))
}
