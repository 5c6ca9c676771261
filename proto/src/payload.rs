//! Payloads of the data frames, as bytes: `Dispatch` = ids, weights, activations; `Combine` = timings, partial. All little-endian,
//! row-major, without padding. Both sides of [`crate::hop`] use it; [`crate::frame`] does not look inside.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};

use crate::frame::Dtype;

/// What activations and partials are rounded to on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Precision {
    /// Bit-exact f32.
    F32,
    /// bf16, rounded to nearest even.
    Bf16,
}

impl Precision {
    /// The header's element type.
    pub fn dtype(self) -> Dtype {
        match self {
            Self::F32 => Dtype::F32,
            Self::Bf16 => Dtype::Bf16,
        }
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.dtype().name())
    }
}

impl FromStr for Precision {
    type Err = PayloadError;

    fn from_str(s: &str) -> Result<Self, PayloadError> {
        match s {
            "f32" => Ok(Self::F32),
            "bf16" => Ok(Self::Bf16),
            _ => Err(PayloadError::Precision { got: s.to_owned() }),
        }
    }
}

/// A payload that does not have the shape that the handshake agreed on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PayloadError {
    /// Unknown precision name.
    #[error("unknown precision {got:?}; needed f32 or bf16")]
    Precision {
        /// What was given.
        got: String,
    },
    /// Wrong length.
    #[error("{what} payload is {got} bytes long; {rows} rows need {needed}")]
    Length {
        /// `dispatch` or `combine`.
        what: &'static str,
        /// Rows.
        rows: usize,
        /// Bytes needed.
        needed: usize,
        /// Bytes there.
        got: usize,
    },
    /// A row outside of the submission.
    #[error("combine payload names row {got} of {rows}")]
    Row {
        /// The row named.
        got: u32,
        /// Rows there are.
        rows: usize,
    },
    /// Wrong element type.
    #[error("{what} payload holds {got:?}; needed {needed:?}")]
    Dtype {
        /// `dispatch` or `combine`.
        what: &'static str,
        /// Element type agreed on.
        needed: Dtype,
        /// Element type there.
        got: Dtype,
    },
}

/// Sizes that both sides agreed on in the handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowShape {
    /// Elements of an activation row.
    pub hidden: usize,
    /// Routed experts per row.
    pub topk: usize,
    /// Precision of the activations.
    pub precision: Precision,
}

/// Bytes before the partial in a `Combine`: two u64 of nanoseconds.
pub const TIMINGS_LEN: usize = 16;
/// Bytes before ids and weights in a `Dispatch` whose rows are in shared memory: the first row's place, a u64.
pub const PLACE_LEN: usize = 8;

impl RowShape {
    /// Bytes of a dispatch row: ids and weights (4 bytes each) and the activation.
    pub fn dispatch_row(&self) -> usize {
        self.topk * 8 + self.combine_row()
    }

    /// Bytes of a combine row.
    pub fn combine_row(&self) -> usize {
        self.hidden * self.precision.dtype().size()
    }

    /// Rows of a piece of at most `bytes`; at least one.
    pub fn rows_per_piece(&self, bytes: usize) -> usize {
        (bytes.saturating_sub(TIMINGS_LEN) / self.dispatch_row()).max(1)
    }

    /// Appends a dispatch payload: `ids` and `weights` are rows × topk, `x` is rows × hidden.
    pub fn put_dispatch(&self, out: &mut BytesMut, ids: &[i32], weights: &[f32], x: &[f32]) {
        out.reserve(4 * (ids.len() + weights.len()) + x.len() * self.precision.dtype().size());
        put_words(out, ids, |id| id.to_le_bytes());
        put_words(out, weights, |w| w.to_le_bytes());
        self.put_rows(out, x);
    }

    /// Reads a dispatch payload of `rows` rows into the buffers of a submission (rows × topk, rows × topk, rows × hidden).
    ///
    /// # Errors
    /// [`PayloadError::Length`], [`PayloadError::Dtype`].
    pub fn get_dispatch(
        &self,
        dtype: Dtype,
        payload: &[u8],
        rows: usize,
        ids: &mut [i32],
        weights: &mut [f32],
        x: &mut [f32],
    ) -> Result<(), PayloadError> {
        self.check("dispatch", dtype, payload, rows, rows * self.dispatch_row())?;
        let (id_bytes, rest) = payload.split_at(rows * self.topk * 4);
        let (weight_bytes, x_bytes) = rest.split_at(rows * self.topk * 4);
        for (id, b) in ids.iter_mut().zip(id_bytes.as_chunks::<4>().0) {
            *id = i32::from_le_bytes(*b);
        }
        get_f32(weight_bytes, weights);
        self.get_rows(x_bytes, x);
        Ok(())
    }

    /// Appends a combine payload.
    pub fn put_combine(&self, out: &mut BytesMut, timings: ExpertTimings, partial: &[f32]) {
        out.reserve(TIMINGS_LEN + partial.len() * self.precision.dtype().size());
        out.put_u64_le(nanos(timings.queue));
        out.put_u64_le(nanos(timings.compute));
        self.put_rows(out, partial);
    }

    /// Checks a combine payload of `rows` rows and reads its timings.
    ///
    /// # Errors
    /// [`PayloadError::Length`], [`PayloadError::Dtype`].
    pub fn combine_timings(&self, dtype: Dtype, payload: &[u8], rows: usize) -> Result<ExpertTimings, PayloadError> {
        self.check("combine", dtype, payload, rows, TIMINGS_LEN + rows * self.combine_row())?;
        Ok(timings_of(payload))
    }

    /// Reads the partial of a payload that [`RowShape::combine_timings`] accepted, rows × hidden.
    pub fn get_partial(&self, payload: &[u8], out: &mut [f32]) {
        self.get_rows(payload.get(TIMINGS_LEN..).unwrap_or_default(), out);
    }

    /// Bytes of a dispatch payload of `rows` rows that lie in shared memory.
    pub fn shared_dispatch_len(&self, rows: usize) -> usize {
        PLACE_LEN + 8 * rows * self.topk
    }

    /// Appends the payload of a dispatch whose activations are in shared memory from row `row` on.
    pub fn put_shared_dispatch(&self, out: &mut BytesMut, row: u64, ids: &[i32], weights: &[f32]) {
        out.reserve(PLACE_LEN + 4 * (ids.len() + weights.len()));
        out.put_u64_le(row);
        put_words(out, ids, |id| id.to_le_bytes());
        put_words(out, weights, |w| w.to_le_bytes());
    }

    /// Reads such a payload of `rows` rows; returns the first row's place.
    ///
    /// # Errors
    /// [`PayloadError::Length`].
    pub fn get_shared_dispatch(&self, payload: &[u8], rows: usize, ids: &mut [i32], weights: &mut [f32]) -> Result<u64, PayloadError> {
        let half = rows * self.topk * 4;
        let needed = self.shared_dispatch_len(rows);
        let place = payload.first_chunk::<PLACE_LEN>().filter(|_| payload.len() == needed);
        let Some(place) = place else {
            return Err(PayloadError::Length { what: "shared dispatch", rows, needed, got: payload.len() });
        };
        for (id, b) in ids.iter_mut().zip(payload[PLACE_LEN..PLACE_LEN + half].as_chunks::<4>().0) {
            *id = i32::from_le_bytes(*b);
        }
        get_f32(&payload[PLACE_LEN + half..], weights);
        Ok(u64::from_le_bytes(*place))
    }

    /// Appends the payload of a combine whose partial is in shared memory; `non_finite`: its rows with a NaN or an infinity.
    pub fn put_shared_combine(&self, out: &mut BytesMut, timings: ExpertTimings, non_finite: &[u32]) {
        out.reserve(TIMINGS_LEN + 4 * non_finite.len());
        out.put_u64_le(nanos(timings.queue));
        out.put_u64_le(nanos(timings.compute));
        put_words(out, non_finite, |row| row.to_le_bytes());
    }

    /// Reads such a payload of `rows` rows.
    ///
    /// # Errors
    /// [`PayloadError::Length`]; [`PayloadError::Row`] for a row that is not among them.
    pub fn get_shared_combine(&self, payload: &[u8], rows: usize) -> Result<(ExpertTimings, Vec<u32>), PayloadError> {
        let list = payload.len().checked_sub(TIMINGS_LEN).filter(|list| list % 4 == 0 && *list <= 4 * rows);
        if list.is_none() {
            return Err(PayloadError::Length { what: "shared combine", rows, needed: TIMINGS_LEN, got: payload.len() });
        }
        let bad: Vec<u32> = payload[TIMINGS_LEN..].as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
        match bad.iter().find(|row| **row as usize >= rows) {
            Some(row) => Err(PayloadError::Row { got: *row, rows }),
            None => Ok((timings_of(payload), bad)),
        }
    }

    fn check(&self, what: &'static str, dtype: Dtype, payload: &[u8], rows: usize, needed: usize) -> Result<(), PayloadError> {
        if dtype != self.precision.dtype() {
            return Err(PayloadError::Dtype { what, needed: self.precision.dtype(), got: dtype });
        }
        if payload.len() != needed {
            return Err(PayloadError::Length { what, rows, needed, got: payload.len() });
        }
        Ok(())
    }

    fn put_rows(&self, out: &mut BytesMut, x: &[f32]) {
        match self.precision {
            Precision::F32 => put_words(out, x, |v| v.to_le_bytes()),
            Precision::Bf16 => put_words(out, x, |v| bf16_bits(v).to_le_bytes()),
        }
    }

    fn get_rows(&self, bytes: &[u8], x: &mut [f32]) {
        match self.precision {
            Precision::F32 => get_f32(bytes, x),
            Precision::Bf16 => {
                for (v, b) in x.iter_mut().zip(bytes.as_chunks::<2>().0) {
                    *v = f32::from_bits(u32::from(u16::from_le_bytes(*b)) << 16);
                }
            }
        }
    }
}

/// Where an expert worker spent its time on a submission.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ExpertTimings {
    /// From the arrival of the last piece to the start of the engine.
    pub queue: Duration,
    /// Inside the engine, for the whole joined batch.
    pub compute: Duration,
}

/// The timings that a combine begins with.
fn timings_of(payload: &[u8]) -> ExpertTimings {
    let word = |i: usize| payload[i..].first_chunk::<8>().map_or(0, |b| u64::from_le_bytes(*b));
    ExpertTimings { queue: Duration::from_nanos(word(0)), compute: Duration::from_nanos(word(8)) }
}

/// Nearest bf16, ties to even; NaN stays a (quiet) NaN.
pub fn bf16_bits(v: f32) -> u16 {
    let bits = v.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    let quiet_nan = bits >> 16 | 0x40;
    (if bits & 0x7fff_ffff > 0x7f80_0000 { quiet_nan } else { rounded }) as u16
}

fn nanos(d: Duration) -> u64 {
    u64::try_from(d.as_nanos()).unwrap_or(u64::MAX)
}

/// Appends each value's bytes: one resize and a loop that the compiler vectorises.
fn put_words<T: Copy, const N: usize>(out: &mut BytesMut, values: &[T], encode: impl Fn(T) -> [u8; N]) {
    let start = out.len();
    out.resize(start + values.len() * N, 0);
    for (slot, value) in out[start..].as_chunks_mut::<N>().0.iter_mut().zip(values) {
        *slot = encode(*value);
    }
}

fn get_f32(bytes: &[u8], out: &mut [f32]) {
    for (v, b) in out.iter_mut().zip(bytes.as_chunks::<4>().0) {
        *v = f32::from_le_bytes(*b);
    }
}

/// Buffers for payloads, reused once the transport has dropped them.
#[derive(Debug)]
pub struct BufferPool {
    free: Vec<BytesMut>,
    bytes: usize,
    keep: usize,
}

impl BufferPool {
    /// A pool that keeps at most `keep` bytes.
    pub fn new(keep: usize) -> Self {
        Self { free: Vec::new(), bytes: 0, keep }
    }

    /// An empty buffer with at least `capacity` bytes.
    pub fn take(&mut self, capacity: usize) -> BytesMut {
        let mut buffer = self.free.pop().unwrap_or_default();
        self.bytes -= buffer.capacity().min(self.bytes);
        buffer.clear();
        buffer.reserve(capacity);
        buffer
    }

    /// Gives a payload back. It is kept only if nobody else holds it (a transport that is still sending does).
    pub fn give(&mut self, payload: Bytes) {
        if let Ok(buffer) = payload.try_into_mut()
            && self.bytes + buffer.capacity() <= self.keep
        {
            self.bytes += buffer.capacity();
            self.free.push(buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn shape(precision: Precision) -> RowShape {
        RowShape { hidden: 5, topk: 2, precision }
    }

    proptest! {
        #[test]
        fn bf16_is_nearest_even(bits in any::<u32>()) {
            let v = f32::from_bits(bits);
            prop_assert_eq!(bf16_bits(v), half::bf16::from_f32(v).to_bits());
        }

        #[test]
        fn f32_dispatch_is_bit_exact(rows in prop::collection::vec(any::<([u32; 5], [i32; 2], [u32; 2])>(), 1..9)) {
            let shape = shape(Precision::F32);
            let x: Vec<f32> = rows.iter().flat_map(|r| r.0).map(f32::from_bits).collect();
            let ids: Vec<i32> = rows.iter().flat_map(|r| r.1).collect();
            let weights: Vec<f32> = rows.iter().flat_map(|r| r.2).map(f32::from_bits).collect();
            let mut payload = BytesMut::new();
            shape.put_dispatch(&mut payload, &ids, &weights, &x);
            prop_assert_eq!(payload.len(), rows.len() * shape.dispatch_row());
            let (mut ids2, mut weights2, mut x2) = (vec![0; ids.len()], vec![0.0; weights.len()], vec![0.0; x.len()]);
            shape.get_dispatch(Dtype::F32, &payload, rows.len(), &mut ids2, &mut weights2, &mut x2).unwrap();
            let bits = |v: &[f32]| v.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            prop_assert_eq!((ids, bits(&weights), bits(&x)), (ids2, bits(&weights2), bits(&x2)));
        }

        #[test]
        fn any_other_length_is_refused(len in 0usize..200, rows in 1usize..4) {
            let shape = shape(Precision::Bf16);
            prop_assume!(len != TIMINGS_LEN + rows * shape.combine_row());
            let refused = shape.combine_timings(Dtype::Bf16, &vec![0; len], rows);
            prop_assert!(matches!(refused, Err(PayloadError::Length { what: "combine", .. })), "{refused:?}");
        }
    }

    #[test]
    fn shared_payloads_say_where_rows_are() {
        let shape = shape(Precision::Bf16);
        let mut payload = BytesMut::new();
        shape.put_shared_dispatch(&mut payload, 7, &[1, -1, 3, 4], &[0.5, 0.0, 1.5, 2.0]);
        assert_eq!(payload.len(), shape.shared_dispatch_len(2));
        let (mut ids, mut weights) = ([0; 4], [0.0; 4]);
        assert_eq!(shape.get_shared_dispatch(&payload, 2, &mut ids, &mut weights), Ok(7));
        assert_eq!((ids, weights), ([1, -1, 3, 4], [0.5, 0.0, 1.5, 2.0]));
        assert!(shape.get_shared_dispatch(&payload[..39], 2, &mut ids, &mut weights).is_err());
        let timings = ExpertTimings { queue: Duration::from_nanos(7), compute: Duration::from_micros(9) };
        let mut payload = BytesMut::new();
        shape.put_shared_combine(&mut payload, timings, &[0, 2]);
        assert_eq!(shape.get_shared_combine(&payload, 3), Ok((timings, vec![0, 2])));
        assert_eq!(shape.get_shared_combine(&payload, 2), Err(PayloadError::Row { got: 2, rows: 2 }));
        assert!(shape.get_shared_combine(&payload, 1).is_err() && shape.get_shared_combine(&payload[..15], 3).is_err());
    }

    #[test]
    fn combine_carries_timings_and_rounds() {
        let shape = shape(Precision::Bf16);
        let timings = ExpertTimings { queue: Duration::from_nanos(7), compute: Duration::from_micros(9) };
        let mut payload = BytesMut::new();
        shape.put_combine(&mut payload, timings, &[1.0, 1.003_906_3, 1.011_718_8, -2.5, f32::INFINITY]);
        assert_eq!(shape.combine_timings(Dtype::Bf16, &payload, 1), Ok(timings));
        let mut out = [0.0; 5];
        shape.get_partial(&payload, &mut out);
        assert_eq!(out, [1.0, 1.0, 1.015_625, -2.5, f32::INFINITY]);
        let wrong = shape.combine_timings(Dtype::F32, &payload, 1).unwrap_err();
        assert_eq!(wrong.to_string(), "combine payload holds F32; needed Bf16");
    }

    #[test]
    fn buffers_come_back_once_nobody_holds_them() {
        let mut pool = BufferPool::new(1000);
        let mut buffer = pool.take(100);
        buffer.put_slice(b"abc");
        let payload = buffer.freeze();
        let held = payload.clone();
        pool.give(payload);
        assert!(pool.free.is_empty());
        pool.give(held);
        assert_eq!(pool.free.len(), 1);
        assert!(pool.take(10).is_empty());
        let big = pool.take(2000);
        pool.give(big.freeze());
        assert_eq!((pool.free.len(), pool.bytes), (0, 0));
    }
}
