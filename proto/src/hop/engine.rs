//! What an expert worker computes with: the seam between [`super::server`] and the grouped FFN.

use super::shared::SharedRows;

/// All rows of one submission for one shard, gathered.
#[derive(Clone, Copy, Debug)]
pub struct Dispatch<'a> {
    /// Shard to compute: one that the server announced.
    pub shard: u32,
    /// Rows.
    pub rows: usize,
    /// Activations, rows × hidden; empty where they are in shared memory.
    pub x: &'a [f32],
    /// Where they are otherwise; the partial goes to the same rows of the region lent for it.
    pub shared: Option<SharedRows>,
    /// Expert ids, rows × topk, as the attention side sent them: ids outside the shard (or the model) are to be skipped.
    pub ids: &'a [i32],
    /// Router weights, rows × topk.
    pub weights: &'a [f32],
}

/// A computed partial.
#[derive(Clone, Debug, PartialEq)]
pub enum Partial {
    /// Rows × hidden.
    Host(Vec<f32>),
    /// It lies in shared memory, complete. The rows (of the dispatch) that hold a NaN or an infinity, ascending.
    Shared {
        /// Those rows.
        non_finite: Vec<u32>,
    },
}

impl Partial {
    /// Rows × hidden, where they are on the host; else nothing.
    pub fn into_host(self) -> Vec<f32> {
        match self {
            Self::Host(rows) => rows,
            Self::Shared { .. } => Vec::new(),
        }
    }
}

impl From<Vec<f32>> for Partial {
    fn from(rows: Vec<f32>) -> Self {
        Self::Host(rows)
    }
}

/// Computes the shards of a worker. Runs on the server's own thread: while it computes, no link is read.
pub trait ExpertEngine: Send {
    /// Called first, on the thread that will call the rest.
    fn bind_thread(&mut self) {}

    /// Computes one joined batch of a layer: dispatches of one or more shards, from one or more attention workers. Returns, in
    /// the same order, each dispatch's additive partial (rows × hidden; in shared memory where its rows are) or why it could not be computed.
    ///
    /// A row's partial must not depend on what else is in the batch (batch of N = N singles, bit for bit).
    fn execute(&mut self, layer: u16, dispatches: &[Dispatch<'_>]) -> Vec<Result<Partial, String>>;

    /// A step begins on an attention worker: `rows` rows will come, layer by layer. A chance to warm up; no answer.
    fn begin_step(&mut self, step_id: u64, rows: u32) {
        let _ = (step_id, rows);
    }
}
