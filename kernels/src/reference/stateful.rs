//! The ops of [`ReferenceBackend`] that read or write sequence state: KDA, latent rows, index keys, selection, attention.

use super::{Buf, Matrix, Real, ReferenceBackend, State, backend::columns, indexer, kda, mla, norm};
use crate::{BatchDesc, IndexKeyWeights, IndexerParams, KdaParams, KdaWeights, MlaParams, Segment};

/// The rows of a segment with their positions in the sequence.
fn rows_of(segment: &Segment) -> impl Iterator<Item = (usize, usize)> + use<> {
    (segment.row0 as usize..).zip(segment.pos0 as usize..).take(segment.rows as usize)
}

/// The page that holds a position, and the position inside it.
fn page_of(batch: &BatchDesc, segment: &Segment, pos: usize, page_tokens: usize) -> Result<(usize, usize), String> {
    let pages = batch.pages.get(segment.pages.start as usize..segment.pages.end as usize).unwrap_or_default();
    match pages.get(pos / page_tokens) {
        Some(&page) => Ok((page as usize, pos % page_tokens)),
        None => Err(format!("position {pos} of slot {} lies past its {} pages of {page_tokens} tokens", segment.slot, pages.len())),
    }
}

impl<T: Real> ReferenceBackend<T> {
    /// See [`crate::Backend::kda`].
    pub(super) fn run_kda(
        &self,
        batch: &BatchDesc,
        layer: usize,
        proj: &Buf<T>,
        proj_stride: usize,
        beta0: usize,
        f: &Buf<T>,
        g: &Buf<T>,
        w: &KdaWeights<Self>,
        p: &KdaParams,
        state: &mut State<T>,
        out: &mut Buf<T>,
    ) -> Result<(), String> {
        let (heads, d, rows) = (p.dims.heads, p.dims.head_dim, batch.tokens.len());
        let hd = heads * d;
        let betas = columns(proj_stride, beta0, heads)?;
        let (proj, f, g) = (proj.reals(rows * proj_stride)?, f.reals(rows * hd)?, g.reals(rows * hd)?);
        let (conv, a_log) = (w.conv.reals(3 * hd * p.dims.conv)?, w.a_log.reals(heads)?);
        let (dt_bias, o_norm) = (w.dt_bias.reals(hd)?, w.o_norm.reals(d)?);
        let out = out.reals_mut(rows * hd)?;
        for segment in &batch.segments {
            let (s, taps) = state.kda_mut(segment.slot as usize, layer)?;
            for (r, _) in rows_of(segment) {
                let x = &proj[r * proj_stride..(r + 1) * proj_stride];
                let qkv = kda::conv_silu(&x[..3 * hd], conv, taps);
                let decay = kda::log_decay(&f[r * hd..(r + 1) * hd], dt_bias, a_log, p.lower_bound.map(T::of_f32));
                for (h, s) in s.chunks_exact_mut(d * d).enumerate() {
                    let part = |i: usize| qkv[i * hd + h * d..i * hd + (h + 1) * d].to_vec();
                    let beta = norm::sigmoid(x[betas.start + h]);
                    let token = kda::HeadToken { q: part(0), k: part(1), v: part(2), g: decay[h * d..(h + 1) * d].to_vec(), beta };
                    let o = kda::recurrent_step(&token, s);
                    let columns = r * hd + h * d..r * hd + (h + 1) * d;
                    out[columns.clone()].copy_from_slice(&kda::gated_norm(&o, o_norm, T::of_f32(p.eps), &g[columns]));
                }
            }
        }
        Ok(())
    }

    /// See [`crate::Backend::mla_append`].
    pub(super) fn run_mla_append(&self, batch: &BatchDesc, layer: usize, c: &Buf<T>, state: &mut State<T>) -> Result<(), String> {
        let (latent, page_tokens) = (state.spec.latent, state.spec.page_tokens);
        let c = c.reals(batch.tokens.len() * latent)?;
        for segment in &batch.segments {
            for (r, pos) in rows_of(segment) {
                let (page, index) = page_of(batch, segment, pos, page_tokens)?;
                let row = self.input(&c[r * latent..(r + 1) * latent]);
                state.latent_mut(page, layer, index)?.copy_from_slice(&row);
            }
        }
        Ok(())
    }

    /// See [`crate::Backend::index_append`].
    pub(super) fn run_index_append(
        &self,
        batch: &BatchDesc,
        layer: usize,
        proj: &Buf<T>,
        stride: usize,
        key0: usize,
        gate0: usize,
        w: &IndexKeyWeights<Self>,
        p: &IndexerParams,
        state: &mut State<T>,
    ) -> Result<(), String> {
        let (dim, kpool, page_tokens) = (p.dim, p.kpool, state.spec.page_tokens);
        let (keys_at, gates_at) = (columns(stride, key0, dim)?, columns(stride, gate0, dim)?);
        let proj = proj.reals(batch.tokens.len() * stride)?;
        let (weight, bias, ape) = (w.norm_weight.reals(dim)?, w.norm_bias.reals(dim)?, w.ape.reals(kpool * dim)?);
        for segment in &batch.segments {
            for (r, pos) in rows_of(segment) {
                let x = &proj[r * stride..(r + 1) * stride];
                let at = pos % kpool * dim..(pos % kpool + 1) * dim;
                let (keys, gates) = state.raw_mut(segment.slot as usize, layer)?;
                keys[at.clone()].copy_from_slice(&indexer::key(&x[keys_at.clone()], weight, bias));
                gates[at].copy_from_slice(&x[gates_at.clone()]);
                if pos % kpool == kpool - 1 {
                    let pooled = indexer::pooled_key(keys, gates, ape, kpool);
                    let (page, index) = page_of(batch, segment, pos, page_tokens)?;
                    state.pooled_mut(page, layer, index / kpool)?.copy_from_slice(&pooled);
                }
            }
        }
        Ok(())
    }

    /// See [`crate::Backend::index_select`].
    pub(super) fn run_index_select(
        &self,
        batch: &BatchDesc,
        layer: usize,
        iq: &Buf<T>,
        proj: &Buf<T>,
        stride: usize,
        w0: usize,
        p: &IndexerParams,
        state: &State<T>,
        selected: &mut Buf<T>,
    ) -> Result<(), String> {
        let (rows, wide, width, page_tokens) = (batch.tokens.len(), p.heads * p.dim, p.width(), state.spec.page_tokens);
        let selection = indexer::Selection { kpool: p.kpool, topk: p.topk, always_tail: p.always_tail };
        let weights_at = columns(stride, w0, p.heads)?;
        let (iq, proj) = (iq.reals(rows * wide)?, proj.reals(rows * stride)?);
        let out = selected.ids_mut(rows * width)?;
        for segment in &batch.segments {
            for (r, pos) in rows_of(segment) {
                let scores = if selection.takes_all(pos + 1) {
                    Vec::new()
                } else {
                    let (iq, weights) = (&iq[r * wide..(r + 1) * wide], &proj[r * stride..][weights_at.clone()]);
                    let score = |pool: usize| {
                        let (page, index) = page_of(batch, segment, pool * p.kpool, page_tokens)?;
                        Ok(indexer::pool_score(iq, weights, state.pooled(page, layer, index / p.kpool)?))
                    };
                    (0..(pos + 1) / p.kpool).map(score).collect::<Result<Vec<T>, String>>()?
                };
                let out = &mut out[r * width..(r + 1) * width];
                out.fill(-1);
                let positions = indexer::select(pos, &selection, |pool| scores[pool]);
                out.iter_mut().zip(positions).for_each(|(o, t)| *o = t as i32);
            }
        }
        Ok(())
    }

    /// See [`crate::Backend::mla_attend`].
    pub(super) fn run_mla_attend(
        &self,
        batch: &BatchDesc,
        layer: usize,
        q: &Buf<T>,
        kv_b: &Matrix<T>,
        selected: &Buf<T>,
        width: usize,
        p: &MlaParams,
        state: &State<T>,
        out: &mut Buf<T>,
    ) -> Result<(), String> {
        let (rows, wide, wide_v, page_tokens) = (batch.tokens.len(), p.heads * p.qk_dim, p.heads * p.v_dim, state.spec.page_tokens);
        let (q, selected, out) = (q.reals(rows * wide)?, selected.ids(rows * width)?, out.reals_mut(rows * wide_v)?);
        for segment in &batch.segments {
            for (r, _) in rows_of(segment) {
                let chosen = selected[r * width..(r + 1) * width].iter().filter(|&&t| t >= 0).map(|&t| {
                    let (page, index) = page_of(batch, segment, t as usize, page_tokens)?;
                    state.latent(page, layer, index)
                });
                let latent = chosen.collect::<Result<Vec<&[T]>, String>>()?;
                let head = mla::Head { qk: p.qk_dim, v: p.v_dim };
                let y = mla::attend_absorbed(&q[r * wide..(r + 1) * wide], &latent, &kv_b.values, head);
                out[r * wide_v..(r + 1) * wide_v].copy_from_slice(&y);
            }
        }
        Ok(())
    }
}
