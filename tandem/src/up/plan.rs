//! What goes where, in GiB, from the checkpoint's headers alone: printed before anything is started.

use std::fmt;

use tandem_model::{Checkpoint, Geometry, ShardPlan};

use crate::{bytes::gib, cli::values::Device};

/// What one process will hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Process name.
    pub name: String,
    /// Device.
    pub device: String,
    /// Weights in bytes as stored.
    pub weights: u64,
    /// What they are.
    pub holds: String,
}

/// The plan of one instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// The checkpoint in words.
    pub model: String,
    /// One entry per worker, the attention worker first.
    pub places: Vec<Place>,
    /// Tokens that the caches hold.
    pub kv_tokens: u64,
    /// Bytes of the caches that grow with tokens.
    pub kv_bytes: u64,
    /// Sequences that have state at once.
    pub max_batch: u32,
    /// Bytes of fixed-size state of all of them.
    pub state_bytes: u64,
    /// Longest sequence.
    pub max_seq_len: u64,
    /// Memory of this machine that is free for use, if known.
    pub available: Option<u64>,
}

/// The attention worker's limits that the plan depends on.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Tokens in the caches.
    pub kv_tokens: u64,
    /// Sequences at once.
    pub max_batch: u32,
    /// Longest sequence.
    pub max_seq_len: u64,
    /// Bytes of a cached number: 2 in bf16, 4 in f32.
    pub cache_elem: u64,
}

impl Plan {
    /// Adds up what `shards` and `limits` mean for `checkpoint`. `devices` are the expert workers' names and devices.
    pub fn new(checkpoint: &Checkpoint, shards: &ShardPlan, limits: Limits, attn_device: Device, devices: &[(String, Device)]) -> Self {
        let geometry = checkpoint.geometry();
        let sum = |ids: &[u32]| {
            ids.iter().filter_map(|id| shards.shards.get(*id as usize)).map(|shard| checkpoint.shard_bytes(shard)).sum::<u64>()
        };
        let describe = |ids: &[u32]| {
            ids.iter().filter_map(|id| shards.shards.get(*id as usize)).map(ToString::to_string).collect::<Vec<_>>().join(" + ")
        };
        let resident = match shards.local.as_slice() {
            [] => "attention, dense and shared FFN, embedding, head".to_owned(),
            local => format!("attention, dense and shared FFN, embedding, head; resident experts {}", describe(local)),
        };
        let mut places = vec![Place {
            name: "attn".into(),
            device: attn_device.to_string(),
            weights: checkpoint.trunk_bytes() + sum(&shards.local),
            holds: resident,
        }];
        for ((name, device), ids) in devices.iter().zip(&shards.workers) {
            places.push(Place {
                name: name.clone(),
                device: device.to_string(),
                weights: sum(ids),
                holds: format!("routed experts {}", describe(ids)),
            });
        }
        Self {
            model: describe_model(checkpoint),
            places,
            kv_tokens: limits.kv_tokens,
            kv_bytes: limits.kv_tokens * cache_bytes_per_token(geometry, limits.cache_elem),
            max_batch: limits.max_batch,
            state_bytes: u64::from(limits.max_batch) * state_bytes_per_sequence(geometry),
            max_seq_len: limits.max_seq_len,
            available: available_memory(),
        }
    }

    /// Everything together, in bytes.
    pub fn total(&self) -> u64 {
        self.places.iter().map(|place| place.weights).sum::<u64>() + self.kv_bytes + self.state_bytes
    }
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "model     {}", self.model)?;
        for place in &self.places {
            writeln!(f, "{:<9} {:>9} GiB on {}: {}", place.name, gib(place.weights), place.device, place.holds)?;
        }
        writeln!(
            f,
            "kv        {:>9} GiB on {}: {} tokens, longest sequence {}",
            gib(self.kv_bytes),
            self.places[0].device,
            self.kv_tokens,
            self.max_seq_len
        )?;
        writeln!(f, "state     {:>9} GiB on {}: {} sequences", gib(self.state_bytes), self.places[0].device, self.max_batch)?;
        write!(f, "total     {:>9} GiB", gib(self.total()))?;
        match self.available {
            Some(available) if available < self.total() => {
                write!(f, " needed, but only {} GiB of memory are free: expect paging; lower --kv-tokens or --max-batch", gib(available))
            }
            Some(available) => write!(f, " of {} GiB free", gib(available)),
            None => Ok(()),
        }
    }
}

fn describe_model(checkpoint: &Checkpoint) -> String {
    let g = checkpoint.geometry();
    format!(
        "{} ({} GiB; {} layers: {} KDA, {} MLA; {} with {} experts, top {})",
        checkpoint.dir().display(),
        gib(checkpoint.total_bytes()),
        g.layers,
        g.kda_layers().len(),
        g.mla_layers().len(),
        g.moe_layers().len(),
        g.experts,
        g.topk
    )
}

/// Latent row and pooled index key of each MLA layer.
fn cache_bytes_per_token(g: &Geometry, elem: u64) -> u64 {
    let pooled = (g.index_dim as u64).div_ceil(g.kpool.max(1) as u64);
    g.mla_layers().len() as u64 * (g.kv_lora as u64 + pooled) * elem
}

/// KDA matrices and convolution taps (always f32), and the raw index keys and gates that wait to be pooled.
fn state_bytes_per_sequence(g: &Geometry) -> u64 {
    let width = (g.kda_heads * g.kda_head_dim) as u64;
    let kda = width * g.kda_head_dim as u64 + 3 * width * g.conv.saturating_sub(1) as u64;
    let tail = 2 * (g.kpool.saturating_sub(1) * g.index_dim) as u64;
    4 * (g.kda_layers().len() as u64 * kda + g.mla_layers().len() as u64 * tail)
}

/// `MemAvailable`, or the control group's limit where that is lower.
pub fn available_memory() -> Option<u64> {
    let meminfo = std::fs::read_to_string("/proc/meminfo").ok()?;
    let kib: u64 = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?.split_whitespace().next()?.parse().ok()?;
    let number = |path: &str| std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let group = match (number("/sys/fs/cgroup/memory.max"), number("/sys/fs/cgroup/memory.current")) {
        (Some(limit), Some(used)) => limit.saturating_sub(used),
        _ => u64::MAX,
    };
    Some((kib * 1024).min(group))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The demo model, whose README says 8.5 M parameters and 17.0 MB.
    #[cfg(feature = "demo")]
    #[test]
    fn the_parts_of_the_demo_add_up() {
        let cache = std::env::temp_dir().join(format!("tandem-plan-{}", std::process::id()));
        let dir = tandem_model::demo::unpack(&cache).expect("writable");
        let checkpoint = Checkpoint::open(&dir).expect("sound");
        let resident = "3-4:0-7".parse().expect("ranges");
        let shards = ShardPlan::new(checkpoint.geometry(), tandem_model::Split::Ffn, 2, &resident).expect("possible");
        let limits = Limits { kv_tokens: 1000, max_batch: 2, max_seq_len: 1000, cache_elem: 2 };
        let experts = [("experts-0".to_owned(), Device::Cpu), ("experts-1".to_owned(), Device::Cpu)];
        let plan = Plan::new(&checkpoint, &shards, limits, Device::Cpu, &experts);
        assert_eq!(plan.places.iter().map(|place| place.weights).sum::<u64>(), checkpoint.total_bytes());
        // Two MLA layers: a latent of 64 and a 32-wide key for each 4 tokens, in bf16.
        assert_eq!(plan.kv_bytes, 1000 * 2 * (64 + 8) * 2);
        // Six KDA layers: 4 heads of 32 x 32, and 3 x 3 taps of 128; two tails of 3 keys and gates of 32.
        assert_eq!(plan.state_bytes, 2 * 4 * (6 * (4 * 32 * 32 + 9 * 128) + 2 * 2 * 3 * 32));
        let text = plan.to_string();
        assert!(text.contains("resident experts layers=3-4,experts=0-7") && text.contains("GiB"), "{text}");
        std::fs::remove_dir_all(cache).expect("clean up");
    }
}
