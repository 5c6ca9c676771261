//! One frame of the expert hop: a fixed 64-byte little-endian header and an opaque payload. The table is in `docs/wire.md`.
//!
//! The header is the whole protocol: prost carries only the handshake, never activations. [`crate::link`] moves frames,
//! [`crate::payload`] fills them, [`crate::hop`] gives them meaning.

use bytes::Bytes;

/// `TNDM`, little-endian.
pub const MAGIC: u32 = u32::from_le_bytes(*b"TNDM");
/// Version of the frame layout; also the `protocol_version` of the handshakes.
pub const VERSION: u16 = 1;
/// Bytes of a header.
pub const HEADER_LEN: usize = 64;
/// Largest payload of one frame, in bytes. Longer submissions travel as several pieces.
pub const MAX_PAYLOAD: usize = 4 << 20;
/// Largest payload of every kind but [`Kind::Dispatch`] and [`Kind::Combine`], in bytes.
pub const MAX_CONTROL_PAYLOAD: usize = 64 << 10;

/// What a frame says.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Kind {
    /// First frame of the dialling (attention) side: a prost `experts.v1.Hello`.
    Hello = 1,
    /// The expert side's answer: a prost `experts.v1.Hello` about itself.
    Welcome = 2,
    /// Either side: the handshake does not fit; a prost `experts.v1.Refuse`. The link closes after it.
    Refuse = 3,
    /// A step begins: `step_id`, `rows`. No answer.
    BeginStep = 4,
    /// Rows to compute: ids, weights, activations.
    Dispatch = 5,
    /// The shard's additive partial for rows of a dispatch.
    Combine = 6,
    /// The dispatch with this key failed: UTF-8 text, `aux` = [`ErrorCode`].
    Error = 7,
    /// `aux` bulk pieces were taken off the link: the other side may send as many more.
    Credit = 8,
    /// Liveness probe.
    Ping = 9,
    /// Answer to [`Kind::Ping`], same payload.
    Pong = 10,
}

impl Kind {
    const ALL: [Self; 10] = [
        Self::Hello,
        Self::Welcome,
        Self::Refuse,
        Self::BeginStep,
        Self::Dispatch,
        Self::Combine,
        Self::Error,
        Self::Credit,
        Self::Ping,
        Self::Pong,
    ];

    fn from_wire(code: u8) -> Option<Self> {
        Self::ALL.get(usize::from(code).wrapping_sub(1)).copied()
    }

    /// Whether the payload holds activations, so that [`MAX_PAYLOAD`] applies.
    pub fn is_data(self) -> bool {
        matches!(self, Self::Dispatch | Self::Combine)
    }
}

/// Element type of the activations in a payload.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Dtype {
    /// The payload holds no activations.
    #[default]
    None = 0,
    /// f32, 4 bytes.
    F32 = 1,
    /// bf16, 2 bytes, rounded to nearest even.
    Bf16 = 2,
    /// The payload says where in shared memory the activations are.
    Shared = 3,
}

impl Dtype {
    /// Bytes of an element.
    pub fn size(self) -> usize {
        match self {
            Self::None | Self::Shared => 0,
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }

    /// The name that handshakes use: `f32` or `bf16` (empty for [`Dtype::None`]).
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "",
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::Shared => "shared",
        }
    }

    fn from_wire(code: u8) -> Option<Self> {
        [Self::None, Self::F32, Self::Bf16, Self::Shared].get(usize::from(code)).copied()
    }
}

/// Why an expert worker answered with [`Kind::Error`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum ErrorCode {
    /// The engine could not compute the dispatch (its own words in the payload).
    Engine = 1,
    /// The dispatch does not fit the handshake (shard not held, too many rows, wrong length).
    Invalid = 2,
}

impl ErrorCode {
    /// From a header's `aux`; unknown codes of a later version read as [`ErrorCode::Engine`].
    pub fn from_aux(aux: u32) -> Self {
        match aux {
            2 => Self::Invalid,
            _ => Self::Engine,
        }
    }
}

/// The header, decoded. Fields that a kind does not use are zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Header {
    /// What the frame says.
    pub kind: Kind,
    /// Element type of the payload's activations.
    pub dtype: Dtype,
    /// Epoch of the attention worker (both directions): part of the idempotence key.
    pub epoch: u64,
    /// Step, unique within the epoch.
    pub step_id: u64,
    /// Version of the route table that the sender used.
    pub route_version: u32,
    /// Shard.
    pub shard_id: u32,
    /// MoE layer, as the model numbers its layers.
    pub layer: u16,
    /// First row of this piece, counted over all submissions of this (step, layer, shard).
    pub row_offset: u32,
    /// Rows of this piece (of the step, in a `BeginStep`).
    pub rows: u32,
    /// Rows of the whole submission, which the expert side gathers before it computes.
    pub rows_total: u32,
    /// `row_offset` of the submission's first piece.
    pub row_base: u32,
    /// Meaning by kind: credits granted, or an [`ErrorCode`].
    pub aux: u32,
}

/// What identifies a piece: whatever arrives twice under one key is one piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    /// Epoch of the attention worker.
    pub epoch: u64,
    /// Step.
    pub step_id: u64,
    /// Layer.
    pub layer: u16,
    /// Shard.
    pub shard_id: u32,
    /// First row.
    pub row_offset: u32,
}

impl Header {
    /// A header of `kind` with everything else zero.
    pub fn new(kind: Kind) -> Self {
        Self {
            kind,
            dtype: Dtype::None,
            epoch: 0,
            step_id: 0,
            route_version: 0,
            shard_id: 0,
            layer: 0,
            row_offset: 0,
            rows: 0,
            rows_total: 0,
            row_base: 0,
            aux: 0,
        }
    }

    /// The idempotence key.
    pub fn key(&self) -> Key {
        Key { epoch: self.epoch, step_id: self.step_id, layer: self.layer, shard_id: self.shard_id, row_offset: self.row_offset }
    }

    /// The 64 bytes that go before `payload`, checksum included.
    ///
    /// The caller keeps `payload` within the limit of the kind: the receiver refuses longer frames.
    pub fn encode(&self, payload: &[u8]) -> [u8; HEADER_LEN] {
        let mut out = [0u8; HEADER_LEN];
        out[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        out[4..6].copy_from_slice(&VERSION.to_le_bytes());
        out[6] = self.kind as u8;
        out[7] = self.dtype as u8;
        out[8..16].copy_from_slice(&self.epoch.to_le_bytes());
        out[16..24].copy_from_slice(&self.step_id.to_le_bytes());
        out[24..28].copy_from_slice(&self.route_version.to_le_bytes());
        out[28..32].copy_from_slice(&self.shard_id.to_le_bytes());
        out[32..34].copy_from_slice(&self.layer.to_le_bytes());
        // 34..36 reserved, zero
        out[36..40].copy_from_slice(&self.row_offset.to_le_bytes());
        out[40..44].copy_from_slice(&self.rows.to_le_bytes());
        out[44..48].copy_from_slice(&self.rows_total.to_le_bytes());
        out[48..52].copy_from_slice(&self.row_base.to_le_bytes());
        out[52..56].copy_from_slice(&self.aux.to_le_bytes());
        out[56..60].copy_from_slice(&(payload.len() as u32).to_le_bytes());
        let crc = crc32c::crc32c_append(crc32c::crc32c(&out[..60]), payload);
        out[60..64].copy_from_slice(&crc.to_le_bytes());
        out
    }
}

/// A header read from the wire, before its payload is: its length is within limits, its checksum still to be compared.
#[derive(Clone, Copy, Debug)]
pub struct RawHeader {
    header: Header,
    length: usize,
    prefix_crc: u32,
    crc: u32,
}

impl RawHeader {
    /// Reads the first 64 bytes of `bytes`. Nothing is allocated and the payload is not touched.
    ///
    /// # Errors
    /// [`FrameError`] naming the field that is wrong.
    pub fn decode(bytes: &[u8]) -> Result<Self, FrameError> {
        let Some(b) = bytes.first_chunk::<HEADER_LEN>() else {
            return Err(FrameError::Truncated { what: "header", needed: HEADER_LEN, got: bytes.len() });
        };
        let u16_at = |i: usize| u16::from_le_bytes([b[i], b[i + 1]]);
        let u32_at = |i: usize| u32::from_le_bytes([b[i], b[i + 1], b[i + 2], b[i + 3]]);
        let u64_at = |i: usize| u64::from(u32_at(i)) | u64::from(u32_at(i + 4)) << 32;
        if u32_at(0) != MAGIC {
            return Err(FrameError::Magic { got: u32_at(0) });
        }
        if u16_at(4) != VERSION {
            return Err(FrameError::Version { got: u16_at(4) });
        }
        let kind = Kind::from_wire(b[6]).ok_or(FrameError::Kind { got: b[6] })?;
        let dtype = Dtype::from_wire(b[7]).ok_or(FrameError::Dtype { got: b[7] })?;
        if u16_at(34) != 0 {
            return Err(FrameError::Reserved { got: u16_at(34) });
        }
        let header = Header {
            kind,
            dtype,
            epoch: u64_at(8),
            step_id: u64_at(16),
            route_version: u32_at(24),
            shard_id: u32_at(28),
            layer: u16_at(32),
            row_offset: u32_at(36),
            rows: u32_at(40),
            rows_total: u32_at(44),
            row_base: u32_at(48),
            aux: u32_at(52),
        };
        let length = u32_at(56) as usize;
        check_length(kind, length)?;
        if kind.is_data() {
            header.check_rows()?;
        }
        Ok(Self { header, length, prefix_crc: crc32c::crc32c(&b[..60]), crc: u32_at(60) })
    }

    /// Bytes of payload that follow, at most [`MAX_PAYLOAD`].
    pub fn payload_len(&self) -> usize {
        self.length
    }

    /// Joins the header with its payload.
    ///
    /// # Errors
    /// [`FrameError::Truncated`] when the payload's length is not the one announced, [`FrameError::Checksum`].
    pub fn with_payload(self, payload: Bytes) -> Result<Frame, FrameError> {
        if payload.len() != self.length {
            return Err(FrameError::Truncated { what: "payload", needed: self.length, got: payload.len() });
        }
        let crc = crc32c::crc32c_append(self.prefix_crc, &payload);
        if crc != self.crc {
            return Err(FrameError::Checksum { needed: self.crc, got: crc });
        }
        Ok(Frame { header: self.header, payload })
    }
}

impl Header {
    /// Rows of a piece lie inside the submission: what the gathering code relies on.
    fn check_rows(&self) -> Result<(), FrameError> {
        let start = u64::from(self.row_offset).checked_sub(u64::from(self.row_base));
        let fits = start.is_some_and(|start| start + u64::from(self.rows) <= u64::from(self.rows_total));
        let in_range = u64::from(self.row_base) + u64::from(self.rows_total) <= u64::from(u32::MAX);
        if self.rows == 0 || !fits || !in_range {
            return Err(FrameError::Rows {
                row_offset: self.row_offset,
                rows: self.rows,
                row_base: self.row_base,
                rows_total: self.rows_total,
            });
        }
        Ok(())
    }
}

/// Refuses a payload longer than the kind's limit.
fn check_length(kind: Kind, length: usize) -> Result<(), FrameError> {
    let limit = if kind.is_data() { MAX_PAYLOAD } else { MAX_CONTROL_PAYLOAD };
    if length > limit { Err(FrameError::TooLong { kind, limit, got: length }) } else { Ok(()) }
}

/// A header and its payload. In-process links pass it as it is; the others encode it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frame {
    /// The header.
    pub header: Header,
    /// The payload; its layout depends on the kind ([`crate::payload`]).
    pub payload: Bytes,
}

impl Frame {
    /// A frame without a payload.
    pub fn bare(header: Header) -> Self {
        Self { header, payload: Bytes::new() }
    }

    /// Bytes on the wire.
    pub fn wire_len(&self) -> usize {
        HEADER_LEN + self.payload.len()
    }

    /// Reads one frame from exactly `bytes`.
    ///
    /// # Errors
    /// [`FrameError`] naming what is wrong.
    pub fn decode(bytes: &Bytes) -> Result<Self, FrameError> {
        let raw = RawHeader::decode(bytes)?;
        raw.with_payload(bytes.slice(HEADER_LEN..))
    }

    /// What a receiver would refuse: a payload over the kind's limit, rows outside the submission. Senders and links without an
    /// encoding call it, so that a mistake is named where it is made.
    ///
    /// # Errors
    /// [`FrameError::TooLong`], [`FrameError::Rows`].
    pub fn validate(&self) -> Result<(), FrameError> {
        check_length(self.header.kind, self.payload.len())?;
        if self.header.kind.is_data() { self.header.check_rows() } else { Ok(()) }
    }
}

/// Bytes that are not a frame.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// Fewer bytes than announced.
    #[error("frame {what} is {got} bytes long; needed {needed}")]
    Truncated {
        /// `header` or `payload`.
        what: &'static str,
        /// Bytes needed.
        needed: usize,
        /// Bytes there.
        got: usize,
    },
    /// Not a Tandem frame at all.
    #[error("frame magic is {got:#010x}; needed {MAGIC:#010x}: the peer does not speak tandem experts.v1")]
    Magic {
        /// What was there.
        got: u32,
    },
    /// Another version of the layout.
    #[error("frame version is {got}; needed {VERSION}: run the same tandem version on both sides")]
    Version {
        /// The peer's version.
        got: u16,
    },
    /// Unknown kind.
    #[error("frame kind is {got}; needed 1..=10")]
    Kind {
        /// What was there.
        got: u8,
    },
    /// Unknown element type.
    #[error("frame dtype is {got}; needed 0 (none), 1 (f32), 2 (bf16) or 3 (shared)")]
    Dtype {
        /// What was there.
        got: u8,
    },
    /// A reserved field is set.
    #[error("frame reserved field is {got}; needed 0")]
    Reserved {
        /// What was there.
        got: u16,
    },
    /// A piece that lies outside its submission.
    #[error("frame rows {row_offset}+{rows} lie outside the submission's rows {row_base}+{rows_total}")]
    Rows {
        /// First row.
        row_offset: u32,
        /// Rows.
        rows: u32,
        /// First row of the submission.
        row_base: u32,
        /// Rows of the submission.
        rows_total: u32,
    },
    /// A payload over the limit.
    #[error("{kind:?} frame payload is {got} bytes long; at most {limit} allowed")]
    TooLong {
        /// Kind.
        kind: Kind,
        /// Limit in bytes.
        limit: usize,
        /// Announced length.
        got: usize,
    },
    /// Damaged on the way.
    #[error("frame checksum is {got:#010x}; the header says {needed:#010x}: the frame was damaged on the way")]
    Checksum {
        /// What the header says.
        needed: u32,
        /// What the bytes give.
        got: u32,
    },
}

#[cfg(test)]
mod tests;
