//! What is computed arrives, bit for bit.

use super::stage::{HIDDEN, Rows, Stage, TOPK, ask, round, soon};
use crate::hop::HopError;
use crate::payload::Precision;

pub(super) fn f32_is_bit_exact_over_shards_layers_and_pieces(stage: &Stage) {
    let (_a, holds_0_and_2) = stage.plain("experts-0", 1, &[0, 2]);
    let (_b, holds_1) = stage.plain("experts-1", 2, &[1]);
    stage.route(&[(0, &[&holds_0_and_2]), (1, &[&holds_1]), (2, &[&holds_0_and_2])]);
    let mut hop = stage.hop(stage.hop_options());
    for (step, rows) in [(1, 1), (2, 5), (3, 64), (4, 65), (5, 700), (6, 2)] {
        hop.begin_step(step, rows);
        for layer in [3, 4, 44] {
            let rows = Rows::new(rows as usize, u32::from(layer) + step as u32);
            let tickets = [0, 1, 2].map(|shard| hop.submit(layer, shard, &rows.x, &rows.ids, &rows.weights, soon()).unwrap());
            for (shard, ticket) in (0..).zip(tickets) {
                let mut out = vec![f32::NAN; rows.x.len()];
                hop.collect(ticket, &mut out).unwrap();
                assert!(out == rows.partial(layer, shard), "step {step} layer {layer} shard {shard}");
            }
        }
    }
    assert_eq!(hop.shards_reachable(), [0, 1, 2]);
}

pub(super) fn bf16_rounds_rows_and_partials(stage: &Stage) {
    let options = super::super::ServerOptions { precision: Precision::Bf16, ..stage.server_options("experts-0", 1, &[0]) };
    let (_server, holder) = stage.worker(options, super::stage::Fake::new(&stage.log));
    stage.route(&[(0, &[&holder])]);
    let mut hop = stage.hop(super::super::HopOptions { precision: Precision::Bf16, ..stage.hop_options() });
    hop.begin_step(1, 200);
    for count in [1, 200] {
        let rows = Rows::new(count, 3);
        let expected: Vec<f32> = rows.rounded().partial(5, 0).into_iter().map(round).collect();
        assert!(ask(&mut hop, 5, 0, &rows).unwrap() == expected);
    }
}

pub(super) fn phases_add_up(stage: &Stage) {
    let (_server, holder) = stage.plain("experts-0", 1, &[0]);
    stage.route(&[(0, &[&holder])]);
    let mut hop = stage.hop(stage.hop_options());
    hop.begin_step(1, 300);
    for (layer, rows) in [(3, 1), (4, 300)] {
        ask(&mut hop, layer, 0, &Rows::new(rows, 1)).unwrap();
        let t = hop.timings();
        assert_eq!(t.send + t.queue + t.compute + t.ret, t.total);
        assert!(t.total > t.compute && !t.compute.is_zero(), "{t:?}");
    }
}

pub(super) fn shapes_that_do_not_fit_are_named(stage: &Stage) {
    let mut hop = stage.hop(stage.hop_options());
    hop.begin_step(1, 2);
    let rows = Rows::new(2, 1);
    let mut submit = |x: &[f32], ids: &[i32], weights: &[f32]| hop.submit(3, 0, x, ids, weights, soon()).unwrap_err().to_string();
    assert_eq!(submit(&rows.x[1..], &rows.ids[TOPK..], &rows.weights), format!("x has {} elements; needed {HIDDEN}", 2 * HIDDEN - 1));
    assert_eq!(submit(&rows.x, &rows.ids[1..], &rows.weights), "ids has 5 elements; needed 6");
    assert_eq!(submit(&rows.x, &rows.ids, &rows.weights[1..]), "weights has 5 elements; needed 6");
    assert_eq!(submit(&[], &[], &[]), "layer 3: 0 rows in one submission; needed 1..=4096");
    let many = Rows::new(4097, 1);
    assert_eq!(submit(&many.x, &many.ids, &many.weights), "layer 3: 4097 rows in one submission; needed 1..=4096");

    let (_server, holder) = stage.plain("experts-0", 1, &[0]);
    stage.route(&[(0, &[&holder])]);
    let ticket = hop.submit(3, 0, &rows.x, &rows.ids, &rows.weights, soon()).unwrap();
    let short = hop.collect(ticket, &mut [0.0; HIDDEN]).unwrap_err();
    assert!(matches!(short, HopError::Shape { what: "out", .. }), "{short}");
    let old = hop.submit(3, 0, &rows.x, &rows.ids, &rows.weights, soon()).unwrap();
    hop.begin_step(2, 2);
    let stale = hop.collect(old, &mut [0.0; 2 * HIDDEN]).unwrap_err();
    assert_eq!(stale.to_string(), "the ticket for layer 3, shard 0 is of another step or was collected already");
}
