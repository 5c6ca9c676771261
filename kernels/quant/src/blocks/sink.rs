//! What blocks are read into: each type's layout is read in one place, whatever becomes of its elements.
//!
//! Neighbours: [`Values`] makes f32 of them (`dtype.rs`); `coded.rs` keeps codes and scales apart, for devices that compute with them.

use super::lut::IQ4;

/// Elements of a run of the K types: those that share a scale, or half of them.
pub(crate) const RUN: usize = 16;

/// Takes a block's elements, run by run in order. `d` is the block's scale; an element is `d` × whole scale × whole level.
pub(crate) trait Sink {
    /// Run `k` of 16: `d·scale·code − dmin·min`.
    fn affine(&mut self, k: usize, d: (f32, u8), min: (f32, u8), code: impl Fn(usize) -> u8);

    /// Run `k` of 16: `d·scale·(code − zero)`.
    fn centred(&mut self, k: usize, d: (f32, i8), zero: u8, code: impl Fn(usize) -> u8);

    /// Run `k` of 16: `d·scale·IQ4[code]`.
    fn looked_up(&mut self, k: usize, d: (f32, i8), code: impl Fn(usize) -> u8);

    /// Eight elements from `at` on: `d·scale·factor·point·±1`, bit i of `negative` for element i.
    fn signed(&mut self, at: usize, d: (f32, u8), factor: f32, point: &[u8; 8], negative: u8);

    /// Run `k` of 16: `d·scale·(point ± ⅛)`, two points of eight, each shifted up or `down`.
    fn shifted(&mut self, k: usize, d: (f32, u8), down: [bool; 2], points: [&[u8; 8]; 2]);
}

/// The `N` elements of a block as f32, in the order of operations of ggml's reference.
pub(crate) struct Values<'a, const N: usize>(&'a mut [f32; N]);

/// Reads a block's elements into `out`, which holds as many.
#[inline(always)]
pub(crate) fn values<const N: usize>(out: &mut [f32], read: impl FnOnce(&mut Values<'_, N>)) {
    if let Some(out) = out.first_chunk_mut() {
        read(&mut Values(out));
    }
}

impl<const N: usize> Values<'_, N> {
    #[inline(always)]
    fn run(&mut self, k: usize) -> &mut [f32; RUN] {
        &mut self.0.as_chunks_mut().0[k]
    }

    #[inline(always)]
    fn at(&mut self, at: usize) -> &mut [f32; 8] {
        &mut self.0.as_chunks_mut().0[at / 8]
    }
}

impl<const N: usize> Sink for Values<'_, N> {
    #[inline(always)]
    fn affine(&mut self, k: usize, d: (f32, u8), min: (f32, u8), code: impl Fn(usize) -> u8) {
        let (scale, minimum) = (d.0 * f32::from(d.1), min.0 * f32::from(min.1));
        for (l, o) in self.run(k).iter_mut().enumerate() {
            *o = scale * f32::from(code(l)) - minimum;
        }
    }

    #[inline(always)]
    fn centred(&mut self, k: usize, d: (f32, i8), zero: u8, code: impl Fn(usize) -> u8) {
        let scale = d.0 * f32::from(d.1);
        for (l, o) in self.run(k).iter_mut().enumerate() {
            *o = scale * f32::from(i16::from(code(l)) - i16::from(zero));
        }
    }

    #[inline(always)]
    fn looked_up(&mut self, k: usize, d: (f32, i8), code: impl Fn(usize) -> u8) {
        let scale = d.0 * f32::from(d.1);
        for (l, o) in self.run(k).iter_mut().enumerate() {
            *o = scale * IQ4[usize::from(code(l))];
        }
    }

    #[inline(always)]
    fn signed(&mut self, at: usize, d: (f32, u8), factor: f32, point: &[u8; 8], negative: u8) {
        let scale = d.0 * f32::from(d.1) * factor;
        for (i, (o, coordinate)) in self.at(at).iter_mut().zip(point).enumerate() {
            let sign = if negative & 1 << i == 0 { 0 } else { 1 << 31 };
            *o = f32::from_bits((scale * f32::from(coordinate.cast_signed())).to_bits() ^ sign);
        }
    }

    #[inline(always)]
    fn shifted(&mut self, k: usize, d: (f32, u8), down: [bool; 2], points: [&[u8; 8]; 2]) {
        let (scale, deltas) = (d.0 * f32::from(d.1), down.map(|down| if down { -0.125 } else { 0.125 }));
        let run = self.run(k);
        for (i, o) in run.iter_mut().enumerate() {
            *o = scale * (f32::from(points[i / 8][i % 8].cast_signed()) + deltas[i / 8]);
        }
    }
}
