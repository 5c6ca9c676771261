use proptest::prelude::*;

use super::*;
use crate::payload::Precision;

const SHAPE: RowShape = RowShape { hidden: 3, topk: 2, precision: Precision::F32 };

fn gather() -> Gather {
    Gather::new(GatherLimits { shape: SHAPE, shards: vec![0, 1], max_rows: 1000 })
}

/// A piece whose activations are its row numbers.
fn piece(step_id: u64, layer: u16, shard_id: u32, offset: u32, rows: u32, total: u32) -> (Header, Bytes) {
    let header = Header {
        dtype: SHAPE.precision.dtype(),
        epoch: 7,
        step_id,
        layer,
        shard_id,
        row_offset: offset,
        rows,
        rows_total: total,
        ..Header::new(Kind::Dispatch)
    };
    let row_values = |n: usize| (offset..offset + rows).flat_map(|row| vec![row; n]).collect::<Vec<_>>();
    let ids: Vec<i32> = row_values(2).iter().map(|v| *v as i32).collect();
    let floats = |n| row_values(n).iter().map(|v| *v as f32).collect::<Vec<_>>();
    (header, dispatch_payload(&SHAPE, &ids, &floats(2), &floats(3)))
}

fn accept(gather: &mut Gather, conn: ConnId, piece: &(Header, Bytes)) -> Result<Accepted, String> {
    gather.accept(conn, &piece.0, &piece.1, Instant::now())
}

proptest! {
    /// Whatever the cut, the order and the repetitions: one batch, with every row in its place, and one answer per piece.
    #[test]
    fn pieces_gather_in_any_order(
        cuts in prop::collection::vec(1u32..9, 1..12),
        order in prop::collection::vec(any::<prop::sample::Index>(), 0..40),
    ) {
        let total: u32 = cuts.iter().sum();
        let mut offset = 0;
        let pieces: Vec<_> = cuts.iter().map(|rows| {
            offset += rows;
            piece(1, 5, 0, offset - rows, *rows, total)
        }).collect();
        let mut gather = gather();
        let mut seen = HashSet::new();
        let sequence = order.iter().map(|i| i.index(pieces.len())).chain((0..pieces.len()).rev());
        let mut ready = 0;
        for at in sequence {
            let accepted = accept(&mut gather, 1, &pieces[at]).unwrap();
            let expected = match (seen.insert(at), seen.len() == pieces.len()) {
                (false, _) => Accepted::Duplicate,
                (true, false) => Accepted::Gathered,
                (true, true) => Accepted::Ready,
            };
            ready += usize::from(expected == Accepted::Ready);
            prop_assert_eq!(accepted, expected);
        }
        prop_assert_eq!(ready, 1);
        let mut batch = gather.take_batch().unwrap();
        prop_assert!(!gather.has_work());
        let group = batch.groups.pop().unwrap();
        let rows: Vec<f32> = (0..total).flat_map(|row| [row as f32; 3]).collect();
        prop_assert_eq!(group.dispatch().x, &rows);
        prop_assert_eq!(group.dispatch().rows, total as usize);
        prop_assert!(group.dispatch().ids.chunks(2).enumerate().all(|(row, ids)| ids == [row as i32; 2]));
        let frames = gather.answer(group, Ok(rows.into()), ExpertTimings::default());
        let keys: Vec<_> = frames.iter().map(|f| (f.header.key(), f.header.rows)).collect();
        let asked: Vec<_> = pieces.iter().map(|p| (p.0.key(), p.0.rows)).collect();
        prop_assert_eq!(keys, asked);
        prop_assert!(frames.iter().all(|f| f.validate().is_ok()));
    }
}

#[test]
fn an_answered_piece_is_replayed_not_computed() {
    let mut gather = gather();
    let sent = piece(1, 5, 0, 0, 2, 2);
    assert_eq!(accept(&mut gather, 1, &sent), Ok(Accepted::Ready));
    let group = gather.take_batch().unwrap().groups.pop().unwrap();
    let frames = gather.answer(group, Ok(vec![1.5; 6].into()), ExpertTimings::default());
    assert_eq!(accept(&mut gather, 2, &sent), Ok(Accepted::Replay(frames[0].clone())));
    assert!(!gather.has_work());
    // The attention worker moves on: the answer is forgotten.
    assert_eq!(accept(&mut gather, 2, &piece(1, 6, 0, 0, 1, 1)), Ok(Accepted::Ready));
    let group = gather.take_batch().unwrap().groups.pop().unwrap();
    gather.answer(group, Ok(vec![0.0; 3].into()), ExpertTimings::default());
    assert_eq!(accept(&mut gather, 2, &sent), Ok(Accepted::Ready));
}

/// A piece whose rows are in shared memory from row `row` on.
fn shared_piece(row: u64, rows: u32) -> (Header, Bytes) {
    let (header, _) = piece(1, 5, 0, 0, rows, rows);
    let mut payload = bytes::BytesMut::new();
    SHAPE.put_shared_dispatch(&mut payload, row, &vec![3; rows as usize * 2], &vec![0.5; rows as usize * 2]);
    (Header { dtype: Dtype::Shared, ..header }, payload.freeze())
}

#[test]
fn rows_in_shared_memory_are_those_of_the_link_that_asks_last() {
    let mut gather = gather();
    let refused = |gather: &mut Gather, piece: &_| accept(gather, 1, piece).unwrap_err();
    assert!(refused(&mut gather, &shared_piece(0, 2)).contains("none is lent"));
    let lease = |window| Lease { window, region: window + 1, rows: 10 };
    gather.lend(1, lease(100));
    assert!(refused(&mut gather, &shared_piece(9, 2)).contains("within 10 rows"));
    assert!(refused(&mut gather, &shared_piece(u64::MAX, 2)).contains("within 10 rows"));
    let half = (Header { rows_total: 4, ..shared_piece(0, 2).0 }, shared_piece(0, 2).1);
    assert!(refused(&mut gather, &half).contains("one piece"));
    assert_eq!(accept(&mut gather, 1, &shared_piece(8, 2)), Ok(Accepted::Ready));
    assert_eq!(accept(&mut gather, 1, &shared_piece(8, 2)), Ok(Accepted::Duplicate));
    // The same rows over a new link, before the end of the old one is noticed: nothing of the old lease is used any more.
    gather.lend(2, lease(200));
    assert_eq!(accept(&mut gather, 2, &shared_piece(8, 2)), Ok(Accepted::Ready));
    gather.disconnect(1);
    let group = gather.take_batch().unwrap().groups.pop().unwrap();
    assert_eq!(group.dispatch().shared, Some(SharedRows { lease: lease(200), row: 8 }));
    assert!(group.dispatch().x.is_empty() && group.dispatch().ids == [3; 4]);
    let frames = gather.answer(group, Ok(Partial::Shared { non_finite: vec![1] }), ExpertTimings::default());
    assert_eq!((frames.len(), frames[0].header.dtype), (1, Dtype::Shared));
    // Not replayed: its place may hold another layer's rows by now. And a link without a lease gets the rows by frame.
    assert_eq!(accept(&mut gather, 2, &shared_piece(8, 2)), Ok(Accepted::Ready));
    assert_eq!(accept(&mut gather, 3, &piece(1, 5, 0, 0, 2, 2)), Ok(Accepted::Ready));
    assert_eq!(gather.take_batch().unwrap().groups.pop().unwrap().dispatch().shared, None);
    assert!(!gather.has_work());
}

/// A submission in shared memory that was given up must not be computed after a later one was answered in the same rows.
#[test]
fn what_was_given_up_is_not_written_into_rows_of_a_later_layer() {
    let mut gather = gather();
    gather.lend(1, Lease { window: 1, region: 2, rows: 400 });
    gather.lend(2, Lease { window: 3, region: 4, rows: 400 });
    let (bulk, small) = (shared_piece(0, 300), shared_piece(0, 2));
    let at = |step_id, layer, piece: &(Header, Bytes)| (Header { step_id, layer, ..piece.0 }, piece.1.clone());
    assert_eq!(accept(&mut gather, 1, &at(1, 5, &bulk)), Ok(Accepted::Ready));
    assert_eq!(accept(&mut gather, 2, &at(1, 5, &(Header { epoch: 8, ..bulk.0 }, bulk.1.clone()))), Ok(Accepted::Ready));
    // A later step overtakes; then a later layer of it. The other link's rows are its own business.
    assert_eq!(accept(&mut gather, 1, &at(2, 3, &small)), Ok(Accepted::Ready));
    // Rows behind them, of the step's other micro-batch, are a layer behind: they stay.
    let other = shared_piece(2, 3);
    let other = (Header { row_base: 2, row_offset: 2, ..other.0 }, other.1);
    assert_eq!(accept(&mut gather, 1, &at(2, 3, &other)), Ok(Accepted::Ready));
    assert_eq!(accept(&mut gather, 1, &at(2, 4, &small)), Ok(Accepted::Ready));
    let mut left: Vec<(u64, u64, u16)> = std::iter::from_fn(|| gather.take_batch())
        .flat_map(|batch| batch.groups)
        .map(|group| (group.key.epoch, group.key.step_id, group.key.layer))
        .collect();
    left.sort_unstable();
    assert_eq!(left, [(7, 2, 3), (7, 2, 4), (8, 1, 5)]);
}

#[test]
fn a_failure_is_answered_and_computed_again() {
    let mut gather = gather();
    let sent = piece(1, 5, 0, 0, 2, 2);
    for result in [Err("no memory".to_owned()), Ok(vec![0.0; 5])] {
        assert_eq!(accept(&mut gather, 1, &sent), Ok(Accepted::Ready));
        let group = gather.take_batch().unwrap().groups.pop().unwrap();
        let frames = gather.answer(group, result.map(Partial::from), ExpertTimings::default());
        assert_eq!((frames.len(), frames[0].header.kind, frames[0].header.key()), (1, Kind::Error, sent.0.key()));
    }
}

#[test]
fn a_layer_joins_across_connections_and_shards() {
    let mut gather = gather();
    let mut other_epoch = piece(9, 5, 0, 0, 3, 3);
    other_epoch.0.epoch = 8;
    for (conn, piece) in [(1, piece(1, 5, 0, 0, 1, 1)), (2, other_epoch), (1, piece(1, 6, 0, 0, 1, 1)), (1, piece(1, 5, 1, 0, 1, 1))] {
        assert_eq!(accept(&mut gather, conn, &piece), Ok(Accepted::Ready));
    }
    let batch = gather.take_batch().unwrap();
    let owners: Vec<_> = batch.groups.iter().map(|g| (g.owner, g.key.shard_id, g.rows)).collect();
    assert_eq!((batch.layer, owners), (5, vec![(1, 0, 1), (2, 0, 3), (1, 1, 1)]));
    assert_eq!(gather.take_batch().unwrap().layer, 6);
    assert!(gather.take_batch().is_none());
}

#[test]
fn decode_goes_first_and_prefill_is_not_starved() {
    let mut gather = gather();
    let bulk = LATENCY_ROWS + 1;
    assert_eq!(accept(&mut gather, 1, &piece(1, 5, 0, 0, bulk, bulk)), Ok(Accepted::Ready));
    let mut order = Vec::new();
    for step in 2..9 {
        accept(&mut gather, 2, &piece(step, 5, 0, 0, 1, 1)).unwrap();
        order.push(gather.take_batch().unwrap().groups[0].rows);
    }
    assert_eq!(order, [1, 1, 1, 1, bulk as usize, 1, 1]);
}

#[test]
fn a_joined_batch_stays_within_the_row_limit() {
    let mut gather = gather();
    for (conn, step) in [(1, 1), (2, 2), (3, 3)] {
        accept(&mut gather, conn, &piece(step, 5, 0, 0, 500, 500)).unwrap();
    }
    assert_eq!(gather.take_batch().unwrap().groups.len(), 2);
    assert_eq!(gather.take_batch().unwrap().groups.len(), 1);
}

#[test]
fn what_does_not_fit_is_named() {
    let mut gather = gather();
    let mut refused = |change: fn(&mut (Header, Bytes))| {
        let mut bad = piece(1, 5, 0, 0, 2, 4);
        change(&mut bad);
        accept(&mut gather, 1, &bad).unwrap_err()
    };
    assert_eq!(refused(|p| p.0.shard_id = 9), "shard is 9; this worker holds [0, 1]");
    assert_eq!(refused(|p| p.0.rows_total = 1001), "a submission of 1001 rows; at most 1000");
    assert!(refused(|p| p.1 = p.1.slice(1..)).contains("dispatch payload is 55 bytes long; 2 rows need 56"));
    assert!(refused(|p| p.0.dtype = Dtype::Bf16).contains("holds Bf16; needed F32"));
    accept(&mut gather, 1, &piece(1, 5, 0, 0, 2, 4)).unwrap();
    assert!(accept(&mut gather, 1, &piece(1, 5, 0, 2, 2, 5)).unwrap_err().contains("rows_total is 5; an earlier piece"));
    assert!(accept(&mut gather, 1, &piece(1, 5, 0, 1, 2, 4)).unwrap_err().contains("overlap"));
    assert!(accept(&mut gather, 1, &piece(1, 5, 0, 0, 3, 4)).unwrap_err().contains("overlap"));
    for step in 2..10 {
        accept(&mut gather, 1, &piece(step, 5, 0, 0, 1, 999)).unwrap();
    }
    assert!(accept(&mut gather, 1, &piece(11, 5, 0, 0, 1, 999)).unwrap_err().contains("rows are open on this link already"));
    assert!(accept(&mut gather, 2, &piece(11, 5, 0, 0, 1, 999)).is_ok());
}

#[test]
fn what_nobody_waits_for_is_dropped() {
    let mut gather = gather();
    accept(&mut gather, 1, &piece(1, 5, 0, 0, 1, 1)).unwrap();
    accept(&mut gather, 2, &piece(1, 5, 1, 0, 1, 2)).unwrap();
    gather.disconnect(1);
    assert!(!gather.has_work());
    // The successor of a connection takes over what it repeats.
    assert_eq!(accept(&mut gather, 3, &piece(1, 5, 1, 0, 1, 2)), Ok(Accepted::Duplicate));
    gather.disconnect(2);
    assert_eq!(accept(&mut gather, 3, &piece(1, 5, 1, 1, 1, 2)), Ok(Accepted::Ready));
    gather.begin_step(7, OPEN_STEPS);
    assert!(gather.has_work());
    gather.begin_step(7, 1 + OPEN_STEPS);
    assert!(!gather.has_work());
}
