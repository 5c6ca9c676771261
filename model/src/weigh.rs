//! What a checkpoint's tensors weigh: on disk, or as a caller counts them in its device's memory.
//!
//! Neighbours: `checkpoint.rs` has the tensors, `narrow.rs` those that are handed out smaller; the workers know their devices, `census.rs` counts
//! by part.

use tandem_quant::{DType, ScaleForm, fp8};

use crate::{
    Checkpoint, Shard,
    checkpoint::{KEY_UP, VALUE_UP},
    inventory::Need,
    linear::Layout,
};

/// A tensor that the model needs, as it is stored: what its size in a device's memory follows from.
#[derive(Clone, Copy, Debug)]
pub struct Weighed<'a> {
    /// Type of its elements.
    pub dtype: DType,
    /// The scales beside them.
    pub scales: ScaleForm,
    /// Row-major shape.
    pub shape: &'a [usize],
    /// A weight matrix or a stack of them; else a vector or another small tensor.
    pub matrix: bool,
    /// Bytes on disk, scales included.
    pub bytes: u64,
}

impl Checkpoint {
    /// Bytes of all tensors that the model uses.
    pub fn total_bytes(&self) -> u64 {
        self.sum_where(|_| true, |w| w.bytes)
    }

    /// Bytes of everything but the routed experts: what an attention worker holds at least.
    pub fn trunk_bytes(&self) -> u64 {
        self.trunk_bytes_as(|w| w.bytes)
    }

    /// The same where a tensor takes as many bytes as `weigh` says.
    pub fn trunk_bytes_as(&self, weigh: impl Fn(&Weighed<'_>) -> u64) -> u64 {
        self.sum_where(|n| !n.routed, weigh)
    }

    /// Bytes of weights that are kept in another form than stored: kv_b_proj as f32, where GGUF has it in two halves.
    pub fn unpacked_bytes(&self) -> u64 {
        let halves = self.needs().iter().filter(|n| n.name.ends_with(KEY_UP) || n.name.ends_with(VALUE_UP));
        halves.map(|n| 4 * n.shape.iter().map(|d| *d as u64).product::<u64>()).sum()
    }

    /// Those of [`Checkpoint::trunk_bytes`] that are narrowed when they are handed out, and so never lie in a mapped file.
    pub fn narrowed_bytes(&self) -> u64 {
        let plain = |n: &Need| self.layout(&n.name).is_ok_and(|layout| layout.is_plain());
        self.sum_where(|n| self.narrows(&n.name) && plain(n), |w| w.bytes)
    }

    /// Bytes of the routed experts' weights in a shard (every expert of a layer counts alike).
    pub fn shard_bytes(&self, shard: &Shard) -> u64 {
        self.shard_bytes_as(shard, |w| w.bytes)
    }

    /// The same where a tensor takes as many bytes as `weigh` says.
    pub fn shard_bytes_as(&self, shard: &Shard, weigh: impl Fn(&Weighed<'_>) -> u64) -> u64 {
        let layer_bytes = |layer: u32| {
            let prefix = format!("layers.{layer}.mlp.experts.");
            self.sum_where(|n| n.routed && n.name.starts_with(&prefix), &weigh)
        };
        shard.layer_ids().map(|layer| shard.share_of(self.geometry(), layer_bytes(layer))).sum()
    }

    /// Cuts along the intermediate dimension fall on multiples of this many elements: the largest block of a down_proj along `in` (all
    /// blocks are powers of two, so that it is a multiple of the others).
    pub fn ffn_block(&self) -> usize {
        let downs = self.needs().iter().filter(|n| n.routed && n.name.contains(".down_proj"));
        downs.filter_map(|n| self.layout(&n.name).ok()).map(|l| l.dtype.block_elems()).max().unwrap_or(1)
    }

    fn sum_where(&self, keep: impl Fn(&Need) -> bool, weigh: impl Fn(&Weighed<'_>) -> u64) -> u64 {
        // Opening has checked every layout.
        let layouts = self.needs().iter().filter(|n| keep(n)).filter_map(|n| Some((n, self.layout(&n.name).ok()?)));
        layouts.map(|(need, layout)| weigh(&self.weighed(need, &layout))).fold(0, u64::saturating_add)
    }

    /// A needed tensor as it is stored, or as handed out where it is narrowed.
    pub(crate) fn weighed<'a>(&self, need: &Need, layout: &'a Layout<'_>) -> Weighed<'a> {
        let (shape, matrix) = (layout.shape.as_slice(), need.matrix);
        match shape {
            &[rows, cols] if layout.is_plain() && self.narrows(&need.name) => {
                let scales = ScaleForm::Grid { block_cols: fp8::BLOCK };
                Weighed { dtype: DType::F8E4m3, scales, shape, matrix, bytes: fp8::bytes(rows, cols) as u64 }
            }
            _ => {
                let bytes = layout.entries().map(|e| e.bytes() as u64).sum();
                Weighed { dtype: layout.dtype, scales: layout.form(), shape, matrix, bytes }
            }
        }
    }
}
