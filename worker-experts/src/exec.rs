//! [`ShardEngine`]: a loaded shard that computes additive partials.
//!
//! `partial[r] = Σ over the row's chosen experts in the shard of weight · expert(x[r])`, by ascending expert, over the shard's slice of the
//! intermediate dimension; the partials of all shards add up to the routed part of the MoE. Grouping rows by expert is the backend's
//! part ([`Backend::experts`]).
//!
//! Neighbours: `bank.rs` loads, `batcher.rs` brings rows from connections, `worker-attn` calls [`ShardEngine::run`] for local shards.

use std::{collections::BTreeMap, sync::Arc};

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
    /// Loads a shard. `progress` is called after every expert.
    ///
    /// # Errors
    /// The shard reaches outside of the model, a cut does not fall on a block, or the backend cannot take the weights.
    pub fn load(backend: &Arc<B>, checkpoint: &Checkpoint, shard: &Shard, mut progress: impl FnMut(LoadProgress)) -> Result<Self, Error> {
        let g = checkpoint.geometry();
        tandem_model::plan::validate_inside(g, shard)?;
        let mut at = LoadProgress { loaded_bytes: 0, total_bytes: checkpoint.shard_bytes(shard) };
        progress(at);
        let mut banks = BTreeMap::new();
        for layer in shard.layer_ids() {
            let bank = load_layer(backend.as_ref(), checkpoint, shard, layer, |bytes| {
                at.loaded_bytes += bytes;
                progress(at);
            })?;
            banks.insert(layer, bank);
        }
        Ok(Self { backend: Arc::clone(backend), shard: shard.clone(), banks, topk: g.topk, limit: g.swiglu_limit, bytes: at.loaded_bytes })
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
