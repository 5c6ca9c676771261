//! [`ShardEngine`]: a loaded shard that computes additive partials.
//!
//! `partial[r] = Σ over the row's chosen experts in the shard of weight · expert(x[r])`, by ascending expert, over the shard's slice of the
//! intermediate dimension; the partials of all shards add up to the routed part of the MoE. Grouping rows by expert is the backend's
//! part ([`Backend::experts`]).
//!
//! Neighbours: `bank.rs` loads, `batcher.rs` brings rows from connections, `worker-attn` calls [`ShardEngine::run`] for local shards.

use std::{collections::BTreeMap, sync::Arc, time::Instant};

use tandem_kernels::Backend;
use tandem_model::{Checkpoint, Shard};

use crate::{Error, LoadProgress, bank::load_layer};

/// A shard's weights on a device.
pub struct ShardEngine<B: Backend> {
    backend: Arc<B>,
    shard: Shard,
    banks: BTreeMap<u32, B::Bank>,
    topk: usize,
    limit: Option<f32>,
    bytes: u64,
}

impl<B: Backend> ShardEngine<B> {
    /// Reads a shard into memory, and puts it on the device. `progress` hears what is read.
    ///
    /// # Errors
    /// The shard reaches outside of the model, a cut does not fall on a block, the disk fails, or the backend cannot take the weights.
    pub fn load(backend: &Arc<B>, checkpoint: &Checkpoint, shard: &Shard, mut progress: impl FnMut(LoadProgress)) -> Result<Self, Error> {
        let g = checkpoint.geometry();
        tandem_model::plan::validate_inside(g, shard)?;
        let (started, total_bytes) = (Instant::now(), checkpoint.shard_bytes(shard));
        let read = checkpoint.read_in_shard(shard, |done, all| {
            // Whole pages are read: told in bytes of weights.
            let share = u128::from(total_bytes) * u128::from(done) / u128::from(all.max(1));
            progress(LoadProgress { loaded_bytes: u64::try_from(share).unwrap_or(total_bytes), total_bytes });
        })?;
        let (seconds, shown) = (started.elapsed().as_secs_f64(), shard.to_string());
        let gb_per_s = read as f64 / 1e9 / seconds.max(1e-9);
        tracing::info!(shard = shown, gb = read as f64 / 1e9, seconds, gb_per_s, "read into memory");
        let (mut banks, mut bytes) = (BTreeMap::new(), 0);
        for layer in shard.layer_ids() {
            let (bank, held) = load_layer(backend.as_ref(), checkpoint, shard, layer)?;
            banks.insert(layer, bank);
            bytes += held;
        }
        progress(LoadProgress { loaded_bytes: total_bytes, total_bytes });
        Ok(Self { backend: Arc::clone(backend), shard: shard.clone(), banks, topk: g.topk, limit: g.swiglu_limit, bytes })
    }

    /// What is loaded.
    pub fn shard(&self) -> &Shard {
        &self.shard
    }

    /// Bytes of its weights.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Whether it has experts of a layer.
    pub fn has_layer(&self, layer: u32) -> bool {
        self.banks.contains_key(&layer)
    }

    /// Enqueues the partial of `rows` rows: `x` `[R, D]`, `ids` `[R, k]` (i32; ids outside of the shard are skipped) and `weights` `[R, k]` →
    /// `out` `[R, D]`, overwritten; a row without an expert here gets zeros. Failures of the device surface at its next synchronisation.
    ///
    /// # Errors
    /// [`Error::LayerNotHeld`].
    pub fn run(&self, layer: u32, rows: usize, x: &B::Buf, ids: &B::Buf, weights: &B::Buf, out: &mut B::Buf) -> Result<(), Error> {
        let bank = self.banks.get(&layer).ok_or_else(|| Error::LayerNotHeld { layer, shard: self.shard.clone() })?;
        self.backend.experts(rows, x, self.topk, ids, weights, bank, self.limit, out);
        Ok(())
    }
}
