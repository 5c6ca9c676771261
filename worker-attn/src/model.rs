//! A loaded model, and a [`Runner`] that steps it: the library-level entry.
//!
//! Neighbours: `engine/` drives a runner from a scheduler; tests and tools drive one directly ([`Runner::forward`]: teacher forcing over
//! one sequence, with an [`Observer`] on every layer).

use std::{ops::Range, sync::Arc};

use tandem_kernels::{Backend, BackendError, BatchDesc, SampleRow, Sampled, Segment};
use tandem_model::{Checkpoint, Geometry, Shard};

use crate::{
    buffers::BufferSizes,
    dims::Dims,
    hop::{Failure, Hop, HopError, HopSegment, HopStep, LocalOnly, Notify},
    layers::{kda, mla},
    local::LocalShards,
    micro_batch::MicroBatches,
    observe::{Observer, Silent},
    state::{SeqState, StateError, StatePool},
    step::{self, Step},
    telemetry,
    weights::{LoadError, Weights},
};

/// Weights of the trunk and of the local shards, on a device.
pub struct Model<B: Backend> {
    backend: Arc<B>,
    geometry: Geometry,
    dims: Dims,
    weights: Weights<B>,
    local: LocalShards<B>,
}

impl<B: Backend> Model<B> {
    /// Loads a checkpoint's trunk and the shards `local`; `progress` hears what is being loaded, and how much of it is done.
    ///
    /// # Errors
    /// The checkpoint or the device, naming the part.
    pub fn load(
        backend: Arc<B>,
        checkpoint: &Checkpoint,
        local: &[Shard],
        progress: &mut dyn FnMut(&'static str, u64, u64),
    ) -> Result<Self, LoadError> {
        let geometry = checkpoint.geometry().clone();
        let dims = Dims::new(&geometry);
        let weights = Weights::load(&*backend, &dims, checkpoint, &mut |done, all| progress("trunk", done, all))?;
        let local = LocalShards::load(&backend, dims.layers, checkpoint, local, &mut |done, all| progress("local shards", done, all))?;
        Ok(Self { backend, geometry, dims, weights, local })
    }

    /// A model that hosts all of its experts itself.
    ///
    /// # Errors
    /// As [`Model::load`].
    pub fn load_whole(backend: Arc<B>, checkpoint: &Checkpoint) -> Result<Self, LoadError> {
        Self::load(backend, checkpoint, &whole_shard(checkpoint.geometry()), &mut |_, _, _| {})
    }

    /// The device.
    pub fn backend(&self) -> &Arc<B> {
        &self.backend
    }

    /// The checkpoint's sizes.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Sizes as ops take them.
    pub fn dims(&self) -> &Dims {
        &self.dims
    }
}

/// One shard of everything; none where the model has no routed experts.
pub fn whole_shard(g: &Geometry) -> Vec<Shard> {
    let mut layers: Vec<Range<u32>> = Vec::new();
    for layer in g.moe_layers() {
        let layer = layer as u32;
        match layers.last_mut() {
            Some(range) if range.end == layer => range.end += 1,
            _ => layers.push(layer..layer + 1),
        }
    }
    if layers.is_empty() {
        return Vec::new();
    }
    vec![Shard { id: 0, layers, experts: 0..g.experts as u32, ffn: 0..g.moe_intermediate as u32 }]
}

/// How large steps and pools may become.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunnerLimits {
    /// Rows of one step.
    pub max_rows: usize,
    /// Sequences that hold state at a time.
    pub max_batch: usize,
    /// Tokens of one sequence.
    pub max_seq_len: usize,
    /// Tokens whose state all sequences hold together.
    pub kv_tokens: usize,
    /// Rows from which a step runs as two micro-batches, where experts may be away; 0: never.
    pub overlap_rows: usize,
}

/// [`RunnerLimits::overlap_rows`] unless somebody says otherwise: fewer rows than half of it give an expert too few to fill its products.
pub const OVERLAP_ROWS: usize = 4096;

/// Why a step gave no result.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    /// The device or the hop.
    #[error(transparent)]
    Hop(#[from] HopError),
    /// The device.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// No room for the sequence.
    #[error(transparent)]
    State(#[from] StateError),
    /// A sequence failed ([`Runner::forward`] only).
    #[error("the sequence failed: {0:?}")]
    Failed(Failure),
}

/// What a step gave.
#[derive(Debug, Default)]
pub struct StepResult {
    /// One for each sample asked for, in order. Those of failed segments mean nothing.
    pub sampled: Vec<Sampled>,
    /// Segments whose sequence cannot go on.
    pub failures: Vec<(usize, Failure)>,
    /// For each range of rows that was watched: rows that ended the trunk with a NaN or an infinity.
    pub non_finite: Vec<usize>,
}

/// Steps a model: owns state pools, scratch and the hop.
pub struct Runner<B: Backend, H: Hop<B>> {
    model: Arc<Model<B>>,
    pool: StatePool<B>,
    micro: MicroBatches<B>,
    hop: H,
    limits: RunnerLimits,
    step_id: u64,
}

/// How large the buffers of a step are. `partials`: the largest number of local shards of one layer.
pub(crate) fn buffer_sizes(d: &Dims, limits: RunnerLimits, partials: usize) -> BufferSizes {
    BufferSizes {
        rows: limits.max_rows,
        logit_rows: limits.max_batch.max(LOGIT_ROWS).min(limits.max_rows),
        proj: kda::stride(d).max(mla::stride(d)),
        partials,
    }
}

/// Rows whose logits are made at a time, where the batch itself is smaller.
const LOGIT_ROWS: usize = 16;

impl<B: Backend> Runner<B, LocalOnly> {
    /// A runner of a model that hosts all of its experts.
    ///
    /// # Errors
    /// Out of memory.
    pub fn local(model: Arc<Model<B>>, limits: RunnerLimits) -> Result<Self, BackendError> {
        Self::new(model, LocalOnly::default(), limits)
    }
}

impl<B: Backend, H: Hop<B>> Runner<B, H> {
    /// Makes pools and scratch.
    ///
    /// # Errors
    /// Out of memory.
    pub fn new(model: Arc<Model<B>>, hop: H, limits: RunnerLimits) -> Result<Self, BackendError> {
        let (b, d) = (&model.backend, &model.dims);
        let pool = StatePool::new(Arc::clone(b), d.state_spec(limits.max_batch, limits.kv_tokens))?;
        let pages = limits.max_batch * pool.pages_for(limits.max_seq_len).max(1);
        let from = if H::OVERLAPS { limits.overlap_rows } else { 0 };
        let micro = MicroBatches::new(&**b, d, buffer_sizes(d, limits, model.local.widest()), from, limits.max_batch, pages)?;
        b.reserve(limits.max_rows, limits.max_seq_len)?;
        Ok(Self { pool, micro, hop, limits, step_id: 0, model })
    }

    /// The model.
    pub fn model(&self) -> &Arc<Model<B>> {
        &self.model
    }

    /// The limits.
    pub fn limits(&self) -> RunnerLimits {
        self.limits
    }

    /// The state pools.
    pub fn pool(&mut self) -> &mut StatePool<B> {
        &mut self.pool
    }

    /// The hop.
    pub fn hop(&mut self) -> &mut H {
        &mut self.hop
    }

    /// Runs one step: all rows of `desc` through the trunk, then `samples` (by row of the step). `segments` tells the hop whose rows
    /// they are; it has the order and the rows of `desc.segments`. `notify` hears of failed sequences while the step goes on. The rows in
    /// `watched` are to be known to be finite. `hold` has the last word about the samples when the layers are done: what it waits for is computed
    /// beside them.
    ///
    /// # Errors
    /// The device or the hop: the state of every sequence of the step is then half-updated.
    pub fn step(
        &mut self,
        desc: &BatchDesc,
        segments: Vec<HopSegment>,
        notify: Notify,
        mut samples: Vec<SampleRow>,
        watched: &[Range<usize>],
        hold: impl FnOnce(&mut [SampleRow]),
    ) -> Result<StepResult, StepError> {
        self.with_step(desc, segments, notify, |w, local, step, hop| {
            let timer = std::time::Instant::now();
            step::trunk(w, local, step, hop, &mut Silent)?;
            telemetry::phase("layers", timer.elapsed());
            hold(&mut samples);
            let timer = std::time::Instant::now();
            let non_finite = step::non_finite(step, watched)?;
            let sampled = step::sample(w, step, samples, &mut Silent)?;
            telemetry::phase("sample", timer.elapsed());
            Ok(StepResult { sampled, failures: hop.failures(), non_finite })
        })
    }

    /// Runs `tokens` as the continuation of one sequence, `chunk` at a time, and returns the logits of every row, `[tokens, V]`.
    ///
    /// # Errors
    /// No room, the device, or the hop.
    pub fn forward<O: Observer<B>>(
        &mut self,
        state: &mut SeqState,
        tokens: &[u32],
        chunk: usize,
        observer: &mut O,
    ) -> Result<Vec<f32>, StepError> {
        let mut out = Vec::with_capacity(tokens.len() * self.model.dims.vocab);
        for tokens in tokens.chunks(chunk.clamp(1, self.limits.max_rows)) {
            self.pool.grow(state, state.tokens() + tokens.len())?;
            let mut desc = BatchDesc::default();
            push_segment(&mut desc, state, tokens);
            let deadline = std::time::Instant::now() + std::time::Duration::from_secs(3600);
            let segments = vec![HopSegment { request_id: 0, rows: 0..tokens.len(), deadline, warmup: false }];
            let logits = self.with_step(&desc, segments, Notify::default(), |w, local, step, hop| {
                step::trunk(w, local, step, hop, observer)?;
                let logits = step::logits(w, step, observer)?;
                match hop.failures().pop() {
                    Some((_, failure)) => Err(StepError::Failed(failure)),
                    None => Ok(logits),
                }
            })?;
            out.extend(logits);
            state.advance(tokens.len());
        }
        Ok(out)
    }

    fn with_step<R>(
        &mut self,
        desc: &BatchDesc,
        segments: Vec<HopSegment>,
        notify: Notify,
        run: impl FnOnce(&Weights<B>, &LocalShards<B>, &mut Step<'_, B>, &mut H) -> Result<R, StepError>,
    ) -> Result<R, StepError> {
        self.step_id += 1;
        let rows = desc.tokens.len();
        self.hop.begin_step(HopStep { step_id: self.step_id, rows, segments, notify });
        let (b, d) = (&*self.model.backend, &self.model.dims);
        self.micro.begin(b, d, desc);
        let mut step = Step { b, d, state: self.pool.memory(), micro: &mut self.micro };
        run(&self.model.weights, &self.model.local, &mut step, &mut self.hop)
    }
}

/// Appends the next rows of a sequence, whose pages must reach that far, to a step.
pub fn push_segment(desc: &mut BatchDesc, state: &SeqState, tokens: &[u32]) {
    let (row0, page0) = (desc.tokens.len() as u32, desc.pages.len() as u32);
    desc.tokens.extend(tokens);
    desc.pages.extend(state.pages());
    desc.segments.push(Segment {
        slot: state.slot(),
        row0,
        rows: tokens.len() as u32,
        pos0: state.tokens() as u32,
        pages: page0..desc.pages.len() as u32,
    });
}
