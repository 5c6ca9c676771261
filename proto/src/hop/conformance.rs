//! The Hop suite: what holds between a [`HostHop`](super::HostHop) and [`ExpertServer`](super::ExpertServer)s over every link.
//! `conformance/stage.rs` sets the stage, the scenarios are in `faults.rs`, `exact.rs` and `joined.rs`.

mod exact;
mod faults;
mod joined;
mod shared;
mod stage;

macro_rules! over_every_link {
    ($($module:ident::$scenario:ident),* $(,)?) => {
        mod inproc { $(#[test] fn $scenario() { super::$module::$scenario(&super::stage::Stage::new(crate::link::LinkKind::Inproc)); })* }
        mod tcp { $(#[test] fn $scenario() { super::$module::$scenario(&super::stage::Stage::new(crate::link::LinkKind::Tcp)); })* }
        mod grpc { $(#[test] fn $scenario() { super::$module::$scenario(&super::stage::Stage::new(crate::link::LinkKind::Grpc)); })* }
    };
}

over_every_link! {
    exact::f32_is_bit_exact_over_shards_layers_and_pieces,
    exact::bf16_rounds_rows_and_partials,
    exact::phases_add_up,
    exact::shapes_that_do_not_fit_are_named,
    joined::two_attention_workers_share_a_batch,
    joined::decode_overtakes_prefill,
    joined::a_dispatch_that_arrives_twice_is_computed_once,
    joined::stale_answers_are_not_taken,
    faults::a_worker_killed_mid_collect_comes_back_elsewhere,
    faults::a_replica_takes_over,
    faults::a_silent_worker_is_left_for_its_replica,
    faults::another_arithmetic_is_refused_unless_allowed,
    faults::the_deadline_names_the_shard_and_the_reasons,
    faults::a_refused_handshake_is_named,
    faults::a_failing_engine_is_named_and_its_replica_asked,
    faults::a_route_that_moves_is_followed,
    faults::an_old_process_at_the_address_is_refused,
    shared::partials_stay_where_they_were_computed,
    shared::rows_go_in_frames_where_memory_is_not_seen,
    shared::a_partial_that_dies_with_its_worker_is_computed_again,
}
