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

impl<B: Backend> Buffers<B> {
    /// Buffers for steps of up to `rows` rows whose logits are made `logit_rows` rows at a time. `proj` is the widest fused
    /// projection; `partials` the largest number of local shards of one layer.
    ///
    /// # Errors
    /// Out of memory.
    pub fn new(b: &B, d: &Dims, rows: usize, logit_rows: usize, proj: usize, partials: usize) -> Result<Self, BackendError> {
        let f32s = |what: &str, width: usize| b.alloc(what, Elem::F32, rows * width.max(1));
        let i32s = |what: &str, width: usize| b.alloc(what, Elem::I32, rows * width.max(1));
        let n = d.mhc.streams;
        Ok(Self {
            streams: f32s("streams", n * d.hidden)?,
            x: f32s("sublayer input", d.hidden)?,
            y: f32s("sublayer output", d.hidden)?,
            gates: MhcGates { post: f32s("mHC post", n)?, comb: f32s("mHC comb", n * n)? },
            proj: f32s("fused projections", proj)?,
            f: f32s("KDA decay", d.kda_width())?,
            g: f32s("KDA gate", d.kda_width())?,
            mixed: f32s("mixer output", d.kda_width().max(d.mla.heads * d.mla.v_dim))?,
            cq: f32s("query latent", d.q_lora)?,
            q: f32s("queries", d.mla.heads * d.mla.qk_dim)?,
            iq: f32s("index queries", d.indexer.heads * d.indexer.dim)?,
            latent: f32s("latent rows", d.mla.latent)?,
            selected: i32s("selected positions", d.indexer.width())?,
            topk_ids: i32s("topk_ids", d.router.topk)?,
            topk_weights: f32s("topk_weights", d.router.topk)?,
            gate_up: f32s("MLP hidden", 2 * d.intermediate)?,
            shared: f32s("shared expert", d.hidden)?,
            partials: (0..partials).map(|_| f32s("partial", d.hidden)).collect::<Result<_, _>>()?,
            last: b.alloc("final hidden", Elem::F32, logit_rows * d.hidden)?,
            logits: b.alloc("logits", Elem::F32, logit_rows * d.vocab)?,
            logit_rows,
        })
    }
}
