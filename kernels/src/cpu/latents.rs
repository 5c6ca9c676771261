//! Latent rows as the cache stores them: f32, bf16, or fp8 with a scale for each tile of a row.
//!
//! Neighbours: `state.rs` holds one for all MLA layers and pages, `mla.rs` appends rows and gathers them.

use half::bf16;
use tandem_quant::float8::{e4m3, to_e4m3};

use super::{
    aligned::Aligned,
    state::{Reader, put_f32},
};
use crate::Precision;

/// Values of a row that share a scale in fp8.
const FP8_TILE: usize = 128;
/// The largest E4M3 number: the largest value of a tile becomes it.
const FP8_MAX: f32 = 448.0;

/// What latent rows are stored as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LatentType {
    /// As they are.
    F32,
    /// Eight bits of mantissa.
    Bf16,
    /// E4M3 with an f32 scale for each 128 values of a row: a value is off by at most 1/16 of itself, or 2⁻¹⁰/448 of the tile's largest,
    /// whichever is more.
    Fp8,
}

impl LatentType {
    /// What a precision stores unless told otherwise.
    pub fn of(precision: Precision) -> Self {
        if precision == Precision::Bf16 { Self::Bf16 } else { Self::F32 }
    }

    /// Bytes of a row of `latent` values.
    pub(super) fn row_bytes(self, latent: usize) -> usize {
        match self {
            Self::F32 => 4 * latent,
            Self::Bf16 => 2 * latent,
            Self::Fp8 => latent + 4 * latent.div_ceil(FP8_TILE),
        }
    }
}

/// All latent rows.
#[derive(Debug)]
pub(super) struct Latents {
    pub(super) rows: Rows,
    latent: usize,
}

/// The rows of a type.
#[derive(Debug)]
pub(super) enum Rows {
    F32(Aligned),
    Bf16(Vec<u16>),
    /// Codes, and the scales `[row][tile]`.
    Fp8(Vec<u8>, Vec<f32>),
}

impl Latents {
    /// Zeroed rows of `latent` values.
    pub(super) fn zeroed(kind: LatentType, rows: usize, latent: usize) -> Self {
        let n = rows * latent;
        let rows = match kind {
            LatentType::F32 => Rows::F32(Aligned::zeroed(n)),
            LatentType::Bf16 => Rows::Bf16(vec![0; n]),
            LatentType::Fp8 => Rows::Fp8(vec![0; n], vec![0.0; rows * latent.div_ceil(FP8_TILE)]),
        };
        Self { rows, latent }
    }

    /// What rows are stored as.
    pub(super) fn kind(&self) -> LatentType {
        match self.rows {
            Rows::F32(_) => LatentType::F32,
            Rows::Bf16(_) => LatentType::Bf16,
            Rows::Fp8(..) => LatentType::Fp8,
        }
    }

    /// Stores a row. What is not finite stays so.
    pub(super) fn put(&mut self, row: usize, values: &[f32]) {
        let (at, tiles) = (row * self.latent, self.latent.div_ceil(FP8_TILE));
        match &mut self.rows {
            Rows::F32(v) => v[at..at + values.len()].copy_from_slice(values),
            Rows::Bf16(v) => v[at..at + values.len()].iter_mut().zip(values).for_each(|(o, x)| *o = bf16::from_f32(*x).to_bits()),
            Rows::Fp8(codes, scales) => {
                let codes = codes[at..at + values.len()].chunks_mut(FP8_TILE);
                for ((codes, scale), values) in codes.zip(&mut scales[row * tiles..]).zip(values.chunks(FP8_TILE)) {
                    let most = values.iter().fold(0.0f32, |m, v| m.max(v.abs()));
                    *scale = if values.iter().all(|v| v.is_finite()) { most / FP8_MAX } else { f32::NAN };
                    let inverse = if *scale > 0.0 { scale.recip() } else { 0.0 };
                    codes.iter_mut().zip(values).for_each(|(c, v)| *c = to_e4m3(v * inverse));
                }
            }
        }
    }

    /// An fp8 row as f32.
    pub(super) fn get_fp8(&self, row: usize, out: &mut [f32]) {
        let Rows::Fp8(codes, scales) = &self.rows else { return };
        let (at, tiles) = (row * self.latent, self.latent.div_ceil(FP8_TILE));
        let codes = codes[at..at + out.len()].chunks(FP8_TILE);
        for ((codes, scale), out) in codes.zip(&scales[row * tiles..]).zip(out.chunks_mut(FP8_TILE)) {
            out.iter_mut().zip(codes).for_each(|(o, c)| *o = e4m3(*c) * scale);
        }
    }

    /// Copies `rows` rows.
    pub(super) fn copy(&mut self, from: usize, to: usize, rows: usize) {
        let (k, tiles) = (self.latent, self.latent.div_ceil(FP8_TILE));
        match &mut self.rows {
            Rows::F32(v) => v.copy_within(from * k..(from + rows) * k, to * k),
            Rows::Bf16(v) => v.copy_within(from * k..(from + rows) * k, to * k),
            Rows::Fp8(codes, scales) => {
                codes.copy_within(from * k..(from + rows) * k, to * k);
                scales.copy_within(from * tiles..(from + rows) * tiles, to * tiles);
            }
        }
    }

    /// Appends `rows` rows to a snapshot.
    pub(super) fn export(&self, from: usize, rows: usize, out: &mut Vec<u8>) {
        let (k, tiles) = (self.latent, self.latent.div_ceil(FP8_TILE));
        match &self.rows {
            Rows::F32(v) => put_f32(out, &v[from * k..(from + rows) * k]),
            Rows::Bf16(v) => v[from * k..(from + rows) * k].iter().for_each(|b| out.extend_from_slice(&b.to_le_bytes())),
            Rows::Fp8(codes, scales) => {
                out.extend_from_slice(&codes[from * k..(from + rows) * k]);
                put_f32(out, &scales[from * tiles..(from + rows) * tiles]);
            }
        }
    }

    /// Reads what [`Latents::export`] wrote.
    pub(super) fn import(&mut self, to: usize, rows: usize, r: &mut Reader<'_>) {
        let (k, tiles) = (self.latent, self.latent.div_ceil(FP8_TILE));
        match &mut self.rows {
            Rows::F32(v) => r.f32s(&mut v[to * k..(to + rows) * k]),
            Rows::Bf16(v) => {
                for o in &mut v[to * k..(to + rows) * k] {
                    *o = r.take(2).map_or(0, |b| u16::from_le_bytes([b[0], b[1]]));
                }
            }
            Rows::Fp8(codes, scales) => {
                if let Some(bytes) = r.take(rows * k) {
                    codes[to * k..(to + rows) * k].copy_from_slice(bytes);
                }
                r.f32s(&mut scales[to * tiles..(to + rows) * tiles]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_fp8_row_is_off_by_a_sixteenth_at_most() {
        let latent = 300;
        let mut all = Latents::zeroed(LatentType::Fp8, 3, latent);
        let row: Vec<f32> = (0..latent).map(|i| ((i * 37 % 101) as f32 - 50.0) * 10f32.powi(i as i32 / 100 - 1)).collect();
        all.put(1, &row);
        let mut back = vec![0.0; latent];
        all.get_fp8(1, &mut back);
        for (tile, got) in row.chunks(FP8_TILE).zip(back.chunks(FP8_TILE)) {
            let most = tile.iter().fold(0.0f32, |m, v| m.max(v.abs()));
            for (x, y) in tile.iter().zip(got) {
                assert!((x - y).abs() <= (x.abs() / 16.0).max(most / FP8_MAX / 1024.0) * 1.0001, "{x} {y}");
            }
            assert!(tile.iter().zip(got).any(|(x, y)| x.abs() == most && (x - y).abs() <= most * 1e-6), "the largest is exact");
        }
        all.get_fp8(0, &mut back);
        assert_eq!(back, vec![0.0; latent], "neighbours are untouched");
        all.put(2, &[f32::NAN; 300]);
        all.get_fp8(2, &mut back);
        assert!(back.iter().all(|v| v.is_nan()));
    }

    #[test]
    fn rows_are_copied_and_snapshot_in_every_type() {
        for kind in [LatentType::F32, LatentType::Bf16, LatentType::Fp8] {
            let mut a = Latents::zeroed(kind, 4, 130);
            a.put(0, &[1.5; 130]);
            a.put(1, &[-3.0; 130]);
            a.copy(0, 2, 2);
            let (mut bytes, mut again, mut b) = (Vec::new(), Vec::new(), Latents::zeroed(kind, 4, 130));
            a.export(2, 2, &mut bytes);
            assert_eq!(bytes.len(), 2 * kind.row_bytes(130));
            b.import(1, 2, &mut Reader(&bytes));
            b.export(1, 2, &mut again);
            assert_eq!((bytes, b.kind()), (again, kind));
        }
    }
}
