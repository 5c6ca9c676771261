//! Shards, their text, and plans: every (layer, expert, intermediate index) belongs to exactly one shard, whatever the geometry.
#![allow(clippy::unwrap_used, reason = "tests")]

use proptest::prelude::*;
use tandem_model::{
    Geometry, PlanError, Resident, Shard, ShardPlan, Split,
    plan::validate_cover,
    synthetic::{Preset, TextConfig},
};

fn geometry(config: &TextConfig) -> Geometry {
    Geometry::from_json("config.json".as_ref(), &config.to_json(false)).unwrap()
}

fn tiny() -> Geometry {
    geometry(&Preset::Tiny.config())
}

/// How often each cell is covered, counted one by one.
fn counts(g: &Geometry, shards: &[Shard]) -> Vec<u32> {
    let moe = g.moe_layers();
    let mut counts = vec![0; moe.len() * g.experts * g.moe_intermediate];
    for shard in shards {
        for layer in shard.layer_ids() {
            let l = moe.iter().position(|m| *m == layer as usize).expect("a MoE layer");
            for e in shard.experts.clone() {
                for i in shard.ffn.clone() {
                    counts[(l * g.experts + e as usize) * g.moe_intermediate + i as usize] += 1;
                }
            }
        }
    }
    counts
}

fn split() -> impl Strategy<Value = Split> {
    prop_oneof![Just(Split::Layers), Just(Split::Experts), Just(Split::Ffn)]
}

/// A resident text that fits a geometry: some MoE layers, some of them with a range of experts only.
fn resident(g: &Geometry, bits: u64) -> Resident {
    let moe = g.moe_layers();
    let parts: Vec<String> = moe
        .iter()
        .enumerate()
        .filter_map(|(i, layer)| match (bits >> (2 * (i % 32))) & 3 {
            0 | 1 => None,
            2 => Some(format!("{layer}")),
            _ => Some(format!("{layer}:{}-{}", g.experts / 3, g.experts / 2)),
        })
        .collect();
    if parts.is_empty() { Resident::None } else { parts.join(",").parse().unwrap() }
}

proptest! {
    #[test]
    fn every_cell_is_covered_once(seed in 0u64..10_000, split in split(), workers in 0usize..9, bits in any::<u64>(), block in 1usize..5) {
        let g = geometry(&TextConfig::random(seed));
        let resident = resident(&g, bits);
        match ShardPlan::with_block(&g, split, workers, &resident, block) {
            Ok(plan) => {
                prop_assert!(counts(&g, &plan.shards).iter().all(|c| *c == 1), "{:?}", plan);
                prop_assert_eq!(plan.workers.len(), workers);
                prop_assert!(plan.workers.iter().all(|ids| !ids.is_empty()), "no worker without a shard: {:?}", plan);
                let mut ids: Vec<u32> = plan.workers.concat();
                ids.extend(&plan.local);
                prop_assert_eq!(ids, (0..plan.shards.len() as u32).collect::<Vec<_>>());
                for shard in &plan.shards {
                    prop_assert_eq!(plan.shards[shard.id as usize].same_cut(shard), true);
                    let read: Shard = shard.to_string().parse().unwrap();
                    prop_assert!(read.same_cut(shard), "{}", shard);
                    prop_assert!((shard.ffn.start as usize).is_multiple_of(block), "cuts fall on blocks: {}", shard);
                }
            }
            Err(PlanError::TooMany { largest, .. }) => {
                prop_assert!(largest < workers);
                if largest > 0 {
                    prop_assert!(ShardPlan::with_block(&g, split, largest, &resident, block).is_ok(), "the count it names must work");
                }
            }
            Err(PlanError::NoWorker { .. }) => prop_assert_eq!(workers, 0),
            Err(other) => prop_assert!(false, "{}", other),
        }
    }

    #[test]
    fn any_text_is_read_or_refused(text in "[a-z0-9=,:-]{0,40}") {
        let _ = text.parse::<Shard>();
        let _ = text.parse::<Resident>();
    }

    #[test]
    fn a_cover_with_one_shard_changed_is_refused(seed in 0u64..1000, pick in any::<prop::sample::Index>(), grow in any::<bool>()) {
        let g = geometry(&TextConfig::random(seed));
        let Ok(plan) = ShardPlan::new(&g, Split::Ffn, 2, &Resident::None) else { return Ok(()) };
        let mut shards = plan.shards.clone();
        let shard = &mut shards[pick.index(plan.shards.len())];
        if grow { shard.ffn = 0..g.moe_intermediate as u32 } else { shard.experts.end -= 1 }
        let refused = validate_cover(&g, &shards).is_err();
        prop_assert_eq!(refused, counts(&g, &shards).iter().any(|c| *c != 1));
    }
}

#[test]
fn impossible_counts_name_the_largest_possible() {
    let g = tiny();
    let refused = |split, workers| ShardPlan::new(&g, split, workers, &Resident::None).unwrap_err().to_string();
    assert!(refused(Split::Layers, 7).ends_with("the largest possible count is 6"), "{}", refused(Split::Layers, 7));
    assert!(refused(Split::Experts, 17).ends_with("the largest possible count is 16"));
    assert!(refused(Split::Ffn, 65).ends_with("the largest possible count is 64"));
    let block = ShardPlan::with_block(&g, Split::Ffn, 5, &Resident::None, 16).unwrap_err().to_string();
    assert!(block.ends_with("the largest possible count is 4"), "{block}");
    let none = ShardPlan::new(&g, Split::Layers, 0, &"3-6".parse().unwrap()).unwrap_err().to_string();
    assert!(none.contains("layers 7-8 have experts that are not resident"), "{none}");
    let all = ShardPlan::new(&g, Split::Layers, 1, &Resident::All).unwrap_err().to_string();
    assert!(all.ends_with("the largest possible count is 0"), "{all}");
    assert_eq!(ShardPlan::new(&g, Split::Layers, 0, &Resident::All).unwrap().local, [0]);
}

#[test]
fn slices_are_uneven_where_they_must_be() {
    let plan = ShardPlan::new(&tiny(), Split::Ffn, 3, &Resident::None).unwrap();
    let slices: Vec<_> = plan.shards.iter().map(|s| s.ffn.clone()).collect();
    assert_eq!(slices, [0..22, 22..43, 43..64]);
}

#[test]
fn resident_layers_leave_the_rest_to_workers() {
    let plan = ShardPlan::new(&tiny(), Split::Layers, 2, &"3-4,6:0-7".parse().unwrap()).unwrap();
    let text: Vec<String> = plan.shards.iter().map(ToString::to_string).collect();
    assert_eq!(
        text,
        [
            "layers=5,experts=0-15,ffn=0-63",
            "layers=6,experts=8-15,ffn=0-63",
            "layers=7-8,experts=0-15,ffn=0-63",
            "layers=3-4,experts=0-15,ffn=0-63",
            "layers=6,experts=0-7,ffn=0-63",
        ]
    );
    assert_eq!((plan.workers, plan.local), (vec![vec![0, 1], vec![2]], vec![3, 4]));
}

#[test]
fn text_says_what_is_wrong_with_it() {
    let shard = |text: &str| text.parse::<Shard>().unwrap_err().to_string();
    assert!(shard("layers=3-11,experts=0-287").contains("ffn needs one range, got 0"));
    assert!(shard("layers=11-3,experts=0,ffn=0").contains("runs backwards"));
    assert!(shard("layers=3,layers=3,experts=0,ffn=0").contains("3 is named twice"));
    assert!(shard("3-4").contains("no key"));
    assert_eq!("layers=3-6,8-11,experts=0-1,ffn=5".parse::<Shard>().unwrap().layers, [3..7, 8..12]);
    let resident = |text: &str| text.parse::<Resident>().and_then(|r| r.experts_by_layer(&tiny())).unwrap_err().to_string();
    assert!(resident("3-9").contains("layer 9 does not exist: the model has 9 layers"));
    assert!(resident("0-2").contains("they are dense"));
    assert!(resident("4:0-16").contains("expert 16 does not exist"));
    assert!(resident("4:0-3,4:2").contains("layer 4: expert 2 is named twice"));
    assert!(resident("x").contains("\"x\" is no number"));
    for text in ["all", "none", "3-6,8", "3-6:0-7,8"] {
        assert_eq!(text.parse::<Resident>().unwrap().to_string(), text);
    }
}
