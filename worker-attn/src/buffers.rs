//! Every buffer a step writes, made once and sized for the largest step.
//!
//! Neighbours: `layers/` read and write them by name; the table says who.
//!
//! | buffer | shape | written by |
//! |---|---|---|
//! | `streams` | `[R, N, D]` | embed, mHC |
//! | `x` | `[R, D]` | mHC pre: a sublayer's normed input |
//! | `y` | `[R, D]` | a sublayer's output |
//! | `gates` | `[R, N]`, `[R, N, N]` | mHC pre |
//! | `proj` | `[R, stride]` | fused input projections of a mixer |
//! | `f`, `g` | `[R, H·Dh]` | KDA f_b, g_b |
//! | `mixed` | `[R, heads·v]` | a mixer before its output projection |
//! | `cq`, `q`, `iq` | `[R, q_lora]`, `[R, heads·qk]`, `[R, ih·id]` | MLA queries |
//! | `latent` | `[R, latent]` | MLA |
//! | `selected` | `[R, width]` i32 | DSA; kept for a following shared layer |
//! | `topk_ids`, `topk_weights` | `[R, k]` | router |
//! | `gate_up` | `[R, 2I]` | gated MLPs |
//! | `shared` | `[R, D]` | shared expert |
//! | `partials` | `[R, D]` each | local shards, in ascending shard id |
//! | `last`, `logits` | `[G, D]`, `[G, V]` | head, in groups of G rows |

use tandem_kernels::{Backend, BackendError, Elem, MhcGates};

use crate::dims::Dims;

/// Scratch of the step.
pub struct Buffers<B: Backend> {
    /// mHC streams.
    pub streams: B::Buf,
    /// Input of a sublayer.
    pub x: B::Buf,
    /// Output of a sublayer.
    pub y: B::Buf,
    /// mHC gates of the sublayer that runs.
    pub gates: MhcGates<B>,
    /// Fused projections.
    pub proj: B::Buf,
    /// KDA decay logits.
    pub f: B::Buf,
    /// KDA output gate.
    pub g: B::Buf,
    /// Mixer output before `o_proj`.
    pub mixed: B::Buf,
    /// Normed query latent.
    pub cq: B::Buf,
    /// Queries.
    pub q: B::Buf,
    /// Index queries.
    pub iq: B::Buf,
    /// Normed latent rows.
    pub latent: B::Buf,
    /// Selected positions.
    pub selected: B::Buf,
    /// Chosen experts.
    pub topk_ids: B::Buf,
    /// Their weights.
    pub topk_weights: B::Buf,
    /// Hidden of a gated MLP.
    pub gate_up: B::Buf,
    /// Output of the shared expert.
    pub shared: B::Buf,
    /// Partials of local shards.
    pub partials: Vec<B::Buf>,
    /// Final hidden rows of a group.
    pub last: B::Buf,
    /// Logits of a group.
    pub logits: B::Buf,
    /// Rows of a group G.
    pub logit_rows: usize,
}

/// The sizes that buffers follow from, beside the model's.
#[derive(Clone, Copy, Debug)]
pub struct BufferSizes {
    /// Rows R of the largest step.
    pub rows: usize,
    /// Rows G whose logits are made at a time.
    pub logit_rows: usize,
    /// Widest fused projection.
    pub proj: usize,
    /// Largest number of local shards of one layer.
    pub partials: usize,
}

/// Elements per row of each buffer, all of 4 bytes.
struct Widths {
    streams: usize,
    post: usize,
    comb: usize,
    proj: usize,
    kda: usize,
    mixed: usize,
    cq: usize,
    q: usize,
    iq: usize,
    latent: usize,
    selected: usize,
    topk: usize,
    gate_up: usize,
    hidden: usize,
}

impl Widths {
    fn new(d: &Dims, sizes: BufferSizes) -> Self {
        let n = d.mhc.streams;
        Self {
            streams: n * d.hidden,
            post: n,
            comb: n * n,
            proj: sizes.proj.max(1),
            kda: d.kda_width().max(1),
            mixed: d.kda_width().max(d.mla.heads * d.mla.v_dim).max(1),
            cq: d.q_lora.max(1),
            q: (d.mla.heads * d.mla.qk_dim).max(1),
            iq: (d.indexer.heads * d.indexer.dim).max(1),
            latent: d.mla.latent.max(1),
            selected: d.indexer.width().max(1),
            topk: d.router.topk.max(1),
            gate_up: (2 * d.intermediate).max(1),
            hidden: d.hidden,
        }
    }

    /// Of a row of a step: `x`, `y` and `shared` are hidden wide, `f` and `g` KDA wide; ids and weights of the chosen experts.
    fn row(&self, partials: usize) -> usize {
        let once = [self.streams, self.post, self.comb, self.proj, self.mixed, self.cq, self.q, self.iq, self.latent, self.selected];
        once.iter().sum::<usize>() + self.gate_up + 2 * self.kda + 2 * self.topk + (3 + partials) * self.hidden
    }
}

impl<B: Backend> Buffers<B> {
    /// Buffers for steps of these sizes.
    ///
    /// # Errors
    /// Out of memory.
    pub fn new(b: &B, d: &Dims, sizes: BufferSizes) -> Result<Self, BackendError> {
        let w = Widths::new(d, sizes);
        let f32s = |what: &str, width: usize| b.alloc(what, Elem::F32, sizes.rows * width);
        let i32s = |what: &str, width: usize| b.alloc(what, Elem::I32, sizes.rows * width);
        Ok(Self {
            streams: f32s("streams", w.streams)?,
            x: f32s("sublayer input", w.hidden)?,
            y: f32s("sublayer output", w.hidden)?,
            gates: MhcGates { post: f32s("mHC post", w.post)?, comb: f32s("mHC comb", w.comb)? },
            proj: f32s("fused projections", w.proj)?,
            f: f32s("KDA decay", w.kda)?,
            g: f32s("KDA gate", w.kda)?,
            mixed: f32s("mixer output", w.mixed)?,
            cq: f32s("query latent", w.cq)?,
            q: f32s("queries", w.q)?,
            iq: f32s("index queries", w.iq)?,
            latent: f32s("latent rows", w.latent)?,
            selected: i32s("selected positions", w.selected)?,
            topk_ids: i32s("topk_ids", w.topk)?,
            topk_weights: f32s("topk_weights", w.topk)?,
            gate_up: f32s("MLP hidden", w.gate_up)?,
            shared: f32s("shared expert", w.hidden)?,
            partials: (0..sizes.partials).map(|_| f32s("partial", w.hidden)).collect::<Result<_, _>>()?,
            last: b.alloc("final hidden", Elem::F32, sizes.logit_rows * d.hidden)?,
            logits: b.alloc("logits", Elem::F32, sizes.logit_rows * d.vocab)?,
            logit_rows: sizes.logit_rows,
        })
    }
}

/// Bytes of the buffers of [`Buffers::new`].
pub fn bytes(d: &Dims, sizes: BufferSizes) -> u64 {
    let rows = (sizes.rows as u64).saturating_mul(Widths::new(d, sizes).row(sizes.partials) as u64);
    let logits = (sizes.logit_rows as u64).saturating_mul((d.hidden + d.vocab) as u64);
    rows.saturating_add(logits).saturating_mul(4)
}
