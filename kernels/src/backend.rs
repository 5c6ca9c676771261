//! The `Backend` trait: the one seam between the step loop and a device.
//!
//! `worker-attn/src/step.rs` and `worker-experts/src/exec.rs` are written once over this trait. Rules that every backend keeps:
//!
//! * Ops *enqueue*: they return nothing, and a failure surfaces at the next [`Backend::sync`], [`Backend::sample`] or
//!   [`Backend::download`]. A backend that computes at once (CPU) keeps the first error and reports it there.
//! * No op allocates: buffers, weights, banks and state are made before the first step, sized by plan. Scratch belongs to the
//!   backend and is sized by [`Backend::reserve`].
//! * Row counts come from the step, not from the buffer: a buffer holds up to the planned maximum of rows.
//! * A batch of N rows equals N single rows bit for bit on one backend: every row-count variant of an op sums in one order.
//! * Everything in device memory is f32 unless the backend's precision says otherwise for its own storage; `i32` buffers hold ids.
//!
//! Shapes are row-major; R = rows (tokens) of the step, D = hidden size, N = mHC streams.

use std::{fmt, ops::Range};

use tandem_quant::MatrixSource;

/// What activations, caches and hop payload are rounded to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Precision {
    /// Everything in f32; stored weights are upcast exactly.
    F32,
    /// bf16 inputs of matrix products, latent cache and hop payload; f32 accumulation, streams and KDA state.
    Bf16,
}

impl Precision {
    /// Bytes of an element that is rounded so.
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
        }
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        })
    }
}

/// What a backend runs on, for logs, metrics and the handshake.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    /// `cpu`, `reference`, `cuda:0` …; two workers may serve the same running sequence only if these arithmetic names are equal.
    pub arithmetic: String,
    /// Human-readable description (model name, cores or SMs, instruction set).
    pub description: String,
    /// Bytes of memory usable for weights and state; `None` where unknown.
    pub memory_bytes: Option<u64>,
}

/// A failure of a backend.
#[derive(Debug, Clone, thiserror::Error)]
pub enum BackendError {
    /// A weight has a type or shape that this backend has no kernel for.
    #[error("{tensor}: {reason}")]
    Weight {
        /// Tensor name.
        tensor: String,
        /// What is wrong and what would work.
        reason: String,
    },
    /// Memory ran out.
    #[error("out of memory for {what}: {needed} bytes needed, {available} available on {device}; free some there, or ask for less of it")]
    OutOfMemory {
        /// What was being allocated.
        what: String,
        /// Bytes needed.
        needed: u64,
        /// Bytes available.
        available: u64,
        /// Device name.
        device: String,
    },
    /// An op failed (the first failure since the last synchronisation).
    #[error("{op} failed on {device}: {reason}")]
    Op {
        /// Op name.
        op: &'static str,
        /// Device name.
        device: String,
        /// The device's own words.
        reason: String,
    },
}

/// Element type of a plain buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Elem {
    /// f32 values.
    F32,
    /// i32 ids.
    I32,
}

/// Consecutive rows of one sequence inside a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// State slot of the sequence.
    pub slot: u32,
    /// First row in the step.
    pub row0: u32,
    /// Number of rows (1 in decode, a chunk in prefill).
    pub rows: u32,
    /// Position of the first row in its sequence, from 0.
    pub pos0: u32,
    /// Where this sequence's page ids lie in [`BatchDesc::pages`]; page `i` holds tokens `[i·P, (i+1)·P)`, P = [`StateSpec::page_tokens`].
    pub pages: Range<u32>,
}

/// See [`Backend::cut`].
pub const CUT_ROWS: usize = 64;

/// One step's rows, described on the host. Segments cover rows `0..tokens.len()` in order, decode rows first.
#[derive(Clone, Debug, Default)]
pub struct BatchDesc {
    /// Token id of each row, `[R]`.
    pub tokens: Vec<u32>,
    /// The sequences' row ranges.
    pub segments: Vec<Segment>,
    /// Page ids of all segments, concatenated.
    pub pages: Vec<u32>,
}

impl BatchDesc {
    /// Whether the segments cover the rows in order, lie within the pages, and have a slot each. `slots` is scratch, so that a step
    /// allocates nothing.
    ///
    /// # Errors
    /// What does not fit.
    pub(crate) fn validate(&self, slots: &mut Vec<u32>) -> Result<(), String> {
        let mut row = 0;
        for s in &self.segments {
            if s.row0 != row || s.pages.start > s.pages.end || s.pages.end as usize > self.pages.len() {
                return Err(format!("segment of slot {}: rows from {} where {row} is next, pages {:?}", s.slot, s.row0, s.pages));
            }
            row += s.rows;
        }
        if row as usize != self.tokens.len() {
            return Err(format!("segments cover {row} rows of {}", self.tokens.len()));
        }
        slots.clear();
        slots.extend(self.segments.iter().map(|s| s.slot));
        slots.sort_unstable();
        match slots.windows(2).find(|w| w[0] == w[1]) {
            Some(pair) => Err(format!("two segments of slot {}", pair[0])),
            None => Ok(()),
        }
    }
}

/// Sizes of the pools that hold sequence state. Per sequence: a *slot* (KDA state, conv taps, raw indexer tail) and *pages*
/// (latent rows and pooled index keys). Indexed by dense layer numbers: `kda_layers` and `mla_layers` count only their own kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateSpec {
    /// Number of sequence slots.
    pub slots: usize,
    /// Number of pages in the pool.
    pub pages: usize,
    /// Tokens per page: the largest multiple of `kpool` that is ≤ 64 (or `kpool` itself where that is larger).
    pub page_tokens: usize,
    /// KDA layers.
    pub kda_layers: usize,
    /// MLA layers.
    pub mla_layers: usize,
    /// KDA sizes.
    pub kda: KdaDims,
    /// Latent width (kv_lora_rank).
    pub latent: usize,
    /// Index key width (index_head_dim).
    pub index_dim: usize,
    /// Tokens per pool (index_kpool).
    pub kpool: usize,
}

impl StateSpec {
    /// The page size for a pool size: see [`StateSpec::page_tokens`].
    pub fn page_tokens_for(kpool: usize) -> usize {
        let kpool = kpool.max(1); // 0 where a model has no MLA layer
        (64 / kpool).max(1) * kpool
    }
}

/// KDA sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KdaDims {
    /// Heads.
    pub heads: usize,
    /// Key and value width of a head.
    pub head_dim: usize,
    /// Taps of the causal convolution (the current token is the last tap).
    pub conv: usize,
}

/// Sizes and constants of a KDA mixer.
#[derive(Clone, Copy, Debug)]
pub struct KdaParams {
    /// Sizes.
    pub dims: KdaDims,
    /// Lower bound of the log decay; `None`: the softplus form.
    pub lower_bound: Option<f32>,
    /// rms_norm_eps of the gated norm.
    pub eps: f32,
}

/// Weights of a KDA mixer between its projections (docs/model.md, KDA). All f32.
pub struct KdaWeights<B: Backend> {
    /// Depthwise taps `[3·H·Dh, conv]`: q, then k, then v channels.
    pub conv: B::Buf,
    /// `[H]`.
    pub a_log: B::Buf,
    /// `[H·Dh]`.
    pub dt_bias: B::Buf,
    /// `[Dh]`.
    pub o_norm: B::Buf,
}

/// Constants of an mHC site.
#[derive(Clone, Copy, Debug)]
pub struct MhcParams {
    /// Streams N.
    pub streams: usize,
    /// Hidden size D.
    pub hidden: usize,
    /// rms_norm_eps, for the flattened streams and the following norm.
    pub rms_eps: f32,
    /// hc_eps.
    pub hc_eps: f32,
    /// Sinkhorn iterations in all.
    pub iters: usize,
}

/// Weights of an mHC site and of the RMSNorm that follows it.
pub struct MhcWeights<B: Backend> {
    /// `[N(N+2), N·D]`.
    pub fn_: B::Weight,
    /// `[N(N+2)]`.
    pub base: B::Buf,
    /// `[3]`.
    pub scale: B::Buf,
    /// `[D]`: input_layernorm or post_attention_layernorm.
    pub norm: B::Buf,
}

/// What a site leaves behind for the end of its sublayer.
pub struct MhcGates<B: Backend> {
    /// `[R, N]`.
    pub post: B::Buf,
    /// `[R, N, N]`.
    pub comb: B::Buf,
}

/// Sizes of MLA attention.
#[derive(Clone, Copy, Debug)]
pub struct MlaParams {
    /// Attention heads.
    pub heads: usize,
    /// q/k head width.
    pub qk_dim: usize,
    /// v head width.
    pub v_dim: usize,
    /// Latent width.
    pub latent: usize,
}

/// Sizes of the indexer.
#[derive(Clone, Copy, Debug)]
pub struct IndexerParams {
    /// Index heads.
    pub heads: usize,
    /// Index head width.
    pub dim: usize,
    /// Tokens per pool.
    pub kpool: usize,
    /// index_topk, in tokens.
    pub topk: usize,
    /// Always append the tokens of the incomplete pool.
    pub always_tail: bool,
}

impl IndexerParams {
    /// Largest number of token positions one query can select.
    pub fn width(&self) -> usize {
        self.topk + if self.always_tail { self.kpool - 1 } else { 0 }
    }
}

/// Weights of the indexer's key side. All f32.
pub struct IndexKeyWeights<B: Backend> {
    /// LayerNorm weight `[dim]`.
    pub norm_weight: B::Buf,
    /// LayerNorm bias `[dim]`.
    pub norm_bias: B::Buf,
    /// index_kpool_compress_ape `[kpool, dim]`.
    pub ape: B::Buf,
}

/// Constants of the router.
#[derive(Clone, Copy, Debug)]
pub struct RouterParams {
    /// Routed experts E.
    pub experts: usize,
    /// Experts per token k.
    pub topk: usize,
    /// Groups (1: none).
    pub groups: usize,
    /// Groups kept.
    pub topk_group: usize,
    /// Divide the chosen scores by their sum + 1e-20.
    pub norm_topk: bool,
    /// routed_scaling_factor.
    pub scale: f32,
}

/// One expert's matrices, or the intermediate slice of it that a shard owns.
#[derive(Clone, Debug)]
pub struct ExpertSource {
    /// `[I, D]`.
    pub gate: MatrixSource,
    /// `[I, D]`.
    pub up: MatrixSource,
    /// `[D, I]`.
    pub down: MatrixSource,
}

/// Sampling of one row of logits. The random number is chosen by the caller (a function of seed, request and position), so that the
/// result depends on nothing else.
///
/// Order of work: bias, repetition, frequency, presence, temperature, top-k (exactly k; ties by lowest id), top-p (of what top-k left),
/// min-p. The token is then the first, in ascending id, at which the running sum of the kept probabilities exceeds `uniform` times
/// their whole sum.
#[derive(Clone, Debug)]
pub struct SampleRow {
    /// Row of the logits buffer.
    pub row: u32,
    /// 0 = greedy (lowest id among equals).
    pub temperature: f32,
    /// 0 = off.
    pub top_k: u32,
    /// 1 = off.
    pub top_p: f32,
    /// 0 = off.
    pub min_p: f32,
    /// 1 = off; divides positive and multiplies negative logits of tokens seen in prompt or output.
    pub repetition_penalty: f32,
    /// 0 = off; times the token's count in the output.
    pub frequency_penalty: f32,
    /// 0 = off; once where the token is in the output.
    pub presence_penalty: f32,
    /// Distinct tokens seen: (id, count in the output; 0 = in the prompt only). Empty where no penalty is on.
    pub seen: Vec<(u32, u32)>,
    /// Added to the logits: (id, bias). −inf bans a token.
    pub bias: Vec<(u32, f32)>,
    /// The only tokens that may be chosen: bit i % 32 of word i / 32 is token i, and at least one is set. `None`: all.
    pub allowed: Option<Vec<u32>>,
    /// Uniform in [0, 1).
    pub uniform: f64,
    /// Do not sample: report this token (teacher forcing, prompt logprobs).
    pub forced: Option<u32>,
    /// How many of the most likely tokens to report; `None`: not even the sampled token's logprob is needed.
    pub logprobs: Option<u32>,
}

impl SampleRow {
    /// The most likely token of row `row`, nothing changed about its logits, no probability reported.
    pub fn greedy(row: u32) -> Self {
        Self {
            row,
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            seen: Vec::new(),
            bias: Vec::new(),
            allowed: None,
            uniform: 0.0,
            forced: None,
            logprobs: None,
        }
    }

    /// Whether [`SampleRow::allowed`] lets token `id` be chosen.
    pub fn allows(&self, id: usize) -> bool {
        self.allowed.as_ref().is_none_or(|words| words.get(id / 32).is_some_and(|word| word >> (id % 32) & 1 == 1))
    }
}

/// The outcome of [`SampleRow`].
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    /// The token.
    pub token: u32,
    /// Its log-probability under the plain softmax of the raw logits (before temperature, penalties and cuts), as vLLM reports it.
    pub logprob: f32,
    /// 1 + the number of tokens with a larger raw logit.
    pub rank: u32,
    /// The most likely tokens, best first, ties by lowest id.
    pub top: Vec<(u32, f32)>,
    /// False where a logit was NaN or +inf: the token then means nothing and the sequence must end with an error.
    pub finite: bool,
}

/// Rows of `x` `[rows, width]` with a NaN or an infinity, ascending.
pub fn non_finite_rows(x: &[f32], width: usize) -> Vec<u32> {
    let rows = x.chunks_exact(width.max(1)).zip(0..).filter(|(row, _)| row.iter().any(|v| !v.is_finite()));
    rows.map(|(_, row)| row).collect()
}

/// A device and its kernels. See the module text for the rules.
pub trait Backend: Send + Sync + Sized + 'static {
    /// Opaque device memory of f32 or i32 elements.
    type Buf: Send + Sync;
    /// A matrix `[out, in]` ready for products, in the stored type.
    type Weight: Send + Sync;
    /// The pools that hold all sequence state.
    type State: Send;
    /// The routed experts of one layer of one shard.
    type Bank: Send + Sync;
    /// A step's description on the device.
    type Batch: Send;
    /// Own memory that other processes of this machine may open ([`Backend::lend`]).
    type Region: Send + Sync;
    /// Such memory of another process.
    type Window: Send + Sync;

    /// What this runs on.
    fn device(&self) -> &DeviceInfo;
    /// The rounding mode.
    fn precision(&self) -> Precision;
    /// Told once by a thread that will enqueue ops for the rest of its life: the device may bind the thread to what it needs.
    fn bind_thread(&self) {}
    /// Sizes the scratch memory for steps of up to `rows` rows and contexts of up to `context` tokens.
    ///
    /// # Errors
    /// Out of memory.
    fn reserve(&self, rows: usize, context: usize) -> Result<(), BackendError>;

    // ---- memory -------------------------------------------------------------------------------------------------------

    /// A zeroed buffer.
    ///
    /// # Errors
    /// Out of memory.
    fn alloc(&self, what: &str, elem: Elem, len: usize) -> Result<Self::Buf, BackendError>;
    /// Copies host values to `dst[offset..]`.
    fn upload(&self, src: &[f32], dst: &mut Self::Buf, offset: usize);
    /// Copies host ids to `dst[offset..]`.
    fn upload_i32(&self, src: &[i32], dst: &mut Self::Buf, offset: usize);
    /// Waits for what was enqueued, then copies `src[offset..]` to the host.
    ///
    /// # Errors
    /// The first failed op since the last synchronisation.
    fn download(&self, src: &Self::Buf, offset: usize, dst: &mut [f32]) -> Result<(), BackendError>;
    /// As [`Backend::download`], for ids.
    ///
    /// # Errors
    /// The first failed op since the last synchronisation.
    fn download_i32(&self, src: &Self::Buf, offset: usize, dst: &mut [i32]) -> Result<(), BackendError>;
    /// Waits for what was enqueued, then copies both to the host, from their beginnings on: the experts that a router chose, and their weights.
    ///
    /// # Errors
    /// The first failed op since the last synchronisation.
    fn download_choice(
        &self,
        ids: &Self::Buf,
        weights: &Self::Buf,
        ids_to: &mut [i32],
        weights_to: &mut [f32],
    ) -> Result<(), BackendError> {
        self.download_i32(ids, 0, ids_to)?;
        self.download(weights, 0, weights_to)
    }
    /// Waits for what was enqueued.
    ///
    /// # Errors
    /// The first failed op since the last synchronisation.
    fn sync(&self) -> Result<(), BackendError>;

    // ---- memory that two processes see ----------------------------------------------------------------------------------

    /// Memory for `len` elements that other processes of this machine may read. Elements lie there as the precision says: f32 or bf16.
    /// `None`: this backend has none to lend.
    ///
    /// # Errors
    /// Out of memory.
    fn lend(&self, len: usize) -> Result<Option<Self::Region>, BackendError>;
    /// What another process opens a region with: opaque, and of no use on other machines.
    fn handle(&self, region: &Self::Region) -> Vec<u8>;
    /// Opens another process's region.
    ///
    /// # Errors
    /// Why it cannot be seen from here.
    fn open(&self, handle: &[u8]) -> Result<Self::Window, String>;
    /// `region[at..] = x[from..from + len]`, rounded. It is there once the device is synchronised.
    fn put(&self, len: usize, x: &Self::Buf, from: usize, region: &Self::Region, at: usize);
    /// `out[to..to + len] = window[at..]`.
    fn take(&self, len: usize, window: &Self::Window, at: usize, out: &mut Self::Buf, to: usize);
    /// `out[to..to + len] += window[at..]`.
    fn take_sum(&self, len: usize, window: &Self::Window, at: usize, out: &mut Self::Buf, to: usize);
    /// Waits for what was enqueued, then copies `region[at..]` to the host.
    ///
    /// # Errors
    /// The first failed op since the last synchronisation.
    fn read_back(&self, region: &Self::Region, at: usize, out: &mut [f32]) -> Result<(), BackendError>;
    /// Waits for what was enqueued; rows of `x` `[rows, width]` with a NaN or an infinity, ascending.
    ///
    /// # Errors
    /// The first failed op since the last synchronisation.
    fn non_finite(&self, rows: usize, width: usize, x: &Self::Buf) -> Result<Vec<u32>, BackendError> {
        let mut host = vec![0.0; rows * width];
        self.download(x, 0, &mut host)?;
        Ok(non_finite_rows(&host, width))
    }
    /// A matrix made of parts with equal `cols`, stacked along `out` (fused projections). Bytes may be shared, not copied.
    ///
    /// # Errors
    /// No kernel for the type or shape; out of memory.
    fn weight(&self, parts: &[MatrixSource]) -> Result<Self::Weight, BackendError>;
    /// A vector of f32 parameters.
    ///
    /// # Errors
    /// Out of memory.
    fn vector(&self, what: &str, values: &[f32]) -> Result<Self::Buf, BackendError>;
    /// The experts of one layer of one shard, in ascending expert id starting at `first`.
    ///
    /// # Errors
    /// No kernel for a type or shape; out of memory.
    fn bank(&self, first: u32, experts: Vec<ExpertSource>) -> Result<Self::Bank, BackendError>;
    /// State pools, zeroed.
    ///
    /// # Errors
    /// Out of memory.
    fn state(&self, spec: &StateSpec) -> Result<Self::State, BackendError>;
    /// Room for the description of a step.
    ///
    /// # Errors
    /// Out of memory.
    fn batch(&self, max_rows: usize, max_segments: usize, max_pages: usize) -> Result<Self::Batch, BackendError>;
    /// Puts a step's description on the device.
    fn set_batch(&self, desc: &BatchDesc, batch: &mut Self::Batch);

    // ---- sequence state -----------------------------------------------------------------------------------------------

    /// Where a prompt may be cut without changing a bit: at multiples of that many tokens from the sequence's first, whichever of them.
    /// `None`: each cut may change the rounding of what follows, so a prompt that is to be computed the same must be cut the same.
    fn prefill_grid(&self, _p: &KdaParams) -> Option<usize> {
        None
    }
    /// Where a segment of `rows` rows may be cut in two without changing a bit of them or of its state: the last such row at or before row `at`, 0 for
    /// its beginning, and more than [`CUT_ROWS`] rows before `at` nowhere.
    fn cut(&self, p: &KdaParams, rows: usize, at: usize) -> usize;
    /// Clears a slot (a new sequence starts).
    fn state_reset(&self, state: &mut Self::State, slot: u32);
    /// Copies all of a slot's state to another slot (fork).
    fn state_copy_slot(&self, state: &mut Self::State, from: u32, to: u32);
    /// Copies a page (fork of a partly filled page).
    fn state_copy_page(&self, state: &mut Self::State, from: u32, to: u32);
    /// Serialises a slot and its pages (snapshot), in a layout that [`Backend::state_import`] of the same backend kind reads.
    ///
    /// # Errors
    /// The first failed op since the last synchronisation.
    fn state_export(&self, state: &Self::State, slot: u32, pages: &[u32]) -> Result<Vec<u8>, BackendError>;
    /// Restores a snapshot into a slot and pages (as many as were exported).
    ///
    /// # Errors
    /// The snapshot does not fit this state's sizes.
    fn state_import(&self, state: &mut Self::State, slot: u32, pages: &[u32], snapshot: &[u8]) -> Result<(), BackendError>;

    // ---- ops of the trunk ---------------------------------------------------------------------------------------------

    /// `streams[r, n] = table[token[r]]` for every n. `streams` is `[R, N, D]`.
    fn embed(&self, batch: &Self::Batch, table: &Self::Weight, params: &MhcParams, streams: &mut Self::Buf);
    /// mHC pre with the RMSNorm that follows: `x` `[R, D]`, gates for [`Backend::mhc_post`].
    fn mhc_pre(&self, rows: usize, streams: &Self::Buf, w: &MhcWeights<Self>, p: &MhcParams, x: &mut Self::Buf, gates: &mut MhcGates<Self>);
    /// `streams[m] = post[m]·y + Σ_n comb[n, m]·streams[n]`, in place. `y` is `[R, D]`.
    fn mhc_post(&self, rows: usize, y: &Self::Buf, gates: &MhcGates<Self>, p: &MhcParams, streams: &mut Self::Buf);
    /// The boundary between two sublayers: post of the one, pre of the next. Devices fuse it.
    fn mhc_boundary(
        &self,
        rows: usize,
        y: &Self::Buf,
        gates: &mut MhcGates<Self>,
        next: &MhcWeights<Self>,
        p: &MhcParams,
        streams: &mut Self::Buf,
        x: &mut Self::Buf,
    ) {
        self.mhc_post(rows, y, gates, p, streams);
        self.mhc_pre(rows, streams, next, p, x, gates);
    }
    /// `out[i] = rms_norm(mean over streams of streams[select[i]], norm)`: `[select.len(), D]`.
    fn collapse(&self, select: &[u32], streams: &Self::Buf, norm: &Self::Buf, p: &MhcParams, out: &mut Self::Buf);
    /// `out[r] = x[r]·Wᵀ`: `[R, in] → [R, out]`.
    fn linear(&self, rows: usize, x: &Self::Buf, w: &Self::Weight, out: &mut Self::Buf);
    /// As [`Backend::linear`] on columns `[col0, col0 + in)` of rows that are `stride` wide (outputs of fused projections).
    fn linear_strided(&self, rows: usize, x: &Self::Buf, stride: usize, col0: usize, w: &Self::Weight, out: &mut Self::Buf);
    /// RMSNorm of columns `[col0, col0 + width)` of rows that are `stride` wide: `out` `[R, width]`.
    fn rms_norm(
        &self,
        rows: usize,
        x: &Self::Buf,
        stride: usize,
        col0: usize,
        width: usize,
        weight: &Self::Buf,
        eps: f32,
        out: &mut Self::Buf,
    );
    /// Gated MLP: `out = down(silu(min(gate, limit)) · clamp(up, ±limit))`; `gate_up` stacks gate over up (`[2I, D]`). `hidden` is
    /// scratch `[R, 2I]`.
    fn mlp(
        &self,
        rows: usize,
        x: &Self::Buf,
        gate_up: &Self::Weight,
        down: &Self::Weight,
        limit: Option<f32>,
        hidden: &mut Self::Buf,
        out: &mut Self::Buf,
    );
    /// `y += x` over `rows × width` elements.
    fn add(&self, rows: usize, width: usize, x: &Self::Buf, y: &mut Self::Buf);

    /// The KDA mixer between its projections, for decode rows and prefill chunks alike; updates conv taps and state of `layer`
    /// (dense KDA number). `proj` is `[R, proj_stride]` and starts with q, k, v (3·H·Dh); beta's H logits start at column `beta0`.
    /// `f` and `g` are `[R, H·Dh]` (f_b and g_b outputs). `out` is `[R, H·Dh]`.
    fn kda(
        &self,
        batch: &Self::Batch,
        layer: usize,
        proj: &Self::Buf,
        proj_stride: usize,
        beta0: usize,
        f: &Self::Buf,
        g: &Self::Buf,
        w: &KdaWeights<Self>,
        p: &KdaParams,
        state: &mut Self::State,
        out: &mut Self::Buf,
    );

    /// Stores the step's normed latent rows `c` `[R, latent]` into `layer`'s pages (dense MLA number).
    fn mla_append(&self, batch: &Self::Batch, layer: usize, c: &Self::Buf, state: &mut Self::State);
    /// Stores index keys: LayerNorms the raw key (columns `key0..`) and keeps it with its gate (columns `gate0..`) in the raw tail, and
    /// writes the pooled key of every pool that the step completes. `proj` rows are `stride` wide.
    fn index_append(
        &self,
        batch: &Self::Batch,
        layer: usize,
        proj: &Self::Buf,
        stride: usize,
        key0: usize,
        gate0: usize,
        w: &IndexKeyWeights<Self>,
        p: &IndexerParams,
        state: &mut Self::State,
    );
    /// Chooses the token positions each row attends to: ascending, −1 padded, `[R, width]` with `width = p.width()`; a row that sees
    /// no more than that many tokens gets them all. `iq` is `[R, heads·dim]`; the heads' weights are columns `w0..` of `proj`.
    fn index_select(
        &self,
        batch: &Self::Batch,
        layer: usize,
        iq: &Self::Buf,
        proj: &Self::Buf,
        stride: usize,
        w0: usize,
        p: &IndexerParams,
        state: &Self::State,
        selected: &mut Self::Buf,
    );
    /// Sparse MLA attention in absorbed form over the selected rows: `q` `[R, heads·qk]`, `kv_b` `[heads·(qk+v), latent]`, `out`
    /// `[R, heads·v]`.
    fn mla_attend(
        &self,
        batch: &Self::Batch,
        layer: usize,
        q: &Self::Buf,
        kv_b: &Self::Weight,
        selected: &Self::Buf,
        width: usize,
        p: &MlaParams,
        state: &Self::State,
        out: &mut Self::Buf,
    );

    // ---- mixture of experts -------------------------------------------------------------------------------------------

    /// Router: `topk_ids` `[R, k]` (i32) and `topk_weights` `[R, k]`, experts in descending biased score (ties: lowest id first).
    fn router(
        &self,
        rows: usize,
        x: &Self::Buf,
        w: &Self::Weight,
        bias: &Self::Buf,
        p: &RouterParams,
        topk_ids: &mut Self::Buf,
        topk_weights: &mut Self::Buf,
    );
    /// A shard's additive partial: `out[r] = Σ over the row's chosen experts that the bank holds of weight · expert(x[r])`, in ascending
    /// expert id; a row with none gets zeros. `ids`/`weights` are `[R, k]`; ids outside the bank are skipped.
    fn experts(
        &self,
        rows: usize,
        x: &Self::Buf,
        k: usize,
        ids: &Self::Buf,
        weights: &Self::Buf,
        bank: &Self::Bank,
        limit: Option<f32>,
        out: &mut Self::Buf,
    );

    // ---- the end of a step --------------------------------------------------------------------------------------------

    /// Samples rows of `logits` `[·, vocab]` on the device and reads the results: the one host read of a step.
    ///
    /// # Errors
    /// The first failed op of the step.
    fn sample(&self, logits: &Self::Buf, vocab: usize, rows: &[SampleRow]) -> Result<Vec<Sampled>, BackendError>;
}
