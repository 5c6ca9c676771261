//! What would work where a layout does not fit: other cuts, other resident layers, fewer tokens in the caches.

use tandem_model::{Resident, Split, budget::Short, resident::ResidentRange};

use super::{
    layout::{Ask, Device, lay_out},
    sizes::Sizes,
};

/// Fewest tokens in the caches that are worth proposing.
const FEW_TOKENS: usize = 1024;

/// A hint for a refusal: flags with which the same devices hold the checkpoint, or what is missing in all.
pub fn hint(sizes: &Sizes, devices: &[Device], ask: &Ask, short: &Short) -> String {
    if let Some(tokens) = most_tokens(sizes, devices, ask).filter(|t| *t >= FEW_TOKENS.min(ask.limits.kv_tokens)) {
        return format!("--kv-tokens {tokens} would fit");
    }
    // The workers that were asked for; else one on each other device.
    let others: Vec<usize> = (0..devices.len()).filter(|d| *d != ask.attn).collect();
    for experts in [&ask.experts, &others] {
        for (split, resident) in alternatives(sizes, ask) {
            let other = Ask { split, resident: resident.clone(), experts: experts.clone(), ..ask.clone() };
            let Ok(layout) = lay_out(sizes, &other) else { continue };
            if layout.check(devices).is_ok() {
                let names: Vec<&str> = experts.iter().filter_map(|d| Some(devices.get(*d)?.room.device.as_str())).collect();
                let names = if names.is_empty() { "none".to_owned() } else { names.join(",") };
                return format!("--split {split} --resident-layers {resident} --experts {names} would fit");
            }
        }
    }
    let needed: u64 = lay_out(sizes, ask).map_or(0, |l| (0..devices.len()).map(|d| l.needed(d)).fold(0, u64::saturating_add));
    let there: u64 = devices.iter().map(|d| d.room.bytes).fold(0, u64::saturating_add);
    if needed > there {
        let gib = crate::bytes::gib;
        return format!(
            "all of it needs {} GiB and the devices have {} GiB together: add a device, or take a checkpoint with fewer bits per weight",
            gib(needed),
            gib(there)
        );
    }
    format!(
        "no cut over these devices fits {}: give the larger parts to the larger devices (order of --experts), or more workers",
        short.device
    )
}

/// The largest number of cached tokens that fits, all else being equal; none where even one does not. Sequences are taken to be as long as the
/// model allows: without `--max-seq-len` they grow with the cache, and scratch with them.
pub fn most_tokens(sizes: &Sizes, devices: &[Device], ask: &Ask) -> Option<usize> {
    let fits = |tokens: usize| {
        let mut ask = ask.clone();
        ask.limits.kv_tokens = tokens;
        ask.limits.max_seq_len = ask.limits.max_seq_len.max(sizes.geometry.max_position).min(tokens);
        lay_out(sizes, &ask).is_ok_and(|l| l.check(devices).is_ok())
    };
    let (mut low, mut high) = (1usize, 1usize << 40);
    if !fits(low) {
        return None;
    }
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if fits(middle) { low = middle } else { high = middle }
    }
    Some(low)
}

/// Other cuts with the same workers, the ones nearest to what was asked first: all splits, with growing numbers of resident layers.
fn alternatives(sizes: &Sizes, ask: &Ask) -> impl Iterator<Item = (Split, Resident)> {
    let moe: Vec<u32> = sizes.geometry.moe_layers().iter().map(|l| *l as u32).collect();
    let resident = move |count: usize| match (count, moe.as_slice()) {
        (0, _) => Resident::None,
        (n, all) if n >= all.len() => Resident::All,
        (n, all) => {
            let ranges = tandem_model::shard::ranges_of(all[..n].iter().copied());
            Resident::Ranges(ranges.into_iter().map(|layers| ResidentRange { layers, experts: None }).collect())
        }
    };
    let most = sizes.geometry.moe_layers().len();
    let splits = [ask.split, Split::Ffn, Split::Layers, Split::Experts];
    (0..=most).flat_map(move |count| {
        let resident = resident(count);
        splits.map(|split| (split, resident.clone()))
    })
}
