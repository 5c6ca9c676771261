//! What the trait's methods refuse before an op runs: shapes, slots and pages that do not fit. Texts say what was there and what was needed.

use tandem_quant::MatrixSource;

use super::{CpuBatch, CpuState, CpuWeight, decode::lacking};
use crate::{BackendError, IndexerParams};

/// A weight that this backend has no kernel for.
pub(super) fn refused(m: &MatrixSource, reason: String) -> BackendError {
    BackendError::Weight { tensor: m.name().into(), reason }
}

/// Refuses codes without what gives them their meaning, and empty matrices.
pub(super) fn check_matrix(m: &MatrixSource) -> Result<(), BackendError> {
    if let Some(what) = lacking(m) {
        return Err(refused(m, format!("{} needs {what}, and none were given", m.dtype())));
    }
    if m.rows() == 0 || m.cols() == 0 {
        return Err(refused(m, format!("shape [{}, {}] is empty", m.rows(), m.cols())));
    }
    Ok(())
}

/// `[first, first + width)` must lie in rows of `stride`.
pub(super) fn columns(stride: usize, first: usize, width: usize) -> Result<(), String> {
    if width == 0 || first + width > stride {
        return Err(format!("columns {first}..{} do not fit rows of {stride}", first + width));
    }
    Ok(())
}

/// `w` must be `[out, cols]`.
pub(super) fn shape(what: &str, w: &CpuWeight, out: usize, cols: usize) -> Result<(), String> {
    if w.out != out || w.cols != cols {
        return Err(format!("{what} is [{}, {}] where [{out}, {cols}] is needed", w.out, w.cols));
    }
    Ok(())
}

/// The slot must be one of the state's.
pub(super) fn slot(state: &CpuState, slot: u32) -> Result<(), String> {
    let have = state.spec.slots;
    if slot as usize >= have { Err(format!("slot {slot} is not one of {have}")) } else { Ok(()) }
}

/// The pages must be some of the state's.
pub(super) fn pages(state: &CpuState, pages: &[u32]) -> Result<(), String> {
    let have = state.spec.pages;
    match pages.iter().find(|&&p| p as usize >= have) {
        Some(p) => Err(format!("page {p} is not one of {have}")),
        None => Ok(()),
    }
}

/// What a batch asks of a state.
pub(super) fn fits(batch: &CpuBatch, state: &CpuState, layer: usize, layers: usize) -> Result<(), String> {
    if layer >= layers {
        return Err(format!("layer {layer} is not one of {layers}"));
    }
    batch.slots.last().map_or(Ok(()), |&s| slot(state, s))?;
    pages(state, &batch.desc.pages)
}

/// The indexer's sizes must be the state's.
pub(super) fn index_sizes(p: &IndexerParams, state: &CpuState) -> Result<(), String> {
    let spec = &state.spec;
    if p.dim != spec.index_dim || p.kpool != spec.kpool || p.heads == 0 {
        return Err(format!("keys of {} in pools of {} where the state has {} and {}", p.dim, p.kpool, spec.index_dim, spec.kpool));
    }
    Ok(())
}
