//! A plain forward pass over any backend, with every intermediate that the debug goldens have. Not the serving loop: no overlap, no
//! hop, one sequence, buffers made as they are needed.

use tandem_kernels::*;
use tandem_model::{Checkpoint, DenseTensors, FfnTensors, Geometry, HcTensors, MixerTensors};

/// What one layer did to the rows of a pass.
#[derive(Default)]
pub struct LayerTrace {
    pub attn_out: Vec<f32>,
    pub ffn_out: Vec<f32>,
    pub streams: Vec<f32>,
    /// Chosen experts with their weights, in the backend's order; empty on a dense layer.
    pub experts: Vec<Vec<(i32, f32)>>,
    /// Selected positions `[R, width]`; empty on a KDA layer.
    pub selected: Vec<i32>,
}

/// One pass over consecutive rows.
pub struct Trace {
    pub embed: Vec<f32>,
    pub layers: Vec<LayerTrace>,
    pub logits: Vec<f32>,
}

struct Mlp<B: Backend> {
    gate_up: B::Weight,
    down: B::Weight,
    width: usize,
}

enum Mixing<B: Backend> {
    Kda { proj: B::Weight, f_b: B::Weight, g_b: B::Weight, o: B::Weight, mixer: KdaWeights<B> },
    Mla(Box<MlaLayer<B>>),
}

struct MlaLayer<B: Backend> {
    proj: B::Weight,
    q_b: B::Weight,
    kv_b: B::Weight,
    o: B::Weight,
    q_norm: B::Buf,
    kv_norm: B::Buf,
    indexer: Option<(B::Weight, IndexKeyWeights<B>)>,
}

struct Moe<B: Backend> {
    router: B::Weight,
    bias: B::Buf,
    bank: B::Bank,
}

struct Layer<B: Backend> {
    attn_hc: MhcWeights<B>,
    ffn_hc: MhcWeights<B>,
    mixing: Mixing<B>,
    mlp: Mlp<B>,
    moe: Option<Moe<B>>,
}

/// A checkpoint on a backend, with the state of one sequence in slot 1 and pages in reverse order.
pub struct Model<B: Backend> {
    backend: B,
    g: Geometry,
    embed: B::Weight,
    head: B::Weight,
    norm: B::Buf,
    layers: Vec<Layer<B>>,
    state: B::State,
    page_tokens: usize,
    pages: Vec<u32>,
}

impl<B: Backend> Model<B> {
    pub fn load(backend: B, checkpoint: &Checkpoint, context: usize) -> Self {
        let g = checkpoint.geometry().clone();
        let page_tokens = StateSpec::page_tokens_for(g.kpool);
        let pages = context.div_ceil(page_tokens);
        let spec = StateSpec {
            slots: 2,
            pages,
            page_tokens,
            kda_layers: g.kda_layers().len(),
            mla_layers: g.mla_layers().len(),
            kda: KdaDims { heads: g.kda_heads, head_dim: g.kda_head_dim, conv: g.conv },
            latent: g.kv_lora,
            index_dim: g.index_dim,
            kpool: g.kpool,
        };
        backend.reserve(context, context).unwrap();
        let loader = Loader { b: &backend, g: &g, checkpoint };
        let layers = (0..g.layers).map(|i| loader.layer(i)).collect();
        Self {
            embed: backend.weight(&[checkpoint.embed().unwrap()]).unwrap(),
            head: backend.weight(&[checkpoint.lm_head().unwrap()]).unwrap(),
            norm: backend.vector("norm", &checkpoint.final_norm().unwrap()).unwrap(),
            state: backend.state(&spec).unwrap(),
            layers,
            page_tokens,
            pages: (0..pages as u32).rev().collect(),
            g,
            backend,
        }
    }

    /// Starts the sequence anew.
    pub fn reset(&mut self) {
        self.backend.state_reset(&mut self.state, 1);
    }

    /// Runs `tokens` at positions `pos0..`.
    pub fn forward(&mut self, tokens: &[u32], pos0: usize) -> Trace {
        let (b, g) = (&self.backend, &self.g);
        let (rows, d, n) = (tokens.len(), g.hidden, g.streams);
        let used = (pos0 + rows).div_ceil(self.page_tokens);
        let segment = Segment { slot: 1, row0: 0, rows: rows as u32, pos0: pos0 as u32, pages: 0..used as u32 };
        let desc = BatchDesc { tokens: tokens.to_vec(), segments: vec![segment], pages: self.pages[..used].to_vec() };
        let mut batch = b.batch(rows, 1, used).unwrap();
        b.set_batch(&desc, &mut batch);

        let p = MhcParams { streams: n, hidden: d, rms_eps: g.rms_eps, hc_eps: g.hc_eps, iters: g.sinkhorn_iters };
        let floats = |len: usize| b.alloc("test", Elem::F32, rows * len).unwrap();
        let (mut streams, mut x, mut y) = (floats(n * d), floats(d), floats(d));
        let mut gates = MhcGates { post: floats(n), comb: floats(n * n) };
        let width = g.index_topk + if g.always_tail { g.kpool.max(1) - 1 } else { 0 };
        let mut selected = b.alloc("selected", Elem::I32, rows * width).unwrap();
        b.embed(&batch, &self.embed, &p, &mut streams);
        let embed = read(b, &streams, rows * n * d).chunks(n * d).flat_map(|s| s[..d].to_vec()).collect();

        let (mut kda, mut mla) = (0, 0);
        let mut layers = Vec::new();
        b.mhc_pre(rows, &streams, &self.layers[0].attn_hc, &p, &mut x, &mut gates);
        for (i, layer) in self.layers.iter().enumerate() {
            let mut trace = LayerTrace::default();
            match &layer.mixing {
                Mixing::Kda { proj, f_b, g_b, o, mixer } => {
                    let (hd, h) = (g.kda_width(), g.kda_heads);
                    let stride = 3 * hd + h + 2 * g.kda_head_dim;
                    let (mut wide, mut f, mut gate, mut out) = (floats(stride), floats(hd), floats(hd), floats(hd));
                    let dims = KdaDims { heads: h, head_dim: g.kda_head_dim, conv: g.conv };
                    let params = KdaParams { dims, lower_bound: g.gate_lower_bound, eps: g.rms_eps };
                    b.linear(rows, &x, proj, &mut wide);
                    b.linear_strided(rows, &wide, stride, 3 * hd + h, f_b, &mut f);
                    b.linear_strided(rows, &wide, stride, 3 * hd + h + g.kda_head_dim, g_b, &mut gate);
                    b.kda(&batch, kda, &wide, stride, 3 * hd, &f, &gate, mixer, &params, &mut self.state, &mut out);
                    b.linear(rows, &out, o, &mut y);
                    kda += 1;
                }
                Mixing::Mla(m) => {
                    let (lora, latent, dim) = (g.q_lora, g.kv_lora, g.index_dim);
                    let stride = lora + latent + if m.indexer.is_some() { 2 * dim + g.index_heads } else { 0 };
                    let (mut wide, mut cq, mut c) = (floats(stride), floats(lora), floats(latent));
                    let (mut q, mut out) = (floats(g.attn_heads * g.qk_dim), floats(g.attn_heads * g.v_dim));
                    b.linear(rows, &x, &m.proj, &mut wide);
                    b.rms_norm(rows, &wide, stride, 0, lora, &m.q_norm, g.rms_eps, &mut cq);
                    b.rms_norm(rows, &wide, stride, lora, latent, &m.kv_norm, g.rms_eps, &mut c);
                    b.linear(rows, &cq, &m.q_b, &mut q);
                    b.mla_append(&batch, mla, &c, &mut self.state);
                    if let Some((wq_b, keys)) = &m.indexer {
                        let params =
                            IndexerParams { heads: g.index_heads, dim, kpool: g.kpool, topk: g.index_topk, always_tail: g.always_tail };
                        let key0 = lora + latent;
                        let mut iq = floats(g.index_heads * dim);
                        b.linear(rows, &cq, wq_b, &mut iq);
                        b.index_append(&batch, mla, &wide, stride, key0, key0 + dim, keys, &params, &mut self.state);
                        b.index_select(&batch, mla, &iq, &wide, stride, key0 + 2 * dim, &params, &self.state, &mut selected);
                    }
                    let params = MlaParams { heads: g.attn_heads, qk_dim: g.qk_dim, v_dim: g.v_dim, latent };
                    b.mla_attend(&batch, mla, &q, &m.kv_b, &selected, width, &params, &self.state, &mut out);
                    b.linear(rows, &out, &m.o, &mut y);
                    trace.selected = vec![0; rows * width];
                    b.download_i32(&selected, 0, &mut trace.selected).unwrap();
                    mla += 1;
                }
            }
            trace.attn_out = read(b, &y, rows * d);
            b.mhc_boundary(rows, &y, &mut gates, &layer.ffn_hc, &p, &mut streams, &mut x);

            let mut hidden = floats(2 * layer.mlp.width);
            b.mlp(rows, &x, &layer.mlp.gate_up, &layer.mlp.down, g.swiglu_limit, &mut hidden, &mut y);
            if let Some(moe) = &layer.moe {
                let (mut ids, mut weights, mut partial) = (b.alloc("ids", Elem::I32, rows * g.topk).unwrap(), floats(g.topk), floats(d));
                let params = RouterParams {
                    experts: g.experts,
                    topk: g.topk,
                    groups: g.groups,
                    topk_group: g.topk_group,
                    norm_topk: g.norm_topk_prob,
                    scale: g.routed_scale,
                };
                b.router(rows, &x, &moe.router, &moe.bias, &params, &mut ids, &mut weights);
                b.experts(rows, &x, g.topk, &ids, &weights, &moe.bank, g.swiglu_limit, &mut partial);
                b.add(rows, d, &partial, &mut y);
                let mut chosen = vec![0; rows * g.topk];
                b.download_i32(&ids, 0, &mut chosen).unwrap();
                let pairs: Vec<_> = chosen.into_iter().zip(read(b, &weights, rows * g.topk)).collect();
                trace.experts = pairs.chunks(g.topk).map(<[_]>::to_vec).collect();
            }
            trace.ffn_out = read(b, &y, rows * d);
            match self.layers.get(i + 1) {
                Some(next) => b.mhc_boundary(rows, &y, &mut gates, &next.attn_hc, &p, &mut streams, &mut x),
                None => b.mhc_post(rows, &y, &gates, &p, &mut streams),
            }
            trace.streams = read(b, &streams, rows * n * d);
            layers.push(trace);
        }
        let select: Vec<u32> = (0..rows as u32).collect();
        let mut logits = floats(g.vocab);
        b.collapse(&select, &streams, &self.norm, &p, &mut x);
        b.linear(rows, &x, &self.head, &mut logits);
        Trace { embed, layers, logits: read(b, &logits, rows * g.vocab) }
    }
}

fn read<B: Backend>(b: &B, buf: &B::Buf, len: usize) -> Vec<f32> {
    let mut out = vec![0.0; len];
    b.download(buf, 0, &mut out).unwrap();
    out
}

struct Loader<'a, B: Backend> {
    b: &'a B,
    g: &'a Geometry,
    checkpoint: &'a Checkpoint,
}

impl<B: Backend> Loader<'_, B> {
    fn vector(&self, values: &[f32]) -> B::Buf {
        self.b.vector("test", values).unwrap()
    }

    fn layer(&self, i: usize) -> Layer<B> {
        let b = self.b;
        let t = self.checkpoint.layer(i).unwrap();
        let mixing = match t.mixer {
            MixerTensors::Kda(k) => Mixing::Kda {
                proj: b.weight(&[k.q, k.k, k.v, k.b, k.f_a, k.g_a]).unwrap(),
                f_b: b.weight(&[k.f_b]).unwrap(),
                g_b: b.weight(&[k.g_b]).unwrap(),
                o: b.weight(&[k.o]).unwrap(),
                mixer: KdaWeights {
                    conv: self.vector(&k.conv),
                    a_log: self.vector(&k.a_log),
                    dt_bias: self.vector(&k.dt_bias),
                    o_norm: self.vector(&k.o_norm),
                },
            },
            MixerTensors::Mla(m) => {
                let mut parts = vec![m.q_a, m.kv_a];
                let indexer = m.indexer.map(|x| {
                    parts.extend([x.wk, x.gate, x.weights]);
                    let (norm_weight, norm_bias) = (self.vector(&x.k_norm_w), self.vector(&x.k_norm_b));
                    (b.weight(&[x.wq_b]).unwrap(), IndexKeyWeights { norm_weight, norm_bias, ape: self.vector(&x.ape) })
                });
                Mixing::Mla(Box::new(MlaLayer {
                    proj: b.weight(&parts).unwrap(),
                    q_b: b.weight(&[m.q_b]).unwrap(),
                    kv_b: b.weight(&[m.kv_b]).unwrap(),
                    o: b.weight(&[m.o]).unwrap(),
                    q_norm: self.vector(&m.q_a_norm),
                    kv_norm: self.vector(&m.kv_a_norm),
                    indexer,
                }))
            }
        };
        let (mlp, moe) = match t.ffn {
            FfnTensors::Dense(m) => (self.mlp(m), None),
            FfnTensors::Moe(m) => {
                let experts = (0..self.g.experts).map(|e| self.checkpoint.expert(i, e).unwrap());
                let sources = experts.map(|e| ExpertSource { gate: e.gate, up: e.up, down: e.down }).collect();
                let (router, bias) = (b.weight(&[m.router]).unwrap(), self.vector(&m.bias));
                (self.mlp(m.shared), Some(Moe { router, bias, bank: b.bank(0, sources).unwrap() }))
            }
        };
        Layer { attn_hc: self.site(t.attn_hc, &t.input_norm), ffn_hc: self.site(t.ffn_hc, &t.post_norm), mixing, mlp, moe }
    }

    fn site(&self, hc: HcTensors, norm: &[f32]) -> MhcWeights<B> {
        MhcWeights {
            fn_: self.b.weight(&[hc.fn_]).unwrap(),
            base: self.vector(&hc.base),
            scale: self.vector(&hc.scale),
            norm: self.vector(norm),
        }
    }

    fn mlp(&self, m: DenseTensors) -> Mlp<B> {
        let width = m.gate.rows();
        Mlp { gate_up: self.b.weight(&[m.gate, m.up]).unwrap(), down: self.b.weight(&[m.down]).unwrap(), width }
    }
}
