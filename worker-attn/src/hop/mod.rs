//! The seam between the step and whoever computes the routed experts.
//!
//! | file | idea |
//! |---|---|
//! | this file | the [`Hop`] trait, and [`LocalOnly`] for a worker that hosts every shard |
//! | [`host`] | rows to expert workers, through host memory and a network link or through memory that both see |
//! | [`lent`] | that memory |
//! | [`transport`] | what carries rows, or word of them |
//!
//! Neighbours: `step.rs` submits and collects; `engine/` ends the sequences of [`Failure`]s.
//!
//! **Order.** A layer's output is the sum of its shards' partials in ascending shard id, in f32, whoever computed them; the shared expert
//! is added last. Local shards take their place in that order.
//!
//! **Failure.** A hop never fails half a row: either every partial of a row arrives, or the row's whole *segment* (sequence) is marked
//! failed, reads zeros from there on, and is ended (or begun anew from its tokens) after the step. Its state is then half-updated and is
//! freed, never continued. The other segments of the step are untouched and go on.

pub mod host;
pub mod lent;
pub mod transport;

use std::{
    fmt,
    ops::Range,
    sync::Arc,
    time::{Duration, Instant},
};

use tandem_kernels::Backend;
use tandem_proto::control::v1::LinkInUse;

/// The rows of one sequence in a step, as a hop sees them.
#[derive(Clone, Debug)]
pub struct HopSegment {
    /// The sequence.
    pub request_id: u64,
    /// Its rows.
    pub rows: Range<usize>,
    /// When it must have ended.
    pub deadline: Instant,
    /// Send its rows to every shard of each layer, whatever the router says.
    pub warmup: bool,
}

/// Hears of a failed sequence at once: the step itself may wait much longer for the sake of others.
#[derive(Clone)]
pub struct Notify(Arc<Listener>);

/// What hears a failure.
type Listener = dyn Fn(u64, &Failure) + Send + Sync;

impl Notify {
    /// Calls `f` with the request id, once for each failed sequence of a step.
    pub fn new(f: impl Fn(u64, &Failure) + Send + Sync + 'static) -> Self {
        Self(Arc::new(f))
    }

    /// Tells of a failure.
    pub fn tell(&self, request_id: u64, failure: &Failure) {
        (self.0)(request_id, failure);
    }
}

impl Default for Notify {
    fn default() -> Self {
        Self::new(|_, _| {})
    }
}

impl fmt::Debug for Notify {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Notify")
    }
}

/// One step, as a hop sees it.
#[derive(Clone, Debug, Default)]
pub struct HopStep {
    /// Ever increasing: part of the idempotence key of every dispatch.
    pub step_id: u64,
    /// Rows in all.
    pub rows: usize,
    /// The sequences, in row order.
    pub segments: Vec<HopSegment>,
    /// Who hears of failures.
    pub notify: Notify,
}

/// Why a sequence cannot go on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// A partial of one of its rows held a NaN or an infinity.
    NonFinite {
        /// The layer.
        layer: usize,
        /// The shard that sent it.
        shard: u32,
        /// Rows with such a value.
        rows: usize,
    },
    /// Nobody computed a shard that it needed before its deadline.
    Unavailable {
        /// What happened.
        message: String,
    },
    /// An expert worker reported an error of its own.
    Internal {
        /// Its words.
        message: String,
    },
    /// It was cancelled while the step waited.
    Cancelled,
}

/// A layer's routed rows on the device.
pub struct RoutedRows<'a, B: Backend> {
    /// Layer number.
    pub layer: usize,
    /// Which of the step's micro-batches they are of.
    pub micro: usize,
    /// Row of the step that is the first of them.
    pub first: usize,
    /// Rows R.
    pub rows: usize,
    /// Hidden size D.
    pub hidden: usize,
    /// Experts per token k.
    pub topk: usize,
    /// `[R, D]`.
    pub x: &'a B::Buf,
    /// `[R, k]` i32.
    pub ids: &'a B::Buf,
    /// `[R, k]`.
    pub weights: &'a B::Buf,
}

/// The partials of the shards that this worker hosts, ascending by id.
pub struct LocalPartials<'a, B: Backend> {
    /// Shard ids.
    pub shards: &'a [u32],
    /// `[R, D]` each; may be longer than `shards`.
    pub partials: &'a mut [B::Buf],
}

/// Why a step cannot go on at all.
#[derive(Debug, thiserror::Error)]
pub enum HopError {
    /// No shard computes the experts of a layer.
    #[error("no shard covers the experts of layer {layer}")]
    Uncovered {
        /// The layer.
        layer: usize,
    },
    /// Every sequence of the step failed: there is nothing left to compute.
    #[error("every sequence of the step has failed")]
    Abandoned,
    /// The device failed.
    #[error(transparent)]
    Backend(#[from] tandem_kernels::BackendError),
    /// A local shard failed.
    #[error(transparent)]
    Local(#[from] Box<tandem_worker_experts::Error>),
}

/// Computes the routed experts of a step's rows somewhere.
pub trait Hop<B: Backend>: Send {
    /// Whether rows are away while something else may be computed: whether cutting a step in micro-batches is of use.
    const OVERLAPS: bool;
    /// A step begins.
    fn begin_step(&mut self, step: HopStep);
    /// Sends a layer's rows to every remote shard that owns one of a row's experts. Returns at once. Of each micro-batch one layer is away at a time.
    ///
    /// # Errors
    /// The device, or nothing left to compute.
    fn submit(&mut self, b: &B, rows: &RoutedRows<'_, B>) -> Result<(), HopError>;
    /// Waits for what [`Hop::submit`] sent of a micro-batch and writes the sum of all partials to `out` (`[R, D]`). May take the buffers of `local`.
    ///
    /// # Errors
    /// The device, or nothing left to compute.
    fn collect(
        &mut self,
        b: &B,
        micro: usize,
        rows: usize,
        hidden: usize,
        local: LocalPartials<'_, B>,
        out: &mut B::Buf,
    ) -> Result<(), HopError>;
    /// Segments that failed since [`Hop::begin_step`], each once; [`HopStep::notify`] has heard of them.
    fn failures(&mut self) -> Vec<(usize, Failure)>;
    /// The time between steps: dial, notice what died.
    fn tend(&mut self) {}
    /// No sequence holds state now.
    fn idle(&mut self) {}
    /// Shards whose rows would be computed now, ascending.
    fn reachable(&self) -> Vec<u32> {
        Vec::new()
    }
    /// How the remote side does, for people.
    fn report(&self) -> HopReport {
        HopReport::default()
    }
}

/// What a hop says about its remote side.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HopReport {
    /// How long layers with remote shards lately waited after their own work: (layer, moving average), ascending.
    pub waits: Vec<(u32, Duration)>,
    /// Links in use.
    pub links: Vec<LinkInUse>,
}

/// No remote shards: every partial is computed on this worker's own device.
#[derive(Debug, Default)]
pub struct LocalOnly {
    layer: usize,
}

impl<B: Backend> Hop<B> for LocalOnly {
    const OVERLAPS: bool = false;

    fn begin_step(&mut self, _step: HopStep) {}

    fn submit(&mut self, _b: &B, rows: &RoutedRows<'_, B>) -> Result<(), HopError> {
        self.layer = rows.layer;
        Ok(())
    }

    fn collect(
        &mut self,
        b: &B,
        _micro: usize,
        rows: usize,
        hidden: usize,
        local: LocalPartials<'_, B>,
        out: &mut B::Buf,
    ) -> Result<(), HopError> {
        if local.shards.is_empty() {
            return Err(HopError::Uncovered { layer: self.layer });
        }
        sum_on_device(b, rows, hidden, local, out);
        Ok(())
    }

    fn failures(&mut self) -> Vec<(usize, Failure)> {
        Vec::new()
    }
}

/// Sums local partials in order without touching the host: the first one's buffer becomes `out`.
fn sum_on_device<B: Backend>(b: &B, rows: usize, hidden: usize, local: LocalPartials<'_, B>, out: &mut B::Buf) {
    let Some((first, rest)) = local.partials[..local.shards.len()].split_first_mut() else { return };
    std::mem::swap(first, out);
    for partial in rest {
        b.add(rows, hidden, partial, out);
    }
}
