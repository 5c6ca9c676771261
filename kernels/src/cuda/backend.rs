//! [`Backend`] for [`CudaBackend`]: checks shapes, takes addresses, enqueues. The first failure waits for the next synchronisation.

use tandem_quant::MatrixSource;

use super::{
    CudaBackend, CudaBank, CudaBatch, CudaBuf, CudaState, CudaWeight,
    compile::{LEND, MHC, ROWS},
    driver::{Grid, launch},
    lend::{CudaRegion, CudaWindow},
    memory::{Scratch, Use, bytes_of, bytes_of_mut},
    mixers::kda_cut,
    ops::{Acts, MHC_FEW, four_streams},
};
use crate::{
    Backend, BackendError, BatchDesc, DeviceInfo, Elem, ExpertSource, IndexKeyWeights, IndexerParams, KdaParams, KdaWeights, MhcGates,
    MhcParams, MhcWeights, MlaParams, Precision, RouterParams, SampleRow, Sampled, StateSpec,
};

/// `Chosen` of rows.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
struct Chosen([i32; 256]);

impl CudaBackend {
    /// Enqueues an op; keeps the first failure.
    fn op(&self, op: &'static str, run: impl FnOnce(&mut Scratch) -> Result<(), String>) {
        let mut scratch = self.scratch.lock();
        let run = || self.device.bind().and_then(|()| run(&mut scratch));
        let done = match &self.times {
            Some(times) => times.lock().around(op, &self.device, run),
            None => run(),
        };
        if let Err(reason) = done {
            self.first_error.lock().get_or_insert(self.failed(op, reason));
        }
    }

    pub(super) fn failed(&self, op: &'static str, reason: String) -> BackendError {
        BackendError::Op { op, device: self.device_name(), reason }
    }

    fn device_name(&self) -> String {
        self.info.description.split(' ').next().unwrap_or("cuda").to_owned()
    }

    fn take_rows(&self, len: usize, window: &CudaWindow, at: usize, out: &CudaBuf, to: usize, sum: bool) -> Result<(), String> {
        let (from, out) = (window.place.range(at, len)?, out.f32s(to + len)? + 4 * to as u64);
        let grid = Grid::new([len.div_ceil(2048), 1, 1], 256);
        launch!(self, LEND, "take_rows", grid; from, out, i32::from(window.place.narrow()), i32::from(sum), len as i64)
    }

    /// The stream was just waited for.
    fn passed(&self, op: &'static str) -> Result<(), BackendError> {
        let Some(times) = &self.times else { return Ok(()) };
        times.lock().passed(self.device.name()).map_err(|e| self.failed(op, e))
    }

    fn pending(&self) -> Result<(), BackendError> {
        self.first_error.lock().take().map_or(Ok(()), Err)
    }
}

impl Backend for CudaBackend {
    type Buf = CudaBuf;
    type Weight = CudaWeight;
    type State = CudaState;
    type Bank = CudaBank;
    type Batch = CudaBatch;
    type Region = CudaRegion;
    type Window = CudaWindow;

    fn device(&self) -> &DeviceInfo {
        &self.info
    }

    fn precision(&self) -> Precision {
        self.precision
    }

    fn reserve(&self, _rows: usize, _context: usize) -> Result<(), BackendError> {
        // Scratch grows to what the first steps of each size need and stays; its sizes follow from weights that are not known here.
        Ok(())
    }

    fn alloc(&self, what: &str, elem: Elem, len: usize) -> Result<CudaBuf, BackendError> {
        CudaBuf::new(&self.device, what, elem, len)
    }

    fn upload(&self, src: &[f32], dst: &mut CudaBuf, offset: usize) {
        self.op("upload", |_| {
            let at = dst.f32s(offset + src.len())? + 4 * offset as u64;
            // SAFETY: inside of the buffer, as was just seen.
            unsafe { self.staging.lock().upload(bytes_of(src), at) }
        });
    }

    fn upload_i32(&self, src: &[i32], dst: &mut CudaBuf, offset: usize) {
        self.op("upload_i32", |_| {
            let at = dst.ids(offset + src.len())? + 4 * offset as u64;
            // SAFETY: inside of the buffer, as was just seen.
            unsafe { self.staging.lock().upload(bytes_of(src), at) }
        });
    }

    fn download(&self, src: &CudaBuf, offset: usize, dst: &mut [f32]) -> Result<(), BackendError> {
        self.pending()?;
        let at = src.f32s(offset + dst.len()).map_err(|e| self.failed("download", e))? + 4 * offset as u64;
        // SAFETY: inside of the buffer, as was just seen.
        unsafe { self.staging.lock().download(at, bytes_of_mut(dst)) }.map_err(|e| self.failed("download", e))
    }

    fn download_i32(&self, src: &CudaBuf, offset: usize, dst: &mut [i32]) -> Result<(), BackendError> {
        self.pending()?;
        let at = src.ids(offset + dst.len()).map_err(|e| self.failed("download_i32", e))? + 4 * offset as u64;
        // SAFETY: inside of the buffer, as was just seen.
        unsafe { self.staging.lock().download(at, bytes_of_mut(dst)) }.map_err(|e| self.failed("download_i32", e))
    }

    fn download_choice(&self, ids: &CudaBuf, weights: &CudaBuf, ids_to: &mut [i32], weights_to: &mut [f32]) -> Result<(), BackendError> {
        self.pending()?;
        let failed = |e| self.failed("download_choice", e);
        let (ids, weights) = (ids.ids(ids_to.len()).map_err(failed)?, weights.f32s(weights_to.len()).map_err(failed)?);
        // SAFETY: inside of the buffers, as was just seen.
        unsafe { self.staging.lock().download_all(&mut [(ids, bytes_of_mut(ids_to)), (weights, bytes_of_mut(weights_to))]) }.map_err(failed)
    }

    fn sync(&self) -> Result<(), BackendError> {
        let done = self.device.sync().map_err(|e| self.failed("sync", e));
        self.pending().and(done)
    }

    fn lend(&self, len: usize) -> Result<Option<CudaRegion>, BackendError> {
        CudaRegion::new(&self.device, self.precision, len).map(Some)
    }

    fn handle(&self, region: &CudaRegion) -> Vec<u8> {
        region.handle().as_bytes().to_vec()
    }

    fn open(&self, handle: &[u8]) -> Result<CudaWindow, String> {
        CudaWindow::open(&self.device, self.precision, handle)
    }

    fn put(&self, len: usize, x: &CudaBuf, from: usize, region: &CudaRegion, at: usize) {
        self.op("put", |_| {
            let (x, to) = (x.f32s(from + len)? + 4 * from as u64, region.place.range(at, len)?);
            let grid = Grid::new([len.div_ceil(1024), 1, 1], 256);
            launch!(self, LEND, "put_rows", grid; x, to, i32::from(region.place.narrow()), len as i64)
        });
    }

    fn take(&self, len: usize, window: &CudaWindow, at: usize, out: &mut CudaBuf, to: usize) {
        self.op("take", |_| self.take_rows(len, window, at, out, to, false));
    }

    fn take_sum(&self, len: usize, window: &CudaWindow, at: usize, out: &mut CudaBuf, to: usize) {
        self.op("take_sum", |_| self.take_rows(len, window, at, out, to, true));
    }

    fn read_back(&self, region: &CudaRegion, at: usize, out: &mut [f32]) -> Result<(), BackendError> {
        self.pending()?;
        let failed = |e| self.failed("read_back", e);
        let from = region.place.range(at, out.len()).map_err(failed)?;
        if !region.place.narrow() {
            // SAFETY: inside of the region, as was just seen.
            return unsafe { self.staging.lock().download(from, bytes_of_mut(out)) }.map_err(failed);
        }
        let mut narrow = vec![0u16; out.len()];
        // SAFETY: as above.
        unsafe { self.staging.lock().download(from, bytes_of_mut(&mut narrow)) }.map_err(failed)?;
        out.iter_mut().zip(narrow).for_each(|(out, v)| *out = half::bf16::from_bits(v).to_f32());
        Ok(())
    }

    fn non_finite(&self, rows: usize, width: usize, x: &CudaBuf) -> Result<Vec<u32>, BackendError> {
        let mut flags = vec![0i32; rows];
        let mut at = 0;
        self.op("non_finite", |scratch| {
            at = scratch.get(&self.device, Use::Flags, 4 * rows)?;
            launch!(self, LEND, "non_finite_rows", Grid::new([rows, 1, 1], 256); x.f32s(rows * width)?, width as i32, at)
        });
        self.pending()?;
        // SAFETY: the scratch has that many.
        unsafe { self.staging.lock().download(at, bytes_of_mut(&mut flags)) }.map_err(|e| self.failed("non_finite", e))?;
        self.passed("non_finite")?;
        Ok(flags.iter().zip(0..).filter(|(flag, _)| **flag != 0).map(|(_, row)| row).collect())
    }

    fn weight(&self, parts: &[MatrixSource]) -> Result<CudaWeight, BackendError> {
        self.load_weight(parts)
    }

    fn vector(&self, what: &str, values: &[f32]) -> Result<CudaBuf, BackendError> {
        let mut buf = self.alloc(what, Elem::F32, values.len())?;
        self.upload(values, &mut buf, 0);
        self.pending()?;
        Ok(buf)
    }

    fn bank(&self, first: u32, experts: Vec<ExpertSource>) -> Result<CudaBank, BackendError> {
        self.load_bank(first, &experts)
    }

    fn state(&self, spec: &StateSpec) -> Result<CudaState, BackendError> {
        if spec.kpool == 0 || spec.page_tokens == 0 || !spec.page_tokens.is_multiple_of(spec.kpool) {
            let reason = format!("pages of {} tokens are no multiple of pools of {}", spec.page_tokens, spec.kpool);
            return Err(self.failed("state", reason));
        }
        CudaState::new(self, spec, self.precision == Precision::Bf16)
    }

    fn batch(&self, max_rows: usize, max_segments: usize, max_pages: usize) -> Result<CudaBatch, BackendError> {
        Ok(CudaBatch::new(self.device.alloc("batch", 4 * CudaBatch::words(max_rows, max_segments, max_pages))?))
    }

    fn set_batch(&self, desc: &BatchDesc, batch: &mut CudaBatch) {
        self.op("set_batch", |_| batch.set(self, desc).inspect_err(|_| batch.desc = BatchDesc::default()));
    }

    fn cut(&self, _p: &KdaParams, rows: usize, at: usize) -> usize {
        kda_cut(rows, at)
    }

    fn state_reset(&self, state: &mut CudaState, slot: u32) {
        self.op("state_reset", |_| state.reset(slot));
    }

    fn state_copy_slot(&self, state: &mut CudaState, from: u32, to: u32) {
        self.op("state_copy_slot", |_| state.copy_slot(self, from, to));
    }

    fn state_copy_page(&self, state: &mut CudaState, from: u32, to: u32) {
        self.op("state_copy_page", |_| state.copy_page(self, from, to));
    }

    fn state_export(&self, state: &CudaState, slot: u32, pages: &[u32]) -> Result<Vec<u8>, BackendError> {
        self.pending()?;
        state.export(self, slot, pages).map_err(|e| self.failed("state_export", e))
    }

    fn state_import(&self, state: &mut CudaState, slot: u32, pages: &[u32], snapshot: &[u8]) -> Result<(), BackendError> {
        state.import(self, slot, pages, snapshot).map_err(|e| self.failed("state_import", e))
    }

    fn embed(&self, batch: &CudaBatch, table: &CudaWeight, p: &MhcParams, streams: &mut CudaBuf) {
        self.op("embed", |_| {
            let (n, d, rows, part) = (p.streams, p.hidden, batch.rows(), table.only("the embedding")?);
            if part.cols != d {
                return Err(format!("the embedding has {} columns where {d} are needed", part.cols));
            }
            if let Some(token) = batch.desc.tokens.iter().find(|&&t| t as usize >= part.rows) {
                return Err(format!("token {token} is not one of {}", part.rows));
            }
            let out = streams.f32s(rows * n * d)?;
            launch!(self, ROWS, "embed", Grid::new([rows, 1, 1], 256); part.matrix, batch.tokens(), n as i32, out)
        });
    }

    fn mhc_pre(&self, rows: usize, streams: &CudaBuf, w: &MhcWeights<Self>, p: &MhcParams, x: &mut CudaBuf, gates: &mut MhcGates<Self>) {
        self.op("mhc_pre", |scratch| {
            let streams = streams.f32s(rows * p.streams * p.hidden)?;
            self.read_streams(scratch, rows, None, w, p, streams, x, gates)
        });
    }

    fn mhc_post(&self, rows: usize, y: &CudaBuf, gates: &MhcGates<Self>, p: &MhcParams, streams: &mut CudaBuf) {
        self.op("mhc_post", |scratch| {
            let y = gate_addresses(rows, y, gates, p)?;
            self.run_mhc_mix(scratch, rows, Some(y), None, p, streams.f32s(rows * p.streams * p.hidden)?).map(drop)
        });
    }

    fn mhc_boundary(
        &self,
        rows: usize,
        y: &CudaBuf,
        gates: &mut MhcGates<Self>,
        next: &MhcWeights<Self>,
        p: &MhcParams,
        streams: &mut CudaBuf,
        x: &mut CudaBuf,
    ) {
        self.op("mhc_boundary", |scratch| {
            let y = gate_addresses(rows, y, gates, p)?;
            let streams = streams.f32s(rows * p.streams * p.hidden)?;
            self.read_streams(scratch, rows, Some(y), next, p, streams, x, gates)
        });
    }

    fn collapse(&self, select: &[u32], streams: &CudaBuf, norm: &CudaBuf, p: &MhcParams, out: &mut CudaBuf) {
        self.op("collapse", |_| {
            let (n, d) = (p.streams, p.hidden);
            let all = streams.f32s(select.iter().max().map_or(0, |&r| (r as usize + 1) * n * d))?;
            let (norm, out) = (norm.f32s(d)?, out.f32s(select.len() * d)?);
            for (i, rows) in select.chunks(256).enumerate() {
                let mut chosen = Chosen([0; 256]);
                chosen.0.iter_mut().zip(rows).for_each(|(c, r)| *c = *r as i32);
                let (grid, out) = (Grid::new([rows.len(), 1, 1], 256), out + (4 * i * 256 * d) as u64);
                launch!(self, ROWS, "collapse", grid; chosen, all, n as i32, d as i32, norm, p.rms_eps, out)?;
            }
            Ok(())
        });
    }

    fn linear(&self, rows: usize, x: &CudaBuf, w: &CudaWeight, out: &mut CudaBuf) {
        self.linear_strided(rows, x, w.cols, 0, w, out);
    }

    fn linear_strided(&self, rows: usize, x: &CudaBuf, stride: usize, col0: usize, w: &CudaWeight, out: &mut CudaBuf) {
        self.op("linear", |scratch| {
            columns(stride, col0, w.cols)?;
            let x = Acts { at: x.f32s(rows * stride)? + 4 * col0 as u64, stride };
            self.run_linear(scratch, rows, x, w, out.f32s(rows * w.out)?, true)
        });
    }

    fn rms_norm(&self, rows: usize, x: &CudaBuf, stride: usize, col0: usize, width: usize, weight: &CudaBuf, eps: f32, out: &mut CudaBuf) {
        self.op("rms_norm", |_| {
            columns(stride, col0, width)?;
            let (x, weight, out) = (x.f32s(rows * stride)? + 4 * col0 as u64, weight.f32s(width)?, out.f32s(rows * width)?);
            launch!(self, ROWS, "rms_norm", Grid::new([rows, 1, 1], 256); x, stride as i32, width as i32, weight, eps, out)
        });
    }

    fn mlp(
        &self,
        rows: usize,
        x: &CudaBuf,
        gate_up: &CudaWeight,
        down: &CudaWeight,
        limit: Option<f32>,
        hidden: &mut CudaBuf,
        out: &mut CudaBuf,
    ) {
        self.op("mlp", |scratch| {
            let (d, inter) = (gate_up.cols, down.cols);
            if gate_up.out != 2 * inter {
                return Err(format!("gate_up has {} rows where {} are needed", gate_up.out, 2 * inter));
            }
            let x = Acts { at: x.f32s(rows * d)?, stride: d };
            let (hidden, out) = (hidden.f32s(rows * 2 * inter)?, out.f32s(rows * down.out)?);
            self.run_mlp(scratch, rows, x, gate_up, down, limit, hidden, out)
        });
    }

    fn add(&self, rows: usize, width: usize, x: &CudaBuf, y: &mut CudaBuf) {
        self.op("add", |_| {
            let n = rows * width;
            let (x, y) = (x.f32s(n)?, y.f32s(n)?);
            launch!(self, ROWS, "add", Grid::new([n.div_ceil(256), 1, 1], 256); x, y, n as i64)
        });
    }

    fn kda(
        &self,
        batch: &CudaBatch,
        layer: usize,
        proj: &CudaBuf,
        proj_stride: usize,
        beta0: usize,
        f: &CudaBuf,
        g: &CudaBuf,
        w: &KdaWeights<Self>,
        p: &KdaParams,
        state: &mut CudaState,
        out: &mut CudaBuf,
    ) {
        self.op("kda", |scratch| self.run_kda(scratch, batch, layer, proj, proj_stride, beta0, f, g, w, p, state, out));
    }

    fn mla_append(&self, batch: &CudaBatch, layer: usize, c: &CudaBuf, state: &mut CudaState) {
        self.op("mla_append", |_| self.run_mla_append(batch, layer, c, state));
    }

    fn index_append(
        &self,
        batch: &CudaBatch,
        layer: usize,
        proj: &CudaBuf,
        stride: usize,
        key0: usize,
        gate0: usize,
        w: &IndexKeyWeights<Self>,
        p: &IndexerParams,
        state: &mut CudaState,
    ) {
        self.op("index_append", |_| self.run_index_append(batch, layer, proj, stride, key0, gate0, w, p, state));
    }

    fn index_select(
        &self,
        batch: &CudaBatch,
        layer: usize,
        iq: &CudaBuf,
        proj: &CudaBuf,
        stride: usize,
        w0: usize,
        p: &IndexerParams,
        state: &CudaState,
        selected: &mut CudaBuf,
    ) {
        self.op("index_select", |scratch| self.run_index_select(scratch, batch, layer, iq, proj, stride, w0, p, state, selected));
    }

    fn mla_attend(
        &self,
        batch: &CudaBatch,
        layer: usize,
        q: &CudaBuf,
        kv_b: &CudaWeight,
        selected: &CudaBuf,
        width: usize,
        p: &MlaParams,
        state: &CudaState,
        out: &mut CudaBuf,
    ) {
        self.op("mla_attend", |scratch| self.run_mla_attend(scratch, batch, layer, q, kv_b, selected, width, p, state, out));
    }

    fn router(
        &self,
        rows: usize,
        x: &CudaBuf,
        w: &CudaWeight,
        bias: &CudaBuf,
        p: &RouterParams,
        topk_ids: &mut CudaBuf,
        topk_weights: &mut CudaBuf,
    ) {
        self.op("router", |scratch| {
            if w.out != p.experts {
                return Err(format!("the router has {} rows where {} are needed", w.out, p.experts));
            }
            let x = Acts { at: x.f32s(rows * w.cols)?, stride: w.cols };
            let (ids, weights) = (topk_ids.ids(rows * p.topk)?, topk_weights.f32s(rows * p.topk)?);
            self.run_router(scratch, rows, x, w, bias.f32s(p.experts)?, p, ids, weights)
        });
    }

    fn experts(
        &self,
        rows: usize,
        x: &CudaBuf,
        k: usize,
        ids: &CudaBuf,
        weights: &CudaBuf,
        bank: &CudaBank,
        limit: Option<f32>,
        out: &mut CudaBuf,
    ) {
        self.op("experts", |scratch| {
            if bank.held > 1024 || k > 32 {
                return Err(format!("{} experts, {k} of them a token; up to 1024 and 32 work", bank.held));
            }
            let d = bank.hidden;
            let (x, out) = (x.f32s(rows * d)?, out.f32s(rows * d)?);
            let chosen = (ids.ids(rows * k)?, weights.f32s(rows * k)?);
            self.run_experts(scratch, rows, x, k, chosen, bank, limit, out)
        });
    }

    fn sample(&self, logits: &CudaBuf, vocab: usize, rows: &[SampleRow]) -> Result<Vec<Sampled>, BackendError> {
        self.pending()?;
        let sampled = self.run_sample(logits, vocab, rows).map_err(|e| self.failed("sample", e))?;
        self.passed("sample").map(|()| sampled)
    }
}

/// Output of a sublayer and the gates that end it.
fn gate_addresses(rows: usize, y: &CudaBuf, gates: &MhcGates<CudaBackend>, p: &MhcParams) -> Result<(u64, u64, u64), String> {
    let n = p.streams;
    Ok((y.f32s(rows * p.hidden)?, gates.post.f32s(rows * n)?, gates.comb.f32s(rows * n * n)?))
}

impl CudaBackend {
    /// Streams (after the end of a sublayer, with `y`) → gates and the normed input of the next.
    fn read_streams(
        &self,
        scratch: &mut Scratch,
        rows: usize,
        y: Option<(u64, u64, u64)>,
        w: &MhcWeights<Self>,
        p: &MhcParams,
        streams: u64,
        x: &CudaBuf,
        gates: &MhcGates<Self>,
    ) -> Result<(), String> {
        let (n, d) = (p.streams, p.hidden);
        let part = w.fn_.only("fn")?;
        if (part.rows, part.cols) != (n * (n + 2), n * d) {
            return Err(format!("fn is [{}, {}] where [{}, {}] is needed", part.rows, part.cols, n * (n + 2), n * d));
        }
        let partial = self.run_mhc_mix(scratch, rows, y, Some(part), p, streams)?;
        let (base, scale, norm) = (w.base.f32s(n * (n + 2))?, w.scale.f32s(3)?, w.norm.f32s(d)?);
        let (x, post, comb) = (x.f32s(rows * d)?, gates.post.f32s(rows * n)?, gates.comb.f32s(rows * n * n)?);
        let (grid, iters) = (Grid::new([rows, 1, 1], 512), p.iters as i32);
        if four_streams(p) {
            let (grid, d) = (Grid { threads: 544, ..grid }, d as i32);
            let later = rows > MHC_FEW;
            launch!(self, MHC, "mhc_read4", grid; partial, base, scale, norm, streams, d, p.rms_eps, p.hc_eps, iters, i32::from(later), x, post,
                comb)?;
            if later {
                launch!(self, MHC, "mhc_comb4", Grid::new([rows.div_ceil(64), 1, 1], 64); comb, p.hc_eps, iters, rows as i32)?;
            }
            return Ok(());
        }
        launch!(self, MHC, "mhc_read", grid; partial, base, scale, norm, streams, n as i32, d as i32, p.rms_eps, p.hc_eps, iters, x, post, comb)
    }
}

/// Whether columns `[first, first + width)` lie inside of rows of `stride`.
pub(super) fn columns(stride: usize, first: usize, width: usize) -> Result<(), String> {
    if width == 0 || first + width > stride {
        return Err(format!("columns {first}..{} do not fit rows of {stride}", first + width));
    }
    Ok(())
}
