//! What a stored weight matrix looks like: element types, block layouts, shared byte ranges and scalar dequantisation.
//!
//! | module | idea |
//! |---|---|
//! | [`dtype`] | the element/block types and their sizes |
//! | [`blocks`] | scalar dequantisation of the block types |
//! | [`coded`] | the same types as codes and scales of scales, apart |
//! | [`float8`] | E4M3, UE4M3, E8M0 |
//! | [`fp8`] | floats narrowed to E4M3 under a grid of factors |
//! | [`bytes`] | a range of bytes kept alive by whoever owns it (a memory map, a vector) |
//! | [`rocmfp`] | ROCmFP's mixed types and their codebooks |
//! | [`scales`] | scales that lie beside the elements (FP8, NVFP4 and MXFP4 in safetensors) |
//! | [`matrix`] | a row-major `[out, in]` matrix over such bytes, with windows along both axes |
//!
//! This crate depends on nothing of Tandem's: the loader (`tandem-model`) produces [`MatrixSource`]s, the backends
//! (`tandem-kernels`) consume them.

pub mod blocks;
pub mod bytes;
pub mod coded;
pub mod dtype;
pub mod float8;
pub mod fp8;
pub mod matrix;
pub mod rocmfp;
pub mod scales;

pub use bytes::SharedBytes;
pub use dtype::DType;
pub use matrix::{MatrixError, MatrixSource};
pub use scales::{ScaleForm, Scales};
