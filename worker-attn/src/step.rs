//! One step of the whole trunk, written once over the backend and the hop.
//!
//! Neighbours: `engine/` forms the batch and emits what was sampled; `micro_batch.rs` cuts it; `layers/` enqueue the blocks; `hop/` carries the
//! routed rows.
//!
//! ```text
//! embed ─ mhc ┬ mixer (kda | mla+dsa) ─ mhc ─ ffn (dense | moe) ─ mhc ┬ … ─ head ─ sample
//!             └───────────────────── per layer ───────────────────────┘
//! moe:  route ─ submit ─┬─ remote shards ──────┬─ collect: Σ partials by shard id ─ + shared
//!                       └─ shared, local shards┘
//! two micro-batches:  begin A(l) ─ begin B(l) ─ end A(l), begin A(l+1) ─ end B(l), begin B(l+1) ─ …
//! ```
//!
//! A micro-batch's routed rows are away from the beginning of a layer to its end; the other one's mixer runs meanwhile.

use std::ops::Range;

use tandem_kernels::{Backend, BackendError, SampleRow, Sampled};

use crate::{
    dims::Dims,
    hop::{Hop, HopError, LocalPartials, RoutedRows},
    layers::Cx,
    local::LocalShards,
    micro_batch::{MICRO_BATCHES, MicroBatches},
    observe::Observer,
    weights::{Ffn, Mixer, Moe, Weights},
};

/// A step under way.
pub struct Step<'a, B: Backend> {
    /// The device.
    pub b: &'a B,
    /// Sizes.
    pub d: &'a Dims,
    /// Sequence state.
    pub state: &'a mut B::State,
    /// The step's rows.
    pub micro: &'a mut MicroBatches<B>,
}

impl<B: Backend> Step<'_, B> {
    fn cx(&mut self, i: usize) -> Cx<'_, B> {
        self.micro.cx(self.b, self.d, self.state, i)
    }

    /// The micro-batch of a row of the step, and its place there.
    fn place(&self, row: usize) -> (usize, usize) {
        let i = (0..self.micro.used()).rfind(|i| self.micro.rows(*i).start <= row).unwrap_or(0);
        (i, row - self.micro.rows(i).start)
    }
}

/// Embeds the step's rows and runs them through all layers; what is left in the streams goes to [`logits`] or [`sample`].
///
/// # Errors
/// The device or the hop: every sequence of the step must then be ended or begun anew, its state is half-updated.
pub fn trunk<B: Backend, H: Hop<B>, O: Observer<B>>(
    w: &Weights<B>,
    local: &LocalShards<B>,
    step: &mut Step<'_, B>,
    hop: &mut H,
    observer: &mut O,
) -> Result<(), HopError> {
    for micro in 0..step.micro.used() {
        let cx = &mut step.cx(micro);
        cx.b.embed(cx.batch, &w.embed, &cx.d.mhc, &mut cx.buf.streams);
        observer.embedded(cx);
        if let Some(first) = w.layers.first() {
            cx.mhc_open(&first.attn_hc);
        }
    }
    for layer in 0..=w.layers.len() {
        for micro in 0..step.micro.used() {
            let cx = &mut step.cx(micro);
            if let Some(before) = layer.checked_sub(1) {
                end(w, local, before, cx, hop, observer)?;
            }
            if layer < w.layers.len() {
                begin(w, local, layer, cx, hop, observer)?;
            }
        }
    }
    Ok(())
}

/// A layer up to where its routed rows are away, or a dense FFN's output is there.
fn begin<B: Backend, H: Hop<B>, O: Observer<B>>(
    w: &Weights<B>,
    local: &LocalShards<B>,
    i: usize,
    cx: &mut Cx<'_, B>,
    hop: &mut H,
    observer: &mut O,
) -> Result<(), HopError> {
    let layer = &w.layers[i];
    match &layer.mixer {
        Mixer::Kda(kda) => kda.forward(cx),
        Mixer::Mla(mla) => mla.forward(cx),
    }
    observer.mixer(cx, i);
    cx.mhc_boundary(&layer.ffn_hc);
    match &layer.ffn {
        Ffn::Dense(mlp) => mlp.forward_dense(cx),
        Ffn::Moe(experts) => send(experts, local, i, cx, hop, observer)?,
    }
    Ok(())
}

/// The rest of a layer, up to the next one's input.
fn end<B: Backend, H: Hop<B>, O: Observer<B>>(
    w: &Weights<B>,
    local: &LocalShards<B>,
    i: usize,
    cx: &mut Cx<'_, B>,
    hop: &mut H,
    observer: &mut O,
) -> Result<(), HopError> {
    if let Ffn::Moe(_) = w.layers[i].ffn {
        receive(local, i, cx, hop)?;
    }
    observer.ffn(cx, i);
    match w.layers.get(i + 1) {
        Some(next) => cx.mhc_boundary(&next.attn_hc),
        None => cx.mhc_close(),
    }
    observer.layer(cx, i);
    Ok(())
}

/// x to the routed experts, wherever they are, and through the shared expert, which runs while the rows are away.
fn send<B: Backend, H: Hop<B>, O: Observer<B>>(
    w: &Moe<B>,
    local: &LocalShards<B>,
    layer: usize,
    cx: &mut Cx<'_, B>,
    hop: &mut H,
    observer: &mut O,
) -> Result<(), HopError> {
    let (micro, first, rows, hidden, topk) = (cx.micro, cx.first, cx.rows, cx.d.hidden, cx.d.router.topk);
    w.router.forward(cx);
    observer.routed(cx, layer);
    let buf = &*cx.buf;
    let routed = RoutedRows { layer, micro, first, rows, hidden, topk, x: &buf.x, ids: &buf.topk_ids, weights: &buf.topk_weights };
    hop.submit(cx.b, &routed)?;
    w.shared.forward_shared(cx);
    local.forward(layer, cx)
}

/// The experts' sum → y.
fn receive<B: Backend, H: Hop<B>>(local: &LocalShards<B>, layer: usize, cx: &mut Cx<'_, B>, hop: &mut H) -> Result<(), HopError> {
    let (micro, rows, hidden) = (cx.micro, cx.rows, cx.d.hidden);
    let buf = &mut *cx.buf;
    let local = LocalPartials { shards: local.shards(layer), partials: &mut buf.partials };
    hop.collect(cx.b, micro, rows, hidden, local, &mut buf.y)?;
    cx.b.add(rows, hidden, &buf.shared, &mut buf.y);
    Ok(())
}

/// Samples rows of the step; `samples[i].row` is a row of the step. Logits are made in groups, so that a prompt's logprobs need no
/// buffer for the whole prompt.
///
/// # Errors
/// The first failed op of the step.
pub fn sample<B: Backend, O: Observer<B>>(
    w: &Weights<B>,
    step: &mut Step<'_, B>,
    samples: Vec<SampleRow>,
    observer: &mut O,
) -> Result<Vec<Sampled>, BackendError> {
    if samples.is_empty() {
        step.b.sync()?;
    }
    let mut parts = <[(Vec<usize>, Vec<SampleRow>); MICRO_BATCHES]>::default();
    let mut out = vec![None; samples.len()];
    for (place, mut sample) in samples.into_iter().enumerate() {
        let (micro, row) = step.place(sample.row as usize);
        sample.row = row as u32;
        parts[micro].0.push(place);
        parts[micro].1.push(sample);
    }
    for (micro, (places, mut samples)) in parts.into_iter().enumerate() {
        let cx = &mut step.cx(micro.min(step.micro.used() - 1));
        let mut places = places.into_iter();
        for group in samples.chunks_mut(cx.buf.logit_rows) {
            let select: Vec<u32> = group.iter().map(|s| s.row).collect();
            w.head.forward(cx, &select);
            observer.head(cx, &select);
            for (place, sample) in group.iter_mut().enumerate() {
                sample.row = place as u32;
            }
            for (sampled, place) in cx.b.sample(&cx.buf.logits, cx.d.vocab, group)?.into_iter().zip(&mut places) {
                out[place] = Some(sampled);
            }
        }
    }
    Ok(out.into_iter().flatten().collect())
}

/// How many of the rows in each of `watched` ended the trunk with a NaN or an infinity. What a row writes into any state shows in its own
/// streams' end: it comes from them, and the row itself attends to it.
///
/// # Errors
/// The first failed op of the step.
pub fn non_finite<B: Backend>(step: &mut Step<'_, B>, watched: &[Range<usize>]) -> Result<Vec<usize>, BackendError> {
    let mut bad = vec![0; watched.len()];
    if watched.is_empty() {
        return Ok(bad);
    }
    for micro in 0..step.micro.used() {
        let cx = &mut step.cx(micro);
        for row in cx.b.non_finite(cx.rows, cx.d.mhc.streams * cx.d.hidden, &cx.buf.streams)? {
            let row = cx.first + row as usize;
            for (_, bad) in watched.iter().zip(&mut bad).filter(|(rows, _)| rows.contains(&row)) {
                *bad += 1;
            }
        }
    }
    Ok(bad)
}

/// Logits of every row of the step, `[R, V]`, row-major.
///
/// # Errors
/// The first failed op of the step.
pub fn logits<B: Backend, O: Observer<B>>(w: &Weights<B>, step: &mut Step<'_, B>, observer: &mut O) -> Result<Vec<f32>, BackendError> {
    let mut all = Vec::new();
    for micro in 0..step.micro.used() {
        let cx = &mut step.cx(micro);
        let mut out = vec![0.0; cx.rows * cx.d.vocab];
        let rows: Vec<u32> = (0..cx.rows as u32).collect();
        for (group, out) in rows.chunks(cx.buf.logit_rows).zip(out.chunks_mut(cx.buf.logit_rows * cx.d.vocab)) {
            w.head.forward(cx, group);
            observer.head(cx, group);
            cx.b.download(&cx.buf.logits, 0, out)?;
        }
        all.append(&mut out);
    }
    Ok(all)
}
