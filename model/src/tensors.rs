//! Typed access for workers: a layer's tensors, an expert's matrices.
//!
//! Matrices stay in their stored type and share the mapped bytes; vectors are read as f32. Shapes are `[out, in]`, row-major; names in
//! the comments are the published ones.
//!
//! Neighbours: `inventory.rs` has the same names; workers turn these into backend weights.

use std::ops::Range;

use tandem_quant::MatrixSource;

use crate::{
    Checkpoint, Ffn, Geometry, Indexer, Mixer, ModelError,
    checkpoint::{KEY_UP, NEG_EXP, VALUE_UP},
};

/// All tensors of one layer but its routed experts.
#[derive(Clone, Debug)]
pub struct LayerTensors {
    /// input_layernorm `[D]`.
    pub input_norm: Vec<f32>,
    /// post_attention_layernorm `[D]`.
    pub post_norm: Vec<f32>,
    /// mHC site before the mixer.
    pub attn_hc: HcTensors,
    /// mHC site before the FFN.
    pub ffn_hc: HcTensors,
    /// Token mixer.
    pub mixer: MixerTensors,
    /// Feed-forward part.
    pub ffn: FfnTensors,
}

/// An mHC site.
#[derive(Clone, Debug)]
pub struct HcTensors {
    /// `[N(N+2), N·D]`.
    pub fn_: MatrixSource,
    /// `[N(N+2)]`.
    pub base: Vec<f32>,
    /// `[3]`.
    pub scale: Vec<f32>,
}

/// Token mixer of a layer.
#[derive(Clone, Debug)]
pub enum MixerTensors {
    /// Kimi delta attention.
    Kda(KdaTensors),
    /// Multi-head latent attention.
    Mla(MlaTensors),
}

/// KDA: H heads of width Dh.
#[derive(Clone, Debug)]
pub struct KdaTensors {
    /// q_proj `[H·Dh, D]`.
    pub q: MatrixSource,
    /// k_proj `[H·Dh, D]`.
    pub k: MatrixSource,
    /// v_proj `[H·Dh, D]`.
    pub v: MatrixSource,
    /// f_a_proj `[Dh, D]`.
    pub f_a: MatrixSource,
    /// f_b_proj `[H·Dh, Dh]`.
    pub f_b: MatrixSource,
    /// g_a_proj `[Dh, D]`.
    pub g_a: MatrixSource,
    /// g_b_proj `[H·Dh, Dh]`.
    pub g_b: MatrixSource,
    /// b_proj `[H, D]`.
    pub b: MatrixSource,
    /// o_proj `[D, H·Dh]`.
    pub o: MatrixSource,
    /// Depthwise taps `[3·H·Dh, conv]`: q, then k, then v channels.
    pub conv: Vec<f32>,
    /// A_log `[H]`.
    pub a_log: Vec<f32>,
    /// dt_bias `[H·Dh]`.
    pub dt_bias: Vec<f32>,
    /// o_norm `[Dh]`.
    pub o_norm: Vec<f32>,
}

/// MLA: H heads.
#[derive(Clone, Debug)]
pub struct MlaTensors {
    /// q_a_proj `[q_lora, D]`.
    pub q_a: MatrixSource,
    /// q_b_proj `[H·qk, q_lora]`.
    pub q_b: MatrixSource,
    /// kv_a_proj_with_mqa `[kv_lora, D]`.
    pub kv_a: MatrixSource,
    /// kv_b_proj `[H·(qk+v), kv_lora]`: per head its k rows, then its v rows.
    pub kv_b: MatrixSource,
    /// o_proj `[D, H·v]`.
    pub o: MatrixSource,
    /// q_a_layernorm `[q_lora]`.
    pub q_a_norm: Vec<f32>,
    /// kv_a_layernorm `[kv_lora]`.
    pub kv_a_norm: Vec<f32>,
    /// `None` on a layer that shares the selection of the layer before it.
    pub indexer: Option<IndexerTensors>,
}

/// The indexer of an MLA layer: I heads of width Di.
#[derive(Clone, Debug)]
pub struct IndexerTensors {
    /// wq_b `[I·Di, q_lora]`.
    pub wq_b: MatrixSource,
    /// wk `[Di, D]`.
    pub wk: MatrixSource,
    /// weights_proj `[I, D]`.
    pub weights: MatrixSource,
    /// index_kpool_compress_gate `[Di, D]`.
    pub gate: MatrixSource,
    /// k_norm.weight `[Di]`.
    pub k_norm_w: Vec<f32>,
    /// k_norm.bias `[Di]`.
    pub k_norm_b: Vec<f32>,
    /// index_kpool_compress_ape `[kpool, Di]`.
    pub ape: Vec<f32>,
}

/// Feed-forward part of a layer.
#[derive(Clone, Debug)]
pub enum FfnTensors {
    /// One gated MLP.
    Dense(DenseTensors),
    /// Router and shared expert (the routed experts: [`Checkpoint::expert`]).
    Moe(MoeTensors),
}

/// A gated MLP of width I.
#[derive(Clone, Debug)]
pub struct DenseTensors {
    /// `[I, D]`.
    pub gate: MatrixSource,
    /// `[I, D]`.
    pub up: MatrixSource,
    /// `[D, I]`.
    pub down: MatrixSource,
}

impl DenseTensors {
    /// Gate, up and down.
    pub fn into_matrices(self) -> [MatrixSource; 3] {
        [self.gate, self.up, self.down]
    }
}

/// The matrices of one routed expert, whole or a slice of its intermediate dimension.
pub type ExpertMatrices = DenseTensors;

/// What a MoE layer has beside its routed experts.
#[derive(Clone, Debug)]
pub struct MoeTensors {
    /// gate.weight `[E, D]`.
    pub router: MatrixSource,
    /// gate.e_score_correction_bias `[E]`.
    pub bias: Vec<f32>,
    /// The shared expert.
    pub shared: DenseTensors,
}

impl Checkpoint {
    /// embed_tokens `[vocab, D]`.
    ///
    /// # Errors
    /// None after a successful open, but for a file that was taken away.
    pub fn embed(&self) -> Result<MatrixSource, ModelError> {
        self.matrix("embed_tokens.weight")
    }

    /// lm_head `[vocab, D]` (the embedding, where the checkpoint ties them).
    ///
    /// # Errors
    /// As [`Checkpoint::embed`].
    pub fn lm_head(&self) -> Result<MatrixSource, ModelError> {
        if self.has("lm_head.weight") { self.matrix("lm_head.weight") } else { self.embed() }
    }

    /// norm.weight `[D]`.
    ///
    /// # Errors
    /// As [`Checkpoint::embed`].
    pub fn final_norm(&self) -> Result<Vec<f32>, ModelError> {
        self.vector("norm.weight")
    }

    /// All tensors of layer `i` but its routed experts.
    ///
    /// # Errors
    /// No such layer.
    pub fn layer(&self, i: usize) -> Result<LayerTensors, ModelError> {
        let g = self.geometry();
        let spec = g.layer_specs.get(i).ok_or_else(|| no_layer(g, i))?;
        let pre = format!("layers.{i}.");
        let attn = format!("{pre}self_attn.");
        Ok(LayerTensors {
            input_norm: self.vector(&format!("{pre}input_layernorm.weight"))?,
            post_norm: self.vector(&format!("{pre}post_attention_layernorm.weight"))?,
            attn_hc: self.hc(&format!("{pre}hc_attn_"))?,
            ffn_hc: self.hc(&format!("{pre}hc_ffn_"))?,
            mixer: match spec.mixer {
                Mixer::Kda => MixerTensors::Kda(self.kda(&attn)?),
                Mixer::Mla { indexer } => MixerTensors::Mla(self.mla(&attn, indexer)?),
            },
            ffn: match spec.ffn {
                Ffn::Dense => FfnTensors::Dense(self.mlp(&format!("{pre}mlp."))?),
                Ffn::Moe => FfnTensors::Moe(MoeTensors {
                    router: self.matrix(&format!("{pre}mlp.gate.weight"))?,
                    bias: self.vector(&format!("{pre}mlp.gate.e_score_correction_bias"))?,
                    shared: self.mlp(&format!("{pre}mlp.shared_experts."))?,
                }),
            },
        })
    }

    /// The matrices of a routed expert: gate and up `[I, D]`, down `[D, I]`.
    ///
    /// # Errors
    /// No such layer, a layer without experts, or no such expert.
    pub fn expert(&self, layer: usize, expert: usize) -> Result<ExpertMatrices, ModelError> {
        let g = self.geometry();
        match g.layer_specs.get(layer) {
            None => return Err(no_layer(g, layer)),
            Some(spec) if spec.ffn == Ffn::Dense => {
                let kind = format!("layer {layer} is dense");
                return Err(ModelError::Index { what: "expert", index: expert, count: 0, kind });
            }
            Some(_) if expert >= g.experts => {
                let kind = "n_routed_experts".to_owned();
                return Err(ModelError::Index { what: "expert", index: expert, count: g.experts, kind });
            }
            Some(_) => {}
        }
        let pre = format!("layers.{layer}.mlp.experts.");
        let member = |name: &str| self.stack_member(&format!("{pre}{name}"), expert);
        if self.has(&format!("{pre}gate_up_proj")) {
            let (inter, gate_up) = (g.moe_intermediate, member("gate_up_proj")?);
            return Ok(DenseTensors {
                gate: gate_up.row_window(0..inter)?,
                up: gate_up.row_window(inter..2 * inter)?,
                down: member("down_proj")?,
            });
        }
        if self.has(&format!("{pre}gate_proj")) {
            return Ok(DenseTensors { gate: member("gate_proj")?, up: member("up_proj")?, down: member("down_proj")? });
        }
        self.mlp(&format!("{pre}{expert}."))
    }

    /// A slice of the intermediate dimension of a routed expert, as windows: rows of gate and up, columns of down.
    ///
    /// # Errors
    /// As [`Checkpoint::expert`]; a cut that does not fall on a block of down_proj.
    pub fn expert_slice(&self, layer: usize, expert: usize, ffn: &Range<u32>) -> Result<ExpertMatrices, ModelError> {
        let (whole, ffn) = (self.expert(layer, expert)?, ffn.start as usize..ffn.end as usize);
        Ok(DenseTensors {
            gate: whole.gate.row_window(ffn.clone())?,
            up: whole.up.row_window(ffn.clone())?,
            down: whole.down.col_window(ffn)?,
        })
    }

    fn hc(&self, pre: &str) -> Result<HcTensors, ModelError> {
        Ok(HcTensors {
            fn_: self.matrix(&format!("{pre}fn"))?,
            base: self.vector(&format!("{pre}base"))?,
            scale: self.vector(&format!("{pre}scale"))?,
        })
    }

    fn kda(&self, pre: &str) -> Result<KdaTensors, ModelError> {
        let m = |name: &str| self.matrix(&format!("{pre}{name}.weight"));
        let v = |name: &str| self.vector(&format!("{pre}{name}"));
        let conv = if self.has(&format!("{pre}conv1d.weight")) {
            v("conv1d.weight")?
        } else {
            [v("q_conv1d.weight")?, v("k_conv1d.weight")?, v("v_conv1d.weight")?].concat()
        };
        Ok(KdaTensors {
            q: m("q_proj")?,
            k: m("k_proj")?,
            v: m("v_proj")?,
            f_a: m("f_a_proj")?,
            f_b: m("f_b_proj")?,
            g_a: m("g_a_proj")?,
            g_b: m("g_b_proj")?,
            b: m("b_proj")?,
            o: m("o_proj")?,
            conv,
            a_log: self.a_log(pre)?,
            dt_bias: v("dt_bias")?,
            o_norm: v("o_norm.weight")?,
        })
    }

    fn mla(&self, pre: &str, indexer: Indexer) -> Result<MlaTensors, ModelError> {
        let m = |name: &str| self.matrix(&format!("{pre}{name}"));
        let v = |name: &str| self.vector(&format!("{pre}{name}"));
        Ok(MlaTensors {
            q_a: m("q_a_proj.weight")?,
            q_b: m("q_b_proj.weight")?,
            kv_a: m("kv_a_proj_with_mqa.weight")?,
            kv_b: self.kv_b(pre)?,
            o: m("o_proj.weight")?,
            q_a_norm: v("q_a_layernorm.weight")?,
            kv_a_norm: v("kv_a_layernorm.weight")?,
            indexer: match indexer {
                Indexer::Shared => None,
                Indexer::Full => Some(IndexerTensors {
                    wq_b: m("indexer.wq_b.weight")?,
                    wk: m("indexer.wk.weight")?,
                    weights: m("indexer.weights_proj.weight")?,
                    gate: m("indexer.index_kpool_compress_gate")?,
                    k_norm_w: v("indexer.k_norm.weight")?,
                    k_norm_b: v("indexer.k_norm.bias")?,
                    ape: v("indexer.index_kpool_compress_ape")?,
                }),
            },
        })
    }

    /// A_log, or what a GGUF writer made of it.
    fn a_log(&self, pre: &str) -> Result<Vec<f32>, ModelError> {
        let stored = format!("{pre}A_log.{NEG_EXP}");
        let Some(entry) = self.entry(&stored) else { return self.vector(&format!("{pre}A_log")) };
        let values = self.vector(&stored)?;
        match values.iter().find(|v| v.is_nan() || **v >= 0.0) {
            Some(odd) => Err(self.bad(entry, "values below 0 (−exp of A_log)", &odd.to_string())),
            None => Ok(values.into_iter().map(|v| (-v).ln()).collect()),
        }
    }

    /// kv_b_proj `[H·(qk+v), latent]`, put together where it is stored in halves (k rows transposed per head). The halves are joined as
    /// f32: a transposed block type has no rows to share.
    fn kv_b(&self, pre: &str) -> Result<MatrixSource, ModelError> {
        let name = format!("{pre}kv_b_proj.weight");
        let key_up = format!("{name}.{KEY_UP}");
        if !self.has(&key_up) {
            return self.matrix(&name);
        }
        let g = self.geometry();
        let mut joined = Vec::with_capacity(g.attn_heads * (g.qk_dim + g.v_dim) * g.kv_lora);
        for head in 0..g.attn_heads {
            let k = self.stack_member(&key_up, head)?.to_f32();
            joined.extend((0..g.qk_dim).flat_map(|q| k[q..].iter().step_by(g.qk_dim).copied()));
            joined.extend(self.stack_member(&format!("{name}.{VALUE_UP}"), head)?.to_f32());
        }
        Ok(MatrixSource::from_f32(name, g.attn_heads * (g.qk_dim + g.v_dim), g.kv_lora, &joined)?)
    }

    pub(crate) fn mlp(&self, pre: &str) -> Result<DenseTensors, ModelError> {
        let m = |name: &str| self.matrix(&format!("{pre}{name}.weight"));
        Ok(DenseTensors { gate: m("gate_proj")?, up: m("up_proj")?, down: m("down_proj")? })
    }
}

fn no_layer(g: &Geometry, layer: usize) -> ModelError {
    ModelError::Index { what: "layer", index: layer, count: g.layers, kind: "num_hidden_layers".to_owned() }
}
