//! [`Backend`] for [`CpuBackend`]: checks shapes, borrows scratch, calls the op. Ops run at once; the first failure waits for the next
//! synchronisation.

use parking_lot::MutexGuard;
use tandem_quant::MatrixSource;

use super::{
    CpuBackend, CpuBank, CpuBatch, CpuBuf, CpuState, CpuWeight,
    aligned::Aligned,
    buf::{Scratch, sized},
    checks::{check_matrix, columns, fits, index_sizes, pages, refused, shape, slot},
    decode::DecodeRow,
    disjoint::Disjoint,
    experts,
    gemm::Rows,
    indexer, kda,
    lend::{CpuRegion, CpuWindow},
    linear, meminfo, mhc, mla, router,
    rows::{Add, NormRow},
    sampler,
};
use crate::{
    Backend, BackendError, BatchDesc, DeviceInfo, Elem, ExpertSource, IndexKeyWeights, IndexerParams, KdaParams, KdaWeights, MhcGates,
    MhcParams, MhcWeights, MlaParams, Precision, RouterParams, SampleRow, Sampled, StateSpec, non_finite_rows,
};

impl CpuBackend {
    /// Runs an op; keeps the first failure.
    fn op(&self, op: &'static str, run: impl FnOnce(&mut Scratch) -> Result<(), String>) {
        let mut scratch: MutexGuard<'_, Scratch> = self.scratch.lock();
        if let Err(reason) = run(&mut scratch) {
            self.first_error.lock().get_or_insert(self.failed(op, reason));
        }
    }

    fn failed(&self, op: &'static str, reason: String) -> BackendError {
        BackendError::Op { op, device: self.info.arithmetic.clone(), reason }
    }

    /// Refuses what cannot fit before the kernel kills the process for it.
    fn room(&self, what: &str, needed: u64) -> Result<(), BackendError> {
        match meminfo("MemAvailable:") {
            Some(available) if needed > available => {
                Err(BackendError::OutOfMemory { what: what.into(), needed, available, device: self.info.arithmetic.clone() })
            }
            _ => Ok(()),
        }
    }
}

/// Elements of the scratch that all threads share for wide products and index scores.
fn wide_scratch(rows: usize, context: usize) -> usize {
    (64 * 64 * 512).min(rows.saturating_mul(64 * 512)).max(context)
}

/// Bytes of scratch for steps of up to `rows` rows and contexts of up to `context` tokens.
pub(crate) fn scratch_bytes(rows: usize, context: usize, threads: usize) -> u64 {
    let shared = (rows as u64).saturating_mul(16_384).saturating_add(wide_scratch(rows, context) as u64);
    let each = (64 << 10) + (64 << 10).max(context as u64) + 2 * context as u64;
    shared.saturating_add(each.saturating_mul(threads as u64)).saturating_mul(4)
}

impl Backend for CpuBackend {
    type Buf = CpuBuf;
    type Weight = CpuWeight;
    type State = CpuState;
    type Bank = CpuBank;
    type Batch = CpuBatch;
    type Region = CpuRegion;
    type Window = CpuWindow;

    fn device(&self) -> &DeviceInfo {
        &self.info
    }

    fn precision(&self) -> Precision {
        self.engine.precision
    }

    fn bind_thread(&self) {
        self.engine.pool.bind_caller();
    }

    fn reserve(&self, rows: usize, context: usize) -> Result<(), BackendError> {
        // Ops grow their scratch to what a shape needs and keep it; this takes the bulk of it ahead: rows of the widest products, a
        // context's index scores.
        let wide = wide_scratch(rows, context);
        self.room("scratch", scratch_bytes(rows, context, self.engine.pool.threads()))?;
        let mut scratch = self.scratch.lock();
        scratch.wide.sized(wide);
        scratch.rounded.sized(rows * 4096);
        self.engine.locals.each(|l| {
            l.a.sized(64 << 10);
            l.b.sized((64 << 10).max(context));
            sized(&mut l.keys, 2 * context);
        });
        Ok(())
    }

    fn alloc(&self, what: &str, elem: Elem, len: usize) -> Result<CpuBuf, BackendError> {
        self.room(what, len as u64 * 4)?;
        Ok(match elem {
            Elem::F32 => CpuBuf::of_f32(Aligned::zeroed(len)),
            Elem::I32 => CpuBuf::of_i32(vec![0; len]),
        })
    }

    fn upload(&self, src: &[f32], dst: &mut CpuBuf, offset: usize) {
        self.op("upload", |_| {
            dst.f32s_mut(offset + src.len())?[offset..].copy_from_slice(src);
            Ok(())
        });
    }

    fn upload_i32(&self, src: &[i32], dst: &mut CpuBuf, offset: usize) {
        self.op("upload_i32", |_| {
            dst.i32s_mut(offset + src.len())?[offset..].copy_from_slice(src);
            Ok(())
        });
    }

    fn download(&self, src: &CpuBuf, offset: usize, dst: &mut [f32]) -> Result<(), BackendError> {
        self.sync()?;
        let src = src.f32s(offset + dst.len()).map_err(|e| self.failed("download", e))?;
        dst.copy_from_slice(&src[offset..]);
        Ok(())
    }

    fn download_i32(&self, src: &CpuBuf, offset: usize, dst: &mut [i32]) -> Result<(), BackendError> {
        self.sync()?;
        let src = src.i32s(offset + dst.len()).map_err(|e| self.failed("download_i32", e))?;
        dst.copy_from_slice(&src[offset..]);
        Ok(())
    }

    fn non_finite(&self, rows: usize, width: usize, x: &CpuBuf) -> Result<Vec<u32>, BackendError> {
        self.sync()?;
        let x = x.f32s(rows * width).map_err(|e| self.failed("non_finite", e))?;
        Ok(non_finite_rows(&x[..rows * width], width))
    }

    fn sync(&self) -> Result<(), BackendError> {
        self.first_error.lock().take().map_or(Ok(()), Err)
    }

    fn lend(&self, len: usize) -> Result<Option<CpuRegion>, BackendError> {
        self.room("memory to share", len as u64 * 4)?;
        CpuRegion::new(self.engine.precision, len).map(Some).map_err(|e| self.failed("lend", e.to_string()))
    }

    fn handle(&self, region: &CpuRegion) -> Vec<u8> {
        region.handle().as_bytes().to_vec()
    }

    fn open(&self, handle: &[u8]) -> Result<CpuWindow, String> {
        CpuWindow::open(self.engine.precision, handle)
    }

    fn put(&self, len: usize, x: &CpuBuf, from: usize, region: &CpuRegion, at: usize) {
        self.op("put", |_| region.write(at, &x.f32s(from + len)?[from..]));
    }

    fn take(&self, len: usize, window: &CpuWindow, at: usize, out: &mut CpuBuf, to: usize) {
        self.op("take", |_| window.read(at, &mut out.f32s_mut(to + len)?[to..], |out, v| *out = v));
    }

    fn take_sum(&self, len: usize, window: &CpuWindow, at: usize, out: &mut CpuBuf, to: usize) {
        self.op("take_sum", |_| window.read(at, &mut out.f32s_mut(to + len)?[to..], |out, v| *out += v));
    }

    fn read_back(&self, region: &CpuRegion, at: usize, out: &mut [f32]) -> Result<(), BackendError> {
        self.sync()?;
        region.read(at, out).map_err(|e| self.failed("read_back", e))
    }

    fn weight(&self, parts: &[MatrixSource]) -> Result<CpuWeight, BackendError> {
        parts.iter().try_for_each(check_matrix)?;
        CpuWeight::new(parts)
            .map_err(|reason| BackendError::Weight { tensor: parts.last().map_or_else(String::new, |m| m.name().to_owned()), reason })
    }

    fn vector(&self, _what: &str, values: &[f32]) -> Result<CpuBuf, BackendError> {
        Ok(CpuBuf::of_f32(Aligned::copied(values)))
    }

    fn bank(&self, first: u32, experts: Vec<ExpertSource>) -> Result<CpuBank, BackendError> {
        let (hidden, inter) = experts.first().map_or((0, 0), |e| (e.gate.cols(), e.gate.rows()));
        for e in &experts {
            for (m, rows, cols) in [(&e.gate, inter, hidden), (&e.up, inter, hidden), (&e.down, hidden, inter)] {
                check_matrix(m)?;
                if (m.rows(), m.cols()) != (rows, cols) {
                    return Err(refused(m, format!("shape [{}, {}] where [{rows}, {cols}] is needed", m.rows(), m.cols())));
                }
            }
        }
        Ok(CpuBank { first, experts, inter, hidden })
    }

    fn state(&self, spec: &StateSpec) -> Result<CpuState, BackendError> {
        if spec.kpool == 0 || spec.page_tokens == 0 || !spec.page_tokens.is_multiple_of(spec.kpool) {
            let reason = format!("pages of {} tokens are no multiple of pools of {}", spec.page_tokens, spec.kpool);
            return Err(self.failed("state", reason));
        }
        self.room("sequence state", CpuState::bytes(spec, self.engine.latents))?;
        Ok(CpuState::new(spec, self.engine.latents))
    }

    fn batch(&self, max_rows: usize, max_segments: usize, max_pages: usize) -> Result<CpuBatch, BackendError> {
        let desc = BatchDesc {
            tokens: Vec::with_capacity(max_rows),
            segments: Vec::with_capacity(max_segments),
            pages: Vec::with_capacity(max_pages),
        };
        Ok(CpuBatch { desc, slots: Vec::with_capacity(max_segments) })
    }

    fn set_batch(&self, desc: &BatchDesc, batch: &mut CpuBatch) {
        self.op("set_batch", |_| batch.set(desc).inspect_err(|_| *batch = CpuBatch::default()));
    }

    fn prefill_grid(&self, p: &KdaParams) -> Option<usize> {
        Some(kda::grid(p))
    }

    fn cut(&self, p: &KdaParams, _rows: usize, at: usize) -> usize {
        at - at % kda::grid(p)
    }

    fn state_reset(&self, state: &mut CpuState, id: u32) {
        self.op("state_reset", |_| {
            slot(state, id)?;
            state.reset(id);
            Ok(())
        });
    }

    fn state_copy_slot(&self, state: &mut CpuState, from: u32, to: u32) {
        self.op("state_copy_slot", |_| {
            slot(state, from)?;
            slot(state, to)?;
            state.copy_slot(from, to);
            Ok(())
        });
    }

    fn state_copy_page(&self, state: &mut CpuState, from: u32, to: u32) {
        self.op("state_copy_page", |_| {
            pages(state, &[from, to])?;
            state.copy_page(from, to);
            Ok(())
        });
    }

    fn state_export(&self, state: &CpuState, id: u32, page_ids: &[u32]) -> Result<Vec<u8>, BackendError> {
        self.sync()?;
        slot(state, id).and_then(|()| pages(state, page_ids)).map_err(|e| self.failed("state_export", e))?;
        Ok(state.export(id, page_ids))
    }

    fn state_import(&self, state: &mut CpuState, id: u32, page_ids: &[u32], snapshot: &[u8]) -> Result<(), BackendError> {
        slot(state, id)
            .and_then(|()| pages(state, page_ids))
            .and_then(|()| state.import(id, page_ids, snapshot))
            .map_err(|e| self.failed("state_import", e))
    }

    fn embed(&self, batch: &CpuBatch, table: &CpuWeight, p: &MhcParams, streams: &mut CpuBuf) {
        self.op("embed", |_| {
            let (n, d) = (p.streams, p.hidden);
            shape("embedding", table, table.out, d)?;
            let out = streams.f32s_mut(batch.desc.tokens.len() * n * d)?;
            for (&token, out) in batch.desc.tokens.iter().zip(out.chunks_exact_mut(n * d)) {
                if token as usize >= table.out {
                    return Err(format!("token {token} is not one of {}", table.out));
                }
                let (first, rest) = out.split_at_mut(d);
                table.pieces(token as usize, 1, |m, row, _, _| self.engine.isa.run(DecodeRow { m, row, out: &mut *first }));
                rest.chunks_exact_mut(d).for_each(|o| o.copy_from_slice(first));
            }
            Ok(())
        });
    }

    fn mhc_pre(&self, rows: usize, streams: &CpuBuf, w: &MhcWeights<Self>, p: &MhcParams, x: &mut CpuBuf, gates: &mut MhcGates<Self>) {
        self.op("mhc_pre", |scratch| {
            let (n, d) = (p.streams, p.hidden);
            if n == 0 || n > mhc::MAX_STREAMS {
                return Err(format!("{n} streams; 1 to {} work", mhc::MAX_STREAMS));
            }
            shape("fn", &w.fn_, n * (n + 2), n * d)?;
            let site = mhc::Site { fn_: &w.fn_, base: w.base.f32s(n * (n + 2))?, scale: w.scale.f32s(3)?, norm: w.norm.f32s(d)? };
            let gates = mhc::Gates { post: gates.post.f32s_mut(rows * n)?, comb: gates.comb.f32s_mut(rows * n * n)? };
            mhc::pre(&self.engine, &mut scratch.wide, rows, streams.f32s(rows * n * d)?, &site, p, x.f32s_mut(rows * d)?, gates);
            Ok(())
        });
    }

    fn mhc_post(&self, rows: usize, y: &CpuBuf, gates: &MhcGates<Self>, p: &MhcParams, streams: &mut CpuBuf) {
        self.op("mhc_post", |_| {
            let (n, d) = (p.streams, p.hidden);
            if n == 0 || n > mhc::MAX_STREAMS {
                return Err(format!("{n} streams; 1 to {} work", mhc::MAX_STREAMS));
            }
            let (post, comb) = (gates.post.f32s(rows * n)?, gates.comb.f32s(rows * n * n)?);
            mhc::post(&self.engine, rows, y.f32s(rows * d)?, post, comb, p, streams.f32s_mut(rows * n * d)?);
            Ok(())
        });
    }

    fn collapse(&self, select: &[u32], streams: &CpuBuf, norm: &CpuBuf, p: &MhcParams, out: &mut CpuBuf) {
        self.op("collapse", |_| {
            let (n, d) = (p.streams, p.hidden);
            let norm = norm.f32s(d)?;
            let all = streams.f32s(select.iter().max().map_or(0, |&r| (r as usize + 1) * n * d))?;
            for (&r, out) in select.iter().zip(out.f32s_mut(select.len() * d)?.chunks_exact_mut(d)) {
                let streams = &all[r as usize * n * d..(r as usize + 1) * n * d];
                self.engine.isa.run(mhc::Collapse { streams, norm, p, out });
            }
            Ok(())
        });
    }

    fn linear(&self, rows: usize, x: &CpuBuf, w: &CpuWeight, out: &mut CpuBuf) {
        self.linear_strided(rows, x, w.cols, 0, w, out);
    }

    fn linear_strided(&self, rows: usize, x: &CpuBuf, stride: usize, col0: usize, w: &CpuWeight, out: &mut CpuBuf) {
        self.op("linear", |scratch| {
            columns(stride, col0, w.cols)?;
            let x = Rows { data: x.f32s(rows * stride)?, stride, col0, index: None };
            let x = linear::inputs(&self.engine, &mut scratch.rounded, rows, w.cols, x);
            linear::product(&self.engine, rows, x, w, out.f32s_mut(rows * w.out)?, w.out);
            Ok(())
        });
    }

    fn rms_norm(&self, rows: usize, x: &CpuBuf, stride: usize, col0: usize, width: usize, weight: &CpuBuf, eps: f32, out: &mut CpuBuf) {
        self.op("rms_norm", |_| {
            columns(stride, col0, width)?;
            let (x, weight) = (x.f32s(rows * stride)?, weight.f32s(width)?);
            let out = Disjoint::new(out.f32s_mut(rows * width)?);
            self.engine.pool.run(rows, rows * width / 2, |_, r| {
                // SAFETY: each row is one item's.
                let out = unsafe { out.range(r * width..(r + 1) * width) };
                self.engine.isa.run(NormRow { x: &x[r * stride + col0..r * stride + col0 + width], weight, eps, out });
            });
            Ok(())
        });
    }

    fn mlp(
        &self,
        rows: usize,
        x: &CpuBuf,
        gate_up: &CpuWeight,
        down: &CpuWeight,
        limit: Option<f32>,
        hidden: &mut CpuBuf,
        out: &mut CpuBuf,
    ) {
        self.op("mlp", |scratch| {
            let (d, inter) = (gate_up.cols, down.cols);
            shape("gate_up", gate_up, 2 * inter, d)?;
            let (x, hidden) = (Rows::dense(x.f32s(rows * d)?, d), hidden.f32s_mut(rows * 2 * inter)?);
            let out = out.f32s_mut(rows * down.out)?;
            linear::mlp(&self.engine, &mut scratch.rounded, rows, x, gate_up, down, limit, hidden, out);
            Ok(())
        });
    }

    fn add(&self, rows: usize, width: usize, x: &CpuBuf, y: &mut CpuBuf) {
        self.op("add", |_| {
            self.engine.isa.run(Add { x: x.f32s(rows * width)?, y: y.f32s_mut(rows * width)? });
            Ok(())
        });
    }

    fn kda(
        &self,
        batch: &CpuBatch,
        layer: usize,
        proj: &CpuBuf,
        proj_stride: usize,
        beta0: usize,
        f: &CpuBuf,
        g: &CpuBuf,
        w: &KdaWeights<Self>,
        p: &KdaParams,
        state: &mut CpuState,
        out: &mut CpuBuf,
    ) {
        self.op("kda", |_| {
            let (heads, d, rows) = (p.dims.heads, p.dims.head_dim, batch.desc.tokens.len());
            let hd = heads * d;
            fits(batch, state, layer, state.spec.kda_layers)?;
            if state.spec.kda != p.dims || p.dims.conv == 0 {
                return Err(format!("sizes {:?} where the state has {:?}", p.dims, state.spec.kda));
            }
            columns(proj_stride, 0, 3 * hd)?;
            columns(proj_stride, beta0, heads)?;
            let inputs = kda::Inputs {
                proj: proj.f32s(rows * proj_stride)?,
                proj_stride,
                beta0,
                f: f.f32s(rows * hd)?,
                g: g.f32s(rows * hd)?,
                conv: w.conv.f32s(3 * hd * p.dims.conv)?,
                a_log: w.a_log.f32s(heads)?,
                dt_bias: w.dt_bias.f32s(hd)?,
                o_norm: w.o_norm.f32s(d)?,
            };
            kda::kda(&self.engine, batch, layer, &inputs, p, state, out.f32s_mut(rows * hd)?);
            Ok(())
        });
    }

    fn mla_append(&self, batch: &CpuBatch, layer: usize, c: &CpuBuf, state: &mut CpuState) {
        self.op("mla_append", |_| {
            fits(batch, state, layer, state.spec.mla_layers)?;
            mla::append(batch, layer, c.f32s(batch.desc.tokens.len() * state.spec.latent)?, state)
        });
    }

    fn index_append(
        &self,
        batch: &CpuBatch,
        layer: usize,
        proj: &CpuBuf,
        stride: usize,
        key0: usize,
        gate0: usize,
        w: &IndexKeyWeights<Self>,
        p: &IndexerParams,
        state: &mut CpuState,
    ) {
        self.op("index_append", |scratch| {
            fits(batch, state, layer, state.spec.mla_layers)?;
            index_sizes(p, state)?;
            columns(stride, key0, p.dim)?;
            columns(stride, gate0, p.dim)?;
            let inputs = indexer::AppendInputs {
                proj: proj.f32s(batch.desc.tokens.len() * stride)?,
                stride,
                key0,
                gate0,
                norm_weight: w.norm_weight.f32s(p.dim)?,
                norm_bias: w.norm_bias.f32s(p.dim)?,
                ape: w.ape.f32s(p.kpool * p.dim)?,
            };
            indexer::append(&self.engine, &mut scratch.wide, batch, layer, &inputs, p, state)
        });
    }

    fn index_select(
        &self,
        batch: &CpuBatch,
        layer: usize,
        iq: &CpuBuf,
        proj: &CpuBuf,
        stride: usize,
        w0: usize,
        p: &IndexerParams,
        state: &CpuState,
        selected: &mut CpuBuf,
    ) {
        self.op("index_select", |scratch| {
            let rows = batch.desc.tokens.len();
            fits(batch, state, layer, state.spec.mla_layers)?;
            index_sizes(p, state)?;
            columns(stride, w0, p.heads)?;
            let inputs = indexer::SelectInputs { iq: iq.f32s(rows * p.heads * p.dim)?, proj: proj.f32s(rows * stride)?, stride, w0 };
            let out = selected.i32s_mut(rows * p.width())?;
            indexer::select(&self.engine, &mut scratch.wide, batch, layer, &inputs, p, state, out)
        });
    }

    fn mla_attend(
        &self,
        batch: &CpuBatch,
        layer: usize,
        q: &CpuBuf,
        kv_b: &CpuWeight,
        selected: &CpuBuf,
        width: usize,
        p: &MlaParams,
        state: &CpuState,
        out: &mut CpuBuf,
    ) {
        self.op("mla_attend", |scratch| {
            let rows = batch.desc.tokens.len();
            fits(batch, state, layer, state.spec.mla_layers)?;
            if p.latent != state.spec.latent {
                return Err(format!("latents of {} where the cache has {}", p.latent, state.spec.latent));
            }
            shape("kv_b", kv_b, p.heads * (p.qk_dim + p.v_dim), p.latent)?;
            let inputs = mla::Inputs { q: q.f32s(rows * p.heads * p.qk_dim)?, kv_b, selected: selected.i32s(rows * width)?, width };
            mla::attend(&self.engine, &mut scratch.wide, batch, layer, &inputs, p, state, out.f32s_mut(rows * p.heads * p.v_dim)?)
        });
    }

    fn router(
        &self,
        rows: usize,
        x: &CpuBuf,
        w: &CpuWeight,
        bias: &CpuBuf,
        p: &RouterParams,
        topk_ids: &mut CpuBuf,
        topk_weights: &mut CpuBuf,
    ) {
        self.op("router", |scratch| {
            let (e, k) = (p.experts, p.topk);
            shape("router", w, e, w.cols)?;
            if k > e || p.groups == 0 || !e.is_multiple_of(p.groups) {
                return Err(format!("{k} of {e} experts in {} groups", p.groups));
            }
            let bias = bias.f32s(e)?;
            let x = Rows::dense(x.f32s(rows * w.cols)?, w.cols);
            let logits = scratch.wide.sized(rows * e);
            linear::product(&self.engine, rows, x, w, logits, e);
            let (ids, weights) = (Disjoint::new(topk_ids.i32s_mut(rows * k)?), Disjoint::new(topk_weights.f32s_mut(rows * k)?));
            let logits = Disjoint::new(logits);
            self.engine.pool.run(rows, rows * e * (k + 4), |worker, r| {
                let local = &mut *self.engine.locals.of(worker);
                // SAFETY: each row is one item's.
                let (logits, ids, weights) =
                    unsafe { (logits.range(r * e..(r + 1) * e), ids.range(r * k..(r + 1) * k), weights.range(r * k..(r + 1) * k)) };
                self.engine.isa.run(router::Route { logits, bias, p, keys: &mut local.keys, biased: &mut local.b, ids, weights });
            });
            Ok(())
        });
    }

    fn experts(
        &self,
        rows: usize,
        x: &CpuBuf,
        k: usize,
        ids: &CpuBuf,
        weights: &CpuBuf,
        bank: &CpuBank,
        limit: Option<f32>,
        out: &mut CpuBuf,
    ) {
        self.op("experts", |scratch| {
            if bank.experts.is_empty() {
                out.clear();
                return Ok(());
            }
            let d = bank.hidden;
            let (ids, weights) = (ids.i32s(rows * k)?, weights.f32s(rows * k)?);
            experts::experts(&self.engine, scratch, rows, x.f32s(rows * d)?, k, ids, weights, bank, limit, out.f32s_mut(rows * d)?);
            Ok(())
        });
    }

    fn sample(&self, logits: &CpuBuf, vocab: usize, rows: &[SampleRow]) -> Result<Vec<Sampled>, BackendError> {
        self.sync()?;
        for row in rows {
            let ids = row.seen.iter().map(|s| s.0).chain(row.bias.iter().map(|b| b.0)).chain(row.forced);
            if let Some(id) = ids.into_iter().find(|&id| id as usize >= vocab) {
                return Err(self.failed("sample", format!("token {id} is not one of {vocab}")));
            }
        }
        let need = rows.iter().map(|r| (r.row as usize + 1) * vocab).max().unwrap_or(0);
        let logits = logits.f32s(need).map_err(|e| self.failed("sample", e))?;
        let mut out = vec![Sampled { token: 0, logprob: 0.0, rank: 0, top: Vec::new(), finite: false }; rows.len()];
        {
            let out = Disjoint::new(&mut out);
            self.engine.pool.run(rows.len(), rows.len() * vocab * 4, |worker, i| {
                let row = &rows[i];
                let at = row.row as usize * vocab;
                // SAFETY: each place is one item's.
                let out = unsafe { out.range(i..i + 1) };
                out[0] = sampler::sample(self.engine.isa, &logits[at..at + vocab], row, &mut self.samplers[worker].lock());
            });
        }
        Ok(out)
    }
}
