use bytes::{Bytes, BytesMut};
use proptest::prelude::*;

use super::*;

fn wire(frame: &Frame) -> Bytes {
    let mut out = BytesMut::new();
    out.extend_from_slice(&frame.header.encode(&frame.payload));
    out.extend_from_slice(&frame.payload);
    out.freeze()
}

fn any_frame() -> impl Strategy<Value = Frame> {
    let kind = proptest::sample::select(Kind::ALL.to_vec());
    let dtype = proptest::sample::select(vec![Dtype::None, Dtype::F32, Dtype::Bf16]);
    let rows = (1u32..5000, 0u32..5000, 0u32..5000, any::<u16>());
    let payload = proptest::collection::vec(any::<u8>(), 0..600);
    (kind, dtype, any::<[u64; 2]>(), any::<[u32; 3]>(), any::<u16>(), rows, payload).prop_map(
        |(kind, dtype, [epoch, step_id], [route_version, shard_id, aux], layer, (rows, before, after, base), payload)| Frame {
            header: Header {
                kind,
                dtype,
                epoch,
                step_id,
                route_version,
                shard_id,
                layer,
                row_offset: u32::from(base) + before,
                rows,
                rows_total: before + rows + after,
                row_base: u32::from(base),
                aux,
            },
            payload: payload.into(),
        },
    )
}

proptest! {
    #[test]
    fn round_trip(frame in any_frame()) {
        prop_assert_eq!(Frame::decode(&wire(&frame)), Ok(frame));
    }

    #[test]
    fn a_flipped_bit_is_an_error(frame in any_frame(), at in any::<prop::sample::Index>(), bit in 0u8..8) {
        let mut bytes = wire(&frame).to_vec();
        let at = at.index(bytes.len());
        bytes[at] ^= 1 << bit;
        prop_assert!(Frame::decode(&bytes.into()).is_err());
    }

    #[test]
    fn a_truncated_frame_is_an_error(frame in any_frame(), at in any::<prop::sample::Index>()) {
        let bytes = wire(&frame);
        let cut = bytes.slice(..at.index(bytes.len()));
        prop_assert!(
            matches!(Frame::decode(&cut), Err(FrameError::Truncated { .. })),
            "{:?}", Frame::decode(&cut)
        );
    }

    #[test]
    fn a_frame_with_bytes_behind_it_is_an_error(frame in any_frame(), tail in prop::collection::vec(any::<u8>(), 1..9)) {
        let mut bytes = wire(&frame).to_vec();
        bytes.extend(tail);
        let refused = matches!(Frame::decode(&bytes.into()), Err(FrameError::Truncated { .. }));
        prop_assert!(refused);
    }

    #[test]
    fn random_bytes_are_an_error(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        prop_assert!(Frame::decode(&bytes.into()).is_err());
    }

    #[test]
    fn random_bytes_behind_good_magic_never_announce_more_than_the_limit(tail in any::<[u8; 58]>()) {
        let mut bytes = [0u8; HEADER_LEN];
        bytes[..4].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[4..6].copy_from_slice(&VERSION.to_le_bytes());
        bytes[6..].copy_from_slice(&tail);
        bytes[6] = 5 + bytes[6] % 2;
        bytes[7] %= 3;
        bytes[34..36].fill(0);
        if let Ok(raw) = RawHeader::decode(&bytes) {
            prop_assert!(raw.payload_len() <= MAX_PAYLOAD);
        }
    }
}

#[test]
fn errors_name_the_field_and_both_values() {
    let good = Frame { header: Header::new(Kind::Ping), payload: Bytes::from_static(b"x") };
    let case = |at: usize, value: &[u8]| {
        let mut bytes = wire(&good).to_vec();
        bytes[at..at + value.len()].copy_from_slice(value);
        Frame::decode(&bytes.into()).unwrap_err().to_string()
    };
    assert!(case(0, b"HTTP").contains("frame magic is 0x50545448"), "{}", case(0, b"HTTP"));
    assert!(case(4, &[9, 0]).contains("frame version is 9; needed 1"));
    assert!(case(6, &[0]).contains("frame kind is 0"));
    assert!(case(6, &[11]).contains("frame kind is 11"));
    assert!(case(7, &[4]).contains("frame dtype is 4"));
    assert!(case(34, &[1]).contains("frame reserved field is 1"));
    assert!(case(56, &u32::MAX.to_le_bytes()).contains("Ping frame payload is 4294967295 bytes long; at most 65536"));
    assert!(case(64, b"y").contains("checksum"));
}

#[test]
fn rows_outside_the_submission_are_refused() {
    let mut header = Header::new(Kind::Dispatch);
    header.rows_total = 8;
    for (base, offset, rows, ok) in
        [(0, 0, 8, true), (4, 4, 8, true), (0, 7, 1, true), (0, 0, 0, false), (0, 7, 2, false), (4, 3, 1, false)]
    {
        (header.row_base, header.row_offset, header.rows) = (base, offset, rows);
        let frame = Frame::bare(header);
        assert_eq!(frame.validate().is_ok(), ok, "{header:?}");
        assert_eq!(Frame::decode(&wire(&frame)).is_ok(), ok, "{header:?}");
    }
    (header.row_base, header.row_offset, header.rows_total, header.rows) = (u32::MAX - 1, u32::MAX - 1, 8, 1);
    assert!(Frame::bare(header).validate().is_err());
}

#[test]
fn the_layout_is_fixed() {
    let header = Header {
        kind: Kind::Dispatch,
        dtype: Dtype::Bf16,
        epoch: 0x0102_0304_0506_0708,
        step_id: 9,
        route_version: 10,
        shard_id: 11,
        layer: 12,
        row_offset: 14,
        rows: 15,
        rows_total: 16,
        row_base: 13,
        aux: 17,
    };
    let bytes = header.encode(b"abc");
    assert_eq!(&bytes[..8], b"TNDM\x01\x00\x05\x02");
    assert_eq!(&bytes[8..16], &[8, 7, 6, 5, 4, 3, 2, 1]);
    let words: Vec<u32> = bytes[16..60].chunks(4).map(|c| u32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect();
    assert_eq!(words, [9, 0, 10, 11, 12, 14, 15, 16, 13, 17, 3]);
}
