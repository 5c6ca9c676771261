//! What an expert worker computes with: the seam between [`super::server`] and the grouped FFN.

/// All rows of one submission for one shard, gathered.
#[derive(Clone, Copy, Debug)]
pub struct Dispatch<'a> {
    /// Shard to compute: one that the server announced.
    pub shard: u32,
    /// Rows.
    pub rows: usize,
    /// Activations, rows × hidden.
    pub x: &'a [f32],
    /// Expert ids, rows × topk, as the attention side sent them: ids outside the shard (or the model) are to be skipped.
    pub ids: &'a [i32],
    /// Router weights, rows × topk.
    pub weights: &'a [f32],
}

/// Computes the shards of a worker. Runs on the server's own thread: while it computes, no link is read.
pub trait ExpertEngine: Send {
    /// Called first, on the thread that will call the rest.
    fn bind_thread(&mut self) {}

    /// Computes one joined batch of a layer: dispatches of one or more shards, from one or more attention workers. Returns, in
    /// the same order, each dispatch's additive partial (rows × hidden) or why it could not be computed.
    ///
    /// A row's partial must not depend on what else is in the batch (batch of N = N singles, bit for bit).
    fn execute(&mut self, layer: u16, dispatches: &[Dispatch<'_>]) -> Vec<Result<Vec<f32>, String>>;

    /// A step begins on an attention worker: `rows` rows will come, layer by layer. A chance to warm up; no answer.
    fn begin_step(&mut self, step_id: u64, rows: u32) {
        let _ = (step_id, rows);
    }
}
