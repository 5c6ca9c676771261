//! K- and IQ-types as kernels/cuda/coded.cuh wants them: codes in steps, scales in rows. Neighbours: `pack.rs` (the other types, and who asks),
//! `tandem_quant::coded` (what the blocks of a file hold).

use std::{num::NonZero, thread};

use half::f16;
use tandem_quant::{
    DType, MatrixSource,
    coded::{CodeLevels, CodeScales, Codes, Coding, coding},
};

use super::pack::{Kind, PAD};

/// Elements under one `d` of the K types.
const SUPER: usize = 256;

/// The kernels for a type of codes, and its coding.
pub(super) fn of_dtype(dtype: DType) -> Option<(Kind, Coding)> {
    let coding = coding(dtype)?;
    let mins = matches!(coding.scales, CodeScales::RunMin | CodeScales::PairMin);
    let kind = match coding.levels {
        CodeLevels::Linear { bits: ..=4, .. } if mins => Kind::Code4Min,
        CodeLevels::Linear { bits: ..=4, .. } => Kind::Code4,
        CodeLevels::Linear { .. } if mins => Kind::Code8Min,
        CodeLevels::Linear { .. } => Kind::Code8,
        CodeLevels::Table(_) => Kind::Lut4,
    };
    Some((kind, coding))
}

/// `Form` of coded.cuh.
pub(super) fn form(c: &Coding) -> i32 {
    match c.scales {
        CodeScales::Run => 0,
        CodeScales::RunMin => 1,
        CodeScales::PairMin => 2,
        CodeScales::Half => 3,
        CodeScales::HalfMin => 4,
    }
}

/// The code of level 0, and the table as the kernels read it: lower bytes of bf16 numbers, then upper ones.
pub(super) fn levels(c: &Coding) -> (i32, [u32; 8]) {
    match c.levels {
        CodeLevels::Linear { zero, .. } => (i32::from(zero), [0; 8]),
        CodeLevels::Table(table) => {
            let bits = table.map(|level| half::bf16::from_f32(f32::from(level)).to_bits());
            let words = |upper: usize| {
                let mut words = [0; 4];
                for (word, four) in words.iter_mut().zip(bits.as_chunks::<4>().0) {
                    *word = u32::from_le_bytes(four.map(|b| b.to_le_bytes()[upper]));
                }
                words
            };
            let (low, high) = (words(0), words(1));
            (0, std::array::from_fn(|i| if i < 4 { low[i] } else { high[i - 4] }))
        }
    }
}

/// Bytes of a row of scales: half a byte per column, then what the form needs; rows begin on 8 bytes.
pub(super) fn scale_row(scales: CodeScales, padded: usize) -> usize {
    let behind = match scales {
        CodeScales::Run | CodeScales::Half => 2 * padded.div_ceil(SUPER),
        CodeScales::RunMin | CodeScales::PairMin => 4 * padded.div_ceil(SUPER),
        CodeScales::HalfMin => padded / 16,
    };
    (padded / 16 + behind).next_multiple_of(8)
}

/// Bytes of a row of codes and of its row of scales, of a type in its coding; rows of `padded` elements.
pub(crate) fn row_bytes(dtype: DType, coding: Coding, padded: usize) -> (usize, usize) {
    let codes = if of_dtype(dtype).is_some_and(|(kind, _)| matches!(kind, Kind::Code8 | Kind::Code8Min)) { padded } else { padded / 2 };
    (codes, scale_row(coding.scales, padded))
}

/// Elements from which on a matrix is packed by several threads, each of which takes at least as many.
const SHARE: usize = 1 << 20;
/// Most threads.
const THREADS: usize = 16;

/// Writes rows of a matrix: codes to `q` (of `q_row` bytes a row, zeroed), scales to `s` (`s_row`, zeroed). Large ones on several threads, as
/// nothing is uploaded meanwhile.
pub(super) fn pack(m: &MatrixSource, kind: Kind, c: &Coding, (q, q_row): (&mut [u8], usize), (s, s_row): (&mut [u8], usize)) {
    let threads = thread::available_parallelism().map_or(1, NonZero::get).min(THREADS);
    let rows = m.rows().div_ceil(threads).max(SHARE.div_ceil(m.cols().max(1)));
    let parts = q.chunks_mut(rows * q_row).zip(s.chunks_mut(rows * s_row));
    if rows >= m.rows() {
        parts.for_each(|(q, s)| pack_rows(m, 0, kind, c, (q, q_row), (s, s_row)));
    } else {
        thread::scope(|scope| {
            parts.enumerate().for_each(|(i, (q, s))| {
                scope.spawn(move || pack_rows(m, i * rows, kind, c, (q, q_row), (s, s_row)));
            });
        });
    }
}

/// The rows from `first` on, as many as there is room for.
fn pack_rows(m: &MatrixSource, first: usize, kind: Kind, c: &Coding, (q, q_row): (&mut [u8], usize), (s, s_row): (&mut [u8], usize)) {
    let dtype = m.dtype();
    let Some((mut codes, read)) = Codes::of(dtype) else { return };
    let (elems, padded) = (dtype.block_elems(), m.cols().next_multiple_of(PAD));
    let mut line = vec![0; padded];
    for ((r, q), s) in (first..m.rows()).zip(q.chunks_exact_mut(q_row)).zip(s.chunks_exact_mut(s_row)) {
        let (each, behind) = s.split_at_mut(padded / 16);
        let blocks = m.row_bytes(r).chunks_exact(dtype.block_bytes());
        for (i, (block, to)) in blocks.zip(line.chunks_exact_mut(elems)).enumerate() {
            read(block, &mut codes);
            to.copy_from_slice(&codes.codes[..elems]);
            write_scales(c.scales, &codes, i, each, behind);
        }
        match kind {
            Kind::Code8 | Kind::Code8Min => {
                line.as_chunks::<64>().0.iter().zip(q.as_chunks_mut::<64>().0).for_each(|(from, to)| wide_step(from, to));
            }
            Kind::Lut4 => narrow_steps(&line, q, natural),
            _ => narrow_steps(&line, q, spread),
        }
    }
}

/// The scales of block `i` of a row.
fn write_scales(scales: CodeScales, c: &Codes, i: usize, each: &mut [u8], behind: &mut [u8]) {
    let half = |to: &mut [u8], at: usize, v: f16| to[2 * at..2 * at + 2].copy_from_slice(&v.to_le_bytes());
    let run = 16 * i;
    match scales {
        CodeScales::Run => {
            each[run..run + 16].iter_mut().zip(c.scales).for_each(|(to, scale)| *to = scale.cast_unsigned() ^ 0x80);
            half(behind, i, c.d);
        }
        CodeScales::RunMin => {
            each[run..run + 16].iter_mut().zip(c.scales).zip(c.mins).for_each(|((to, scale), min)| *to = scale.cast_unsigned() | min << 4);
            half(behind, 2 * i, c.d);
            half(behind, 2 * i + 1, c.dmin);
        }
        CodeScales::PairMin => {
            for (k, to) in each[run..run + 16].as_chunks_mut::<2>().0.iter_mut().enumerate() {
                *to = [c.scales[2 * k].cast_unsigned(), c.mins[2 * k]];
            }
            half(behind, 2 * i, c.d);
            half(behind, 2 * i + 1, c.dmin);
        }
        CodeScales::Half => half(each, i, c.d),
        CodeScales::HalfMin => {
            half(each, i, c.d);
            half(behind, i, c.dmin);
        }
    }
}

/// The four codes of `from` at `at`.
fn four(from: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([from[at], from[at + 1], from[at + 2], from[at + 3]])
}

/// 64 codes as bytes: lane by lane, four of each 16.
fn wide_step(from: &[u8; 64], to: &mut [u8; 64]) {
    for lane in 0..4 {
        for group in 0..4 {
            to[16 * lane + 4 * group..][..4].copy_from_slice(&from[16 * group + 4 * lane..][..4]);
        }
    }
}

/// Steps of 128 codes below 16: lane by lane, a word of four codes of one 16 and four of the next.
fn narrow_steps(line: &[u8], q: &mut [u8], word: impl Fn(u32, u32) -> u32) {
    for (from, to) in line.as_chunks::<128>().0.iter().zip(q.as_chunks_mut::<64>().0) {
        for lane in 0..4 {
            for w in 0..4 {
                let (a, b) = (four(from, 32 * w + 4 * lane), four(from, 32 * w + 16 + 4 * lane));
                to[16 * lane + 4 * w..][..4].copy_from_slice(&word(a, b).to_le_bytes());
            }
        }
    }
}

/// Code i at bit 4i.
fn natural(a: u32, b: u32) -> u32 {
    let close = |v: u32| {
        let pairs = (v | v >> 4) & 0x00FF_00FF;
        (pairs | pairs >> 8) & 0xFFFF
    };
    close(a) | close(b) << 16
}

/// Codes 2p at bit 4p, codes 2p + 1 at bit 16 + 4p.
fn spread(a: u32, b: u32) -> u32 {
    let close = |v: u32| {
        let both = v | v >> 12;
        both & 0xFF | (both & 0xFF00) << 8
    };
    close(a) | close(b) << 8
}

#[cfg(test)]
#[path = "coded_tests.rs"]
mod tests;
