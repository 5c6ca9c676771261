//! Rules of the scheduler, one test each, and a random walk that keeps all of them at once.

use proptest::prelude::*;

use super::*;

fn capacity() -> Capacity {
    Capacity { slots: 3, pages: 8, page_tokens: 4, max_rows: 8, prefill_chunk: 6 }
}

/// Applies a plan as the engine does: every last row samples a token, and followers take part.
fn run(s: &mut Scheduler) -> Plan {
    let plan = s.plan(|_| Start::default());
    for p in &plan.rows {
        let forked: Vec<u64> = if p.last { s.followers(p.id) } else { Vec::new() };
        s.completed(p.id, p.rows, 0);
        for id in forked.into_iter().filter(|id| s.fork(*id, true)).collect::<Vec<_>>() {
            s.completed(id, 0, 1);
        }
        s.completed(p.id, 0, usize::from(p.last));
    }
    plan
}

fn rows(plan: &Plan) -> Vec<(u64, usize, bool)> {
    plan.rows.iter().map(|p| (p.id, p.rows, p.last)).collect()
}

#[test]
fn decode_rows_come_first_and_prefill_takes_what_is_left() {
    let mut s = Scheduler::new(capacity());
    s.submit(1, 2, None);
    assert_eq!(rows(&run(&mut s)), [(1, 2, true)]);
    s.submit(2, 14, None);
    s.submit(3, 3, None);
    assert_eq!(rows(&run(&mut s)), [(1, 1, true), (2, 6, false)], "a chunk of 6 beside a decode row; 3 rows do not fit any more");
    assert_eq!(rows(&run(&mut s)), [(1, 1, true), (2, 6, false)]);
    assert_eq!(rows(&run(&mut s)), [(1, 1, true), (2, 2, true), (3, 3, true)]);
    assert_eq!(rows(&run(&mut s)), [(1, 1, true), (2, 1, true), (3, 1, true)]);
}

#[test]
fn a_chunk_leaves_room_for_a_full_batch() {
    let chunk =
        |slots, max_rows, prefill_chunk| Scheduler::new(Capacity { slots, max_rows, prefill_chunk, ..capacity() }).capacity().prefill_chunk;
    assert_eq!((chunk(8, 256, 256), chunk(8, 256, 7), chunk(4, 4, 9), chunk(3, 8, 8)), (240, 7, 1, 6));
}

#[test]
fn the_latest_arrival_makes_room_and_is_computed_anew() {
    let mut s = Scheduler::new(Capacity { pages: 4, ..capacity() });
    s.submit(1, 6, None);
    run(&mut s);
    s.submit(2, 6, None);
    run(&mut s);
    run(&mut s);
    // 1 has 8 tokens of state in two pages, 2 has 7 in two; the ninth token of 1 needs a third page.
    let plan = run(&mut s);
    assert_eq!((plan.preempted, rows(&Plan { rows: plan.rows, ..Plan::default() })), (vec![2], vec![(1, 1, true)]));
    assert_eq!((s.running(), s.waiting()), (1, 1));
    s.remove(1);
    let plan = run(&mut s);
    assert_eq!((plan.admitted, plan.rows[0].rows), (vec![2], 6));
}

#[test]
fn a_sequence_joins_only_when_its_pages_are_not_promised() {
    let mut s = Scheduler::new(Capacity { pages: 6, prefill_chunk: 2, ..capacity() });
    s.submit(1, 15, None);
    s.submit(2, 11, None);
    assert_eq!(run(&mut s).admitted, [1], "one page is held, but four are promised: two are left of three needed");
    s.remove(1);
    assert_eq!(run(&mut s).admitted, [2]);
}

#[test]
fn slots_limit_who_runs_and_order_is_kept() {
    let mut s = Scheduler::new(Capacity { slots: 2, ..capacity() });
    for id in [7, 5, 6] {
        s.submit(id, 1, None);
    }
    assert_eq!(run(&mut s).admitted, [7, 5]);
    assert_eq!(run(&mut s).admitted, [] as [u64; 0]);
    s.remove(7);
    assert_eq!(run(&mut s).admitted, [6]);
}

#[test]
fn a_model_without_pages_is_limited_by_slots_alone() {
    let mut s = Scheduler::new(Capacity { pages: 0, page_tokens: 0, ..capacity() });
    s.submit(1, 100, None);
    assert_eq!(run(&mut s).rows.len(), 1);
}

#[test]
fn a_sequence_begins_where_the_cache_ends_and_stops_where_it_is_to_be_saved() {
    let mut s = Scheduler::new(Capacity { pages: 12, ..capacity() });
    s.submit(1, 30, None);
    let start = || Start { computed: 8, points: vec![10, 20] };
    let (mut computed, mut seen) = (8, Vec::new());
    while computed < 30 {
        let plan = s.plan(|_| start());
        let p = plan.rows[0];
        seen.push((p.rows, p.point, p.kept, p.last));
        computed += p.rows;
        s.completed(1, p.rows, usize::from(p.last));
        assert_eq!(s.running[0].pages, computed.div_ceil(4), "shared pages are counted as if they were its own");
    }
    assert_eq!(
        seen,
        [(2, true, true, false), (6, false, true, false), (4, true, true, false), (6, false, false, false), (4, false, false, true)]
    );
    // Sent back, it asks anew.
    let e = s.running.pop().unwrap();
    s.wait_again(e);
    assert_eq!(s.plan(|_| Start { computed: 30, points: vec![] }).rows[0].rows, 1, "31 tokens are known now, and one is always left");
}

#[test]
fn one_of_a_group_computes_the_prompt_and_the_others_follow() {
    let group = Some(1);
    let mut s = Scheduler::new(Capacity { pages: 20, ..capacity() });
    s.submit(1, 10, group);
    s.submit(2, 10, group);
    s.submit(3, 10, group);
    let plan = run(&mut s);
    assert_eq!((plan.admitted.as_slice(), rows(&plan)), (&[1, 2, 3][..], vec![(1, 6, false)]));
    assert_eq!((s.followers(1), s.leader_of(2)), (vec![2, 3], Some(1)));
    s.remove(1);
    assert_eq!((s.followers(2), s.leader_of(2)), (vec![3], None), "the first of them takes its place");
    assert_eq!(rows(&run(&mut s)), [(2, 6, false)]);
    assert_eq!(rows(&run(&mut s)), [(2, 4, true)]);
    assert_eq!(s.followers(2), [] as [u64; 0]);
    assert_eq!(rows(&run(&mut s)), [(2, 1, true), (3, 1, true)], "both decode");
    s.submit(4, 10, group);
    assert_eq!(rows(&run(&mut s)), [(2, 1, true), (3, 1, true), (4, 6, false)], "too late to follow: they are past the prompt");
}

#[test]
fn a_follower_that_finds_no_pages_computes_by_itself() {
    let mut s = Scheduler::new(Capacity { pages: 7, ..capacity() });
    s.submit(9, 5, None);
    run(&mut s);
    s.submit(1, 8, Some(1));
    s.submit(2, 8, Some(1));
    assert_eq!(run(&mut s).admitted, [1], "two pages are held, three promised to the first");
    s.remove(9);
    assert_eq!(s.plan(|_| Start::default()).admitted, [2]);
    assert_eq!(s.leader_of(2), Some(1));
    s.running[0].pages = 6;
    assert!(!s.fork(2, true) && s.leader_of(2).is_none());
}

#[test]
fn nobody_is_asked_about_a_sequence_that_cannot_join() {
    let mut s = Scheduler::new(Capacity { slots: 1, ..capacity() });
    s.submit(1, 2, None);
    s.submit(2, 2, None);
    let mut asked = Vec::new();
    s.plan(|id| {
        asked.push(id);
        Start::default()
    });
    assert_eq!(asked, [1]);
}

proptest! {
    #[test]
    fn everything_finishes_and_no_limit_is_ever_passed(
        pages in 4usize..12,
        page_tokens in 1usize..6,
        slots in 1usize..5,
        chunk in 1usize..9,
        spare in 0usize..6,
        jobs in prop::collection::vec((1usize..30, 1usize..20, 0usize..40, prop::option::of(1u64..3)), 1..12),
        starts in prop::collection::vec((0usize..30, prop::collection::vec(0usize..30, 0..3)), 1..8),
    ) {
        let c = Capacity { slots, pages, page_tokens, max_rows: slots + spare, prefill_chunk: chunk };
        let mut s = Scheduler::new(c);
        // (id, tokens, left to sample, step of arrival, group), cut to what can ever fit. Those of a group have as many tokens.
        let mut jobs: Vec<(u64, usize, usize, usize, Option<u64>)> = jobs
            .iter()
            .enumerate()
            .map(|(i, j)| (i as u64, j.3.map_or(j.0, |group| 7 * group as usize).min(pages * page_tokens), j.1, j.2, j.3))
            .map(|(id, tokens, new, at, group)| (id, tokens, new.min(pages * page_tokens - tokens + 1), at, group))
            .collect();
        let mut state: std::collections::HashMap<u64, (usize, usize, usize)> = std::collections::HashMap::new();
        let mut done = 0;
        // Those that live, in order of arrival.
        let mut arrived: Vec<u64> = Vec::new();
        for step in 0..4000 {
            for j in jobs.extract_if(.., |j| j.3 == step) {
                s.submit(j.0, j.1, j.4);
                arrived.push(j.0);
                state.insert(j.0, (0, j.1, j.2));
            }
            // The cache knows something else of each, each time.
            let mut begun: std::collections::HashMap<u64, Start> = std::collections::HashMap::new();
            let plan = s.plan(|id| {
                let (computed, mut points) = starts[(id as usize + step) % starts.len()].clone();
                points.sort_unstable();
                let start = Start { computed: computed.min(state[&id].1 - 1), points };
                begun.insert(id, start.clone());
                start
            });
            for id in &plan.preempted {
                state.get_mut(id).unwrap().0 = 0;
            }
            // Fair: the earliest never makes room, and nobody joins before one who came earlier.
            prop_assert!(arrived.first().is_none_or(|first| !plan.preempted.contains(first)));
            let waiting: Vec<u64> = s.waiting.iter().map(|e| e.id).collect();
            for id in &plan.admitted {
                let earlier = &arrived[..arrived.iter().position(|a| a == id).unwrap()];
                prop_assert!(earlier.iter().all(|e| !waiting.contains(e)), "{} overtakes one of {:?}", id, earlier);
            }
            for id in &plan.admitted {
                prop_assert_eq!(begun.contains_key(id), s.leader_of(*id).is_none());
                state.get_mut(id).unwrap().0 = begun.get(id).map_or(0, |start| start.computed);
            }
            let total: usize = plan.rows.iter().map(|p| p.rows).sum();
            prop_assert!(total <= c.max_rows && s.running() <= slots);
            let held: usize = s.running.iter().map(|e| e.pages).sum();
            prop_assert!(held <= pages, "{held} of {pages} pages");
            let decoding = s.running.iter().filter(|e| e.pending() == 1 && e.follows.is_none()).count();
            let single = plan.rows.iter().take_while(|p| p.rows == 1).count();
            prop_assert!(single >= decoding, "every decoding sequence has its row, at the front");
            let mut sampled = Vec::new();
            for p in &plan.rows {
                let (computed, tokens, _) = state.get_mut(&p.id).unwrap();
                prop_assert_eq!(p.last, *computed + p.rows == *tokens);
                prop_assert_eq!(s.leader_of(p.id), None);
                *computed += p.rows;
                s.completed(p.id, p.rows, 0);
                if p.last {
                    sampled.push(p.id);
                    let (computed, tokens) = (*computed, *tokens);
                    for follower in s.followers(p.id) {
                        let own = state.get_mut(&follower).unwrap();
                        prop_assert_eq!((own.0, own.1), (0, tokens), "a follower has the leader's prompt and nothing else");
                        if s.fork(follower, true) {
                            own.0 = computed;
                            sampled.push(follower);
                        }
                    }
                }
            }
            let held: usize = s.running.iter().map(|e| e.pages).sum();
            prop_assert!(held <= pages, "{held} of {pages} pages after forks");
            for id in sampled {
                s.completed(id, 0, 1);
                let (_, tokens, left) = state.get_mut(&id).unwrap();
                *tokens += 1;
                *left -= 1;
                if *left == 0 {
                    s.remove(id);
                    arrived.retain(|other| *other != id);
                    done += 1;
                }
            }
        }
        prop_assert_eq!((done, s.running(), s.waiting()), (state.len(), 0, 0));
    }
}
