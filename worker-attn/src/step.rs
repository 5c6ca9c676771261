//! One step of the whole trunk, written once over the backend and the hop.
//!
//! Neighbours: `engine/` forms the batch and emits what was sampled; `layers/` enqueue the blocks; `hop/` carries the routed rows.
//!
//! ```text
//! embed ─ mhc ┬ mixer (kda | mla+dsa) ─ mhc ─ ffn (dense | moe) ─ mhc ┬ … ─ head ─ sample
//!             └───────────────────── per layer ───────────────────────┘
//! moe:  route ─ submit ─┬─ remote shards ──────┬─ collect: Σ partials by shard id ─ + shared
//!                       └─ shared, local shards┘
//! ```

use std::ops::Range;

use tandem_kernels::{Backend, BackendError, SampleRow, Sampled};

use crate::{
    hop::{Hop, HopError, LocalPartials, RoutedRows},
    layers::Cx,
    local::LocalShards,
    observe::Observer,
    weights::{Ffn, Mixer, Moe, Weights},
};

/// Embeds the step's rows and runs them through all layers; what is left in the streams goes to [`logits`] or [`sample`].
///
/// # Errors
/// The device or the hop: every sequence of the step must then be ended or begun anew, its state is half-updated.
pub fn trunk<B: Backend, H: Hop<B>, O: Observer<B>>(
    w: &Weights<B>,
    local: &LocalShards<B>,
    cx: &mut Cx<'_, B>,
    hop: &mut H,
    observer: &mut O,
) -> Result<(), HopError> {
    cx.b.embed(cx.batch, &w.embed, &cx.d.mhc, &mut cx.buf.streams);
    observer.embedded(cx);
    for (i, layer) in w.layers.iter().enumerate() {
        if i == 0 {
            cx.mhc_open(&layer.attn_hc);
        }
        match &layer.mixer {
            Mixer::Kda(kda) => kda.forward(cx),
            Mixer::Mla(mla) => mla.forward(cx),
        }
        observer.mixer(cx, i);
        cx.mhc_boundary(&layer.ffn_hc);
        match &layer.ffn {
            Ffn::Dense(mlp) => mlp.forward_dense(cx),
            Ffn::Moe(experts) => moe(experts, local, i, cx, hop, observer)?,
        }
        observer.ffn(cx, i);
        match w.layers.get(i + 1) {
            Some(next) => cx.mhc_boundary(&next.attn_hc),
            None => cx.mhc_close(),
        }
        observer.layer(cx, i);
    }
    Ok(())
}

/// x → y through the routed experts, wherever they are, and the shared expert, which runs while the rows are away.
fn moe<B: Backend, H: Hop<B>, O: Observer<B>>(
    w: &Moe<B>,
    local: &LocalShards<B>,
    layer: usize,
    cx: &mut Cx<'_, B>,
    hop: &mut H,
    observer: &mut O,
) -> Result<(), HopError> {
    let (rows, hidden, topk) = (cx.rows, cx.d.hidden, cx.d.router.topk);
    w.router.forward(cx);
    observer.routed(cx, layer);
    let buf = &*cx.buf;
    hop.submit(cx.b, &RoutedRows { layer, rows, hidden, topk, x: &buf.x, ids: &buf.topk_ids, weights: &buf.topk_weights })?;
    w.shared.forward_shared(cx);
    let shards = local.forward(layer, cx)?;
    let buf = &mut *cx.buf;
    hop.collect(cx.b, rows, hidden, LocalPartials { shards, partials: &mut buf.partials }, &mut buf.y)?;
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
    cx: &mut Cx<'_, B>,
    samples: &mut [SampleRow],
    observer: &mut O,
) -> Result<Vec<Sampled>, BackendError> {
    let mut out = Vec::with_capacity(samples.len());
    for group in samples.chunks_mut(cx.buf.logit_rows) {
        let select: Vec<u32> = group.iter().map(|s| s.row).collect();
        w.head.forward(cx, &select);
        observer.head(cx, &select);
        for (place, sample) in group.iter_mut().enumerate() {
            sample.row = place as u32;
        }
        out.extend(cx.b.sample(&cx.buf.logits, cx.d.vocab, group)?);
    }
    if samples.is_empty() {
        cx.b.sync()?;
    }
    Ok(out)
}

/// How many of the rows in each of `watched` ended the trunk with a NaN or an infinity. What a row writes into any state shows in its own
/// end: it comes from the row's streams, and the row itself attends to it.
///
/// # Errors
/// The first failed op of the step.
pub fn non_finite<B: Backend>(w: &Weights<B>, cx: &mut Cx<'_, B>, watched: &[Range<usize>]) -> Result<Vec<usize>, BackendError> {
    let (hidden, group) = (cx.d.hidden, cx.buf.logit_rows);
    let mut host = vec![0.0; if watched.is_empty() { 0 } else { group * hidden }];
    let mut bad = Vec::with_capacity(watched.len());
    for rows in watched {
        let mut count = 0;
        for first in rows.clone().step_by(group) {
            let select: Vec<u32> = (first..rows.end.min(first + group)).map(|row| row as u32).collect();
            w.head.collapse(cx, &select);
            let host = &mut host[..select.len() * hidden];
            cx.b.download(&cx.buf.last, 0, host)?;
            count += host.chunks_exact(hidden).filter(|row| row.iter().any(|v| !v.is_finite())).count();
        }
        bad.push(count);
    }
    Ok(bad)
}

/// Logits of every row of the step, `[R, V]`, row-major.
///
/// # Errors
/// The first failed op of the step.
pub fn logits<B: Backend, O: Observer<B>>(w: &Weights<B>, cx: &mut Cx<'_, B>, observer: &mut O) -> Result<Vec<f32>, BackendError> {
    let mut out = vec![0.0; cx.rows * cx.d.vocab];
    let rows: Vec<u32> = (0..cx.rows as u32).collect();
    for (group, out) in rows.chunks(cx.buf.logit_rows).zip(out.chunks_mut(cx.buf.logit_rows * cx.d.vocab)) {
        w.head.forward(cx, group);
        observer.head(cx, group);
        cx.b.download(&cx.buf.logits, 0, out)?;
    }
    Ok(out)
}
