//! The four kinds of sequence state together: fork, snapshot and restore go on bit for bit like the sequence they came from.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on says so")]

mod common;

use std::sync::Arc;

use common::{Gold, cpu, reference};
use tandem_kernels::Backend;
use tandem_model::synthetic::Preset;
use tandem_worker_attn::{
    Model, Runner,
    hop::LocalOnly,
    observe::Silent,
    state::{SeqState, StateError},
};

/// Two steps of four and one row.
fn go_on<B: Backend>(runner: &mut Runner<B, LocalOnly>, state: &mut SeqState, salt: u32) -> Vec<u32> {
    let tokens = [3, 1, 4, 1].map(|t| t + salt);
    let mut logits = runner.forward(state, &tokens, 4, &mut Silent).unwrap();
    logits.extend(runner.forward(state, &[5 + salt], 1, &mut Silent).unwrap());
    logits.into_iter().map(f32::to_bits).collect()
}

fn copies_go_on_alike<B: Backend>(model: &Arc<Model<B>>) {
    let ids = Gold::open("tiny-b.safetensors").ids("p200.input_ids");
    // In the middle of a pool, at the end of one, at the end of a page (63 tokens), in the second page, past the selection's width.
    for n in [1, 3, 5, 63, 64, 65, 128] {
        let mut runner = common::runner(model);
        let mut parent = runner.pool().create().unwrap();
        runner.forward(&mut parent, &ids[..n], 64, &mut Silent).unwrap();
        let snapshot = runner.pool().snapshot(&parent).unwrap();
        let mut fork = runner.pool().fork(&parent).unwrap();
        let mut second = runner.pool().fork(&fork).unwrap();
        // Each writes into its own copy of the last page; other tokens first, to see that nothing leaks.
        go_on(&mut runner, &mut second, 100);
        let expected = go_on(&mut runner, &mut parent, 0);
        assert_eq!(go_on(&mut runner, &mut fork, 0), expected, "fork at {n}");
        runner.pool().free(parent);
        runner.pool().free(second);
        let mut restored = runner.pool().restore(&snapshot).unwrap();
        assert_eq!(restored.tokens(), n);
        assert_eq!(go_on(&mut runner, &mut restored, 0), expected, "snapshot at {n}");
        runner.pool().free(restored);
        runner.pool().free(fork);
        assert_eq!(runner.pool().used_tokens(), 0, "shared pages are free once their last owner is gone");
    }
}

#[test]
fn t36_cpu_copies() {
    copies_go_on_alike(&common::model(cpu(), &common::preset(Preset::TinyB)));
    copies_go_on_alike(&common::model(cpu(), &common::preset(Preset::Tiny)));
}

#[test]
fn t36_reference_copies() {
    copies_go_on_alike(&common::model(reference(), &common::preset(Preset::TinyB)));
}

#[test]
fn full_pages_are_shared_and_nothing_is_taken_when_it_does_not_fit() {
    let model = common::model(cpu(), &common::preset(Preset::TinyB));
    let limits = tandem_worker_attn::RunnerLimits { kv_tokens: 63 * 4, max_batch: 3, ..common::limits() };
    let mut runner = Runner::local(Arc::clone(&model), limits).unwrap();
    let mut parent = runner.pool().create().unwrap();
    let ids = Gold::open("tiny-b.safetensors").ids("p200.input_ids");
    runner.forward(&mut parent, &ids[..130], 64, &mut Silent).unwrap();
    let pool = runner.pool();
    let fork = pool.fork(&parent).unwrap();
    assert_eq!((fork.pages()[..2] == parent.pages()[..2], fork.pages()[2] == parent.pages()[2], pool.free_pages()), (true, false, 0));
    assert!(matches!(pool.fork(&parent), Err(StateError::NoPages { needed: 1, free: 0, .. })));
    assert_eq!(pool.free_slots(), 1, "a fork that failed holds nothing");
    let mut fresh = pool.create().unwrap();
    assert!(pool.grow(&mut fresh, 1).is_err());
    assert!(matches!(pool.create(), Err(StateError::NoSlot { slots: 3 })));
    let snapshot = pool.snapshot(&parent).unwrap();
    assert!(matches!(pool.restore(&snapshot), Err(StateError::NoPages { .. })));
}
