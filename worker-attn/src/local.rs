//! Shards of the routed experts that this worker hosts itself (`--resident-layers` and the like).
//!
//! Neighbours: `step.rs` runs them between submit and collect; the coordinator says which shards (`Accept.shards`);
//! [`ShardEngine`] is the same engine that an expert worker serves.

use std::sync::Arc;

use tandem_kernels::Backend;
use tandem_model::{Checkpoint, Shard};
use tandem_worker_experts::ShardEngine;

use crate::{hop::HopError, layers::Cx, weights::LoadError};

/// All local shards, arranged by layer.
pub struct LocalShards<B: Backend> {
    /// Ascending by shard id.
    engines: Vec<ShardEngine<B>>,
    /// Per layer: places in `engines`.
    places: Vec<Vec<usize>>,
    /// Per layer: shard ids.
    ids: Vec<Vec<u32>>,
}

impl<B: Backend> LocalShards<B> {
    /// Loads shards for a model of `layers` layers; `progress` hears how many of how many bytes are loaded.
    ///
    /// # Errors
    /// The checkpoint or the device, naming the shard.
    pub fn load(
        backend: &Arc<B>,
        layers: usize,
        checkpoint: &Checkpoint,
        shards: &[Shard],
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, LoadError> {
        let mut order: Vec<&Shard> = shards.iter().collect();
        order.sort_by_key(|s| s.id);
        let total = order.iter().map(|s| checkpoint.shard_bytes(s)).sum();
        let mut before = 0;
        let mut loaded = Self { engines: Vec::new(), places: vec![Vec::new(); layers], ids: vec![Vec::new(); layers] };
        for (place, shard) in order.into_iter().enumerate() {
            let fail = |source| LoadError::Shard { shard: shard.to_string(), source: Box::new(source) };
            let engine = ShardEngine::load(backend, checkpoint, shard, |p| progress(before + p.loaded_bytes, total)).map_err(fail)?;
            before += checkpoint.shard_bytes(shard);
            loaded.engines.push(engine);
            for layer in shard.layer_ids() {
                loaded.places[layer as usize].push(place);
                loaded.ids[layer as usize].push(shard.id);
            }
        }
        Ok(loaded)
    }

    /// The largest number of local shards of one layer: how many partial buffers a step needs.
    pub fn widest(&self) -> usize {
        self.ids.iter().map(Vec::len).max().unwrap_or(0)
    }

    /// The local shards of a layer, ascending.
    pub fn shards(&self, layer: usize) -> &[u32] {
        &self.ids[layer]
    }

    /// x → `partials[i]` of the `i`-th local shard of `layer`.
    ///
    /// # Errors
    /// A shard that lost a layer (never after a successful load).
    pub fn forward(&self, layer: usize, cx: &mut Cx<'_, B>) -> Result<(), HopError> {
        let buf = &mut *cx.buf;
        for (&place, out) in self.places[layer].iter().zip(&mut buf.partials) {
            self.engines[place].run(layer as u32, cx.rows, &buf.x, &buf.topk_ids, &buf.topk_weights, out).map_err(Box::new)?;
        }
        Ok(())
    }
}
