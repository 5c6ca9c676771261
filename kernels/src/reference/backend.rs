//! [`ReferenceBackend`]: the trait over plain vectors, one row after the other, on the functions beside this file.

use std::convert::Infallible;

use parking_lot::Mutex;
use tandem_quant::MatrixSource;

use super::{
    Bank, Buf, Matrix, Real, State,
    ffn::{self, Mlp},
    linear::{linear, round_bf16},
    mhc, norm, router, sample,
    store::Data,
};
use crate::{
    Backend, BackendError, BatchDesc, DeviceInfo, Elem, ExpertSource, IndexKeyWeights, IndexerParams, KdaParams, KdaWeights, MhcGates,
    MhcParams, MhcWeights, MlaParams, Precision, RouterParams, SampleRow, Sampled, StateSpec,
};

/// The obvious, single-threaded backend. `ReferenceBackend<f32>` runs a whole model in tests; `ReferenceBackend<f64>` is the oracle (f32 at
/// its edges, f64 inside; [`Buf::values`] shows the full precision).
#[derive(Debug)]
pub struct ReferenceBackend<T: Real = f32> {
    device: DeviceInfo,
    precision: Precision,
    first_error: Mutex<Option<BackendError>>,
    number: std::marker::PhantomData<T>,
}

impl<T: Real> ReferenceBackend<T> {
    /// A backend that rounds as `precision` says.
    pub fn new(precision: Precision) -> Self {
        let device = DeviceInfo {
            arithmetic: format!("reference-{}", T::NAME),
            description: format!("reference ops in {}, one thread", T::NAME),
            memory_bytes: None,
        };
        Self { device, precision, first_error: Mutex::new(None), number: std::marker::PhantomData }
    }

    /// Runs an op; keeps the first failure for the next synchronisation.
    fn op(&self, op: &'static str, run: impl FnOnce() -> Result<(), String>) {
        if let Err(reason) = run() {
            self.first_error.lock().get_or_insert(self.error(op, reason));
        }
    }

    fn error(&self, op: &'static str, reason: String) -> BackendError {
        BackendError::Op { op, device: self.device.arithmetic.clone(), reason }
    }

    /// A row as matrix products see it.
    pub(super) fn input(&self, row: &[T]) -> Vec<T> {
        match self.precision {
            Precision::F32 => row.to_vec(),
            Precision::Bf16 => round_bf16(row),
        }
    }
}

impl<T: Real> Backend for ReferenceBackend<T> {
    type Buf = Buf<T>;
    type Weight = Matrix<T>;
    type State = State<T>;
    type Bank = Bank<T>;
    type Batch = BatchDesc;
    type Region = Infallible;
    type Window = Infallible;

    fn device(&self) -> &DeviceInfo {
        &self.device
    }

    fn precision(&self) -> Precision {
        self.precision
    }

    fn reserve(&self, _rows: usize, _context: usize) -> Result<(), BackendError> {
        Ok(())
    }

    fn alloc(&self, what: &str, elem: Elem, len: usize) -> Result<Buf<T>, BackendError> {
        Ok(Buf::zeroed(what, elem, len))
    }

    fn upload(&self, src: &[f32], dst: &mut Buf<T>, offset: usize) {
        self.op("upload", || {
            let dst = &mut dst.reals_mut(offset + src.len())?[offset..];
            dst.iter_mut().zip(src).for_each(|(d, &s)| *d = T::of_f32(s));
            Ok(())
        });
    }

    fn upload_i32(&self, src: &[i32], dst: &mut Buf<T>, offset: usize) {
        self.op("upload_i32", || {
            dst.ids_mut(offset + src.len())?[offset..].copy_from_slice(src);
            Ok(())
        });
    }

    fn download(&self, src: &Buf<T>, offset: usize, dst: &mut [f32]) -> Result<(), BackendError> {
        self.sync()?;
        let src = src.reals(offset + dst.len()).map_err(|e| self.error("download", e))?;
        dst.iter_mut().zip(&src[offset..]).for_each(|(d, s)| *d = s.to_f32());
        Ok(())
    }

    fn download_i32(&self, src: &Buf<T>, offset: usize, dst: &mut [i32]) -> Result<(), BackendError> {
        self.sync()?;
        let src = src.ids(offset + dst.len()).map_err(|e| self.error("download_i32", e))?;
        dst.copy_from_slice(&src[offset..]);
        Ok(())
    }

    fn sync(&self) -> Result<(), BackendError> {
        self.first_error.lock().take().map_or(Ok(()), Err)
    }

    fn lend(&self, _len: usize) -> Result<Option<Infallible>, BackendError> {
        Ok(None)
    }

    fn handle(&self, region: &Infallible) -> Vec<u8> {
        match *region {}
    }

    fn open(&self, _handle: &[u8]) -> Result<Infallible, String> {
        Err("the reference backend opens no memory of others".to_owned())
    }

    fn put(&self, _len: usize, _x: &Buf<T>, _from: usize, region: &Infallible, _at: usize) {
        match *region {}
    }

    fn take(&self, _len: usize, window: &Infallible, _at: usize, _out: &mut Buf<T>, _to: usize) {
        match *window {}
    }

    fn take_sum(&self, _len: usize, window: &Infallible, _at: usize, _out: &mut Buf<T>, _to: usize) {
        match *window {}
    }

    fn read_back(&self, region: &Infallible, _at: usize, _out: &mut [f32]) -> Result<(), BackendError> {
        match *region {}
    }

    fn weight(&self, parts: &[MatrixSource]) -> Result<Matrix<T>, BackendError> {
        Matrix::stack(parts)
    }

    fn vector(&self, what: &str, values: &[f32]) -> Result<Buf<T>, BackendError> {
        Ok(Buf { what: what.to_owned(), data: Data::Real(values.iter().map(|&v| T::of_f32(v)).collect()) })
    }

    fn bank(&self, first: u32, experts: Vec<ExpertSource>) -> Result<Bank<T>, BackendError> {
        Bank::load(first, experts)
    }

    fn state(&self, spec: &StateSpec) -> Result<State<T>, BackendError> {
        State::new(spec).map_err(|e| self.error("state", e))
    }

    fn batch(&self, _max_rows: usize, _max_segments: usize, _max_pages: usize) -> Result<BatchDesc, BackendError> {
        Ok(BatchDesc::default())
    }

    fn set_batch(&self, desc: &BatchDesc, batch: &mut BatchDesc) {
        batch.clone_from(desc);
    }

    fn prefill_grid(&self, _p: &KdaParams) -> Option<usize> {
        Some(1) // token by token
    }

    fn cut(&self, _p: &KdaParams, _rows: usize, at: usize) -> usize {
        at
    }

    fn state_reset(&self, state: &mut State<T>, slot: u32) {
        self.op("state_reset", || state.reset(slot as usize));
    }

    fn state_copy_slot(&self, state: &mut State<T>, from: u32, to: u32) {
        self.op("state_copy_slot", || state.copy_slot(from as usize, to as usize));
    }

    fn state_copy_page(&self, state: &mut State<T>, from: u32, to: u32) {
        self.op("state_copy_page", || state.copy_page(from as usize, to as usize));
    }

    fn state_export(&self, state: &State<T>, slot: u32, pages: &[u32]) -> Result<Vec<u8>, BackendError> {
        self.sync()?;
        state.export(slot as usize, pages).map_err(|e| self.error("state_export", e))
    }

    fn state_import(&self, state: &mut State<T>, slot: u32, pages: &[u32], snapshot: &[u8]) -> Result<(), BackendError> {
        state.import(slot as usize, pages, snapshot).map_err(|e| self.error("state_import", e))
    }

    fn embed(&self, batch: &BatchDesc, table: &Matrix<T>, params: &MhcParams, streams: &mut Buf<T>) {
        self.op("embed", || {
            let (n, d) = (params.streams, params.hidden);
            let out = streams.reals_mut(batch.tokens.len() * n * d)?;
            for (&token, out) in batch.tokens.iter().zip(out.chunks_exact_mut(n * d)) {
                let at = token as usize * d;
                let row = table.values.get(at..at + d).ok_or_else(|| format!("token {token} is not one of {}", table.rows))?;
                out.chunks_exact_mut(d).for_each(|o| o.copy_from_slice(row));
            }
            Ok(())
        });
    }

    fn mhc_pre(&self, rows: usize, streams: &Buf<T>, w: &MhcWeights<Self>, p: &MhcParams, x: &mut Buf<T>, gates: &mut MhcGates<Self>) {
        self.op("mhc_pre", || {
            let (n, d) = (p.streams, p.hidden);
            let site = mhc::Site { streams: n, rms_eps: T::of_f32(p.rms_eps), hc_eps: T::of_f32(p.hc_eps), iters: p.iters };
            let (base, scale, weight) = (w.base.reals(n * (n + 2))?, w.scale.reals(3)?, w.norm.reals(d)?);
            let (post, comb) = (gates.post.reals_mut(rows * n)?, gates.comb.reals_mut(rows * n * n)?);
            let (streams, x) = (streams.reals(rows * n * d)?, x.reals_mut(rows * d)?);
            for (r, s) in streams.chunks_exact(n * d).enumerate() {
                let g = mhc::gates(s, &w.fn_.values, base, scale, &site);
                post[r * n..(r + 1) * n].copy_from_slice(&g.post);
                comb[r * n * n..(r + 1) * n * n].copy_from_slice(&g.comb);
                x[r * d..(r + 1) * d].copy_from_slice(&norm::rms_norm(&mhc::read(s, &g.pre), weight, site.rms_eps));
            }
            Ok(())
        });
    }

    fn mhc_post(&self, rows: usize, y: &Buf<T>, gates: &MhcGates<Self>, p: &MhcParams, streams: &mut Buf<T>) {
        self.op("mhc_post", || {
            let (n, d) = (p.streams, p.hidden);
            let (y, post, comb) = (y.reals(rows * d)?, gates.post.reals(rows * n)?, gates.comb.reals(rows * n * n)?);
            for (r, s) in streams.reals_mut(rows * n * d)?.chunks_exact_mut(n * d).enumerate() {
                let mixed = mhc::post(s, &y[r * d..(r + 1) * d], &post[r * n..(r + 1) * n], &comb[r * n * n..(r + 1) * n * n]);
                s.copy_from_slice(&mixed);
            }
            Ok(())
        });
    }

    fn collapse(&self, select: &[u32], streams: &Buf<T>, norm: &Buf<T>, p: &MhcParams, out: &mut Buf<T>) {
        self.op("collapse", || {
            let (n, d) = (p.streams, p.hidden);
            let weight = norm.reals(d)?;
            for (&r, out) in select.iter().zip(out.reals_mut(select.len() * d)?.chunks_exact_mut(d)) {
                let s = &streams.reals((r as usize + 1) * n * d)?[r as usize * n * d..];
                out.copy_from_slice(&norm::rms_norm(&mhc::mean(s, n), weight, T::of_f32(p.rms_eps)));
            }
            Ok(())
        });
    }

    fn linear(&self, rows: usize, x: &Buf<T>, w: &Matrix<T>, out: &mut Buf<T>) {
        self.linear_strided(rows, x, w.cols, 0, w, out);
    }

    fn linear_strided(&self, rows: usize, x: &Buf<T>, stride: usize, col0: usize, w: &Matrix<T>, out: &mut Buf<T>) {
        self.op("linear", || {
            let columns = columns(stride, col0, w.cols)?;
            let x = x.reals(rows * stride)?;
            for (x, out) in x.chunks_exact(stride).zip(out.reals_mut(rows * w.rows)?.chunks_exact_mut(w.rows)) {
                out.copy_from_slice(&linear(&self.input(&x[columns.clone()]), &w.values));
            }
            Ok(())
        });
    }

    fn rms_norm(&self, rows: usize, x: &Buf<T>, stride: usize, col0: usize, width: usize, weight: &Buf<T>, eps: f32, out: &mut Buf<T>) {
        self.op("rms_norm", || {
            let columns = columns(stride, col0, width)?;
            let (x, weight) = (x.reals(rows * stride)?, weight.reals(width)?);
            for (x, out) in x.chunks_exact(stride).zip(out.reals_mut(rows * width)?.chunks_exact_mut(width)) {
                out.copy_from_slice(&norm::rms_norm(&x[columns.clone()], weight, T::of_f32(eps)));
            }
            Ok(())
        });
    }

    fn mlp(
        &self,
        rows: usize,
        x: &Buf<T>,
        gate_up: &Matrix<T>,
        down: &Matrix<T>,
        limit: Option<f32>,
        _hidden: &mut Buf<T>,
        out: &mut Buf<T>,
    ) {
        self.op("mlp", || {
            let (d, half) = (gate_up.cols, gate_up.values.len() / 2);
            let (gate, up) = gate_up.values.split_at(half);
            let w = Mlp { gate, up, down: &down.values };
            for (x, out) in x.reals(rows * d)?.chunks_exact(d).zip(out.reals_mut(rows * down.rows)?.chunks_exact_mut(down.rows)) {
                out.copy_from_slice(&ffn::mlp(x, &w, limit.map(T::of_f32), self.precision));
            }
            Ok(())
        });
    }

    fn add(&self, rows: usize, width: usize, x: &Buf<T>, y: &mut Buf<T>) {
        self.op("add", || {
            y.reals_mut(rows * width)?.iter_mut().zip(x.reals(rows * width)?).for_each(|(y, &x)| *y += x);
            Ok(())
        });
    }

    fn kda(
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
    ) {
        self.op("kda", || self.run_kda(batch, layer, proj, proj_stride, beta0, f, g, w, p, state, out));
    }

    fn mla_append(&self, batch: &BatchDesc, layer: usize, c: &Buf<T>, state: &mut State<T>) {
        self.op("mla_append", || self.run_mla_append(batch, layer, c, state));
    }

    fn index_append(
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
    ) {
        self.op("index_append", || self.run_index_append(batch, layer, proj, stride, key0, gate0, w, p, state));
    }

    fn index_select(
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
    ) {
        self.op("index_select", || self.run_index_select(batch, layer, iq, proj, stride, w0, p, state, selected));
    }

    fn mla_attend(
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
    ) {
        self.op("mla_attend", || self.run_mla_attend(batch, layer, q, kv_b, selected, width, p, state, out));
    }

    fn router(
        &self,
        rows: usize,
        x: &Buf<T>,
        w: &Matrix<T>,
        bias: &Buf<T>,
        p: &RouterParams,
        topk_ids: &mut Buf<T>,
        topk_weights: &mut Buf<T>,
    ) {
        self.op("router", || {
            let (topk, scale) = (p.topk, T::of_f32(p.scale));
            let routing = router::Routing { topk, groups: p.groups, topk_group: p.topk_group, norm_topk: p.norm_topk, scale };
            let (ids, weights) = (topk_ids.ids_mut(rows * topk)?, topk_weights.reals_mut(rows * topk)?);
            let bias = bias.reals(p.experts)?;
            for (r, x) in x.reals(rows * w.cols)?.chunks_exact(w.cols).enumerate() {
                for (i, (id, weight)) in router::route(&linear(x, &w.values), bias, &routing).into_iter().enumerate() {
                    ids[r * topk + i] = id as i32;
                    weights[r * topk + i] = weight;
                }
            }
            Ok(())
        });
    }

    fn experts(
        &self,
        rows: usize,
        x: &Buf<T>,
        k: usize,
        ids: &Buf<T>,
        weights: &Buf<T>,
        bank: &Bank<T>,
        limit: Option<f32>,
        out: &mut Buf<T>,
    ) {
        self.op("experts", || {
            let Some(d) = bank.experts.first().map(|[gate, ..]| gate.cols) else {
                out.clear();
                return Ok(());
            };
            let (ids, weights) = (ids.ids(rows * k)?, weights.reals(rows * k)?);
            let held = |id| bank.get(id).map(|[g, u, d]| Mlp { gate: &g.values, up: &u.values, down: &d.values });
            let x = x.reals(rows * d)?;
            for (r, out) in out.reals_mut(rows * d)?.chunks_exact_mut(d).enumerate() {
                let chosen: Vec<(i32, T)> = (r * k..(r + 1) * k).map(|i| (ids[i], weights[i])).collect();
                out.copy_from_slice(&ffn::partial(&x[r * d..(r + 1) * d], &chosen, held, limit.map(T::of_f32), self.precision));
            }
            Ok(())
        });
    }

    fn sample(&self, logits: &Buf<T>, vocab: usize, rows: &[SampleRow]) -> Result<Vec<Sampled>, BackendError> {
        self.sync()?;
        let one = |row: &SampleRow| {
            let at = row.row as usize * vocab;
            let ids = row.seen.iter().map(|s| s.0).chain(row.bias.iter().map(|b| b.0)).chain(row.forced);
            if let Some(id) = ids.into_iter().find(|&id| id as usize >= vocab) {
                return Err(format!("token {id} is not one of {vocab}"));
            }
            Ok(sample::sample(&logits.reals(at + vocab)?[at..], row))
        };
        rows.iter().map(one).collect::<Result<_, String>>().map_err(|e| self.error("sample", e))
    }
}

/// `[first, first + width)` of rows that are `stride` wide.
pub(super) fn columns(stride: usize, first: usize, width: usize) -> Result<std::ops::Range<usize>, String> {
    if width == 0 || first + width > stride {
        return Err(format!("columns {first}..{} do not fit rows of {stride}", first + width));
    }
    Ok(first..first + width)
}
